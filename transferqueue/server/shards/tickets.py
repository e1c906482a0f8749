"""Tickets: which bytes a session may touch over the bulk endpoint. The control plane issues them, the shard checks
them. See docs/decisions/remote-bytes.md.

1. A ticket is a keyed hash over a block to read, or an extent to write, that a reply named to a session. So the shard
   needs no ledger, and a client can only ask for bytes that a reply named to it. The key is new in each run of the
   server, unless its sessions outlive it: then their tickets do too.
2. A hash cannot be taken back, but memory is used again. So an extent is *admitted* from its first ticket until it is
   freed, and the shard touches only admitted extents. A delayed frame, or a client that was paused until its session
   ended, never reaches bytes that belong to others by then.
3. `revoke` returns only when no byte of the extent can be written any more. Call it before the memory is granted again.
   It waits for the copy of one frame at most.

A coordinator and its own shard share only these tickets and the arena's pages. For a remote shard the same calls are
messages (`remote_shard`), and memory is freed when the shard confirms `Revoke`. There the first read may arrive before
any message about its extent, so the coordinator tells the shard which extents and sessions ended. Numbers only ascend:
every number that has not ended is live (`LiveExtents`).
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
    """Ascending numbers of extents or sessions, each live until it is discarded. Has the set methods that
    `TicketIssuer` uses."""

    def __init__(self) -> None:
        self._below: tuple[int, frozenset[int]] = (0, frozenset())
        self._ended: set[int] = set()

    def __contains__(self, number: object) -> bool:
        first, live = self._below
        return number not in self._ended and (not isinstance(number, int) or number >= first or number in live)

    def issuperset(self, numbers: Iterable[int]) -> bool:
        """Whether all of these are live."""
        return all(number in self for number in numbers)

    def add(self, number: int) -> None:
        """Do nothing: the number is live."""

    def update(self, numbers: Iterable[int]) -> None:
        """Do nothing: the numbers are live."""

    def discard(self, number: int) -> None:
        """The number is not live any more."""
        self._ended.add(number)

    def keep_only(self, first: int, live: Iterable[int]) -> None:
        """Below `first` only the numbers in `live` are live. So ended numbers below it need not be remembered."""
        self._below = (first, frozenset(live))
        self._ended = {number for number in self._ended if number >= first}


class TicketIssuer:
    """Issues and checks tickets of one shard. The coordinator's thread (in a remote shard: the thread that carries out
    commands) calls `issue`, `revoke` and `close`; the thread of the bulk endpoint calls the rest.

    Args:
        extents: the live ones, in a remote shard; None: those for which this object issued tickets.
        sessions: likewise.
    """

    def __init__(
        self, key: bytes | None = None, extents: LiveExtents | None = None, sessions: LiveExtents | None = None
    ) -> None:
        self._key: Final = key or secrets.token_bytes(_KEY_BYTES)
        self._admitted: set[int] | LiveExtents = set() if extents is None else extents
        self._sessions: set[int] | LiveExtents = set() if sessions is None else sessions
        self._writing: Final = threading.Lock()
        self.on_close: Callable[[], object] = lambda: None
        """Called when a session ended, so that the bulk endpoint checks its transfers."""
        self.revoked = 0
        """The number of extents revoked and sessions ended. While it is unchanged, no transfer needs another check."""

    # ------------------------------------------------------------ for the coordinator

    def issue(self, session: int, reply: m.Reply) -> m.Reply:
        """The reply, with a ticket for each block or extent that it names."""
        return issue(lambda _: self, session, reply)

    def admits(self, extent: int) -> bool:
        """Whether a ticket for this extent may have been issued."""
        return extent in self._admitted

    def serves(self, session: int) -> bool:
        """Whether a ticket may have been issued to this session."""
        return session in self._sessions

    def resume(self, sessions: Iterable[int], extents: Iterable[int]) -> None:
        """Admit sessions and extents of an earlier run with the same key."""
        self._sessions.update(sessions)
        self._admitted.update(extents)

    def revoke(self, extent: int) -> None:
        """Refuse reads and writes of this extent from now on (rule 3). Free for an extent that was never admitted."""
        if extent in self._admitted:
            with self._writing:
                self._admitted.discard(extent)
                self.revoked += 1

    def close(self, session: int) -> None:
        """A session ended: its transfers end too. Free for a session without tickets."""
        if session in self._sessions:
            with self._writing:
                self._sessions.discard(session)
                self.revoked += 1
            self.on_close()

    def granted(self, session: int, granted: m.Granted) -> m.Granted:
        """The grant, with a ticket."""
        self._sessions.add(session)
        self._admitted.add(granted.extent)
        ticket = self._ticket(
            _WRITE, session, granted.shard, granted.extent, granted.extent, granted.offset, granted.nbytes
        )
        return msgspec.structs.replace(granted, ticket=ticket)

    def block(self, session: int, at: m.BlockLocation) -> m.BlockLocation:
        """The location of a block, with a ticket."""
        self._sessions.add(session)
        self._admitted.add(at.extent)
        ticket = self._ticket(_READ, session, at.shard, at.block, at.extent, at.offset, at.nbytes)
        return msgspec.structs.replace(at, ticket=ticket)

    def _ticket(self, *facts: int) -> bytes:
        packed = struct.pack(f"<{len(facts)}q", *facts)
        return hashlib.blake2b(packed, key=self._key, digest_size=TICKET_BYTES).digest()

    def keep_live(self, extents_to: int, extents: Iterable[int], sessions_to: int, sessions: Iterable[int]) -> None:
        """Revoke all extents below `extents_to` that are not in `extents`, and close all such sessions."""
        with self._writing:
            for numbers, first, live in (
                (self._admitted, extents_to, extents),
                (self._sessions, sessions_to, sessions),
            ):
                if isinstance(numbers, LiveExtents):
                    numbers.keep_only(first, live)
            self.revoked += 1
        self.on_close()

    # ------------------------------------------------------------ for the shard

    def check_read(self, session: int, shard: int, blocks: Iterable[b.BulkBlock]) -> None:
        """`UsageError` unless each of these blocks has a ticket of this session."""
        for at in blocks:
            ticket = self._ticket(_READ, session, shard, at.block, at.extent, at.offset, at.nbytes)
            if not hmac.compare_digest(ticket, at.ticket):
                raise UsageError(
                    f"bulk read of block {at.block} refused: this server gave session {session} no such ticket for "
                    "these bytes; read only blocks that a reply named, in the session that got it"
                )

    def check_write(self, write: b.ExtentWrite) -> None:
        """`UsageError` unless the extent has a ticket of this session, and the write is inside it."""
        ticket = self._ticket(
            _WRITE, write.session, write.shard, write.extent, write.extent, write.offset, write.nbytes
        )
        if not hmac.compare_digest(ticket, write.ticket):
            raise UsageError(
                f"bulk write into extent {write.extent} refused: this server gave session {write.session} no such "
                "ticket for these bytes; ask for a grant, and write in the session that got it"
            )
        if write.at < write.offset or write.at + write.total > write.offset + write.nbytes:
            raise UsageError(
                f"bulk write of bytes {write.at} to {write.at + write.total} refused: extent {write.extent} is bytes "
                f"{write.offset} to {write.offset + write.nbytes}; write inside it"
            )

    def check_live(self, session: int, extents: frozenset[int]) -> None:
        """`Disconnected` if the session ended, or one of the extents was freed or belongs to an earlier run."""
        if session not in self._sessions or not self._admitted.issuperset(extents):
            raise Disconnected(
                f"bulk transfer of session {session} refused: the session is over, or its block or extent was freed "
                "since; ask for the rows or the grant again"
            )

    @contextmanager
    def writing(self, session: int, extents: frozenset[int]) -> Iterator[None]:
        """Around writes to bytes of these extents. Raises as `check_live` when it is entered."""
        with self._writing:
            self.check_live(session, extents)
            yield


def issue(
    of: Callable[[int], TicketIssuer | None], session: int, reply: m.Reply, near: Collection[int] = frozenset()
) -> m.Reply:
    """The reply, with a ticket for each block or extent that it names. Of a block with copies only one is named.

    Args:
        of: the tickets of a shard; None: the session needs none.
        session: that gets the reply.
        reply: without tickets.
        near: shards to prefer where a block has copies.
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
    nearest = [_nearest(at, near) if at.copies else at for at in blocks]
    return [at if (tickets := of(at.shard)) is None else tickets.block(session, at) for at in nearest]


def _nearest(at: m.BlockLocation, near: Collection[int]) -> m.BlockLocation:
    """The block with only one of its copies, a near one if there is any."""
    for copy in at.copies if at.shard not in near else ():
        if copy.shard in near:
            return msgspec.structs.replace(at, shard=copy.shard, extent=copy.extent, offset=copy.offset, copies=[])
    return msgspec.structs.replace(at, copies=[])
