"""Losses against figures of verl's functions; any partition of the rows gives the same sums and gradients; bad
responses are refused."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)

import torch

from transferqueue.errors import UsageError
from transferqueue.workflows.job.algorithms.kl import kl_estimate
from transferqueue.workflows.job.algorithms.losses import policy_loss, value_loss
from transferqueue.workflows.job.algorithms.ratios import truncated_weight
from transferqueue.workflows.job.algorithms.responses import Responses
from transferqueue.workflows.job.settings.defaults import KINDS
from transferqueue.workflows.job.settings.job import AlgorithmSettings


def flat(*rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


GOLDEN = Responses(
    logprobs_N=flat([-0.9, -0.7, -1.6, -0.7], [-0.8, -0.9, -0.85]),
    rollout_logprobs_N=flat([-1, -0.5, -2, -0.7], [-0.3, -1.2, -0.9]),
    ref_logprobs_N=flat([-1.1, -0.6, -1.9, -0.5], [-0.4, -1, -1.1]),
    advantages_N=flat([1] * 4, [-1] * 3),
    mask_N=torch.ones(7, dtype=torch.bool),
    offsets_R1=torch.tensor([0, 4, 7]),
)


@pytest.mark.parametrize(
    ("kind", "mean"), [("dapo", -0.1432531), ("grpo", 0.0080339), ("dr_grpo", -0.1253465), ("gspo", -0.0633274)]
)
def test_golden_losses(kind, mean):
    loss = policy_loss(GOLDEN, AlgorithmSettings(kind=kind, clip_low=0.2, clip_high=0.28), tokens_max=4)
    assert loss.total.item() / loss.weight == pytest.approx(mean, abs=1e-7)


def test_golden_kl():
    assert kl_estimate(GOLDEN.logprobs_N, GOLDEN.ref_logprobs_N).mean().item() == pytest.approx(0.0302265, abs=1e-7)
    bare = policy_loss(GOLDEN, AlgorithmSettings(kind="dapo"))
    with_kl = policy_loss(GOLDEN, AlgorithmSettings(kind="dapo", kl=0.5))
    assert (with_kl.total - bare.total).item() / 7 == pytest.approx(0.5 * 0.0302265, abs=1e-7)
    assert with_kl.figures["ref_kl"] / with_kl.figures["tokens"] == pytest.approx(0.0302265, abs=1e-7)


def random_responses(seed, rows=12):
    """Ragged rows, some tokens masked, one row masked whole and one empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rows)
    lengths[3] = 0
    offsets_R1 = torch.tensor([0, *np.cumsum(lengths)])
    tokens = int(lengths.sum())

    def column(*shape, scale=0.7):
        return torch.from_numpy(rng.normal(-1.5, scale, (tokens, *shape)))

    mask = rng.random(tokens) < 0.8
    mask[offsets_R1[5] : offsets_R1[6]] = False
    return Responses(
        logprobs_N=column().requires_grad_(),
        rollout_logprobs_N=column(),
        old_logprobs_N=column(),
        ref_logprobs_N=column(),
        advantages_N=torch.from_numpy(rng.normal(size=rows)).repeat_interleave(torch.from_numpy(lengths)),
        entropies_N=column().abs(),
        values_N=column().requires_grad_(),
        old_values_N=column(scale=0.1),
        returns_N=column(),
        teacher_logprobs_NK=column(3),
        logprobs_NK=column(3).requires_grad_(),
        mask_N=torch.from_numpy(mask),
        offsets_R1=offsets_R1,
    )


def part(responses, rows):
    """Return the responses of ``rows`` in that order; gradients reach the whole batch's leaves."""
    starts, ends = responses.offsets_R1[:-1][rows], responses.offsets_R1[1:][rows]
    tokens = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    chosen = {
        field.name: None if getattr(responses, field.name) is None else getattr(responses, field.name)[tokens]
        for field in fields(responses)
        if field.name != "offsets_R1"
    }
    return Responses(**chosen, offsets_R1=torch.cat([torch.zeros(1, dtype=torch.int64), (ends - starts).cumsum(0)]))


ALGORITHMS = [
    *(AlgorithmSettings(kind=kind, clip_low=0.2) for kind in KINDS if kind != "distill"),
    AlgorithmSettings(kind="distill", top_k=3),
    AlgorithmSettings(kind="rloo", ratio="sequence", aggregate="rows"),
    AlgorithmSettings(kind="dapo", old="trainer", tis_max=1.5, dual_clip=2.0, kl=0.1, aggregate="rows_max"),
    AlgorithmSettings(kind="gspo", kl=0.1, kl_estimator="k2", aggregate="tokens"),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
@pytest.mark.parametrize("parts", [2, 7, 12])
def test_any_partition_of_the_rows_gives_the_same_sum_and_gradient(algorithm, parts):
    responses = random_responses(parts)
    leaves = [responses.logprobs_N, responses.logprobs_NK]
    whole = policy_loss(responses, algorithm, tokens_max=8)
    wanted = torch.autograd.grad(whole.total, leaves, allow_unused=True)
    order = np.random.default_rng(0).permutation(12)
    pieces = [policy_loss(part(responses, rows), algorithm, tokens_max=8) for rows in np.array_split(order, parts)]
    total = sum(piece.total for piece in pieces)
    assert total.item() == pytest.approx(whole.total.item())
    assert sum(piece.weight for piece in pieces) == whole.weight
    for found, gradient in zip(torch.autograd.grad(total, leaves, allow_unused=True), wanted, strict=True):
        assert (found is None) == (gradient is None)
        if found is not None:
            torch.testing.assert_close(found, gradient)
    for name, value in whole.figures.items():
        assert sum(piece.figures[name] for piece in pieces) == pytest.approx(value), name


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
def test_masked_tokens_change_nothing(algorithm):
    responses = random_responses(5)
    changed = {
        field.name: torch.where(
            responses.mask_N if value.ndim == 1 else responses.mask_N[:, None],
            value.detach(),
            torch.full_like(value, 40.0),
        )
        for field in fields(responses)
        if (value := getattr(responses, field.name)).is_floating_point()
    }
    other = replace(responses, **changed)
    whole = policy_loss(responses, algorithm, tokens_max=8)
    assert policy_loss(other, algorithm, tokens_max=8).total.item() == pytest.approx(whole.total.item())
    (gradient,) = torch.autograd.grad(
        whole.total, responses.logprobs_NK if algorithm.kind == "distill" else responses.logprobs_N
    )
    assert gradient.isfinite().all()
    assert not gradient[~responses.mask_N].any()


def test_rows_without_a_token_are_not_counted():
    responses = random_responses(3)
    assert policy_loss(responses, AlgorithmSettings(kind="grpo")).weight == 10
    assert policy_loss(responses, AlgorithmSettings(kind="dapo")).weight == float(responses.mask_N.sum())
    assert policy_loss(responses, AlgorithmSettings(kind="dr_grpo"), tokens_max=20).weight == 200


def one_token(now, *, drawn, old=None, advantage=1.0):
    column = {"logprobs_N": now, "rollout_logprobs_N": drawn, "old_logprobs_N": old, "advantages_N": advantage}
    tensors = {name: torch.tensor([value]) for name, value in column.items() if value is not None}
    tensors["logprobs_N"].requires_grad_()
    return Responses(**tensors, mask_N=torch.tensor([True]), offsets_R1=torch.tensor([0, 1]))


def gradient_of(responses, algorithm):
    return torch.autograd.grad(policy_loss(responses, algorithm).total, responses.logprobs_N)[0].item()


def test_old_rows_still_teach_where_the_clip_is_around_the_trainer():
    """The policy has left the clip around the one that drew: PPO's gradient is 0, the decoupled one's is the truncated
    weight."""
    row = one_token(-0.5, drawn=-2.0, old=-0.5)
    assert gradient_of(row, AlgorithmSettings(kind="dapo")) == 0
    assert gradient_of(row, AlgorithmSettings(kind="dapo", old="trainer", tis_max=2.0)) == pytest.approx(-2.0)
    assert gradient_of(row, AlgorithmSettings(kind="dapo", old="trainer")) == pytest.approx(-1.0)


def test_one_update_needs_no_column_of_the_old_policy():
    algorithm = AlgorithmSettings(kind="dapo", old="trainer", tis_max=3.0)
    row = one_token(-0.5, drawn=-1.0)
    assert gradient_of(row, algorithm) == pytest.approx(-math.exp(0.5))
    assert policy_loss(row, algorithm).figures["ratio"] == 1.0


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    row = one_token(-0.1, drawn=-3.0, advantage=-1.0)
    bounded = AlgorithmSettings(kind="dapo", dual_clip=3.0)
    assert policy_loss(row, bounded).total.item() == pytest.approx(3.0)
    assert gradient_of(row, bounded) == 0
    assert policy_loss(row, bounded).figures["dual_clipped"] == 1
    assert gradient_of(row, AlgorithmSettings(kind="dapo")) > 10


def test_figures_count_what_the_clip_changed():
    figures = policy_loss(GOLDEN, AlgorithmSettings(kind="dapo")).figures
    assert (figures["tokens"], figures["rows"]) == (7, 2)
    assert (figures["clipped_high"], figures["clipped_low"]) == (1, 1)
    assert figures["rollout_kl"] > 0
    assert "entropy" not in figures


def test_reverse_distillation_pulls_to_the_teacher():
    teacher = torch.tensor([[-0.1]])
    row = replace(one_token(-1.0, drawn=-1.0), teacher_logprobs_NK=teacher, advantages_N=None)
    assert gradient_of(row, AlgorithmSettings(kind="distill")) == pytest.approx(-0.9)
    assert policy_loss(row, AlgorithmSettings(kind="distill")).figures["teacher_kl"] == pytest.approx(-0.9)


def test_forward_distillation_over_all_tokens_is_the_kl():
    logits, teacher = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64).log_softmax(1)
    student = logits.requires_grad_().log_softmax(1)
    row = Responses(
        logprobs_N=student[:, 0],
        logprobs_NK=student,
        teacher_logprobs_NK=teacher,
        mask_N=torch.ones(3, dtype=torch.bool),
        offsets_R1=torch.tensor([0, 3]),
    )
    loss = policy_loss(row, AlgorithmSettings(kind="distill", top_k=5))
    wanted = torch.nn.functional.kl_div(student, teacher, reduction="sum", log_target=True)
    assert loss.total.item() == pytest.approx(wanted.item())
    (gradient,) = torch.autograd.grad(loss.total, logits)
    torch.testing.assert_close(gradient, (student.exp() - teacher.exp()).detach())


def test_value_loss_is_clipped_around_the_old_values():
    row = Responses(
        logprobs_N=torch.zeros(2),
        values_N=torch.tensor([1.0, 0.0], requires_grad=True),
        old_values_N=torch.tensor([0.0, 0.0]),
        returns_N=torch.tensor([1.0, 1.0]),
        mask_N=torch.tensor([True, True]),
        offsets_R1=torch.tensor([0, 2]),
    )
    loss = value_loss(row, AlgorithmSettings(kind="ppo", value_clip=0.2))
    assert loss.total.item() == pytest.approx(0.5 * (0.8**2 + 1))
    assert (loss.weight, loss.figures["value_clipped"]) == (2, 1)
    assert torch.autograd.grad(loss.total, row.values_N)[0].tolist() == [0.0, -1.0]
    bare = value_loss(replace(row, old_values_N=None), AlgorithmSettings(kind="ppo", value_clip=0.0))
    assert bare.total.item() == pytest.approx(0.5)


@pytest.mark.parametrize("weight_max", [0.5, -1.0, math.nan])
def test_a_bound_that_weighs_fresh_rows_down_is_refused(weight_max):
    with pytest.raises(UsageError, match="give 1 or more"):
        truncated_weight(torch.zeros(1), torch.zeros(1), weight_max)


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [
        (AlgorithmSettings(kind="grpo"), "advantages_N, which grpo reads"),
        (AlgorithmSettings(kind="sft", kl=0.1), "ref_logprobs_N, which kl=0.1 reads"),
        (AlgorithmSettings(kind="distill"), "teacher_logprobs_NK, which distill reads"),
    ],
)
def test_a_missing_column_is_named(algorithm, missing):
    row = replace(one_token(-1.0, drawn=-1.0), advantages_N=None)
    with pytest.raises(UsageError, match=missing):
        policy_loss(row, algorithm)


def test_bad_responses_are_refused():
    row = one_token(-1.0, drawn=-1.0)
    with pytest.raises(UsageError, match=r"offsets_R1 is \[0, 2\]: give ascending offsets from 0 to 1"):
        replace(row, offsets_R1=torch.tensor([0, 2]))
    with pytest.raises(UsageError, match=r"mask_N is torch.float32: give torch.bool"):
        replace(row, mask_N=torch.ones(1))
    with pytest.raises(UsageError, match=r"rollout_logprobs_N has shape \(3,\), the mask 1 tokens"):
        replace(row, rollout_logprobs_N=torch.zeros(3))
    with pytest.raises(UsageError, match="tokens_max=0: aggregate=rows_max divides by it"):
        policy_loss(row, AlgorithmSettings(kind="dr_grpo"))
    with pytest.raises(UsageError, match="has 2 tokens for each position: top_k=0 reads the drawn token only"):
        policy_loss(replace(row, teacher_logprobs_NK=torch.zeros(1, 2)), AlgorithmSettings(kind="distill"))


def test_the_entropy_bonus_raises_the_entropy():
    responses = random_responses(3)
    entropies_N = responses.entropies_N.clone().requires_grad_()
    responses = replace(responses, entropies_N=entropies_N)
    plain = policy_loss(responses, AlgorithmSettings(kind="dapo"))
    with_bonus = policy_loss(responses, AlgorithmSettings(kind="dapo", entropy=0.5))
    bonus = 0.5 * entropies_N.where(responses.mask_N, 0).sum()
    torch.testing.assert_close(with_bonus.total, plain.total - bonus)
    (with_bonus.total / with_bonus.weight).backward()
    torch.testing.assert_close(entropies_N.grad, -0.5 * responses.mask_N.double() / with_bonus.weight)
    with pytest.raises(UsageError, match=r"no entropies_N, which entropy=0.5 reads"):
        policy_loss(replace(responses, entropies_N=None), AlgorithmSettings(kind="dapo", entropy=0.5))
