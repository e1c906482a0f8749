"""Puts, updates and acks of which several are in flight: in order, bounded, each once, and no error is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.limits import PIPELINE_CALLS_MAX

CALLS = 300


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as server, tq.connect(server.address) as joined:  # its socket file, as from another process
        yield joined


@pytest.fixture
def table(queue: tq.Queue) -> tq.Table:
    return queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], extra_fields=True)


def values_of(table: tq.Table, rows: list[int]) -> list[int]:
    with table.read(rows) as read:
        return read["x"].list()


def test_puts_are_made_in_order_and_each_gives_its_rows(table: tq.Table) -> None:
    with table.pipeline() as pipeline:
        promises = [pipeline.put(x=[number, number], policy_version=number) for number in range(CALLS)]
    rows = np.concatenate([promise.result() for promise in promises])
    assert rows.tolist() == list(range(2 * CALLS))
    assert values_of(table, rows.tolist()) == [number for number in range(CALLS) for _ in range(2)]
    with table.read([4]) as read:
        assert read.policy_version.tolist() == [2]


def test_no_more_is_in_flight_than_was_asked_for(table: tq.Table) -> None:
    most = 0
    with table.pipeline(calls=4) as few, table.pipeline(bytes=100) as small:
        for number in range(40):
            few.put(x=[number])
            most = max(most, len(few))
            small.put(x=[number], note=["x" * 60])
            assert len(small) <= 2
    assert 1 <= most <= 4


def test_a_result_is_waited_for_inside_the_block(table: tq.Table) -> None:
    with table.pipeline() as pipeline:
        first, second = pipeline.put(x=[1]), pipeline.put(x=[2])
        assert second.result().tolist() == [1]
        assert first.result().tolist() == [0]
        assert len(pipeline) == 0
        assert first.result().tolist() == [0]


def test_updates_and_acks_follow_puts(table: tq.Table) -> None:
    with table.pipeline() as pipeline:
        rows = pipeline.put(x=[1, 2]).result()
        pipeline.update(rows, reward=[0.5, 1.5])
        pipeline.update(rows, reward=[2.5, 3.5], overwrite=True)
    with table.lease("train", rows=2, fields=["x", "reward"]) as batch, table.pipeline() as pipeline:
        assert batch["reward"].list() == [2.5, 3.5]
        pipeline.ack(batch, rows=rows[:1], score=[1.0])
        pipeline.ack(batch, rows=rows[1:], score=[2.0])
        pipeline.drain()
        assert batch.ended
    assert table.audit().rows_done == 2


def test_a_table_of_columns_and_a_reservation_are_taken(queue: tq.Queue) -> None:
    pacing = tq.Pacing("train", batch_rows=4)
    table = queue.create_table("paced", tasks=[tq.Task("train", needs=["x"])], pacing=pacing)
    reservation = table.reserve(3)
    with table.pipeline() as pipeline:
        pipeline.put({"x": [1], "policy_version": [7]}, reservation=reservation)
        pipeline.put(x=[2], reservation=reservation)
    assert reservation.left == 1
    with table.read([0]) as read:
        assert read.policy_version.tolist() == [7]


def test_an_error_is_raised_by_its_promise_and_only_there(table: tq.Table) -> None:
    with table.pipeline() as pipeline:
        missing = pipeline.update([99], x=[1])
        later = pipeline.put(x=[1])
        with pytest.raises(tq.NotFound, match="row 99 was never put"):
            missing.result()
        assert later.result().tolist() == [0]
        pipeline.put(x=[2])
    with pytest.raises(tq.NotFound, match="row 99"):
        missing.result()


def test_an_error_that_nobody_saw_is_raised_by_the_next_call_or_at_the_end(table: tq.Table) -> None:
    with table.pipeline() as pipeline:
        pipeline.update([99], x=[1])
        after = pipeline.put(x=[1])
        after.result()
        with pytest.raises(tq.NotFound, match="row 99"):
            pipeline.put(x=[2])
        pipeline.put(x=[3])
    assert table.stats().rows_live == 2
    with pytest.raises(tq.NotFound, match="row 98") as raised, table.pipeline() as pipeline:  # noqa: PT012  (also the end of the block may raise)
        pipeline.update([98], x=[1])
        pipeline.update([97], x=[1])
        pipeline.put(x=[4])
    assert ["row 97" in note for note in raised.value.__notes__] == [True]
    assert table.stats().rows_live == 3, "those after the refused ones are carried out"


def test_what_is_wrong_before_it_is_sent_is_raised_at_once(table: tq.Table) -> None:
    with table.pipeline() as pipeline:
        with pytest.raises(tq.SchemaError, match="has 2 rows"):
            pipeline.put(x=[1], y=[1, 2])
        with pytest.raises(tq.UsageError, match="would change nothing"):
            pipeline.update([0])
        pipeline.put(x=[1])


def test_an_exception_that_leaves_the_block_keeps_its_place(table: tq.Table) -> None:
    with pytest.raises(ValueError, match="mine") as raised, table.pipeline() as pipeline:  # noqa: PT012  (also the end of the block may raise)
        pipeline.update([99], x=[1])
        put = pipeline.put(x=[1])
        raise ValueError("mine")
    assert "NotFound: row 99" in raised.value.__notes__[0]
    assert put.result().tolist() == [0]


def test_an_interrupt_waits_for_nothing_and_says_so(table: tq.Table) -> None:
    with pytest.raises(KeyboardInterrupt), table.pipeline() as pipeline:  # noqa: PT012  (also the end of the block may raise)
        put = pipeline.put(x=[1])
        raise KeyboardInterrupt
    with pytest.raises(
        tq.Unreachable, match=r"answer to Put was not waited for.*whether it was carried out is not known"
    ):
        put.result()
    assert table.put(x=[2]).tolist() == [1], "the session goes on"


def test_a_lost_connection_changes_neither_order_nor_number(queue: tq.Queue, table: tq.Table) -> None:
    channel = queue._client.connection._io.channel
    promises = []
    with table.pipeline() as pipeline:
        for number in range(CALLS):
            promises.append(pipeline.put(x=[number]))
            if number % 50 == 25:
                stream = channel._stream  # type: ignore[attr-defined]
                if stream is not None:
                    with suppress(OSError):  # the connection has just been made anew
                        stream.socket.shutdown(socket.SHUT_RDWR)
    rows = [int(promise.result()[0]) for promise in promises]
    assert rows == list(range(CALLS))
    assert values_of(table, rows) == list(range(CALLS))


def test_a_pipeline_is_used_inside_its_block_and_within_bounds(table: tq.Table) -> None:
    with pytest.raises(tq.UsageError, match=r"inside its block.*with table\.pipeline"):
        table.pipeline().put(x=[1])
    with table.pipeline() as over:
        pass
    with pytest.raises(tq.UsageError, match="inside its block"):
        over.update([0], x=[1])
    with pytest.raises(tq.UsageError, match="calls=0 is out of range"):
        table.pipeline(calls=0)
    with pytest.raises(tq.UsageError, match=f"is above {PIPELINE_CALLS_MAX}"):
        table.pipeline(calls=PIPELINE_CALLS_MAX + 1)
    with pytest.raises(tq.UsageError, match="many"):
        table.pipeline(bytes="many")


def test_event_loops_have_the_same() -> None:
    async def work() -> None:
        async with tq.aconnect() as queue:
            table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            async with table.pipeline(calls=8) as pipeline:
                promises = [await pipeline.put(x=[number]) for number in range(CALLS)]
                assert len(pipeline) <= 8
            rows = [int((await promise.result())[0]) for promise in promises]
            assert rows == list(range(CALLS))
            with pytest.raises(tq.NotFound, match="row 999"):
                async with table.pipeline() as pipeline:
                    await pipeline.update([999], x=[1])
            async with await table.lease("train", rows=2) as batch, table.pipeline() as pipeline:
                await pipeline.ack(batch)
            assert batch.ended

    asyncio.run(work())


def test_a_cancelled_task_waits_for_nothing() -> None:
    async def work() -> None:
        async with tq.aconnect() as queue:
            table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=1))
            await table.put(x=[1])
            started = asyncio.Event()

            async def produce() -> None:
                async with table.pipeline() as pipeline:
                    await pipeline.put(x=[2], timeout_s=60)
                    started.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(produce())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await table.stats()).rows_live == 1

    asyncio.run(work())
