"""Group Relative Policy Optimization: the loss, and the learner that takes a step on a batch of finished groups.

GRPO: DeepSeekMath, arXiv 2402.03300, equation 3. Clipped ratio: PPO, arXiv 1707.06347, equation 7; a wider upper
bound ("clip-higher"): DAPO, arXiv 2503.14476. KL estimator k3: J. Schulman, "Approximating KL Divergence", 2020
(http://joschu.net/blog/kl-approx.html).

The old policy of the ratio is the one that generated: its log-probs were stored as ``rollout_logprobs`` when each token
was drawn. So a row may be some versions old and the gradient still accounts for it, within the clip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transferqueue.workflows.grpo.learning.losses import Clip, decoupled_gain, ppo_gain
from transferqueue.workflows.grpo.learning.settings import check_weight_max
from transferqueue.workflows.grpo.model.prompt_packing import pack, token_logprobs
from transferqueue.workflows.grpo.model.transformer import Transformer

Ids = npt.NDArray[np.integer]
Logprobs = npt.NDArray[np.float32]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Columns of finished rows, as they come from the queue.

    Ragged, one array a row: ``prompt_ids``, ``response_ids`` (integers ``[tokens]``), ``rollout_logprobs`` and, with KL,
    ``ref_logprobs`` (float32, as long as the response). ``loss_mask`` (bool, as long as the response) leaves out tokens
    that the policy did not choose; without it all count. ``advantages``: float32 ``[rows]``. Rows of one prompt
    should be neighbours: they then share its computation.
    """

    prompt_ids: Sequence[Ids]
    response_ids: Sequence[Ids]
    rollout_logprobs: Sequence[Logprobs]
    advantages: Logprobs
    loss_mask: Sequence[npt.NDArray[np.bool_]] | None = None
    ref_logprobs: Sequence[Logprobs] | None = None

    def __post_init__(self) -> None:
        rows = len(self.advantages)
        columns = {
            "response_ids": self.response_ids,
            "rollout_logprobs": self.rollout_logprobs,
            "loss_mask": self.loss_mask,
            "ref_logprobs": self.ref_logprobs,
        }
        if len(self.prompt_ids) != rows:
            raise ValueError(f"prompt_ids has {len(self.prompt_ids)} rows, advantages {rows}")
        for name, column in columns.items():
            if column is None:
                continue
            if len(column) != rows:
                raise ValueError(f"{name} has {len(column)} rows, advantages {rows}")
            for row, (value, response) in enumerate(zip(column, self.response_ids, strict=True)):
                if len(value) != len(response):
                    raise ValueError(f"{name}[{row}] has {len(value)} tokens, its response {len(response)}")

    def select(self, rows: npt.NDArray[np.intp]) -> "TrainBatch":
        """Return the batch of ``rows`` only, in that order."""

        def of(column: Sequence[Value]) -> list[Value]:
            return [column[row] for row in rows]

        return TrainBatch(
            prompt_ids=of(self.prompt_ids),
            response_ids=of(self.response_ids),
            rollout_logprobs=of(self.rollout_logprobs),
            advantages=self.advantages[rows],
            loss_mask=None if self.loss_mask is None else of(self.loss_mask),
            ref_logprobs=None if self.ref_logprobs is None else of(self.ref_logprobs),
        )


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Terms of the loss. The ratio is held in ``[1 - clip_low, 1 + clip_high]``; ``kl_weight`` 0 needs no reference.

    Without ``weight_max`` the ratio is to the policy that generated (PPO); with it, to the policy before the step, and each token
    weighs as much as that policy finds it likelier than the one that generated, at most ``weight_max`` (decoupled PPO,
    truncated). `UsageError` for a ``weight_max`` below 1 or not finite.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.0
    weight_max: float | None = None

    def __post_init__(self) -> None:
        check_weight_max(self.weight_max)


def clipped_gain(
    logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, advantages_B1: Tensor, objective: Objective
) -> Tensor:
    """Return what each token gains under ``objective``, float32 ``[rows, tokens]``; see `losses` for the equations.

    A step takes one update, so the policy before it is the current one, without a gradient.
    """
    clip = Clip(low=objective.clip_low, high=objective.clip_high)
    if objective.weight_max is None:
        return ppo_gain(logprobs_BT, rollout_logprobs_BT, advantages_B1, clip)
    before_BT, most = logprobs_BT.detach(), objective.weight_max
    return decoupled_gain(logprobs_BT, before_BT, rollout_logprobs_BT, advantages_B1, clip, weight_max=most)


def kl_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return Schulman's estimate of KL(policy || reference) of each token: ``r - 1 - log r``, never negative."""
    log_ratio_BT = ref_logprobs_BT - logprobs_BT
    return log_ratio_BT.exp() - 1 - log_ratio_BT


def grpo_loss(
    logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    objective: Objective,
    ref_logprobs_BT: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """Return the GRPO loss (a scalar): the mean over rows of the mean over each row's unmasked tokens.

    ``rows`` is the divisor of the outer mean where the caller left out rows that add nothing. Raises ``ValueError`` when
    the objective weighs KL and there is no reference.
    """
    gain_BT = clipped_gain(logprobs_BT, rollout_logprobs_BT, advantages_B[:, None], objective)
    if objective.kl_weight:
        if ref_logprobs_BT is None:
            raise ValueError(f"kl_weight is {objective.kl_weight} but the batch has no ref_logprobs")
        gain_BT = gain_BT - objective.kl_weight * kl_k3(logprobs_BT, ref_logprobs_BT)
    lengths_B = mask_BT.sum(1).clamp(min=1)
    gain_B = gain_BT.where(mask_BT, 0.0).sum(1) / lengths_B
    return -gain_B.sum() / (rows or len(gain_B))


def learning_rate_share(step: int, *, steps: int, final_share: float) -> float:
    """Return the share of the learning rate at ``step``: up over a twentieth of ``steps``, then down to ``final_share``.

    The rise is needed: Adam's first steps are as long as the learning rate allows whatever the gradient's noise, and
    without it they undo a part of the warm-up.
    """
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return max(final_share, 1 - (1 - final_share) * (step - rise) / max(1, steps - rise))


class GrpoLearner:
    """Owns the trained weights and their optimizer (AdamW without decay).

    The learning rate of each step is ``learning_rate`` times ``learning_rate_share``. ``first_step`` is how many steps an
    earlier learner took from whose weights this one goes on.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        objective: Objective,
        temperature: float,
        learning_rate: float,
        final_share: float,
        steps: int,
        gradient_norm_max: float,
        first_step: int = 0,
    ) -> None:
        self._model = model
        self._objective = objective
        self._temperature = temperature
        self._learning_rate = learning_rate
        self._gradient_norm_max = gradient_norm_max
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._steps, self._final_share = steps, final_share
        self._step = first_step

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name, float32; they share memory with the model and change at the next ``step``."""
        return {name: weight.detach() for name, weight in self._model.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights`` into the model; raises ``RuntimeError`` unless names and shapes are exactly the model's."""
        self._model.load_state_dict(weights)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Take one optimizer step on ``batch`` and return what it was like.

        Metrics: ``loss``; ``gradient_norm`` before clipping; ``rollout_kl``, the k3 estimate of how far the policy has moved
        since the rows were generated; ``clip_share`` of the tokens whose ratio left the bounds; ``entropy``, the
        mean of ``-log p`` of the tokens; ``live_rows``, rows with a gradient; ``tokens`` of their responses.

        Without KL, rows with advantage 0 have no gradient: they are counted in the mean but not computed.
        """
        rows = len(batch.advantages)
        if not self._objective.kl_weight:
            batch = batch.select(np.flatnonzero(batch.advantages))
        self._step += 1
        if not len(batch.advantages):
            return _idle_metrics()
        packed = pack(batch.prompt_ids, batch.response_ids)
        mask_BT = packed.mask_BT & _padded_mask(batch)
        rollout_BT = _padded(batch.rollout_logprobs)
        logprobs_BT = token_logprobs(self._model, packed, temperature=self._temperature)
        loss = grpo_loss(
            logprobs_BT,
            rollout_BT,
            torch.from_numpy(np.asarray(batch.advantages, dtype=np.float32)),
            mask_BT,
            objective=self._objective,
            ref_logprobs_BT=None if batch.ref_logprobs is None else _padded(batch.ref_logprobs),
            rows=rows,
        )
        gradient_norm = self._descend(loss)
        metrics = _metrics(logprobs_BT.detach()[mask_BT], rollout_BT[mask_BT], self._objective)
        return {"loss": loss.item(), "gradient_norm": gradient_norm, "live_rows": float(len(mask_BT)), **metrics}

    def _descend(self, loss: Tensor) -> float:
        share = learning_rate_share(self._step - 1, steps=self._steps, final_share=self._final_share)
        for group in self._optimizer.param_groups:
            group["lr"] = share * self._learning_rate
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._gradient_norm_max)
        self._optimizer.step()
        return float(norm)


def _metrics(logprobs_N: Tensor, rollout_logprobs_N: Tensor, objective: Objective) -> dict[str, float]:
    ratio_N = (logprobs_N - rollout_logprobs_N).exp()
    outside_N = (ratio_N < 1 - objective.clip_low) | (ratio_N > 1 + objective.clip_high)
    tokens = len(logprobs_N)
    sums = {
        "rollout_kl": kl_k3(rollout_logprobs_N, logprobs_N).sum().item(),
        "clip_share": outside_N.sum().item(),
        "entropy": -logprobs_N.sum().item(),
    }
    return {"tokens": float(tokens), **{name: value / max(tokens, 1) for name, value in sums.items()}}


def _idle_metrics() -> dict[str, float]:
    names = ("loss", "gradient_norm", "live_rows", "rollout_kl", "clip_share", "entropy", "tokens")
    return dict.fromkeys(names, 0.0)


def _padded(column: Sequence[npt.NDArray[np.float32]]) -> Tensor:
    padded_BT = np.zeros((len(column), max(map(len, column))), dtype=np.float32)
    for row, value in enumerate(column):
        padded_BT[row, : len(value)] = value
    return torch.from_numpy(padded_BT)


def _padded_mask(batch: TrainBatch) -> Tensor:
    if batch.loss_mask is None:
        return torch.tensor(True)
    return _padded([mask.astype(np.float32) for mask in batch.loss_mask]).bool()
