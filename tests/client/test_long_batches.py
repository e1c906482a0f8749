"""A worker that takes longer than its lease keeps it while it lives, up to a limit; past that its loop goes on without
the batch."""

from __future__ import annotations

import asyncio
import logging

import pytest

import transferqueue as tq
from transferqueue.errors import LeaseExpired, UsageError

CLOCK = tq.Task("clock", needs=["tick"], lease_s=0.12, time_limit_s=0.12)
"""Its one row is leased, and comes back when its lease has expired: so a test knows that time has passed at the
server."""


def pass_time(table: tq.Table, leases: int = 1) -> None:
    """Until so many leases of the clock have expired."""
    for _ in range(leases):
        silent = table.lease("clock", rows=1, timeout_s=10)
        with table.lease("clock", rows=1, timeout_s=10) as again:
            again.release()
        assert not silent.rows.size or silent.lease != again.lease


def make(queue: tq.Queue, **terms: float) -> tq.Table:
    table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"], retry=tq.Retry(attempts=3), **terms), CLOCK])  # type: ignore[arg-type]
    table.put(tick=[0])
    return table


def test_a_batch_that_takes_longer_than_its_lease_is_acked_in_time() -> None:
    with tq.connect() as queue:
        table = make(queue, lease_s=0.5)
        table.put(x=[1, 2])
        for batch in table.leases("work", rows=2, timeout_s=10):
            with batch:
                pass_time(table, 6)
            table.seal()
            table.drop([0], "over")
        tasks = table.stats().tasks
    assert (tasks["work"].done, tasks["work"].failed) == (2, 0)


@pytest.mark.parametrize("acks", ["in the block", "by leaving it"])
def test_a_batch_held_past_its_time_limit_goes_to_others_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture, acks: str
) -> None:
    with tq.connect() as queue:
        table = make(queue, lease_s=0.1, time_limit_s=0.1)
        rows = table.put(x=[1, 2])
        table.seal()
        seen: list[list[int]] = []
        with caplog.at_level(logging.WARNING, "transferqueue.client"):
            for batch in table.leases("work", rows=1, timeout_s=10):
                with batch:
                    seen.append(batch.rows.tolist())
                    if len(seen) == 1:
                        pass_time(table)
                    if acks == "in the block":
                        batch.ack()
                assert batch.ended
                if len(seen) == 3:
                    table.drop([0], "over")
        tasks = table.stats().tasks
    assert sorted(seen) == [[rows[0]], [rows[0]], [rows[1]]]
    assert (tasks["work"].done, tasks["work"].worker_deaths) == (2, 1)
    assert [record.message for record in caplog.records if "are not counted" in record.message]


def test_outside_of_a_loop_a_lost_lease_is_an_error() -> None:
    with tq.connect() as queue:
        table = make(queue, lease_s=0.1, time_limit_s=0.1)
        table.put(x=[1])
        with pytest.raises(LeaseExpired), table.lease("work", rows=1):
            pass_time(table)


def test_what_the_worker_does_with_its_batch_moves_the_limit() -> None:
    with tq.connect() as queue:
        table = make(queue, lease_s=0.1, time_limit_s=0.25)
        table.put(x=list(range(5)))
        with table.lease("work", rows=5) as batch:
            for row in batch.rows[:4]:
                pass_time(table)
                batch.ack([row])
            batch.renew()
            pass_time(table)
        assert table.stats().tasks["work"].failed == 0


def test_the_limit_of_a_task_that_another_client_declared_is_asked_for() -> None:
    with tq.connect() as queue, tq.connect(queue.address) as other:
        table = make(queue)
        late = other.table("t")
        table.add_task(tq.Task("late", needs=["x"], lease_s=0.1, time_limit_s=0.1))
        table.put(x=[1])
        batch = late.lease("late", rows=1)
        pass_time(table)
        with pytest.raises(LeaseExpired):
            batch.ack()


def test_the_same_in_an_event_loop() -> None:
    async def work() -> tuple[int, int]:
        async with tq.aconnect() as queue:
            work = tq.Task("work", needs=["x"], lease_s=0.1, time_limit_s=0.1)
            table = await queue.create_table("t", tasks=[work, CLOCK])
            await table.put(tick=[0])
            await table.put(x=[1])
            held = 0
            async for batch in table.leases("work", rows=1, timeout_s=10):
                async with batch:
                    held += 1
                    if held == 1:
                        silent = await table.lease("clock", rows=1)
                        again = await table.lease("clock", rows=1, timeout_s=10)
                        assert silent.lease != again.lease
                if held == 2:
                    await table.seal()
                    await table.drop([0], "over")
            return held, (await table.stats()).tasks["work"].done

    assert asyncio.run(work()) == (2, 1)


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match=r"time_limit_s=5 is below lease_s=10.0, for which rows are lent at least"):
        tq.Task("work", lease_s=10.0, time_limit_s=5)
    with pytest.raises(UsageError, match="time_limit_s='5' is str"):
        tq.Task("work", time_limit_s="5")  # type: ignore[arg-type]
    with tq.connect() as queue:
        table = make(queue)
        with pytest.raises(UsageError, match="time_limit_s=-1"):
            table.lease("work", rows=1, time_limit_s=-1)
        with pytest.raises(UsageError, match=r"time_limit_s=2 is below its lease of \d+ s.*give lease_s=2 too"):
            table.lease("work", rows=1, time_limit_s=2)
        with pytest.raises(UsageError, match=r"time_limit_s is 2000000000.0; at most"):
            queue.create_table("u", tasks=[tq.Task("work", time_limit_s=2e9)])


def test_a_loop_that_forgets_to_ack_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with tq.connect("embedded") as queue, caplog.at_level(logging.WARNING, "transferqueue.client"):
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
        table.put(x=[0, 1, 2])
        seen = []
        for batch in table.leases("a", rows=1, timeout_s=60):
            seen += batch.rows.tolist()
            if len(seen) == 8:
                break
        assert set(seen) <= {0, 1, 2}
        (said,) = [record.message for record in caplog.records]
        assert said.startswith('a batch of task "a" (table "t") was neither acked nor released')
        assert "batch.ack(...)" in said


def test_a_cancelled_ack_of_a_block_ends_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Whether it was carried out or not: nobody is told to work inside a block, and no row waits for the collector."""

    async def work() -> tuple[int, int, int]:
        async with tq.aconnect("embedded") as queue:
            table = await queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
            await table.put(x=[0])
            kept = []

            async def block() -> None:
                async with table.lease("a", rows=1, timeout_s=20) as batch:
                    kept.append(batch)
                    await asyncio.sleep(0)

            for steps in range(6):  # before the ack, in it, and after it
                task = asyncio.ensure_future(block())
                while not kept:  # noqa: ASYNC110  (each turn counts here)
                    await asyncio.sleep(0)
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert kept.pop().ended
                await table.put(x=[0])
            counts = (await table.stats()).tasks["a"]
            return counts.leases, counts.failed, counts.done + counts.ready

    with caplog.at_level(logging.WARNING, "transferqueue.client"):
        assert asyncio.run(work()) == (0, 0, 7)
    assert not caplog.records


def test_a_loop_that_acks_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with tq.connect("embedded") as queue, caplog.at_level(logging.WARNING, "transferqueue.client"):
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
        table.put(x=[0, 1, 2])
        table.seal()
        for batch in table.leases("a", rows=1, timeout_s=60):
            with batch:
                pass
        assert not caplog.records
