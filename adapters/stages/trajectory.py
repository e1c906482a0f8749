"""A token sequence of several turns: the tokens that the model read and those that it drew, in order.

Tokens are appended and never made from text again, so each drawn token keeps the context that it was drawn in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from transferqueue.adapters.protocols import Completion, Ids

FIELDS: Final = ("input_ids", "loss_mask", "rollout_logprobs")
"""Fields of a trajectory: int32, bool and float32 ``[tokens]``. `loss_mask` is true where the model drew the token;
elsewhere the log-probability is 0.
"""


@dataclass
class Trajectory:
    """Tokens, a mask of those that the model drew, their log-probabilities, and the versions that drew them.

    Args:
        ids: the tokens; default: none.
        drawn: whether the model drew each token.
        logprobs: of each token; 0 where it was not drawn.
        token_versions: of each token; -1 where it was not drawn; the oldest possible one where only the versions of a
            whole answer are known.
        versions: all versions that drew a token.
        last: the completion that was added last; its engine has read all tokens before it.
    """

    ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    last: Completion | None = None

    def add_input(self, ids: Sequence[int] | Ids) -> None:
        """Append tokens that the model read.

        Args:
            ids: int ``[tokens]``.
        """
        self.ids += [int(token) for token in ids]
        self.drawn += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.token_versions += [-1] * len(ids)

    def add_output(self, ids: Sequence[int] | Ids, logprobs: Iterable[float], versions: Iterable[int]) -> None:
        """Append tokens that the model drew.

        Args:
            ids: int ``[tokens]``.
            logprobs: of each token.
            versions: of the weights that drew them.
        """
        drew = set(versions)
        self._add_drawn(ids, logprobs, [min(drew, default=-1)] * len(ids))
        self.versions |= drew

    def add_completion(self, completion: Completion) -> None:
        """Append the tokens of a completion, each with its version.

        Args:
            completion: the completion.
        """
        self._add_drawn(completion.ids, completion.logprobs, completion.versions.tolist())
        self.versions |= {version for version, _ in completion.spans}
        self.last = completion

    def _add_drawn(self, ids: Sequence[int] | Ids, logprobs: Iterable[float], versions: Sequence[int]) -> None:
        self.ids += [int(token) for token in ids]
        self.drawn += [True] * len(ids)
        self.logprobs += [float(value) for value in logprobs]
        self.token_versions += versions

    def columns(self) -> Mapping[str, Any]:
        """The values of `FIELDS` for one row."""
        values = (np.array(self.ids, np.int32), np.array(self.drawn, bool), np.array(self.logprobs, np.float32))
        return dict(zip(FIELDS, values, strict=True))

    def response(self, prompt: int) -> Mapping[str, Any]:
        """Return the values of one row without its prompt.

        They are `response_ids`, `loss_mask`, `rollout_logprobs` and `token_versions`.

        Args:
            prompt: the number of tokens of the prompt.
        """
        return {
            "response_ids": np.array(self.ids[prompt:], np.int32),
            "loss_mask": np.array(self.drawn[prompt:], bool),
            "rollout_logprobs": np.array(self.logprobs[prompt:], np.float32),
            "token_versions": np.array(self.token_versions[prompt:], np.int32),
        }

    def facts(self) -> Mapping[str, int]:
        """Policy versions and token count of the row; versions are -1 if no token was drawn or no version is known."""
        return {
            "policy_version": min(self.versions, default=-1),
            "policy_version_max": max(self.versions, default=-1),
            "tokens": len(self.ids),
        }
