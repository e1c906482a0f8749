"""Engines that generate rows, in simulated time. A job's simulation (`simulated_job`) and the plans of a batch
(`batch_plan`) both run on it.

1. An engine decodes up to `slots` rows; a token of n rows takes the time of its curve at n. A row that begins first
   stops the engine's other rows for `prompt_s`.
2. A row leaves when its tokens are drawn. Its slot can take the next row after `refill_ms`, one slot after another. So
   rows that end together, as short ones at the end of longest first, leave slots empty for longer. The first rows need
   no refill.
3. Among engines with an empty slot, the one with the fewest rows takes the next row, the first one of these.
4. A row belongs to a class. An engine takes rows of the class that it prefers, and of the other class if there are
   none: it is never idle while rows wait.
5. Within a class the row with the most expected tokens is first, or the order given, as the plan says.
6. Where batches overlap, the next one fills the slots that the end of this one leaves. The time from one batch's end
   to the next one's counts (`period_s`): a plan that ends a single batch sooner, with smaller batches for long rows,
   may lower the engines' total throughput.

`Generation` advances time and asks the caller for rows, which decides rules 4 and 5: the ledger in a job, two queues in
`generation_s`. A plan calls the latter some thirty times while a batch waits.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import UsageError

Lengths = NDArray[np.int64]
"""Lengths of outputs, in tokens."""
Lane = Literal["any", "tail", "regular"]
"""The class of rows that an engine prefers: any, those with at least `cut` expected tokens, or the others."""
RowT = TypeVar("RowT")


class DecodeCurve(msgspec.Struct, frozen=True):
    """Milliseconds for a token at each batch size.

    Args:
        rows: batch sizes, ascending; default: nothing was measured.
        ms: milliseconds for a token at each of them, ascending.
        refill_ms: milliseconds of a slot between two rows, one slot after another; default 0.0.

    Raises:
        UsageError: numbers that are no curve.

    Example:
        >>> curve = DecodeCurve((1.0, 4.0), (10.0, 13.0))
        >>> [curve.token_ms(rows) for rows in (0.5, 1, 2, 4, 8)]
        [10.0, 10.0, 11.0, 13.0, 26.0]
    """

    rows: tuple[float, ...] = ()
    ms: tuple[float, ...] = ()
    refill_ms: float = 0.0

    def __post_init__(self) -> None:
        good = all(value > 0 and math.isfinite(value) for value in (*self.rows, *self.ms))
        if len(self.rows) != len(self.ms) or not good or sorted(self.rows) != list(self.rows):
            raise UsageError(
                f"curve of rows {self.rows} and ms {self.ms}: give as many positive numbers of each, ascending"
            )
        if not 0 <= self.refill_ms < math.inf:
            raise UsageError(f"refill_ms={self.refill_ms} is no time; give 0 or more milliseconds")

    def token_ms(self, rows: float) -> float:
        """Return the milliseconds of a token of each of `rows` rows.

        Between two measurements it is linear. Fewer rows than were measured are no faster than the fewest; more cost as
        many times more as they are more.

        Args:
            rows: rows at once.

        Raises:
            UsageError: nothing was measured.
        """
        if not self.rows:
            raise UsageError("this curve has no measurement; let the engine generate first")
        if rows >= self.rows[-1]:
            return self.ms[-1] * rows / self.rows[-1]
        return float(np.interp(rows, self.rows, self.ms))


class LaneEngine(msgspec.Struct, frozen=True):
    """An engine as a plan uses it.

    Args:
        slots: rows that it generates at once.
        curve: its time for a token.
        lane: the class of rows that it prefers; default ``"any"``.
        prompt_s: seconds of a row before its first token; default 0.0.
    """

    slots: int
    curve: DecodeCurve
    lane: Lane = "any"
    prompt_s: float = 0.0


def check_engines(engines: Sequence[LaneEngine]) -> None:
    """Raise `UsageError` for no engine, and for one without slots or curve."""
    if not engines or any(engine.slots < 1 or not engine.curve.rows for engine in engines):
        raise UsageError(f"{len(engines)} engines: give at least one, each with a slot and a measured curve")


# ---------------------------------------------------------------- time


class EndedRow(NamedTuple, Generic[RowT]):
    """A row that was generated: by which engine, since when."""

    engine: int
    start: float
    row: RowT


class _Begun(NamedTuple, Generic[RowT]):
    """A row in an engine. end: the engine's progress when its tokens are drawn; order: of equal ends the row that came
    first.
    """

    end: float
    order: int
    start: float
    row: RowT


class SimulatedEngine(Generic[RowT]):
    """Rows in one engine. Progress is in tokens that every row has drawn since the start."""

    def __init__(self, engine: LaneEngine, now: float = 0.0) -> None:
        self.slots, self.lane, self._prompt_s = engine.slots, engine.lane, engine.prompt_s
        self.running: list[_Begun[RowT]] = []
        self._token_s = _token_times(engine.curve, engine.slots)
        self._refill_s = engine.curve.refill_ms / 1000
        self._refills: deque[float] = deque()
        self._progress, self._since, self._taken = 0.0, now, 0
        self._idle_since, self._waited_s = now, 0.0
        self.next_s = math.inf
        """When its next row ends, or its next slot can be filled."""

    @property
    def free(self) -> int:
        """Slots that can take a row."""
        return self.slots - len(self.running) - len(self._refills)

    def add(self, length: int, row: RowT, now: float) -> None:
        """Begin a row of `length` tokens."""
        self._advance(now)
        if not self.running:
            self._waited_s += now - self._idle_since
        self._since += self._prompt_s
        self._taken += 1
        heapq.heappush(self.running, _Begun(self._progress + length, self._taken, now, row))
        self._foresee()

    def ended(self, now: float) -> list[_Begun[RowT]]:
        """Take out the rows that have ended by now, the first one first."""
        while self._refills and self._refills[0] <= now:
            self._refills.popleft()
        rows = []
        while self.running and self._end_s() <= now:
            self._advance(now)
            row = heapq.heappop(self.running)
            self._progress = max(self._progress, row.end)
            rows.append(row)
            if self._refill_s:
                self._refills.append((self._refills[-1] if self._refills else now) + self._refill_s)
            if not self.running:
                self._idle_since = now
        self._foresee()
        return rows

    def waited_s(self, now: float) -> float:
        """Return the seconds without a row since the last call."""
        waited_s = self._waited_s + (0.0 if self.running else now - self._idle_since)
        self._waited_s, self._idle_since = 0.0, now
        return waited_s

    def _foresee(self) -> None:
        self.next_s = self._end_s() if self.running else math.inf
        if self._refills and self._refills[0] < self.next_s:
            self.next_s = self._refills[0]

    def _end_s(self) -> float:
        return self._since + max(0.0, self.running[0].end - self._progress) * self._token_s[len(self.running)]

    def _advance(self, now: float) -> None:
        if now > self._since:
            self._progress += (now - self._since) / self._token_s[len(self.running)]
            self._since = now


@lru_cache(maxsize=256)
def _token_times(curve: DecodeCurve, slots: int) -> tuple[float, ...]:
    """Seconds of a token of each of n rows, by n; of no rows, progress means nothing."""
    return (math.inf, *(curve.token_ms(rows) / 1000 for rows in range(1, slots + 1)))


class Generation(Generic[RowT]):
    """Engines that generate. take: gives the length and the row for an engine that prefers this class, or None if no
    row is left for any engine.
    """

    def __init__(self, engines: Sequence[LaneEngine], take: Callable[[Lane], tuple[int, RowT] | None]) -> None:
        self.engines = [SimulatedEngine[RowT](engine) for engine in engines]
        self._take = take

    def next_s(self) -> float:
        """Return when something happens next; infinity if nothing does without new rows."""
        return min(engine.next_s for engine in self.engines)

    def fill(self, now: float) -> None:
        """Give rows to engines with an empty slot (rule 3)."""
        while (engine := self._emptiest()) is not None and (taken := self._take(engine.lane)) is not None:
            engine.add(*taken, now)

    def ended(self, now: float) -> list[EndedRow[RowT]]:
        """Return the rows that have ended by now."""
        return [
            EndedRow(at, begun.start, begun.row)
            for at, engine in enumerate(self.engines)
            if engine.next_s <= now
            for begun in engine.ended(now)
        ]

    def _emptiest(self) -> SimulatedEngine[RowT] | None:
        """Return the engine with an empty slot that has the fewest rows."""
        found = None
        for engine in self.engines:
            if engine.free > 0 and (found is None or len(engine.running) < len(found.running)):
                found = engine
        return found


# ---------------------------------------------------------------- a batch


def generation_s(
    lengths: Lengths, expected: Lengths, engines: Sequence[LaneEngine], *, longest_first: bool, cut: int = 0
) -> float:
    """Return the seconds until all rows are generated.

    Args:
        lengths: tokens of each row, ``[rows]``, positive.
        expected: tokens that the dispatch expects of each row, ``[rows]``, positive.
        engines: the engines.
        longest_first: generate rows in the order of their expected lengths, not as given.
        cut: expected tokens from which a row is of the tail; default 0.

    Raises:
        UsageError: other shapes, no engine, or one without slots or curve.
    """
    return _batch_ends(lengths, expected, engines, longest_first, cut, copies=1)[0]


_COPIES = 4
"""Batches in a row: the time from the end of the first to that of the third, while the fourth fills the slots."""


def period_s(
    lengths: Lengths, expected: Lengths, engines: Sequence[LaneEngine], *, longest_first: bool, cut: int = 0
) -> float:
    """Return the seconds that each of many such batches adds, if the next is always there to fill free slots.

    Args:
        lengths: as of `generation_s`.
        expected: as of `generation_s`.
        engines: as of `generation_s`.
        longest_first: as of `generation_s`.
        cut: as of `generation_s`; default 0.

    Raises:
        UsageError: as of `generation_s`.
    """
    ends = _batch_ends(lengths, expected, engines, longest_first, cut, copies=_COPIES)
    return max(0.0, (ends[-2] - ends[0]) / (_COPIES - 2))


def _batch_ends(
    lengths: Lengths, expected: Lengths, engines: Sequence[LaneEngine], longest_first: bool, cut: int, copies: int
) -> list[float]:
    """Return when the last row of each of `copies` batches was generated."""
    if lengths.shape != expected.shape or lengths.ndim != 1 or not lengths.size or lengths.min() < 1:
        raise UsageError(
            f"lengths {lengths.shape} and expected {expected.shape} are not positive tokens of the same rows"
        )
    check_engines(engines)
    order = np.argsort(-expected, kind="stable") if longest_first else np.arange(expected.size)
    split = any(engine.lane != "any" for engine in engines)
    tail, rest = deque[tuple[int, int]](), deque[tuple[int, int]]()
    for copy in range(copies):
        for is_tail, length in zip((expected[order] >= cut).tolist(), lengths[order].tolist(), strict=True):
            (tail if split and is_tail else rest).append((length, copy))

    def take(lane: Lane) -> tuple[int, int] | None:
        first, second = (rest, tail) if lane == "regular" else (tail, rest)
        queue = first or second
        return queue.popleft() if queue else None

    generation, batch_ends = Generation(engines, take), [0.0] * copies
    generation.fill(0.0)
    while (now := generation.next_s()) < math.inf:
        for ended in generation.ended(now):
            batch_ends[ended.row] = now
        generation.fill(now)
    return batch_ends
