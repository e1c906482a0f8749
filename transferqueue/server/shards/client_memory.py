"""Reads the registered memory of clients into buffers of this shard (docs/decisions/0057). Used by the thread of the bulk endpoint.

Rules:

1. A *pull* is one read of at most `PULL_BYTES` into one buffer. Buffers are registered once and used again; at most `BUFFERS_MAX` are in use, so pulls
   beyond that wait.
2. A buffer whose read failed, or was given up before its end, may still be written. It is *quarantined*: no pull gets it. A read that ends well
   later returns it. With more than `QUARANTINED_MAX` of them this shard pulls nothing any more, and writes cross over the stream.
3. A session's agent is loaded once, and again when it names more or other regions. It is unloaded only when no read from it is under way, in
   quarantine too. After a failed read it is loaded afresh.
4. The agent that pulls is not the one by which clients read the arena: nobody gets its metadata, so nobody else reaches its buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from transferqueue.errors import Corruption, Impossible, Unreachable, UsageError
from transferqueue.limits import BULK_CONNECTIONS_MAX, MIB
from transferqueue.server.shards.registered_arena import MetadataVersion
from transferqueue.storage.elements.dtypes import U8
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.one_sided import CopiedRange, MemoryAgent, PendingRead

_log: Final = logging.getLogger("transferqueue.server")
PULL_BYTES: Final = 4 * MIB
"""Bytes of one read: a hundredth of a second at 400 MB/s, and small beside the caches that the checksum and the copy profit from."""
BUFFERS_MAX: Final = 16
QUARANTINED_MAX: Final = 64


class ClientRead:
    """A read under way, of these ranges, one behind the other in a buffer."""

    __slots__ = ("_ended", "_pending", "agent", "buffer", "failed", "ranges")

    def __init__(self, agent: str, ranges: Sequence[b.ByteRange], buffer: U8, pending: PendingRead) -> None:
        self.agent, self.ranges, self.buffer = agent, ranges, buffer
        self._pending = pending
        self.failed = self._ended = False

    def done(self) -> bool:
        """Make progress. Whether all bytes are there. `Unreachable` if the client is lost."""
        try:
            self._ended = self._ended or self._pending.done()
            return self._ended
        except BaseException:
            self.failed = True
            self._pending.abandon()
            raise


class ClientMemory:
    """The memory of this shard's clients, as far as it is registered. agent: of this object alone."""

    def __init__(self, agent: MemoryAgent) -> None:
        self._agent: Final = agent
        self._loaded: dict[int, MetadataVersion] = {}  # by session; the one loaded first is first
        self._stale: set[str] = set()
        self._free: list[U8] = []
        self._registrations: list[object] = []
        self._under_way: set[ClientRead] = set()
        self._limbo: set[ClientRead] = set()
        self._lost: list[ClientRead] = []

    @property
    def quarantined(self) -> int:
        """How many buffers no pull may get."""
        return len(self._limbo) + len(self._lost)

    @property
    def loaded(self) -> dict[int, MetadataVersion]:
        """What was loaded, by session."""
        return dict(self._loaded)

    def check_usable(self) -> None:
        """`Impossible` if this shard pulls nothing any more (rule 2)."""
        self.settle()
        if self.quarantined > QUARANTINED_MAX:
            raise Impossible(
                f"{self.quarantined} reads of clients' memory failed or did not end, and their buffers cannot be used again, so this shard takes "
                "columns over its stream alone until it is started again"
            )

    def load(self, session: int, version: MetadataVersion, metadata: bytes) -> bool:
        """Load what a client has registered, unless this or newer is loaded. False if it must wait until reads have ended (rule 3)."""
        known = self._loaded.get(session)
        if known is not None and known.agent == version.agent and known >= version and known.agent not in self._stale:
            return True
        if not metadata:
            raise Unreachable("the shard has forgotten the metadata of the client's memory; send it again")
        if any(other.agent == version.agent for at, other in self._loaded.items() if at != session):
            raise UsageError(
                f"session {session} names memory of agent {version.agent!r}, which is another session's; name memory of its own"
            )
        if self._is_read(version.agent) or (known is not None and self._is_read(known.agent)):
            return False
        self._forget(session, fresh=(version.agent, version.generation))
        self._make_room()
        if (name := self._agent.load(metadata)) != version.agent:
            self._agent.unload(name)
            raise Corruption(f"the metadata of a client's memory is not that of agent {version.agent!r}")
        self._loaded[session] = version
        return True

    def pull(self, session: int, ranges: Sequence[b.ByteRange]) -> ClientRead | None:
        """Begin to read these ranges of at most `PULL_BYTES`. None: no buffer is free now. `Unreachable` if they cannot be read."""
        known = self._loaded.get(session)
        if known is None:  # it was unloaded to make room for another one
            raise Unreachable("the shard has forgotten the metadata of the client's memory; send it again")
        buffer, agent = self._buffer(), known.agent
        if buffer is None:
            return None
        try:
            pending = self._agent.read(agent, list(_copied(ranges, _address(buffer))))
        except Unreachable:
            self._free.append(buffer)
            self._stale.add(agent)
            raise
        pull = ClientRead(agent, ranges, buffer, pending)
        self._under_way.add(pull)
        try:
            pull.done()  # which posts it
        except Unreachable:
            self.give_up(pull)
            raise
        return pull

    def end(self, pull: ClientRead) -> None:
        """Its read has ended well, and its bytes are not needed any more."""
        self._under_way.remove(pull)
        self._free.append(pull.buffer)

    def give_up(self, pull: ClientRead) -> None:
        """Its read failed, or is not waited for any more: its buffer is quarantined."""
        self._under_way.remove(pull)
        self._stale.add(pull.agent)
        if pull.failed:
            self._lost.append(pull)
            _log.warning(
                "a read of a client's memory failed; its buffer of %d MiB is not used again", PULL_BYTES // MIB
            )
        else:
            self._limbo.add(pull)

    def settle(self) -> None:
        """Look after the reads that were given up: a buffer whose read has ended well is free again."""
        for pull in list(self._limbo):
            try:
                if not pull.done():
                    continue
                self._free.append(pull.buffer)
            except Unreachable:
                self._lost.append(pull)
            self._limbo.discard(pull)

    def keep_only(self, serves: Callable[[int], bool]) -> None:
        """Unload the agents of sessions that are over, unless they are read."""
        for session in [session for session in self._loaded if not serves(session)]:
            self._forget(session)

    def close(self) -> None:
        """Give up all buffers that nothing writes any more."""
        for session in list(self._loaded):
            self._forget(session)
        if not self._under_way and not self._limbo and not self._lost:
            for registration in self._registrations:
                with suppress(Unreachable):
                    self._agent.deregister(registration)
        self._registrations, self._free = [], []

    def _is_read(self, agent: str) -> bool:
        self.settle()
        return any(pull.agent == agent for pull in (*self._under_way, *self._limbo))

    def _forget(self, session: int, fresh: tuple[str, int] = ("", 0)) -> None:
        """Unload the agent of a session, unless that is `fresh` (agent and generation) and only named more regions."""
        known = self._loaded.get(session)
        if known is None or self._is_read(known.agent):
            return
        del self._loaded[session]
        if (known.agent, known.generation) != fresh or known.agent in self._stale:
            self._stale.discard(known.agent)
            self._agent.unload(known.agent)

    def _make_room(self) -> None:
        """Unload an agent if there are too many."""
        for session in list(self._loaded) if len(self._loaded) >= BULK_CONNECTIONS_MAX else ():
            self._forget(session)
            if session not in self._loaded:
                return

    def _buffer(self) -> U8 | None:
        if not self._free and len(self._under_way) < BUFFERS_MAX:
            self._free.append(self._fresh())
        return self._free.pop() if self._free and len(self._under_way) < BUFFERS_MAX else None

    def _fresh(self) -> U8:
        buffer = np.empty(PULL_BYTES, np.uint8)
        self._registrations.append(self._agent.register(_address(buffer), PULL_BYTES))
        return buffer


def _copied(ranges: Sequence[b.ByteRange], into: int) -> list[CopiedRange]:
    """The ranges as one read copies them, one behind the other; those that follow each other at the client are one."""
    copied: list[CopiedRange] = []
    for each in ranges:
        last = copied[-1] if copied else None
        if last is not None and last.remote + last.nbytes == each.address:
            copied[-1] = last._replace(nbytes=last.nbytes + each.nbytes)
        else:
            copied.append(CopiedRange(into, each.address, each.nbytes))
        into += each.nbytes
    return copied


def _address(memory: U8) -> int:
    return int(memory.__array_interface__["data"][0])
