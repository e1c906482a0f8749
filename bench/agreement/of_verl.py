"""Losses and advantages of verl, by its own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import sft_loss

from bench.agreement.batches import TOKENS_MAX, Case, Drawn, Values, mean, policy_mean, responses_of
from transferqueue.workflows.job.algorithms.advantages import (
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    rewards_to_go,
    token_rewards,
    whitened,
)
from transferqueue.workflows.job.algorithms.losses import value_loss
from transferqueue.workflows.job.settings.job import AlgorithmSettings

LOW, HIGH = 0.2, 0.28
NEVER = 1e300
MODES = {"tokens": "token-mean", "rows": "seq-mean-token-mean", "rows_max": "seq-mean-token-sum-norm"}
WIDE = (0.5, 15.0)
"""Spreads of log-ratios, the second far over verl's bounds."""


def _actor(dual_clip: float) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=dual_clip or NEVER,
    )
    config.global_batch_info["loss_scale_factor"] = TOKENS_MAX
    return config


def policy(
    drawn: Drawn,
    aggregate: str,
    *,
    name: str = "vanilla",
    tokenwise: bool = False,
    dual_clip: float = 0.0,
    tis_max: float = 0.0,
    advantages_BT: Tensor | None = None,
) -> Tensor:
    if advantages_BT is None:
        advantages_BT = (
            drawn.token_advantages_BT if tokenwise else drawn.advantages_B[:, None].expand(drawn.old_BT.shape)
        )
    weights_BT = None
    if tis_max:
        log_ratio_BT = drawn.old_BT - drawn.rollout_BT
        weights_BT, _ = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio=log_ratio_BT,
            response_mask=drawn.mask_BT.double(),
            rollout_is="token",
            rollout_is_threshold=tis_max,
        )
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=drawn.old_BT if tis_max else drawn.rollout_BT,
        log_prob=drawn.now_BT,
        advantages=advantages_BT,
        response_mask=drawn.mask_BT.double(),
        loss_agg_mode=MODES[aggregate],
        config=_actor(dual_clip),
        rollout_is_weights=weights_BT,
    )
    return loss


def kl(drawn: Drawn, estimator: str, aggregate: str) -> Tensor:
    kl_BT = core_algos.kl_penalty(drawn.now_BT, drawn.ref_BT, estimator)
    return core_algos.agg_loss(kl_BT, drawn.mask_BT.double(), MODES[aggregate])


def value(drawn: Drawn) -> Tensor:
    loss, _ = core_algos.compute_value_loss(
        drawn.values_BT, drawn.returns_BT, drawn.old_values_BT, drawn.mask_BT.double(), 0.2
    )
    return loss


def distill_reverse(drawn: Drawn) -> Tensor:
    kl_BT = core_algos.kl_penalty(drawn.now_BT, drawn.teacher_BT, "k1")
    return policy(drawn, "tokens", advantages_BT=-kl_BT.detach())


def distill_forward(drawn: Drawn) -> Tensor:
    """Verl computes it in float32."""
    there = drawn.mask_BT
    ids_NK = torch.arange(drawn.student_logits_BTK.shape[-1]).expand(int(there.sum()), -1).contiguous()
    lengths = torch.tensor([0, len(ids_NK)])
    result = compute_forward_kl_topk(
        student_logits=drawn.student_logits_BTK[there][None],
        teacher_topk_log_probs=torch.nested.nested_tensor_from_jagged(drawn.teacher_logprobs_BTK[there], lengths),
        teacher_topk_ids=torch.nested.nested_tensor_from_jagged(ids_NK, lengths),
        config=SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None)),
        data_format="thd",
    )
    return result["distillation_losses"].mean().double()


def sft(drawn: Drawn) -> Tensor:
    batch = TensorDict({"response_mask": drawn.mask_BT}, batch_size=len(drawn.mask_BT))
    for name, number in {"dp_size": 1, "batch_num_tokens": int(drawn.mask_BT.sum()), "pad_mode": "left_right"}.items():
        batch.set_non_tensor(name, number)
    return sft_loss(None, {"log_probs": drawn.now_BT}, batch)[0]


def _ours(*, tokenwise: bool = False, **settings: Any) -> Any:
    algorithm = AlgorithmSettings(**{"clip_low": LOW, "clip_high": HIGH, **settings})
    return lambda drawn: policy_mean(drawn, algorithm, tokenwise=tokenwise)


CASES = [
    Case("grpo", _ours(kind="grpo"), lambda drawn: policy(drawn, "rows"), WIDE),
    *(
        Case(
            f"grpo, KL in the loss ({estimator})",
            _ours(kind="grpo", kl=0.04, kl_estimator=estimator),
            lambda drawn, estimator=estimator: policy(drawn, "rows") + 0.04 * kl(drawn, estimator, "rows"),
            WIDE,
        )
        for estimator in ("k1", "k2", "k3")
    ),
    Case("dr_grpo", _ours(kind="dr_grpo"), lambda drawn: policy(drawn, "rows_max"), WIDE),
    Case("dapo", _ours(kind="dapo"), lambda drawn: policy(drawn, "tokens"), WIDE),
    Case(
        "dapo, dual_clip=3",
        _ours(kind="dapo", dual_clip=3.0),
        lambda drawn: policy(drawn, "tokens", dual_clip=3.0),
        WIDE,
    ),
    Case(
        "dapo, tis_max=2",
        _ours(kind="dapo", old="trainer", tis_max=2.0),
        lambda drawn: policy(drawn, "tokens", tis_max=2.0),
        WIDE,
    ),
    Case("rloo", _ours(kind="rloo"), lambda drawn: policy(drawn, "tokens"), WIDE),
    Case(
        "reinforce_pp",
        _ours(kind="reinforce_pp", tokenwise=True),
        lambda drawn: policy(drawn, "tokens", tokenwise=True),
        WIDE,
    ),
    Case("gspo", _ours(kind="gspo"), lambda drawn: policy(drawn, "rows", name="gspo"), WIDE),
    Case("ppo", _ours(kind="ppo", tokenwise=True), lambda drawn: policy(drawn, "tokens", tokenwise=True), WIDE),
    Case("ppo, critic", lambda drawn: mean(value_loss(responses_of(drawn), AlgorithmSettings(kind="ppo"))), value),
    Case("distill, reverse", _ours(kind="distill"), distill_reverse, WIDE),
    Case("distill, forward", _ours(kind="distill", top_k=5), distill_forward),
    Case("sft", _ours(kind="sft"), sft),
]


def _scores(drawn: Drawn) -> tuple[Tensor, list[np.ndarray]]:
    """Rewards by token, each row's on its last token: as verl takes them, and a list of masks."""
    masks = [mask_T[there_T].numpy() for mask_T, there_T in zip(drawn.mask_BT, drawn.present_BT, strict=True)]
    scores_BT = torch.zeros_like(drawn.old_BT)
    last_B = drawn.present_BT.sum(1) - 1
    scores_BT[torch.arange(len(last_B)), last_B] = drawn.rewards_B
    return scores_BT, masks


def _ours_by_token(drawn: Drawn, kind: str) -> Tensor:
    _, masks = _scores(drawn)
    rewards = token_rewards(drawn.rewards_B.numpy(), masks)
    if kind == "reinforce_pp":
        rows = whitened(rewards_to_go(rewards, masks, gamma=0.97), masks)
    else:
        values = [row[there].numpy() for row, there in zip(drawn.old_values_BT, drawn.present_BT, strict=True)]
        advantages, returns = generalized_advantages(rewards, values, masks, gamma=0.97, lam=0.95)
        rows = returns if kind == "returns" else whitened(advantages, masks)
    return torch.from_numpy(np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)]))


def _theirs_by_token(drawn: Drawn, kind: str) -> Tensor:
    scores_BT, _ = _scores(drawn)
    mask_BT = drawn.mask_BT.double()
    if kind == "reinforce_pp":
        found, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            scores_BT, mask_BT, config=SimpleNamespace(gamma=0.97)
        )
    else:
        both = core_algos.compute_gae_advantage_return(scores_BT, drawn.old_values_BT, mask_BT, 0.97, 0.95)
        found = both[kind == "returns"]
    return found[drawn.mask_BT]


def _theirs_by_row(drawn: Drawn, compute: Any) -> Tensor:
    scores_BT, _ = _scores(drawn)
    found_BT, _ = compute(scores_BT, torch.ones_like(scores_BT), drawn.group_id_B.numpy())
    return found_BT[:, 0]


def _grpo(drawn: Drawn) -> Tensor:
    return torch.from_numpy(group_advantages(drawn.rewards_B, drawn.group_id_B, std_eps=1e-6))


def _rloo(drawn: Drawn) -> Tensor:
    return torch.from_numpy(leave_one_out_advantages(drawn.rewards_B, drawn.group_id_B))


VALUES = [
    Values("grpo", _grpo, lambda drawn: _theirs_by_row(drawn, core_algos.compute_grpo_outcome_advantage)),
    Values("rloo", _rloo, lambda drawn: _theirs_by_row(drawn, core_algos.compute_rloo_outcome_advantage)),
    *(
        Values(
            name,
            lambda drawn, name=name: _ours_by_token(drawn, name),
            lambda drawn, name=name: _theirs_by_token(drawn, name),
        )
        for name in ("reinforce_pp", "ppo", "returns")
    ),
]
