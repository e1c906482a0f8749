"""The loader for threads: a task's batches, fetched while the ones before them are computed with."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from transferqueue.client.handles.prefetch import Prefetcher
from transferqueue.client.session.operation_runner import trimmed
from transferqueue.client.sync.batch import Batch
from transferqueue.errors import EndOfTable, Forked, TransferQueueError, UsageError
from transferqueue.storage.elements.process_bound import ProcessBound

if TYPE_CHECKING:
    pass


class Loader(ProcessBound):
    """Batches in order, fetched ahead, until the table is sealed and drained. Made by `Table.loader`.

    An iterator and a context manager. Each batch is the caller's to ack or release. A thread of its own fetches; it
    ends with the last batch, with `close`, or when the loader is collected. ``next`` may be called from any thread.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        ...     rows = table.put(x=[1, 2, 3])
        ...     table.seal()
        ...     with table.loader("train", rows=2, prefetch=1) as loader:
        ...         for batch in loader:
        ...             with batch:
        ...                 print(batch["x"].list())
        [1, 2]
        [3]
    """

    _remedy: ClassVar[str] = "pass queue.address and names, and make the loader where the batches are used"

    def __init__(self, ahead: Prefetcher[Batch]) -> None:
        self._ahead, self._pid = ahead, os.getpid()
        self._guard = threading.Lock()
        self._closed = self._drained = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(self._loop, ahead), name=f"transferqueue {ahead.name}", daemon=True
        )
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, self._loop, self._pid)
        self._stop.atexit = False  # the end of the session gives everything back

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch; waits up to `timeout_s` from now. An interrupt takes nothing and leaves all usable."""
        with self._guard:
            self._check()
            taken = asyncio.run_coroutine_threadsafe(self._ahead.take(), self._loop)
        try:
            return taken.result()
        except EndOfTable:
            self._drained = True
            self.close()
            raise StopIteration from None
        except TransferQueueError as error:
            raise trimmed(error) from error.__cause__
        except BaseException:
            taken.cancel()
            raise

    def close(self) -> None:
        """Give back the batches that were not taken, not as failed, and end the thread.

        A second call, or one in a forked child, does nothing.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2, 3])
            ...     loader = table.loader("train", rows=1)
            ...     next(loader).ack()
            ...     loader.close()
            ...     figures = table.stats()
            1
            >>> figures.rows_live
            2
        """
        with self._guard:
            self._closed = True
        self._stop()
        if os.getpid() == self._pid:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise Forked(
                f"the {self._ahead.name} was made by process {self._pid} and is used in its forked child "
                f"{os.getpid()}; connect there and make one there"
            )
        if self._drained:
            raise StopIteration
        if self._closed:
            raise UsageError(f"the {self._ahead.name} is closed; make another one")


def _run(loop: asyncio.AbstractEventLoop, ahead: Prefetcher[Batch]) -> None:
    """The thread: fetches until the loop is stopped, then gives back what was not taken."""
    try:
        loop.run_forever()
        loop.run_until_complete(ahead.aclose())
        if tasks := asyncio.all_tasks(loop):  # calls of `next` that were interrupted
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Runs in a finalizer too: takes no lock and waits for nothing."""
    if os.getpid() == pid:
        loop.call_soon_threadsafe(loop.stop)
