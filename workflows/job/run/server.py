"""The queue of a run: ``transferqueue serve`` as a supervised process of its own, so that it may be killed like any
other.

At durability ``process`` and ``disk`` the state lies in the folder of the run, and the next server goes on with it:
after its own crash (its supervisor starts it again), and after that of the whole run (`train --resume`). The server
ends with this process, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from transferqueue.errors import PermissionDenied, Unreachable
from transferqueue.server.runtime_directory import SHARED_MEMORY
from transferqueue.storage.row_files.reader import JOB_ROWS
from transferqueue.transport import IpcAddress, check_listening
from transferqueue.workflows.job.settings.job import QueueSettings
from transferqueue.workflows.job.settings.sizes import GIB

READY_S: Final = 60.0
"""Longest start of a server. It reads its journal first, when a run is resumed."""
STOP_S: Final = 15.0
STARTS_MAX: Final = 3
"""A server that is killed before it listens is started again so often."""
_LAST_LINES: Final = 5
_PREFIX: Final = "transferqueue-run-"
_SOCKET: Final = "control.sock"
_RUNTIME: Final = "runtime"
"""File of the run's folder that names the directory of the socket, to clean up after a killed run."""


class KilledInStart(Unreachable):
    """A signal ended the server before it listened."""


class RunServer:
    """The server of the run in `directory`. A context manager: entering starts it and waits until it listens, leaving
    stops it.

    address: for clients. link: of the page, "" without one. page: also serve the page. Raises `Unreachable` with the
    server's last words if it does not listen within a minute, or is killed three times before it does.
    """

    def __init__(self, directory: Path, settings: QueueSettings, *, page: bool = False) -> None:
        self.link = ""
        self._directory = directory.absolute()
        self._settings = settings
        self._page = page
        self._lines: list[str] = []
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        for _ in range(1, STARTS_MAX):
            with suppress(KilledInStart):
                self._enter()
                return self
        self._enter()
        return self

    def _enter(self) -> None:
        # A socket's path has at most 107 bytes, which the folder of a run may exceed.
        remove_runtime(self._directory)
        self._runtime = tempfile.mkdtemp(prefix=_PREFIX)
        (self._directory / _RUNTIME).write_text(self._runtime, encoding="utf-8")
        self.address = f"ipc://{self._runtime}/{_SOCKET}"
        try:
            self._start()
        except BaseException:  # Ctrl-C too: end the started processes
            shutil.rmtree(self._runtime, ignore_errors=True)
            raise

    def _start(self) -> None:
        """Start the server and wait until it listens."""
        self._lines = []
        self._ready.clear()
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal reaches the run alone, which then ends the server
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="server", daemon=True)
        self._reader.start()
        try:
            self._ready.wait(READY_S)
            if not any(line.startswith("ready") for line in self._lines):
                killed = self._killed_by()
                self.stop()
                words = killed or " | ".join(self._lines[-_LAST_LINES:]) or "it said nothing"
                error = KilledInStart if killed else Unreachable
                raise error(f"the server of the run in {self._directory} did not start: {words}")
        except KeyboardInterrupt:
            self.stop()
            raise

    def _killed_by(self) -> str:
        """Say which signal ended the server; nothing if it runs or ended by itself."""
        with suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(1.0)) < 0:
                return f"it was killed by {signal.Signals(-code).name}"
        return ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def state(self) -> Path:
        """Where the server keeps what outlives it."""
        return self._directory / "state"

    def pids(self) -> list[int]:
        """Process ids of the supervisor and, while there is one, of the serving process."""
        supervisor = self._process.pid
        try:
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text(encoding="ascii").split()
        except FileNotFoundError:
            return []
        return [supervisor, *map(int, children)]

    def stop(self) -> None:
        """Stop the server and wait until it and its supervisor are gone. Its state stays, for a later run."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):  # a server whose supervisor was killed, or one that hangs
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._reader.join(STOP_S)
        remove_runtime(self._directory)

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "transferqueue.cli", "serve", "--address", self.address, "--lifeline"]
        command += ["--arena-bytes", str(int(self._settings.memory_gib * GIB))]
        command += ["--snapshots", str(self._directory / "snapshots"), "--records", str(self._directory / JOB_ROWS)]
        if self._settings.durability != "memory":
            command += ["--durability", self._settings.durability, "--state", str(self.state), "--supervise"]
        return [*command, *(("--web", "0") if self._page else ())]

    def _read(self, output: IO[str]) -> None:
        """Copy the server's output to its log until it ends; note when it listens and where its page is."""
        with (self._directory / "server.log").open("a", encoding="utf-8") as log, output:
            for line in output:
                stamp = time.strftime("%H:%M:%S")
                word, _, rest = line.strip().partition(" ")
                log.write(f"{stamp} {word} (link not kept)\n" if word == "web" else f"{stamp} {line}")
                log.flush()
                self._lines = [*self._lines[-20:], line.strip()]
                if word == "web":
                    self.link = rest
                if word == ("web" if self._page else "ready"):
                    self._ready.set()
        self._ready.set()


def discard_state(directory: Path) -> int:
    """Remove the state of the server of a run, its shared memory too; snapshots stay. Returns the bytes that it had.
    Does nothing where there is none."""
    state = directory / "state"
    freed = _backed_bytes(state)
    with suppress(OSError):
        arena = (state / (state / "arena").readlink()).resolve().parent
        if arena.parent == SHARED_MEMORY / f"transferqueue-{os.geteuid()}":  # nothing else that a link may lead to
            freed += _backed_bytes(arena)
            shutil.rmtree(arena)
            arena.parent.rmdir()  # fails if other servers have arenas there
    shutil.rmtree(state, ignore_errors=True)
    return freed


def _backed_bytes(directory: Path) -> int:
    """Bytes of memory or disk behind the files of a directory."""
    return sum(512 * file.lstat().st_blocks for file in directory.rglob("*") if not file.is_dir())


def running_address(directory: Path) -> str:
    """The address of the server of the run in `directory`; "" if it has none, or none listens. Blocks for at most a
    second, for one that does not answer. `PermissionDenied` if this user may not see whether it has one, `Unreachable`
    if the file that names it cannot be read."""
    address = ""
    try:
        path = Path((directory / _RUNTIME).read_text(encoding="utf-8")) / _SOCKET
        address = f"ipc://{path}"
        check_listening(IpcAddress(path))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return ""
    except PermissionError as error:
        raise PermissionDenied(
            f"whether the run in {directory} goes on cannot be seen: its socket is not yours; ask as its user"
        ) from error
    except OSError as error:  # the kernel does not say: a server may listen
        if not address:
            raise Unreachable(f"whether the run in {directory} goes on cannot be seen: {error}") from error
    return address


def remove_runtime(directory: Path) -> None:
    """Remove the directory of the socket that an earlier server of the run in `directory` left; it must be gone. Does
    nothing where there is none."""
    noted = directory / _RUNTIME
    with suppress(OSError):
        runtime = Path(noted.read_text(encoding="utf-8"))
        if runtime.name.startswith(_PREFIX) and runtime.lstat().st_uid == os.geteuid():
            shutil.rmtree(runtime)
    noted.unlink(missing_ok=True)
