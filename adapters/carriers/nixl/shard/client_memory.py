"""Reads the registered memory of clients into buffers of this shard (docs/decisions/one-sided.md). Used by the thread
of the bulk endpoint.

1. A *pull* is one read of at most `PULL_BYTES` into one buffer. Buffers are registered once and used again; at most
   `BUFFERS_MAX` are in use, so pulls beyond that wait, and writes take turns.
2. A buffer whose read failed, or was abandoned, may still be written. It is *quarantined*: no pull gets it, and it is
   not freed before the agent that read is gone. A read that ends well later returns it. With more than
   `QUARANTINED_OF_ONE` of a session, or `QUARANTINED_MAX` in all, nothing is pulled from that session, or from any
   session, and writes cross over the stream, until enough have ended. Where they do not, this *begins anew* once no
   read is under way: it closes the agent, so the quarantine is empty, and opens another one. That takes up to half a
   second, and so is done at most every `ANEW_EVERY_S`: a client whose reads fail must not stop others.
3. A session's agent is loaded once, and again when it names more or other regions. It is unloaded only when no read
   from it is under way, in quarantine too. After a failed read or load it is loaded afresh.
4. The agent that pulls is not the one by which clients read the arena. Its metadata is not sent, so no peer reaches its
   buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from transferqueue.adapters.carriers.nixl.agent import CopiedRange, MemoryAgent, PendingRead
from transferqueue.adapters.carriers.nixl.shard.registered_arena import MetadataVersion
from transferqueue.errors import Corruption, Unreachable, UsageError
from transferqueue.limits import BULK_CONNECTIONS_MAX, KIB, MIB
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.system.threads import keep_for_good

_log: Final = logging.getLogger("transferqueue.server")
PULL_BYTES: Final = 4 * MIB
"""Bytes of one read: a hundredth of a second at 400 MB/s, and small beside the caches that the checksum and the copy
profit from."""
BUFFERS_MAX: Final = 16
QUARANTINED_MAX: Final = 64
QUARANTINED_OF_ONE: Final = 8
"""As many as one session may have in use: so many were lost when all its writes failed at once."""
ANEW_EVERY_S: Final = 60.0
KEPT_METADATA_BYTES_MAX: Final = 64 * KIB
"""Of a session. One that has more sends it again after this began anew, and its put under way crosses over the
stream."""


class ClientRead:
    """A read under way, of these ranges of a session's agent, one behind the other in a buffer."""

    __slots__ = ("_ended", "_pending", "agent", "buffer", "failed", "ranges", "session")

    def __init__(
        self, session: int, agent: str, ranges: Sequence[b.ByteRange], buffer: U8, pending: PendingRead
    ) -> None:
        self.session, self.agent, self.ranges, self.buffer = session, agent, ranges, buffer
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

    def let_go(self) -> None:
        """Drop the agent: it is closed."""
        self._pending.abandon()


class ClientMemory:
    """The memory of this shard's clients, as far as it is registered. `open_agent` opens an agent for this object
    alone, at once and after each agent that ends."""

    def __init__(self, open_agent: Callable[[], MemoryAgent]) -> None:
        self._open: Final = open_agent
        self._agent = open_agent()
        self._anew_from = 0.0
        self._metadata: dict[
            int, tuple[MetadataVersion, bytes]
        ] = {}  # of the sessions that are loaded, or were before this began anew
        self._loaded: dict[int, MetadataVersion] = {}  # by session; the one loaded first is first
        self._stale: set[str] = set()
        self._free: list[U8] = []
        self._registrations: dict[int, object] = {}  # by the address of their buffer
        self._turns: dict[object, None] = {}  # writes that wait for a buffer, in order
        self._under_way: set[ClientRead] = set()
        self._limbo: set[ClientRead] = set()
        self._lost: list[ClientRead] = []

    @property
    def quarantined(self) -> int:
        """How many buffers no pull may get."""
        return len(self._limbo) + len(self._lost)

    @property
    def loaded(self) -> dict[int, MetadataVersion]:
        """Loaded memory, by session."""
        return dict(self._loaded)

    def check_usable(self, session: int, now: float) -> None:
        """`Unreachable` if nothing is pulled from this session now (rule 2)."""
        self.settle()
        own = sum(read.session == session for read in (*self._lost, *self._limbo))
        if own <= QUARANTINED_OF_ONE and self.quarantined <= QUARANTINED_MAX:
            return
        if self._under_way or now < self._anew_from or not self._begun_anew(now):
            raise Unreachable(
                f"{self.quarantined} reads of the memory of clients failed or have not ended, {own} of them of session "
                f"{session}, so the shard takes its columns over the stream for now"
            )

    def load(self, session: int, version: MetadataVersion, metadata: bytes) -> bool:
        """Load the memory that a client registered, unless this or newer is loaded. False if it must wait for reads to
        end (rule 3)."""
        known = self._known(session)
        is_fresh = known is not None and known.agent == version.agent and known.agent not in self._stale
        if is_fresh and known is not None and known >= version:
            return True
        if not metadata:
            raise Unreachable("the shard has forgotten the metadata of the client's memory; send it again")
        known_of = self._loaded | {at: known for at, (known, _) in self._metadata.items()}
        if any(other.agent == version.agent for at, other in known_of.items() if at != session):
            raise UsageError(
                f"session {session} names memory of agent {version.agent!r}, which is another session's; name memory "
                "of its own"
            )
        if not is_fresh or known is None or known.generation != version.generation:  # else it named more regions only
            if self._is_read(version.agent) or (known is not None and self._is_read(known.agent)):
                return False
            self._forget(session)
            self._make_room()
        self._load(session, version, metadata)
        return True

    def _load(self, session: int, version: MetadataVersion, metadata: bytes) -> None:
        try:
            name = self._agent.load(metadata)
        except Unreachable:  # perhaps half of it is loaded
            self._loaded[session] = version
            self._stale.add(version.agent)
            self._forget(session)
            raise
        if name != version.agent:
            if all(name != other.agent for other in self._loaded.values()):
                self._agent.unload(name)
            raise Corruption(f"the metadata of a client's memory is not that of agent {version.agent!r}")
        self._loaded.pop(session, None)  # now it is the last one
        self._loaded[session] = version
        if len(metadata) <= KEPT_METADATA_BYTES_MAX:
            self._metadata[session] = version, metadata

    def _known(self, session: int) -> MetadataVersion | None:
        """The loaded memory of this session; after a new start, the previous one."""
        if session not in self._loaded and session in self._metadata:
            self._make_room()
            self._load(session, *self._metadata.pop(session))
        return self._loaded.get(session)

    def pull(self, write: object, session: int, ranges: Sequence[b.ByteRange]) -> ClientRead | None:
        """Begin to read these ranges of at most `PULL_BYTES` for a write. None: no buffer is free; the write is queued
        for one until it is `forgotten`. `Unreachable` if they cannot be read."""
        known = self._known(session)
        if known is None:  # it was unloaded to make room for another one
            raise Unreachable("the shard has forgotten the metadata of the client's memory; send it again")
        buffer, agent = self._buffer(write), known.agent
        if buffer is None:
            self._turns.setdefault(write)
            return None
        self.forgotten(write)
        try:
            pending = self._agent.read(agent, list(_copied(ranges, memory_address(buffer))))
        except Unreachable:
            self._free.append(buffer)
            self._stale.add(agent)
            raise
        pull = ClientRead(session, agent, ranges, buffer, pending)
        self._under_way.add(pull)
        try:
            pull.done()  # which posts it
        except Unreachable:
            self.give_up(pull)
            raise
        return pull

    def forgotten(self, write: object) -> None:
        """This write needs no buffer."""
        self._turns.pop(write, None)

    def end(self, pull: ClientRead) -> None:
        """Its read has succeeded and its bytes are consumed."""
        self._under_way.remove(pull)
        self._free.append(pull.buffer)

    def give_up(self, pull: ClientRead) -> None:
        """Its read failed or was abandoned: quarantine its buffer."""
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
        """Free the buffers of abandoned reads that have since succeeded."""
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
        for session in [session for session in self._metadata if session not in self._loaded and not serves(session)]:
            del self._metadata[session]

    def close(self) -> None:
        """Free all buffers that no read may write; the others stay until the process ends."""
        for session in list(self._loaded):
            self._forget(session)
        for buffer in self._free:
            with suppress(Unreachable):
                self._agent.deregister(self._registrations.pop(memory_address(buffer)))
        self._free = []
        if late := [*self._under_way, *self._limbo, *self._lost]:
            keep_for_good(self._agent, late)

    def _begun_anew(self, now: float) -> bool:
        """Replace the agent, when no read is under way, so that no quarantined buffer can be written. False: there is
        no other agent."""
        self._anew_from = now + ANEW_EVERY_S
        try:
            agent = self._open()
        except (Unreachable, UsageError) as error:
            _log.warning("the shard keeps %d buffers in quarantine: %s", self.quarantined, error)
            return False
        for pull in (*self._limbo, *self._lost):
            pull.let_go()
        if self._agent.close():
            _log.warning(
                "%d buffers that failed reads could have written are free again: their agent is gone", self.quarantined
            )
        else:
            keep_for_good(self._agent, *self._limbo, *self._lost)
        self._agent = agent
        for session in [session for session, known in self._loaded.items() if known.agent in self._stale]:
            self._metadata.pop(session, None)
        self._loaded, self._registrations, self._free = {}, {}, []
        self._stale, self._limbo, self._lost = set(), set(), []
        return True

    def _is_read(self, agent: str) -> bool:
        self.settle()
        return any(pull.agent == agent for pull in (*self._under_way, *self._limbo))

    def _forget(self, session: int) -> None:
        """Unload the agent of a session, unless it is read."""
        known = self._loaded.get(session)
        if known is None or self._is_read(known.agent):
            return
        del self._loaded[session]
        self._metadata.pop(session, None)
        self._stale.discard(known.agent)
        self._agent.unload(known.agent)

    def _make_room(self) -> None:
        """Unload an agent if there are too many."""
        for session in list(self._loaded) if len(self._loaded) >= BULK_CONNECTIONS_MAX else ():
            self._forget(session)
            if session not in self._loaded:
                return

    def _buffer(self, write: object) -> U8 | None:
        """A buffer for this write, if one is left once each write before it had one."""
        before = list(self._turns).index(write) if write in self._turns else len(self._turns)
        if BUFFERS_MAX - len(self._under_way) <= before:
            return None
        return self._free.pop() if self._free else self._fresh()

    def _fresh(self) -> U8:
        buffer = np.empty(PULL_BYTES, np.uint8)
        self._registrations[memory_address(buffer)] = self._agent.register(memory_address(buffer), PULL_BYTES)
        return buffer


def _copied(ranges: Sequence[b.ByteRange], into: int) -> list[CopiedRange]:
    """The ranges as one read copies them, one behind the other; those that follow each other at the client are one."""
    copied: list[CopiedRange] = []
    for place in ranges:
        last = copied[-1] if copied else None
        if last is not None and last.remote + last.nbytes == place.address:
            copied[-1] = last._replace(nbytes=last.nbytes + place.nbytes)
        else:
            copied.append(CopiedRange(into, place.address, place.nbytes))
        into += place.nbytes
    return copied
