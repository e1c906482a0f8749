"""Output-length rankers: predict which prompts get long answers, from the prompt or from its earlier answers.

Rules (StreamRL, arXiv 2504.15930, section 5; RhymeRL and SPEC-RL for the history):

1. Only ranks are used: a score orders rows and is not a number of tokens. Predictions are therefore judged by `recall` at the top.
2. `PromptRanker` is a small model of the prompt's tokens alone: hashed counts, two layers, squared error of log length. The
   whole prompt set is scored once, offline; a further `fit` on recent rows continues the training.
3. `HistoryRanker` is the alternative without a model: the mean log length of a prompt's rows, shrunk towards the mean
   of all while they are few.
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
"""Token counts are hashed into this many buckets; the prompt's length is one more input."""
HIDDEN: Final = 64
EPOCHS: Final = 20
BATCH: Final = 256
RATE: Final = 3e-3
DECAY: Final = 1e-3
_MULTIPLIER: Final = 2654435761
"""Knuth's multiplicative hash: neighbouring token ids fall into different buckets."""


def _features(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return log counts of hashed tokens and log length: float32 ``[rows, BUCKETS + 1]``."""
    features = torch.zeros(len(prompts), BUCKETS + 1)
    for row, ids in enumerate(prompts):
        hashed = (np.asarray(ids, dtype=np.uint64) * np.uint64(_MULTIPLIER) % np.uint64(2**32)) >> np.uint64(23)
        features[row, :BUCKETS] = torch.from_numpy(np.bincount(hashed.astype(np.int64), minlength=BUCKETS)).float()
        features[row, BUCKETS] = len(ids)
    return torch.log1p(features)


def _checked(count: int, lengths: Sequence[int]) -> NDArray[np.float64]:
    lengths_B = np.asarray(lengths, dtype=np.float64)
    if lengths_B.shape != (count,) or not count or not lengths_B.min() >= 1:
        raise UsageError(f"{count} prompts and lengths {lengths_B.shape}: give one positive number of tokens a prompt")
    return np.log(lengths_B)


class PromptRanker:
    """Scores prompts by a trained model. seed: fixes its weights and the order of training rows."""

    def __init__(self, *, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = torch.nn.Sequential(
                torch.nn.Linear(BUCKETS + 1, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, 1)
            )
        self._centre: float | None = None

    def fit(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, epochs: int = EPOCHS) -> None:
        """Train on prompts (token ids) and the observed lengths of their answers; a further call continues. Blocks (seconds)."""
        targets = torch.from_numpy(_checked(len(prompts), lengths)).float()
        self._centre = float(targets.mean()) if self._centre is None else self._centre
        features, targets = _features(prompts), targets - self._centre
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE, weight_decay=DECAY)
        for _ in range(epochs):
            for rows in torch.randperm(len(prompts), generator=self._random).split(BATCH):
                loss = (self._model(features[rows]).squeeze(1) - targets[rows]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def score(self, prompts: Sequence[Sequence[int]]) -> Scores:
        """Return scores float64 ``[rows]``; a larger score predicts a longer answer. Raises `UsageError` before the first `fit`."""
        if self._centre is None:
            raise UsageError("this ranker has seen no lengths; fit it on observed rows first")
        with torch.no_grad():
            scores: Scores = self._model(_features(prompts)).squeeze(1).double().numpy()
        return scores


class HistoryRanker:
    """Scores prompts by their earlier answers. weight: number of rows that the mean of all prompts counts for."""

    def __init__(self, *, weight: float = 1.0) -> None:
        if not weight > 0:
            raise UsageError(f"weight={weight} is not a positive number of rows")
        self._weight = weight
        self._seen: dict[str, tuple[float, int]] = {}
        self._sum, self._count = 0.0, 0

    def fit(self, keys: Sequence[str], lengths: Sequence[int]) -> None:
        """Add the observed lengths of the prompts named by `keys`; calls add up."""
        for key, length in zip(keys, _checked(len(keys), lengths), strict=True):
            total, count = self._seen.get(key, (0.0, 0))
            self._seen[key] = (total + float(length), count + 1)
            self._sum, self._count = self._sum + float(length), self._count + 1

    def score(self, keys: Sequence[str]) -> Scores:
        """Return scores float64 ``[rows]``; an unknown prompt gets the mean of all. Raises `UsageError` before the first `fit`."""
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
    """Turn scores ``[rows]`` into predicted tokens int64 ``[rows]``, for the fact ``tokens``.

    A row gets the quantile of the observed `lengths` at its rank.
    """
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    at = (ranks + 0.5) / len(scores)
    predicted: NDArray[np.int64] = np.quantile(lengths, at, method="nearest").astype(np.int64)
    return predicted
