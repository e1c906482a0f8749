"""How long the turns of a server's loop take, and which request made the longest. Pure: the loop passes the seconds.

A server has one thread, so each client waits for the turns of all others. Three kinds are recorded separately, since
each has another remedy:

- ``request``: one frame of a client, with all requests that waited for it. Without a journal it includes sending.
- ``tick``: events that were due by time.
- ``commit``: the writes that make changes durable before answers are sent. They serve all clients at once.

A turn is late if it kept the processor busy for more than `TURN_S_MAX`. Its wall-clock length also contains time in
which the machine ran other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from transferqueue.limits import SAMPLE_S_MAX, TURN_S_MAX
from transferqueue.wire.answers.stats import TurnStats

FIRST_EXPONENT: Final = -16
LAST_EXPONENT: Final = 4
BOUNDS_S: Final = tuple(2.0**exponent for exponent in range(FIRST_EXPONENT, LAST_EXPONENT + 1))
"""Upper bounds of the buckets, from 15 microseconds to 16 seconds. One more bucket holds everything longer."""
_STEPS_PER_S: Final = 2**-FIRST_EXPONENT
_LAST_BUCKET: Final = len(BOUNDS_S)


class Histogram:
    """Turns in buckets of powers of two seconds, with their sum, and the longest with its subject. `busiest` is the
    longest by processor time, of those above `TURN_S_MAX` by the clock. `late` counts by subject the turns above it by
    processor time."""

    __slots__ = ("busiest_of", "busiest_s", "counts", "late", "longest_of", "longest_s", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = self.longest_s = self.busiest_s = 0.0
        self.longest_of = self.busiest_of = ""
        self.late: dict[str, int] = {}

    def add(self, seconds: float, subject: str) -> None:
        """Add a turn. Called for every frame; takes 0.4 microseconds."""
        bucket = int(seconds * _STEPS_PER_S).bit_length()
        self.counts[min(_LAST_BUCKET, bucket)] += 1
        self.sum_s += seconds
        if seconds > self.longest_s:
            self.longest_s, self.longest_of = seconds, subject

    def busy(self, seconds: float, subject: str) -> None:
        """Add the processor time of a turn that took more than `TURN_S_MAX` by the clock."""
        if seconds > self.busiest_s:
            self.busiest_s, self.busiest_of = seconds, subject
        if seconds > TURN_S_MAX:
            self.late[subject] = self.late.get(subject, 0) + 1

    def stats(self) -> TurnStats:
        """The figures for `stats`."""
        return TurnStats(
            bounds_s=list(BOUNDS_S),
            counts=list(self.counts),
            sum_s=self.sum_s,
            longest_s=self.longest_s,
            longest_of=self.longest_of,
            busiest_s=self.busiest_s,
            busiest_of=self.busiest_of,
            late=dict(self.late),
        )


class Turns:
    """The turns of one loop, by kind."""

    def __init__(self) -> None:
        self.requests, self.ticks, self.commits = Histogram(), Histogram(), Histogram()

    def stats(self) -> dict[str, TurnStats]:
        """The figures for `stats`."""
        return {"request": self.requests.stats(), "tick": self.ticks.stats(), "commit": self.commits.stats()}


class Meter:
    """Adds the turns of one thread to histograms.

    Reading the processor clock costs a system call, so `took` skips it while the last reading is younger than
    `SAMPLE_S_MAX`. The processor time of a late turn is too long by at most that much.

    Args:
        processor: seconds for which the thread was busy.
    """

    def __init__(self, processor: Callable[[], float]) -> None:
        self._processor = processor
        self._read_at, self._busy_s = -math.inf, 0.0

    def start(self, now: float) -> None:
        """A turn begins: the thread was idle until `now`."""
        if now - self._read_at > SAMPLE_S_MAX:
            self._read_at, self._busy_s = now, self._processor()

    def took(self, turns: Histogram, began: float, ended: float, subject: str) -> None:
        """A turn that began at `began` has just ended, at `ended`."""
        seconds = ended - began
        turns.add(seconds, subject)
        if ended - self._read_at > SAMPLE_S_MAX:
            before = self._busy_s
            self._read_at, self._busy_s = ended, self._processor()
            if seconds > TURN_S_MAX:
                turns.busy(min(seconds, self._busy_s - before), subject)
