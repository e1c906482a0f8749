"""What loggers are told, and that TensorBoard, Weights & Biases and MLflow keep it."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.events import Figures, TimeSpan
from transferqueue.workflows.flow.reports import loggers
from transferqueue.workflows.flow.reports.loggers import figures_of, logged, logger_named

STEP = {
    "step": 2,
    "rows": 8,
    "reward": 0.5,
    "loss": math.nan,
    "staleness": {"0": 2, "1": 6},
    "queue_age_s": {"train": 1.5, "rollout": None},
}


def step(number: int) -> Figures:
    return Figures(kind="step", at=0.0, values=STEP | {"step": number})


def evaluation(when: str) -> Figures:
    return Figures(kind="evaluation", at=0.0, values={"when": when, "reward": 0.25, "accuracy": 0.125})


def test_the_numbers_of_a_step_and_no_more() -> None:
    assert figures_of(step(2)) == {
        "rows": 8.0,
        "reward": 0.5,
        "staleness/0": 2.0,
        "staleness/1": 6.0,
        "queue_age_s/train": 1.5,
    }


def test_figures_of_a_dispatcher_are_of_the_latest_step_of_the_trainer() -> None:
    told = []
    hear = logged(lambda step, figures: told.append((step, figures)))
    hear("train-0", step(2))
    hear("rank-0", Figures(kind="dispatch", at=0.0, values={"step": 4, "recall_20": 0.5, "why": "longest first"}))
    hear("rank-0", Figures(kind="ranker", at=0.0, values={"ranker_version": 3, "recall_20": 0.25}))
    assert told[1:] == [(2, {"dispatch/recall_20": 0.5}), (2, {"ranker/ranker_version": 3.0, "ranker/recall_20": 0.25})]


def test_an_evaluation_is_of_the_step_before_it_and_every_event_goes_on() -> None:
    told, heard = [], []
    hear = logged(lambda step, figures: told.append((step, sorted(figures))), lambda label, event: heard.append(label))
    events = [evaluation("before"), TimeSpan(name="work", start=0.0, end=1.0), step(1), step(2), evaluation("after")]
    for event in events:
        hear("train-0", event)
    assert [one for one, _ in told] == [0, 1, 2, 2]
    assert told[-1][1] == ["evaluation/after/accuracy", "evaluation/after/reward"]
    assert len(heard) == len(events)


def test_a_logger_that_is_none_is_told_with_those_there_are() -> None:
    with pytest.raises(NotFound, match="logger 'aim' is unknown; there are tensorboard, wandb, mlflow"):
        logger_named("aim")


def test_a_library_that_is_not_here_is_told_with_the_way_to_have_it() -> None:
    with pytest.raises(UsageError, match="needs a package that is not here: pip install nowhere"):
        loggers._library("transferqueue.no_such_library", "nowhere")


def test_the_supervisor_adds_the_age_of_each_queue_and_the_rows_dropped_since_the_last_step() -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    from transferqueue.workflows.job.run.recorded import TableFigures

    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("rollout", needs=["x"]), tq.Task("train", needs=["y"])])
        rows = table.put(x=[1.0, 2.0, 3.0]).tolist()
        table.drop(rows[:1], "before")
        added = TableFigures(table)
        table.drop(rows[1:2], "bad")
        event = added.to(step(1))
        assert isinstance(event, Figures)
        assert event.values["queue_age_s"]["rollout"] >= 0
        assert event.values["queue_age_s"]["train"] is None
        assert event.values["dropped"] == {"before": 0, "bad": 1}
        assert added.to(step(2)).values["dropped"] == {"before": 0, "bad": 0}  # type: ignore[union-attr]
        assert added.to(evaluation("after")) == evaluation("after")


def log_two_steps(name: str, directory: Path) -> None:
    with logger_named(name)(directory) as log:
        hear = logged(log)
        hear("train-0", step(1))
        hear("train-0", step(2))
        hear("train-0", evaluation("after"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_keeps_them(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("torch", exc_type=ImportError)
    log_two_steps("tensorboard", tmp_path / "events")
    found = accumulators.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert {"reward", "staleness/1", "queue_age_s/train", "evaluation/after/accuracy"} <= set(found.Tags()["scalars"])
    assert [(one.step, one.value) for one in found.Scalars("staleness/1")] == [(1, 6.0), (2, 6.0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_two_steps("mlflow", tmp_path / "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    (run,) = client.search_runs(["0"])
    assert {"reward", "staleness/1", "queue_age_s/train", "evaluation/after/accuracy"} <= set(run.data.metrics)
    history = client.get_metric_history(run.info.run_id, "staleness/1")
    assert [(each.step, each.value) for each in history] == [(1, 6.0), (2, 6.0)]


def records_of(log: bytes) -> Iterator[bytes]:
    """The records of a run's file: LevelDB's log format (blocks of 32 KiB) after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(log):
        if (1 << 15) - at % (1 << 15) < 7:  # the rest of a block that has no room for another head
            at += (1 << 15) - at % (1 << 15)
        _, size, kind = struct.unpack_from("<IHB", log, at)
        parts += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_them_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as records

    monkeypatch.setenv("WANDB_MODE", "offline")
    log_two_steps("wandb", tmp_path)
    (path,) = tmp_path.rglob("*.wandb")
    steps = []
    for data in records_of(path.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            steps.append({one.key or "/".join(one.nested_key): one.value_json for one in record.history.item})
    assert [one["_step"] for one in steps] == ["1", "2"]
    assert steps[0]["staleness/1"] == "6.0"
    assert steps[1]["evaluation/after/accuracy"] == "0.125"
