"""Ladders of jobs: ratios are of runs of the same turn, and bounds follow from the seconds of the stages."""

from __future__ import annotations

import numpy as np
import pytest

from bench.given_lengths import length_of
from bench.ladder import PLAIN, RungRun, bound_s, reached_s, results
from transferqueue.adapters.protocols import Prompt

STAGES = {"rollout": 3.0, "reference": 0.5, "reward": 5.0, "train": 2.0}


def test_ratios_are_of_the_same_turn() -> None:
    plain = [RungRun(64, [1.0, 1.0, 4.0], 9.0, {}), RungRun(64, [2.0, 2.0, 2.0], 12.0, {})]
    runs = {PLAIN: plain, "asynchronous": [RungRun(64, [0.5], 5.0, STAGES)] * 2}
    found = {result.name: result for result in results(runs, "modes", 2)}
    assert found["plain loop: samples a second"].median == 64 * 0.75
    ratio = found["asynchronous: over plain loop"]
    assert (ratio.n, ratio.median) == (2, 3.0)
    assert "plain loop: over plain loop" not in found


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"pacing.mode": "colocated"}, 5.0),
        ({"pacing.mode": "sync", "trainer.stream": "off"}, 5.0),
        ({"pacing.mode": "sync", "trainer.stream": "on"}, 3.0),
        ({"pacing.mode": "async"}, 5.0),
    ],
)
def test_a_step_takes_at_least_what_its_mode_cannot_overlap(settings: dict[str, str], seconds: float) -> None:
    assert bound_s(settings, STAGES, 4) == seconds


def test_stages_share_the_cores_but_for_a_paced_engine() -> None:
    settings = {"pacing.mode": "async"}
    assert (bound_s(settings, STAGES, 1), bound_s(settings, STAGES, 1, paced=True)) == (10.5, 7.5)


def test_a_rung_stands_beside_its_bound() -> None:
    runs = {"whole batches": [RungRun(60, [6.0], 9.0, STAGES)], "streamed": [RungRun(60, [4.0], 9.0, STAGES)]}
    found = {result.name: result.median for result in results(runs, "asyncflow", 4)}
    assert (found["streamed: over whole batches"], found["streamed: bound"]) == (1.5, 20.0)
    assert found["streamed: of its bound"] == 0.75


def test_a_reward_is_reached_when_three_steps_have_it() -> None:
    rewards = [0.1, 0.9, 0.2, 0.5, 0.6, 0.7, 0.4]
    lines = [{"at": 10.0 + number, "reward": reward} for number, reward in enumerate(rewards)]
    assert reached_s(lines, 0.6) == 5.0
    assert np.isnan(reached_s(lines, 0.8))
    assert np.isnan(reached_s(lines, None))


def test_lengths_follow_from_prompt_and_seed_and_are_skewed_as_published() -> None:
    rng = np.random.default_rng(0)
    prompts = [Prompt(ids=rng.integers(0, 256, 32).astype(np.int32), seed=number) for number in range(2000)]
    lengths = np.array([length_of(prompt, 320, "published") for prompt in prompts])
    assert [length_of(prompt, 320, "published") for prompt in prompts[:9]] == lengths[:9].tolist()
    assert lengths.min() >= 1
    assert lengths.max() <= 320
    p50, p90 = np.percentile(lengths, [50, 90])
    assert 3 < p90 / p50 < 5  # 3,200 and 12,900 tokens
    mild = np.array([length_of(prompt, 320, "mild") for prompt in prompts])
    assert np.std(np.log(mild)) == pytest.approx(np.std(np.log(lengths)) / 2, rel=0.2)
