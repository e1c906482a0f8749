"""A table that is to be dropped only when it has no rows."""

from __future__ import annotations

import asyncio

import pytest

import transferqueue as tq
from transferqueue.errors import NotFound, UsageError


def test_a_table_with_rows_is_not_dropped_as_an_empty_one() -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", retention=tq.Manual())
        rows = table.put(x=[1, 2])
        with pytest.raises(UsageError, match='table "t" has 2 rows and is dropped only when empty; delete them first'):
            queue.drop_table("t", empty=True)
        assert table.read().rows.tolist() == rows.tolist()
        table.delete(rows)
        queue.drop_table("t", empty=True)
        with pytest.raises(NotFound):
            queue.drop_table("t", empty=True)


def test_the_same_of_an_event_loop() -> None:
    async def main() -> None:
        async with await tq.aconnect() as queue:
            table = await queue.create_table("t")
            await table.put(x=[1])
            with pytest.raises(UsageError, match="dropped only when empty"):
                await queue.drop_table("t", empty=True)
            await queue.drop_table("t")

    asyncio.run(main())
