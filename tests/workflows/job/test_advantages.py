"""Advantages against figures of verl's functions, plain loops, and what equal, masked or bad rows must give."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transferqueue.errors import UsageError
from transferqueue.workflows.job.algorithms.advantages import (
    ScoredRows,
    advantage_columns_of,
    generalized_advantages,
    group_advantages,
    kl_penalties,
    leave_one_out_advantages,
    overlong_penalties,
    rewards_to_go,
    token_rewards,
    whitened,
)
from transferqueue.workflows.job.settings.job import AlgorithmSettings

GOLDEN = [1.0, 0.0, 0.0, 0.5]
ONE_GROUP = [7, 7, 7, 7]


def masks_of(*lengths):
    return [np.ones(length, bool) for length in lengths]


def test_golden_group_advantages():
    assert group_advantages(GOLDEN, ONE_GROUP, std_eps=1e-6) == pytest.approx(
        [1.30558, -0.78335, -0.78335, 0.26112], abs=1e-5
    )
    population = group_advantages(GOLDEN, ONE_GROUP, std="population", std_eps=0)
    assert population == pytest.approx([1.50756, -0.90453, -0.90453, 0.30151], abs=1e-5)
    assert group_advantages(GOLDEN, ONE_GROUP, std="none").tolist() == [0.625, -0.375, -0.375, 0.125]
    assert leave_one_out_advantages(GOLDEN, ONE_GROUP) == pytest.approx([0.83333, -0.5, -0.5, 0.16667], abs=1e-5)


def test_golden_generalized_advantages():
    masks = masks_of(4, 3)
    values = [np.array([0.1, 0.2, 0.3, 0.4]), np.array([0, -0.1, -0.2])]
    advantages, returns = generalized_advantages(token_rewards([1, -0.5], masks), values, masks, gamma=1.0, lam=0.95)
    assert returns[0] == pytest.approx([0.8997, 0.9365, 0.97, 1], abs=1e-4)
    assert returns[1] == pytest.approx([-0.4658, -0.485, -0.5], abs=1e-4)
    white = np.concatenate(whitened(advantages, masks))
    assert (white.mean(), white.std(ddof=1)) == (pytest.approx(0), pytest.approx(1))


@given(
    rewards=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12),
    groups=st.integers(1, 4),
    std=st.sampled_from(["sample", "population", "none"]),
)
@settings(deadline=None)
def test_groups_are_apart_and_order_is_free(rewards, groups, std):
    group_id = np.arange(len(rewards)) % groups
    every = group_advantages(rewards, group_id, std=std)
    for group in range(groups):
        members = np.flatnonzero(group_id == group)
        assert (
            every[members].tolist() == group_advantages(np.take(rewards, members), group_id[members], std=std).tolist()
        )
    order = np.random.default_rng(len(rewards)).permutation(len(rewards))
    shuffled = group_advantages(np.take(rewards, order), group_id[order], std=std)
    assert shuffled == pytest.approx(every[order], abs=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e6, 1e-12])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_equal_rewards_give_exactly_0(reward, rows):
    noisy = np.float32(reward) * np.ones(rows)
    noisy[-1] = np.nextafter(np.float64(noisy[-1]), np.inf)
    for std in ("sample", "population", "none"):
        assert not group_advantages(noisy, np.zeros(rows, int), std=std, std_eps=0.0).any()
    assert not leave_one_out_advantages(noisy, np.zeros(rows, int)).any()
    assert not np.concatenate(whitened([noisy], masks_of(rows))).any()


def test_masked_tokens_are_stepped_over():
    """With tokens of a tool in between, the others get what they get without them."""
    rng = np.random.default_rng(0)
    mask = np.array([True, False, True, True, False, False, True, False])
    values, kl = rng.normal(size=8), rng.normal(size=8)
    for gamma, lam in ((1.0, 1.0), (0.9, 0.95)):
        with_tools = token_rewards([2.0], [mask], [kl])
        without = token_rewards([2.0], masks_of(4), [kl[mask]])
        assert not with_tools[0][~mask].any()
        found = generalized_advantages(with_tools, [values], [mask], gamma=gamma, lam=lam)
        wanted = generalized_advantages(without, [values[mask]], masks_of(4), gamma=gamma, lam=lam)
        for tokens, alone in zip(found, wanted, strict=True):
            assert tokens[0][mask] == pytest.approx(alone[0])
            assert not tokens[0][~mask].any()
        to_go = rewards_to_go(with_tools, [mask], gamma=gamma)
        assert to_go[0][mask] == pytest.approx(rewards_to_go(without, masks_of(4), gamma=gamma)[0])


def test_a_row_without_tokens_of_the_policy_gets_none():
    masks = [np.zeros(2, bool), np.ones(1, bool)]
    assert [row.tolist() for row in token_rewards([5.0, 1.0], masks)] == [[0.0, 0.0], [1.0]]
    assert [row.tolist() for row in whitened([np.ones(2), np.ones(1)], masks)] == [[0, 0], [0]]


def test_penalty_grows_over_the_buffer_only():
    penalties = overlong_penalties([0, 80, 85, 100, 200], tokens_max=100, buffer=20, penalty=2.0)
    assert penalties.tolist() == [0, 0, -0.5, -2, -2]
    for buffer in (0, -1, 101):
        with pytest.raises(UsageError, match=f"overlong_buffer={buffer} of tokens_max=100"):
            overlong_penalties([1], tokens_max=100, buffer=buffer)


def test_k3_of_distant_policies_is_bounded():
    far = kl_penalties([np.array([-100.0, 0.0])], [np.array([0.0, -100.0])], "k3")[0]
    assert far.tolist() == [10.0, 10.0]
    assert kl_penalties([np.array([-1.0])], [np.array([-1.5])], "k2")[0].tolist() == [0.125]


def test_columns_of_each_kind():
    rng = np.random.default_rng(1)
    masks = masks_of(3, 1, 2, 4)
    tokenwise = {
        name: [rng.normal(size=len(mask)) for mask in masks] for name in ("logprobs", "ref_logprobs", "values")
    }
    rows = ScoredRows(rewards=GOLDEN, group_id=ONE_GROUP, masks=masks, **tokenwise)

    def columns(**settings):
        return advantage_columns_of(rows, AlgorithmSettings(**settings), tokens_max=4)

    assert set(columns(kind="ppo")) == {"token_advantages", "returns"}
    assert columns(kind="dr_grpo")["advantages"].tolist() == [0.625, -0.375, -0.375, 0.125]
    to_go = columns(kind="reinforce_pp", whiten=False)["token_advantages"]
    assert [row.tolist() for row in to_go] == [[1, 1, 1], [0], [0, 0], [0.5, 0.5, 0.5, 0.5]]
    white = np.concatenate(columns(kind="reinforce_pp", kl=0.1, kl_in="reward", kl_estimator="k2")["token_advantages"])
    assert (white.mean(), white.std(ddof=1)) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))

    kl = [kl_T.sum() for kl_T in kl_penalties(rows.logprobs, rows.ref_logprobs, "k1")]
    less = leave_one_out_advantages(np.asarray(GOLDEN) - 0.1 * np.asarray(kl), ONE_GROUP)
    assert columns(kind="rloo", kl=0.1, kl_in="reward", kl_estimator="k1")["advantages"] == pytest.approx(less)

    late = columns(kind="dr_grpo", overlong_buffer=2)["advantages"]
    assert late == pytest.approx(group_advantages(np.array(GOLDEN) - [0.5, 0, 0, 1], ONE_GROUP, std="none"))
    for column in (*columns(kind="ppo").values(), to_go):
        assert [row.dtype for row in column] == [np.float32] * 4


def test_bad_rows_are_refused_by_name():
    with pytest.raises(UsageError, match="the reward of row 1 is nan"):
        group_advantages([0.0, float("nan")], [1, 1])
    with pytest.raises(UsageError, match=r"rewards \(2,\) and group_id \(1,\) must both be \[rows\]"):
        group_advantages([0.0, 1.0], [1])
    with pytest.raises(UsageError, match="values has 1 rows, rewards 2"):
        ScoredRows(rewards=[0, 1], group_id=[0, 0], values=[np.zeros(2)])
    with pytest.raises(UsageError, match=r"values\[1\] has 3 tokens, its mask 1"):
        ScoredRows(rewards=[0, 1], group_id=[0, 0], masks=masks_of(2, 1), values=[np.zeros(2), np.zeros(3)])
    rows = ScoredRows(rewards=[0, 1], group_id=[0, 0], masks=masks_of(2, 1))
    with pytest.raises(UsageError, match="the rows have no values, which this algorithm reads"):
        advantage_columns_of(rows, AlgorithmSettings(kind="ppo"))
    with pytest.raises(UsageError, match="the rows have no logprobs"):
        advantage_columns_of(rows, AlgorithmSettings(kind="grpo", kl=0.1, kl_in="reward"))
