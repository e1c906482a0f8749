"""The shards of a deployment: which there are, which of them lends the next extent, who needs tickets for which. No I/O.

The law (docs/decisions/0022):

1. Shard 0 is the coordinator's own arena. A process whose Hello has an `Offer` is a further one, for exactly as long as its
   session lasts: so its death is seen as that of any session. What lies in it then is lost, as the ledger says.
2. Numbers are not given twice, also not in a later life of the coordinator: a session may still hold a reply that names one.
3. An extent comes from a near shard (of the session's host) if one has room, else from another; from the least full of those.
4. What a shard offers is a claim: the coordinator looks at the arena of one on its own host (`evidence`), and of no shard more than
   a process can map. One part in `RESULTS_SHARE` of each shard is kept for results, so no claim gives room in another's memory.
5. A session maps a shard if the coordinator sees both die, which needs one host for all three: only so does the kernel tell
   when memory that a client saw may be used again (decision 4). In all other shards its bytes travel, by tickets. Of a block with
   copies it is told one, which it maps if it maps any. Nor is a shard mapped that showed a key: nobody opens a file because a
   stranger names it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Final

import msgspec

from transferqueue.errors import Full, Impossible, NotFound, OutOfMemory, UsageError, listing
from transferqueue.ledger.effects import FreeExtent
from transferqueue.limits import PAGE_BYTES, RESULTS_SHARE, SESSIONS_MAX, SHARD_BYTES_MAX
from transferqueue.server.sessions.sessions import OpenSession
from transferqueue.server.sessions.waiting import WakeKey
from transferqueue.server.shards.own_memory import SHARD, OwnShardMemory
from transferqueue.server.shards.remote_shard import RemoteShard
from transferqueue.server.shards.tickets import TicketIssuer, issue
from transferqueue.transport import TcpAddress, parse_address
from transferqueue.wire import messages as m

_KEY: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key of CURVE, in Z85 (32/Z85 of rfc.zeromq.org)."""


class ShardRegistry:
    """The own shard and all further ones. last: the highest number given so far. wake: as of `RemoteShard`. standing: what stands of a
    shard, for `RemoteShard`."""

    def __init__(
        self,
        own: OwnShardMemory,
        tickets: TicketIssuer,
        epoch: int,
        *,
        last: int = SHARD,
        wake: Callable[[WakeKey], None],
        live_set: Callable[[int], m.LiveSet],
    ) -> None:
        self.own: Final = own
        self._tickets = tickets
        self._epoch = epoch
        self._wake = wake
        self._standing = live_set
        self._further: dict[int, RemoteShard] = {}
        self._last = last

    def __iter__(self) -> Iterator[RemoteShard]:
        """The further ones."""
        return iter(self._further.values())

    # ------------------------------------------------------------ who is there

    def numbered(self, hello: m.Hello, *, keyed: bool) -> m.Hello:
        """The greeting of a process that joins with memory, with the number that its shard will have.

        keyed: it showed a key, so it may be any user on any machine: nobody is told a path that it says. `UsageError` for
        an offer that is none, `Full` past `SESSIONS_MAX`.
        """
        if (offer := hello.shard) is None:
            return hello
        if len(self._further) >= SESSIONS_MAX:
            raise Full(f"shard refused: {SESSIONS_MAX} shards have joined, which is the most; drain some")
        if offer.capacity < PAGE_BYTES or offer.capacity % PAGE_BYTES:
            raise UsageError(
                f"shard refused: its arena of {offer.capacity} bytes is none; offer whole pages of {PAGE_BYTES}"
            )
        if offer.capacity > SHARD_BYTES_MAX:
            raise UsageError(
                f"shard refused: an arena of {offer.capacity:,} bytes is more than a process can map, {SHARD_BYTES_MAX:,}; offer what "
                "there is"
            )
        place = parse_address(offer.endpoint)
        if not isinstance(place, TcpAddress):
            raise UsageError(f"shard refused: endpoint {offer.endpoint!r} is none of tcp; offer tcp://host:port")
        if place.port == 0 or place.host == "*":
            raise UsageError(
                f"shard refused: nobody can connect to endpoint {offer.endpoint!r}; offer the host and port that others reach"
            )
        if offer.key and not _KEY.fullmatch(offer.key):
            raise UsageError(
                "shard refused: the key that it offers is no public key of CURVE; offer 40 characters of Z85, or none"
            )
        offer = msgspec.structs.replace(offer, number=self._last + 1, path="" if keyed else offer.path)
        return msgspec.structs.replace(hello, shard=offer)

    def join(
        self, session: OpenSession, lent: dict[int, tuple[int, int]] | None = None, remote: list[int] | None = None
    ) -> None:
        """The session's memory, if it brings any, is a shard from now on. lent, remote: see `RemoteShard`."""
        offer = session.hello.shard
        if offer is None:
            return
        self._last = max(self._last, offer.number)
        self._further[offer.number] = RemoteShard(
            session,
            offer,
            self._epoch,
            wake=self._wake,
            standing=lambda: self._standing(offer.number),
            lent=lent,
            remote=remote or (),
        )
        self._wake(("memory",))

    def close(self, session: OpenSession) -> None:
        """The session is over, and with it its tickets and the shard that it brought, if it did."""
        self._tickets.close(session.number)
        if session.hello.shard is not None and self._further.pop(session.hello.shard.number, None) is not None:
            self._wake(("memory",))
        for shard in self._further.values():
            shard.close(session.number)

    def drain(self, number: int) -> m.DoneReply:
        """Have a further shard leave as soon as nothing is in it. Again: nothing more."""
        shard = self._further.get(number)
        if shard is None:
            raise NotFound(
                f"shard {number} is none that joined; this deployment has {listing(self._further)}"
                + (", and 0 is the coordinator's own, which stays" if number == SHARD else "")
            )
        shard.drain()
        return m.DoneReply()

    def of_session(self, session: OpenSession) -> RemoteShard:
        """The shard that the session brought, else `UsageError`."""
        offer = session.hello.shard
        shard = self._further.get(offer.number) if offer is not None else None
        if shard is None:
            raise UsageError(f"session {session.number} is no shard, so there are no orders for it")
        return shard

    def seen_by(self, session: OpenSession) -> m.ShardList:
        """The further shards, as a session reaches them."""
        return m.ShardList([_at(shard, mapped=_maps(session, shard)) for _, shard in sorted(self._further.items())])

    # ------------------------------------------------------------ extents

    @property
    def used(self) -> int:
        """Bytes lent by all."""
        return self.own.used + sum(shard.used for shard in self._further.values())

    def take(
        self, session: OpenSession, nbytes: int, apart: Collection[int] = (), use: m.GrantPurpose = "results"
    ) -> tuple[int, int, int] | None:
        """Shard, offset and size of an extent of at least `nbytes`, in none of the shards `apart`; None if no shard has room now.

        `Impossible` if none could ever have it, errors as of `OwnShardMemory.take`.
        """
        if use == "rows":
            self._check_rows(nbytes)
        able = [one for one in self._in_order(session, use) if one.number not in apart]
        if not able:
            raise Impossible(
                f"an extent apart from shards {listing(apart)} can never be granted: there are no others; start further "
                "shards (transferqueue shard), or make the table with fewer replicas"
            )
        if all(nbytes > one.allocator.capacity for one in able):
            max(able, key=lambda one: one.allocator.capacity).check(nbytes)
        refused: OutOfMemory | None = None
        for shard in able:
            if use == "rows" and shard.used + nbytes > _for_rows(shard):
                continue
            try:
                found = shard.take(nbytes) if nbytes <= shard.allocator.capacity else None
            except OutOfMemory as error:
                refused = error
                continue
            if found is not None:
                return shard.number, *found
        if refused is not None:
            raise refused
        return None

    def _check_rows(self, nbytes: int) -> None:
        """`Impossible` if no shard could ever lend so much to new rows."""
        lending: list[OwnShardMemory | RemoteShard] = [
            self.own,
            *(one for one in self._further.values() if not one.draining),
        ]
        room, capacity = max((_for_rows(one), one.allocator.capacity) for one in lending)
        if nbytes > room:
            raise Impossible(
                f"{nbytes:,} bytes for new rows can never be granted: of {capacity:,} bytes of memory these may have {room:,}, the rest "
                "is for results; put fewer rows at a time, or start the server with a larger --arena-bytes"
            )

    def check_replicas(self, table: str, replicas: int) -> None:
        """`Impossible` if there are fewer shards that lend."""
        lending = 1 + sum(not shard.draining for shard in self._further.values())
        if replicas > lending:
            raise Impossible(
                f'table "{table}" would keep each block in replicas={replicas} shards, and {lending} lend memory: '
                f"{replicas} > {lending}; start further shards (transferqueue shard), or make it with fewer replicas"
            )

    def _in_order(self, session: OpenSession, use: m.GrantPurpose) -> list[OwnShardMemory | RemoteShard]:
        """Those that lend, the best first: for weights the one that lasts as long as the books."""
        if not self._further:
            return [self.own]
        ranked: list[tuple[bool, float, int, OwnShardMemory | RemoteShard]] = [
            (not _near(session, shard), _fill(shard), number, shard)
            for number, shard in self._further.items()
            if not shard.draining
        ]
        ranked.append((session.remote, _fill(self.own), self._last + 1, self.own))
        ordered = [shard for *_, shard in sorted(ranked, key=lambda one: one[:3])]
        return sorted(ordered, key=lambda shard: shard is not self.own) if use == "weights" else ordered

    def give_back(self, freed: FreeExtent, now: float) -> None:
        """Nobody needs this extent any more. One of a shard that is gone is gone too."""
        if freed.shard == SHARD:
            self._tickets.revoke(freed.extent)
            self.own.give_back(freed.offset, freed.nbytes, now)
            self._wake(("memory",))
        elif (shard := self._further.get(freed.shard)) is not None:
            shard.give_back(freed.extent, freed.offset, freed.nbytes, now)

    def next_deadline(self) -> float | None:
        """When `trim` of one of the further shards has something to do."""
        deadlines = [at for shard in self._further.values() if (at := shard.next_deadline()) is not None]
        return min(deadlines, default=None)

    def trim(self, now: float) -> None:
        """Have pages that nobody needs given back."""
        for shard in self._further.values():
            shard.trim(now)

    def explain(self, nbytes: int, holders: str, use: m.GrantPurpose = "results") -> str:
        """Why `nbytes` cannot be granted now."""
        own = self.own.explain(nbytes, holders)
        if use == "rows":
            own += f". One byte in {RESULTS_SHARE} is kept for results"
        if not self._further:
            return own
        others = ", ".join(
            f"shard {number}: {one.used:,} of {one.offer.capacity:,} bytes" + (", drains" if one.draining else "")
            for number, one in sorted(self._further.items())
        )
        return f"{own}. Nor is one in a further shard ({others})"

    # ------------------------------------------------------------ tickets

    def issue(self, session: OpenSession, reply: m.Reply) -> m.Reply:
        """The reply with tickets for what the session does not map."""
        if not session.remote and all(_maps(session, shard) for shard in self._further.values()):
            return reply
        near = {number for number, shard in self._further.items() if _maps(session, shard)}
        near |= set() if session.remote else {SHARD}
        return issue(lambda shard: self._tickets_of(session, shard), session.number, reply, near)

    def _tickets_of(self, session: OpenSession, number: int) -> TicketIssuer | None:
        if number == SHARD:
            return self._tickets if session.remote else None
        shard = self._further.get(number)
        return None if shard is None or _maps(session, shard) else shard.tickets


def _for_rows(shard: OwnShardMemory | RemoteShard) -> int:
    """Bytes of a shard that new rows may have."""
    lendable = shard.lendable if isinstance(shard, RemoteShard) else shard.allocator.capacity
    return lendable - lendable // RESULTS_SHARE


def _fill(shard: OwnShardMemory | RemoteShard) -> float:
    return shard.used / shard.allocator.capacity


def _near(session: OpenSession, shard: RemoteShard) -> bool:
    return bool(session.hello.host) and session.hello.host == shard.session.hello.host


def _maps(session: OpenSession, shard: RemoteShard) -> bool:
    return bool(shard.offer.path) and not session.remote and not shard.session.remote and _near(session, shard)


def _at(shard: RemoteShard, *, mapped: bool) -> m.ShardEndpoint:
    offer = shard.offer
    return m.ShardEndpoint(offer.number, offer.path if mapped else "", offer.capacity, offer.endpoint, offer.key)


def live_set(extents: list[int], extents_to: int, sessions: list[int], sessions_to: int) -> m.LiveSet:
    """What a shard is told of what stands."""
    return m.LiveSet(extents_to, _packed(extents), sessions_to, _packed(sessions))


def _packed(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)
