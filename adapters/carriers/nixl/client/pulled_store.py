"""A write whose bytes the shard reads itself out of registered memory of this process (docs/decisions/one-sided.md).

1. Put values are written into a registered buffer, which the put owns until the shard has acknowledged all of it or the
   write was abandoned. A late read of a reused buffer delivers bytes that do not match their checksums, and the shard
   drops them; it never writes here. So these buffers need no quarantine.
2. The metadata of these buffers is that of an agent of its own: a shard that has it reaches no buffer into which this
   process receives.
3. After a failure the stream carries the bytes, and for `PAUSE_S` everything that is put to that shard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import numpy as np

from transferqueue.adapters.carriers.nixl.client.one_sided import PAUSE_S, OneSidedMemory
from transferqueue.client.memory.client_transfer import WritingTransfer
from transferqueue.errors import Impossible, TransferQueueError, Unreachable, UsageError
from transferqueue.limits import FRAME_BYTES, KIB
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk import protocol as b

_log: Final = logging.getLogger("transferqueue.client")
PULLED_BYTES_MIN: Final = 256 * KIB
"""Less is one message of the stream."""
SERVE_S: Final = 0.001
"""How often this process makes progress for the shard's reads: connections need that, and over TCP every read."""
_ASK_EVERY: Final = 1000
"""After so many of these moments without an answer the shard is asked whether it still knows of the write."""
_NONE_TOLD: Final = (0, (0, 0))


class ShardWriter:
    """Lets one shard read values in registered `memory`. Safe from any thread."""

    def __init__(self, memory: OneSidedMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory: Final = memory
        self._clock = clock
        self._not_before = 0.0
        self._told = _NONE_TOLD
        self.bytes_pulled = 0
        """Bytes that the shard has read and stored so far."""

    def take(self, nbytes: int) -> U8 | None:
        """A registered buffer for a put of `nbytes`. None: it had better cross over the stream."""
        if nbytes < PULLED_BYTES_MIN or self._clock() < self._not_before:
            return None
        try:
            return self.memory.buffers.take(nbytes)
        except (Unreachable, UsageError) as error:
            self.refused(error)
            return None

    def refused(self, error: TransferQueueError) -> None:
        """A write failed: use the stream for a while, or, if the shard takes none of this kind, for good."""
        served = not isinstance(error, Impossible)
        self._told = _NONE_TOLD
        self._not_before = self._clock() + PAUSE_S if served else float("inf")
        (_log.warning if served else _log.info)("values cross over the stream, not one-sided: %s", error)

    def description(self, epoch: int) -> tuple[tuple[int, int], bytes]:
        """Generation and regions of the registered memory, and its metadata; empty if a shard of this life of the
        server has it."""
        version = self.memory.buffers.version
        return version, b"" if self._told >= (epoch, version) else self.memory.agent.metadata()

    def stored(self, epoch: int, version: tuple[int, int], nbytes: int) -> None:
        """A write succeeded, so the shard knows the memory registered then."""
        self._told = max(self._told, (epoch, version))
        self.bytes_pulled += nbytes


class PulledStore(WritingTransfer):
    """Has the shard read `data`, a registered buffer of `writer`, to where `head` names. The bytes must not change
    before it is `done`."""

    serve_s = SERVE_S

    def __init__(self, head: b.WriteExtent, data: memoryview, epoch: int, writer: ShardWriter) -> None:
        self._writer, self._epoch, self._nbytes = writer, epoch, len(data)
        self._version, metadata = writer.description(epoch)
        self._served = 0
        first = b.WriteRanges(
            **msgspec.structs.asdict(head),
            agent=writer.memory.agent.name,
            generation=self._version[0],
            regions=self._version[1],
            metadata=metadata,
            ranges=[],
        )
        super().__init__(head.transfer, _frames(first, data))

    def serve(self) -> bool:
        """Make progress for the shard's reads. Whether the shard should be asked now."""
        self._writer.memory.agent.progress()
        self._served += 1
        return self._served % _ASK_EVERY == 0

    def expect(self, head: bytes, nbytes: int) -> None:
        """The shard says which frames it has stored. When all are, it knows the registered memory."""
        was_done = self.done
        super().expect(head, nbytes)
        if self.done and not was_done:
            self._writer.stored(self._epoch, self._version, self._nbytes)


def _frames(head: b.WriteRanges, data: memoryview) -> Iterator[b.Message]:
    address = memory_address(np.frombuffer(data, np.uint8))
    for number, start in enumerate(range(0, len(data), b.RANGES_FRAME_BYTES)):
        ranges = [
            b.ByteRange(address + at, len(piece), b.digest((piece,)))
            for at in range(start, min(start + b.RANGES_FRAME_BYTES, len(data)), FRAME_BYTES)
            for piece in (data[at : at + FRAME_BYTES],)
        ]
        if number:
            yield b.message(b.WriteRangesFrame(head.transfer, number, ranges))
        else:
            yield b.message(msgspec.structs.replace(head, ranges=ranges))
