"""Over-sampling on the transformers engine: a full batch ends the other requests, and their rows go on under the next
weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transferqueue as tq
from tests.workflows.job.policies import context_of, job_of, publish, put_prompts, table_of
from transferqueue.adapters.protocols import PartialResult, Pause, Unsupported
from transferqueue.workflows.flow.events import Event, Failure, Figures
from transferqueue.workflows.flow.loop.full_batches import ABORTED, tell_full
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Context, Stage
from transferqueue.workflows.job import names
from transferqueue.workflows.job.stages.oversampling import Oversampling
from transferqueue.workflows.job.stages.rollout import rollout
from transferqueue.workflows.job.tiny_model.make import make

GROUP, PROMPTS, TOKENS = 2, 2, 400
WAIT_S = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("policy")
    make(place)  # which ends a response about once in 250 tokens
    return place


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


class Generating:
    """The rollout stage of a job that begins twice the prompts of a step, in a thread of its own."""

    def __init__(self, queue: tq.Queue, directory: Path) -> None:
        self.job = job_of(
            directory,
            pacing={"mode": "sync", "over_sample": 2.0},
            sampling={"group_size": GROUP, "tokens_max": TOKENS},
            trainer={"prompts_per_step": PROMPTS},
        )
        self.queue, self.table = queue, table_of(queue, self.job)
        self.events: list[Event] = []
        self.finished, self.handed_back = threading.Event(), threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        stage = Stage(task=self.table.tasks[names.ROLLOUT], rows=2, at_least=1, slots=8, stall_s=WAIT_S)
        with rollout(context_of(self.queue, self.table, self.job, self.events)) as work:

            def watched(batch: tq.Batch) -> Iterator[PartialResult]:
                for part in work(batch):
                    assert isinstance(part, PartialResult)
                    yield part
                    (self.handed_back if part.unfinished else self.finished).set()

            run_stage(self.table, stage, watched, emit=self.events.append, stop=self._stop)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def aborted(self) -> list[dict[str, Any]]:
        return [dict(event.values) for event in self.events if isinstance(event, Figures) and event.kind == ABORTED]


@pytest.mark.slow
def test_a_full_batch_ends_the_other_requests_whose_rows_go_on_under_its_weights(
    queue: tq.Queue, directory: Path
) -> None:
    generating = Generating(queue, directory)
    table, rows = generating.table, 2 * PROMPTS * GROUP
    put_prompts(table, 2 * PROMPTS, GROUP, in_parts=True)
    publish(queue, directory, 0)
    with generating:
        assert generating.finished.wait(WAIT_S)  # a response; others are longer
        tell_full(queue, 1, np.arange(GROUP), channel=names.FULL)
        assert generating.handed_back.wait(WAIT_S)
        publish(queue, directory, 1)
        with table.lease("reward", rows=rows, timeout_s=WAIT_S) as batch:
            versions = [row.tolist() for row in table.read(batch.rows, fields=["token_versions"])["token_versions"]]
            ids = list(batch["response_ids"])
            batch.ack(rewards=np.zeros(rows, np.float32), reward_terms=[np.zeros(1, np.float32)] * rows)
    assert len(ids) == rows
    assert all(len(row) == len(own) for row, own in zip(ids, versions, strict=True))
    assert all(row == sorted(row) for row in versions)
    assert 1 in {row[-1] for row in versions}, "none went on under the new weights"
    aborted = generating.aborted()
    assert sum(each["rows"] for each in aborted) >= sum(set(row) == {0, 1} for row in versions) > 0
    assert sum(each["tokens"] for each in aborted) == sum(row.count(0) for row in versions if row[-1] == 1)
    assert not [event for event in generating.events if isinstance(event, Failure)]
    audit = table.audit()
    assert (audit.rows_put, audit.rows_live, audit.balanced) == (rows, rows, True)


class Engine:
    """Says what is asked of it. Its requests end as told."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.paused = threading.Event()
        self._failure = failure

    def pause(self, mode: Pause) -> None:
        self.asked.append(mode.value)
        self.paused.set()
        if self._failure is not None:
            raise self._failure

    def resume(self) -> None:
        self.asked.append("resume")


def handed() -> PartialResult:
    ids = [np.array([5, 6, 7], np.int32)]
    return PartialResult(columns={"begun_ids": ids}, at=np.array([0]), unfinished=True)


class Watched:
    """An `Oversampling` over an engine that hears of full batches, and what it reports."""

    def __init__(self, queue: tq.Queue, engine: Engine) -> None:
        self.events: list[Event] = []
        table = queue.create_table(names.TABLE)
        self.queue, self.engine = queue, engine
        self.oversampling = Oversampling(Context(queue=queue, table=table, emit=self.events.append))

    def figures(self) -> list[dict[str, Any]]:
        return [dict(event.values) for event in self.events if isinstance(event, Figures)]


def test_rows_that_were_not_begun_are_handed_back_as_they_are(queue: tq.Queue) -> None:
    watched = Watched(queue, Engine())
    watched.oversampling.stop(watched.engine, 3)  # type: ignore[arg-type]
    (part,) = watched.oversampling.until_full(2, [4, 7], iter([handed()]))
    assert part.at is not None
    assert (part.at.tolist(), dict(part.columns), part.unfinished) == ([4, 7], {}, True)
    assert watched.figures() == [{"rows": 2, "tokens": 0}]
    for version in (3, -1):  # of these weights; of an engine that takes none
        (part,) = watched.oversampling.until_full(version, [4], iter([PartialResult(columns={}, at=np.array([0]))]))
        assert not part.unfinished
    assert watched.engine.asked == []


def test_requests_of_a_full_batch_are_aborted_until_none_runs(queue: tq.Queue) -> None:
    watched = Watched(queue, Engine())

    def parts() -> Iterator[PartialResult]:
        tell_full(queue, 1, np.arange(2), channel=names.FULL)
        assert watched.engine.paused.wait(WAIT_S)
        yield handed()

    with watched.oversampling.stopping(watched.engine):  # type: ignore[arg-type]
        assert [part.unfinished for part in watched.oversampling.until_full(0, [0], parts())] == [True]
    assert watched.engine.asked[:2] == ["abort", "resume"]
    assert watched.figures() == [{"rows": 1, "tokens": 3}]


def test_an_engine_that_cannot_abort_finishes_its_rows(queue: tq.Queue) -> None:
    watched = Watched(queue, Engine(Unsupported("it cannot")))

    def parts() -> Iterator[PartialResult]:
        tell_full(queue, 1, np.arange(2), channel=names.FULL)
        assert watched.engine.paused.wait(WAIT_S)
        yield PartialResult(columns={}, at=np.array([0]))

    with watched.oversampling.stopping(watched.engine) as due:  # type: ignore[arg-type]
        assert [part.unfinished for part in watched.oversampling.until_full(0, [0], parts())] == [False]
        assert due() == 1
    assert (watched.engine.asked, watched.figures()) == (["abort"], [])
