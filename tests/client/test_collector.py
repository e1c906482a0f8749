"""Nothing that a call used waits for the garbage collector: a batch may be gigabytes, and collections far apart."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import transferqueue as tq

ROWS = 32
WORDS = 1 << 15
"""So that a batch comes in several frames, and a wait for the next one is part of it."""


@pytest.fixture
def table(way: dict[str, Any], name: str) -> Iterator[tq.Table]:
    with tq.connect(**way) as queue:
        yield queue.create_table(
            name,
            tasks=[tq.Task("score", needs=["x"], gives=["y"]), tq.Task("never", needs=["z"])],
            limits=tq.Limits(rows=4 * ROWS),
        )


def put(table: tq.Table, rows: int = ROWS, timeout_s: float = 10) -> None:
    table.put(x=np.ones((rows, WORDS), np.int64), timeout_s=timeout_s)


def score(table: tq.Table) -> None:
    with table.lease("score", rows=ROWS) as batch:
        batch["x"].numpy()
        batch.ack(y=np.arange(ROWS))


def read(table: tq.Table) -> None:
    with table.read(fields=["x"]) as rows:
        rows["x"].numpy()


def wait_in_vain(table: tq.Table) -> None:
    with pytest.raises(tq.DeadlineExceeded):
        table.lease("never", rows=1, timeout_s=0.01)


def refused(table: tq.Table) -> None:
    with pytest.raises(tq.Full):
        put(table, rows=4 * ROWS, timeout_s=0)


@pytest.mark.parametrize("call", [put, score, read, wait_in_vain, refused])
def test_a_call_leaves_nothing_to_the_collector(table: tq.Table, call: Callable[[tq.Table], None]) -> None:
    for _ in range(2):
        put(table)
    call(table)  # what is made once is no matter
    while (
        gc.collect()
    ):  # finalizers of what earlier tests left, such as tasks of a closed event loop, make garbage in turn
        continue
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    before = set(map(id, gc.get_objects()))  # a queue that an earlier test closed may end meanwhile
    try:
        call(table)
        gc.collect()
        left = [f"{type(each).__name__} {str(each)[:200]}" for each in gc.garbage if id(each) not in before]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
