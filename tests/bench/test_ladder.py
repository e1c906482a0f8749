"""Ladders of jobs: ratios are of runs of the same turn, and bounds follow from the seconds of the stages."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gains import colocated_or_apart, draw, markdown, newest, tables
from bench.given_lengths import difficulty_of, length_of, published_lengths
from bench.ladder import (
    KEPT,
    LADDERS,
    PLAIN,
    SIZES,
    RungRun,
    _reached_steps,
    _recall,
    begin,
    bound_s,
    changes,
    keep,
    kept,
    reached_s,
    results,
)
from bench.measurement_record import Measurement
from bench.predicted import Prediction
from bench.run_record import RECORDS
from transferqueue.adapters.protocols import Prompt
from transferqueue.workflows.dispatch.ranker_accuracy import recall
from transferqueue.workflows.planner.profile import GenerationProfile, Profile, StageProfile

ROOT = Path(__file__).resolve().parents[2]

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


@pytest.mark.parametrize(("engine", "is_request"), [("vllm", True), ("transformers", False)])
def test_vllm_takes_adapters_alone_as_lora_requests(engine: str, is_request: bool) -> None:
    chosen = argparse.Namespace(ladder="lora", engine=engine)
    option = "engine.0.options.enable_lora"
    assert (option in changes("adapters alone", chosen)) is is_request
    assert option not in changes("merged", chosen)


def test_stages_share_the_cores_but_for_a_paced_engine() -> None:
    settings = {"pacing.mode": "async"}
    assert (bound_s(settings, STAGES, 1), bound_s(settings, STAGES, 1, paced=True)) == (10.5, 7.5)


def test_a_rung_stands_beside_its_bound() -> None:
    runs = {"whole batches": [RungRun(60, [6.0], 9.0, STAGES)], "streamed": [RungRun(60, [4.0], 9.0, STAGES)]}
    found = {result.name: result.median for result in results(runs, "asyncflow", 4)}
    assert (found["streamed: over whole batches"], found["streamed: bound"]) == (1.5, 20.0)
    assert found["streamed: of its bound"] == 0.75


GIVEN = Profile(
    batch_rows=16,
    group_rows=2,
    devices=2,
    generation=GenerationProfile(devices=1, slots=4, token_ms=[(1, 10.0), (4, 12.0)], lengths=[10, 20, 90]),
    train=StageProfile(row_s=0.05, devices=1),
)


def test_the_planner_predicts_each_mode_of_a_ladder() -> None:
    of = Prediction(GIVEN, 1)
    whole, streamed, ahead = (of.step_s(LADDERS["asyncflow"][rung]) for rung in LADDERS["asyncflow"])
    assert whole > streamed > ahead
    assert of.step_s(LADDERS["streamrl"]["whole batches, dispatch"]) < whole  # the tail begins first
    assert math.isnan(of.step_s({"pacing.mode": "colocated"}))
    runs = {"whole batches": [RungRun(16, [whole], 9.0, STAGES)] * 2}
    found = {result.name: result.median for result in results(runs, "asyncflow", 2, prediction=of)}
    assert found["whole batches: of the prediction"] == pytest.approx(1.0, rel=1e-3)


def test_a_reward_is_reached_when_three_steps_have_it() -> None:
    rewards = [0.1, 0.9, 0.2, 0.5, 0.6, 0.7, 0.4]
    lines = [{"at": 10.0 + number, "reward": reward} for number, reward in enumerate(rewards)]
    assert reached_s(lines, 0.6) == 5.0
    assert np.isnan(reached_s(lines, 0.8))
    assert np.isnan(reached_s(lines, None))


def test_recall_is_that_of_the_later_half_of_refits(tmp_path: Path) -> None:
    file = tmp_path / "ranker.jsonl"
    assert math.isnan(_recall(file))
    refits = [{"rows": 8}, {"recall_20": 0.2}, {"recall_20": 0.6}, {"recall_20": 1.0}]
    file.write_text("\n".join(json.dumps(refit) for refit in refits))
    assert _recall(file) == pytest.approx(0.8)


def test_the_steps_until_a_held_out_reward_are_those_before_the_first_evaluation_with_it(tmp_path: Path) -> None:
    file = tmp_path / "evaluations.jsonl"
    assert math.isnan(_reached_steps(file, 0.5))
    lines = [{"step": step, "reward": reward} for step, reward in ((0, 0.1), (2, 0.6), (4, 0.4), (6, 0.9))]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert (_reached_steps(file, 0.5), _reached_steps(file, 0.7)) == (2, 6)
    assert math.isnan(_reached_steps(file, 0.95))
    assert math.isnan(_reached_steps(file, None))


def test_steps_until_a_reward_are_compared_where_each_seed_reached_it() -> None:
    def runs(*steps: float) -> list[RungRun]:
        return [RungRun(64, [1.0], 9.0, {}, reached_steps=each, reached_tokens=9 * each) for each in steps]

    def found(*base: float) -> dict[str, float]:
        rungs = {"in the order of the data": runs(*base), "by pass rate": runs(30, 30)}
        return {each.name: each.median for each in results(rungs, "sampler", 2)}

    steps, share = "steps until the held-out reward", "by pass rate: tokens until the held-out reward over"
    both = found(40, 60)
    assert both[f"in the order of the data: {steps}, 2 of 2 runs"] == 50
    assert both[f"{share} in the order of the data"] == 0.625
    for least, reached in ((math.nan, 1), (0, 2)):
        one = found(40, least)
        assert f"in the order of the data: {steps}, {reached} of 2 runs" in one
        assert not any("reward over in the order" in name for name in one)


def test_further_uses_stand_in_for_prompts_in_batches_of_the_same_size() -> None:
    shares = {}
    for rung, settings in LADDERS["uses"].items():
        prompts, uses = (int(settings.get(key, usual)) for key, usual in PROMPTS_AND_USES.items())
        shares[rung] = (prompts * uses, prompts)
    assert shares == {
        "one use": (8, 8),
        "two uses": (8, 4),
        "four uses": (8, 2),
        "two uses, uncorrected": (8, 4),
        "half of the prompts": (4, 4),
    }


PROMPTS_AND_USES = {"trainer.prompts_per_step": SIZES["tiny"].prompts, "pacing.uses": 1}


def of_seed(reward: float, held_out: float, staleness: float = 0.0) -> RungRun:
    return RungRun(64, [1.0], 9.0, STAGES, 1.0, reward=reward, held_out=held_out, staleness=staleness, recall=0.7)


REWARDS = {
    "synchronous": [of_seed(0.9, 1.0), of_seed(0.7, 0.8)],
    "asynchronous": [of_seed(0.8, 1.0, 0.5), of_seed(0.65, 0.8, 0.5)],
}


def test_what_asynchrony_costs_is_the_difference_of_runs_with_the_same_seed() -> None:
    found = {result.name: result for result in results(REWARDS, "reward", 2)}
    assert found["synchronous: reward of the run"].median == 0.8
    cost = found["asynchronous: reward of the run below synchronous"]
    assert (cost.n, cost.median) == (2, pytest.approx(0.075))
    assert found["asynchronous: held-out reward below synchronous"].median == 0.0
    assert found["asynchronous: staleness"].median == 0.5


def test_the_cost_of_a_record_counts_the_steps_that_write_files() -> None:
    runs = {"no record": [RungRun(64, [1.0, 1.0, 1.0], 9.0, {})], "record": [RungRun(64, [1.0, 1.0, 2.0], 9.0, {})]}
    found = {result.name: result.median for result in results(runs, "record", 2)}
    assert (found["record: over no record"], found["record: all steps over no record"]) == (1.0, 0.75)


def test_the_table_of_rewards_has_a_line_a_rung(tmp_path: Path) -> None:
    details = {"ladder": "reward", "engine": "builtin", "size": "tiny", "skew": "published", "steps": 60, "lr": 1e-4}
    lines = [*results(REWARDS, "reward", 2)]
    for name, until in (("a", None), ("b", None)):
        record = Measurement().record("ladder", lines, details=details | {"until": until, "published": ""})
        record.save(tmp_path / f"ladder-reward-{name}-20260101-00000{ord(name) % 2}.json")
    (record,) = newest(["reward"], tmp_path)
    assert newest(["modes"], tmp_path) == []
    table = markdown(record).splitlines()[2:]
    assert table[0] == (
        "|  | reward of all rows | below synchronous, by seeds | held-out reward at the end | versions behind |"
    )
    assert table[2] == "| synchronous | 0.8 (0.72 to 0.88) |  | 0.9 (0.82 to 0.98) | 0 (0 to 0) |"
    assert table[3].startswith("| asynchronous | 0.725 (0.665 to 0.785) | 0.075 (")


def test_rungs_with_adapters_are_compared_by_seeds_and_by_bytes() -> None:
    merged, alone = (
        [RungRun(64, [1.0], 9.0, {}, reward=0.6 + lift, held_out=0.7, version_bytes=size) for lift in (0.0, 0.1)]
        for size in (4000.0, 1000.0)
    )
    found = {result.name: result.median for result in results({"merged": merged, "adapters alone": alone}, "lora", 2)}
    assert (found["merged: bytes a version"], found["adapters alone: bytes a version"]) == (4000.0, 1000.0)
    assert found["adapters alone: reward of the run below merged"] == 0.0


def test_colocated_stands_beside_asynchronous_by_the_ratio_of_its_stages(tmp_path: Path) -> None:
    alone, apart = RungRun(64, [2.0], 9.0, {"rollout": 1.5, "train": 0.5}), RungRun(64, [1.6], 9.0, {})
    details = {"ladder": "modes", "engine": "vllm", "size": "small"}
    whole = Measurement().record(
        "ladder", [*results({"colocated": [alone], "asynchronous": [apart]}, "modes", 2)], details=details
    )
    without = Measurement().record("ladder", [*results({"asynchronous": [apart]}, "modes", 2)], details=details)
    (point,) = colocated_or_apart([whole, without])
    assert (point.name, point.generation_over_training, point.gain) == ("vLLM's CPU build, small", 3.0, 1.25)
    draw(tmp_path / "points.svg", [point])
    assert (tmp_path / "points.svg").stat().st_size > 1000


def test_a_ladder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match="no record of modes, asyncflow, streamrl, elastic, reward, lora, record, sampler: "
    ):
        tables([], tmp_path)
    shutil.copy(next(RECORDS.glob("ladder-reward-*.json")), tmp_path)
    said = re.escape("no record of asyncflow, streamrl: python -m bench.ladder NAME --into bench/records")
    with pytest.raises(SystemExit, match=said):
        tables(["asyncflow", "reward", "streamrl"], tmp_path)
    assert tables(["reward"], tmp_path) == tables([], tmp_path)


def test_a_folder_keeps_the_runs_of_one_setting(tmp_path: Path) -> None:
    runs = [replace(run, reached_steps=2.0, reached_tokens=18.0) for run in REWARDS["asynchronous"]]
    for turn, run in enumerate(runs):
        keep(tmp_path, "asynchronous", turn, run)
    assert kept(tmp_path) == {("asynchronous", 0): runs[0], ("asynchronous", 1): runs[1]}
    (tmp_path / "settings.json").write_text(json.dumps({"steps": 60}))
    nothing: Any = None
    begin(tmp_path, {"steps": 60}, nothing)
    with pytest.raises(SystemExit, match=re.escape("has runs of {'steps': 60}, and these are of {'steps': 12}")):
        begin(tmp_path, {"steps": 12}, nothing)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_writes_a_record_and_does_not_run_again_what_it_has(tmp_path: Path) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    pytest.importorskip("reasoning_gym")
    command = [sys.executable, "-m", "bench.ladder", "reward", "--quick", "--rungs", "asynchronous"]
    command += [f"--keep={tmp_path / 'runs'}", f"--into={tmp_path}"]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr
    assert len((tmp_path / "runs" / KEPT).read_text().splitlines()) == 1
    (record,) = newest(["reward"], tmp_path)
    assert {result.n for result in record.results} == {1}
    assert "asynchronous: held-out reward" in {result.name for result in record.results}


def test_lengths_follow_from_prompt_and_seed_and_are_skewed_as_published() -> None:
    rng = np.random.default_rng(0)
    prompts = [Prompt(ids=rng.integers(0, 256, 32).astype(np.int32), seed=number) for number in range(2000)]
    lengths = np.array([length_of(prompt, 320, "published") for prompt in prompts])
    assert [length_of(prompt, 320, "published") for prompt in prompts[:9]] == lengths[:9].tolist()
    assert lengths.min() >= 1
    assert lengths.max() <= 320
    p50, p90 = np.percentile(lengths, [50, 90])
    assert 3 < p90 / p50 < 5  # 3,200 and 12,900 tokens
    difficulty = np.array([difficulty_of(prompt.ids) for prompt in prompts])
    for share, published in ((0.2, 0.87), (0.1, 0.82), (0.05, 0.76)):
        assert recall(lengths, difficulty, share) == pytest.approx(published, abs=0.07)
    mild = np.array([length_of(prompt, 320, "mild") for prompt in prompts])
    assert np.std(np.log(mild)) == pytest.approx(np.std(np.log(lengths)) / 2, rel=0.2)


def test_the_published_lengths_have_the_mean_that_the_paper_states() -> None:
    assert published_lengths(20_000, np.random.default_rng(0)).mean() == pytest.approx(4928, rel=0.03)
