"""The remote shards of a deployment: which exist, and which sessions need tickets for which. No I/O. See
docs/decisions/shards.md.

1. Shard 0 is the coordinator's own arena. A process whose Hello contains a `ShardOffer` is a remote shard for exactly
   as long as its session lasts, so its death is detected like that of any session. The ledger then treats its contents
   as lost.
2. A shard number is never used twice, not even by a later run of the coordinator: a client may still hold a reply that
   names it.
3. An offer is an unproven claim. The coordinator checks the arena of a shard on its own host (`liveness.check_arena`),
   and accepts no shard larger than a process can map. One part in `RESULTS_SHARE` of each shard is reserved for
   results, so a false claim gives no room in another shard's memory.
4. A session maps a shard if the coordinator detects the death of both, so if all three are on one host. Only then does
   the kernel tell when the memory that a client saw may be used again (docs/decisions/memory.md). Bytes in all other
   shards travel, by ticket. Of a block with copies the session gets one, if possible a copy that it maps. A shard that
   authenticated with a key is never mapped: no client opens a file because a remote user names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from transferqueue.errors import Full, NotFound, UsageError, listing
from transferqueue.ledger.effects import WakeKey
from transferqueue.limits import PAGE_BYTES, SHARD_BYTES_MAX, SHARDS_MAX
from transferqueue.server.memory.lending import Lending
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.shards.remote_shard import RemoteShard
from transferqueue.server.shards.tickets import TicketIssuer, issue
from transferqueue.transport import TcpAddress, parse_address
from transferqueue.wire import messages as m

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
"""A public key of CURVE, in Z85 (32/Z85 of rfc.zeromq.org)."""


class ShardRegistry:
    """All remote shards.

    Args:
        lending: lends their memory too, from now on.
        tickets: of the coordinator's own arena.
        last: the highest number given so far.
        wake: see `RemoteShard`.
        live_set: see `RemoteShard`.
    """

    def __init__(
        self,
        lending: Lending,
        tickets: TicketIssuer,
        epoch: int,
        *,
        last: int = SHARD,
        wake: Callable[[WakeKey], None],
        live_set: Callable[[int], m.LiveSet],
    ) -> None:
        self._tickets = tickets
        self._epoch = epoch
        self._wake = wake
        self._live_set = live_set
        self.remote: Final[dict[int, RemoteShard]] = {}
        """The remote shards that joined, by number."""
        lending.remote = self.remote
        self._last = last

    # ------------------------------------------------------------ joining and leaving

    def assign_number(self, hello: m.Hello, *, keyed: bool) -> m.Hello:
        """The Hello with a number in its shard offer, if it contains one.

        Args:
            hello: of the process that offers a shard.
            keyed: the process authenticated with a key, so it may be any user on any machine: the path of its arena is
                dropped.

        Raises:
            UsageError: the offer cannot be used.
            Full: there are `SHARDS_MAX` shards.
        """
        if (offer := hello.shard) is None:
            return hello
        if len(self.remote) >= SHARDS_MAX:
            raise Full(f"shard refused: {SHARDS_MAX} shards have joined, the most that this server allows; drain some")
        if offer.capacity < PAGE_BYTES or offer.capacity % PAGE_BYTES:
            raise UsageError(
                f"shard refused: its arena of {offer.capacity} bytes is invalid; offer whole pages of {PAGE_BYTES}"
            )
        if offer.capacity > SHARD_BYTES_MAX:
            raise UsageError(
                f"shard refused: an arena of {offer.capacity:,} bytes is more than a process can map, "
                f"{SHARD_BYTES_MAX:,}; offer a smaller one"
            )
        endpoint = parse_address(offer.endpoint)
        if not isinstance(endpoint, TcpAddress):
            raise UsageError(f"shard refused: endpoint {offer.endpoint!r} is not tcp; offer tcp://host:port")
        if endpoint.port == 0 or endpoint.host == "*":
            raise UsageError(
                f"shard refused: no other process can connect to endpoint {offer.endpoint!r}; offer a host and port "
                "that others reach"
            )
        if offer.certificate and not _FINGERPRINT.fullmatch(offer.certificate):
            raise UsageError(
                "shard refused: the fingerprint of its certificate is no SHA-256; offer 64 hexadecimal digits, or none"
            )
        offer = msgspec.structs.replace(offer, number=self._last + 1, path="" if keyed else offer.path)
        return msgspec.structs.replace(hello, shard=offer)

    def join(
        self, session: OpenSession, granted: dict[int, tuple[int, int]] | None = None, sessions: list[int] | None = None
    ) -> None:
        """If the session offers memory, it is a shard from now on. `granted`, `sessions`: see `RemoteShard`."""
        offer = session.hello.shard
        if offer is None:
            return
        self._last = max(self._last, offer.number)
        self.remote[offer.number] = RemoteShard(
            session,
            offer,
            self._epoch,
            wake=self._wake,
            live_set=lambda: self._live_set(offer.number),
            granted=granted,
            sessions=sessions or (),
        )
        self._wake(("memory",))

    def close(self, session: OpenSession) -> bool:
        """A session ended. Its tickets end too, and so does the shard that it offered. Returns whether it was one."""
        self._tickets.close(session.number)
        offer = session.hello.shard
        gone = self.remote.pop(offer.number, None) if offer is not None else None
        if gone is not None:
            gone.end()
            self._wake(("memory",))
        for shard in self.remote.values():
            shard.close(session.number)
        return gone is not None

    def drain(self, number: int) -> m.DoneReply:
        """Have a remote shard leave as soon as it is empty. Draining twice is allowed."""
        shard = self.remote.get(number)
        if shard is None:
            raise NotFound(
                f"shard {number} has not joined; this deployment has {listing(self.remote)}"
                + (", and 0 is the coordinator's own, which stays" if number == SHARD else "")
            )
        shard.drain()
        return m.DoneReply()

    def shard_of(self, session: OpenSession) -> RemoteShard:
        """The shard that the session offered. `UsageError` if it offered none."""
        offer = session.hello.shard
        shard = self.remote.get(offer.number) if offer is not None else None
        if shard is None:
            raise UsageError(f"session {session.number} is no shard, and gets no orders")
        return shard

    def list_for(self, session: OpenSession) -> m.ShardList:
        """The remote shards, as this session reaches them."""
        return m.ShardList([_endpoint(shard, mapped=_maps(session, shard)) for _, shard in sorted(self.remote.items())])

    def next_deadline(self) -> float | None:
        """When to call `trim` next; None: nothing is due."""
        if not self.remote:
            return None
        deadlines = [at for shard in self.remote.values() if (at := shard.next_deadline()) is not None]
        return min(deadlines, default=None)

    def trim(self, now: float) -> None:
        """Give unused pages of remote shards back to their systems."""
        for shard in self.remote.values():
            shard.trim(now)

    # ------------------------------------------------------------ tickets

    def issue(self, session: OpenSession, reply: m.Reply) -> m.Reply:
        """The reply, with tickets for the shards that the session does not map. Needed only for a remote session, or if
        there are remote shards."""
        if not session.remote and (not self.remote or all(_maps(session, shard) for shard in self.remote.values())):
            return reply
        near = {number for number, shard in self.remote.items() if _maps(session, shard)}
        near |= set() if session.remote else {SHARD}
        return issue(lambda shard: self._tickets_of(session, shard), session.number, reply, near)

    def tickets_for(self, number: int) -> TicketIssuer:
        """The tickets of this shard, which must exist."""
        return self._tickets if number == SHARD else self.remote[number].tickets

    def _tickets_of(self, session: OpenSession, number: int) -> TicketIssuer | None:
        if number == SHARD:
            return self._tickets if session.remote else None
        shard = self.remote.get(number)
        return None if shard is None or _maps(session, shard) else shard.tickets


def _maps(session: OpenSession, shard: RemoteShard) -> bool:
    return bool(shard.offer.path) and not session.remote and not shard.session.remote and shard.is_near(session)


def _endpoint(shard: RemoteShard, *, mapped: bool) -> m.ShardEndpoint:
    offer = shard.offer
    return m.ShardEndpoint(
        offer.number, offer.path if mapped else "", offer.capacity, offer.endpoint, offer.certificate
    )
