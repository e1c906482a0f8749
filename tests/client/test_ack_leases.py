"""Several batches acked in one commit: all of them, or none, and the error says which are over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import transferqueue as tq
from transferqueue.errors import BatchEnded, LeaseExpired, UsageError

TASKS = [tq.Task("train", needs=["x"]), tq.Task("log", needs=["x"])]


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as queue:
        yield queue


@pytest.fixture
def table(queue: tq.Queue) -> tq.Table:
    return queue.create_table("t", tasks=TASKS)


def leased(table: tq.Table, *rows: int) -> list[tq.Batch]:
    table.put(x=list(range(sum(rows))))
    return [table.lease("train", rows=count, timeout_s=5) for count in rows]


def held(table: tq.Table) -> int:
    return int(table.stats().tasks["train"].leased)


def test_batches_of_two_tasks_are_refused(table: tq.Table) -> None:
    batches = leased(table, 2)
    with pytest.raises(
        UsageError, match=r"batches of tasks log, train are acked together; ack the batches of one task"
    ):
        table.ack([*batches, table.lease("log", rows=1)])
    assert held(table) == 2


def test_no_batches_and_one_twice_are_refused(table: tq.Table) -> None:
    batches = leased(table, 2)
    with pytest.raises(UsageError, match="an ack of no batches"):
        table.ack([])
    with pytest.raises(UsageError, match="2 batches are acked, and one of them is given twice"):
        table.ack(batches * 2)
    assert held(table) == 2


def test_a_batch_of_another_table_is_refused(queue: tq.Queue, table: tq.Table) -> None:
    other = queue.create_table("other", tasks=TASKS)
    batches = leased(table, 1)
    with pytest.raises(UsageError, match=r'of table "t" is acked by a handle of table "other"'):
        other.ack(batches)
    assert held(table) == 1


def test_a_batch_that_was_ended_is_named_and_the_others_stay_held(table: tq.Table) -> None:
    batches = leased(table, 1, 1, 1)
    batches[1].release()
    with pytest.raises(
        BatchEnded, match=rf"1 of 3 batches have ended \(leases {batches[1].lease}\), so none was acked"
    ):
        table.ack(batches)
    assert held(table) == 2


def test_a_batch_that_is_lost_is_named_and_the_others_can_be_acked(table: tq.Table) -> None:
    early = leased(table, 1)
    table.rollback(-1, task="train")
    batches = [*leased(table, 2), *early, *leased(table, 3)]
    with pytest.raises(LeaseExpired, match=rf"1 of 3 leases have ended.*lease {batches[1].lease} .*rolled back"):
        table.ack(batches, step=4)
    assert [batch.ended for batch in batches] == [False, True, False]
    assert held(table) == 5
    assert table.ack([batch for batch in batches if not batch.ended], step=4) == 5
    assert table.checkpointed(4, task="train") == 5


def test_a_batch_whose_rows_were_dropped_counts_none_of_them(table: tq.Table) -> None:
    batches = leased(table, 2, 1, 3)
    table.drop(batches[1].rows, "bad")
    assert table.ack(batches, step=4) == 5
    assert all(batch.ended for batch in batches)
    assert table.checkpointed(4, task="train") == 5


def test_a_rollback_ends_all_of_them(table: tq.Table) -> None:
    batches = leased(table, 1, 1)
    table.rollback(-1, task="train")
    with pytest.raises(LeaseExpired, match=r"2 of 2 leases have ended.*rolled back to step -1"):
        table.ack(batches)
    with pytest.raises(LeaseExpired, match="2 of 2 batches have ended"):
        table.ack(batches)


def test_rows_dropped_meanwhile_are_left_out(table: tq.Table) -> None:
    batches = leased(table, 2, 2)
    batches[0].ack(batches[0].rows[:1])
    table.drop(batches[1].rows[:1], "bad")
    assert table.ack(batches, step=1) == 2
    assert all(batch.ended for batch in batches)
    assert table.audit().balanced


def test_rows_come_again_after_a_rollback(table: tq.Table) -> None:
    batches = leased(table, 2, 2)
    rows = [row for batch in batches for row in batch.rows.tolist()]
    assert table.ack(batches, step=3) == 4
    assert table.rollback(2, task="train") == 4
    assert table.lease("train", rows=4, timeout_s=5).rows.tolist() == rows


def test_the_same_in_an_event_loop() -> None:
    async def work() -> None:
        async with tq.aconnect() as queue:
            table = await queue.create_table("t", tasks=TASKS)
            await table.put(x=[1, 2, 3])
            batches = [await table.lease("train", rows=1), await table.lease("train", rows=2)]
            assert await table.ack(batches) == 3

    asyncio.run(work())
