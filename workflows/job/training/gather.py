"""Which rows a step takes, and when it computes with them: decided without a queue.

1. A step takes a number of *units*: prompts with all their responses, or single rows where the algorithm compares none.
   The *place* of a unit is its number in the data, over all epochs.
2. A streaming step computes with units as they come, and asks for the rest; other steps ask for all at once.
3. In the order ``ready`` a unit that has come is computed with at once. Short responses come first, so with units of
   several steps in flight each step would take the shortest of all. The *window* bounds that: only places below the
   oldest unfinished one plus the window are asked for.
4. In the order ``ordinal`` a step takes the lowest unfinished places, and computes with them in that order and in parts
   of a fixed number of units. So every run with the same rows adds the same numbers in the same order.
5. A place may be *gone*: its rows were dropped, or replaced by those of another prompt. The window then moves on, and
   the order skips it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from transferqueue.errors import UsageError

Unit = TypeVar("Unit")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The shape of every step. units: in a step. at_least: units of one request; the order ``ordinal`` computes with as
    many at a time.

    stream: begin before all units have come. window: in steps; ``math.inf``: any place is taken. The order ``ordinal``
    has a window of one step. `UsageError` for numbers below 1, and for at_least above units.
    """

    units: int
    at_least: int = 1
    stream: bool = True
    order: Literal["ready", "ordinal"] = "ready"
    window: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.at_least <= self.units:
            raise UsageError(
                f"at_least={self.at_least} of units={self.units}: a request takes 1 to {self.units} units; change "
                "trainer.at_least"
            )
        if self.window < 1:
            raise UsageError(
                f"window={self.window:g}: a step could never be complete within less than its own units; give 1 or more"
            )


Spans = tuple[tuple[int, int], ...]
"""Places: the first and the last of each run of neighbours."""


def spans_of(places: Iterable[int]) -> Spans:
    """Return places as spans.

    >>> spans_of([7, 3, 4])
    ((3, 4), (7, 7))
    """
    spans: list[tuple[int, int]] = []
    for place in sorted(places):
        if spans and spans[-1][1] == place - 1:
            spans[-1] = (spans[-1][0], place)
        else:
            spans.append((place, place))
    return tuple(spans)


def places_of(spans: Spans) -> Iterator[int]:
    """Yield the places of spans.

    >>> list(places_of(((3, 4), (7, 7))))
    [3, 4, 7]
    """
    for first, last in spans:
        yield from range(first, last + 1)


class StreamPosition(NamedTuple):
    """oldest: the lowest unfinished place. finished: those above it that are. again: places whose rows the next step
    trains for the second time: those that the last one took; then for the third time, and so on."""

    oldest: int = 0
    finished: tuple[int, ...] = ()
    again: tuple[Spans, ...] = ()


@dataclass(frozen=True, slots=True)
class WantedUnits:
    """What to lease next: up to `units`, once `at_least` are ready, with places below `below` (None: any)."""

    units: int
    at_least: int
    below: int | None


class StepGatherer(Generic[Unit]):
    """Gathers the units of one step after the other.

    >>> steps = StepGatherer(StepShape(units=3, order="ordinal"))
    >>> steps.add(1, "b"), steps.parts()
    (None, [])
    >>> steps.wanted()
    WantedUnits(units=2, at_least=1, below=3)
    >>> steps.add(0, "a"), steps.parts()
    (None, [['a'], ['b']])
    """

    def __init__(self, shape: StepShape, position: StreamPosition | None = None) -> None:
        position = position or StreamPosition()
        self.shape = shape
        self._oldest = position.oldest
        self._finished = set(position.finished)
        """Places above the oldest unfinished one that were trained or are gone."""
        self._units: dict[int, list[Unit]] = {}
        """Units of this step that were not computed with yet, by place."""
        self._taken: set[int] = set()
        """Places of all units of this step."""
        self._count = 0
        self._next = self._oldest
        self._ended = False

    @property
    def position(self) -> StreamPosition:
        """Which places are finished, for the gatherer of a later process."""
        return StreamPosition(self._oldest, tuple(sorted(self._finished)))

    # ------------------------------------------------------------ what to lease

    @property
    def taken(self) -> Spans:
        """Places of this step so far."""
        return spans_of(self._taken)

    @property
    def count(self) -> int:
        """Units of this step that have come."""
        return self._count

    @property
    def is_complete(self) -> bool:
        """Whether no more units are to come for this step."""
        return self._ended or self._count >= self.shape.units

    def wanted(self) -> WantedUnits:
        """What to lease next for this step, which must not be complete."""
        left = self.shape.units - self._count
        at_least = min(self.shape.at_least, left) if self.shape.stream else left
        return WantedUnits(left, at_least, self._below())

    def _below(self) -> int | None:
        if self.shape.order == "ready" and math.isinf(self.shape.window):
            return None
        window = 1.0 if self.shape.order == "ordinal" else self.shape.window
        return self._nth_unfinished(math.ceil(window * self.shape.units))

    def _nth_unfinished(self, count: int) -> int:
        """The place that follows the first `count` unfinished ones."""
        place = self._oldest
        while count:
            count -= place not in self._finished
            place += 1
        return place

    def missing(self) -> list[int]:
        """Places that may be leased for this step, and have not come. Some may be gone."""
        below = self._below()
        if below is None:
            return []
        known = self._finished | self._taken
        return [place for place in range(self._oldest, below) if place not in known]

    # ------------------------------------------------------------ arrivals

    def add(self, place: int, unit: Unit) -> None:
        """A unit was leased for this step."""
        self._units.setdefault(place, []).append(unit)
        self._taken.add(place)
        self._count += 1

    def gone(self, places: Iterable[int]) -> None:
        """These places will not arrive."""
        self._finished.update(place for place in places if place >= self._oldest)
        self._move_on()

    def end(self) -> None:
        """No more units will come: the table has ended."""
        self._ended = True

    # ------------------------------------------------------------ what to compute with

    def parts(self) -> list[list[Unit]]:
        """Units to compute with now, in parts of one pass each. Each unit is returned once."""
        if not (self.shape.stream or self.is_complete):
            return []
        if self.shape.order == "ready":
            return self._in_parts(sorted(self._units), math.inf)
        return self._in_parts(self._known_in_order(), self.shape.at_least)

    def _known_in_order(self) -> list[int]:
        """Places that no place before can come between; whole parts only, while more may come."""
        if self.is_complete:
            return sorted(self._units)
        place, places = max(self._next, self._oldest), []
        while place in self._units or place in self._finished:
            places += [place] * (place in self._units)
            place += 1
        return places[: len(places) - len(places) % self.shape.at_least]

    def _in_parts(self, places: list[int], size: float) -> list[list[Unit]]:
        units = [unit for place in places for unit in self._units.pop(place)]
        self._next = max(self._next, places[-1] + 1) if places else self._next
        step = len(units) if math.isinf(size) else int(size)
        return [units[at : at + step] for at in range(0, len(units), step)] if units else []

    # ------------------------------------------------------------ the next step

    def finish(self) -> None:
        """The step was taken: its places are finished, and the next one begins."""
        self._finished |= self._taken
        self._begin()

    def discard(self) -> None:
        """The step was abandoned: its units come again."""
        self._begin()

    def _begin(self) -> None:
        self._units, self._taken, self._count, self._ended = {}, set(), 0, False
        self._move_on()
        self._next = self._oldest

    def _move_on(self) -> None:
        while self._oldest in self._finished:
            self._finished.discard(self._oldest)
            self._oldest += 1
