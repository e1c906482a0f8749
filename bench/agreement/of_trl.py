"""Losses of TRL, by its own functions. GRPOTrainer's and RLOOTrainer's loss is a method: it runs on an object with the
settings it reads."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gkd import GKDTrainer

from bench.agreement.batches import TOKENS_MAX, Case, Drawn, policy_mean
from transferqueue.workflows.job.settings.job import AlgorithmSettings

LOW, HIGH = 0.2, 0.28


@cache
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def _trainer(drawn: Drawn, **settings: Any) -> SimpleNamespace:
    entropies_BT = torch.zeros_like(drawn.old_BT)
    reads = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (drawn.now_BT, entropies_BT, None),
        "accelerator": accelerator(),
        "model": SimpleNamespace(training=False),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": TOKENS_MAX,
        "importance_sampling_level": "token",
    }
    return SimpleNamespace(**{**reads, **settings})


def _inputs(drawn: Drawn, **columns: Tensor) -> dict[str, Tensor]:
    rows = len(drawn.advantages_B)
    return {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(drawn.old_BT, dtype=torch.int64),
        "completion_mask": drawn.mask_BT.long(),
        "advantages": drawn.advantages_B,
        "old_per_token_logps": drawn.rollout_BT,
        "ref_per_token_logps": drawn.ref_BT,
        "num_items_in_batch": drawn.mask_BT.sum(),
        **columns,
    }


def grpo(drawn: Drawn, **settings: Any) -> Tensor:
    return GRPOTrainer._compute_loss(_trainer(drawn, **settings), None, _inputs(drawn))


def truncated(drawn: Drawn) -> Tensor:
    """What TRL does with ``vllm_importance_sampling_mode="token_truncate"``; it computes the weights where it
    generates."""
    weight_BT = ((drawn.old_BT - drawn.rollout_BT) * drawn.mask_BT).exp().clamp(max=2.0)
    trainer = _trainer(drawn, loss_type="dapo", use_vllm=True, vllm_importance_sampling_correction=True)
    inputs = _inputs(drawn, old_per_token_logps=drawn.old_BT, importance_sampling_ratio=weight_BT)
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def rloo(drawn: Drawn) -> Tensor:
    old_B = (drawn.rollout_BT * drawn.mask_BT).sum(1)
    return RLOOTrainer._compute_loss(_trainer(drawn), None, _inputs(drawn, old_logps=old_B))


def distill_forward(drawn: Drawn) -> Tensor:
    labels_BT = torch.where(drawn.mask_BT, 0, -100)
    return GKDTrainer.generalized_jsd_loss(
        drawn.student_logits_BTK, drawn.teacher_logprobs_BTK, labels=labels_BT, beta=0.0
    )


def _ours(**settings: Any) -> Any:
    algorithm = AlgorithmSettings(clip_low=LOW, clip_high=HIGH, **settings)
    return lambda drawn: policy_mean(drawn, algorithm)


CASES = [
    Case("grpo", _ours(kind="grpo"), lambda drawn: grpo(drawn, loss_type="grpo")),
    Case("grpo, KL in the loss", _ours(kind="grpo", kl=0.04), lambda drawn: grpo(drawn, loss_type="grpo", beta=0.04)),
    Case("dr_grpo", _ours(kind="dr_grpo"), lambda drawn: grpo(drawn, loss_type="dr_grpo")),
    Case("dapo", _ours(kind="dapo"), lambda drawn: grpo(drawn, loss_type="dapo")),
    Case("dapo, tis_max=2", _ours(kind="dapo", old="trainer", tis_max=2.0), truncated),
    Case("rloo, ratio of the sequence", _ours(kind="rloo", ratio="sequence", aggregate="rows"), rloo),
    Case(
        "gspo",
        _ours(kind="gspo"),
        lambda drawn: grpo(drawn, loss_type="grpo", importance_sampling_level="sequence"),
    ),
    Case("distill, forward", _ours(kind="distill", top_k=5), distill_forward),
]
"""TRL 1.16 has no PPO, REINFORCE++ or per-token reverse distillation; its SFT loss is transformers' cross-entropy."""
VALUES: list[Any] = []
"""TRL computes advantages inside the method that generates."""
