"""Advantages: how far the reward of a response, or of each of its tokens, is above the expectation. Numpy only.

Group kinds compare the responses of one prompt:

- GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): ``(R - mean) / (std + eps)``. The deviation is the sample's
  (divided by n - 1), as in TRL and verl; the paper does not say which. Dr. GRPO (arXiv 2503.20783) leaves the division
  out.
- RLOO (arXiv 2402.14740): ``R`` less the mean of the other responses.

Token kinds give every token its own:

- REINFORCE++ (arXiv 2501.03262): the discounted reward from the token on, whitened over the batch.
- GAE (arXiv 1506.02438) for PPO: ``delta_t = r_t + gamma V_t+1 - V_t``, ``A_t = delta_t + gamma lam A_t+1``, whitened
  over the batch; its return is ``A_t + V_t`` before whitening.

Tokens that the policy did not choose (``mask`` False: those of tools and environments) are stepped over: the policy's
next token follows its last one. A reward falls on the last token that the policy chose.

The length penalty is DAPO's (arXiv 2503.14476, equation 13). A KL penalty in the reward uses Schulman's estimators
(http://joschu.net/blog/kl-approx.html) with the bounds that verl gives them, so that one token cannot overflow a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from transferqueue.errors import UsageError
from transferqueue.workflows.job.settings.defaults import defaults_of, filled
from transferqueue.workflows.job.settings.job import AlgorithmSettings

Floats = npt.NDArray[np.float64]
Column = npt.NDArray[np.float32]
Ragged = Sequence[npt.NDArray[np.floating]]
Masks = Sequence[npt.NDArray[np.bool_]]
Value = TypeVar("Value")

WHITEN_EPS: Final = 1e-8
"""Added to the variance by `whitened`, as in verl."""
LOG_RATIO_MAX: Final = 20.0
"""Bound of a token's log-ratio inside k3, as in verl."""
K3_MAX: Final = 10.0
"""Bound of a token's k3, as in verl."""
_EQUAL: Final = 1e-7
"""Rewards are float32: a spread below this share of the largest is rounding."""
_TINY: Final = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """What advantages are made from: R rows, one array a row where a value belongs to each of its T tokens.

    rewards: float ``[R]``. group_id: integers ``[R]``, in any order. masks: bool ``[T]``, False for tokens that the
    policy did not choose. logprobs: the policy's, float ``[T]``; ref_logprobs and values likewise. Only the columns
    that the algorithm reads are required (`transferqueue.workflows.job.settings.defaults.columns_of`). `UsageError` for
    lengths that differ and for a reward that is not finite.
    """

    rewards: npt.ArrayLike
    group_id: npt.ArrayLike
    masks: Masks = ()
    logprobs: Ragged = ()
    ref_logprobs: Ragged = ()
    values: Ragged = ()

    def __post_init__(self) -> None:
        rows = len(_checked(self.rewards, self.group_id)[0])
        for name in ("masks", "logprobs", "ref_logprobs", "values"):
            column: Ragged = getattr(self, name)
            if len(column) not in (0, rows):
                raise UsageError(f"{name} has {len(column)} rows, rewards {rows}: give each row's, or none")
            lengths = [len(mask) for mask in self.masks] if self.masks else None
            if column and lengths and [len(value) for value in column] != lengths:
                row = next(row for row, value in enumerate(column) if len(value) != lengths[row])
                raise UsageError(f"{name}[{row}] has {len(column[row])} tokens, its mask {lengths[row]}")


def advantage_columns_of(
    rows: ScoredRows, algorithm: AlgorithmSettings, *, tokens_max: int = 0
) -> dict[str, Column | list[Column]]:
    """Return the columns that task ``advantage`` gives for ``rows``, ready to be acked.

    Group kinds: ``advantages``, float32 ``[R]``. reinforce_pp: ``token_advantages``; ppo: also ``returns``; one float32
    ``[T]`` a row, 0 where the mask is False. Kinds that whiten need the rows of a whole batch in one call.
    ``tokens_max`` is the longest response that is allowed; only the overlong penalty reads it. `UsageError` for a
    column that the algorithm reads and ``rows`` lacks.

    >>> rows = ScoredRows(rewards=[1, 0, 0, 0.5], group_id=[7, 7, 7, 7])
    >>> advantage_columns_of(rows, AlgorithmSettings(kind="rloo"))["advantages"].round(4).tolist()
    [0.833299994468689, -0.5, -0.5, 0.16670000553131104]
    """
    algorithm = filled(algorithm)
    rewards_R = _checked(rows.rewards, rows.group_id)[0]
    if algorithm.overlong_buffer:
        lengths = [len(mask) for mask in _present(rows.masks, "masks")]
        rewards_R = rewards_R + overlong_penalties(
            lengths, tokens_max=tokens_max, buffer=algorithm.overlong_buffer, penalty=algorithm.overlong_penalty
        )
    kl = _reward_kl(rows, algorithm)
    if not defaults_of(algorithm.kind).tokenwise:
        if kl:
            sums_R = [float(kl_T[mask_T].sum()) for kl_T, mask_T in zip(kl, _present(rows.masks, "masks"), strict=True)]
            rewards_R = rewards_R - algorithm.kl * np.asarray(sums_R)
        return {"advantages": _compared(rewards_R, rows.group_id, algorithm)}
    return _token_columns(rows, rewards_R, kl, algorithm)


def group_advantages(
    rewards: npt.ArrayLike,
    group_id: npt.ArrayLike,
    *,
    std: Literal["sample", "population", "none"] = "sample",
    std_eps: float = 1e-4,
) -> Column:
    """Return each row's reward above its group's mean, divided by the group's deviation plus ``std_eps``: float32
    ``[R]``.

    ``std`` divides by n - 1 (sample), by n (population), or not at all (Dr. GRPO). Rows of a group with equal rewards,
    and a row alone in its group, get exactly 0. `UsageError` for lengths that differ or a reward that is not finite.

    >>> group_advantages([1.0, 0.0, 0.5, 0.5], [7, 7, 8, 8], std_eps=0.0).tolist()
    [0.7071067690849304, -0.7071067690849304, 0.0, 0.0]
    """
    rewards_R, group_R = _checked(rewards, group_id)
    sizes_R, centred_R, equal_R = _centred(rewards_R, group_R)
    if std == "none":
        return centred_R.astype(np.float32)
    divisor_R = np.maximum(sizes_R - 1, 1) if std == "sample" else sizes_R
    _, member_R = np.unique(group_R, return_inverse=True)
    deviation_R = np.sqrt(np.bincount(member_R, weights=centred_R**2)[member_R] / divisor_R) + std_eps
    return np.where(equal_R, 0.0, centred_R / np.where(equal_R, 1.0, deviation_R)).astype(np.float32)


def leave_one_out_advantages(rewards: npt.ArrayLike, group_id: npt.ArrayLike) -> Column:
    """Return each row's reward less the mean reward of the others of its group: float32 ``[R]``; 0 for a row that is
    alone.

    >>> leave_one_out_advantages([1.0, 0.0], [3, 3]).tolist()
    [1.0, -1.0]
    """
    sizes_R, centred_R, _ = _centred(*_checked(rewards, group_id))
    return (centred_R * sizes_R / np.maximum(sizes_R - 1, 1)).astype(np.float32)


def overlong_penalties(lengths: npt.ArrayLike, *, tokens_max: int, buffer: int, penalty: float = 1.0) -> Floats:
    """Return the penalty of a response's length: 0 up to ``tokens_max - buffer`` tokens, then linearly down to
    ``-penalty`` at ``tokens_max``.

    `UsageError` unless ``0 < buffer <= tokens_max``.

    >>> overlong_penalties([60, 90, 100, 120], tokens_max=100, buffer=20).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= tokens_max:
        raise UsageError(f"overlong_buffer={buffer} of tokens_max={tokens_max}: give 1 to tokens_max tokens")
    over_R = (np.asarray(lengths, dtype=np.float64) - (tokens_max - buffer)) / buffer
    return -penalty * np.clip(over_R, 0.0, 1.0) + 0.0


def kl_penalties(logprobs: Ragged, ref_logprobs: Ragged, estimator: Literal["k1", "k2", "k3"] = "k1") -> list[Floats]:
    """Return an estimate of KL(policy || reference) at each token, one array ``[T]`` a row; k1 may be negative.

    >>> kl_penalties([np.array([-1.0, -2.0])], [np.array([-1.5, -1.0])])[0].tolist()
    [0.5, -1.0]
    """
    return [
        _kl(np.asarray(logprobs_T, np.float64) - np.asarray(ref_T, np.float64), estimator)
        for logprobs_T, ref_T in zip(logprobs, ref_logprobs, strict=True)
    ]


def token_rewards(rewards: npt.ArrayLike, masks: Masks, penalties: Sequence[Floats] = ()) -> list[Floats]:
    """Return each row's rewards by token, float64 ``[T]``: the row's reward on the last unmasked token, less
    ``penalties`` on unmasked ones."""
    per_row = []
    for row, (reward, mask_T) in enumerate(zip(np.asarray(rewards, np.float64), masks, strict=True)):
        rewards_T = -penalties[row] * mask_T if penalties else np.zeros(len(mask_T))
        chosen = np.flatnonzero(mask_T)
        if len(chosen):
            rewards_T[chosen[-1]] += reward
        per_row.append(rewards_T)
    return per_row


def rewards_to_go(rewards: Sequence[Floats], masks: Masks, *, gamma: float) -> list[Floats]:
    """Return the discounted sum of the rewards from each unmasked token on, float64 ``[T]`` a row; 0 at masked tokens.

    >>> rewards_to_go([np.array([0.0, 0.0, 1.0])], [np.array([True, False, True])], gamma=0.5)[0].tolist()
    [0.5, 0.0, 1.0]
    """
    rewards_RT, mask_RT = _padded(rewards, masks), _padded(masks, masks).astype(bool)
    sums_RT, after_R = np.zeros_like(rewards_RT), np.zeros(len(rewards_RT))
    for t in reversed(range(rewards_RT.shape[1])):
        after_R = np.where(mask_RT[:, t], rewards_RT[:, t] + gamma * after_R, after_R)
        sums_RT[:, t] = after_R * mask_RT[:, t]
    return _rows(sums_RT, masks)


def generalized_advantages(
    rewards: Sequence[Floats], values: Ragged, masks: Masks, *, gamma: float, lam: float
) -> tuple[list[Floats], list[Floats]]:
    """Return GAE's advantages and returns, float64 ``[T]`` a row each, not whitened; 0 at masked tokens.

    The value after the last unmasked token is 0: a response ends there.
    """
    rewards_RT, values_RT = _padded(rewards, masks), _padded(values, masks)
    mask_RT = _padded(masks, masks).astype(bool)
    advantages_RT = np.zeros_like(rewards_RT)
    value_R, advantage_R = np.zeros(len(rewards_RT)), np.zeros(len(rewards_RT))
    for t in reversed(range(rewards_RT.shape[1])):
        delta_R = rewards_RT[:, t] + gamma * value_R - values_RT[:, t]
        advantage_R = np.where(mask_RT[:, t], delta_R + gamma * lam * advantage_R, advantage_R)
        value_R = np.where(mask_RT[:, t], values_RT[:, t], value_R)
        advantages_RT[:, t] = advantage_R * mask_RT[:, t]
    return _rows(advantages_RT, masks), _rows((advantages_RT + values_RT) * mask_RT, masks)


def whitened(values: Sequence[Floats], masks: Masks) -> list[Floats]:
    """Return ``values`` with mean 0 and deviation 1 over all unmasked tokens of all rows (variance by n - 1); 0 at
    masked tokens.

    Equal values, and a single one, become exactly 0.
    """
    chosen_N = np.concatenate([value_T[mask_T] for value_T, mask_T in zip(values, masks, strict=True)] or [np.zeros(0)])
    if len(chosen_N) == 0 or np.ptp(chosen_N) <= _EQUAL * np.abs(chosen_N).max() + _TINY:
        return [np.zeros(len(value_T)) for value_T in values]
    mean, scale = chosen_N.mean(), 1 / np.sqrt(chosen_N.var(ddof=1) + WHITEN_EPS)
    return [(value_T - mean) * scale * mask_T for value_T, mask_T in zip(values, masks, strict=True)]


def _compared(rewards_R: Floats, group_id: npt.ArrayLike, algorithm: AlgorithmSettings) -> Column:
    if algorithm.kind == "rloo":
        advantages_R = leave_one_out_advantages(rewards_R, group_id)
    else:
        std = algorithm.std or "none"
        advantages_R = group_advantages(rewards_R, group_id, std=std, std_eps=algorithm.std_eps)
    if not algorithm.whiten:
        return advantages_R
    every_R = [np.ones(1, bool)] * len(advantages_R)
    columns = whitened([np.array([value], np.float64) for value in advantages_R], every_R)
    return np.concatenate(columns).astype(np.float32)


def _token_columns(
    rows: ScoredRows, rewards_R: Floats, kl: Sequence[Floats], algorithm: AlgorithmSettings
) -> dict[str, Column | list[Column]]:
    masks = _present(rows.masks, "masks")
    rewards = token_rewards(rewards_R, masks, [algorithm.kl * kl_T for kl_T in kl])
    columns: dict[str, Column | list[Column]] = {}
    if algorithm.kind == "ppo":
        values = _present(rows.values, "values")
        advantages, returns = generalized_advantages(rewards, values, masks, gamma=algorithm.gamma, lam=algorithm.lam)
        columns["returns"] = _float32(returns)
    else:
        advantages = rewards_to_go(rewards, masks, gamma=algorithm.gamma)
    return {"token_advantages": _float32(whitened(advantages, masks) if algorithm.whiten else advantages), **columns}


def _reward_kl(rows: ScoredRows, algorithm: AlgorithmSettings) -> list[Floats]:
    if not (algorithm.kl and algorithm.kl_in == "reward"):
        return []
    logprobs, ref_logprobs = _present(rows.logprobs, "logprobs"), _present(rows.ref_logprobs, "ref_logprobs")
    return kl_penalties(logprobs, ref_logprobs, algorithm.kl_estimator)


def _present(column: Sequence[Value], name: str) -> Sequence[Value]:
    if not len(column):
        raise UsageError(f"the rows have no {name}, which this algorithm reads; give it for each row")
    return column


def _kl(log_ratio_T: Floats, estimator: Literal["k1", "k2", "k3"]) -> Floats:
    if estimator == "k1":
        return log_ratio_T
    if estimator == "k2":
        return 0.5 * log_ratio_T**2
    bounded_T = np.clip(-log_ratio_T, -LOG_RATIO_MAX, LOG_RATIO_MAX)
    return np.clip(np.exp(bounded_T) - bounded_T - 1, -K3_MAX, K3_MAX)


def _checked(rewards: npt.ArrayLike, group_id: npt.ArrayLike) -> tuple[Floats, npt.NDArray[np.generic]]:
    rewards_R, group_R = np.asarray(rewards, dtype=np.float64), np.asarray(group_id)
    if rewards_R.ndim != 1 or rewards_R.shape != group_R.shape:
        raise UsageError(f"rewards {rewards_R.shape} and group_id {group_R.shape} must both be [rows]")
    bad = np.flatnonzero(~np.isfinite(rewards_R))
    if len(bad):
        raise UsageError(f"the reward of row {bad[0]} is {rewards_R[bad[0]]}: rewards must be finite")
    return rewards_R, group_R


def _centred(
    rewards_R: Floats, group_R: npt.NDArray[np.generic]
) -> tuple[npt.NDArray[np.intp], Floats, npt.NDArray[np.bool_]]:
    """Return each row's group size, its reward less the group's mean (0 where all are equal), and whether all are
    equal."""
    _, member_R, sizes_G = np.unique(group_R, return_inverse=True, return_counts=True)
    low_G, high_G = np.full(len(sizes_G), np.inf), np.full(len(sizes_G), -np.inf)
    np.minimum.at(low_G, member_R, rewards_R)
    np.maximum.at(high_G, member_R, rewards_R)
    equal_G = high_G - low_G <= _EQUAL * np.maximum(np.abs(low_G), np.abs(high_G)) + _TINY
    means_G = np.bincount(member_R, weights=rewards_R) / sizes_G
    centred_R = np.where(equal_G[member_R], 0.0, rewards_R - means_G[member_R])
    return sizes_G[member_R], centred_R, equal_G[member_R]


def _padded(values: Sequence[npt.NDArray[np.generic]], masks: Masks) -> Floats:
    padded_RT = np.zeros((len(masks), max(map(len, masks), default=0)))
    for row, value_T in enumerate(values):
        padded_RT[row, : len(value_T)] = value_T
    return padded_RT


def _rows(values_RT: Floats, masks: Masks) -> list[Floats]:
    return [values_RT[row, : len(mask_T)] for row, mask_T in enumerate(masks)]


def _float32(values: Sequence[Floats]) -> list[Column]:
    return [value_T.astype(np.float32) for value_T in values]
