"""Leases with a preference: own rows first, no row without a process, the end of a class is not the end of the table,
slots that change."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, EndOfTable
from transferqueue.workflows.flow.loop.preference import PreferringWork, lease_preferred
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import LeaseChoice, Stage

TASK = tq.Task("double", needs=["x"], gives=["y"], selector=tq.LongestFirst())
LONG = (tq.Compare("tokens", ">=", 10),)
SHORT = (tq.Compare("tokens", "<", 10),)
WAIT_S = 20.0


@pytest.fixture
def table() -> Iterator[tq.Table]:
    with tq.connect() as queue:
        yield queue.create_table("t", fields=[tq.Field("x", "int64"), tq.Field("y", "int64")], tasks=[TASK])


def leased(table: tq.Table, where: Any = LONG, timeout_s: float = 0.0) -> list[int]:
    stage = Stage(task=TASK, rows=1, where=where)
    with lease_preferred(table, stage, LeaseChoice, timeout_s=timeout_s) as batch:
        batch.ack(y=[0])
        return batch.tokens.tolist()


def test_preferred_rows_come_first_then_any_row_then_the_end(table: tq.Table) -> None:
    table.put(x=np.arange(4), tokens=[3, 12, 5, 11])
    table.seal()
    assert [leased(table, SHORT) for _ in range(4)] == [[5], [3], [12], [11]]
    with pytest.raises(EndOfTable):
        leased(table, SHORT, WAIT_S)


def test_a_wait_ends_with_its_deadline_or_with_a_row_of_any_class(table: tq.Table) -> None:
    with pytest.raises(DeadlineExceeded):
        leased(table, LONG)
    with pytest.raises(DeadlineExceeded):
        leased(table, LONG, 0.05)
    later = threading.Timer(0.05, lambda: table.put(x=[1], tokens=[3]))
    later.start()
    assert leased(table, LONG, WAIT_S) == [3]
    later.join()


def test_two_processes_share_by_class_and_the_rows_of_a_dead_one_go_to_the_other(table: tq.Table) -> None:
    rng = np.random.default_rng(0)
    table.put(x=np.arange(40), tokens=rng.permutation(np.repeat([3, 30], 20)))
    table.seal()
    done: list[int] = []

    def work(batch: tq.Batch) -> Mapping[str, Any]:
        done.extend(batch.tokens.tolist())
        return {"y": batch["x"].numpy()}

    stage = Stage(task=TASK, rows=4, at_least=1, slots=8, stall_s=WAIT_S, where=SHORT)  # nobody prefers the long ones
    assert run_stage(table, stage, work, emit=lambda event: None) == 40
    assert sorted(done) == [3] * 20 + [30] * 20
    assert set(done[:8]) == {3}


def test_a_function_chooses_its_rows_and_its_slots(table: tq.Table) -> None:
    table.put(x=np.arange(12), tokens=[30] * 6 + [3] * 6)
    table.seal()
    choice = LeaseChoice(LONG, 2)
    running, most, order = 0, 0, []
    changed = threading.Condition()

    def work(batch: tq.Batch) -> Mapping[str, Any]:
        nonlocal running, most
        with changed:
            running += len(batch)
            most = max(most, running)
            order.extend(batch.tokens.tolist())
            changed.notify_all()
            changed.wait_for(lambda: running >= 2 or len(order) == 12, WAIT_S)
        with changed:
            running -= len(batch)
        return {"y": batch["x"].numpy()}

    stage = Stage(task=TASK, rows=1, slots=8, stall_s=WAIT_S)
    assert run_stage(table, stage, PreferringWork(work, lambda: choice), emit=lambda event: None) == 12
    assert most == 2
    assert order[:6] == [30] * 6
