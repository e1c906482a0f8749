"""Snapshots of a run's queue: one after each checkpoint, restored where the server's state is lost."""

import os
import shutil
import signal
from contextlib import suppress

import pytest

import transferqueue as tq
from tests.workflows.job import short_run
from tests.workflows.job.jobs import job
from transferqueue.workflows.flow.events import Figures
from transferqueue.workflows.job import graph
from transferqueue.workflows.job.run.queue_snapshots import NAME, SNAPSHOTS, QueueSnapshots, restore_if_lost
from transferqueue.workflows.job.run.server import RunServer, discard_state
from transferqueue.workflows.job.settings.job import QueueSettings

pytestmark = pytest.mark.slow
SMALL = QueueSettings(memory_gib=0.0625)


def checkpoint(step):
    return Figures(kind="checkpoint", at=0.0, values={"step": step, "seconds": 0.1, "bytes": 1})


def test_a_run_goes_on_from_its_snapshot_when_the_state_is_lost(tmp_path):
    settings = job("sft")
    with RunServer(tmp_path, SMALL) as server, tq.connect(server.address) as queue:
        assert not restore_if_lost(queue, tmp_path)
        table = graph.create_table(queue, settings)
        table.put(prompt_ids=[[1, 2], [3]], response_ids=[[4], [5, 6]], data=[{}, {}], ordinal=[0, 1])
        with QueueSnapshots(queue, keep=2) as snapshots:
            snapshots.hear("train-0", Figures(kind="step", at=0.0, values={"step": 1}))
            snapshots.hear("train-0", checkpoint(2))
        assert snapshots.taken == 1
        assert not restore_if_lost(queue, tmp_path)
    discard_state(tmp_path)
    with RunServer(tmp_path, SMALL) as server, tq.connect(server.address) as queue:
        assert queue.tables() == []
        assert restore_if_lost(queue, tmp_path)
        assert graph.create_table(queue, settings).audit().rows_live == 2
    discard_state(tmp_path)


def test_a_snapshot_that_was_being_written_is_none(tmp_path):
    partial = tmp_path / SNAPSHOTS / NAME / "00000001.partial"
    partial.mkdir(parents=True)
    (partial / "MANIFEST.json").write_text("{}")
    with tq.connect("embedded") as queue:
        assert not restore_if_lost(queue, tmp_path)


def test_a_run_whose_queue_is_lost_before_its_first_snapshot_goes_on_after_its_checkpoint(tmp_path):
    place = short_run.make_place(tmp_path, builtin=True)
    first = short_run.train(place, "job.toml", "--out", "run", "--json")
    short_run.wait_for(first, place / "run" / "steps.jsonl", 3)
    killed = [*short_run.descendants(first.pid), first.pid]
    for pid in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    first.communicate()
    discard_state(place / "run")
    shutil.rmtree(place / "run" / SNAPSHOTS, ignore_errors=True)
    summary = short_run.finished(short_run.train(place, "--resume", "--out", "run", "--json"))
    assert [step["step"] for step in short_run.lines(place / "run" / "steps.jsonl")] == [*range(1, short_run.STEPS + 1)]
    assert summary["rows_put"] == summary["rows_done"] + sum(summary["rows_dropped"].values())
    assert summary["rows_put"] < short_run.ROWS, "what the checkpoint has trained does not come again"


def test_a_snapshot_that_fails_is_logged_and_ends_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("no directory")
    with tq.connect("embedded") as queue:
        queue.create_table("t", tasks=[tq.Task("x", needs=["v"])])
        with QueueSnapshots(queue, keep=2) as snapshots:
            snapshots.hear("train-0", checkpoint(2))
    assert snapshots.taken == 0
    assert "the snapshot after step 2 failed" in caplog.text
