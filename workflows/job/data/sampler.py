"""Prompts chosen by what the policy can answer (`data.sampler`), instead of the order of the data alone.

1. The prompts of a step are chosen together, once there is room for the first of them. Of each source a share is chosen
   by the pass rates of the groups known by then; the others are the next ones in the order of the data, so each prompt
   of the data still has its turn. Which source a prompt is of follows from its number, as ever. A chosen prompt with
   too many tokens is dropped or refused as one in the order is.
2. A step is noted in `sampler.jsonl`, with the pass rates that are new since the one before, and is on the disk before
   any of its prompts is put. So the lines up to the number of a prompt give the state that chose it, whatever was
   killed since; where they do not reach that number, the run is refused, and does not go on in the order of the data.
3. The newest group of a prompt of the data decides its pass rate; the number of the group says which that is, not the
   time at which it was scored.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.errors.text import shown, visible
from transferqueue.transport.system.private_files import sync_path
from transferqueue.workflows.dispatch.channels import since
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.sequence import NumberedPrompt, PromptSequence
from transferqueue.workflows.job.settings.job import SamplerSettings

Choose = Callable[..., Sequence[int]]
"""Called with ``rows`` and ``rates`` (the prompts of a source that have a pass rate: int64 and float64 ``[known]``;
rows are counted from 0 in the order of its file), ``count``, ``source`` (its place in `data.sources`) and ``draws`` (a
`numpy.random.Generator` of the seed and the step). Returns at most ``count`` rows of that source."""
BY_RATE: Final = "pass_rate"
CHOOSE_S: Final = 60.0
"""Longest call of a user's function: no prompt of the step is put before it returns."""


class GroupRate(NamedTuple):
    """The pass rate of a group. row: of its prompt in the data. number: of the prompt in the run."""

    row: int
    number: int
    rate: float


class GroupRates(msgspec.Struct, frozen=True):
    """Pass rates of groups, for a channel."""

    groups: list[GroupRate]


class StepPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a step. first: number of the first. rows: of each in the data. places: of the next row of each
    source in its order, after this step. sizes: rows of each source. rates: those that are new."""

    first: int
    rows: list[int]
    places: list[int]
    sizes: list[int]
    rates: list[GroupRate]

    @property
    def end(self) -> int:
        """Number of the first prompt after the step."""
        return self.first + len(self.rows)


class KnownRates:
    """The pass rate of the newest group of each prompt of the data, whose sources have `sizes` rows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(sizes)
        self._rates = np.full(int(self._ends[-1]), np.nan)
        self._numbers = np.full(len(self._rates), -1, np.int64)

    def add(self, groups: Iterable[GroupRate]) -> list[GroupRate]:
        """Add groups; return those that are newer than the known ones, or were generated again with another rate."""
        newer = []
        for group in groups:
            known = self._numbers[group.row]
            if known < group.number or (known == group.number and self._rates[group.row] != group.rate):
                self._numbers[group.row], self._rates[group.row] = group.number, group.rate
                newer.append(group)
        return newer

    def of(self, source: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the rows of a source that have a rate, counted from its first, and their rates."""
        rates = np.split(self._rates, self._ends)[source]
        rows = np.flatnonzero(~np.isnan(rates))
        return rows, rates[rows]


class ToldRates:
    """The pass rates that the advantage stage tells (`stages.pass_rates`), each time those that were not heard of."""

    def __init__(self, queue: tq.Queue) -> None:
        self._queue, self._version = queue, -1

    def __call__(self) -> list[GroupRate]:
        """Return the groups told since the call before; at first, all that are kept."""
        self._version, told = since(self._queue, names.PASS_RATES, GroupRates, self._version)
        return [group for each in told for group in each.groups]


class SampledSequence:
    """The prompts of a run, chosen as the module says.

    Args:
        sequence: the prompts in the order of the data.
        settings: `data.sampler`.
        prompts: of a step.
        seed: of what is drawn.
        path: of the file of steps.
        news: returns pass rates of groups; some may be known.
    """

    chooses_late: Final = True

    def __init__(
        self,
        sequence: PromptSequence,
        settings: SamplerSettings,
        *,
        prompts: int,
        seed: int,
        path: Path,
        news: Callable[[], Iterable[GroupRate]],
    ) -> None:
        self._sequence, self._settings, self._prompts, self._seed = sequence, settings, prompts, seed
        self._path, self._news = path, news
        self._function: Choose | None = (
            None if settings.by == BY_RATE else load_callable(settings.by, "data.sampler.by")
        )
        self._known = KnownRates(sequence.sizes)
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
        """Return the next `count` prompts. Raises `UsageError` if what was chosen is no prompt of the data, and
        `DeadlineExceeded`."""
        while len(self._left) < count:
            self._left += self._step()
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def skip(self, count: int) -> int:
        """Begin with the prompt of the number `count`, as the noted steps say; return `count`: the data does not end.
        Raises `UsageError` if they do not reach it, or are of other data."""
        for step in (steps := noted_steps(self._path, count, self._sequence.sizes)):
            self._known.add(step.rates)
        if steps:
            last = steps[-1]
            self._sequence.go_to(last.end, last.places)
            self._left = self._sequence.at(last.first, last.rows)[count - last.first :]
        return count

    def _step(self) -> list[NumberedPrompt]:
        first, rates = self._sequence.number, sorted(self._known.add(self._news()))
        prompts = self._sequence.take(self._prompts, self._chosen)
        step = StepPrompts(
            first=first,
            rows=[prompt.row for prompt in prompts],
            places=self._sequence.places,
            sizes=self._sequence.sizes,
            rates=rates,
        )
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(step) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return prompts

    def _chosen(self, source: int, prompts: int) -> Sequence[int]:
        """Return the rows of a source that a step begins with, of which `prompts` are to be of that source."""
        draws = np.random.default_rng([self._seed, self._sequence.number, source])
        count = int(self._settings.share * prompts + draws.random())  # its mean is that share, of few prompts too
        if not count:
            return []
        rows, rates = self._known.of(source)
        settings, size = self._settings, self._sequence.sizes[source]
        if self._function is None:
            fitting = rows[(rates >= settings.low) & (rates <= settings.high)]
            drawn: list[int] = draws.choice(fitting, min(count, len(fitting)), replace=False).tolist()
            return drawn
        given = {"rows": rows, "rates": rates, "count": count, "source": source, "draws": draws}
        chosen = rows_of(self._function, settings.by, **given)
        if len(chosen) > count or not all(0 <= row < size for row in chosen):
            raise UsageError(
                f"data.sampler.by={settings.by!r} chose {shown(chosen)}; return at most count={count} rows of "
                f"the source, from 0 to {size - 1}"
            )
        return chosen


def rows_of(choose: Choose, named: str, **given: Any) -> list[int]:
    """Call a user's function in a thread of its own, which nothing can stop.

    Raises `UsageError` if it raises or returns anything but whole numbers, and `DeadlineExceeded` after `CHOOSE_S`.
    """
    replies: SimpleQueue[list[int] | UsageError] = SimpleQueue()

    def call() -> None:
        try:
            replies.put([operator.index(row) for row in choose(**given)])
        except (Exception, SystemExit) as error:  # noqa: BLE001  (raised by the caller of this function)
            why = visible(f"{type(error).__name__}: {error}")
            replies.put(UsageError(f"data.sampler.by={named!r} returned no whole numbers, but raised {why}"))

    threading.Thread(target=call, name="sampler", daemon=True).start()
    try:
        reply = replies.get(timeout=CHOOSE_S)
    except Empty:
        raise DeadlineExceeded(
            f"data.sampler.by={named!r} did not return within {CHOOSE_S:g} s, and the step waits for it; make it faster"
        ) from None
    if isinstance(reply, UsageError):
        raise reply
    return reply


def noted_steps(path: Path, number: int, sizes: Sequence[int]) -> list[StepPrompts]:
    """Return the noted steps that begin up to the prompt `number`, and remove what follows them: it is chosen again.

    Raises `UsageError`, and changes nothing, if the whole lines do not reach that prompt, or the sources of the data
    have other `sizes` now.
    """
    steps: list[StepPrompts] = []
    kept, end, why = 0, 0, "the rest is missing"
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        step = _step_of(line, end)
        if step is None:
            why = f"line {len(steps) + 1} is damaged"
            break
        if step.first > number:
            break
        if step.sizes != sizes:
            raise UsageError(
                f"{path} has prompts of sources with {step.sizes} rows, and those of the data have {sizes}: go on with "
                "the data that the run began with, or start a new run with checkpoint.resume"
            )
        steps.append(step)
        kept, end = kept + len(line), step.end
    if end < number:
        raise UsageError(
            f"{path} has the first {end} prompts of the run, and {number} were put: {why}. Restore it, or start a new "
            "run with checkpoint.resume, which begins at the checkpoints of this one"
        )
    with path.open("ab") as file:
        file.truncate(kept)
        os.fsync(file.fileno())
    sync_path(path.parent)
    return steps


def _step_of(line: bytes, first: int) -> StepPrompts | None:
    """Return the step of a line that begins with the prompt `first`; None if a kill cut it short, or it was changed."""
    try:
        step = msgspec.json.decode(line, type=StepPrompts)
    except msgspec.DecodeError:
        return None
    rows = sum(step.sizes)
    are_rows = all(0 <= row < rows for row in [*step.rows, *(group.row for group in step.rates)])
    return step if line.endswith(b"\n") and step.first == first and step.rows and are_rows else None
