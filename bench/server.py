"""A server of the queue in a process of its own, as a deployment has it, in a runtime directory of its own; and what
memory it has."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness import ROOT
from transferqueue.server.runtime_directory import SHARED_MEMORY, arena_root, remove_stale_arenas

START_S = 20


def own_bytes(pid: int) -> int:
    """Resident anonymous and file pages of a process; shared memory is not among them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "RssFile"))}
    return sum(int(size) for size in sizes.values()) * 1024


def arena_bytes(pid: int) -> int:
    """Pages that the files in shared memory have which a process holds open, each file once."""
    files = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target, found = os.readlink(fd), os.stat(fd)
        except OSError:
            continue
        if target.startswith(("/dev/shm", "/memfd")):
            files[found.st_ino] = found.st_blocks * 512
    return sum(files.values())


class Server:
    """Start it, use `address`, `stop` it; it ends with this process, too. tcp: listen at a port of loopback, or of this
    host, too: `tcp_address`.

    durability: its level. before: what its command is put after, such as what has it run on another host. words: more
    of it.
    """

    def __init__(
        self,
        arena_bytes: str = "6GiB",
        tcp: bool | str = False,
        durability: str = "memory",
        before: Sequence[str] = (),
        words: Sequence[str] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-tq-"))
        wanted = ["--address", f"ipc://{self.folder}/control.sock", "--arena-bytes", arena_bytes]
        if tcp:
            wanted += ["--tcp", f"{tcp if isinstance(tcp, str) else '127.0.0.1'}:0"]
        if durability != "memory":
            wanted += ["--durability", durability, "--state", f"{self.folder}/state"]
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "transferqueue.cli", "serve", "--lifeline", *wanted, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TRANSFERQUEUE_RUNTIME": str(self.folder)},
        )
        self.addresses = self._announced()
        self.address = self.addresses[0]

    def _announced(self) -> list[str]:
        line = self.process.stdout.readline().split() if self.process.stdout else []
        if not line or line[0] != "ready":
            raise RuntimeError(f"the server did not start: it said {' '.join(line)!r}")
        return line[1:]

    @property
    def tcp_address(self) -> str:
        return next(address for address in self.addresses if address.startswith("tcp:"))

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(START_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        if (root := arena_root(SHARED_MEMORY)) is not None:
            remove_stale_arenas(root)  # of a state that is no more
