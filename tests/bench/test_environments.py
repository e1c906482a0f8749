"""The command that compares three environments with and without failures judges what its runs gave."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bench.environments import SHARES, RungRun, of_steps, problems


def ended(late: float, shares: Mapping[str, float] = SHARES) -> RungRun:
    rewards = dict.fromkeys(SHARES, late)
    return RungRun(dict(shares), dict.fromkeys(SHARES, 0.1), rewards, widest=0.0, rows=100, seconds=1.0)


def test_shares_count_rows_and_rewards_the_ends_of_a_run() -> None:
    lines = [
        {"rows": 10, "reward/sums": step / 10, "reward_share/sums": 0.5, "reward/even": 1.0, "reward_share/even": 0.5}
        for step in range(10)
    ]
    lines[0] |= {"rows": 30, "reward/guess": 0.2, "reward_share/sums": 1.0, "reward_share/even": 0.0}
    found = of_steps(lines)
    assert found["shares"] == {"sums": 75 / 120, "guess": 0.0, "even": 45 / 120}
    assert (found["early"]["sums"], found["late"]["sums"]) == pytest.approx((0.0, 0.8))
    assert (found["rows"], found["widest"]) == (120, 0.5)


def test_a_run_of_a_few_steps_has_its_first_and_last_ones() -> None:
    lines = [{"rows": 10, "reward/sums": float(step), "reward_share/sums": 1.0} for step in range(2)]
    assert (of_steps(lines)["early"]["sums"], of_steps(lines)["late"]["sums"]) == (0.0, 1.0)


def test_what_is_not_as_it_must_be_is_named() -> None:
    found = {"undisturbed": [ended(0.6), ended(0.7)], "failing": [ended(0.55), ended(0.75)]}
    assert [*problems(found)] == []
    found["failing"] += [ended(0.4), ended(0.05), ended(0.6, {"sums": 0.53, "guess": 0.28, "even": 0.19})]
    said = [*problems(found)]
    assert "failing 2: sums ends at 0.400, undisturbed at [0.6, 0.7]" in said
    assert "failing 3: the reward of even goes from 0.100 to 0.050" in said
    assert "failing 4: sums has 53.0% of the trained rows, not 50%" in said
    assert len(said) == 3 + 6 + 1
