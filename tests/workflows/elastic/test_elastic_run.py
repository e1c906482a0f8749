"""A whole elastic job on the transformers engine: its host takes the generator in the middle of the run, another takes
its place, and every row is trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.workflows.job.short_run import ROWS, STEPS, finished, lines, make_place, pid_of, train, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
pytest.importorskip("transformers", exc_type=ImportError)


def test_a_generator_that_its_host_takes_is_replaced_and_no_row_is_lost(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    changes = ["elastic.max=2", "reproducible=false", "evaluation.path=''", "log.samples=0"]
    words = [word for change in changes for word in ("--set", change)]
    run = train(place, "job.toml", "--out", "run", "--json", *words)
    wait_for(run, place / "run" / "steps.jsonl", 1)
    preempted = pid_of(run.pid, "rollout")
    assert preempted is not None
    os.kill(preempted, signal.SIGTERM)
    summary = finished(run)
    assert (summary["steps"], summary["rows_done"], summary["rows_dropped"]) == (STEPS, ROWS, {})
    changes_made = [event for event in lines(place / "run" / "elastic.jsonl") if event["by"]]
    assert [(event["by"], event["why"]) for event in changes_made] == [(1, "below min")]
    assert [change["why"] for change in summary["elastic"]["changes"]] == ["below min"]
    assert summary["failures"] == {}
