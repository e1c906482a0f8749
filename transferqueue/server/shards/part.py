"""The part of a coordinator by which bytes travel: clients that do not map its memory, and shards on other hosts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from transferqueue.ledger.effects import WakeKey
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.rows.blocks import ExtentState
from transferqueue.server.memory.lending import Lending
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.server.parts import Handler, Part
from transferqueue.server.sessions.session_table import OpenSession, SessionTable
from transferqueue.server.shards.block_fetches import BlockFetches
from transferqueue.server.shards.copies import CopyOrders
from transferqueue.server.shards.registry import ShardRegistry
from transferqueue.server.shards.remote_shard import RemoteShard
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import ShardStats

_WAITS: Final[dict[type, str]] = {
    m.PollCommands: "there are no orders",
    m.TakeCopies: "there is nothing for this shard to copy",
}


class Shards(Part):
    """The remote shards of a coordinator, their orders, and the tickets of all its memory.

    Args:
        wake: makes the requests due that wait on a key.
        tickets: of the coordinator's own memory; None: new ones.
    """

    def __init__(
        self,
        ledger: Ledger,
        lending: Lending,
        sessions: SessionTable,
        wake: Callable[[WakeKey], None],
        tickets: TicketIssuer | None = None,
    ) -> None:
        self.tickets: Final = tickets or TicketIssuer()
        self.bulk_port = 0
        """The port of the coordinator's own memory; 0: it does not listen."""
        self.bulk_certificate = ""
        """Fingerprint of the certificate there; "": its connections are not encrypted."""
        self.bulk_sent: Callable[[], dict[str, int]] = dict
        """The bytes of reads there, by carrier."""
        self.bulk_received: Callable[[], dict[str, int]] = dict
        self._ledger, self._lending, self._sessions = ledger, lending, sessions
        self.shards: Final = ShardRegistry(
            lending, self.tickets, ledger.epoch, last=ledger.last_shard, wake=wake, live_set=self._live_set
        )
        self.fetches: Final = BlockFetches(ledger, lending, self.shards, wake)
        """Fetches the blocks of a snapshot from remote shards."""
        self.record_fetches: Final = BlockFetches(ledger, lending, self.shards, wake, reader="record", takes_up=False)
        """Fetches those of rows that are recorded."""
        self._copies: Final = CopyOrders(ledger, lending, self.shards, (self.fetches, self.record_fetches))

    # ------------------------------------------------------------ sessions

    def admit(self, hello: m.Hello, *, keyed: bool) -> m.Hello:
        """See `Part`."""
        return self.shards.assign_number(hello, keyed=keyed)

    def session_opened(self, session: OpenSession) -> None:
        """See `Part`."""
        self.shards.join(session)

    def sessions_resumed(self, granted: Collection[ExtentState]) -> None:
        """See `Part`. A shard whose session continues has its extents. Tickets of the earlier run are honoured."""
        sessions = list(self._sessions)
        numbers = [session.number for session in sessions]
        for session in sessions:
            if (offer := session.hello.shard) is not None:
                extents = {one.id: (one.offset, one.nbytes) for one in granted if one.shard == offer.number}
                self.shards.join(session, extents, numbers)
        remote = [session.number for session in sessions if session.remote]
        self.tickets.resume(remote, [extent.id for extent in granted if extent.shard == SHARD])

    def session_ends(self, session: OpenSession, now: float) -> None:
        """See `Part`. The tickets of the session end."""
        if self.shards.close(session) and session.hello.shard is not None:
            for fetches in (self.fetches, self.record_fetches):
                fetches.shard_gone(session.hello.shard.number, session.number, now)

    def session_ended(self, hello: m.Hello, now: float) -> None:
        """See `Part`. The bytes of its shard are lost."""
        if hello.shard is not None:
            self._ledger.shard_lost(hello.shard.number, now)

    def welcome(self) -> Mapping[str, Any]:
        """See `Part`."""
        return {"bulk_port": self.bulk_port, "bulk_certificate": self.bulk_certificate}

    def issue(self, session: OpenSession, reply: m.Reply) -> m.Reply:
        """See `Part`. Adds tickets."""
        return self.shards.issue(session, reply) if session.remote or self.shards.remote else reply

    # ------------------------------------------------------------ requests

    def requests(self) -> Mapping[type[m.Request], Handler]:
        """See `Part`."""
        return {
            m.ListShards: lambda session, call, request, now: self.shards.list_for(session),
            m.Drain: lambda session, call, request, now: self.shards.drain(request.shard),
            m.PollCommands: lambda session, call, request, now: self.shards.shard_of(session).commands(request, now),
            m.TakeCopies: lambda session, call, request, now: self._copies.take(session, request, now),
        }

    def explain(self, request: Any) -> str:
        """See `Part`."""
        return _WAITS.get(type(request), "")

    # ------------------------------------------------------------ memory and time

    def memory_freed(self, extent: int) -> None:
        """See `Part`. No ticket for it is honoured any more."""
        self.tickets.revoke(extent)

    def tick(self, now: float) -> None:
        """See `Part`."""
        self.shards.trim(now)

    def next_deadline(self) -> float | None:
        """See `Part`."""
        return self.shards.next_deadline()

    def _live_set(self, shard: int) -> m.LiveSet:
        extents = [extent.id for extent in self._ledger.extents_of(shard)] + self._lending.freed_while_held(shard)
        sessions = [session.number for session in self._sessions]
        return m.LiveSet(self._ledger.last_extent + 1, _packed(extents), self._sessions.last + 1, _packed(sessions))

    def statistics(self) -> Mapping[str, Any]:
        """See `Part`."""
        return {
            "bulk_port": self.bulk_port,
            "bulk_sent_bytes": dict(self.bulk_sent()),
            "bulk_received_bytes": dict(self.bulk_received()),
            "shards": [_stats(shard) for shard in self.shards.remote.values()],
        }


def _packed(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _stats(shard: RemoteShard) -> ShardStats:
    return ShardStats(
        shard=shard.number,
        label=shard.session.label,
        host=shard.session.hello.host,
        endpoint=shard.offer.endpoint,
        capacity_bytes=shard.offer.capacity,
        used_bytes=shard.used,
        backed_bytes=shard.used + shard.allocator.warm,
        drains=shard.draining,
        bulk_sent_bytes=shard.sent_bytes,
        bulk_received_bytes=shard.received_bytes,
    )
