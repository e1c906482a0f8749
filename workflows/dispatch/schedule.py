"""Seconds until engines have generated a batch, event by event: rows by expected length, time by their lengths.

The law:

1. An engine decodes up to `slots` rows; a token of n rows takes what its curve says for n. A row leaves when its tokens are drawn, and the engine takes the next one
   into its slot after `refill_ms`, for one slot after another. So rows that end together, as short ones at the end of longest first, leave slots empty for longer. The first rows are there.
2. An engine takes the first row of its class, and the first row of the other class if there is none: it is never idle while rows wait. The first rows are dealt in turn.
3. Within a class the row with the most expected tokens is first, or the order given, as the plan says.
4. Where batches overlap, the next one fills the slots that the end of this one leaves. What counts then is the time from one batch's end to the next one's (`period_s`): a plan that
   ends a batch alone sooner, with smaller batches for long rows, may well lower what engines generate in all.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import UsageError
from transferqueue.workflows.dispatch.decode import DecodeCurve

Lengths = NDArray[np.int64]
Lane = Literal["any", "tail", "regular"]
"""The class of rows that an engine prefers: any, those with at least `cut` expected tokens, or the others."""


class LaneEngine(msgspec.Struct, frozen=True):
    """An engine as a plan uses it: its slots, its curve, and the class that it prefers."""

    slots: int
    curve: DecodeCurve
    lane: Lane = "any"


def generation_s(
    lengths: Lengths, expected: Lengths, engines: Sequence[LaneEngine], *, longest_first: bool, cut: int = 0
) -> float:
    """Return the seconds until all rows are generated. lengths, expected: ``[rows]`` positive tokens.

    Raises `UsageError` for other shapes, for no engine, and for one without slots or curve.
    """
    _check(lengths, expected, engines)
    return _Schedule(lengths, expected, engines, longest_first, cut).run()[0]


_COPIES = 4
"""Batches in a row: the time from the end of the first to that of the third, while the fourth fills the slots."""


def period_s(
    lengths: Lengths, expected: Lengths, engines: Sequence[LaneEngine], *, longest_first: bool, cut: int = 0
) -> float:
    """Return the seconds that each of many such batches adds, if the next is always there to fill free slots. Otherwise as `generation_s`."""
    _check(lengths, expected, engines)
    ends = _Schedule(lengths, expected, engines, longest_first, cut, copies=_COPIES).run()
    return max(0.0, (ends[-2] - ends[0]) / (_COPIES - 2))


def _check(lengths: Lengths, expected: Lengths, engines: Sequence[LaneEngine]) -> None:
    if lengths.shape != expected.shape or lengths.ndim != 1 or not lengths.size or lengths.min() < 1:
        raise UsageError(
            f"lengths {lengths.shape} and expected {expected.shape} are not positive tokens of the same rows"
        )
    if not engines or any(engine.slots < 1 or not engine.curve.rows for engine in engines):
        raise UsageError(f"{len(engines)} engines: give at least one, each with a slot and a measured curve")


class _Engine:
    """Rows in one engine: progress is in tokens that every row has drawn since the start."""

    def __init__(self, engine: LaneEngine) -> None:
        self.slots, self.lane = engine.slots, engine.lane
        self.token_s = [0.0, *(engine.curve.token_ms(rows) / 1000 for rows in range(1, engine.slots + 1))]
        self.progress = self.since = 0.0
        self.ends: list[tuple[float, int]] = []
        self._refill_s = engine.curve.refill_ms / 1000
        self._refills: deque[float] = deque()
        self._refilled_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.ends or self._refills)

    def next_s(self) -> float:
        refill_s = self._refills[0] if self._refills else math.inf
        if not self.ends:
            return refill_s
        return min(refill_s, self.since + max(0.0, self.ends[0][0] - self.progress) * self.token_s[len(self.ends)])

    def refilled(self, now: float) -> bool:
        """Whether a slot has just been made ready for its next row."""
        if not self._refills or self._refills[0] > now:
            return False
        self._refills.popleft()
        return True

    def freed(self, now: float) -> bool:
        """Free the slot of a row that ended; return whether it takes its next row at once."""
        if self._refill_s:
            self._refilled_s = max(now, self._refilled_s) + self._refill_s
            self._refills.append(self._refilled_s)
        return not self._refill_s

    def advance(self, now: float) -> None:
        if self.ends:
            self.progress += (now - self.since) / self.token_s[len(self.ends)]
        self.since = now

    def take(self, length: int, batch: int, now: float) -> None:
        self.advance(now)
        heapq.heappush(self.ends, (self.progress + length, batch))


class _Schedule:
    def __init__(
        self,
        lengths: Lengths,
        expected: Lengths,
        engines: Sequence[LaneEngine],
        longest_first: bool,
        cut: int,
        copies: int = 1,
    ) -> None:
        self._engines = [_Engine(engine) for engine in engines]
        order = np.argsort(-expected, kind="stable") if longest_first else np.arange(expected.size)
        rows = [(int(expected[row]) >= cut, int(lengths[row]), copy) for copy in range(copies) for row in order]
        split = any(engine.lane != "any" for engine in engines)
        self._tail = deque((length, copy) for is_tail, length, copy in rows if split and is_tail)
        self._rest = deque((length, copy) for is_tail, length, copy in rows if not (split and is_tail))
        self._copies = copies

    def run(self) -> list[float]:
        """Return when the last row of each batch was generated."""
        now, batch_ends = 0.0, [0.0] * self._copies
        for slot in range(max(engine.slots for engine in self._engines)):
            for engine in self._engines:
                if slot < engine.slots:
                    self._fill(engine, now)
        while busy := [engine for engine in self._engines if engine.busy]:
            engine = min(busy, key=_Engine.next_s)
            now = engine.next_s()
            engine.advance(now)
            if not engine.refilled(now):
                batch_ends[heapq.heappop(engine.ends)[1]] = now
                if not engine.freed(now):
                    continue
            self._fill(engine, now)
        return batch_ends

    def _fill(self, engine: _Engine, now: float) -> None:
        queues = (self._rest, self._tail) if engine.lane == "regular" else (self._tail, self._rest)
        for queue in queues:
            if queue:
                engine.take(*queue.popleft(), now)
                return
