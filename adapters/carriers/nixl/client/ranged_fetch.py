"""A read whose bytes this process fetches itself, range by range, from the registered memory of a shard
(docs/decisions/one-sided.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from transferqueue.adapters.carriers.nixl.agent import CopiedRange
from transferqueue.adapters.carriers.nixl.client.one_sided import ShardReader
from transferqueue.client.memory.client_transfer import FetchTransfer, RequestedColumns
from transferqueue.errors import Corruption
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk import protocol as b


class RangedFetch(FetchTransfer):
    """Reads columns of rows from one shard one-sided, through `reader`. `check` is as in `ShardReader.read`."""

    def __init__(
        self, number: int, asked: RequestedColumns, reader: ShardReader, check: Callable[[float], None]
    ) -> None:
        super().__init__(number, asked, reader.memory.buffers)
        self._reader: Final = reader
        self._check: Final = check
        self._open: deque[tuple[int, memoryview]] = deque()  # with their addresses
        self._wanted: list[tuple[CopiedRange, memoryview, bytes]] = []

    def _request(self) -> b.ReadColumns:
        agent, generation, regions = self._reader.loaded
        asked = msgspec.structs.asdict(super()._request())
        return b.ReadRanges(**asked, agent=agent, generation=generation, regions=regions)

    def _owe(self, memory: memoryview) -> None:
        self._open.append((memory_address(np.frombuffer(memory, np.uint8)), memory))

    def _place(self, frame: b.ReadFrame | b.RangesFrame) -> None:
        """Give each range of a frame its place: the next bytes of the parts that have begun."""
        if isinstance(frame, b.ReadFrame):
            raise Corruption("a read of ranges was answered with bytes alone")
        self._wanted = []
        for named in frame.ranges:
            address, into = self._take(named.nbytes)
            if named.address:
                self._wanted.append((CopiedRange(address, named.address, named.nbytes), into, named.digest))
            else:
                self._due.append(into)

    def _take(self, nbytes: int) -> tuple[int, memoryview]:
        """The next bytes, and where they are."""
        if not nbytes or not self._open or nbytes > len(self._open[0][1]):
            raise Corruption(f"a range of {nbytes} bytes came that belongs to no part")
        address, into = self._open.popleft()
        if nbytes < len(into):
            self._open.appendleft((address + nbytes, into[nbytes:]))
        return address, into[:nbytes]

    def receive(self) -> list[b.Message]:
        """A frame has arrived whole: read its ranges, and compare their checksums."""
        frame = self._arriving
        if isinstance(frame, b.RangesFrame):
            if self._due:
                raise Corruption(f"a frame of ranges came without {sum(map(len, self._due))} bytes of its content")
            self._read(frame)
        return super().receive()

    def _frees(self, frame: b.ReadFrame | b.RangesFrame) -> bool:
        """The shard may have staged the rows of the frame, and reuses that memory."""
        return isinstance(frame, b.RangesFrame) and any(named.address for named in frame.ranges)

    def _read(self, frame: b.RangesFrame) -> None:
        if not self._wanted:
            return
        buffers = [block.memory for block in self.landed.values()]
        self._reader.read(frame, [copied for copied, _, _ in self._wanted], buffers, self._check)
        for copied, into, digest in self._wanted:
            if b.digest((into,)) != digest:
                raise Corruption(
                    f"{copied.nbytes} bytes that were read from a shard's memory do not match their checksum: they "
                    "changed there, or on the way"
                )
        self._wanted = []

    def _end(self) -> None:
        if self._open:
            missing = sum(len(memory) for _, memory in self._open)
            raise Corruption(f"a read of ranges ended {missing} bytes before its parts did")
        super()._end()
