"""Prompts chosen by what the policy can answer (`data.sampler`), instead of the order of the data alone.

1. The prompts of a step are chosen together, once there is room for the first of them. Of each source a share is chosen
   by the pass rates of the groups known by then; the others are the next ones in the order of the data, so each prompt
   of the data still has its turn. Which source a prompt is of follows from its number, as ever. A chosen prompt with
   too many tokens is dropped or refused as one in the order is.
2. A step is noted in `sampler.jsonl`, with the pass rates that changed since the one before, and is on the disk before
   any of its prompts is put. What is noted is taken as it is, also where the run goes on at an earlier prompt; the
   pass rates are those of all lines. Where the lines do not reach the next prompt, the run is refused, and does not go
   on in the order of the data.
3. The newest group of a prompt of the data decides its pass rate: that with the largest number, whenever it is scored.
   A group is known by its number, and the lines say of which row it is. Numbers that they do not have are another
   run's, and are passed over.
"""

from __future__ import annotations

import operator
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.errors.text import shown, visible
from transferqueue.transport.system.private_files import sync_path
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job.data.sequence import NumberedPrompt, PromptSequence
from transferqueue.workflows.job.settings.job import SamplerSettings

Choose = Callable[..., Iterable[int]]
"""Called with ``rows`` and ``rates`` (the prompts of a source that have a pass rate: int64 and float64 ``[known]``;
rows are counted from 0 in the order of its file), ``count``, ``source`` (its place in `data.sources`) and ``draws`` (a
`numpy.random.Generator` of the seed and the step). Returns at most ``count`` rows of that source."""
BY_RATE: Final = "pass_rate"
CHOOSE_S: Final = 60.0
"""Longest call of a user's function: no prompt of the step is put before it returns."""

_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
GroupRates = list[tuple[_Whole, Annotated[float, msgspec.Meta(ge=0, le=1)]]]
"""Numbers of prompts in the run, and the pass rates of their groups."""


class StepPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a step. first: number of the first. rows: of each in the data. places: of the next row of each
    source in its order, after this step. sizes: rows of each source. rates: those that changed."""

    first: _Whole
    rows: list[_Whole]
    places: list[_Whole]
    sizes: list[_Whole]
    rates: GroupRates


class SampledSequence:
    """The prompts of a run, chosen as the module says.

    Args:
        sequence: the prompts in the order of the data.
        settings: `data.sampler`.
        prompts: of a step.
        seed: of what is drawn.
        path: of the file of steps.
        news: called with a version, -1 at first; returns the newest, and the pass rates told since, in the order in
            which they were told. Some may be known.
    """

    def __init__(
        self,
        sequence: PromptSequence,
        settings: SamplerSettings,
        *,
        prompts: int,
        seed: int,
        path: Path,
        news: Callable[[int], tuple[int, Iterable[GroupRates]]],
    ) -> None:
        self._sequence, self._settings, self._prompts, self._seed = sequence, settings, prompts, seed
        self._path, self._news, self._version = path, news, -1
        self._function: Choose | None = (
            None if settings.by == BY_RATE else load_callable(settings.by, "data.sampler.by")
        )
        self.number = 0
        """Number of the next prompt."""
        self._left: list[NumberedPrompt] = []
        self._rows, self._noted_bytes = array("q"), 0
        self._rates: dict[int, tuple[int, float]] = {}  # by row: the number of its newest group, and the rate

    @property
    def dropped(self) -> int:
        """As of `PromptSequence`."""
        return self._sequence.dropped

    def take(self, count: int) -> list[NumberedPrompt]:
        """Return the next `count` prompts. Raises `UsageError` if what was chosen is no prompt of the data,
        `DeadlineExceeded`, and `StageFailedInProcess` if a step cannot be noted."""
        while len(self._left) < count:
            at = self.number + len(self._left)
            noted = self._rows[at : at + self._prompts]
            self._left += self._sequence.at(at, noted) if noted else self._step()
        taken, self._left = self._left[:count], self._left[count:]
        self.number += count
        return taken

    def skip(self, count: int) -> int:
        """Begin with the prompt of the number `count`, as the noted steps say; return `count`: the data does not end.
        Raises `UsageError`, and changes nothing, if their whole lines do not reach it, or are of other data."""
        why = "the rest is missing"
        try:
            with self._path.open("rb") as file:
                for at, line in enumerate(file, 1):
                    step = self._step_of(line)
                    if step is None:
                        why = f"line {at} is damaged"
                        break
                    self._rows.extend(step.rows)
                    self._add(step.rates)
                    self._sequence.go_to(len(self._rows), step.places)
                    self._noted_bytes += len(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StageFailedInProcess(
                f'the prompts of the run cannot be read from "{self._path}": {error}; mend that, and go on with '
                "train --resume"
            ) from error
        if len(self._rows) < count:
            raise UsageError(
                f"{self._path} has the first {len(self._rows)} prompts of the run, and {count} were put: {why}. "
                "Restore it, or start a new run with checkpoint.resume, which begins at the checkpoints of this one"
            )
        self.number = count
        return count

    def _step_of(self, line: bytes) -> StepPrompts | None:
        """Return the next step; None if a kill cut its line short, or it was changed."""
        try:
            step = msgspec.json.decode(line, type=StepPrompts)
        except msgspec.DecodeError:
            return None
        sizes, first = self._sequence.sizes, len(self._rows)
        if not line.endswith(b"\n") or step.first != first or not step.rows or len(step.places) != len(step.sizes):
            return None
        if step.sizes != sizes:
            raise UsageError(
                f"{self._path} has prompts of sources with {step.sizes} rows, and those of the data have {sizes}: go "
                "on with the data that the run began with, or start a new run with checkpoint.resume"
            )
        whole = max(step.rows) < sum(sizes) and all(number < first for number, _ in step.rates)
        return step if whole else None

    def _add(self, told: GroupRates) -> None:
        for number, rate in told:
            if number < len(self._rows):
                row = self._rows[number]
                if number >= self._rates.get(row, (0, 0.0))[0]:
                    self._rates[row] = number, rate

    def _step(self) -> list[NumberedPrompt]:
        before, first = self._rates.copy(), self._sequence.number
        self._version, news = self._news(self._version)
        for told in news:
            self._add(told)
        prompts = self._sequence.take(self._prompts, self._chosen)
        step = StepPrompts(
            first=first,
            rows=[prompt.row for prompt in prompts],
            places=self._sequence.places,
            sizes=self._sequence.sizes,
            rates=sorted(rate for row, rate in self._rates.items() if before.get(row) != rate),
        )
        line = msgspec.json.encode(step) + b"\n"
        try:
            with self._path.open("ab") as file:
                file.truncate(self._noted_bytes)  # of what a kill left
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            sync_path(self._path.parent)
        except OSError as error:
            raise StageFailedInProcess(
                f'the prompts of the step from prompt {first} on cannot be noted in "{self._path}": {error}; make room '
                "there, and go on with train --resume"
            ) from error
        self._noted_bytes += len(line)
        self._rows.extend(step.rows)
        return prompts

    def _chosen(self, source: int, prompts: int) -> Sequence[int]:
        """Return the rows of a source that a step begins with, of which `prompts` are to be of that source."""
        draws = np.random.default_rng([self._seed, self._sequence.number, source])
        count = int(self._settings.share * prompts + draws.random())  # its mean is that share, of few prompts too
        if not count:
            return []
        settings, size, first = self._settings, self._sequence.sizes[source], sum(self._sequence.sizes[:source])
        known = sorted((row - first, rate) for row, (_, rate) in self._rates.items() if 0 <= row - first < size)
        rows, rates = np.array([row for row, _ in known], np.int64), np.array([rate for _, rate in known], np.float64)
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
            replies.put([operator.index(row) for row in islice(choose(**given), given["count"] + 1)])
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
