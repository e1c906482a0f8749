"""A job in simulated time: refused input, exact small cases, and what each mode may gain."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from transferqueue.errors import UsageError
from transferqueue.workflows.elastic.controller import ElasticTerms
from transferqueue.workflows.planner.engine_times import DecodeCurve, LaneEngine
from transferqueue.workflows.planner.simulated_job import (
    GENERATE,
    TRAIN,
    BatchFeed,
    SimStage,
    Simulated,
    SimulatedJob,
    simulate,
)


def _job(feed: BatchFeed, *, depth: int = 0, stages: tuple[SimStage, ...] = (), iterations: int = 3) -> SimulatedJob:
    lengths = np.tile(np.array([1, 2, 3, 4, 5, 6, 7, 8]), (iterations, 1))
    train = SimStage(name=TRAIN, row_s=1.0)
    return SimulatedJob(
        lengths=lengths,
        predicted=lengths,
        engines=(LaneEngine(8, DecodeCurve((1.0, 8.0), (1000.0, 1000.0))),),
        stages=stages,
        train=train,
        feed=feed,
        depth=depth,
    )


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UsageError, match='stage "reward": instances=0'):
        SimStage(name="reward", row_s=1.0, instances=0)
    with pytest.raises(UsageError, match="a feed of 9 rows does not fit a batch of 8"):
        _job(BatchFeed(rows=9))
    with pytest.raises(UsageError, match="a feed of 0 rows does not fit a batch of 8"):
        _job(BatchFeed(rows=0))


def test_serial_is_the_sum_of_generation_and_training() -> None:
    found = simulate(_job(BatchFeed(rows=8)))
    assert found.steps == [16.0, 32.0, 48.0]
    assert found.idle({GENERATE: 1, TRAIN: 1}) == {GENERATE: 0.5, TRAIN: 0.5}


def test_streaming_trains_each_row_as_it_ends() -> None:
    assert simulate(_job(BatchFeed(rows=1))).steps == [9.0, 18.0, 27.0]


def test_asynchronous_generates_beside_training_and_trains_every_row_once() -> None:
    found = simulate(_job(BatchFeed(rows=1), depth=1))
    assert found.total_s < 27.0
    assert _rows(found, TRAIN) == _rows(found, GENERATE) == 24


def test_a_stage_between_serves_every_row() -> None:
    reward = SimStage(name="reward", row_s=0.5, instances=2, rows=2)
    assert _rows(simulate(_job(BatchFeed(rows=4), stages=(reward,))), "reward") == 24


def _rows(found: Simulated, stage: str) -> int:
    return sum(one.rows for one in found.worked if one.stage == stage)


def test_the_live_controller_scales_a_simulated_job_whose_rows_become_longer() -> None:
    """The middle third of 36 steps has rows three times as long: an instance is added, the step time comes back, and
    the instance goes."""
    steps, batch = 36, 16
    lengths = np.full((steps, batch), 20, np.int64)
    lengths[12:24] *= 3
    job = SimulatedJob(
        lengths=lengths,
        predicted=lengths,
        engines=(LaneEngine(16, DecodeCurve((1.0, 16.0), (5.0, 20.0))),),
        stages=(),
        train=SimStage(name=TRAIN, row_s=0.6 / batch),
        feed=BatchFeed(rows=4),
        depth=1,
        elastic=ElasticTerms(max=2, threshold=0.5),
        start_s=1.0,
    )
    scaled = simulate(job)
    fixed = simulate(msgspec.structs.replace(job, elastic=None))
    by = [(change.by, step) for step, change in scaled.changes]
    assert by[0][0] == 1
    assert 12 <= by[0][1] <= 18
    assert by[-1][0] == -1
    assert by[-1][1] >= 24
    assert sum(change for change, _ in by) == 0
    seconds = np.diff(scaled.steps)
    assert seconds[20:23].mean() < 0.8 * np.diff(fixed.steps)[20:23].mean()
    assert scaled.total_s < fixed.total_s
    assert len(scaled.steps) == steps
