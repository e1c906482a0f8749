"""What a task declares in `gives` comes with its ack: a worker that forgets it, or misnames it, learns it and loses no
row."""

from __future__ import annotations

import asyncio

import pytest

import transferqueue as tq
from transferqueue.errors import Impossible, UsageError

TASKS = [
    tq.Task("reward", needs=["x"], gives=["rewards"], retry=tq.Retry(attempts=3)),
    tq.Task("train", needs=["x", "rewards"]),
]


def test_a_misnamed_result_is_refused_with_the_name_meant_and_the_rows_come_again() -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=TASKS)
        rows = table.put(x=[1, 2])
        with (
            pytest.raises(UsageError, match="did you mean 'rewards'"),
            table.lease("reward", rows=2) as batch,
        ):
            batch.ack(reward=[0.5, 0.5])
        with table.lease("reward", rows=2, timeout_s=5) as batch:
            assert batch.rows.tolist() == rows.tolist()
            batch.ack(rewards=[0.5, 0.5])
        assert "reward" not in queue.table("t").fields
        assert len(table.lease("train", rows=2, timeout_s=5)) == 2


def test_a_clean_exit_without_results_is_refused_and_gives_the_rows_back_as_failed() -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=TASKS)
        table.put(x=[1, 2, 3])
        with table.lease("reward", rows=3) as batch:
            batch.ack(batch.rows[:1], rewards=[1.0])
            with pytest.raises(UsageError, match='has no "rewards"'):
                batch.ack()
            batch.drop("no_result", batch.rows[1:2])
            batch.ack(rewards=[3.0])
        table.put(x=[4])
        with pytest.raises(UsageError, match=r'row 3 by task "reward".* has no "rewards"') as refused:  # noqa: SIM117
            with table.lease("reward", rows=1) as batch:
                pass
        assert refused.value.__notes__ == [
            "the block of this batch has ended, so its rows go back as failed; ack them inside the block"
        ]
        assert batch.ended
        assert queue.inspect("t", 3).tasks["reward"].attempts == 1
        assert table.lease("reward", rows=1, timeout_s=5).rows.tolist() == [3]
        assert table.audit().dropped == {"no_result": 1}


def test_the_same_in_an_event_loop() -> None:
    async def work() -> None:
        async with tq.aconnect() as queue:
            table = await queue.create_table("t", tasks=TASKS)
            await table.put(x=[1])
            with pytest.raises(UsageError, match='has no "rewards"') as refused:
                async with table.lease("reward", rows=1):
                    pass
            assert "go back as failed" in refused.value.__notes__[0]
            async with table.lease("reward", rows=1, timeout_s=5) as batch:
                await batch.ack(rewards=[1.0])

    asyncio.run(work())


def test_leases_of_a_sealed_table_end_with_an_error_where_rows_are_left_that_nobody_completes() -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[TASKS[0], tq.Task("log", needs=["x"])])
        table.put(x=[1, 2])
        table.lease("reward", rows=2).ack()
        table.update([0], rewards=[1.0])
        table.add_task(TASKS[1])
        table.seal()
        trained = []
        with pytest.raises(Impossible, match='no task will give "rewards" of 1 row'):  # noqa: PT012
            for batch in table.leases("train", rows=2, timeout_s=30):
                with batch:
                    trained += batch.rows.tolist()
        assert trained == [0]
