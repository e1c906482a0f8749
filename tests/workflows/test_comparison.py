"""The three modes beside each other: from made-up runs, and small real ones."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from bench.compare_modes import parse_seeds
from tests.workflows.test_demo import SMALL
from transferqueue.errors import UsageError
from transferqueue.observe.measurement_record import Measurement, load_record
from transferqueue.workflows.grpo import comparison
from transferqueue.workflows.grpo.comparison import ComparisonRun
from transferqueue.workflows.grpo.job import Mode
from transferqueue.workflows.grpo.report import Summary

SUMMARY = Summary(
    mode="sync",
    steps=2,
    seconds=10.0,
    samples_per_s=100.0,
    heldout_reward_before=0.25,
    heldout_reward_after=0.5,
    accuracy_before=0.0,
    accuracy_after=0.0,
    trainer_busy=0.75,
    rollout_busy=0.5,
    staleness_histogram={"0": 8},
    staleness_in_flight={"0": 8},
    staleness_in_queue={"0": 8},
    publish_lag_s=0.01,
    publish_s=0.001,
    swaps=2,
    swap_s_max=0.002,
    gap_s_max=0.01,
    request_s=0.02,
    rows_put=8,
    rows_done=8,
    rows_dropped=0,
    rows_aborted=0,
    tokens_kept=0,
)


def made_up(mode: Mode, seed: int, speed: float) -> ComparisonRun:
    rows = {"0": 8} if mode == "sync" else {"0": 2, "1": 6}
    summary = replace(
        SUMMARY,
        mode=mode,
        samples_per_s=100.0 * speed * (seed + 1),
        heldout_reward_after=0.5 + seed / 4,
        staleness_histogram=rows,
        swap_s_max=0.002 * (seed + 1),
    )
    return ComparisonRun(mode=mode, seed=seed, summary=summary)


RUNS = [
    made_up(mode, seed, speed) for seed in (0, 1) for mode, speed in zip(comparison.MODES, (1, 1.5, 2), strict=True)
]


def test_speed_is_against_the_synchronous_run_of_the_same_seed() -> None:
    sync, delayed, ahead = comparison.compare(RUNS)
    assert [sync.speed, delayed.speed, ahead.speed] == [1, 1.5, 2]
    assert (sync.samples_per_s, sync.trainer_idle, sync.staleness) == (150.0, 0.25, {"0": 1.0})
    assert ahead.staleness == {"0": 0.25, "1": 0.75}
    assert (ahead.reward_after, ahead.reward_after_spread) == (0.625, 0.1768)
    assert ahead.swap_s_max == 0.004


def test_a_record_and_its_picture(tmp_path: Path) -> None:
    details = comparison.details(RUNS, SMALL, rollouts=1)
    Measurement().record("compare-modes", comparison.results(RUNS), details=details).save(tmp_path / "a" / "r.json")
    found = load_record(tmp_path / "a" / "r.json")
    assert [mode["mode"] for mode in found.details["means"]] == list(comparison.MODES)
    speed = next(result for result in found.results if result.name == "async/speed_over_sync")
    assert (speed.n, speed.median) == (2, 2)
    comparison.draw(tmp_path / "r.png", comparison.compare(RUNS), RUNS)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("seeds", [[], [1, 1]], ids=str)
def test_seeds_are_named_once(seeds: list[int], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="each named once"):
        comparison.run_all(SMALL, seeds, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_seeds_as_text() -> None:
    assert parse_seeds("0,1, 2") == [0, 1, 2]
    for text in ("", "1,x", "-1"):
        with pytest.raises(UsageError, match="whole numbers with commas"):
            parse_seeds(text)


@pytest.mark.long
@pytest.mark.slow
def test_all_modes_train_the_same_number_of_rows(tmp_path: Path) -> None:
    told: list[ComparisonRun] = []
    runs = comparison.run_all(replace(SMALL, steps=2), [0], directory=tmp_path, told=told.append)
    assert told == runs
    assert [run.mode for run in runs] == list(comparison.MODES)
    assert {run.summary.rows_done for run in runs} == {128}
