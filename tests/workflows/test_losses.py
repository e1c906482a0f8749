"""Gains of off-policy rows against the same formulas in plain Python, token by token, and their gradients' meaning."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", exc_type=ImportError)

import torch

from transferqueue.errors import UsageError
from transferqueue.workflows.grpo.learning.learner import Objective, clipped_gain
from transferqueue.workflows.grpo.learning.losses import Clip, decoupled_gain, ppo_gain, truncated_weight
from transferqueue.workflows.grpo.learning.settings import LearningSettings

logprob = st.floats(-4, 0, width=32)
advantage = st.floats(-3, 3, width=32)


def clipped(ratio: float, gain: float, clip: Clip) -> float:
    return min(ratio * gain, min(max(ratio, 1 - clip.low), 1 + clip.high) * gain)


@given(now=logprob, near=logprob, drawn=logprob, gain=advantage, weight_max=st.sampled_from([1.0, 2.0, math.inf]))
def test_gains_are_those_of_the_papers(now: float, near: float, drawn: float, gain: float, weight_max: float) -> None:
    clip = Clip(low=0.2, high=0.28)
    now_11, near_11, drawn_11, gain_11 = (torch.tensor([[value]]) for value in (now, near, drawn, gain))
    assert ppo_gain(now_11, drawn_11, gain_11, clip).item() == pytest.approx(
        clipped(math.exp(now - drawn), gain, clip), rel=1e-4, abs=1e-5
    )
    found = decoupled_gain(now_11, near_11, drawn_11, gain_11, clip, weight_max=weight_max).item()
    weight = min(math.exp(near - drawn), weight_max)
    assert found == pytest.approx(weight * clipped(math.exp(now - near), gain, clip), rel=1e-4, abs=1e-5)


def test_all_gains_of_fresh_rows_are_those_of_ppo() -> None:
    now_BT = torch.tensor([[-1.0, -0.5]])
    drawn_BT, advantages_B1 = torch.tensor([[-1.1, -0.2]]), torch.tensor([[2.0]])
    plain_BT = ppo_gain(now_BT, drawn_BT, advantages_B1, Clip())
    assert torch.equal(decoupled_gain(now_BT, drawn_BT, drawn_BT, advantages_B1, Clip()), plain_BT)


def test_old_rows_still_teach_where_the_clip_is_around_the_proximal_policy() -> None:
    """The policy has left the clip around the behaviour: PPO's gradient is 0, the decoupled one's is not."""
    now_BT = torch.tensor([[-0.5]], requires_grad=True)
    near_BT, drawn_BT = torch.tensor([[-0.5]], requires_grad=True), torch.tensor([[-2.0]])
    one = torch.ones(1, 1)
    (gradient_BT,) = torch.autograd.grad(ppo_gain(now_BT, drawn_BT, one, Clip()).sum(), now_BT)
    assert gradient_BT.item() == 0
    gain = decoupled_gain(now_BT, near_BT, drawn_BT, one, Clip(), weight_max=2.0).sum()
    gradient_BT, of_proximal = torch.autograd.grad(gain, (now_BT, near_BT), allow_unused=True)
    assert gradient_BT.item() == pytest.approx(2.0)
    assert of_proximal is None


def test_the_job_weighs_rows_by_the_policy_before_the_step() -> None:
    now_BT, drawn_BT = torch.tensor([[-0.5, -1.0]], requires_grad=True), torch.tensor([[-2.0, -1.5]])
    objective = Objective(weight_max=2.0)
    gain = clipped_gain(now_BT, drawn_BT, torch.ones(1, 1), objective).sum()
    (gradient_BT,) = torch.autograd.grad(gain, now_BT)
    assert gradient_BT.tolist() == [[2.0, pytest.approx(math.exp(0.5))]]
    for bound in (0.5, math.inf, math.nan):
        with pytest.raises(UsageError, match="finite bound of at least 1"):
            Objective(weight_max=bound)
        with pytest.raises(UsageError, match="finite bound of at least 1"):
            LearningSettings(weight_max=bound)


@pytest.mark.parametrize(("low", "high"), [(0, 0.2), (1, 0.2), (0.2, 0), (0.2, math.inf), (math.nan, 0.2), (0.2, -1)])
def test_bounds_that_bound_nothing_are_refused(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="give 0 < low < 1"):
        Clip(low=low, high=high)


@pytest.mark.parametrize("weight_max", [0.5, -1.0, math.nan])
def test_a_bound_that_weighs_fresh_rows_down_is_refused(weight_max: float) -> None:
    with pytest.raises(UsageError, match="give 1 or more"):
        truncated_weight(torch.zeros(1, 1), torch.zeros(1, 1), weight_max)
