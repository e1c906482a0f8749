"""A stage that keeps its slots full: the law without I/O, and the loop against a queue in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.workflows.flow.events import WORK, Event, Failure, TimeSpan
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_stage
from transferqueue.workflows.flow.loop.slots import Slots
from transferqueue.workflows.flow.reports.audit import audit
from transferqueue.workflows.flow.stage import Stage

FIELDS = [tq.Field("x", "int64"), tq.Field("y", "int64")]
DOUBLE = tq.Task("double", needs=["x"], gives=["y"], retry=tq.Retry(first_s=0.01))
CHECK = tq.Task("check", needs=["y"])
WAIT_S = 20


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


def table_of(queue: tq.Queue, rows: int, task: tq.Task = DOUBLE, **facts: Any) -> tq.Table:
    table = queue.create_table("t", fields=FIELDS, tasks=[task, CHECK])
    table.put(x=np.arange(rows), **facts)
    table.seal()
    return table


def serve(
    table: tq.Table, work: Any, stage: Stage | None = None, stop: threading.Event | None = None
) -> tuple[int, list[Event]]:
    events: list[Event] = []
    chosen = stage or Stage(task=DOUBLE, rows=2, at_least=1, slots=4, stall_s=WAIT_S)
    return run_stage(table, chosen, work, emit=events.append, stop=stop), events


def doubled(batch: tq.Batch) -> Mapping[str, Any]:
    return {"y": 2 * batch["x"].numpy()}


# ---------------------------------------------------------------- the law


@given(st.integers(1, 9), st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_no_more_rows_are_in_work_than_there_are_slots(slots: int, rows: int, events: list[tuple[bool, int]]) -> None:
    state = Slots(slots=slots, rows=min(rows, slots), groups=0, least=1, now=0.0)
    for leases, count in events:
        if leases and state.room():
            state.leased(min(count, state.room()))
        elif state.in_work:
            state.ended(min(count, state.in_work), 1.0)
        assert 0 <= state.in_work <= slots
        assert (state.room() > 0) == (state.in_work < slots)


def test_a_stage_that_takes_the_full_number_waits_for_room_for_all_of_it() -> None:
    state = Slots(slots=5, rows=2, groups=0, least=0, now=0.0)
    rooms = []
    for ended in (0, 0, 1, 1):
        state.ended(ended, 1.0)
        rooms.append(state.room())
        state.leased(rooms[-1])
    assert rooms == [2, 2, 2, 0]


def test_a_group_is_leased_when_the_largest_that_was_seen_fits() -> None:
    state = Slots(slots=8, rows=0, groups=1, least=1, now=0.0)
    rooms = []
    for size in (3, 2):
        rooms.append(state.room())
        state.leased(size)
    rooms.append(state.room())
    state.leased(3)
    rooms.append(state.room())
    state.ended(8, 1.0)
    assert (rooms, state.room()) == ([1, 1, 1, 0], 1)


def test_a_group_larger_than_the_slots_is_leased_alone() -> None:
    state = Slots(slots=2, rows=0, groups=1, least=1, now=0.0)
    state.leased(5)
    assert state.room() == 0
    state.ended(5, 1.0)
    assert state.room() == 1


def test_a_wait_is_a_stall_only_while_nothing_is_in_work() -> None:
    state = Slots(slots=2, rows=1, groups=0, least=1, now=10.0)
    assert state.idle_s(13.0) == 3.0
    state.leased(1)
    assert state.idle_s(99.0) == 0.0
    state.ended(1, 100.0)
    assert state.idle_s(101.0) == 1.0


@pytest.mark.parametrize("amounts", [{"rows": 4, "slots": 2}, {"tokens": 4, "slots": 8}, {"rows": 1, "slots": -1}])
def test_slots_that_make_no_sense_are_refused(amounts: dict[str, int]) -> None:
    with pytest.raises(tq.UsageError, match=r'stage "double": slots='):
        Stage(task=DOUBLE, **amounts)


# ---------------------------------------------------------------- the loop


def test_a_finished_row_makes_room_while_the_rest_of_its_lease_goes_on(queue: tq.Queue) -> None:
    """Four slots, the first lease takes two rows and holds the second: the others do all the rest meanwhile."""
    table = table_of(queue, 20)
    release, others = threading.Event(), threading.Semaphore(0)

    def uneven(batch: tq.Batch) -> Iterator[PartialResult]:
        for at, x in enumerate(batch["x"].list()):
            if x == 1:
                for _ in range(19):
                    assert others.acquire(timeout=WAIT_S)
                release.set()
            yield PartialResult(at=np.array([at]), columns={"y": [2 * x]})
            others.release()

    done, events = serve(table, uneven)
    assert release.is_set()
    assert done == audit(table).live == 20
    assert sum(event.rows for event in events if isinstance(event, TimeSpan) and event.name == WORK) == 20


def test_rows_in_work_never_exceed_the_slots(queue: tq.Queue) -> None:
    table = table_of(queue, 30)
    lock, in_work, most = threading.Lock(), 0, 0

    def counted(batch: tq.Batch) -> Mapping[str, Any]:
        nonlocal in_work, most
        with lock:
            in_work += len(batch)
            most = max(most, in_work)
        threading.Event().wait(0.002)
        with lock:
            in_work -= len(batch)
        return doubled(batch)

    assert serve(table, counted)[0] == 30
    assert 2 < most <= 4


def test_work_of_leases_that_overlap_is_reported_once(queue: tq.Queue) -> None:
    table = table_of(queue, 16)
    _, events = serve(table, doubled)
    spans = [event for event in events if isinstance(event, TimeSpan)]
    assert all(before.end <= after.start for before, after in pairwise(spans))


def test_a_failed_lease_comes_again_and_the_others_go_on(queue: tq.Queue) -> None:
    table = table_of(queue, 12)
    failed = threading.Event()

    def fails_once(batch: tq.Batch) -> Mapping[str, Any]:
        if 0 in batch["x"].list() and not failed.is_set():
            failed.set()
            raise RuntimeError("out of luck")
        return doubled(batch)

    done, events = serve(table, fails_once)
    assert (done, audit(table).dropped) == (12, {})
    assert "out of luck" in next(event.text for event in events if isinstance(event, Failure))


def test_a_stage_that_always_fails_is_broken(queue: tq.Queue) -> None:
    table = table_of(queue, 12)

    def fails(batch: tq.Batch) -> Mapping[str, Any]:
        raise RuntimeError("no luck at all")

    with pytest.raises(StageFailedInProcess, match='stage "double" failed 3 times in a row'):
        serve(table, fails, Stage(task=DOUBLE, rows=2, at_least=1, slots=4, stall_s=WAIT_S, failures_max=3))


def test_a_broken_stage_gives_the_rows_of_its_other_leases_back(queue: tq.Queue) -> None:
    task = tq.Task("double", needs=["x"], gives=["y"], retry=tq.Retry(first_s=0.01))
    table = table_of(queue, 8, task)
    broken = threading.Event()

    def work(batch: tq.Batch) -> Iterator[PartialResult]:
        x = batch["x"].numpy()
        if x[0] >= 4:
            broken.set()
            raise RuntimeError("no luck")
        assert broken.wait(WAIT_S)
        threading.Event().wait(0.1)
        for at in range(len(batch)):
            yield PartialResult(at=np.array([at]), columns={"y": [2 * x[at]]})

    with pytest.raises(StageFailedInProcess, match="no luck"):
        serve(table, work, Stage(task=task, rows=4, at_least=1, slots=8, stall_s=WAIT_S, failures_max=1))
    assert table.stats().tasks["double"].done >= 1
    assert table.stats().tasks["double"].leased == 0


def test_a_stage_with_slots_stops_when_asked_and_ends_what_it_began(queue: tq.Queue) -> None:
    table, stop = table_of(queue, 20), threading.Event()

    def last(batch: tq.Batch) -> Mapping[str, Any]:
        stop.set()
        return doubled(batch)

    done, _ = serve(table, last, stop=stop)
    assert 2 <= done <= 6
    assert table.stats().tasks["double"].leased == 0


def test_waiting_for_rows_ends_with_what_is_missing(queue: tq.Queue) -> None:
    table = queue.create_table("t", fields=FIELDS, tasks=[DOUBLE, CHECK])
    with pytest.raises(tq.DeadlineExceeded, match="double"):
        serve(table, doubled, Stage(task=DOUBLE, rows=2, at_least=1, slots=4, stall_s=0.1))


def test_groups_are_leased_whole_into_slots(queue: tq.Queue) -> None:
    task = tq.Task("double", needs=["x"], gives=["y"], groups=tq.Complete())
    table = table_of(queue, 24, task, group_id=np.repeat(np.arange(8), 3), group_size=3)
    sizes: list[int] = []

    def whole(batch: tq.Batch) -> Mapping[str, Any]:
        sizes.append(len(batch))
        return doubled(batch)

    assert serve(table, whole, Stage(task=task, groups=1, slots=7, stall_s=WAIT_S))[0] == 24
    assert sizes == [3] * 8
