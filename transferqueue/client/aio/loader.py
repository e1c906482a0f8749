"""The loader for event loops: a task's batches, fetched while the ones before them are computed with."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import ClassVar, Self

from transferqueue.client.aio.batch import AsyncBatch
from transferqueue.client.handles.prefetch import Prefetcher
from transferqueue.errors import EndOfTable
from transferqueue.storage.elements.process_bound import ProcessBound


class AsyncLoader(ProcessBound):
    """Batches in order, fetched ahead, until the table is sealed and drained. Made by `AsyncTable.loader`.

    ``async for batch in table.loader(...): async with batch: ...``. Fetching begins with the first batch that is asked
    for. It ends with the last batch, with `aclose` (or the end of its ``async with``), or when the loader is collected.

    Example:
        >>> import transferqueue as tq
        >>> async with tq.aconnect("embedded") as queue:
        ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        ...     rows = await table.put(x=[1, 2, 3])
        ...     await table.seal()
        ...     async with table.loader("train", rows=2, prefetch=1) as loader:
        ...         async for batch in loader:
        ...             async with batch:
        ...                 print(batch["x"].list())
        [1, 2]
        [3]
    """

    _remedy: ClassVar[str] = "pass queue.address and names, and make the loader where the batches are used"

    def __init__(self, ahead: Prefetcher[AsyncBatch]) -> None:
        self._ahead = ahead
        weakref.finalize(self, ahead.abandon).atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncBatch:
        """The next batch; waits up to `timeout_s` from now. A cancelled wait takes nothing."""
        try:
            return await self._ahead.take()
        except EndOfTable:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Give back the batches that were not taken, not as failed, and end the fetching.

        A second call does nothing.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = await table.put(x=[1, 2, 3])
            ...     loader = table.loader("train", rows=1)
            ...     async for batch in loader:
            ...         await batch.ack()
            ...         break
            ...     await loader.aclose()
            ...     figures = await table.stats()
            1
            >>> figures.rows_live
            2
        """
        await self._ahead.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
