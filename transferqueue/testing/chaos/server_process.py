"""The server of a run: the command that a person gives, in a process of its own, and what can be done to it.

Linux says of a process which children it has and which ports it listens at; so the life that serves is found under its
supervisor, and the port of bulk transfers, which each life chooses, without asking the server.
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

from transferqueue.testing.chaos.fault_plan import ChaosSettings

ARENA_BYTES: Final = 64 << 20
STOP_S: Final = 30.0
DISK_BYTES: Final = 4096
"""A journal of any content is larger: with this as the largest size of a file, its next page finds the disk full."""


class ServerUnderTest:
    """``transferqueue serve --supervise`` under `directory`. tcp: the port it listens at too, with keys."""

    def __init__(self, directory: Path, run: ChaosSettings, tcp: int | None) -> None:
        self.directory: Final = directory
        self.address: Final = f"ipc://{directory}/run/q.sock"
        self._state: Final = directory / "state"
        self._command: Final = [
            *(sys.executable, "-m", "transferqueue.cli", "serve", "--address", self.address, "--supervise"),
            *("--durability", run.durability.value, "--state", str(self._state), "--arena-bytes", str(ARENA_BYTES)),
            *(() if tcp is None else ("--tcp", f"127.0.0.1:{tcp}", "--keys", str(directory / "keys"))),
        ]
        self.start()

    def start(self) -> None:
        """Start it; it says on `said` when it is ready."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=self.directory
        )
        if self.process.stdout is None:
            raise RuntimeError("a pipe was asked for")
        self.said = self.process.stdout.fileno()

    @property
    def life(self) -> int | None:
        """Process number of the life that serves now; None between two."""
        supervisor = self.process.pid
        try:
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        except FileNotFoundError:
            return None
        return int(children[0]) if children else None

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the life that serves; whether there was one."""
        life = self.life
        if life is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(life, number)
            return True
        return False

    def fill_disk(self) -> bool:
        """No file of this life may grow any more: its next commit fails as on a full disk. Needs no privilege."""
        life = self.life
        if life is None:
            return False
        _, most = resource.prlimit(life, resource.RLIMIT_FSIZE)
        resource.prlimit(life, resource.RLIMIT_FSIZE, (DISK_BYTES, most))
        return True

    def ports(self) -> list[int]:
        """All tcp ports at which the life that serves listens."""
        life = self.life
        return [] if life is None else sorted(_listening(life))

    def ask_to_stop(self) -> None:
        """SIGTERM, as a service does it."""
        self.signal(signal.SIGCONT)
        self.process.terminate()

    def stop(self) -> int:
        """Have it end in order; its exit code."""
        self.ask_to_stop()
        return self.process.wait(STOP_S)

    def close(self) -> None:
        """Hear it no more; after its end."""
        if self.process.stdout is not None:
            self.process.stdout.close()

    def remove(self) -> None:
        """End it however, and remove what it keeps: its state, and its arena on shared memory."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        self.close()
        with suppress(OSError):
            arena = (self._state / (self._state / "arena").readlink()).parent  # the link is relative to where it is
            if arena != self._state:
                shutil.rmtree(arena)
                arena.parent.rmdir()  # unless other servers have theirs there


def _listening(process: int) -> Iterator[int]:
    sockets = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(link))
    for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            yield int(fields[1].rpartition(":")[2], 16)
