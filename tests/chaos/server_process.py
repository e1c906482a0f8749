"""The server of a run: ``transferqueue serve --supervise`` as a child process, and the faults of a run.

The supervisor starts one serving process after the other. Linux lists the children of a process and the ports at which
it listens. So this module finds the serving process, and the port for bulk transfers that it chose, without asking the
server.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.chaos.fault_plan import ChaosSettings
from transferqueue.transport.bulk.carriers import chosen_carrier

ARENA_BYTES: Final = 64 << 20
SPILL_ARENA_BYTES: Final = 16 << 20
"""So little that blocks go to the disk all the time: the flood puts as much in a second."""
SPILL_BYTES: Final = 48 << 20
"""So little that a few seconds without leases fill it, too."""
STOP_S: Final = 30.0
DISK_BYTES: Final = 4096
"""Smaller than any journal: with this limit on the size of a file, the next write to the journal fails as on a full
disk."""


class ServerUnderTest:
    """``transferqueue serve --supervise`` in `directory`. tcp: ``host:port`` to listen at too, with keys; None:
    none."""

    def __init__(self, directory: Path, run: ChaosSettings, tcp: str | None) -> None:
        self.directory: Final = directory
        self.address: Final = f"ipc://{directory}/run/q.sock"
        self._state: Final = directory / "state"
        self._command: Final = [
            *(sys.executable, "-m", "transferqueue.cli", "serve", "--address", self.address, "--supervise"),
            *(self._spilling() if run.spill else self._durable(run)),
            *(() if tcp is None else ("--tcp", tcp, "--keys", str(directory / "keys"))),
            *(("--plain-bytes",) if tcp is not None and chosen_carrier() is not None else ()),
        ]
        self._outlives: Final = run.durability.survives_crash
        self._file_bytes: tuple[int, int] | None = None
        """The limit on the size of a file of the serving process, before `fill_disk`."""
        self.start()

    def _durable(self, run: ChaosSettings) -> list[str]:
        return ["--durability", run.durability.value, "--state", str(self._state), "--arena-bytes", str(ARENA_BYTES)]

    def _spilling(self) -> list[str]:
        spill = ["--spill-dir", str(self.directory / "spill"), "--spill-bytes", str(SPILL_BYTES)]
        return ["--arena-bytes", str(SPILL_ARENA_BYTES), *spill]

    def start(self) -> None:
        """Start the server. It prints "ready" to the descriptor `output`."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=self.directory
        )
        if self.process.stdout is None:
            raise RuntimeError("a pipe was asked for")
        self.output = self.process.stdout.fileno()

    @property
    def serving_pid(self) -> int | None:
        """Process number of the serving process; None between two."""
        supervisor = self.process.pid
        try:
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        except FileNotFoundError:
            return None
        return int(children[0]) if children else None

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the serving process. False if there is none."""
        pid = self.serving_pid
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def fill_disk(self) -> bool:
        """Forbid the serving process to let files grow: its next commit, or block that is spilled, fails as on a full
        disk. Needs no privilege."""
        pid = self.serving_pid
        if pid is None:
            return False
        least, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        self._file_bytes = self._file_bytes or (least, most)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (DISK_BYTES, most))
        return True

    def empty_disk(self) -> None:
        """End `fill_disk`, for a server that survived it."""
        pid = self.serving_pid
        if pid is not None and self._file_bytes is not None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, self._file_bytes)

    def ports(self) -> list[int]:
        """All TCP ports at which the serving process listens."""
        pid = self.serving_pid
        return [] if pid is None else sorted(_listening(pid))

    def ask_to_stop(self) -> None:
        """Send SIGTERM, as a service manager does."""
        self.signal(signal.SIGCONT)
        self.process.terminate()

    def stop(self) -> int:
        """Stop the server in order; its exit code."""
        self.ask_to_stop()
        return self.process.wait(STOP_S)

    def close(self) -> None:
        """Close the pipe from the server, after its end."""
        if self.process.stdout is not None:
            self.process.stdout.close()

    def remove(self) -> None:
        """Kill the server if it runs, and remove its state and its arena in shared memory. A server without a state
        directory removes its arena itself."""
        if not self._outlives and self.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.stop()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        self.close()
        with suppress(OSError):
            arena = (
                self._state / (self._state / "arena").readlink()
            ).parent  # the link is relative to its own directory
            if arena != self._state:
                shutil.rmtree(arena)
                arena.parent.rmdir()  # fails if other servers have arenas there


def _listening(process: int) -> Iterator[int]:
    sockets = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(link))
    for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            yield int(fields[1].rpartition(":")[2], 16)
