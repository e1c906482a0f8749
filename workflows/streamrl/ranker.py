"""Output-length rankers: who will be long, from the prompt or from what a prompt took before.

Rules (StreamRL, arXiv 2504.15930, section 5; RhymeRL and SPEC-RL for the history):

1. Only ranks are used: a score orders rows, it is no number of tokens. So a prediction is checked by `recall` at the top.
2. `PromptRanker` is a small model of the prompt's tokens alone: hashed counts, two layers, squared error of log length. The
   whole prompt set is scored once, offline; `fit` again on recent rows refreshes it from where it is.
3. `HistoryRanker` is the second choice: the mean log length of a prompt's rows, drawn towards the mean of all while there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from transferqueue.errors import UsageError

Scores = NDArray[np.float64]
BUCKETS: Final = 512
"""Tokens are hashed into so many counts; the prompt's length is one more input."""
HIDDEN: Final = 64
EPOCHS: Final = 20
BATCH: Final = 256
RATE: Final = 3e-3
DECAY: Final = 1e-3
_MULTIPLIER: Final = 2654435761
"""Knuth's multiplicative hash: near token ids fall into different buckets."""


def _features(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Log counts of hashed tokens and log length: ``[rows, BUCKETS + 1]``."""
    found = torch.zeros(len(prompts), BUCKETS + 1)
    for row, ids in enumerate(prompts):
        hashed = (np.asarray(ids, dtype=np.uint64) * np.uint64(_MULTIPLIER) % np.uint64(2**32)) >> np.uint64(23)
        found[row, :BUCKETS] = torch.from_numpy(np.bincount(hashed.astype(np.int64), minlength=BUCKETS)).float()
        found[row, BUCKETS] = len(ids)
    return torch.log1p(found)


def _checked(count: int, lengths: Sequence[int]) -> NDArray[np.float64]:
    found = np.asarray(lengths, dtype=np.float64)
    if found.shape != (count,) or not count or not found.min() >= 1:
        raise UsageError(f"{count} prompts and lengths {found.shape}: give one positive number of tokens a prompt")
    return np.log(found)


class PromptRanker:
    """Scores prompts it has never seen. ``seed`` fixes its weights and the order it learns in."""

    def __init__(self, *, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = torch.nn.Sequential(
                torch.nn.Linear(BUCKETS + 1, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, 1)
            )
        self._centre: float | None = None

    def fit(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, epochs: int = EPOCHS) -> None:
        """Learn from prompts (token ids) and the lengths observed; a later call goes on from there. Blocks (seconds)."""
        wanted = torch.from_numpy(_checked(len(prompts), lengths)).float()
        self._centre = float(wanted.mean()) if self._centre is None else self._centre
        features, wanted = _features(prompts), wanted - self._centre
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE, weight_decay=DECAY)
        for _ in range(epochs):
            for rows in torch.randperm(len(prompts), generator=self._random).split(BATCH):
                loss = (self._model(features[rows]).squeeze(1) - wanted[rows]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def score(self, prompts: Sequence[Sequence[int]]) -> Scores:
        """Scores ``[rows]``; longer answers are expected of larger ones. `UsageError` before the first `fit`."""
        if self._centre is None:
            raise UsageError("this ranker has seen no lengths; fit it on observed rows first")
        with torch.no_grad():
            found: Scores = self._model(_features(prompts)).squeeze(1).double().numpy()
        return found


class HistoryRanker:
    """Scores prompts by what they took before. ``weight``: rows that the mean of all counts for."""

    def __init__(self, *, weight: float = 1.0) -> None:
        if not weight > 0:
            raise UsageError(f"weight={weight} is not a positive number of rows")
        self._weight = weight
        self._seen: dict[str, tuple[float, int]] = {}
        self._sum, self._count = 0.0, 0

    def fit(self, keys: Sequence[str], lengths: Sequence[int]) -> None:
        """Remember the lengths observed of the prompts named by ``keys``; calls add up."""
        for key, length in zip(keys, _checked(len(keys), lengths), strict=True):
            total, count = self._seen.get(key, (0.0, 0))
            self._seen[key] = (total + float(length), count + 1)
            self._sum, self._count = self._sum + float(length), self._count + 1

    def score(self, keys: Sequence[str]) -> Scores:
        """Scores ``[rows]``; an unknown prompt gets the mean of all. `UsageError` before the first `fit`."""
        if not self._count:
            raise UsageError("this history has seen no lengths; fit it on observed rows first")
        mean = self._sum / self._count
        seen = [self._seen.get(key, (0.0, 0)) for key in keys]
        return np.array([(total + self._weight * mean) / (count + self._weight) for total, count in seen])


def recall(lengths: NDArray[np.int64], predicted: NDArray[np.int64], share: float) -> float:
    """Return the share of the truly longest rows that are among the predicted longest. lengths, predicted: ``[rows]`` tokens."""
    top = max(1, int(lengths.size * share))
    return len(set(np.argsort(-lengths)[:top].tolist()) & set(np.argsort(-predicted)[:top].tolist())) / top


def as_lengths(scores: Scores, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Scores as predicted tokens: the observed ``lengths`` (``[any]``) at the same ranks; what ``tokens`` of a row holds."""
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    at = (ranks + 0.5) / len(scores)
    found: NDArray[np.int64] = np.quantile(lengths, at, method="nearest").astype(np.int64)
    return found
