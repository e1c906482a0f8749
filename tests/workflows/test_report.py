"""The summary has exactly the promised keys, and says what the events said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transferqueue.errors import InternalError
from transferqueue.workflows.flow.events import Figures, TimeSpan
from transferqueue.workflows.flow.reports.audit import Audit
from transferqueue.workflows.grpo.job import JobSettings
from transferqueue.workflows.grpo.report import RunLog, Summary, summarize, write_files

KEYS = [
    "mode",
    "steps",
    "seconds",
    "samples_per_s",
    "heldout_reward_before",
    "heldout_reward_after",
    "accuracy_before",
    "accuracy_after",
    "trainer_busy",
    "rollout_busy",
    "staleness_histogram",
    "staleness_in_flight",
    "staleness_in_queue",
    "publish_lag_s",
    "publish_s",
    "swaps",
    "swap_s_max",
    "gap_s_max",
    "request_s",
    "rows_aborted",
    "tokens_kept",
    "rows_put",
    "rows_done",
    "rows_dropped",
]
AUDIT = Audit(put=24, live=0, done=16, dropped={"stale": 8})

STATS = {"staleness_in_flight": {"0": 16}, "staleness_in_queue": {"0": 10, "1": 6}}


def step(number: int, at: float, staleness: dict[str, int]) -> Figures:
    values = {"step": number, "rows": 8, "reward": 0.1 * number, "loss": 0.5, "staleness": staleness}
    values["queue_age_s"] = {"rollout": None, "train": 0.25 * number}
    return Figures(kind="step", at=at, values=values)


@pytest.fixture
def record() -> RunLog:
    """Two steps of a trainer that waits 1 s of 4, and two rollout processes, busy for 2 and 0 s of them."""
    found = RunLog()
    for name, start, end in (("warm-up", 0.0, 8.0), ("wait", 8.0, 9.0), ("work", 9.0, 11.0), ("work", 11.0, 12.0)):
        found.add("train-0", TimeSpan(name=name, start=start, end=end))
    found.add("rollout-0", TimeSpan(name="work", start=7.0, end=10.0))
    found.add("rollout-1", TimeSpan(name="wait", start=7.0, end=12.0))
    for event in (step(1, 11.0, {"0": 8}), step(2, 12.0, {"0": 2, "1": 6})):
        found.add("train-0", event)
    for when, reward in (("before", 0.25), ("after", 0.75)):
        values = {"when": when, "reward": reward, "accuracy": reward / 2}
        found.add("train-0", Figures(kind="evaluation", at=1.0, values=values))
    return found


def summary(record: RunLog) -> Summary:
    return summarize(record, JobSettings(), AUDIT, table=STATS, seconds=13.0)


def test_a_summary_says_what_the_processes_told(record: RunLog) -> None:
    found = summary(record)
    assert (found.mode, found.steps, found.seconds, found.samples_per_s) == ("async", 2, 13.0, 4.0)
    assert (found.heldout_reward_before, found.heldout_reward_after) == (0.25, 0.75)
    assert (found.trainer_busy, found.rollout_busy) == (0.75, 0.25)
    assert found.staleness_histogram == found.staleness_in_queue == {"0": 10, "1": 6}
    assert found.staleness_in_flight == {"0": 16}
    assert (found.rows_put, found.rows_done, found.rows_dropped) == (24, 16, 8)


def test_files_of_a_run(record: RunLog, tmp_path: Path) -> None:
    files = {path.name: path for path in write_files(tmp_path, record, summary(record))}
    assert list(json.loads(files["summary.json"].read_text())) == KEYS
    assert files["learning.png"].read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(files["timeline.json"].read_text())["traceEvents"]) > 6
    assert [json.loads(line)["step"] for line in files["steps.jsonl"].read_text().splitlines()] == [1, 2]


def test_a_run_without_an_evaluation_is_no_result(record: RunLog) -> None:
    del record.evaluations["after"]
    with pytest.raises(InternalError, match="without an evaluation after"):
        summary(record)


@pytest.mark.parametrize("change", [{"live": 8}, {"done": 15}, {"dropped": {"stale": 7}}, {"put": 25}], ids=str)
def test_rows_that_do_not_balance_are_an_error(change: dict[str, Any]) -> None:
    AUDIT.check_finished("t")
    with pytest.raises(InternalError, match="does not balance"):
        replace(AUDIT, **change).check_finished("t")
