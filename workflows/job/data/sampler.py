"""Prompts chosen by what the policy can answer (`data.sampler`), instead of the order of the data alone.

1. The prompts of a step are chosen together, once there is room for the first of them. Of each source a share is chosen
   by the pass rates of the groups known by then; the others are the next ones in the order of the data, so each prompt
   of the data still has its turn. Which source a prompt is of follows from its number, as ever.
2. A choice is noted, with the pass rates that are new since the one before, before any of its prompts is put. So the
   notes up to the number of a prompt give the state that chose it, whatever was killed since.
3. The newest group of a prompt of the data decides its pass rate; the number of the group says which that is, not the
   time at which it was scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.sequence import NumberedPrompt, Positions, PromptSequence, sources_of
from transferqueue.workflows.job.settings.job import SamplerSettings

Choose = Callable[..., Sequence[int]]
"""Called with ``rows`` and ``rates`` (the prompts of a source that have a pass rate: int64 and float64 ``[known]``;
rows are counted from 0 in the order of its file), ``count``, ``source`` (its place in `data.sources`) and ``draws`` (a
`numpy.random.Generator` of the seed and the step). Returns at most ``count`` rows of that source."""
BY_RATE: Final = "pass_rate"


class GroupRate(NamedTuple):
    """The pass rate of a group. row: of its prompt in the data. number: of the prompt in the run."""

    row: int
    number: int
    rate: float


class GroupRates(msgspec.Struct, frozen=True):
    """Pass rates of groups, for a channel."""

    groups: list[GroupRate]


class StepPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """A choice, and the state before it. first: number of its first prompt. places: of the next row of each source in
    its order. rows: of each prompt in its source; -1: the next in order. rates: pass rates that are new."""

    first: int
    places: list[int]
    rows: list[int]
    rates: list[GroupRate]


class KnownRates:
    """The pass rate of the newest group of each prompt of the data."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupRate] = {}

    def add(self, groups: Iterable[GroupRate]) -> list[GroupRate]:
        """Add groups; return those that are newer than the known ones, or were generated again with another rate."""
        newer = []
        for group in groups:
            known = self._groups.get(group.row)
            if known is None or (known.number <= group.number and known != group):
                self._groups[group.row] = group
                newer.append(group)
        return newer

    def keep_newest(self, count: int) -> list[GroupRate]:
        """Forget all but the `count` newest groups, and return those."""
        newest = sorted(self._groups.values(), key=lambda group: group.number)[-count:]
        self._groups = {group.row: group for group in newest}
        return newest

    def between(self, first: int, end: int) -> tuple[Positions, npt.NDArray[np.float64]]:
        """Return the rows from `first` to before `end`, counted from `first`, and their rates."""
        rows = sorted(row for row in self._groups if first <= row < end)
        rates = [self._groups[row].rate for row in rows]
        return np.array(rows, np.int64) - first, np.array(rates, np.float64)


def rates_of_groups(
    rows_B: npt.NDArray[np.int64], numbers_B: npt.NDArray[np.int64], passed_B: npt.NDArray[np.bool_]
) -> list[GroupRate]:
    """Return the pass rate of each group of a batch.

    Args:
        rows_B: row of the data of each response.
        numbers_B: number of its prompt.
        passed_B: whether it passed.
    """
    numbers, first, group_B = np.unique(numbers_B, return_index=True, return_inverse=True)
    rates = np.bincount(group_B, weights=passed_B) / np.bincount(group_B)
    rows = rows_B[first].tolist()
    return [GroupRate(*each) for each in zip(rows, numbers.tolist(), rates.tolist(), strict=True)]


def within(low: float, high: float) -> Choose:
    """Return what draws among the prompts whose pass rate is from `low` to `high`, each at most once."""

    def choose(
        *, rows: Positions, rates: npt.NDArray[np.float64], count: int, draws: np.random.Generator, **_: Any
    ) -> Sequence[int]:
        fitting = rows[(rates >= low) & (rates <= high)]
        return [int(row) for row in draws.choice(fitting, min(count, len(fitting)), replace=False)]

    return choose


class SampledSequence:
    """The prompts of a run, chosen as the module says.

    Args:
        sequence: the prompts in the order of the data.
        settings: `data.sampler`.
        choose: what chooses.
        prompts: of a step.
        seed: of what is drawn.
        news: returns pass rates of groups; some may be known.
        note: is called with each choice.
        noted: returns the choices that begin up to a number, the oldest first.
    """

    chooses_late: Final = True

    def __init__(
        self,
        sequence: PromptSequence,
        settings: SamplerSettings,
        choose: Choose,
        *,
        prompts: int,
        seed: int,
        news: Callable[[], Sequence[GroupRate]],
        note: Callable[[StepPrompts], None],
        noted: Callable[[int], Sequence[StepPrompts]],
    ) -> None:
        self._sequence, self._settings, self._choose = sequence, settings, choose
        self._prompts, self._seed, self._news, self._note, self._noted = prompts, seed, news, note, noted
        self._known = KnownRates()
        self._left: list[NumberedPrompt] = []

    @property
    def number(self) -> int:
        """Number of the next prompt."""
        return self._sequence.number - len(self._left)

    @property
    def dropped(self) -> int:
        """As of `PromptSequence`."""
        return self._sequence.dropped

    def take(self, count: int) -> list[NumberedPrompt]:
        """Return the next `count` prompts. Raises `UsageError` if what was chosen is no prompt of the data."""
        while len(self._left) < count:
            self._left += self._step()
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def skip(self, count: int) -> int:
        """Begin with the prompt of the number `count`, as the noted choices say, or where there is none in the order of
        the data; return `count`: the data does not end."""
        noted = self._noted(count)
        for step in noted:
            self._known.add(step.rates)
        if noted:
            last = noted[-1]
            self._sequence.go_to(last.first, last.places)
            self._left = self._sequence.take(len(last.rows), last.rows)[count - last.first :]
        self._sequence.skip(max(0, count - self._sequence.number))
        return count

    def _step(self) -> list[NumberedPrompt]:
        rates = self._known.add(self._news())
        rows = self._rows(self._sequence.number)
        self._note(
            StepPrompts(first=self._sequence.number, places=self._sequence.places, rows=rows.tolist(), rates=rates)
        )
        return self._sequence.take(len(rows), rows)

    def _rows(self, first: int) -> Positions:
        """Return the row of each prompt of a step in its source; -1: the next in order."""
        sources = sources_of(first, self._prompts, self._sequence.weights)
        rows, begins = np.full(self._prompts, -1, np.int64), np.cumsum([0, *self._sequence.sizes]).tolist()
        for source in np.unique(sources).tolist():
            at = np.flatnonzero(sources == source)
            draws = np.random.default_rng([self._seed, first, source])
            known, rates = self._known.between(begins[source], begins[source + 1])
            count = int(self._settings.share * len(at) + draws.random())  # its mean is that share, of few prompts too
            chosen = self._choose(rows=known, rates=rates, count=count, source=source, draws=draws)
            rows[at[: len(chosen)]] = self._checked(chosen, count, self._sequence.sizes[source])
        return rows

    def _checked(self, chosen: Sequence[int], count: int, size: int) -> Positions:
        rows = np.asarray(chosen)
        is_whole = rows.ndim == 1 and (rows.dtype.kind in "iu" or not rows.size)
        if not is_whole or len(rows) > count or not ((rows >= 0) & (rows < size)).all():
            raise UsageError(
                f"data.sampler.by={self._settings.by!r} chose {str(chosen)[:200]}; return at most count={count} whole "
                f"numbers from 0 to {size - 1}, rows of the data"
            )
        return rows.astype(np.int64)
