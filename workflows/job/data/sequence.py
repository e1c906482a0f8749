"""The prompts of a run, numbered 0, 1, … over epochs: each epoch is a permutation of the data that the seed determines.
Of several sources each has its epochs, and every place takes the next row of one of them, by weight.

A *place* counts rows of the data in the order in which they are used; a *number* counts those that became prompts. Both
differ once a prompt with too many tokens is dropped. Whether a row fits is the same in every epoch, so it is asked
once: a run that starts again at number n reads the prompts before it, at most one pass over the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Ids
from transferqueue.errors import UsageError, listing
from transferqueue.workflows.job.data.prompt_data import PromptData
from transferqueue.workflows.job.data.prompts import LearnedTokens, RenderedPrompt
from transferqueue.workflows.job.settings.job import DataSettings, Job

Positions = npt.NDArray[np.int64]

SKIPPED_TOGETHER: Final = 256
"""Prompts that are tokenized in one call when a run starts again."""
_COUNTED_TOGETHER: Final = 1 << 20
"""Places of a mixture that are counted in one call when a run starts again."""
_GOLDEN: Final = (5**0.5 - 1) / 2
_UNKNOWN, _FITS, _TOO_LONG = np.int8(0), np.int8(1), np.int8(-1)


@dataclass(frozen=True, kw_only=True)
class NumberedPrompt:
    """One prompt. number: its place in the run. ids: int32 ``[P]``. data: value of column ``data``. response_ids: int32
    ``[T]`` for sft. learned: bool ``[T]``, which of them it learns; None: all. environment: name of the one that plays
    it; empty: the only one, if any."""

    number: int
    ids: Ids
    data: dict[str, Any]
    text: str
    response_ids: Ids | None = None
    learned: npt.NDArray[np.bool_] | None = None
    environment: str = ""


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


class MixtureOrder:
    """Positions of rows of several sources, whose rows are numbered source after source.

    Place p takes the source in whose part of the interval [0, 1) the number frac(p · φ) lies, with φ the golden ratio
    less 1; parts are as wide as weights. So any stretch of places has each source about as often as its weight says,
    and which it is depends on p alone. rows, weights: of each source.
    """

    def __init__(self, rows: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self.rows = sum(rows)
        self._orders = [
            DataOrder(count, seed=seed, shuffle=shuffle, source=number) for number, count in enumerate(rows)
        ]
        self._first = np.cumsum([0, *rows[:-1]], dtype=np.int64)
        self._ends = np.cumsum(weights) / np.sum(weights)
        self._place, self._taken = 0, np.zeros(len(rows), np.int64)

    def positions(self, place: int, count: int) -> Positions:
        """Return the positions of `count` places from `place` on.

        >>> MixtureOrder([100, 10], [3.0, 1.0], seed=0, shuffle=False).positions(0, 8).tolist()
        [0, 1, 2, 100, 3, 4, 5, 6]
        """
        self._go_to(place)
        sources = self._sources(place, count)
        positions = np.empty(count, np.int64)
        for number in range(len(self._orders)):
            mine = np.flatnonzero(sources == number)
            positions[mine] = self._next_of(number, len(mine))
        self._place += count
        return positions

    def _sources(self, place: int, count: int) -> Positions:
        points = np.arange(place, place + count) * _GOLDEN % 1.0
        sources: Positions = np.minimum(np.searchsorted(self._ends, points, "right"), len(self._ends) - 1)
        return sources

    def _next_of(self, number: int, count: int) -> Positions:
        """Take the next rows of a source."""
        parts: list[Positions] = []
        left = count
        while left:
            parts.append(self._orders[number].positions(int(self._taken[number]), left))
            self._taken[number] += len(parts[-1])
            left -= len(parts[-1])
        positions: Positions = np.concatenate([*parts, np.empty(0, np.int64)]) + self._first[number]
        return positions

    def _go_to(self, place: int) -> None:
        """Count what the places before `place` took of each source."""
        if place < self._place:
            self._place, self._taken = 0, np.zeros_like(self._taken)
        for first in range(self._place, place, _COUNTED_TOGETHER):
            sources = self._sources(first, min(_COUNTED_TOGETHER, place - first))
            self._taken += np.bincount(sources, minlength=len(self._taken))
        self._place = place


class PromptSequence:
    """Yields the prompts of a run in order. tokens_max: most tokens of a response that is learned (sft).

    A prompt with more than `data.prompt_tokens_max` tokens is left out (`dropped` counts rows of the data), or is a
    `UsageError` if the data says "refuse". `UsageError` too if no prompt fits.
    """

    def __init__(self, data: PromptData, settings: DataSettings, *, seed: int, tokens_max: int = 0) -> None:
        self._data, self._settings = data, settings
        self._tokens_max = tokens_max
        self._order = _order_of(data, settings, seed)
        self._fits = np.full(len(data), _UNKNOWN, np.int8)
        self._place = self._number = 0

    @property
    def number(self) -> int:
        """Number of the next prompt."""
        return self._number

    @property
    def dropped(self) -> int:
        """Rows of the data with too many tokens, as far as they have been read."""
        return int(np.count_nonzero(self._fits == _TOO_LONG))

    def take(self, count: int) -> list[NumberedPrompt]:
        """Return the next `count` prompts; fewer if the data ends."""
        taken: list[NumberedPrompt] = []
        while len(taken) < count:
            positions = self._order.positions(self._place, count - len(taken))
            if not len(positions):
                break
            self._place += len(positions)
            fitting = self._numbered(positions[self._fits[positions] != _TOO_LONG], self._number + len(taken))
            if not fitting:
                self._check_some_fit()
            taken += fitting
        self._number += len(taken)
        return taken

    def skip(self, count: int) -> int:
        """Go `count` prompts ahead, as if they had been taken; return how many there were, fewer if the data ends."""
        left = count
        while left:
            left -= self._skip_epochs(left)
            positions = self._order.positions(self._place, SKIPPED_TOGETHER)
            if not left or not len(positions):
                break
            self._numbered(positions[self._fits[positions] == _UNKNOWN], 0)
            fitting = np.cumsum(self._fits[positions] == _FITS)
            if not fitting[-1]:
                self._check_some_fit()
            places = min(int(np.searchsorted(fitting, left)) + 1, len(positions))
            left -= int(fitting[places - 1])
            self._place += places
        self._number += count - left
        return count - left

    def _skip_epochs(self, count: int) -> int:
        """Skip whole epochs, if it is known which rows fit."""
        is_mixed = isinstance(self._order, MixtureOrder)
        if is_mixed or self._place % self._order.rows or (self._fits == _UNKNOWN).any() or self._settings.epochs:
            return 0
        in_epoch = int(np.count_nonzero(self._fits == _FITS))
        self._place += count // in_epoch * self._order.rows
        return count // in_epoch * in_epoch

    def _numbered(self, positions: Positions, number: int) -> list[NumberedPrompt]:
        """Return the prompts that fit among these rows, numbered from `number` on."""
        if not len(positions):
            return []
        located = [self._data.source_of(int(position)) for position in positions]
        rows = [source.rows.row(at) for source, at in located]
        places = [source.rows.place(at) for source, at in located]
        rendered = [
            source.renderer.render(row, place) for (source, _), row, place in zip(located, rows, places, strict=True)
        ]
        ids = self._data.renderer.tokens(rendered)
        responses = [self._response(prompt) for prompt in rendered]
        response_ids = [None if response is None else response.ids for response in responses]
        fits = np.array([self._fitting(*each) for each in zip(ids, response_ids, places, strict=True)])
        self._fits[positions] = np.where(fits, _FITS, _TOO_LONG)
        return [
            NumberedPrompt(
                number=number + before,
                ids=_present(ids[at]),
                data=located[at][0].values(rows[at], rendered[at].value, places[at]),
                text=rendered[at].text,
                response_ids=response_ids[at],
                learned=None if (response := responses[at]) is None else response.learned,
                environment=located[at][0].environment,
            )
            for before, at in enumerate(np.flatnonzero(fits).tolist())
        ]

    def _response(self, prompt: RenderedPrompt) -> LearnedTokens | None:
        return self._data.renderer.response_tokens(prompt) if prompt.response else None

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
                f"none of the {len(self._fits):,} prompts of {_named(self._settings)} fits into data.prompt_tokens_max="
                f"{self._settings.prompt_tokens_max} tokens; raise it"
            )


def _order_of(data: PromptData, settings: DataSettings, seed: int) -> DataOrder | MixtureOrder:
    rows = [len(source.rows) for source in data.sources]
    if len(rows) == 1:
        return DataOrder(rows[0], seed=seed, shuffle=settings.shuffle, epochs=settings.epochs)
    weights = [source.weight for source in data.sources]
    return MixtureOrder(rows, weights, seed=seed, shuffle=settings.shuffle)


def _named(settings: DataSettings) -> str:
    return settings.path or listing(source.path for source in settings.sources)


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
