"""Predicts the length of a prompt's answer, and learns from finished rows while a job runs.

1. The model is ridge regression of the log length on the prompt: log counts of hashed tokens and of hashed pairs of
   neighbours, and its log length. It is kept as sufficient statistics (a square matrix), so its memory does not grow
   with the rows. Older rows weigh less, half after `HALF_LIFE` rows, since the policy changes.
2. The history of a prompt is the mean log length of its earlier answers. It is shrunk towards the model: with n answers
   it weighs n / (n + `MODEL_ROWS`). (RhymeRL and SPEC-RL rank by history; the combination is the usual empirical Bayes
   estimate.)
3. `observe` adds rows, `refit` solves for new weights, `predict` reads the weights of the last refit: one thread may
   predict while another learns. The number of refits is the version of the ranker.
4. Only the order of predictions is reliable. For seconds, multiply them by ratios of actual to expected lengths
   (`schedule`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import UsageError
from transferqueue.workflows.planner.engine_times import Lengths

"""Tokens of answers: int64 ``[rows]``."""
TOKEN_BUCKETS: Final = 512
PAIR_BUCKETS: Final = 256
FEATURES: Final = TOKEN_BUCKETS + PAIR_BUCKETS + 2
"""Hashed tokens, hashed pairs of neighbours, log length of the prompt, and the constant."""
HALF_LIFE: Final = 16_384
"""Rows after which a row weighs half."""
RIDGE: Final = 3.0
"""Penalty of the weights: of 3, 10, 30 and 100 the best on 256 to 2,048 synthetic rows, and as good as the others on
4,096.
"""
PAIR_RIDGE: Final = 100.0
"""Penalty of the weights of pairs: there are more kinds of pairs than of tokens, and each is seen less, so those that
say nothing must not outweigh tokens that do.
"""
MODEL_ROWS: Final = 1.0
"""Answers that the model's prediction counts for beside the history of a prompt."""
HISTORY_ROWS_MAX: Final = 32.0
"""Weight of a history at most, in answers, so that a prompt whose answers grew is noticed."""
PROMPTS_MAX: Final = 1 << 16
"""Prompts whose history is kept: those seen last."""
_MULTIPLIER: Final = 2654435761
"""Knuth's multiplicative hash: neighbouring token ids fall into different buckets."""
_PAIR: Final = 40503


class LengthRanker:
    """Expected lengths of answers, learned from finished rows while a job runs.

    One thread may predict while another learns.

    Args:
        prompts_max: prompts whose history is kept, those seen last; at least 1; default 65536.

    Raises:
        UsageError: `prompts_max` below 1.

    Example:
        >>> ranker = LengthRanker()
        >>> ranker.observe([[1, 2], [8, 9]] * 50, [10, 1000] * 50)
        >>> ranker.refit()
        >>> short, long = ranker.predict([[1, 2], [8, 9]])
        >>> bool(short < 50 < 500 < long)
        True
    """

    def __init__(self, *, prompts_max: int = PROMPTS_MAX) -> None:
        if prompts_max < 1:
            raise UsageError(f"prompts_max={prompts_max} is not a positive number of prompts")
        self._prompts_max = prompts_max
        self._products = np.zeros((FEATURES, FEATURES))
        self._targets = np.zeros(FEATURES)
        self._history: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self._weights: NDArray[Any] | None = None
        self.rows = 0
        self.version = 0

    def observe(self, prompts: Sequence[Any], lengths: Sequence[int] | Lengths) -> None:
        """Add finished rows. They count in predictions after the next `refit`.

        Args:
            prompts: token ids of each prompt.
            lengths: tokens of its answer, at least 1.

        Raises:
            UsageError: other than one positive length a prompt.
        """
        logs_R = _logs(len(prompts), lengths)
        features_RF = _features(prompts)
        faded = 0.5 ** (len(prompts) / HALF_LIFE)
        self._products = self._products * faded + features_RF.T @ features_RF
        self._targets = self._targets * faded + features_RF.T @ logs_R
        for ids, log in zip(prompts, logs_R.tolist(), strict=True):
            self._remember(_key(ids), log)
        self.rows += len(prompts)

    def refit(self) -> None:
        """Make the observed rows count in predictions. Blocks for tens of milliseconds.

        Raises:
            UsageError: no row was observed.
        """
        if not self.rows:
            raise UsageError("this ranker has seen no lengths; let it observe finished rows first")
        penalty = np.full(FEATURES, RIDGE)
        penalty[TOKEN_BUCKETS:-2] = PAIR_RIDGE
        penalty[-1] = 1e-6
        weights: NDArray[Any] = np.linalg.solve(self._products + np.diag(penalty), self._targets)
        self._weights = weights
        self.version += 1

    def predict(self, prompts: Sequence[Any]) -> Lengths:
        """Return expected lengths: int64 ``[rows]``, at least 1.

        Args:
            prompts: token ids of each prompt.

        Raises:
            UsageError: before the first `refit`.
        """
        weights_F = self._weights
        if weights_F is None:
            raise UsageError("this ranker has not been fitted; call refit after it has observed finished rows")
        if not len(prompts):
            return np.empty(0, np.int64)
        logs = (_features(prompts) @ weights_F).tolist()
        known = [self._history.get(_key(ids), (0.0, 0.0)) for ids in prompts]
        shrunk = [
            (total + MODEL_ROWS * log) / (count + MODEL_ROWS) for log, (total, count) in zip(logs, known, strict=True)
        ]
        expected: Lengths = np.exp(np.clip(shrunk, 0.0, 30.0)).round().astype(np.int64)
        return expected

    def saved(self) -> dict[str, NDArray[Any]]:
        """Return the ranker as arrays, for `restored`."""
        history = list(self._history.items())
        return {
            "products": self._products,
            "targets": self._targets,
            "weights": np.empty(0) if self._weights is None else self._weights,
            "counts": np.array([self.rows, self.version]),
            "keys": np.frombuffer(b"".join(key for key, _ in history), np.uint8),
            "history": np.array([value for _, value in history]).reshape(-1, 2),
        }

    @classmethod
    def restored(cls, arrays: dict[str, NDArray[Any]], *, prompts_max: int = PROMPTS_MAX) -> LengthRanker:
        """Make a ranker from the arrays that `saved` returned.

        Args:
            arrays: by name.
            prompts_max: as of `LengthRanker`; default 65536.

        Raises:
            UsageError: arrays of another form.
        """
        ranker = cls(prompts_max=prompts_max)
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes.get("products") != (FEATURES, FEATURES) or shapes.get("targets") != (FEATURES,):
            raise UsageError(
                f"arrays {shapes} are not a ranker with {FEATURES} features; another version saved it: leave them out"
            )
        ranker._products, ranker._targets = arrays["products"], arrays["targets"]
        ranker._weights = arrays["weights"] if arrays["weights"].size else None
        ranker.rows, ranker.version = (int(count) for count in arrays["counts"])
        keys = arrays["keys"].tobytes()
        for at, (total, count) in enumerate(arrays["history"].tolist()[-prompts_max:]):
            ranker._history[keys[at * _KEY_BYTES : (at + 1) * _KEY_BYTES]] = (total, count)
        return ranker

    def _remember(self, key: bytes, log: float) -> None:
        total, count = self._history.get(key, (0.0, 0.0))
        kept = min(1.0, (HISTORY_ROWS_MAX - 1) / count) if count else 1.0
        self._history[key] = (total * kept + log, count * kept + 1)
        self._history.move_to_end(key)
        if len(self._history) > self._prompts_max:
            self._history.popitem(last=False)


_KEY_BYTES: Final = 8


def _key(ids: Any) -> bytes:
    return blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=_KEY_BYTES).digest()


def _features(prompts: Sequence[Any]) -> NDArray[np.float64]:
    """Return the features of prompts: float64 ``[rows, FEATURES]``."""
    features_RF = np.empty((len(prompts), FEATURES))
    for row, ids in enumerate(prompts):
        tokens = np.asarray(ids, np.uint64)
        pairs = tokens[:-1] * np.uint64(_PAIR) + tokens[1:]
        features_RF[row, :TOKEN_BUCKETS] = _counts(tokens, TOKEN_BUCKETS)
        features_RF[row, TOKEN_BUCKETS:-2] = _counts(pairs, PAIR_BUCKETS)
        features_RF[row, -2] = tokens.size
    np.log1p(features_RF[:, :-1], out=features_RF[:, :-1])
    features_RF[:, -1] = 1.0
    return features_RF


def _counts(values: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    hashed = (values * np.uint64(_MULTIPLIER) % np.uint64(1 << 32)) // np.uint64((1 << 32) // buckets)
    return np.bincount(hashed.astype(np.int64), minlength=buckets)


def _logs(count: int, lengths: Sequence[int] | Lengths) -> NDArray[np.float64]:
    lengths_R = np.asarray(lengths, np.float64)
    if lengths_R.shape != (count,) or not count or not lengths_R.min() >= 1:
        raise UsageError(f"{count} prompts and lengths {lengths_R.shape}: give one positive number of tokens a prompt")
    return np.log(lengths_R)
