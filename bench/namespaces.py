"""Two hosts on one machine: network namespaces with a veth pair between them, made without privileges.

`inside(module, ...)` runs a module of this package in a user and a network namespace of its own; there `Far` makes a
second network namespace and the pair. All of it goes away with the first process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

from bench.harness import ROOT

NEAR, FAR = "10.77.0.1", "10.77.0.2"
START_S = 20
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""With process numbers of their own: when the first process ends, so does every other."""


def why_not() -> str:
    """Why namespaces cannot be had here; empty: they can."""
    for program in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "link", "add", "tq0", "type", "veth"], check=False, capture_output=True, text=True
    )
    return tried.stderr.strip() if tried.returncode else ""


def inside(module: str, *arguments: str, timeout_s: float) -> None:
    """Run `python -m module arguments` in namespaces of its own. Raises if it fails."""
    subprocess.run([*_UNSHARE, sys.executable, "-m", module, *arguments], cwd=ROOT, check=True, timeout=timeout_s)


class Far:
    """The second host. `command`: what to put before a command so that it runs there. own_processes: with process
    numbers and shared memory of its own, so that the queue takes its clients for those of another machine, and sends
    them bytes instead of mapping memory. Their locks must lie there too.
    """

    def __init__(self, *, own_processes: bool = False) -> None:
        own = ("--pid", "--fork", "--kill-child", "--mount-proc") if own_processes else ()
        script = "mount -t tmpfs tmpfs /dev/shm && " if own_processes else ""
        self._holder = subprocess.Popen(
            ["unshare", "--net", *own, "sh", "-c", f"{script}echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._holder.stdout is None or self._holder.stdout.readline() != "ready\n":
            raise RuntimeError("a second network namespace cannot be made here")
        entered = ("--net", "--pid", "--mount") if own_processes else ("--net",)
        self.command = ["nsenter", "--target", str(self._inside() if own_processes else self._holder.pid), *entered]
        if own_processes:
            self.command += ["env", "TRANSFERQUEUE_RUNTIME=/dev/shm/runtime"]
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "tq0", "type", "veth", "peer", "name", "tq1", "netns", str(self._holder.pid))
        _run("ip", "addr", "add", f"{NEAR}/24", "dev", "tq0")
        _run("ip", "link", "set", "tq0", "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "addr", "add", f"{FAR}/24", "dev", "tq1")
        self.run("ip", "link", "set", "tq1", "up")

    def _inside(self) -> int:
        """The process number of the holder's child, the first process there."""
        holder = self._holder.pid
        return int(Path(f"/proc/{holder}/task/{holder}/children").read_text(encoding="ascii").split()[0])

    def run(self, *command: str) -> None:
        """Run a command there."""
        _run(*self.command, *command)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command there; its input and output are pipes."""
        return subprocess.Popen(
            [*self.command, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def slow(self, mbit_per_s: int) -> None:
        """What leaves the far host takes turns at this rate from now on."""
        self.run("tc", "qdisc", "replace", "dev", "tq1", "root", "tbf", *_rate(mbit_per_s))

    def fast(self) -> None:
        """The link as it was."""
        self.run("tc", "qdisc", "del", "dev", "tq1", "root")

    def close(self) -> None:
        """End the far host."""
        self._holder.communicate(timeout=START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rate(mbit_per_s: int) -> list[str]:
    return ["rate", f"{mbit_per_s}mbit", "burst", "128k", "latency", "50ms"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=START_S, env={**os.environ, "LC_ALL": "C"})
