"""The shard's part of a carrier (`transport.bulk.carriers`): moves the bytes of transfers instead of the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transferqueue.server.shards.frame_digests import FrameDigests
from transferqueue.server.shards.shard_transfer import KnownSums, ReadTransfer, SteppedWrite
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.columns.ranges import Room
from transferqueue.storage.memory.backing import Backing
from transferqueue.transport.bulk import protocol as b


class ShardCarrier(Protocol):
    """Carries columns between the arena of one shard and its clients. Used by the thread of the bulk endpoint."""

    def read(
        self,
        read: b.ReadRanges,
        backing: Backing,
        tickets: TicketIssuer,
        sums: KnownSums,
        now: float,
        room: Room,
    ) -> ReadTransfer:
        """A transfer that names ranges of memory to the client, which reads them. Arguments and errors are those of
        `ReadTransfer`."""

    def write(
        self, write: b.WriteRanges, backing: Backing, tickets: TicketIssuer, digests: FrameDigests, now: float
    ) -> SteppedWrite:
        """A transfer that reads the client's memory. Arguments and errors are those of `ExtentTransfer`; `Unreachable`
        if the stream should carry the bytes for now."""

    def progress(self) -> None:
        """Serve the clients that read now (`ReadTransfer.needs_progress`). `Unreachable` if that fails."""

    def keep_only(self, serves: Callable[[int], bool]) -> None:
        """Forget the sessions that are over."""

    def close(self) -> None:
        """Free everything. No transfer is under way any more."""
