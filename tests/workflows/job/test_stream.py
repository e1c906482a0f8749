"""The rows of a step, leased from a real queue: held until they are acked together, given back if the step is given
up."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits
from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.workflows.job import names
from transferqueue.workflows.job.training.gather import StepShape, StreamPosition
from transferqueue.workflows.job.training.stream import GatheredStep, RowStream, StreamTerms

GROUP = 2


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as queue:
        yield queue


@pytest.fixture
def table(queue: tq.Queue) -> tq.Table:
    return queue.create_table(
        "t", tasks=[tq.Task("train", needs=["x"], groups=tq.Complete(), retry=tq.Retry(attempts=2))]
    )


def put(table: tq.Table, *prompts: int) -> None:
    for prompt in prompts:
        ordinals = [prompt * GROUP + sample for sample in range(GROUP)]
        table.put(x=ordinals, group_id=prompt, group_size=GROUP, ordinal=ordinals, policy_version=0)


def stream(table: tq.Table, units: int, *, whole: bool = True, stall_s: float = 20.0, **shape: Any) -> RowStream:
    terms = StreamTerms(
        task="train",
        shape=StepShape(units=units, **shape),
        whole=whole,
        group_rows=GROUP,
        fields=("x",),
        stall_s=stall_s,
    )
    return RowStream(table, terms, emit=lambda event: None)


class Computed:
    """Notes the values and row ids of each call. began: set with the first."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.ids: list[int] = []
        self.began = threading.Event()

    def __call__(self, columns: Any, ids: list[int]) -> None:
        self.calls.append([int(value) for value in columns["x"]])
        self.ids += ids
        self.began.set()


# ---------------------------------------------------------------- bad input


def test_rows_without_ordinals_are_refused_in_the_order_of_ordinals(table: tq.Table) -> None:
    table.put(x=[1, 2], group_id=0, group_size=2)
    with pytest.raises(UsageError, match=r'row 0 of table "t" has no ordinal, which reproducible=true needs'):
        stream(table, 1, order="ordinal").step(Computed())
    assert table.stats().tasks["train"].leased == 0


def test_a_wait_ends_with_what_is_missing(table: tq.Table) -> None:
    with pytest.raises(DeadlineExceeded, match="train"):
        stream(table, 1, stall_s=0.05).step(Computed())


def test_rows_that_cannot_be_computed_with_go_back_as_failed_and_the_others_as_they_were(table: tq.Table) -> None:
    put(table, 0, 1)
    rows = stream(table, 2, at_least=1, order="ordinal")

    def compute(columns: Any, ids: list[int]) -> None:
        if columns["x"][0] == GROUP:
            raise UsageError("a response of prompt 1 is broken")

    with pytest.raises(UsageError, match="prompt 1 is broken"):
        rows.step(compute)
    task = table.stats().tasks["train"]
    assert (task.ready, task.retrying, task.leased, task.failed) == (GROUP, GROUP, 0, GROUP)


# ---------------------------------------------------------------- steps


def test_a_step_takes_groups_as_they_come_and_acks_them_with_its_step(table: tq.Table) -> None:
    put(table, 0, 1)
    rows, computed = stream(table, 3), Computed()

    def compute(columns: Any, ids: list[int]) -> None:
        computed(columns, ids)
        if len(computed.calls) == 1:
            put(table, 2)

    gathered = rows.step(compute)
    assert gathered is not None
    assert computed.calls == [[0, 1, 2, 3], [4, 5]]
    assert sorted(computed.ids) == sorted(gathered.rows)
    assert gathered.is_held
    assert table.stats().tasks["train"].leased == 6
    rows.finish()
    assert rows.ack(gathered, 7) == 0
    assert table.checkpointed(6, task="train") == 0
    assert table.checkpointed(7, task="train") == 6


def test_single_rows_are_units_of_their_own(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    put(table, 0, 1)
    rows, computed = stream(table, 3, whole=False, order="ordinal"), Computed()
    assert rows.step(computed) is not None
    assert computed.calls == [[0], [1], [2]]


def test_the_order_of_ordinals_is_that_of_the_data_whatever_comes_first(table: tq.Table) -> None:
    put(table, 2, 0, 3, 1)
    rows, computed = stream(table, 2, order="ordinal", at_least=2, window=math.inf), Computed()
    for _ in range(2):
        gathered = rows.step(computed)
        assert gathered is not None
        rows.finish()
        rows.ack(gathered, -1)
    assert computed.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_window_does_not_take_places_far_ahead(table: tq.Table) -> None:
    put(table, 3, 1)
    rows, computed = stream(table, 1, window=2.0), Computed()
    assert rows.step(computed) is not None
    assert computed.calls == [[2, 3]]


def test_a_dropped_place_moves_the_window_on(table: tq.Table) -> None:
    put(table, 0, 1, 2)
    table.drop([0, 1], "equal")
    rows, computed = stream(table, 2, window=1.0), Computed()
    gathered = rows.step(computed)
    assert gathered is not None
    assert computed.calls == [[2, 3], [4, 5]]
    rows.finish()
    assert rows.position == (3, (), ())


def test_the_end_of_the_table_makes_a_smaller_step_and_then_none(table: tq.Table) -> None:
    put(table, 0)
    table.seal()
    rows, computed = stream(table, 2, stream=False), Computed()
    gathered = rows.step(computed)
    assert gathered is not None
    rows.finish()
    assert rows.ack(gathered, -1) == 0
    assert rows.step(computed) is None
    assert computed.calls == [[0, 1]]


# ---------------------------------------------------------------- waits


class Waiting:
    """A step that is gathered in a thread of its own; left when the test leaves it."""

    def __init__(self, queue: tq.Queue, rows: RowStream) -> None:
        self.computed, self._queue = Computed(), queue
        self._pool = ThreadPoolExecutor(1)
        self.step = self._pool.submit(rows.step, self.computed)

    def until_it_waits(self) -> None:
        """Return when it has computed with the rows that were there, and the server keeps its lease for more."""
        assert self.computed.began.wait(60)
        until_someone_waits(self._queue, "t")

    def gathered(self) -> GatheredStep | None:
        """The step. It comes long before the stream's own deadline."""
        try:
            return self.step.result(timeout=60)
        finally:
            self._pool.shutdown()


def test_rows_that_are_dropped_while_the_stream_waits_wake_it(queue: tq.Queue, table: tq.Table) -> None:
    put(table, 0, 1, 2)
    held = table.lease("train", groups=1)
    waiting = Waiting(queue, stream(table, 2, window=1.0, stall_s=600.0))
    waiting.until_it_waits()
    table.drop(held.rows, "equal")
    assert waiting.gathered() is not None
    assert waiting.computed.calls == [[2, 3], [4, 5]]


def test_a_seal_wakes_a_stream_that_holds_the_last_rows(queue: tq.Queue, table: tq.Table) -> None:
    put(table, 0)
    waiting = Waiting(queue, stream(table, 2, stall_s=600.0))
    waiting.until_it_waits()
    table.seal()
    assert waiting.gathered() is not None
    assert waiting.computed.calls == [[0, 1]]


def test_places_that_are_gone_do_not_end_a_sealed_table_before_its_last_rows(table: tq.Table) -> None:
    put(table, 0, 1, 2, 3)
    table.drop(list(range(2 * GROUP)), "equal")
    table.seal()
    rows, computed = stream(table, 2, window=1.0), Computed()
    assert rows.step(computed) is not None
    assert computed.calls == [[4, 5, 6, 7]]


# ---------------------------------------------------------------- lost leases


def test_a_step_that_is_given_up_comes_again(table: tq.Table) -> None:
    put(table, 0, 1)
    rows, computed = stream(table, 2, order="ordinal"), Computed()
    gathered = rows.step(computed)
    assert gathered is not None
    rows.give_up(gathered)
    assert table.stats().tasks["train"].ready == 4
    assert rows.step(computed) is not None
    assert computed.calls == [[0, 1], [2, 3]] * 2


def test_rows_lost_after_the_update_are_acked_when_they_come_again_and_not_learned_twice(table: tq.Table) -> None:
    put(table, 0, 1, 2)
    rows, computed = stream(table, 1), Computed()
    first = rows.step(computed)
    assert first is not None
    rows.finish()
    table.rollback(-1, task="train")  # ends the lease, as a long stop of the process would
    assert rows.ack(first, 1) == GROUP
    second = rows.step(computed)
    assert second is not None
    rows.finish()
    assert rows.ack(second, 2) == 0
    assert computed.calls == [[0, 1], [2, 3]]
    assert table.checkpointed(1, task="train") == GROUP
    assert table.checkpointed(2, task="train") == GROUP


def test_lost_rows_that_come_again_with_new_ones_are_not_learned_twice(table: tq.Table) -> None:
    put(table, 0)
    rows, computed = stream(table, 2), Computed()

    def compute(columns: Any, ids: list[int]) -> None:
        computed(columns, ids)
        if len(computed.calls) == 1:
            put(table, 1)

    first = rows.step(compute)
    assert first is not None
    rows.finish()
    first.batches[1].release()  # gives its rows back, as a lease that runs out would
    assert rows.ack(first, 1) == GROUP
    put(table, 2, 3)  # the next lease has a known group and a new one
    second = rows.step(computed)
    assert second is not None
    rows.finish()
    assert rows.ack(second, 2) == 0
    assert computed.calls == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert table.checkpointed(1, task="train") == 2 * GROUP
    assert table.checkpointed(2, task="train") == 2 * GROUP
    assert table.audit().balanced


def test_the_leases_of_a_step_are_acked_even_if_one_is_lost(table: tq.Table) -> None:
    put(table, 0)
    rows = stream(table, 2)

    def compute(columns: Any, ids: list[int]) -> None:
        if columns["x"][0] == 0:
            put(table, 1)

    gathered = rows.step(compute)
    assert gathered is not None
    table.drop(gathered.batches[0].rows, "bad")
    assert rows.ack(gathered, 1) == GROUP
    assert table.checkpointed(1, task="train") == GROUP
    assert table.audit().balanced


# ---------------------------------------------------------------- rows of earlier steps


@pytest.fixture
def uses(queue: tq.Queue) -> tq.Table:
    """A table whose rows are trained twice."""
    tasks = [tq.Task(name, needs=["x"], groups=tq.Complete()) for name in ("train", "train_use_2")]
    return queue.create_table("uses", tasks=tasks)


def again(table: tq.Table, position: StreamPosition | None = None) -> RowStream:
    terms = StreamTerms(
        task="train",
        shape=StepShape(units=1),
        whole=True,
        group_rows=GROUP,
        fields=("x",),
        further_uses=("train_use_2",),
        stall_s=20.0,
    )
    return RowStream(table, terms, emit=lambda event: None, position=position)


def taken(rows: RowStream, step: int) -> GatheredStep:
    gathered = rows.step(Computed())
    assert gathered is not None
    rows.finish()
    rows.ack(gathered, step)
    return gathered


def test_a_place_that_never_comes_keeps_back_no_further_use_of_others(uses: tq.Table) -> None:
    put(uses, 1, 2, 4)  # 0 and 3 are slow, or gone
    rows = again(uses)
    steps = [taken(rows, step) for step in (1, 2, 3)]
    assert [[int(row) for batch in step.again for row in batch.rows] for step in steps] == [[], [0, 1], [2, 3]]
    assert rows.position.again == (((4, 4),),)
    rows.drop_used("surplus_use")
    for task in ("train", "train_use_2"):
        uses.checkpointed(3, task=task)
    assert (uses.audit().rows_done, uses.audit().dropped, uses.audit().rows_live) == (4, {"surplus_use": 2}, 0)


def test_further_uses_that_are_lost_after_the_update_are_counted_when_they_come_again(uses: tq.Table) -> None:
    put(uses, 0, 1, 2)
    rows = again(uses)
    taken(rows, 1)
    second = rows.step(Computed())
    assert second is not None
    rows.finish()
    uses.rollback(-1, task="train_use_2")  # ends the lease, as a long stop of the process would
    assert rows.ack(second, 2) == GROUP
    third = taken(rows, 3)
    assert [int(row) for batch in third.again for row in batch.rows] == [2, 3]
    assert uses.checkpointed(2, task="train_use_2") == GROUP  # those of the second step, by its number
    assert uses.checkpointed(3, task="train_use_2") == GROUP


def test_a_table_from_an_older_snapshot_has_no_rows_to_train_again(queue: tq.Queue, uses: tq.Table) -> None:
    def is_done(task: str, row: int) -> bool:
        return queue.inspect("uses", row).tasks[task].state not in names.OPEN_STATES

    put(uses, 0, 1, 2)
    older = again(uses)
    taken(older, 1)
    for task in ("train_use_2", "train"):
        uses.checkpointed(2, task=task)
    rows = again(uses, StreamPosition(2, (), (((1, 1),),)))  # after a second step, which this table has not seen
    assert rows.forget_unknown(is_done, "stale_use") == 1
    step = taken(rows, 3)
    assert ([int(row) for row in step.rows], step.again) == ([2, 3], [])
    assert (rows.position.again, uses.audit().dropped) == ((((1, 1),),), {"stale_use": 2})
    assert rows.forget_unknown(is_done, "stale_use") == 0


def test_the_trainer_serves_further_uses_before_there_are_any(uses: tq.Table) -> None:
    put(uses, 0)
    gathered = again(uses).step(Computed())
    assert gathered is not None
    assert uses.stats().tasks["train_use_2"].unattended == ""
