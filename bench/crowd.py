"""Many clients in a few processes, rows offered to them at a fixed rate, and how late each row was, window by window.

Every client waits for a row, says when it got it, ends it, and says when that was answered. `sessions.py` runs clients
of the queue so, `echo.py` clients of bare sockets: what the machine itself adds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

import numpy as np

from bench.harness import percentile

CLIENTS_PER_PROCESS = 250
TICK_S = 0.05
"""Between two puts. Each offers what is due by then."""
TELL_S = 1.0
"""How often a process of clients sends what it has measured."""
LATE_S = 3.0
"""A window is shown this long after its end: its last rows and their figures are on the way."""
END_S = 120.0
SHARES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
STEPS = ("delivered", "acked")
"""From the put of a row to its client, and to the answer to the client's ack."""


class Samples:
    """What the clients of one process have measured: put, delivered, acked, by the clock that all processes share."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._taken: list[tuple[float, float, float]] = []

    def add(self, put: float, delivered: float, acked: float) -> None:
        self._taken.append((put, delivered, acked))

    def tell(self) -> None:
        taken, self._taken = self._taken, []
        if taken:
            self._control.send(np.array(taken))

    async def tell_always(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(TELL_S)
            self.tell()


class Crowd:
    """Processes with all the clients, connected. work: ``(control, address, count)``; it sends a number when its
    clients are connected, then arrays of `Samples`, and at last a list with the number of rows of each client."""

    def __init__(self, work: Callable[[Connection, str, int], None], address: str, clients: int) -> None:
        self._open: list[Connection] = []
        self._rows: list[int] = []
        self._arrays: list[np.ndarray] = []
        spawn = multiprocessing.get_context("spawn")
        self._processes = []
        for start in range(0, clients, CLIENTS_PER_PROCESS):
            here, there = multiprocessing.Pipe()
            count = min(CLIENTS_PER_PROCESS, clients - start)
            self._processes.append(spawn.Process(target=work, args=(there, address, count), daemon=True))
            self._processes[-1].start()
            there.close()
            self._open.append(here)
        for pipe in self._open:
            pipe.recv()

    def hear(self, patience_s: float = 0.0) -> None:
        """Take what the processes have sent."""
        for pipe in wait(self._open, patience_s):
            assert isinstance(pipe, Connection)
            told = pipe.recv()
            if isinstance(told, np.ndarray):
                self._arrays.append(told)
            else:
                self._rows += told
                self._open.remove(pipe)

    def measured(self) -> np.ndarray:
        """All rows so far, as ``[rows, 3]``."""
        if len(self._arrays) > 1:
            self._arrays = [np.concatenate(self._arrays)]
        return self._arrays[0] if self._arrays else np.empty((0, 3))

    def rows(self) -> list[int]:
        """Wait for the processes, which have been told to end; the number of rows of each client."""
        until = time.monotonic() + END_S
        while self._open:
            if time.monotonic() > until:
                raise RuntimeError(f"{len(self._open)} processes of clients did not end within {END_S:g} s")
            self.hear(1.0)
        return self._rows

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join(10)


class Windows:
    """Shows how late rows were, one line for each window of the run. name: of the line."""

    def __init__(self, name: str, crowd: Crowd, window_s: float) -> None:
        self._name, self._crowd, self._window_s = name, crowd, window_s
        self._began = time.monotonic()
        self.lines: list[dict[str, float]] = []

    def tick(self, now: float) -> None:
        """now: seconds since the first row."""
        self._crowd.hear()
        if now >= (len(self.lines) + 1) * self._window_s + LATE_S:
            self._next()

    def finish(self, seconds: float) -> list[dict[str, float]]:
        """All windows; the clients have ended."""
        while (len(self.lines) + 0.5) * self._window_s < seconds:
            self._next()
        return self.lines

    def _next(self) -> None:
        start = self._began + len(self.lines) * self._window_s
        rows = self._crowd.measured()
        rows = rows[(rows[:, 0] >= start) & (rows[:, 0] < start + self._window_s)]
        self.lines.append(late(rows))
        told = "  ".join(f"{key} {value * 1e3:7.2f} ms" for key, value in self.lines[-1].items())
        print(f"{self._name} {len(self.lines) * self._window_s:5.0f} s  {len(rows):6} rows  {told}", flush=True)


def late(rows: np.ndarray) -> dict[str, float]:
    """Percentiles of what `Samples` measured, in seconds."""
    if not len(rows):
        return {}
    delays = rows[:, 1:] - rows[:, :1]
    return {
        f"{step}_{name}": percentile(delays[:, column].tolist(), share)
        for column, step in enumerate(STEPS)
        for name, share in SHARES.items()
    }


def offer(put: Callable[[int], object], rate: int, seconds: float, ticks: Sequence[Callable[[float], None]]) -> int:
    """Put rows for so long, and call each of `ticks` with the time since the beginning. Returns the number of rows."""
    began, done = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        if due := int(now * rate) - done:
            put(due)
            done += due
        for tick in ticks:
            tick(now)
        time.sleep(TICK_S)
    return done
