"""Trace replay: its inputs, its ideal against what is computed from the digitised trace, and one fast run through a
real server."""

from __future__ import annotations

import pytest

from bench.published import asyncflow_trace as trace
from bench.published import replay_record
from bench.published.replay import MODES, Replayed, ideal_s, replay, spread
from transferqueue.errors import UsageError


def test_a_replay_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match=r'mode "warp" is not a replay; take one of serial, streaming, async'):
        replay("warp", speed=100)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="speed=0 is not a positive number"):
        replay("async", speed=0)


def test_the_ideal_agrees_with_the_iterations_computed_from_the_trace() -> None:
    for mode in MODES:
        assert ideal_s(mode) / trace.ITERATIONS == pytest.approx(replay_record.COMPUTED_S[mode], rel=0.05)


def test_the_serial_time_is_rollout_reference_and_train() -> None:
    longest = trace.services("rollout").max(axis=1).mean()
    reference = trace.services("reference").sum(axis=1).mean() / trace.INSTANCES["reference"]
    train = trace.services("train").sum(axis=1).mean() / trace.INSTANCES["train"]
    assert longest + reference + train == pytest.approx(replay_record.COMPUTED_S["serial"], rel=0.01)


def test_spread_is_that_of_busy_times() -> None:
    assert spread([(0, 0.0, 1.0), (1, 0.0, 3.0)]) == 1.0


@pytest.mark.long
@pytest.mark.slow
def test_a_fast_replay_serves_every_row_once() -> None:
    run = replay("async", speed=1000)
    rows = trace.ITERATIONS * trace.BATCH_ROWS
    assert run.rows == rows
    assert all(len(run.timeline[stage]) == rows for stage in ("reference", "reward", "advantage", "train"))
    assert run.iteration_s >= 0.99 * run.ideal_iteration_s
    found = {result.name: result.median for result in replay_record.results([run])}
    assert found["async/rows"] == rows
    assert replay_record.details([run])["speed"] == 1000


def test_what_the_paper_states_is_told_apart_from_what_was_computed() -> None:
    modes = {"serial": 1800.0, "streaming": 900.0}
    runs = [
        Replayed(
            mode=mode, speed=1.0, iteration_s=took, ideal_iteration_s=took, overhead=0.0, spread={}, rows=0, timeline={}
        )
        for mode, took in modes.items()
    ]
    assert replay_record.speedups(runs) == {"streaming": {"ours": 2.0, "computed": 1.999, "ablation": 2.01}}
    assert "computed_from_digitised_service_times_s" in replay_record.details(runs)
