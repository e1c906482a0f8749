"""How long the turns of a server's loop take, and what the longest was for. Pure: the loop brings the seconds.

A server has one thread, so whoever calls it waits for the turns of all others. Three kinds are told apart, since each has another
remedy: one frame of a client (``request``), what was due by itself (``tick``), and the writes that make what happened durable
before anybody is told (``commit``), which serve all clients at once.

A turn is late if it kept the processor busy for more than `TURN_S_MAX`. Its length by the clock also has the time in which the machine
ran something else, or nothing of this process: so it alone would say more of the machine than of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from transferqueue.limits import SAMPLE_S_MAX, TURN_S_MAX

FIRST_EXPONENT: Final = -16
LAST_EXPONENT: Final = 4
BOUNDS_S: Final = tuple(2.0**exponent for exponent in range(FIRST_EXPONENT, LAST_EXPONENT + 1))
"""Upper bounds of the buckets, from 15 microseconds to 16 seconds; one more bucket has what took longer."""
_STEPS_PER_S: Final = 2**-FIRST_EXPONENT
_LAST_BUCKET: Final = len(BOUNDS_S)


class Histogram:
    """Seconds in buckets of powers of two, their sum, and the longest with its subject. busiest: the longest by processor time, of
    those above `TURN_S_MAX` by the clock. late: how many were above it by processor time, by subject."""

    __slots__ = ("busiest_of", "busiest_s", "counts", "late", "longest_of", "longest_s", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = self.longest_s = self.busiest_s = 0.0
        self.longest_of = self.busiest_of = ""
        self.late: dict[str, int] = {}

    def add(self, seconds: float, subject: str) -> None:
        """One more turn. On the way of every frame: 0.4 microseconds."""
        bucket = int(seconds * _STEPS_PER_S).bit_length()
        self.counts[min(_LAST_BUCKET, bucket)] += 1
        self.sum_s += seconds
        if seconds > self.longest_s:
            self.longest_s, self.longest_of = seconds, subject

    def busy(self, seconds: float, subject: str) -> None:
        """A turn above `TURN_S_MAX` by the clock took this much processor time."""
        if seconds > self.busiest_s:
            self.busiest_s, self.busiest_of = seconds, subject
        if seconds > TURN_S_MAX:
            self.late[subject] = self.late.get(subject, 0) + 1

    def plain(self) -> dict[str, Any]:
        """For `stats`: see docs/OBSERVING.md."""
        return {
            "bounds_s": list(BOUNDS_S),
            "counts": list(self.counts),
            "sum_s": self.sum_s,
            "longest_s": self.longest_s,
            "longest_of": self.longest_of,
            "busiest_s": self.busiest_s,
            "busiest_of": self.busiest_of,
            "late": dict(self.late),
        }


class Turns:
    """The turns of one loop, by kind."""

    def __init__(self) -> None:
        self.requests, self.ticks, self.commits = Histogram(), Histogram(), Histogram()

    def plain(self) -> dict[str, Any]:
        """For `stats`."""
        return {"request": self.requests.plain(), "tick": self.ticks.plain(), "commit": self.commits.plain()}


class Meter:
    """Adds the turns of one thread to histograms. clock, processor: read the seconds that passed, and those that the thread was busy.

    A read of the processor clock costs a system call, so `took` leaves it out while the last one is younger than `SAMPLE_S_MAX`. By
    so much at most the processor time of a late turn is too long.
    """

    def __init__(self, clock: Callable[[], float], processor: Callable[[], float]) -> None:
        self._clock, self._processor = clock, processor
        self._read_at = self._busy_s = 0.0

    def start(self, now: float) -> None:
        """The thread was idle until now."""
        self._read_at, self._busy_s = now, self._processor()

    def took(self, turns: Histogram, began: float, subject: str) -> None:
        """A turn that began then has just ended."""
        ended = self._clock()
        seconds = ended - began
        turns.add(seconds, subject)
        if ended - self._read_at > SAMPLE_S_MAX:
            before = self._busy_s
            self.start(ended)
            if seconds > TURN_S_MAX:
                turns.busy(min(seconds, self._busy_s - before), subject)
