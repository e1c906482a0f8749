"""A generator as a stage of a flow: prompts of leased rows in, completions out as each is finished.

With a budget, a completion may take several leases: an unfinished row is released with its tokens, log-probabilities
and versions, and any generator continues it under its current weights (`Prompt.begun`). A completion that was cut short
is released likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import (
    ABORT,
    GENERATE_S,
    LENGTH,
    Completion,
    Generator,
    PartialResult,
    Prompt,
    Sampling,
)
from transferqueue.errors import UsageError

if TYPE_CHECKING:
    import transferqueue as tq

PART_ROWS: Final = 16
"""Least completions of a part: the next stage works on them while the rest is generated."""

BEGUN: Final = ("begun_ids", "begun_logprobs", "begun_versions")
"""Columns of an unfinished completion, one value a token; empty if the completion has not begun."""

StalenessOf = Literal["oldest", "newest", "mean"]
"""Which of the versions of a row's tokens its staleness is measured from."""


def row_seed(seed: int, ordinal: int) -> int:
    """Return the seed of a row: a hash of the job's seed and the row's ordinal (numpy's `SeedSequence`).

    >>> row_seed(0, 1) == row_seed(0, 1) != row_seed(1, 0)
    True
    """
    return int(np.random.SeedSequence([seed, ordinal]).generate_state(1)[0])


def row_version(versions: npt.NDArray[np.int32], of: StalenessOf) -> int:
    """Return the version that a row's staleness is measured from.

    The mean is rounded down, so it is below a whole bound exactly where the mean is.

    Args:
        versions: of each token; int32 ``[tokens]``, at least one; -1: not drawn, or not known.
        of: which one; newest and mean are of known ones.

    Returns:
        The version; -1 if none is known.

    Example:
        >>> [row_version(np.array([3, 3, 6], np.int32), of) for of in ("oldest", "newest", "mean")]
        [3, 6, 4]
    """
    known = versions[versions >= 0]
    if of == "oldest" or not known.size:
        return int(versions.min())
    return int(known.max()) if of == "newest" else int(known.sum()) // known.size


class Generate:
    """The stage ``generate``: a completion for each row, by any `Generator`.

    It may be called from several threads at once. Rows come back in parts of `part_rows`, and of all that are finished
    if those are more; each row is stamped with the versions of its tokens. With `whole_groups` each request is one
    whole group (ordinals ``n * whole_groups`` and the next ones), even if the lease has a part of it; the other rows
    are generated and not used. With an engine that keeps requests apart, tokens and log-probabilities are then the
    same, bit for bit, however rows were leased.

    Args:
        generator: the engine.
        sampling: how tokens are drawn.
        prompt_field: name of the field with the prompt's token ids; default ``"prompt_ids"``.
        part_rows: least rows of a part but the last; default 16.
        token_versions: give the version of each token as a column, for weights that change in flight; default False.
        budget: the most tokens that one lease adds to a completion; default 0: no bound.
        parts: release completions that were cut short with their tokens, and read begun ones from the columns `BEGUN`;
            default False; a budget implies it.
        max_staleness: a begun completion that is more than so many versions old starts again from its prompt; default
            None: no bound.
        staleness_of: the version that a row, or a begun completion, is judged by; a row gets it as its
            `policy_version` (`row_version`). Default ``"oldest"``.
        seed: each row draws with the seed `row_seed(seed, its ordinal)`, on engines that take a seed for each prompt;
            default None.
        whole_groups: the number of rows of a group; default 0: requests are not whole groups.
        routes: give the experts that the engine chose as a column ``routes``; default False.
        images: name of the field with the encoded images of a prompt; default "": prompts have none.
        timeout_s: seconds for each request; default 600.

    Raises:
        UsageError: a negative budget, or whole groups without a seed, with a budget or with parts. Its calls too, where
            an engine gives no `routes`.
    """

    def __init__(
        self,
        generator: Generator,
        sampling: Sampling,
        *,
        prompt_field: str = "prompt_ids",
        part_rows: int = PART_ROWS,
        token_versions: bool = False,
        budget: int = 0,
        parts: bool = False,
        max_staleness: int | None = None,
        staleness_of: StalenessOf = "oldest",
        seed: int | None = None,
        whole_groups: int = 0,
        routes: bool = False,
        images: str = "",
        timeout_s: float = GENERATE_S,
    ) -> None:
        if budget < 0:
            raise UsageError(f"budget={budget} is not a number of tokens; 0 is no bound")
        if whole_groups and (budget or parts or seed is None):
            raise UsageError(
                f"whole_groups={whole_groups} with budget={budget}, parts={parts} and seed={seed}: rows that are "
                "generated again must draw the same, so give a seed, no budget and no parts"
            )
        self._generator = generator
        self._sampling = sampling
        self._prompt_field = prompt_field
        self._part_rows = part_rows
        self._token_versions = token_versions
        self._budget = budget
        self._parts = parts or bool(budget)
        self._max_staleness, self._staleness_of = max_staleness, staleness_of
        self._seed, self._whole_groups = seed, whole_groups
        self._routes, self._images = routes, images
        self._timeout_s = timeout_s

    @property
    def needs(self) -> Sequence[str]:
        """The prompt, its images, and with parts the columns `BEGUN`."""
        return (self._prompt_field, *((self._images,) if self._images else ()), *(BEGUN * self._parts))

    @property
    def gives(self) -> Sequence[str]:
        """The response, its log-probabilities, and its finish reason."""
        further = {"token_versions": self._token_versions, "routes": self._routes}
        return (
            "response_ids",
            "rollout_logprobs",
            "finish_reason",
            *(name for name, given in further.items() if given),
        )

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield the rows of a batch as they are finished. Those with the most tokens are generated first.

        Args:
            batch: a leased batch with the fields of `needs`.
        """
        yield from self.of(batch, range(len(batch)))

    def of(self, batch: tq.Batch, rows: Collection[int]) -> Iterator[PartialResult]:
        """Yield some rows of a batch as they are finished.

        Args:
            batch: a leased batch with the fields of `needs`.
            rows: positions of the rows in the batch.
        """
        prompts = self._prompts(batch)
        if self._whole_groups:
            for group in _groups(batch.ordinal, rows, self._whole_groups):
                yield from self._generate_group(batch.ordinal, group, prompts)
        elif not self._budget:
            yield from self._generate([*rows], prompts, self._sampling.tokens_max)
        else:
            by_length = sorted(rows, key=lambda at: -_tokens(prompts[at]))
            for begun, same in groupby(by_length, key=lambda at: _tokens(prompts[at])):
                yield from self._generate([*same], prompts, min(begun + self._budget, self._sampling.tokens_max))

    def _prompts(self, batch: tq.Batch) -> list[Prompt]:
        seeds = (
            [None] * len(batch) if self._seed is None else [row_seed(self._seed, at) for at in batch.ordinal.tolist()]
        )
        images = [tuple(row) for row in batch[self._images]] if self._images else [()] * len(batch)
        return [
            Prompt(ids=np.asarray(ids, np.int32), begun=begun, seed=seed, images=shown)
            for ids, begun, seed, shown in zip(
                batch[self._prompt_field], self._begun(batch), seeds, images, strict=True
            )
        ]

    def _begun(self, batch: tq.Batch) -> list[Completion | None]:
        if not self._parts:
            return [None] * len(batch)
        oldest = batch.version - self._max_staleness if self._max_staleness is not None else 0
        begun_columns = zip(*(batch[name] for name in BEGUN), strict=True)
        return [
            None
            if not len(columns[0]) or row_version(columns[2], self._staleness_of) < oldest
            else _resumed(at, *columns)
            for at, columns in enumerate(begun_columns)
        ]

    def _generate_group(
        self, ordinals: npt.NDArray[np.int64], rows: Sequence[int], prompts: Sequence[Prompt]
    ) -> Iterator[PartialResult]:
        """Generate the whole group of `rows`, and yield those of its rows as one part."""
        first = int(ordinals[rows[0]]) // self._whole_groups * self._whole_groups
        row_of = {int(ordinals[row]) - first: row for row in rows}
        group = [
            replace(prompts[rows[0]], seed=row_seed(self._seed or 0, first + sample))
            for sample in range(self._whole_groups)
        ]
        with closing(self._generator.generate(group, self._sampling, timeout_s=self._timeout_s)) as completions:
            finished = [
                replace(completion, prompt=row_of[completion.prompt])
                for completion in completions
                if completion.prompt in row_of
            ]
        yield self._part(finished)

    def _generate(self, rows: Sequence[int], prompts: Sequence[Prompt], tokens_max: int) -> Iterator[PartialResult]:
        """Complete the prompts of `rows`, to at most `tokens_max` tokens."""
        requested = [prompts[row] for row in rows]
        sampling = replace(self._sampling, tokens_max=tokens_max)
        finished: list[Completion] = []
        unfinished: list[Completion] = []
        with closing(self._generator.generate(requested, sampling, timeout_s=self._timeout_s)) as completions:
            for completion in completions:
                (unfinished if self._goes_on(completion, tokens_max) else finished).append(
                    replace(completion, prompt=rows[completion.prompt])
                )
                if len(finished) >= self._part_rows and not completion.more:
                    yield self._part(finished)
                    finished = []
        if finished:
            yield self._part(finished)
        if unfinished:
            yield _hand_back(unfinished)

    def _goes_on(self, completion: Completion, tokens_max: int) -> bool:
        """Whether another lease continues it: it has all tokens that this one allowed. An engine may end one before,
        at its own limit, and would do so again."""
        allowed = completion.finish_reason == LENGTH and tokens_max <= len(completion.ids) < self._sampling.tokens_max
        return self._parts and (allowed or completion.finish_reason == ABORT)

    def _part(self, finished: Sequence[Completion]) -> PartialResult:
        columns = {
            "response_ids": [completion.ids for completion in finished],
            "rollout_logprobs": [completion.logprobs for completion in finished],
            "finish_reason": [completion.finish_reason for completion in finished],
        }
        if self._token_versions:
            columns["token_versions"] = [completion.versions for completion in finished]
        if self._routes:
            columns["routes"] = [routes_of(completion) for completion in finished]
        return PartialResult(
            at=np.array([completion.prompt for completion in finished], dtype=np.intp),
            columns=columns,
            facts={
                "policy_version": np.array([self._version(completion) for completion in finished]),
                "policy_version_max": np.array([completion.policy_version_max for completion in finished]),
                "tokens": np.array([len(completion.ids) for completion in finished]),
            },
        )

    def _version(self, completion: Completion) -> int:
        if self._staleness_of == "oldest" or not len(completion.ids):
            return completion.policy_version
        return row_version(completion.versions, self._staleness_of)


def routes_of(completion: Completion) -> npt.NDArray[np.int16]:
    """Return the routes of a completion.

    Args:
        completion: of an engine that captures them.

    Raises:
        UsageError: the engine gave none.
    """
    if completion.routes is None:
        raise UsageError(
            "the engine gave no routes of experts: generate with an engine of kind transformers or vllm, which give "
            "them, or leave algorithm.router_replay out"
        )
    return completion.routes


def _groups(ordinals: npt.NDArray[np.int64], rows: Collection[int], size: int) -> Iterator[list[int]]:
    """Yield the positions of the rows of each group, in the order of their ordinals. Raises `UsageError` for a row
    without an ordinal."""
    in_order = sorted(rows, key=lambda row: int(ordinals[row]))
    if in_order and ordinals[in_order[0]] < 0:
        raise UsageError(
            "whole_groups with a row that has no ordinal: give each row its place in the run (`ordinal` of a put)"
        )
    for _, group in groupby(in_order, key=lambda row: int(ordinals[row]) // size):
        yield [*group]


def _tokens(prompt: Prompt) -> int:
    return 0 if prompt.begun is None else len(prompt.begun.ids)


def _resumed(
    at: int,
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    versions: npt.NDArray[np.int32],
) -> Completion:
    """Return a row's unfinished completion."""
    spans = tuple((version, sum(1 for _ in same)) for version, same in groupby(versions.tolist()))
    return Completion(prompt=at, sample=0, ids=ids, logprobs=logprobs, finish_reason=ABORT, spans=spans)


def _hand_back(unfinished: Sequence[Completion]) -> PartialResult:
    columns: Mapping[str, Any] = dict(
        zip(
            BEGUN,
            map(
                list,
                zip(
                    *((completion.ids, completion.logprobs, completion.versions) for completion in unfinished),
                    strict=True,
                ),
            ),
            strict=True,
        )
    )
    return PartialResult(
        at=np.array([completion.prompt for completion in unfinished], dtype=np.intp), columns=columns, unfinished=True
    )
