"""A sequence of several turns as it grows: what a model was told and what it said, in the order of its tokens.

Tokens are only ever added, never made anew from text, so each drawn token stands in the context it was drawn in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from transferqueue.adapters.protocols import Ids

FIELDS: Final = ("input_ids", "loss_mask", "rollout_logprobs")
"""Fields of a trajectory: int32, bool and float32 ``[tokens]``. loss_mask: the model drew it; where it did not, its
log-probability is 0."""


@dataclass
class Trajectory:
    """Tokens, which of them the model drew, their log-probabilities, and the versions that drew any."""

    ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)

    def told(self, ids: Sequence[int] | Ids) -> None:
        """Add what the model was told."""
        self.ids += [int(token) for token in ids]
        self.drawn += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def said(self, ids: Sequence[int] | Ids, logprobs: Iterable[float], versions: Iterable[int]) -> None:
        """Add what the model said, and under which versions of its weights."""
        self.ids += [int(token) for token in ids]
        self.drawn += [True] * len(ids)
        self.logprobs += [float(value) for value in logprobs]
        self.versions |= set(versions)

    def columns(self) -> Mapping[str, Any]:
        """The values of `FIELDS` for one row."""
        values = (np.array(self.ids, np.int32), np.array(self.drawn, bool), np.array(self.logprobs, np.float32))
        return dict(zip(FIELDS, values, strict=True))

    def facts(self) -> Mapping[str, int]:
        """Versions and tokens of the row; versions -1 where none is known, as nobody drew a token."""
        return {
            "policy_version": min(self.versions, default=-1),
            "policy_version_max": max(self.versions, default=-1),
            "tokens": len(self.ids),
        }
