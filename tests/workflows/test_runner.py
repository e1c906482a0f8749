"""The loop around a stage, against a queue in this process."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.workflows.flow.events import Event, Failure, TimeSpan
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_source, run_stage
from transferqueue.workflows.flow.loop.serving import FailureLog
from transferqueue.workflows.flow.reports.audit import audit
from transferqueue.workflows.flow.stage import Context, Stage, load

FIELDS = [tq.Field("x", "int64"), tq.Field("y", "int64"), tq.Field("z", "int64")]
DOUBLE = tq.Task("double", needs=["x"], gives=["y"], retry=tq.Retry(first_s=0.01))
CHECK = tq.Task("check", needs=["y"])


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as queue:
        yield queue


def table_of(queue: tq.Queue, rows: int, *tasks: tq.Task) -> tq.Table:
    """A sealed table of rows x = 0, 1, …"""
    table = queue.create_table("t", fields=FIELDS, tasks=tasks)
    table.put(x=np.arange(rows))
    table.seal()
    return table


def serve(
    table: tq.Table, work: Any, *, task: tq.Task = DOUBLE, rows: int = 4, failures_max: int | None = None
) -> tuple[int, list[Event]]:
    events: list[Event] = []
    stage = Stage(task=task, rows=rows, at_least=1, failures_max=failures_max)
    done = run_stage(table, stage, work, emit=events.append)
    return done, events


def doubled(batch: tq.Batch) -> Mapping[str, Any]:
    return {"y": 2 * batch["x"].numpy()}


def checked(table: tq.Table) -> dict[int, int]:
    """x to y of all rows, as the task after sees them."""
    with table.lease("check", rows=100, fields=["x", "y"]) as batch:
        return dict(zip(batch["x"].numpy().tolist(), batch["y"].numpy().tolist(), strict=True))


def test_rows_are_done_together_with_the_columns_the_stage_gave(queue: tq.Queue) -> None:
    table = table_of(queue, 10, DOUBLE, CHECK)
    done, events = serve(table, doubled)
    assert done == 10
    assert checked(table) == {x: 2 * x for x in range(10)}
    assert audit(table).done == 10
    spans = [event for event in events if isinstance(event, TimeSpan)]
    assert [span.rows for span in spans if span.name == "work"] == [4, 4, 2]
    assert all(span.start <= span.end for span in spans)


def test_parts_are_acknowledged_as_they_come_and_land_on_their_rows(queue: tq.Queue) -> None:
    table = table_of(queue, 6, DOUBLE, CHECK)
    seen: list[int] = []

    def in_parts(batch: tq.Batch) -> Iterator[PartialResult]:
        x = batch["x"].numpy()
        for at in (np.array([5, 0]), np.array([1])):
            yield PartialResult(at=at, columns={"y": 2 * x[at]}, facts={"policy_version": 7})
            seen.append(table.stats().tasks["double"].done)
        yield PartialResult(columns={"y": 2 * x[2:5]})

    serve(table, in_parts, rows=6)
    assert seen == [2, 3]
    assert checked(table) == {x: 2 * x for x in range(6)}


def test_a_stage_that_forgets_rows_has_failed_on_them(queue: tq.Queue) -> None:
    table = table_of(queue, 3, DOUBLE, CHECK)
    calls: list[int] = []

    def forgetful(batch: tq.Batch) -> Iterator[PartialResult]:
        calls.append(len(batch))
        kept = np.arange(len(batch) - (len(calls) == 1))
        yield PartialResult(at=kept, columns={"y": 2 * batch["x"].numpy()[kept]})

    _, events = serve(table, forgetful)
    assert calls == [3, 1]
    assert "all but 1 of 3 rows" in next(event.text for event in events if isinstance(event, Failure))
    assert checked(table) == {0: 0, 1: 2, 2: 4}


def test_a_failure_gives_the_rows_back_and_they_come_again(queue: tq.Queue) -> None:
    table = table_of(queue, 4, DOUBLE, CHECK)
    calls: list[int] = []

    def fails_once(batch: tq.Batch) -> Mapping[str, Any]:
        calls.append(len(batch))
        if len(calls) == 1:
            raise RuntimeError("out of luck")
        return doubled(batch)

    done, events = serve(table, fails_once)
    assert (done, calls) == (4, [4, 4])
    failure = next(event for event in events if isinstance(event, Failure))
    assert "RuntimeError: out of luck" in failure.text
    assert "fails_once" in failure.text


def test_a_stage_that_always_fails_ends_at_its_limit_and_drops_nothing(queue: tq.Queue) -> None:
    table = table_of(queue, 4, DOUBLE, CHECK)

    def fails(batch: tq.Batch) -> Mapping[str, Any]:
        raise RuntimeError("no luck at all")

    with pytest.raises(
        StageFailedInProcess, match=r'stage "double" failed 3 times in a row.*RuntimeError: no luck'
    ) as broken:
        serve(table, fails, failures_max=3)
    assert isinstance(broken.value.__cause__, RuntimeError)
    assert audit(table).dropped == {}


def test_a_stage_without_a_limit_outlives_its_failures_and_logs_them(
    queue: tq.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of(queue, 4, DOUBLE, CHECK)
    calls: list[int] = []

    def works_at_last(batch: tq.Batch) -> Mapping[str, Any]:
        calls.append(len(batch))
        if len(calls) < 6:
            raise RuntimeError("the judge is away")
        return doubled(batch)

    done, events = serve(table, works_at_last)
    assert (done, len([event for event in events if isinstance(event, Failure)])) == (4, 5)
    assert [record.getMessage() for record in caplog.records if record.name == "transferqueue.flow"] == [
        'stage "double" failed with RuntimeError: the judge is away; its rows are tried again'
    ]


def test_failures_after_the_first_are_logged_each_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog(Stage(task=DOUBLE, rows=1), lambda event: None)
    for now in range(0, 130, 10):
        log.failed(RuntimeError("away"), 1, float(now))
    assert [record.getMessage() for record in caplog.records] == [
        'stage "double" failed with RuntimeError: away; its rows are tried again',
        'stage "double" failed 6 times in 60 s, the last time with RuntimeError: away; its rows are tried again',
        'stage "double" failed 6 times in 60 s, the last time with RuntimeError: away; its rows are tried again',
    ]


def test_columns_that_do_not_fit_are_a_failure_and_change_nothing(queue: tq.Queue) -> None:
    table = table_of(queue, 4, DOUBLE, CHECK)
    with pytest.raises(StageFailedInProcess, match="y"):
        serve(table, lambda batch: {"y": ["text"] * len(batch)}, failures_max=1)


def test_a_late_ack_is_reported_and_the_loop_goes_on(queue: tq.Queue) -> None:
    table = table_of(queue, 8, DOUBLE, CHECK)
    calls: list[int] = []

    def loses_its_first(batch: tq.Batch) -> Mapping[str, Any]:
        calls.append(len(batch))
        if len(calls) == 1:
            table.rollback(-1, task="double")
        return doubled(batch)

    done, events = serve(table, loses_its_first)
    assert done == 8
    assert "LeaseExpired" in next(event.text for event in events if isinstance(event, Failure))
    assert sorted(checked(table)) == list(range(8))


def test_results_of_rows_that_were_dropped_meanwhile_are_no_failure(queue: tq.Queue) -> None:
    table = table_of(queue, 8, DOUBLE, CHECK)
    dropped: list[int] = []

    def works_while_some_are_dropped(batch: tq.Batch) -> Mapping[str, Any]:
        if not dropped:
            dropped.extend(batch.rows.tolist())
            table.drop(batch.rows, "unwanted")
        return doubled(batch)

    _, events = serve(table, works_while_some_are_dropped)
    assert [event for event in events if isinstance(event, Failure)] == []
    assert sorted(checked(table)) == [4, 5, 6, 7]


@pytest.mark.slow
def test_a_lease_is_renewed_while_the_function_works(queue: tq.Queue) -> None:
    short = tq.Task("double", needs=["x"], gives=["y"], lease_s=0.6)
    table = table_of(queue, 4, short, CHECK)
    calls: list[int] = []

    def slow(batch: tq.Batch) -> Mapping[str, Any]:
        calls.append(len(batch))
        threading.Event().wait(2.0)  # the work takes longer than the lease
        return doubled(batch)

    done, _ = serve(table, slow, task=short)
    assert (done, calls) == (4, [4])


def test_a_stage_stops_between_batches_when_asked(queue: tq.Queue) -> None:
    table = table_of(queue, 8, DOUBLE, CHECK)
    stop = threading.Event()

    def last(batch: tq.Batch) -> Mapping[str, Any]:
        stop.set()
        return doubled(batch)

    stage = Stage(task=DOUBLE, rows=4)
    assert run_stage(table, stage, last, emit=lambda event: None, stop=stop) == 4


def test_waiting_for_rows_ends_with_what_is_missing(queue: tq.Queue) -> None:
    table = queue.create_table("t", fields=FIELDS, tasks=[DOUBLE, CHECK])
    stage = Stage(task=DOUBLE, rows=4, stall_s=0.05)
    with pytest.raises(tq.DeadlineExceeded, match="double"):
        run_stage(table, stage, doubled, emit=lambda event: None)


@dataclass(frozen=True)
class Total:
    """Settings of a source."""

    total: int


class Numbers:
    """A source of rows x = 0, 1, … in puts of at most four."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.next = 0

    def wants(self) -> int:
        return min(4, self.total - self.next)

    def __call__(self, rows: int) -> Mapping[str, Any]:
        self.next += rows
        return {"x": np.arange(self.next - rows, self.next)}


def test_a_source_puts_until_it_has_no_more(queue: tq.Queue) -> None:
    table = queue.create_table("t", fields=FIELDS, tasks=[DOUBLE, CHECK], pacing=tq.Pacing("check", 16))
    events: list[Event] = []
    assert run_source(table, Numbers(10), emit=events.append) == 10
    table.seal()
    assert serve(table, doubled)[0] == 10
    assert checked(table) == {x: 2 * x for x in range(10)}
    assert [span.rows for span in events if isinstance(span, TimeSpan) and span.name == "work"] == [4, 4, 2]


def test_a_source_waits_for_room_and_says_so_when_there_is_none(queue: tq.Queue) -> None:
    pacing = tq.Pacing("check", batch_rows=4, depth=1)
    table = queue.create_table("t", fields=FIELDS, tasks=[DOUBLE, CHECK], pacing=pacing)
    with pytest.raises(tq.DeadlineExceeded):
        run_source(table, Numbers(12), emit=lambda event: None, stall_s=0.05)
    assert audit(table).put == 8
    table.put(x=[8], timeout_s=0)


@pytest.mark.parametrize("amounts", [{}, {"rows": 4, "groups": 1}, {"rows": -1}])
def test_a_stage_asks_for_rows_or_tokens_or_groups(amounts: dict[str, int]) -> None:
    with pytest.raises(tq.UsageError, match=r'stage "double".*give exactly one'):
        Stage(task=DOUBLE, **amounts)


def test_a_stage_cannot_wait_for_more_than_it_may_get() -> None:
    with pytest.raises(tq.Impossible, match="at_least=5"):
        Stage(task=DOUBLE, rows=4, at_least=5)


def test_a_factory_is_named_by_module_and_function() -> None:
    assert load("transferqueue.workflows.flow.stage:load") is not None
    with pytest.raises(tq.UsageError, match=r"package\.module:function"):
        load("transferqueue.workflows.flow.stage")
    with pytest.raises(tq.NotFound, match="has no nothing"):
        load("transferqueue.workflows.flow.stage:nothing")


def test_settings_that_do_not_fit_are_refused(queue: tq.Queue) -> None:
    table = queue.create_table("t", fields=FIELDS, tasks=[DOUBLE])
    context = Context(queue=queue, table=table, emit=lambda event: None, settings={"total": "many"})
    with pytest.raises(tq.UsageError, match=r"settings .* are not Total"):
        context.settings(Total)
