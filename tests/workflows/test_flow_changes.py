"""Processes come and go while a flow runs: added ones work, removed ones drain, and no row is lost however a drain
ends."""

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

import transferqueue as tq
from tests.workflows.flow_stages import Numbers
from tests.workflows.test_flow import DOUBLE, HERE
from transferqueue.errors import AlreadyExists, NotFound, UsageError
from transferqueue.workflows.flow.draining import ADDED, REMOVED, DrainRequest
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Stage

pytestmark = pytest.mark.slow
GENEROUS_S = 60.0
LOCKED: dict[Path, IO[bytes]] = {}
assert Numbers  # the source of the flows below


class Heard:
    """The events of a flow; tests wait for them."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Figures]] = []
        self._changed = threading.Condition()

    def __call__(self, label: str, event: Event) -> None:
        if isinstance(event, Figures):
            with self._changed:
                self.events.append((label, event))
                self._changed.notify_all()

    def wait(self, kind: str, label: str) -> Figures:
        def found() -> list[Figures]:
            return [event for name, event in self.events if (name, event.kind) == (label, kind)]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(found()), GENEROUS_S), (kind, label, self.events)
        return found()[0]


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect(label="supervisor") as queue:
        fields = [tq.Field("x", "int64"), tq.Field("y", "int64")]
        queue.create_table("t", fields=fields, tasks=[DOUBLE], pacing=tq.Pacing("double", 32), retention=tq.Manual())
        yield queue


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file ``go``, whose lock the test holds until it lets the stages go on."""
    locked = (tmp_path / "go").open("wb")
    fcntl.flock(locked, fcntl.LOCK_EX)
    LOCKED[tmp_path] = locked
    yield tmp_path
    LOCKED.pop(tmp_path).close()


def go(marks: Path) -> None:
    """Let whoever waits for the mark go on, now and later."""
    fcntl.flock(LOCKED[marks], fcntl.LOCK_UN)


def job(name: str, factory: str, marks: Path, instance: int = 0, *, elastic: bool = False) -> StageJob:
    stage = None if name == "numbers" else Stage(task=DOUBLE, rows=4, at_least=1)
    settings = {"total": 32, "marks": str(marks)}
    return StageJob(
        name=name,
        table="t",
        factory=f"{HERE}:{factory}",
        stage=stage,
        settings=settings,
        instance=instance,
        elastic=elastic,
    )


def check_all_done(queue: tq.Queue) -> None:
    found = queue.table("t").read(fields=["x", "y"])
    rows = sorted(zip(found["x"].numpy().tolist(), found["y"].numpy().tolist(), strict=True))
    assert rows == [(x, 2 * x) for x in range(32)]
    audit = queue.table("t").audit()
    assert (audit.rows_done, dict(audit.dropped), audit.balanced) == (32, {}, True)


@pytest.fixture
def held(queue: tq.Queue, marks: Path, tmp_path: Path) -> Iterator[tuple[Flow, Heard]]:
    """A flow whose only worker holds half a batch."""
    heard = Heard()
    jobs = [job("numbers", "numbers", marks), job("double", "waits_for_a_mark", marks, elastic=True)]
    with Flow(queue, jobs, directory=tmp_path / "logs", observe=heard) as flow:
        heard.wait("holding", "double-0")
        yield flow, heard


def test_a_removed_process_ends_the_rows_that_it_has_and_takes_no_more(
    held: tuple[Flow, Heard], queue: tq.Queue, marks: Path
) -> None:
    flow, heard = held
    ended = flow.remove("double-0", deadline_s=GENEROUS_S)
    flow.add(job("double", "double", marks, 1))
    heard.wait(ADDED, "double-1")
    go(marks)
    removed = ended.result(GENEROUS_S)
    assert (removed.label, removed.how) == ("double-0", "drained")
    assert heard.wait(REMOVED, "double-0").values["how"] == "drained"
    assert heard.wait("finished", "double-0")  # what follows the factory's yield has run
    flow.run()
    check_all_done(queue)
    assert queue.table("t").stats().tasks["double"].worker_deaths == 0


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda flow, pid: flow.remove("double-0", deadline_s=0.0), "killed"),
        (lambda flow, pid: (flow.remove("double-0"), os.kill(pid, signal.SIGKILL)), "killed"),
        (lambda flow, pid: (flow.remove("double-0"), flow.remove("double-0", deadline_s=0.0)), "killed"),
    ],
    ids=["after the deadline", "killed while it drains", "a second removal is sooner"],
)
def test_whose_drain_is_cut_short_loses_no_row_and_is_not_started_again(
    held: tuple[Flow, Heard], queue: tq.Queue, marks: Path, end: Callable[[Flow, int], object], how: str
) -> None:
    flow, heard = held
    flow.add(job("double", "double", marks, 1))
    end(flow, flow.pids()["double-0"])
    assert heard.wait(REMOVED, "double-0").values["how"] == how
    flow.run()
    check_all_done(queue)
    assert len([event for label, event in heard.events if (label, event.kind) == ("double-0", "holding")]) == 1


def test_sigterm_by_its_host_removes_an_elastic_process(held: tuple[Flow, Heard], queue: tq.Queue, marks: Path) -> None:
    flow, heard = held
    flow.add(job("double", "double", marks, 1))
    os.kill(flow.pids()["double-0"], signal.SIGTERM)
    go(marks)
    assert heard.wait(REMOVED, "double-0").values["how"] == "preempted"
    flow.run()
    check_all_done(queue)


def test_a_process_that_has_not_begun_leaves_at_once(queue: tq.Queue, marks: Path, tmp_path: Path) -> None:
    heard = Heard()
    jobs = [job("numbers", "numbers", marks), job("double", "double", marks)]
    with Flow(queue, jobs, directory=tmp_path / "logs", observe=heard) as flow:
        flow.add(job("double", "starts_at_a_mark", marks, 1))
        heard.wait("starting", "double-1")
        assert flow.remove("double-1").result(GENEROUS_S).how == "drained"
        flow.run()
    check_all_done(queue)


def test_what_cannot_be_added_or_removed_is_refused_and_changes_nothing(
    held: tuple[Flow, Heard], queue: tq.Queue, marks: Path
) -> None:
    flow, _ = held
    before = flow.pids()["double-0"]
    with pytest.raises(AlreadyExists, match='"double-0" runs already'):
        flow.add(job("double", "double", marks))
    with pytest.raises(NotFound, match='"double-7" does not run; those that do are double-0'):
        flow.remove("double-7")
    with pytest.raises(UsageError, match=r"deadline_s=-1\): give seconds from 0 on"):
        flow.remove("double-0", deadline_s=-1)
    assert flow.pids()["double-0"] == before
    go(marks)
    flow.run()
    check_all_done(queue)
    with pytest.raises(UsageError, match="cannot add double-1: the flow does not run"):
        flow.add(job("double", "double", marks, 1))


def test_a_source_does_not_drain(queue: tq.Queue, marks: Path, tmp_path: Path) -> None:
    flow = Flow(queue, [job("numbers", "numbers", marks)], directory=tmp_path, observe=lambda label, event: None)
    with pytest.raises(UsageError, match="the flow does not run"):
        flow.remove("numbers-0")
    with flow, pytest.raises(UsageError, match='"numbers-0" is a source or a loop'):
        flow.remove("numbers-0")


def test_leaving_a_flow_ends_a_removal_and_an_elastic_process_at_once(
    queue: tq.Queue, marks: Path, tmp_path: Path
) -> None:
    heard = Heard()
    jobs = [job("numbers", "numbers", marks), job("double", "waits_for_a_mark", marks, elastic=True)]
    with Flow(queue, jobs, directory=tmp_path / "logs", observe=heard) as flow:
        heard.wait("holding", "double-0")
        ended = flow.remove("double-0")
    assert ended.result(GENEROUS_S).how == "killed"
    assert flow.pids() == {}


def test_a_drain_runs_each_action_once_also_those_that_come_late() -> None:
    drain, done = DrainRequest(), threading.Semaphore(0)
    with drain.when_requested(done.release):
        drain.request()
        drain.request()
        assert done.acquire(timeout=GENEROUS_S)
    with drain.when_requested(done.release):
        assert done.acquire(timeout=GENEROUS_S)
    assert not done.acquire(blocking=False)
