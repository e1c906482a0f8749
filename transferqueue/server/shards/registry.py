"""The shards of a deployment: which exist, which one grants the next extent, and which sessions need tickets for which.
No I/O. See docs/decisions/shards.md.

1. Shard 0 is the coordinator's own arena. A process whose Hello contains a `ShardOffer` is a remote shard for exactly
   as long as its session lasts, so its death is detected like that of any session. The ledger then treats its contents
   as lost.
2. A shard number is never used twice, not even by a later run of the coordinator: a client may still hold a reply that
   names it.
3. An extent is granted from a near shard (on the session's host) if one has room, else from another one; the emptiest
   first.
4. An offer is an unproven claim. The coordinator checks the arena of a shard on its own host (`liveness.check_arena`),
   and accepts no shard larger than a process can map. One part in `RESULTS_SHARE` of each shard is reserved for
   results, so a false claim gives no room in another shard's memory.
5. A session maps a shard if the coordinator detects the death of both, so if all three are on one host. Only then does
   the kernel tell when the memory that a client saw may be used again (docs/decisions/memory.md). Bytes in all other
   shards travel, by ticket. Of a block with copies the session gets one, if possible a copy that it maps. A shard that
   authenticated with a key is never mapped: no client opens a file because a remote user names it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from transferqueue.errors import Full, Impossible, NotFound, OutOfMemory, UsageError, listing
from transferqueue.errors.on_failure import OnFailure
from transferqueue.ledger.effects import FreeExtent
from transferqueue.limits import LOADS_SHARE, PAGE_BYTES, RESULTS_SHARE, SHARD_BYTES_MAX, SHARDS_MAX
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.sessions.waiting import WakeKey
from transferqueue.server.shards.backlog import Backlog
from transferqueue.server.shards.own_memory import SHARD, OwnShardMemory
from transferqueue.server.shards.remote_shard import RemoteShard
from transferqueue.server.shards.tickets import TicketIssuer, issue
from transferqueue.transport import TcpAddress, parse_address
from transferqueue.wire import messages as m

_KEY: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key of CURVE, in Z85 (32/Z85 of rfc.zeromq.org)."""


class ShardRegistry:
    """The own shard and all remote ones.

    Args:
        last: the highest number given so far.
        own_first: the first copy of each block is in the own shard, and other shards grant only further copies.
        wake: see `RemoteShard`.
        live_set: see `RemoteShard`.
    """

    def __init__(
        self,
        own: OwnShardMemory,
        tickets: TicketIssuer,
        epoch: int,
        *,
        last: int = SHARD,
        own_first: bool = False,
        wake: Callable[[WakeKey], None],
        live_set: Callable[[int], m.LiveSet],
    ) -> None:
        self.own: Final = own
        self.own_first: Final = own_first
        self._tickets = tickets
        self._epoch = epoch
        self._wake = wake
        self._live_set = live_set
        self.remote: Final[dict[int, RemoteShard]] = {}
        """The remote shards that joined, by number."""
        self.on_gone: Callable[[int, int, float], object] = lambda shard, session, now: None
        """Called with the number of a remote shard whose session ended, the session, and the time."""
        self._last = last
        self._held: set[int] = set()
        self._freed_while_held: dict[int, FreeExtent] = {}
        """Extents to free once they are not held, by number."""

    def __iter__(self) -> Iterator[RemoteShard]:
        """The remote shards."""
        return iter(self.remote.values())

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
        if offer.key and not _KEY.fullmatch(offer.key):
            raise UsageError(
                "shard refused: the key that it offers is no public key of CURVE; offer 40 characters of Z85, or none"
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

    def close(self, session: OpenSession, now: float) -> None:
        """A session ended. Its tickets end too, and so does the shard that it offered."""
        self._tickets.close(session.number)
        offer = session.hello.shard
        if offer is not None and (shard := self.remote.pop(offer.number, None)) is not None:
            shard.end()
            self._wake(("memory",))
            self.on_gone(offer.number, session.number, now)
        for shard in self.remote.values():
            shard.close(session.number)

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

    # ------------------------------------------------------------ extents

    @property
    def used(self) -> int:
        """The bytes that all shards have granted."""
        return self.own.used + sum(shard.used for shard in self.remote.values())

    def take(
        self, session: OpenSession, nbytes: int, apart: Collection[int] = (), use: m.GrantPurpose = "results"
    ) -> tuple[int, int, int] | None:
        """Take an extent of at least `nbytes` from a shard that is not in `apart`. Returns shard, offset and size; None
        if no shard has room now. `Impossible` if no shard could ever have it; errors as in `OwnShardMemory.take`.
        """
        candidates = [shard for shard in self._ranked(session, use) if shard.number not in apart]
        if self.own_first and SHARD not in apart:
            candidates = [self.own]
        if use == "rows":
            self._check_rows(nbytes, [self.own] if self.own_first else self._lending)
        if not candidates:
            raise Impossible(
                f"an extent apart from shards {listing(apart)} can never be granted: there are no others; start "
                "further shards (transferqueue shard), or make the table with fewer replicas"
            )
        if all(nbytes > shard.allocator.capacity for shard in candidates):
            max(candidates, key=lambda shard: shard.allocator.capacity).check(nbytes)
        refused: OutOfMemory | None = None
        for shard in candidates:
            if not _has_room(shard, nbytes, use):
                continue
            try:
                extent = shard.take(nbytes) if nbytes <= shard.allocator.capacity else None
            except OutOfMemory as error:
                refused = error
                continue
            if extent is not None:
                if (backlog := _backlog_of(shard)) is not None and use != "weights":
                    backlog.largest = max(backlog.largest, extent[1])
                return shard.number, *extent
        if refused is not None:
            raise refused
        return None

    def own_may_have(self, nbytes: int, apart: Collection[int], use: m.GrantPurpose) -> bool:
        """Whether the coordinator's own arena, if it were free, may grant an extent of `nbytes`."""
        return SHARD not in apart and nbytes <= (for_rows(self.own) if use == "rows" else self.own.grantable)

    def lender(self, number: int) -> OwnShardMemory | RemoteShard:
        """The shard of this number, which must exist."""
        return self.own if number == SHARD else self.remote[number]

    def rooms_for_rows(self) -> dict[int, int]:
        """The bytes that new rows may still take, by shard. Only shards that grant memory and have room."""
        lending: list[OwnShardMemory | RemoteShard] = [self.own, *self.remote.values()]
        rooms = {
            shard.number: _room_for_rows(shard)
            for shard in lending
            if isinstance(shard, OwnShardMemory) or not shard.draining
        }
        return {number: room for number, room in rooms.items() if room > 0}

    @property
    def _lending(self) -> list[OwnShardMemory | RemoteShard]:
        """The shards that grant memory."""
        return [self.own, *(shard for shard in self.remote.values() if not shard.draining)]

    def _check_rows(self, nbytes: int, lending: Sequence[OwnShardMemory | RemoteShard]) -> None:
        """`Impossible` if none of these shards could ever grant so much to new rows."""
        room, capacity = max((for_rows(shard), shard.allocator.capacity) for shard in lending)
        if nbytes > room:
            raise Impossible(
                f"{nbytes:,} bytes for new rows can never be granted: of {capacity:,} bytes of memory new "
                f"rows may use {room:,}, the rest is for results; put fewer rows at a time, or start the server "
                "with a larger --arena-bytes"
            )

    def check_replicas(self, table: str, replicas: int) -> None:
        """`Impossible` if fewer than `replicas` shards grant memory."""
        lending = 1 + sum(not shard.draining for shard in self.remote.values())
        if replicas > lending:
            raise Impossible(
                f'table "{table}" would keep each block in replicas={replicas} shards, and {lending} lend memory: '
                f"{replicas} > {lending}; start remote shards (transferqueue shard), or make it with fewer replicas"
            )

    def _ranked(self, session: OpenSession, use: m.GrantPurpose) -> list[OwnShardMemory | RemoteShard]:
        """The shards that grant memory, the best first. For weights that is the own shard: it lasts as long as the
        ledger."""
        if not self.remote:
            return [self.own]
        ranked: list[tuple[bool, float, int, OwnShardMemory | RemoteShard]] = [
            (not _near(session, shard), _fill(shard), number, shard)
            for number, shard in self.remote.items()
            if not shard.draining
        ]
        ranked.append((session.remote, _fill(self.own), self._last + 1, self.own))
        ordered = [shard for *_, shard in sorted(ranked, key=lambda entry: entry[:3])]
        return sorted(ordered, key=lambda shard: shard is not self.own) if use == "weights" else ordered

    def give_back(self, freed: FreeExtent, now: float) -> None:
        """Free an extent as soon as it is not held. Does nothing if its shard is gone."""
        if freed.extent in self._held:
            self._freed_while_held[freed.extent] = freed
        elif freed.shard == SHARD:
            self._tickets.revoke(freed.extent)
            self.own.give_back(freed.offset, freed.nbytes, now)
            self._wake(("memory",))
        elif (shard := self.remote.get(freed.shard)) is not None:
            shard.give_back(freed.extent, freed.offset, freed.nbytes, now)

    @contextmanager
    def granting(self, shard: int, offset: int, nbytes: int, now: float) -> Iterator[None]:
        """Around the grant of taken memory. If the grant fails, the memory is free again."""
        with OnFailure(self.give_back, FreeExtent(0, shard, offset, nbytes), now):
            yield

    def hold(self, extents: Iterable[int]) -> None:
        """Keep the bytes of these extents until `release`, even if they are freed meanwhile."""
        self._held.update(extents)

    def release(self, extents: Iterable[int], now: float) -> None:
        """End the hold on these extents, and free those that were freed meanwhile."""
        for extent in extents:
            self._held.discard(extent)
            if (freed := self._freed_while_held.pop(extent, None)) is not None:
                self.give_back(freed, now)

    def freed_while_held(self, shard: int) -> list[int]:
        """The extents of a shard that the ledger has freed, but whose bytes are held."""
        return [freed.extent for freed in self._freed_while_held.values() if freed.shard == shard]

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

    def explain(self, nbytes: int, holders: str, use: m.GrantPurpose = "results") -> str:
        """Why `nbytes` cannot be granted now."""
        own = self.own.explain(nbytes, holders)
        if use == "rows":
            own += f". One byte in {RESULTS_SHARE} is reserved for results"
        if not self.remote:
            return own
        others = ", ".join(
            f"shard {number}: {shard.used:,} of {shard.offer.capacity:,} bytes" + (", drains" if shard.draining else "")
            for number, shard in sorted(self.remote.items())
        )
        return f"{own}. Nor is one in a remote shard ({others})"

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


def _backlog_of(shard: OwnShardMemory | RemoteShard) -> Backlog | None:
    """The books of arena and spill disk together; None for a remote shard, which has no such disk."""
    return shard.backlog if isinstance(shard, OwnShardMemory) else None


def for_rows(shard: OwnShardMemory | RemoteShard) -> int:
    """The bytes of a shard that new rows may take."""
    return for_loads(shard) - (0 if _backlog_of(shard) is None else shard.grantable // LOADS_SHARE)


def for_loads(shard: OwnShardMemory | RemoteShard) -> int:
    """The bytes of a shard that rows may take, new ones and those that come back from disk."""
    return shard.grantable - shard.grantable // RESULTS_SHARE


def _has_room(shard: OwnShardMemory | RemoteShard, nbytes: int, use: m.GrantPurpose) -> bool:
    """Whether the shard may grant so much now. Its memory decides whether it can. Weights are no rows: they are not
    spilled."""
    if use == "rows" and shard.used + nbytes > for_rows(shard):
        return False
    backlog = _backlog_of(shard)
    return (
        backlog is None
        or use == "weights"
        or (not backlog.is_held and backlog.admits(nbytes, shard.used, rows=use == "rows"))
    )


def _room_for_rows(shard: OwnShardMemory | RemoteShard) -> int:
    room, backlog = for_rows(shard) - shard.used, _backlog_of(shard)
    if backlog is None or not backlog.on_disk:
        return room
    return 0 if backlog.is_held else min(room, backlog.room_for_rows(shard.used))


def _fill(shard: OwnShardMemory | RemoteShard) -> float:
    return shard.used / shard.allocator.capacity


def _near(session: OpenSession, shard: RemoteShard) -> bool:
    return bool(session.hello.host) and session.hello.host == shard.session.hello.host


def _maps(session: OpenSession, shard: RemoteShard) -> bool:
    return bool(shard.offer.path) and not session.remote and not shard.session.remote and _near(session, shard)


def _endpoint(shard: RemoteShard, *, mapped: bool) -> m.ShardEndpoint:
    offer = shard.offer
    return m.ShardEndpoint(offer.number, offer.path if mapped else "", offer.capacity, offer.endpoint, offer.key)


def live_set(extents: list[int], extents_to: int, sessions: list[int], sessions_to: int) -> m.LiveSet:
    """The live extents and sessions, with the first numbers not yet given, for a shard."""
    return m.LiveSet(extents_to, _packed(extents), sessions_to, _packed(sessions))


def _packed(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)
