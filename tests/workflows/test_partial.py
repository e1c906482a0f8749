"""Parts of a batch that a stage hands back, drops or finishes; the end of a source; and a full batch that is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.events import Event, Failure
from transferqueue.workflows.flow.loop.full_batches import FULL, hearing, tell_full
from transferqueue.workflows.flow.loop.runner import run_source, run_stage
from transferqueue.workflows.flow.stage import Stage


def test_an_unfinished_part_says_which_rows_and_nothing_else() -> None:
    with pytest.raises(UsageError, match="say which rows"):
        PartialResult(columns={}, unfinished=True)
    with pytest.raises(UsageError, match="no stage reads them"):
        PartialResult(columns={"y": [1]}, drop="flat")


def test_rows_of_parts_are_handed_back_dropped_and_done() -> None:
    task = tq.Task("count", needs=["x"], gives=["y"])
    events: list[Event] = []

    def count(batch: tq.Batch) -> Iterator[PartialResult]:
        x = batch["x"].numpy()
        for at, value in enumerate(x):
            if value == 5:
                yield PartialResult(at=np.array([at]), columns={}, drop="five")
            elif value < 3:
                yield PartialResult(at=np.array([at]), columns={"x": x[[at]] + 1}, unfinished=True)
            else:
                yield PartialResult(at=np.array([at]), columns={"y": 10 * x[[at]]})

    with tq.connect() as queue:
        table = queue.create_table(
            "t", fields=[tq.Field("x", "int64"), tq.Field("y", "int64")], tasks=[task], retention=tq.Manual()
        )
        table.put(x=np.array([0, 3, 5, 2]))
        table.seal()
        run_stage(table, Stage(task=task, rows=2, at_least=1), count, emit=events.append)
        assert table.read(fields=["y"])["y"].list() == [30, 30, 30]
        assert table.audit().dropped == {"five": 1}
    assert not [event for event in events if isinstance(event, Failure)]


@pytest.mark.parametrize("rows", [3, 6])
def test_a_dropped_row_ends_its_group_and_no_other_row_of_its_batch(rows: int) -> None:
    """The group of a dropped member is dropped with it. What the stage yields for the rest of it is passed over."""
    count = tq.Task("count", needs=["x"], gives=["y"])
    train = tq.Task("train", needs=["y"], groups=tq.Complete(incomplete=tq.DropGroup()))
    events: list[Event] = []

    def each(batch: tq.Batch) -> Iterator[PartialResult]:
        for at, value in enumerate(batch["x"].list()):
            columns = {} if value == 0 else {"y": [value]}
            yield PartialResult(at=np.array([at]), columns=columns, drop="" if value else "timeout")

    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[count, train])
        table.put(x=[0, 1, 2, 3, 4, 5], group_id=[1, 1, 1, 2, 2, 2], group_size=3)
        table.seal()
        stage = Stage(task=count, rows=rows, at_least=1)
        assert run_stage(table, stage, each, emit=events.append) == 6
        with table.lease("train", groups=1) as batch:
            assert batch["y"].list() == [3, 4, 5]
        assert table.audit().dropped == {"timeout": 1, "group_incomplete": 2}
    assert not [event for event in events if isinstance(event, Failure)]


def test_a_source_ends_with_a_table_that_somebody_sealed() -> None:
    class Endless:
        def wants(self) -> int:
            return 2

        def __call__(self, rows: int) -> dict[str, Any]:
            if table.audit().rows_put >= 6:
                table.seal()
            return {"x": [1] * rows}

    with tq.connect() as queue:
        table = queue.create_table("t", fields=[tq.Field("x", "int64")])
        assert run_source(table, Endless(), emit=lambda event: None) == 6


def test_a_full_batch_is_told_once_and_heard_at_the_server() -> None:
    with tq.connect() as queue:
        queue.weights(FULL, keep=1)
        with hearing(queue) as due:
            assert due() == 0
            for _ in range(2):  # a trainer that is started anew tells again
                tell_full(queue, 3, np.array([4, 5]))
            with queue.weights(FULL).pull(version=3, timeout_s=30) as told:
                assert told["rows"].tolist() == [4, 5]
