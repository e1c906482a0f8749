"""The client's part of a carrier (`transport.bulk.carriers`): moves the bytes of transfers instead of the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transferqueue.client.memory.client_transfer import ClientTransfer, FetchTransfer, RequestedColumns
from transferqueue.errors import TransferQueueError
from transferqueue.storage.elements.dtypes import U8
from transferqueue.transport.bulk import protocol as b


class MemoryCarrier(Protocol):
    """Carries columns between this process and the memory of one shard. Safe from any thread."""

    def begin_read(self) -> bool:
        """Whether the next read may use the carrier. If so, call `end_read` after it."""

    def end_read(self) -> None:
        """The read is over, whether it succeeded or failed."""

    def fetch(self, number: int, asked: RequestedColumns, check: Callable[[float], None]) -> FetchTransfer:
        """Transfer `number`, which reads these columns.

        `check` is to be called every moment with the seconds since the carrier began to move bytes; it raises if the
        transfer should end.
        """

    def read_failed(self, error: TransferQueueError) -> None:
        """A transfer of `fetch` failed, and the stream carries its bytes. Decide when `begin_read` is true again."""

    def write_buffer(self, nbytes: int) -> U8 | None:
        """Memory for a put of `nbytes` which the carrier can move. None: the stream is the better way."""

    def store(self, head: b.WriteExtent, data: memoryview, epoch: int) -> ClientTransfer:
        """A transfer that writes `data`, a buffer of `write_buffer`, as `head` names it, in the server's life `epoch`.
        The data must not change before the transfer is `done`."""

    def write_failed(self, error: TransferQueueError) -> None:
        """A transfer of `store` failed, and the stream carries its bytes. Decide when `write_buffer` gives memory
        again."""


class SessionCarrier(Protocol):
    """What a carrier keeps for one session, whose shards share it. Safe from any thread."""

    def memory(self) -> MemoryCarrier:
        """The carrier to one more shard. `UsageError` if it cannot work on this machine."""
