"""Whether a ranker ranks: recall at the longest rows, and a test against chance.

1. *Recall* at a share is the part of the truly longest rows that are among as many predicted longest. Every row
   predicted before its generation counts.
2. Rows of one prompt share a prediction and resemble each other, so the test is over prompts: their mean length against
   their prediction.
3. Under chance the hits among the longest fifth of n prompts, m of them, are hypergeometric: mean m²/n, variance m²(n −
   m)² / (n²(n − 1)). A ranker has *skill* if its hits lie `SKILL_Z` standard deviations above that mean: chance passes
   one test in a hundred. With fewer than `PROMPTS_MIN` prompts it has no skill.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

SHARES: Final = (0.2, 0.1, 0.05)
SKILL_SHARE: Final = 0.2
SKILL_Z: Final = 2.33
PROMPTS_MIN: Final = 20


class RankerAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """How well a ranker ranked the last rows. recall: of rows, at each of `SHARES` (empty: no rows). z: of the test;
    skilled: its result.
    """

    rows: int = 0
    prompts: int = 0
    recall: tuple[float, ...] = ()
    z: float = 0.0

    @property
    def skilled(self) -> bool:
        """Whether the ranker is better than chance (rule 3)."""
        return self.prompts >= PROMPTS_MIN and self.z >= SKILL_Z

    def why(self) -> str:
        """Return the result of the test as a sentence's end."""
        if self.prompts < PROMPTS_MIN:
            return f"{self.prompts} of {PROMPTS_MIN} prompts seen"
        than = "better than chance" if self.skilled else "no better than chance"
        return f"recall {self.recall[0]:.2f} of the longest fifth, {than} (z = {self.z:.1f}, wanted {SKILL_Z})"


def accuracy_of(prompts: NDArray[Any], expected: NDArray[Any], actual: NDArray[Any]) -> RankerAccuracy:
    """Return the accuracy over rows: the number of each row's prompt, its expected tokens, and its tokens; ``[rows]``
    each.

    >>> lengths = np.arange(100)
    >>> accuracy_of(lengths, lengths, lengths).recall, accuracy_of(lengths, lengths, lengths).skilled
    ((1.0, 1.0, 1.0), True)
    >>> accuracy_of(lengths, np.zeros(100), lengths).skilled
    False
    """
    if not len(actual):
        return RankerAccuracy()
    _, at = np.unique(prompts, return_inverse=True)
    count = np.bincount(at)
    expected_P, actual_P = np.bincount(at, expected) / count, np.bincount(at, actual) / count
    return RankerAccuracy(
        rows=len(actual),
        prompts=count.size,
        recall=tuple(round(recall(actual, expected, share), 4) for share in SHARES),
        z=round(_z(expected_P, actual_P), 2),
    )


def recall(lengths: NDArray[Any], predicted: NDArray[Any], share: float) -> float:
    """Return the share of the truly longest rows that are among the predicted longest. lengths, predicted: ``[rows]``
    tokens.
    """
    top = max(1, int(lengths.size * share))
    return _hits(lengths, predicted, top) / top


def _hits(lengths: NDArray[Any], predicted: NDArray[Any], top: int) -> int:
    longest = set(np.argsort(-lengths, kind="stable")[:top].tolist())
    return len(longest & set(np.argsort(-predicted, kind="stable")[:top].tolist()))


def _z(expected: NDArray[Any], actual: NDArray[Any]) -> float:
    """Standard deviations of the hits above chance; 0 where all predictions, or all lengths, are equal."""
    n = actual.size
    if n < 2 or np.ptp(expected) == 0 or np.ptp(actual) == 0:
        return 0.0
    m = max(1, int(n * SKILL_SHARE))
    deviation = m * (n - m) / (n * math.sqrt(n - 1))
    return (_hits(actual, expected, m) - m * m / n) / deviation
