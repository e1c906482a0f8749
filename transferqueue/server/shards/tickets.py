"""Tickets: which bytes a session may touch over the bulk endpoint, told by the control plane, checked by the shard.

The law (docs/decisions/0013):

1. A ticket is a keyed hash over what a reply named to a session: a block to read, an extent to write. So the shard needs
   no ledger, and who was told nothing can ask for nothing. The key is new in each life of the server, unless its
   sessions outlive it: then so do their tickets.
2. A hash cannot be taken back, but memory is used again. So an extent is *admitted* from the first ticket for it until it
   is freed, and a shard touches only what is admitted: a frame that was under way for long, or a client that was paused
   until its session ended, never meets the bytes of strangers.
3. `revoke` returns only when no byte of the extent can be written any more; so call it before the memory is lent again.
   The copy of one frame is what it may have to wait for.

Beside the arena's pages this is all that a coordinator and its own shard share. For a shard in another process the same calls
are messages (see `shards`), and memory is given back when the answer to `revoke` has come. There, where the first reader may
be quicker than any message about an extent, what is told is the end of things: numbers of extents and sessions only ascend, so
all that nobody has called over stand (`LiveExtents`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from transferqueue.errors import Disconnected, UsageError
from transferqueue.limits import TICKET_BYTES
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import messages as m

_KEY_BYTES: Final = 32
_READ: Final = 0
_WRITE: Final = 1


class LiveExtents:
    """Numbers that ascend and stand until they are called over. Looks like a set of them, as far as `TicketIssuer` asks."""

    def __init__(self) -> None:
        self._below: tuple[int, frozenset[int]] = (0, frozenset())
        self._over: set[int] = set()

    def __contains__(self, number: object) -> bool:
        floor, kept = self._below
        return number not in self._over and (not isinstance(number, int) or number >= floor or number in kept)

    def issuperset(self, numbers: Iterable[int]) -> bool:
        """Whether all of these stand."""
        return all(number in self for number in numbers)

    def add(self, number: int) -> None:
        """It stands already."""

    def update(self, numbers: Iterable[int]) -> None:
        """They stand already."""

    def discard(self, number: int) -> None:
        """It is over."""
        self._over.add(number)

    def only(self, floor: int, kept: Iterable[int]) -> None:
        """Of all below `floor` no others stand: so nothing must be remembered of those."""
        self._below = (floor, frozenset(kept))
        self._over = {number for number in self._over if number >= floor}


class TicketIssuer:
    """Issues and checks tickets of one shard. `issue`, `revoke` and `close` belong to the coordinator's thread (in a shard of
    its own process: to the one that takes orders), the rest to the bulk endpoint's.

    extents, sessions: those that stand, as one side knows them; None: those that tickets were issued for here.
    """

    def __init__(
        self, key: bytes | None = None, extents: LiveExtents | None = None, sessions: LiveExtents | None = None
    ) -> None:
        self._key: Final = key or secrets.token_bytes(_KEY_BYTES)
        self._admitted: set[int] | LiveExtents = set() if extents is None else extents
        self._sessions: set[int] | LiveExtents = set() if sessions is None else sessions
        self._writing: Final = threading.Lock()
        self.on_close: Callable[[], object] = lambda: None
        """Called when a session ended, so that the shard looks at its transfers."""
        self.revoked = 0
        """How often an extent was revoked or a session ended: unchanged, nothing needs to be looked at again."""

    # ------------------------------------------------------------ the coordinator's

    def issue(self, session: int, reply: m.Reply) -> m.Reply:
        """The reply with a ticket for each block or extent that it names."""
        return issue(lambda _: self, session, reply)

    def admits(self, extent: int) -> bool:
        """Whether a ticket for this extent may be about."""
        return extent in self._admitted

    def serves(self, session: int) -> bool:
        """Whether this session may have a ticket."""
        return session in self._sessions

    def resume(self, sessions: Iterable[int], extents: Iterable[int]) -> None:
        """These sessions and extents are left from an earlier life with the same key."""
        self._sessions.update(sessions)
        self._admitted.update(extents)

    def revoke(self, extent: int) -> None:
        """Nothing of this extent is read or written from now on (rule 3). Extents that were never admitted cost nothing."""
        if extent in self._admitted:
            with self._writing:
                self._admitted.discard(extent)
                self.revoked += 1

    def close(self, session: int) -> None:
        """The session is over, and so are its transfers. One that was never given a ticket costs nothing."""
        if session in self._sessions:
            with self._writing:
                self._sessions.discard(session)
                self.revoked += 1
            self.on_close()

    def granted(self, session: int, granted: m.Granted) -> m.Granted:
        """The grant with its ticket."""
        self._sessions.add(session)
        self._admitted.add(granted.extent)
        ticket = self._ticket(
            _WRITE, session, granted.shard, granted.extent, granted.extent, granted.offset, granted.nbytes
        )
        return msgspec.structs.replace(granted, ticket=ticket)

    def block(self, session: int, at: m.BlockLocation) -> m.BlockLocation:
        """The place of a block with its ticket."""
        self._sessions.add(session)
        self._admitted.add(at.extent)
        ticket = self._ticket(_READ, session, at.shard, at.block, at.extent, at.offset, at.nbytes)
        return msgspec.structs.replace(at, ticket=ticket)

    def _ticket(self, *facts: int) -> bytes:
        packed = struct.pack(f"<{len(facts)}q", *facts)
        return hashlib.blake2b(packed, key=self._key, digest_size=TICKET_BYTES).digest()

    def stand(self, extents_to: int, extents: Iterable[int], sessions_to: int, sessions: Iterable[int]) -> None:
        """Below these numbers no other extents and sessions stand than these: as `revoke` and `close` of all others."""
        with self._writing:
            for known, floor, kept in ((self._admitted, extents_to, extents), (self._sessions, sessions_to, sessions)):
                if isinstance(known, LiveExtents):
                    known.only(floor, kept)
            self.revoked += 1
        self.on_close()

    # ------------------------------------------------------------ the shard's

    def check_read(self, session: int, shard: int, blocks: Iterable[b.BulkBlock]) -> None:
        """`UsageError` unless each of these blocks was named to the session so, `Disconnected` if one is over."""
        for at in blocks:
            ticket = self._ticket(_READ, session, shard, at.block, at.extent, at.offset, at.nbytes)
            if not hmac.compare_digest(ticket, at.ticket):
                raise UsageError(
                    f"bulk read of block {at.block} refused: the ticket is none that this server gave to session "
                    f"{session} for these bytes; read what a reply named, in the session that got it"
                )

    def check_write(self, write: b.WriteExtent) -> None:
        """`UsageError` unless this extent was granted to the session so, and the write is inside it."""
        ticket = self._ticket(
            _WRITE, write.session, write.shard, write.extent, write.extent, write.offset, write.nbytes
        )
        if not hmac.compare_digest(ticket, write.ticket):
            raise UsageError(
                f"bulk write into extent {write.extent} refused: the ticket is none that this server gave to session "
                f"{write.session} for these bytes; ask for a grant, and write in the session that got it"
            )
        if write.at < write.offset or write.at + write.total > write.offset + write.nbytes:
            raise UsageError(
                f"bulk write of bytes {write.at} to {write.at + write.total} refused: extent {write.extent} is bytes "
                f"{write.offset} to {write.offset + write.nbytes}; write inside it"
            )

    def check_standing(self, session: int, extents: frozenset[int]) -> None:
        """`Disconnected` if the session is over, or one of the extents was freed or is of an earlier life."""
        if session not in self._sessions or not self._admitted.issuperset(extents):
            raise Disconnected(
                f"bulk transfer of session {session} refused: the session is over, or what it named was freed since; "
                "ask for the rows or the grant again"
            )

    @contextmanager
    def writing(self, session: int, extents: frozenset[int]) -> Iterator[None]:
        """While this lasts bytes of these extents may be written. Does not begin where that is over (`check_standing`)."""
        with self._writing:
            self.check_standing(session, extents)
            yield


def issue(
    of: Callable[[int], TicketIssuer | None], session: int, reply: m.Reply, near: Collection[int] = frozenset()
) -> m.Reply:
    """The reply with a ticket for each block or extent that it names. of: the tickets of a shard; None: this session needs none.

    near: shards of which a copy is named, if there is one; of each block one copy is.
    """
    match reply:
        case m.Granted():
            tickets = of(reply.shard)
            return reply if tickets is None else tickets.granted(session, reply)
        case m.Leased() | m.ReadRows():
            parts = [
                msgspec.structs.replace(part, blocks=_blocks(of, session, part.blocks, near))
                for part in reply.content.parts
            ]
            return msgspec.structs.replace(reply, content=msgspec.structs.replace(reply.content, parts=parts))
        case m.WeightsReply():
            return msgspec.structs.replace(reply, blocks=_blocks(of, session, reply.blocks, near))
    return reply


def _blocks(
    of: Callable[[int], TicketIssuer | None], session: int, blocks: Iterable[m.BlockLocation], near: Collection[int]
) -> list[m.BlockLocation]:
    told = [_nearest(at, near) if at.copies else at for at in blocks]
    return [at if (tickets := of(at.shard)) is None else tickets.block(session, at) for at in told]


def _nearest(at: m.BlockLocation, near: Collection[int]) -> m.BlockLocation:
    """The block as only one of its copies: a near one, if there is any."""
    for one in at.copies if at.shard not in near else ():
        if one.shard in near:
            return msgspec.structs.replace(at, shard=one.shard, extent=one.extent, offset=one.offset, copies=[])
    return msgspec.structs.replace(at, copies=[])
