"""The coordinator's record of a remote shard: its granted bytes, and the commands that it has yet to carry out. No I/O.

See docs/decisions/shards.md.

1. The coordinator decides which bytes are granted. The shard touches bytes and carries out commands, in order
   (`ShardCommands`). A command takes effect here when the shard confirms it.
2. An extent is granted only where pages exist. The coordinator requests missing pages, if possible ahead of use; until
   they exist their range counts as allocated. A shard that had no room for pages is asked again after bytes were freed.
3. A range for which a ticket was given is granted again only when the shard no longer honours that ticket (`tickets`).
4. Free pages are given back by the rule of `storage.memory.arena.surplus`. Their range then needs pages again.
5. An offer is an unproven claim. It counts as room for rows in this shard alone. Once a request for pages failed, only
   the existing pages count. A shard may confirm only commands that it got.
6. A shard that drains grants nothing more. When it is empty, it is told to shut down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

import msgspec

from transferqueue.errors import ProtocolError
from transferqueue.ledger.effects import Blocked, WakeKey
from transferqueue.limits import ARENA_STEP_BYTES, ITEMS_MAX, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.server.memory.own_memory import TRIM_AFTER_S, check_size
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import surplus
from transferqueue.wire import messages as m

_AHEAD_BYTES: Final = ARENA_STEP_BYTES // 4
"""The coordinator requests more pages when fewer bytes than this are free."""
_ENDED_MAX: Final = 4096
"""After so many ended extents and sessions the shard gets the live set, so that it can forget the ended ones."""


class _QueuedCommand(msgspec.Struct, frozen=True):
    number: int
    command: m.Order
    then: Callable[[bool, float], None]


def _nothing(_done: bool, _now: float) -> None:
    """Do nothing."""


class RemoteShard:
    """One remote shard.

    Args:
        wake: makes the requests due that wait on a key.
        live_set: its live extents and sessions at this moment.
        granted: the extents ``(offset, nbytes)`` by number that an earlier run of the coordinator granted; None: the
            shard joins now.
        sessions: those that an earlier run may have given tickets.
    """

    def __init__(
        self,
        session: OpenSession,
        offer: m.ShardOffer,
        epoch: int,
        *,
        wake: Callable[[WakeKey], None],
        live_set: Callable[[], m.LiveSet],
        granted: dict[int, tuple[int, int]] | None = None,
        sessions: Iterable[int] = (),
    ) -> None:
        self.session: Final = session
        self.offer: Final = offer
        self.tickets: Final = TicketIssuer(offer.secret)
        self.allocator: Final = Allocator.holding(offer.capacity, (granted or {}).values())
        self.draining = False
        self.sent_bytes = {"stream": 0, "one_sided": 0}
        self.received_bytes = dict(self.sent_bytes)
        """Bytes that clients have read from it, by carrier, as of its latest poll for commands."""
        self._epoch = epoch
        self._wake = wake
        self._live_set = live_set
        self._commands: deque[_QueuedCommand] = deque()
        self._last = self._last_sent = 0
        self._ended = 0
        self._growing = 0
        self._full = False
        self._trim_at: float | None = None
        self._ready = granted is None
        if granted is None:
            self._request_ahead()
        else:
            self._continue(granted, sessions)

    @property
    def number(self) -> int:
        """The number of the shard."""
        return self.offer.number

    @property
    def used(self) -> int:
        """Bytes that sessions have, or that were just freed and whose tickets are not yet revoked."""
        return self.allocator.used - self._growing

    @property
    def grantable(self) -> int:
        """The most bytes that it can grant, as far as known: after a failed request for pages, the existing pages."""
        return self.used + self.allocator.warm if self._full else self.allocator.capacity

    def is_near(self, session: OpenSession) -> bool:
        """Whether it is on the host of the session."""
        return bool(session.hello.host) and session.hello.host == self.session.hello.host

    def _continue(self, extents: Iterable[int], sessions: Iterable[int]) -> None:
        """Continue a shard of an earlier run. Which commands it received is unknown, so it gets the live set, and frees
        all pages that are not granted."""
        self.tickets.resume(sessions, extents)
        self._send(self._live_set())
        for offset, nbytes in self.allocator.free_ranges():
            self._send(m.FreePages(offset, nbytes))
        self._commands[-1] = msgspec.structs.replace(self._commands[-1], then=self._begin)

    def _begin(self, _done: bool, _now: float) -> None:
        self._ready = True
        self._request_ahead()

    # ------------------------------------------------------------ extents

    def check(self, nbytes: int) -> None:
        """`Impossible` if an extent of `nbytes` could never be granted."""
        check_size(nbytes, self.allocator)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Take an extent of at least `nbytes` in whole pages. Returns offset and size; None without such pages now."""
        if self.draining or not self._ready:
            return None
        size = align(nbytes, PAGE_BYTES)
        offset = self.allocator.allocate_warm(size)
        if offset is None:
            self._request_pages(size)
            return None
        if self.allocator.warm < _AHEAD_BYTES:
            self._request_ahead()
        return offset, size

    def give_back(self, extent: int, offset: int, nbytes: int, now: float) -> None:
        """Free an extent, once no ticket for it is honoured any more."""
        if not self.tickets.admits(extent):
            self._free(offset, nbytes, now)
            return
        self.tickets.revoke(extent)
        self._send(m.Revoke(extent), lambda _done, then: self._free(offset, nbytes, then))
        self._count_ended()

    def close(self, session: int) -> None:
        """A session ended: the shard must no longer honour its tickets."""
        if self.tickets.serves(session):
            self.tickets.close(session)
            self._send(m.CloseTransfers(session))
            self._count_ended()

    def end(self) -> None:
        """The shard is gone: forget its commands, which refer back to this object."""
        self._commands.clear()

    def drain(self) -> None:
        """Grant nothing more, and leave as soon as the shard is empty."""
        self.draining = True
        self._leave_if_empty()

    def _free(self, offset: int, nbytes: int, now: float) -> None:
        self.allocator.free(offset, nbytes)
        self._full = False
        if self._trim_at is None:
            self._trim_at = now + TRIM_AFTER_S
        self._wake(("memory",))
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        """Tell the shard to shut down, if it drains and is empty."""
        if self.draining and not self.allocator.used:
            self._send(m.ShutDownShard())

    # ------------------------------------------------------------ pages

    def _request_pages(self, size: int) -> None:
        """Request pages for an extent of this size, or a whole step if there is room."""
        if self._growing >= size or self._full:
            return
        for wanted in (max(size, ARENA_STEP_BYTES), size):
            if (offset := self.allocator.allocate_cold(wanted)) is not None:
                self._allocate(offset, wanted)
                return
        if (offset := self.allocator.allocate(size)) is not None:  # a range in which only some pages exist
            self._allocate(offset, size)

    def _request_ahead(self) -> None:
        if self._growing or self._full:
            return
        if (offset := self.allocator.allocate_cold(ARENA_STEP_BYTES)) is not None:
            self._allocate(offset, ARENA_STEP_BYTES)

    def _allocate(self, offset: int, nbytes: int) -> None:
        self._growing += nbytes
        self._send(m.AllocatePages(offset, nbytes), lambda done, now: self._pages_allocated(offset, nbytes, done, now))

    def _pages_allocated(self, offset: int, nbytes: int, done: bool, _now: float) -> None:
        self._growing -= nbytes
        self.allocator.free(offset, nbytes)
        if done:
            self._wake(("memory",))
        else:
            self.allocator.chill(offset, nbytes)
            self._full = True
        self._leave_if_empty()

    def next_deadline(self) -> float | None:
        """When to call `trim` next; None: nothing is due."""
        return self._trim_at

    def trim(self, now: float) -> None:
        """Give pages back to the system that were free for a while, if there are many."""
        if self._trim_at is None or now < self._trim_at:
            return
        self._trim_at = None
        excess = surplus(self.allocator.used + self.allocator.warm, self.allocator.used)
        for offset, nbytes in self.allocator.coldest() if excess else ():
            size = min(nbytes, excess)
            self.allocator.chill(offset, size)
            self._send(m.FreePages(offset, size))
            excess -= size
            if not excess:
                return

    # ------------------------------------------------------------ commands

    def commands(self, request: m.PollCommands, now: float) -> m.ShardCommands | Blocked:
        """The next commands, after the shard confirmed earlier ones. `ProtocolError` if it confirms a command that it
        never got."""
        self.sent_bytes = dict(zip(self.sent_bytes, request.sent, strict=True))
        self.received_bytes = dict(zip(self.received_bytes, request.received, strict=True))
        if request.epoch == self._epoch:
            if request.done > self._last_sent:
                raise ProtocolError(
                    f"shard {self.number} confirms order {request.done}, but the last one sent to it was "
                    f"{self._last_sent}"
                )
            self._confirm(request.done, frozenset(request.failed), now)
        if not self._commands:
            return Blocked((("shard", str(self.number)),))
        sent = list(islice(self._commands, ITEMS_MAX))
        self._last_sent = max(self._last_sent, sent[-1].number)
        return m.ShardCommands(self._epoch, sent[0].number, [queued.command for queued in sent])

    def _confirm(self, done: int, failed: frozenset[int], now: float) -> None:
        while self._commands and self._commands[0].number <= done:
            command = self._commands.popleft()
            command.then(command.number not in failed, now)

    def _send(self, command: m.Order, then: Callable[[bool, float], None] = _nothing) -> None:
        self._last += 1
        self._commands.append(_QueuedCommand(self._last, command, then))
        self._wake(("shard", str(self.number)))

    def _count_ended(self) -> None:
        self._ended += 1
        if self._ended >= _ENDED_MAX:
            self._ended = 0
            self._send(self._live_set())
