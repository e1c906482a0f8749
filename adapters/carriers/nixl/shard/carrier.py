"""The shard's part of the carrier (`server.shards.carrier`): which transfer reads, and which writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from transferqueue.adapters.carriers.nixl.shard.client_memory import ClientMemory
from transferqueue.adapters.carriers.nixl.shard.pulled_write import PulledWrite
from transferqueue.adapters.carriers.nixl.shard.ranged_read import RangedRead
from transferqueue.adapters.carriers.nixl.shard.registered_arena import RegisteredArena
from transferqueue.server.shards.frame_digests import FrameDigests
from transferqueue.server.shards.shard_transfer import KnownSums
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.columns.ranges import Room
from transferqueue.storage.memory.backing import Backing
from transferqueue.transport.bulk import protocol as b


class OneSidedShard:
    """The shard's part of the carrier. Clients read `registered`, the arena; this reads the memory of `clients`."""

    def __init__(self, registered: RegisteredArena, clients: ClientMemory) -> None:
        self.registered: Final = registered
        self.clients: Final = clients

    def read(
        self,
        read: b.ReadRanges,
        backing: Backing,
        tickets: TicketIssuer,
        sums: KnownSums,
        now: float,
        room: Room,
    ) -> RangedRead:
        """See `ShardCarrier`."""
        return RangedRead(read, backing, tickets, sums, now, room, self.registered)

    def write(
        self, write: b.WriteRanges, backing: Backing, tickets: TicketIssuer, digests: FrameDigests, now: float
    ) -> PulledWrite:
        """See `ShardCarrier`."""
        self.clients.check_usable(write.session, now)
        return PulledWrite(write, backing, tickets, digests, now, self.clients)

    def progress(self) -> None:
        """See `ShardCarrier`. Clients that connect need it, and over TCP every read."""
        self.registered.agent.progress()

    def keep_only(self, serves: Callable[[int], bool]) -> None:
        """See `ShardCarrier`."""
        self.clients.keep_only(serves)

    def close(self) -> None:
        """See `ShardCarrier`."""
        self.registered.close()
        self.clients.close()
