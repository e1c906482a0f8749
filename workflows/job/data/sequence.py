"""The prompts of a run, numbered 0, 1, … over epochs: each epoch is a permutation of the data that the seed determines.
Of several sources each has its epochs, and every number takes the next prompt of one of them, by weight.

A *place* counts rows of a source in the order in which they are used; a *number* counts those that became prompts. Both
differ once a prompt with too many tokens is dropped. Whether a row fits is the same in every epoch, so it is asked
once: a run that starts again at number n reads the prompts before it, at most one pass over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Ids
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.prompt_data import DataSource, PromptData
from transferqueue.workflows.job.data.prompts import LearnedTokens, RenderedPrompt
from transferqueue.workflows.job.settings.job import DataSettings, Job

Positions = npt.NDArray[np.int64]

SKIPPED_TOGETHER: Final = 256
"""Prompts that are tokenized in one call when a run starts again."""
_COUNTED_TOGETHER: Final = 1 << 20
"""Prompts of a mixture that are counted in one call when a run starts again."""
_GOLDEN: Final = (5**0.5 - 1) / 2
_UNKNOWN, _FITS, _TOO_LONG = np.int8(0), np.int8(1), np.int8(-1)


@dataclass(frozen=True, kw_only=True)
class NumberedPrompt:
    """One prompt. number: its place in the run. ids: int32 ``[P]``. data: value of column ``data``. response_ids: int32
    ``[T]`` for sft. learned: bool ``[T]``, which of them it learns; None: all. images: encoded. environment: name of
    the one that plays it; empty: the only one, if any. row: of the data, all sources one after the other."""

    number: int
    ids: Ids
    data: dict[str, Any]
    text: str
    response_ids: Ids | None = None
    learned: npt.NDArray[np.bool_] | None = None
    images: tuple[bytes, ...] = ()
    environment: str = ""
    row: int = 0


class DataOrder:
    """Positions of rows in the order of their use: epoch after epoch, each shuffled by (seed, epoch). epochs: 0:
    without end. source: its number in a mixture, which draws other orders."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool, epochs: int = 0, source: int = 0) -> None:
        self.rows = rows
        self._seed, self._shuffle = ([seed, source] if source else [seed]), shuffle
        self._end = epochs * rows if epochs else None
        self._epoch, self._permutation = -1, np.arange(0, dtype=np.int64)

    def positions(self, place: int, count: int) -> Positions:
        """Return the positions of `count` places from `place` on; fewer at the end of an epoch, none at the end of the
        last.

        >>> DataOrder(3, seed=0, shuffle=False).positions(1, 9).tolist()
        [1, 2]
        """
        if self._end is not None and place >= self._end:
            return np.empty(0, np.int64)
        epoch, inside = divmod(place, self.rows)
        return self._order(epoch)[inside : inside + count]

    def _order(self, epoch: int) -> Positions:
        if epoch != self._epoch:
            draws = np.random.default_rng([*self._seed, epoch])
            self._permutation = draws.permutation(self.rows) if self._shuffle else np.arange(self.rows)
            self._epoch = epoch
        return self._permutation


class SourceSequence:
    """Yields the prompts of one source in order. Each has the number 0 and its row of the source; `PromptSequence`
    gives the numbers of the run, and the rows of the data.

    named: the source, for messages. tokens_max: most tokens of a response that is learned (sft). `dropped` counts rows
    with too many tokens, as far as they have been read. Raises as `PromptSequence` does.
    """

    def __init__(
        self, source: DataSource, named: str, settings: DataSettings, order: DataOrder, *, tokens_max: int
    ) -> None:
        self._source, self._named, self._settings, self._order = source, named, settings, order
        self._tokens_max = tokens_max
        self._fits = np.full(len(source.rows), _UNKNOWN, np.int8)
        self.place = 0
        """Place of the next row in the order."""

    @property
    def environment(self) -> str:
        """Name of the one that plays the prompts; empty: the only one, if any."""
        return self._source.environment

    @property
    def dropped(self) -> int:
        """Rows with too many tokens, as far as they have been read."""
        return int(np.count_nonzero(self._fits == _TOO_LONG))

    def take(self, count: int) -> list[NumberedPrompt]:
        """Return the next `count` prompts; fewer if the data ends."""
        taken: list[NumberedPrompt] = []
        while len(taken) < count:
            positions = self._order.positions(self.place, count - len(taken))
            if not len(positions):
                break
            self.place += len(positions)
            fitting = self._prompts(positions[self._fits[positions] != _TOO_LONG])
            if not fitting:
                self._check_some_fit()
            taken += fitting
        return taken

    def at(self, positions: Sequence[int]) -> list[NumberedPrompt]:
        """Return the prompts of these rows, wherever they are in the order; without those that have too many tokens."""
        return self._prompts(np.array(positions, np.int64))

    def skip(self, count: int) -> int:
        """Go `count` prompts ahead, as if they had been taken; return how many there were, fewer if the data ends."""
        left = count
        while left:
            left -= self._skip_epochs(left)
            positions = self._order.positions(self.place, SKIPPED_TOGETHER)
            if not left or not len(positions):
                break
            self._prompts(positions[self._fits[positions] == _UNKNOWN])
            fitting = np.cumsum(self._fits[positions] == _FITS)
            if not fitting[-1]:
                self._check_some_fit()
            places = min(int(np.searchsorted(fitting, left)) + 1, len(positions))
            left -= int(fitting[places - 1])
            self.place += places
        return count - left

    def _skip_epochs(self, count: int) -> int:
        """Skip whole epochs, if it is known which rows fit."""
        if self.place % self._order.rows or (self._fits == _UNKNOWN).any() or self._settings.epochs:
            return 0
        in_epoch = int(np.count_nonzero(self._fits == _FITS))
        self.place += count // in_epoch * self._order.rows
        return count // in_epoch * in_epoch

    def _prompts(self, positions: Positions) -> list[NumberedPrompt]:
        """Return the prompts that fit among these rows."""
        if not len(positions):
            return []
        source = self._source
        rows = [source.rows.row(int(at)) for at in positions]
        places = [source.rows.place(int(at)) for at in positions]
        rendered = [source.renderer.render(row, place) for row, place in zip(rows, places, strict=True)]
        ids = source.renderer.tokens(rendered)
        responses = [self._response(prompt) for prompt in rendered]
        response_ids = [None if response is None else response.ids for response in responses]
        fits = np.array([self._fitting(*each) for each in zip(ids, response_ids, places, strict=True)])
        self._fits[positions] = np.where(fits, _FITS, _TOO_LONG)
        return [
            NumberedPrompt(
                number=0,
                ids=_present(ids[at]),
                data=source.values(rows[at], rendered[at].value, places[at]),
                text=rendered[at].text,
                response_ids=response_ids[at],
                learned=None if (response := responses[at]) is None else response.learned,
                images=rendered[at].images,
                environment=source.environment,
                row=int(positions[at]),
            )
            for at in np.flatnonzero(fits).tolist()
        ]

    def _response(self, prompt: RenderedPrompt) -> LearnedTokens | None:
        return self._source.renderer.response_tokens(prompt) if prompt.response else None

    def _fitting(self, ids: Ids | None, response_ids: Ids | None, place: str) -> bool:
        """Whether a prompt and its response are short enough. Raises `UsageError` if not and the data says "refuse"."""
        limit = self._settings.prompt_tokens_max
        if ids is not None and not len(ids):
            raise UsageError(f"{place}: the prompt has no tokens; a response needs something to follow")
        if ids is None or len(ids) > limit:
            tokens = f"over {limit}" if ids is None else f"{len(ids)}"
            return self._dropped(f"{place}: the prompt has {tokens} tokens; data.prompt_tokens_max={limit}")
        if response_ids is not None and len(response_ids) > self._tokens_max:
            tokens = f"{len(response_ids)} tokens; sampling.tokens_max={self._tokens_max}"
            return self._dropped(f"{place}: the response has {tokens}")
        return True

    def _dropped(self, reason: str) -> Literal[False]:
        if self._settings.overlong == "refuse":
            raise UsageError(f'{reason}: raise it, or set data.overlong="drop"')
        return False

    def _check_some_fit(self) -> None:
        if (self._fits == _TOO_LONG).all():
            raise UsageError(
                f"none of the {len(self._fits):,} prompts of {self._named} fits into data.prompt_tokens_max="
                f"{self._settings.prompt_tokens_max} tokens; raise it"
            )


class PromptSequence:
    """Yields the prompts of a run in order. tokens_max: most tokens of a response that is learned (sft).

    A prompt with more than `data.prompt_tokens_max` tokens is left out (`dropped` counts rows of the data), or is a
    `UsageError` if the data says "refuse". `UsageError` too if no prompt of a source fits.
    """

    def __init__(self, data: PromptData, settings: DataSettings, *, seed: int, tokens_max: int = 0) -> None:
        named = [each.path for each in settings.sources] or [settings.path]
        terms: dict[str, Any] = {"seed": seed, "shuffle": settings.shuffle, "epochs": settings.epochs}
        self.sizes = [len(source.rows) for source in data.sources]
        """Rows of each source."""
        self._ends = np.cumsum(self.sizes)
        self._sources = [
            SourceSequence(
                source, name, settings, DataOrder(self.sizes[place], **terms, source=place), tokens_max=tokens_max
            )
            for place, (source, name) in enumerate(zip(data.sources, named, strict=True))
        ]
        self._weights = [source.weight for source in data.sources]
        self.number = 0
        """Number of the next prompt."""

    @property
    def dropped(self) -> int:
        """Rows of the data with too many tokens, as far as they have been read."""
        return sum(source.dropped for source in self._sources)

    @property
    def places(self) -> list[int]:
        """Place of the next row in the order of each source."""
        return [source.place for source in self._sources]

    def go_to(self, number: int, places: Sequence[int]) -> None:
        """Go on with the prompt `number`, and with these places."""
        self.number = number
        for source, place in zip(self._sources, places, strict=True):
            source.place = place

    def take(
        self, count: int, chosen: Callable[[int, int], Sequence[int]] = lambda source, count: ()
    ) -> list[NumberedPrompt]:
        """Return the next `count` prompts; fewer if the data ends.

        chosen: called with a source and how many prompts are to be of it; returns rows of it that come first, and in
        place of those with too many tokens the next in order.
        """
        places = sources_of(self.number, count, self._weights)
        counts = np.bincount(places, minlength=len(self._sources)).tolist()
        own = [source.at(chosen(place, counts[place])) for place, source in enumerate(self._sources)]
        drawn = [
            iter([*first, *source.take(each - len(first))])
            for source, first, each in zip(self._sources, own, counts, strict=True)
        ]
        prompts = [(place, prompt) for place in places.tolist() if (prompt := next(drawn[place], None)) is not None]
        taken = [
            replace(prompt, number=number, row=self._first_row(place) + prompt.row)
            for number, (place, prompt) in enumerate(prompts, self.number)
        ]
        self.number += len(taken)
        return taken

    def at(self, number: int, rows: Sequence[int]) -> list[NumberedPrompt]:
        """Return the prompts of rows of the data, numbered from `number` on, wherever they are in the order. Raises
        `UsageError` for one with too many tokens."""
        prompts = []
        for at, row in enumerate(rows, number):
            place = int(np.searchsorted(self._ends, row, "right"))
            found = self._sources[place].at([row - self._first_row(place)])
            if not found:
                raise UsageError(
                    f"prompt {at} of the run, row {row} of the data, was chosen before, and has over "
                    "data.prompt_tokens_max tokens now; set it as it was"
                )
            prompts.append(replace(found[0], number=at, row=row))
        return prompts

    def _first_row(self, place: int) -> int:
        return int(self._ends[place]) - self.sizes[place]

    def take_one_of_each(self, besides: Collection[str]) -> list[NumberedPrompt]:
        """Return a prompt of each environment but `besides`, for a trial: the next of its first source. These sources
        are ahead of their order then."""
        first = {source.environment: source for source in reversed(self._sources)}
        drawn = [prompt for name, source in first.items() if name not in besides for prompt in source.take(1)]
        return [replace(prompt, number=number) for number, prompt in enumerate(drawn, self.number)]

    def skip(self, count: int) -> int:
        """Go `count` prompts ahead, as if they had been taken; return how many there were, fewer if the data ends."""
        counts = [count] if len(self._sources) == 1 else self._counts(count)
        skipped = sum(source.skip(each) for source, each in zip(self._sources, counts, strict=True))
        self.number += skipped
        return skipped

    def _counts(self, count: int) -> list[int]:
        """Return how many of the next prompts are of each source."""
        counts = np.zeros(len(self._sources), np.int64)
        for first in range(0, count, _COUNTED_TOGETHER):
            places = sources_of(self.number + first, min(_COUNTED_TOGETHER, count - first), self._weights)
            counts += np.bincount(places, minlength=len(counts))
        return counts.tolist()


def sources_of(number: int, count: int, weights: Sequence[float]) -> Positions:
    """Return the sources of `count` prompts from `number` on.

    Prompt n is of the source in whose part of the interval [0, 1) the number frac(n · φ) lies, with φ the golden ratio
    less 1; parts are as wide as weights. So any stretch of prompts has each source about as often as its weight says,
    and which it is depends on n alone.

    >>> sources_of(0, 8, [3.0, 1.0]).tolist()
    [0, 0, 0, 1, 0, 0, 0, 0]
    """
    points = np.arange(number, number + count) * _GOLDEN % 1.0
    ends = np.cumsum(weights) / np.sum(weights)
    return np.minimum(np.searchsorted(ends, points, "right"), len(ends) - 1)


def held_out_prompts(data: Mapping[str, PromptData], job: Job) -> dict[str, list[NumberedPrompt]]:
    """Return the first `evaluation.rows` prompts that fit of each set of `open_held_out`, in the order of its file,
    numbered from 0."""
    most = {each.name: each.rows for each in job.evaluation.sets}
    settings = msgspec.structs.replace(job.data, sources=(), shuffle=False, epochs=1)
    taken = {}
    for name, prompts in data.items():
        path = next((each.path for each in job.evaluation.sets if each.name == name), job.evaluation.path)
        named = msgspec.structs.replace(settings, path=path)
        sequence = PromptSequence(prompts, named, seed=job.seed, tokens_max=job.sampling.tokens_max)
        taken[name] = sequence.take(most.get(name) or job.evaluation.rows)
    return taken


def _present(ids: Ids | None) -> Ids:
    return np.empty(0, np.int32) if ids is None else ids
