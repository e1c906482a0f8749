"""Learners that take the rows of a step as they come: forward and backward of each micro-batch at once, one update at
its end.

The loss of a step is ``(1/N) sum_m S_m``: S_m is the sum over micro-batch m, N the weight of the whole step (tokens or
rows), which is known only when its last row has come. A gradient is linear in the loss, so each micro-batch adds the
gradient of ``S_m / c``, with a constant c, in float32, and the step multiplies the sum by ``c W / N`` before it clips.
W undoes the mean that FSDP2 takes over W ranks. c is a power of two near N, so dividing by it is exact, and numbers
stay near those of an ordinary mean. The result does not depend on how rows were split, but for the order in which
float32 numbers are added.

This holds for one unknown weight per gradient. The critic has a model, and so a gradient, of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from transferqueue.adapters.protocols import WeightSource
from transferqueue.adapters.scoring import (
    ResponseScores,
    is_packed,
    response_scores,
    response_values,
)
from transferqueue.adapters.scoring.batching import micro_batches_of_ranks
from transferqueue.adapters.scoring.load import torch_dtype
from transferqueue.adapters.scoring.lora import published_weights
from transferqueue.adapters.scoring.plan import shared_prompts
from transferqueue.adapters.trainers.learners import LossSum
from transferqueue.errors import UsageError
from transferqueue.workflows.job.algorithms.losses import policy_loss, value_loss
from transferqueue.workflows.job.algorithms.responses import Responses
from transferqueue.workflows.job.names import IMAGES
from transferqueue.workflows.job.settings.defaults import filled
from transferqueue.workflows.job.settings.job import AlgorithmSettings, TrainerSettings
from transferqueue.workflows.job.training.columns import (
    RowColumns,
    lengths,
    loss_columns,
    rows_of,
    select,
    stale_tokens,
)
from transferqueue.workflows.job.training.rank_shards import RankShards
from transferqueue.workflows.job.training.ranks import ALONE, Ranks

_OF: Final = {
    "engine_error": "own_tokens",
    "policy_movement": "other_tokens",
    "unreplayed_error": "unreplayed_tokens",
}
"""Figures that are means over a part of the tokens, and the sum that counts it."""
_COUNTS: Final = ("own_tokens", "stale_tokens")


def rate_share(step: int, *, steps: int, warmup: int = 0, schedule: str = "constant") -> float:
    """Return the share of the learning rate at `step` (from 0): up over `warmup` steps, then as the schedule says, down
    to 0 at `steps`.

    >>> [rate_share(step, steps=6, warmup=2, schedule="linear") for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[schedule]


class StepLearner(ABC):
    """Owns a model and its optimizer (AdamW): `accumulate` for rows as they come, `step` once a step.

    model: plain, or sharded by ``fully_shard``; then, and with several `ranks`, every rank calls every method in the
    same order. trainer: as the job has it; weights and gradients have the dtype of the model's parameters, and
    gradients are added in float32. compute: dtype of the forward pass (autocast where it differs). steps: of the whole
    run, for the schedule. version: of the published weights that the model has; -1: of none.
    """

    def __init__(
        self,
        model: nn.Module,
        trainer: TrainerSettings,
        *,
        steps: int,
        lr: float,
        weight_near: float,
        compute: str = "",
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.trained:
            raise UsageError(f"{type(model).__name__} has no parameter that is trained; set requires_grad")
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr, betas=trainer.betas, weight_decay=trainer.weight_decay)
        self.steps_taken = 0
        self.version = -1
        self.ranks = ranks
        self._trainer, self._steps, self._lr = trainer, steps, lr
        self._scale = 2.0 ** round(math.log2(max(1.0, weight_near)))
        self._compute = torch_dtype(compute) if compute else self.trained[0].dtype
        self._sums: dict[str, float] = {}
        self._wide: list[Tensor | None] = [None] * len(self.trained)

    # ------------------------------------------------------------ rows

    def micro_batches(self, columns: RowColumns, at_least: int = 1) -> list[list[int]]:
        """Return the rows of each pass: at most ``micro_tokens`` tokens, a prompt that several rows have counted once,
        and at least `at_least` passes if there are as many rows."""
        sizes = lengths(columns)
        return micro_batches_of_ranks(
            sizes,
            self._trainer.micro_tokens,
            at_least,
            padded=not is_packed(self.model),
            tree=None if "routes" in columns else shared_prompts(self.model, columns["prompt_ids"], sizes),
        )

    def accumulate(self, columns: RowColumns) -> None:
        """Compute the rows' loss and add its gradient. columns: of the loss, one value a row (see `RowColumns`).

        Blocks for the passes. `UsageError` for rows that the loss cannot take; the gradient is then that of the passes
        before.
        """
        for rows in self.micro_batches(columns) if rows_of(columns) else []:
            self.backward(select(columns, rows))

    def backward(self, columns: RowColumns, weight: float = 1.0) -> None:
        """Make one pass over the rows. weight 0: they count as none; a rank without rows takes part in a collective
        that way."""
        with self._autocast():
            loss = self.loss(columns)
        (loss.total * (weight / self._scale)).backward()
        self._widen()
        if weight:
            counted = {"loss": float(loss.total.detach()), "weight": loss.weight, "passes": 1.0, **loss.figures}
            for name, value in counted.items():
                self._sums[name] = self._sums.get(name, 0.0) + value

    @abstractmethod
    def loss(self, columns: RowColumns) -> LossSum:
        """Return the loss of the rows, with one call of the model."""

    def discard(self) -> None:
        """Drop the gradient accumulated since the last step."""
        self.optimizer.zero_grad(set_to_none=True)
        self._sums, self._wide = {}, [None] * len(self.trained)

    # ------------------------------------------------------------ step

    def step(self, *, counts: bool = True) -> dict[str, float]:
        """Update the weights with the mean gradient of the accumulated rows, over all ranks. Returns figures.

        ``loss`` and the loss's figures are means over its weight or over tokens; ``tokens``, ``rows``, ``passes`` are
        sums; ``gradient_norm`` is from before clipping; ``lr``. counts False: further updates of the same step follow.
        If all tokens were too old (`stale_tokens`), the weights stay, and there is no loss and no gradient.
        `UsageError` if no rank has accumulated a row.
        """
        sums = self.ranks.summed(self._sums)
        has_weight = sums.get("weight", 0.0) > 0
        if not has_weight and not sums.get("stale_tokens"):
            raise UsageError(
                "a step was taken with no rows, or with rows whose tokens are all masked; accumulate rows first"
            )
        figures = self._update(sums) if has_weight else _counts(sums)
        self.steps_taken += counts
        self.discard()
        return figures

    def _update(self, sums: Mapping[str, float]) -> dict[str, float]:
        share = rate_share(
            self.steps_taken, steps=self._steps, warmup=self._trainer.warmup, schedule=self._trainer.schedule
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * share
        self._narrow()
        self.ranks.sum_gradients(self.trained, self._scale / sums["weight"])
        norm = _whole(nn.utils.clip_grad_norm_(self.trained, self._trainer.gradient_norm_max))
        self.optimizer.step()
        self.version = -1
        return {**_means(sums), "gradient_norm": float(norm), "lr": self._lr * share}

    def weights(self) -> WeightSource:
        """Return the weights by name, adapters merged; not copied. Iterating gathers shards: do it on every rank, in
        the same order."""
        return published_weights(self.model)

    def own_weights(self) -> WeightSource:
        """Return what this rank publishes: its shards, if weights are sharded, else all `weights`. Every rank calls it:
        adapters are merged."""
        source = published_weights(self.model)
        return RankShards(source.sharded(), self.ranks.rank) if self.ranks.parallel == "fsdp2" else source

    def _autocast(self) -> AbstractContextManager[Any]:
        parameter = self.trained[0]
        if parameter.dtype == self._compute:
            return nullcontext()
        return torch.autocast(parameter.device.type, dtype=self._compute)

    def _widen(self) -> None:
        """Move gradients that are not float32 into float32 sums: 16-bit numbers would lose small addends."""
        for at, parameter in enumerate(self.trained):
            if parameter.grad is None or parameter.grad.dtype in (torch.float32, torch.float64):
                continue
            wide = self._wide[at]
            self._wide[at] = parameter.grad.float() if wide is None else wide + parameter.grad.float()
            parameter.grad = None

    def _narrow(self) -> None:
        for parameter, wide in zip(self.trained, self._wide, strict=True):
            if wide is not None:
                parameter.grad = wide.to(parameter.dtype)


class PolicyLearner(StepLearner):
    """Learns a policy: any kind of algorithm, sft and distillation included.

    temperature: that responses were drawn with. tokens_max: the longest response that is allowed (for Dr. GRPO).
    rows_near: about how many rows a step has.

    Example::

        learner = PolicyLearner(model, AlgorithmSettings(kind="grpo"), TrainerSettings(lr=1e-6), steps=100)
        learner.accumulate({"prompt_ids": ..., "response_ids": ..., "rollout_logprobs": ..., "advantages": ...})
        print(learner.step()["loss"])
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: AlgorithmSettings,
        trainer: TrainerSettings,
        *,
        steps: int,
        temperature: float = 1.0,
        tokens_max: int = 0,
        rows_near: int = 1,
        compute: str = "",
        ranks: Ranks = ALONE,
    ) -> None:
        self.algorithm = filled(algorithm)
        near = rows_near if self.algorithm.aggregate == "rows" else rows_near * max(1, tokens_max)
        super().__init__(model, trainer, steps=steps, lr=trainer.lr, weight_near=near, compute=compute, ranks=ranks)
        self._temperature, self._tokens_max = temperature, tokens_max
        self._step_version = -1
        """The version before the step; all its updates have it, while `version` is -1 after the first."""

    def loss(self, columns: RowColumns) -> LossSum:
        """See `StepLearner`."""
        scores = response_scores(
            self.model,
            columns["prompt_ids"],
            columns["response_ids"],
            temperature=self._temperature,
            entropy=bool(self.algorithm.entropy),
            at_ids=columns["teacher_ids"] if self.algorithm.top_k else None,
            routes=columns["routes"] if self.algorithm.router_replay and "routes" in columns else None,
            images=columns.get(IMAGES),
        )
        logprobs_N = scores.logprobs_N
        self._step_version = max(self._step_version, self.version)
        stale = stale_tokens(columns, self.algorithm, self._step_version)
        others: dict[str, Tensor | None] = dict(loss_columns(columns, self.algorithm, logprobs_N.device, stale))
        responses = Responses(
            logprobs_N=logprobs_N,
            logprobs_NK=scores.logprobs_NK,
            entropies_N=self._entropies(scores),
            **others,  # type: ignore[arg-type]
        )
        loss = policy_loss(responses, self.algorithm, tokens_max=self._tokens_max)
        left_out = {} if stale is None else {"stale_tokens": float(stale.sum())}
        differences = self._differences(responses, columns)
        differences |= self._unreplayed(responses, columns, differences.get("own_tokens", 0.0))
        return LossSum(loss.total, loss.weight, {**loss.figures, **left_out, **differences})

    def _entropies(self, scores: ResponseScores) -> Tensor | None:
        """The entropy at each token, with a gradient where it is in the loss; else its estimate by the drawn tokens."""
        if scores.entropy_N is not None:
            return scores.entropy_N
        return None if self.algorithm.kind == "sft" else -scores.logprobs_N.detach()

    def _differences(self, responses: Responses, columns: RowColumns) -> dict[str, float]:
        """Sum the differences between the trainer's log-probs and those of the engine that drew the tokens: apart where
        both had the same weights, and where the policy has moved since."""
        if responses.rollout_logprobs_N is None or "token_versions" not in columns:
            return {}
        difference_N = (responses.logprobs_N.detach() - responses.rollout_logprobs_N).abs()
        versions_N = torch.from_numpy(np.concatenate([np.asarray(row) for row in columns["token_versions"]]))
        has_own_N = (versions_N == self.version).to(difference_N.device) & (self.version >= 0)
        own_N, other_N = responses.mask_N & has_own_N, responses.mask_N & ~has_own_N
        parts = {"engine_error": difference_N.where(own_N, 0), "policy_movement": difference_N.where(other_N, 0)}
        counts = {"own_tokens": own_N, "other_tokens": other_N}
        return {name: float(value_N.sum(dtype=torch.float64)) for name, value_N in (parts | counts).items()}

    @torch.no_grad()
    def _unreplayed(self, responses: Responses, columns: RowColumns, own_tokens: float) -> dict[str, float]:
        """Sum what the engine's error would be with the trainer's own experts. The first pass of a step that has tokens
        of the same weights takes another one for it."""
        if not self.algorithm.router_replay or "unreplayed_tokens" in self._sums or not own_tokens:
            return {}
        scores = response_scores(
            self.model, columns["prompt_ids"], columns["response_ids"], temperature=self._temperature
        )
        own = self._differences(replace(responses, logprobs_N=scores.logprobs_N), columns)
        return {"unreplayed_error": own["engine_error"], "unreplayed_tokens": own["own_tokens"]}


class ValueLearner(StepLearner):
    """Learns a value model: the critic of ppo. lr: of the critic. tokens_near: about how many response tokens a step
    has."""

    def __init__(
        self,
        model: nn.Module,
        algorithm: AlgorithmSettings,
        trainer: TrainerSettings,
        *,
        steps: int,
        lr: float,
        tokens_near: int = 1,
        compute: str = "",
    ) -> None:
        super().__init__(model, trainer, steps=steps, lr=lr, weight_near=tokens_near, compute=compute)
        self.algorithm = filled(algorithm)

    def loss(self, columns: RowColumns) -> LossSum:
        """See `StepLearner`."""
        values_N = response_values(self.model, columns["prompt_ids"], columns["response_ids"])
        tensors = loss_columns(columns, self.algorithm, values_N.device)
        others: dict[str, Tensor | None] = dict(tensors)
        responses = Responses(logprobs_N=values_N.detach(), values_N=values_N, **others)  # type: ignore[arg-type]
        return value_loss(responses, self.algorithm)


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    counts = _counts(sums)
    tokens = max(1.0, sums.get("tokens", sums["weight"]))
    left_out = {"loss", "weight", *_OF, *_OF.values(), *counts}
    means = {name: value / tokens for name, value in sums.items() if name not in left_out}
    parts = {name: sums[name] / sums[count] for name, count in _OF.items() if sums.get(count)}
    return {"loss": sums["loss"] / sums["weight"], **counts, **means, **parts}


def _counts(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: sums[name] for name in ("tokens", "rows", "passes", *_COUNTS) if name in sums}


def _whole(value: Tensor) -> Tensor:
    gather: Callable[[], Tensor] | None = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def in_minibatches(rows: int, minibatches: int, generator: torch.Generator) -> Sequence[list[int]]:
    """Return the rows of each update of one epoch: drawn anew each epoch, as equal in number as can be."""
    order: list[int] = torch.randperm(rows, generator=generator).tolist()
    bounds = [rows * at // minibatches for at in range(minibatches + 1)]
    return [order[first:last] for first, last in pairwise(bounds) if last > first]
