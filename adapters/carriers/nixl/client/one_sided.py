"""Memory of this process that one-sided reads write, and the reader of one shard's memory
(docs/decisions/one-sided.md).

1. Receive buffers are registered once and reused: registering costs more than a read. The next `take` deregisters
   buffers that are not needed, since a finalizer must take no lock.
2. A buffer that a read may still write, because the read failed or its peer stands still, is in *quarantine*: not used
   again, and not freed before the agent that began the read is gone. Beyond `QUARANTINE_BYTES_MAX` of such buffers, of
   all its sessions, this process ends their agents, each once no transfer uses it, before it reads one-sided again.
   Their sessions go on with other agents.
3. After a failed read the stream carries the bytes, and for `PAUSE_S` everything from that shard.
4. A reader reads for one transfer at a time. So metadata of a new generation is loaded when no read of the old one is
   under way.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from transferqueue.adapters.carriers.nixl.agent import CopiedRange, MemoryAgent
from transferqueue.errors import Corruption, Impossible, TransferQueueError, Unreachable
from transferqueue.limits import RECEIVED_KEPT_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.buffer_pool import BufferPool
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk.protocol import RangesFrame

_log: Final = logging.getLogger("transferqueue.client")
QUARANTINE_BYTES_MAX: Final = RECEIVED_KEPT_BYTES
PAUSE_S: Final = 5.0
"""After a failed read its shard is read over the stream for so long."""
EAGER_S: Final = 0.0005
"""A read is asked for its end without a pause for so long: most of 8 MiB end earlier."""
POLL_S: Final = 0.0005
"""Afterwards, the pause between two questions. NIXL has no descriptor to sleep on."""
_NOTHING: Final = ("", 0, 0)
"""No metadata."""


class RegisteredPool(BufferPool):
    """A pool whose buffers are registered with an agent. Safe from any thread, and from finalizers."""

    def __init__(self, agent: MemoryAgent, kept_bytes: int = RECEIVED_KEPT_BYTES) -> None:
        super().__init__(kept_bytes)
        self._agent = agent
        self._registrations: dict[int, object] = {}
        self._dropped: deque[U8] = deque()
        self._guard = threading.Lock()
        self._given_up = self._registered = 0

    @property
    def version(self) -> tuple[int, int]:
        """Number of deregistrations, and of buffers ever registered. Metadata requested later describes at least
        these."""
        with self._guard:
            return self._given_up, self._registered

    def take(self, nbytes: int) -> U8:
        """See `BufferPool`. Deregisters dropped buffers."""
        with suppress(IndexError):
            while True:  # other threads take from it too
                dropped = self._dropped.popleft()
                self._agent.deregister(self._registrations.pop(memory_address(dropped)))
                with self._guard:
                    self._given_up += 1
                del dropped  # not earlier: its address would be free for others
        return super().take(nbytes)

    def _fresh(self, nbytes: int, *, pooled: bool) -> U8:
        raw = np.empty(nbytes, np.uint8)
        if pooled:
            self._registrations[memory_address(raw)] = self._agent.register(memory_address(raw), nbytes)
            with self._guard:
                self._registered += 1
        return raw

    def _drop(self, raw: U8) -> None:
        self._dropped.append(raw)


class Quarantine:
    """Memory of this process that reads may still write (rule 2), by the agent that began them."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[MemoryAgent, list[U8]] = {}
        self._owners: dict[MemoryAgent, weakref.ref[OneSidedMemory]] = {}

    @property
    def nbytes(self) -> int:
        """How much it is."""
        with self._guard:
            return sum(len(buffer) for buffers in self._held.values() for buffer in buffers)

    @property
    def full(self) -> bool:
        """Whether this process reads nothing one-sided now."""
        return self.nbytes > QUARANTINE_BYTES_MAX

    def add(self, owner: OneSidedMemory, agent: MemoryAgent, buffers: Sequence[U8]) -> None:
        """Neither use nor free these buffers, nor the agent whose reads may write them."""
        with self._guard:
            self._held.setdefault(agent, []).extend(buffers)
            self._owners[agent] = weakref.ref(owner)

    def settle(self) -> None:
        """End the agents that no transfer uses, and free what their reads may have written."""
        with self._guard:
            unused = [
                agent for agent in self._held if (owner := self._owners[agent]()) is None or owner.gives_up(agent)
            ]
            ended = [agent for agent in unused if agent.close()]
            freed = sum(len(buffer) for agent in ended for buffer in self._held.pop(agent))
            for agent in ended:
                del self._owners[agent]
        if freed:
            _log.info("%d bytes that failed reads could have written are free again: their agents are gone", freed)


QUARANTINE: Final = Quarantine()
"""That of this process."""


class OneSidedMemory:
    """Shared by the remote shards of a session: an agent, made by `open_agent` at the first read, and buffers that it
    may write."""

    def __init__(self, open_agent: Callable[[], MemoryAgent], quarantine: Quarantine = QUARANTINE) -> None:
        self._open = open_agent
        self._guard = threading.Lock()
        self._opened: tuple[MemoryAgent, RegisteredPool] | None = None
        self._users = 0
        self._quarantine: Final = quarantine

    def begin(self) -> bool:
        """Whether a transfer may read one-sided (rule 2). If so, agent and buffers stay the same until its `end`."""
        if self._quarantine.full:
            self._quarantine.settle()
        with self._guard:
            may = not self._quarantine.full
            self._users += may
            return may

    def end(self) -> None:
        """The transfer is over, and holds no read."""
        with self._guard:
            self._users -= 1

    def gives_up(self, agent: MemoryAgent) -> bool:
        """Have the next transfer open another agent, unless one is under way. Whether nothing uses this one. Does not
        block."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._opened is not None and self._opened[0] is agent and not self._users:
                self._opened = None
            return self._opened is None or self._opened[0] is not agent
        finally:
            self._guard.release()

    @property
    def agent(self) -> MemoryAgent:
        """The agent; takes up to half a second the first time."""
        return self._both()[0]

    @property
    def buffers(self) -> RegisteredPool:
        """The buffers that reads may write."""
        return self._both()[1]

    def quarantine(self, buffers: Sequence[U8]) -> None:
        """A read of this agent may still write this memory."""
        self._quarantine.add(self, self.agent, buffers)

    def _both(self) -> tuple[MemoryAgent, RegisteredPool]:
        with self._guard:
            if self._opened is None:
                agent = self._open()
                self._opened = agent, RegisteredPool(agent)
            return self._opened


class ShardReader:
    """Reads the memory of one shard, for one transfer at a time. Safe from any thread."""

    def __init__(self, memory: OneSidedMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory: Final = memory
        self._clock = clock
        self._turn = threading.Lock()
        self._loaded = _NOTHING
        self._loaded_by: MemoryAgent | None = None
        self._not_before = 0.0
        self.bytes_read = 0
        """Bytes read so far."""

    @property
    def usable(self) -> bool:
        """Whether the shard serves one-sided reads, and none failed a moment ago."""
        return self._clock() >= self._not_before

    def begin(self) -> bool:
        """Whether the next transfer may be one-sided. If so, call `end` after it."""
        return self.usable and self.memory.begin()

    def end(self) -> None:
        """The transfer is over."""
        self.memory.end()

    @property
    def loaded(self) -> tuple[str, int, int]:
        """Agent, generation and regions of the metadata that is loaded, see `RangesFrame`."""
        return self._loaded if self._loaded_by is self.memory.agent else _NOTHING

    def refused(self, error: TransferQueueError) -> None:
        """A one-sided transfer failed: use the stream for a while, or, if the shard serves no such reads, for good."""
        served = not isinstance(error, Impossible)
        self._not_before = self._clock() + PAUSE_S if served else float("inf")
        (_log.warning if served else _log.info)("columns come over the stream: %s", error)

    def read(
        self, frame: RangesFrame, ranges: Sequence[CopiedRange], buffers: Sequence[U8], check: Callable[[float], None]
    ) -> None:
        """Read the ranges that `frame` names. Blocks. `check` is called often with the seconds since the read began; an
        exception from it ends the read. `buffers` is the written memory, not to be reused if this raises. `Unreachable`
        if the shard is lost."""
        began = self._clock()
        while not self._turn.acquire(timeout=POLL_S):
            check(self._clock() - began)
        try:
            if self._loaded_by is not self.memory.agent:
                self._loaded, self._loaded_by = _NOTHING, self.memory.agent
            self._load(frame)
            self._read(ranges, buffers, check)
            self.bytes_read += sum(place.nbytes for place in ranges)
        finally:
            self._turn.release()

    def _load(self, frame: RangesFrame) -> None:
        version = (frame.agent, frame.generation, frame.regions)
        if not frame.metadata or version == self._loaded:
            if self._loaded[:2] != version[:2]:
                raise Unreachable("the metadata of the shard's memory was forgotten after a failed read; ask again")
            return
        if self._loaded[:2] == version[:2] and self._loaded > version:
            return  # another transfer has loaded more
        if self._loaded[0] == frame.agent and self._loaded[1] > frame.generation:
            raise Unreachable("the shard registered its memory anew after it named these ranges; ask again")
        if self._loaded[:2] != version[:2]:
            self._forget()
        if self.memory.agent.load(frame.metadata) != frame.agent:
            raise Corruption(f"the metadata of a shard's memory is not that of agent {frame.agent}")
        self._loaded = version

    def _forget(self) -> None:
        agent, self._loaded = self._loaded[0], _NOTHING
        if agent:
            self.memory.agent.unload(agent)

    def _read(self, ranges: Sequence[CopiedRange], buffers: Sequence[U8], check: Callable[[float], None]) -> None:
        began = self._clock()
        pending = self.memory.agent.read(self._loaded[0], ranges)
        try:
            while not pending.done():
                elapsed_s = self._clock() - began
                check(elapsed_s)
                if elapsed_s > EAGER_S:
                    time.sleep(POLL_S)
        except BaseException:
            self.memory.quarantine(buffers)
            pending.abandon()
            self._forget()
            raise
