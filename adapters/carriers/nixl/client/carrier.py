"""The client's part of the carrier (`client.memory.carrier`): which transfer reads, which writes, and from when on
after a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from transferqueue.adapters.carriers.nixl.client.one_sided import OneSidedMemory, ShardReader
from transferqueue.adapters.carriers.nixl.client.pulled_store import PulledStore, ShardWriter
from transferqueue.adapters.carriers.nixl.client.ranged_fetch import RangedFetch
from transferqueue.client.memory.client_transfer import RequestedColumns
from transferqueue.errors import TransferQueueError
from transferqueue.storage.elements.dtypes import U8
from transferqueue.transport.bulk import protocol as b


class OneSidedCarrier:
    """The carrier of one shard. Reads write into `received`; the shard may read `sent`. Safe from any thread."""

    def __init__(
        self, received: OneSidedMemory, sent: OneSidedMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reader: Final = ShardReader(received, clock)
        """Reads the shard's memory."""
        self.writer: Final = ShardWriter(sent, clock)
        """Lets the shard read put values."""

    def begin_read(self) -> bool:
        """See `MemoryCarrier`."""
        return self.reader.begin()

    def end_read(self) -> None:
        """See `MemoryCarrier`."""
        self.reader.end()

    def fetch(self, number: int, asked: RequestedColumns, check: Callable[[float], None]) -> RangedFetch:
        """See `MemoryCarrier`."""
        return RangedFetch(number, asked, self.reader, check)

    def read_failed(self, error: TransferQueueError) -> None:
        """See `MemoryCarrier`."""
        self.reader.refused(error)

    def write_buffer(self, nbytes: int) -> U8 | None:
        """See `MemoryCarrier`."""
        return self.writer.take(nbytes)

    def store(self, head: b.WriteExtent, data: memoryview, epoch: int) -> PulledStore:
        """See `MemoryCarrier`."""
        return PulledStore(head, data, epoch, self.writer)

    def write_failed(self, error: TransferQueueError) -> None:
        """See `MemoryCarrier`."""
        self.writer.refused(error)


class OneSidedSession:
    """Memory that the shards of one session share, of two kinds: reads write into one, shards read the other. `make`
    makes either. `check` is called once before; `UsageError` if this machine cannot."""

    def __init__(self, make: Callable[[], OneSidedMemory], check: Callable[[], object]) -> None:
        self._make, self._check = make, check
        self._guard = threading.Lock()
        self._memories: tuple[OneSidedMemory, OneSidedMemory] | None = None

    def memory(self) -> OneSidedCarrier:
        """See `SessionCarrier`."""
        with self._guard:
            if self._memories is None:
                self._check()
                self._memories = self._make(), self._make()
            return OneSidedCarrier(*self._memories)
