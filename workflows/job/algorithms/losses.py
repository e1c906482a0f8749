"""Losses of a step as sums with their denominator, so that a step may be made of any number of backward passes.

A token's loss, with r a ratio of `transferqueue.workflows.job.algorithms.ratios` and A its advantage:

- clipped (PPO, arXiv 1707.06347, equation 7): ``-min(r A, clip(r, 1 - low, 1 + high) A)``; a wider upper bound is
  DAPO's (arXiv 2503.14476).
- dual clip (Ye et al., arXiv 1912.09729): where A < 0, at most ``-dual_clip A``.
- times the truncated importance weight where ``tis_max`` is set, plus ``kl`` times an estimate of the KL to the
  reference.
- less ``entropy`` times the entropy of the policy's distribution at the token (Williams and Peng 1991).
- distill, reverse (https://thinkingmachines.ai/blog/on-policy-distillation): clipped, with
  ``A = log teacher - log policy`` at the drawn token.
- distill, forward: ``sum_k p_T (log p_T - log p_S)`` over the teacher's k likeliest tokens (as in verl).
- sft: ``-log p``.
- critic: ``max((v - G)^2, (clip(v, v_old - c, v_old + c) - G)^2) / 2``.

The denominator (``aggregate``) is the number of unmasked tokens; of rows with any, each by its token mean; or of those
rows times the longest response allowed (Dr. GRPO, arXiv 2503.20783). It is additive: the sums and denominators of the
parts of a batch, whatever the parts, add up to those of the batch. ``total / weight`` of the whole batch is the loss of
the papers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transferqueue.adapters.trainers.learners import LossSum
from transferqueue.errors import UsageError
from transferqueue.workflows.job.algorithms.kl import kl_estimate
from transferqueue.workflows.job.algorithms.ratios import (
    product_ratio,
    sequence_ratio,
    token_ratio,
    truncated_weight,
)
from transferqueue.workflows.job.algorithms.responses import Responses
from transferqueue.workflows.job.settings.defaults import filled
from transferqueue.workflows.job.settings.job import AlgorithmSettings


def policy_loss(responses: Responses, algorithm: AlgorithmSettings, *, tokens_max: int = 0) -> LossSum:
    """Return the loss of the policy on ``responses``, summed.

    Figures, summed over unmasked tokens (``tokens`` and ``rows`` count them): ``ratio``; ``clipped_low`` and
    ``clipped_high``, tokens whose loss the clip changed; ``dual_clipped``; ``rollout_kl``, k3 of the current policy
    from the one that drew; ``ref_kl``, ``tis_weight``, ``teacher_kl`` where used; ``entropy`` where given.

    Open settings of ``algorithm`` are those of its kind. ``tokens_max`` is the longest response that is allowed;
    aggregate ``rows_max`` needs it. `UsageError` for a column that the algorithm reads and ``responses`` lacks, and for
    ``rows_max`` without ``tokens_max``.

    >>> responses = Responses(
    ...     logprobs_N=torch.tensor([-0.9, -0.5, -0.8], requires_grad=True),
    ...     rollout_logprobs_N=torch.tensor([-1.0, -0.5, -0.3]),
    ...     advantages_N=torch.tensor([1.0, 1.0, -1.0]),
    ...     mask_N=torch.tensor([True, True, True]),
    ...     offsets_R1=torch.tensor([0, 2, 3]),
    ... )
    >>> loss = policy_loss(responses, AlgorithmSettings(kind="dapo"))
    >>> round(loss.total.item(), 4), loss.weight
    (-1.3052, 3.0)
    """
    algorithm = filled(algorithm)
    figures: dict[str, Tensor] = {}
    if algorithm.kind == "sft":
        losses_N = -responses.logprobs_N
    elif algorithm.kind == "distill":
        losses_N, figures = _distillation_losses(responses, algorithm)
    else:
        losses_N, figures = _clipped_losses(responses, responses.column("advantages_N", algorithm.kind), algorithm)
    if algorithm.kl and (algorithm.kl_in == "loss" or responses.ref_logprobs_N is not None):
        ref_N = responses.column("ref_logprobs_N", f"kl={algorithm.kl}")
        figures["ref_kl"] = kl_N = kl_estimate(responses.logprobs_N, ref_N, algorithm.kl_estimator)
        losses_N = losses_N + algorithm.kl * kl_N if algorithm.kl_in == "loss" else losses_N
    if algorithm.entropy:
        losses_N = losses_N - algorithm.entropy * responses.column("entropies_N", f"entropy={algorithm.entropy}")
    if responses.entropies_N is not None:
        figures["entropy"] = responses.entropies_N
    return _summed(responses, losses_N, figures, aggregate=algorithm.aggregate, tokens_max=tokens_max)


def value_loss(responses: Responses, algorithm: AlgorithmSettings) -> LossSum:
    """Return the critic's loss on ``responses``, summed over tokens. ``value_clip`` 0: not clipped.

    Figures: ``value_clipped``, tokens whose loss the clip changed, ``value``, ``return``, ``return_squared``, and
    ``value_error``, squared.
    """
    values_N = responses.column("values_N", "the value loss")
    returns_N = responses.column("returns_N", "the value loss")
    errors_N = (values_N - returns_N).square()
    losses_N, clipped_N = errors_N, torch.zeros_like(errors_N)
    if algorithm.value_clip:
        old_N = responses.column("old_values_N", f"value_clip={algorithm.value_clip}")
        near_N = torch.clamp(values_N, old_N - algorithm.value_clip, old_N + algorithm.value_clip)
        near_errors_N = (near_N - returns_N).square()
        losses_N, clipped_N = torch.maximum(errors_N, near_errors_N), near_errors_N > errors_N
    figures = {
        "value": values_N,
        "return": returns_N,
        "return_squared": returns_N.square(),
        "value_error": errors_N,
        "value_clipped": clipped_N,
    }
    return _summed(responses, 0.5 * losses_N, figures, aggregate="tokens")


def _clipped_losses(
    responses: Responses, advantages_N: Tensor, algorithm: AlgorithmSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    old_N = _old_logprobs(responses, algorithm)
    ratio_N = _ratio(responses, old_N, algorithm)
    plain_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages_N
    losses_N = torch.maximum(plain_N, clipped_N)
    changed_N = clipped_N > plain_N
    figures = {
        "ratio": ratio_N,
        "clipped_low": changed_N & (advantages_N < 0),
        "clipped_high": changed_N & (advantages_N > 0),
    }
    if algorithm.dual_clip:
        bound_N = -algorithm.dual_clip * advantages_N
        figures["dual_clipped"] = (advantages_N < 0) & (losses_N > bound_N)
        losses_N = torch.where(advantages_N < 0, torch.minimum(losses_N, bound_N), losses_N)
    if responses.rollout_logprobs_N is not None:
        figures["rollout_kl"] = kl_estimate(responses.rollout_logprobs_N, responses.logprobs_N)
    if algorithm.tis_max:
        drawn_N = responses.column("rollout_logprobs_N", f"tis_max={algorithm.tis_max}")
        figures["tis_weight"] = truncated_weight(old_N, drawn_N, algorithm.tis_max)
        losses_N = losses_N * figures["tis_weight"]
    return losses_N, figures


def _distillation_losses(responses: Responses, algorithm: AlgorithmSettings) -> tuple[Tensor, dict[str, Tensor]]:
    teacher_NK = responses.column("teacher_logprobs_NK", "distill").detach()
    if not algorithm.top_k:
        if teacher_NK.shape[1] != 1:
            raise UsageError(
                f"teacher_logprobs_NK has {teacher_NK.shape[1]} tokens for each position: top_k=0 reads the drawn "
                f"token only; set top_k={teacher_NK.shape[1]}"
            )
        gain_N = teacher_NK[:, 0] - responses.logprobs_N.detach()
        losses_N, figures = _clipped_losses(responses, gain_N, algorithm)
        return losses_N, {**figures, "teacher_kl": -gain_N}
    student_NK = responses.column("logprobs_NK", f"distill with top_k={algorithm.top_k}")
    share_NK = teacher_NK.exp()
    losses_N = (share_NK * (teacher_NK - student_NK)).sum(1)
    return losses_N, {"teacher_kl": losses_N, "teacher_mass": share_NK.sum(1), "student_mass": student_NK.exp().sum(1)}


def _old_logprobs(responses: Responses, algorithm: AlgorithmSettings) -> Tensor:
    if algorithm.old != "trainer":
        return responses.column("rollout_logprobs_N", 'old="rollout"').detach()
    if responses.old_logprobs_N is None:
        return responses.logprobs_N.detach()
    return responses.old_logprobs_N.detach()


def _ratio(responses: Responses, old_logprobs_N: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    if algorithm.ratio == "token":
        return token_ratio(responses, old_logprobs_N)
    if algorithm.kind == "rloo":
        return product_ratio(responses, old_logprobs_N)
    return sequence_ratio(responses, old_logprobs_N)


def _summed(
    responses: Responses, losses_N: Tensor, figures: dict[str, Tensor], *, aggregate: str, tokens_max: int = 0
) -> LossSum:
    mask_N = responses.mask_N
    tokens_R = responses.row_sums(torch.ones_like(losses_N.detach()))
    sums = {name: value_N.detach().where(mask_N, 0).sum(dtype=torch.float64) for name, value_N in figures.items()}
    sums = {"tokens": mask_N.sum(dtype=torch.float64), "rows": (tokens_R > 0).sum(dtype=torch.float64), **sums}
    counted = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # one transfer from the device
    rows = counted["rows"]
    if aggregate == "rows":
        return LossSum((responses.row_sums(losses_N) / tokens_R.clamp(min=1)).sum(), rows, counted)
    total = losses_N.where(mask_N, 0).sum()
    if aggregate == "tokens":
        return LossSum(total, counted["tokens"], counted)
    if tokens_max < 1:
        raise UsageError(
            f"tokens_max={tokens_max}: aggregate=rows_max divides by it; give the longest response allowed"
        )
    return LossSum(total, rows * tokens_max, counted)
