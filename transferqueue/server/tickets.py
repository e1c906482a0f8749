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

Beside the arena's pages this is all that a coordinator and its shard share. For a shard in another process the same calls
are messages, and memory is given back when the answer to `revoke` has come.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from transferqueue.errors import Corruption, Disconnected, UsageError
from transferqueue.limits import TICKET_BYTES
from transferqueue.storage.dtypes import U8
from transferqueue.transport import bulk as b
from transferqueue.wire import messages as m

_KEY_BYTES: Final = 32
_READ: Final = 0
_WRITE: Final = 1


class Tickets:
    """Issues and checks tickets. `issue`, `revoke` and `close` belong to the coordinator's thread, the rest to the shard's."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key: Final = key or secrets.token_bytes(_KEY_BYTES)
        self._admitted: set[int] = set()
        self._sessions: set[int] = set()
        self._writing: Final = threading.Lock()
        self.on_close: Callable[[], object] = lambda: None
        """Called when a session ended, so that the shard looks at its transfers."""
        self.revoked = 0
        """How often an extent was revoked or a session ended: unchanged, nothing needs to be looked at again."""

    # ------------------------------------------------------------ the coordinator's

    def issue(self, session: int, reply: m.Reply) -> m.Reply:
        """The reply with a ticket for each block or extent that it names."""
        self._sessions.add(session)
        match reply:
            case m.Granted():
                return self._granted(session, reply)
            case m.Leased() | m.ReadRows():
                parts = [
                    msgspec.structs.replace(part, blocks=self._blocks(session, part.blocks))
                    for part in reply.content.parts
                ]
                return msgspec.structs.replace(reply, content=msgspec.structs.replace(reply.content, parts=parts))
            case m.Weights():
                return msgspec.structs.replace(reply, blocks=self._blocks(session, reply.blocks))
        return reply

    def go_on(self, sessions: Iterable[int], extents: Iterable[int]) -> None:
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

    def _granted(self, session: int, granted: m.Granted) -> m.Granted:
        self._admitted.add(granted.extent)
        ticket = self._ticket(
            _WRITE, session, granted.shard, granted.extent, granted.extent, granted.offset, granted.nbytes
        )
        return msgspec.structs.replace(granted, ticket=ticket)

    def _blocks(self, session: int, blocks: Iterable[m.BlockAt]) -> list[m.BlockAt]:
        return [self._block(session, block) for block in blocks]

    def _block(self, session: int, at: m.BlockAt) -> m.BlockAt:
        self._admitted.add(at.extent)
        ticket = self._ticket(_READ, session, at.shard, at.block, at.extent, at.offset, at.nbytes)
        return msgspec.structs.replace(at, ticket=ticket)

    def _ticket(self, *facts: int) -> bytes:
        packed = struct.pack(f"<{len(facts)}q", *facts)
        return hashlib.blake2b(packed, key=self._key, digest_size=TICKET_BYTES).digest()

    # ------------------------------------------------------------ the shard's

    def check_read(self, session: int, shard: int, blocks: Iterable[b.Located]) -> None:
        """`UsageError` unless each of these blocks was named to the session so, `Disconnected` if one is over."""
        for at in blocks:
            ticket = self._ticket(_READ, session, shard, at.block, at.extent, at.offset, at.nbytes)
            if not hmac.compare_digest(ticket, at.ticket):
                raise UsageError(
                    f"bulk read of block {at.block} refused: the ticket is none that this server gave to session "
                    f"{session} for these bytes; read what a reply named, in the session that got it"
                )

    def check_write(self, write: b.Write) -> None:
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

    def write(self, session: int, extents: frozenset[int], into: U8, frame: memoryview) -> None:
        """Copy a frame into the extent, unless that is over (`check_standing`)."""
        with self._writing:
            self.check_standing(session, extents)
            into[:] = np.frombuffer(frame, np.uint8)


def key_in(directory: Path) -> bytes:
    """The key kept in a private directory; made if there is none. `Corruption` if what is there is no key."""
    path = directory / "tickets.key"
    with suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise Corruption(
            f"{path} has {len(key)} bytes, not {_KEY_BYTES}: no key; remove it, and connect remote clients again"
        )
    return key
