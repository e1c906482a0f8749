"""A generator as a stage of a flow: prompts of leased rows in, completions out as each is finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final

import numpy as np

from transferqueue.adapters.protocols import GENERATE_S, Completion, Generator, Part, Prompt, Sampling

if TYPE_CHECKING:
    import transferqueue as tq

PART_ROWS: Final = 16
"""Completions are handed on when so many are finished, so that the next stage works while the rest is generated."""


class Generate:
    """The stage ``generate``: a completion for each row, by any `Generator`.

    Rows come back as parts, `part_rows` at a time, each stamped with the versions of its tokens. token_versions: give the
    version of each token as a column too, for weights that change in flight.
    """

    def __init__(
        self,
        generator: Generator,
        sampling: Sampling,
        *,
        prompt_field: str = "prompt_ids",
        part_rows: int = PART_ROWS,
        token_versions: bool = False,
        timeout_s: float = GENERATE_S,
    ) -> None:
        self._generator = generator
        self._sampling = sampling
        self._prompt_field = prompt_field
        self._part_rows = part_rows
        self._token_versions = token_versions
        self._timeout_s = timeout_s

    @property
    def needs(self) -> Sequence[str]:
        """The prompt."""
        return (self._prompt_field,)

    @property
    def gives(self) -> Sequence[str]:
        """The response, its log-probabilities, and how it ended."""
        return ("response_ids", "rollout_logprobs", "finish_reason", *(("token_versions",) * self._token_versions))

    def __call__(self, batch: tq.Batch) -> Iterator[Part]:
        """Yield the rows of a batch as they are finished."""
        prompts = [Prompt.of(ids) for ids in batch[self._prompt_field]]
        finished: list[Completion] = []
        with closing(self._generator.generate(prompts, self._sampling, timeout_s=self._timeout_s)) as completions:
            for completion in completions:
                finished.append(completion)
                if len(finished) >= self._part_rows:
                    yield self._part(finished)
                    finished = []
        if finished:
            yield self._part(finished)

    def _part(self, finished: Sequence[Completion]) -> Part:
        columns = {
            "response_ids": [completion.ids for completion in finished],
            "rollout_logprobs": [completion.logprobs for completion in finished],
            "finish_reason": [completion.finish_reason for completion in finished],
        }
        if self._token_versions:
            columns["token_versions"] = [completion.versions for completion in finished]
        return Part(
            at=np.array([completion.prompt for completion in finished], dtype=np.intp),
            columns=columns,
            facts={
                "policy_version": np.array([completion.policy_version for completion in finished]),
                "policy_version_max": np.array([completion.policy_version_max for completion in finished]),
                "tokens": np.array([len(completion.ids) for completion in finished]),
            },
        )
