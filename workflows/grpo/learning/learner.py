"""Group Relative Policy Optimization: the learner that takes a step on a batch of finished groups.

The loss is `transferqueue.workflows.job.algorithms.losses.policy_loss`.

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

from transferqueue.workflows.grpo.model.prompt_packing import pack, token_logprobs
from transferqueue.workflows.grpo.model.transformer import Transformer
from transferqueue.workflows.job.algorithms.losses import policy_loss
from transferqueue.workflows.job.algorithms.responses import Responses
from transferqueue.workflows.job.settings.job import AlgorithmSettings

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
        algorithm: AlgorithmSettings,
        temperature: float,
        learning_rate: float,
        final_share: float,
        steps: int,
        gradient_norm_max: float,
        first_step: int = 0,
    ) -> None:
        self._model = model
        self._algorithm = algorithm
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
        since the rows were generated; ``clip_share`` of the tokens whose loss the clip changed; ``entropy``, the
        mean of ``-log p`` of the tokens; ``live_rows``, rows with a gradient; ``tokens`` of their responses.

        Without KL, rows with advantage 0 have no gradient: they are counted in the mean but not computed.
        """
        rows = len(batch.advantages)
        if not self._algorithm.kl:
            batch = batch.select(np.flatnonzero(batch.advantages))
        self._step += 1
        live_rows = len(batch.advantages)
        if not live_rows:
            return _idle_metrics()
        packed = pack(batch.prompt_ids, batch.response_ids)
        logprobs_BT = token_logprobs(self._model, packed, temperature=self._temperature)
        loss = policy_loss(_responses(batch, logprobs_BT[packed.mask_BT]), self._algorithm)
        mean = loss.total / rows
        gradient_norm = self._descend(mean)
        return {
            "loss": mean.item(),
            "gradient_norm": gradient_norm,
            "live_rows": float(live_rows),
            **_metrics(loss.figures),
        }

    def _descend(self, loss: Tensor) -> float:
        share = learning_rate_share(self._step - 1, steps=self._steps, final_share=self._final_share)
        for group in self._optimizer.param_groups:
            group["lr"] = share * self._learning_rate
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._gradient_norm_max)
        self._optimizer.step()
        return float(norm)


def _responses(batch: TrainBatch, logprobs_N: Tensor) -> Responses:
    lengths_R = torch.tensor([len(ids) for ids in batch.response_ids])
    masks = batch.loss_mask or [np.ones(len(ids), dtype=np.bool_) for ids in batch.response_ids]
    advantages_R = torch.from_numpy(np.asarray(batch.advantages, dtype=np.float32))
    return Responses(
        logprobs_N=logprobs_N,
        rollout_logprobs_N=_flat(batch.rollout_logprobs),
        ref_logprobs_N=None if batch.ref_logprobs is None else _flat(batch.ref_logprobs),
        advantages_N=advantages_R.repeat_interleave(lengths_R),
        entropies_N=-logprobs_N.detach(),
        mask_N=torch.from_numpy(np.concatenate(masks)),
        offsets_R1=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_R.cumsum(0)]),
    )


def _metrics(figures: Mapping[str, float]) -> dict[str, float]:
    tokens = max(figures["tokens"], 1)
    return {
        "tokens": figures["tokens"],
        "rollout_kl": figures["rollout_kl"] / tokens,
        "clip_share": (figures["clipped_low"] + figures["clipped_high"]) / tokens,
        "entropy": figures["entropy"] / tokens,
    }


def _idle_metrics() -> dict[str, float]:
    names = ("loss", "gradient_norm", "live_rows", "rollout_kl", "clip_share", "entropy", "tokens")
    return dict.fromkeys(names, 0.0)


def _flat(column: Sequence[Logprobs]) -> Tensor:
    return torch.from_numpy(np.concatenate(column).astype(np.float32, copy=False))
