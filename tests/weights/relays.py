"""Relays as processes, and what crosses the links between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import transferqueue as tq

GENEROUS_S = 60.0
MIB = 1 << 20
TENSORS = 8


def model(**changed: int) -> dict[str, np.ndarray]:
    """Eight tensors of a MiB that no compression would make smaller."""
    names = {f"w{at}": at for at in range(TENSORS)} | changed
    return {name: np.random.default_rng(seed).integers(0, 255, MIB, dtype=np.uint8) for name, seed in names.items()}


def channel_bytes(queue: tq.Queue) -> int:
    channel = queue.stats().channels.get("policy")
    return 0 if channel is None else channel.bytes


def until(condition: Callable[[], bool]) -> None:
    """Return once the condition, which asks a server, is true. Fails if it is not within `GENEROUS_S`."""
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < deadline, f"not true after {GENEROUS_S:g} s"


class Crossed:
    """Counts the bytes that a link passes on, both ways; from `holds_at` on it passes nothing more until `let_go`."""

    def __init__(self) -> None:
        self.bytes = 0
        self._passed = threading.Condition()
        self.holds_at: int | None = None
        self.holding = threading.Event()
        self._open = threading.Event()

    def __call__(self, _passed: int, data: bytes, _up: bool) -> bytes:
        with self._passed:
            self.bytes += len(data)
            self._passed.notify_all()
        if self.holds_at is not None and self.bytes > self.holds_at:
            self.holding.set()
            self._open.wait(GENEROUS_S)
        return data

    def reached(self, count: int) -> None:
        """Wait until so many bytes have passed."""
        with self._passed:
            assert self._passed.wait_for(lambda: self.bytes >= count, GENEROUS_S), f"{self.bytes} of {count}"

    def let_go(self) -> None:
        """Pass on what is held, and all that comes."""
        self.holds_at = None
        self._open.set()


class RelayProcess:
    """`transferqueue relay`. served: also the server of its host; then `ipc` and `tcp` are its addresses."""

    def __init__(self, *words: str, served: Path | None = None, runtime: Path | None = None) -> None:
        at = ["--serve", f"ipc://{served}/w.sock", "--serve", "tcp://127.0.0.1:0"] if served else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "transferqueue.cli", "relay", "--channel", "policy", "--remote", *at, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ({"TRANSFERQUEUE_RUNTIME": str(runtime)} if runtime else {}),
        )
        if served:
            assert self.process.stdout is not None
            ready, self.ipc, self.tcp = self.process.stdout.readline().split()
            assert ready == "ready"

    def told(self, text: str) -> str:
        """The next line of stderr that has `text` in it."""
        assert self.process.stderr is not None
        while text not in (line := self.process.stderr.readline()):
            assert line, f"the relay ended and never said {text!r}"
        return line

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Have it end; the exit code."""
        self.process.send_signal(how)
        return self.ended()

    def ended(self) -> int:
        """Wait until it has; the exit code."""
        code = self.process.wait(GENEROUS_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code


@contextmanager
def relaying(*words: str, served: Path | None = None) -> Iterator[RelayProcess]:
    """A relay for a while."""
    found = RelayProcess(*words, served=served)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.stop(signal.SIGKILL)
        else:
            found.ended()
