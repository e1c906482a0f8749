"""Which memory grants the next extent, and when the bytes of a freed one may be granted again. No I/O.

1. The server's own arena always lends. A part may add other lenders (`Lending.remote`).
2. An extent is granted from a near lender (on the session's host) if one has room, else from another one; the emptiest
   first.
3. One part in `RESULTS_SHARE` of each lender is reserved for results, so that rows which wait for them can end.
4. Extents that are *held* keep their bytes, even if they are freed meanwhile. Several parts may hold one at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from transferqueue.errors import Impossible, OutOfMemory, listing
from transferqueue.errors.on_failure import OnFailure
from transferqueue.ledger.effects import FreeExtent, WakeKey
from transferqueue.limits import LOADS_SHARE, RESULTS_SHARE
from transferqueue.server.memory.backlog import Backlog
from transferqueue.server.memory.own_memory import SHARD, OwnShardMemory
from transferqueue.server.parts import Part
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.wire import messages as m


class Lender(Protocol):
    """Memory of another process."""

    @property
    def number(self) -> int:
        """The number of its shard."""

    @property
    def allocator(self) -> Allocator:
        """Its ranges that are granted, and those that are free."""

    @property
    def used(self) -> int:
        """Bytes that sessions have."""

    @property
    def grantable(self) -> int:
        """The most bytes that it can grant."""

    @property
    def draining(self) -> bool:
        """Whether it grants nothing more."""

    def is_near(self, session: OpenSession) -> bool:
        """Whether it is on the host of the session."""

    def check(self, nbytes: int) -> None:
        """`Impossible` if it could never grant an extent of `nbytes`."""

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Take an extent of at least `nbytes`. Returns offset and size; None if there is no room now."""

    def give_back(self, extent: int, offset: int, nbytes: int, now: float) -> None:
        """Free an extent that `take` returned."""


AnyLender = OwnShardMemory | Lender


class Lending:
    """The memory of one coordinator.

    Args:
        own: its arena.
        parts: are told before freed bytes of the arena may be granted again (`Part.memory_freed`).
        wake: makes the requests due that wait on a key.
    """

    def __init__(
        self,
        own: OwnShardMemory,
        parts: Iterable[Part] = (),
        wake: Callable[[WakeKey], None] = lambda _: None,
    ) -> None:
        self.own: Final = own
        self.remote: Mapping[int, Lender] = {}
        """The other lenders, by number."""
        self._parts = parts
        self._wake = wake
        self.own_first = False
        """Whether the first copy of each block is in the arena, and other lenders grant only further copies."""
        self._holds: Counter[int] = Counter()
        """How many hold an extent: a snapshot and a record may hold the same one."""
        self._freed_while_held: dict[int, FreeExtent] = {}
        """Extents to free once they are not held, by number."""

    # ------------------------------------------------------------ grants

    @property
    def used(self) -> int:
        """The bytes that all lenders have granted."""
        return self.own.used + sum(lender.used for lender in self.remote.values())

    def take(
        self, session: OpenSession, nbytes: int, apart: Collection[int] = (), use: m.GrantPurpose = "results"
    ) -> tuple[int, int, int] | None:
        """Take an extent of at least `nbytes` from a shard that is not in `apart`. Returns shard, offset and size; None
        if no shard has room now. `Impossible` if no shard could ever have it; errors as in `OwnShardMemory.take`.
        """
        candidates = [lender for lender in self._ranked(session, use) if lender.number not in apart]
        if self.own_first and SHARD not in apart:
            candidates = [self.own]
        if use == "rows":
            _check_rows(nbytes, [self.own] if self.own_first else self._lending)
        if not candidates:
            raise Impossible(
                f"an extent apart from shards {listing(apart)} can never be granted: there are no others; start "
                "further shards (transferqueue shard), or make the table with fewer replicas"
            )
        if all(nbytes > lender.allocator.capacity for lender in candidates):
            max(candidates, key=lambda lender: lender.allocator.capacity).check(nbytes)
        refused: OutOfMemory | None = None
        for lender in candidates:
            if not _has_room(lender, nbytes, use):
                continue
            try:
                extent = lender.take(nbytes) if nbytes <= lender.allocator.capacity else None
            except OutOfMemory as error:
                refused = error
                continue
            if extent is not None:
                if (backlog := _backlog_of(lender)) is not None and use != "weights":
                    backlog.largest = max(backlog.largest, extent[1])
                return lender.number, *extent
        if refused is not None:
            raise refused
        return None

    def _ranked(self, session: OpenSession, use: m.GrantPurpose) -> list[AnyLender]:
        """The shards that grant memory, the best first. For weights that is the own shard: it lasts as long as the
        ledger."""
        if not self.remote:
            return [self.own]
        ranked: list[tuple[bool, float, float, AnyLender]] = [
            (not lender.is_near(session), _fill(lender), number, lender)
            for number, lender in self.remote.items()
            if not lender.draining
        ]
        ranked.append((session.remote, _fill(self.own), math.inf, self.own))
        ordered = [lender for *_, lender in sorted(ranked, key=lambda entry: entry[:3])]
        return sorted(ordered, key=lambda lender: lender is not self.own) if use == "weights" else ordered

    @property
    def _lending(self) -> list[AnyLender]:
        """The shards that grant memory."""
        return [self.own, *(lender for lender in self.remote.values() if not lender.draining)]

    def lender(self, number: int) -> AnyLender:
        """The shard of this number, which must exist."""
        return self.own if number == SHARD else self.remote[number]

    def own_may_have(self, nbytes: int, apart: Collection[int], use: m.GrantPurpose) -> bool:
        """Whether the coordinator's own arena, if it were free, may grant an extent of `nbytes`."""
        return SHARD not in apart and nbytes <= (for_rows(self.own) if use == "rows" else self.own.grantable)

    def rooms_for_rows(self) -> dict[int, int]:
        """The bytes that new rows may still take, by shard. Only shards that grant memory and have room."""
        rooms = {lender.number: _room_for_rows(lender) for lender in self._lending}
        return {number: room for number, room in rooms.items() if room > 0}

    def check_replicas(self, table: str, replicas: int) -> None:
        """`Impossible` if fewer than `replicas` shards grant memory."""
        lending = len(self._lending)
        if replicas > lending:
            raise Impossible(
                f'table "{table}" would keep each block in replicas={replicas} shards, and {lending} lend memory: '
                f"{replicas} > {lending}; start remote shards (transferqueue shard), or make it with fewer replicas"
            )

    def explain(self, nbytes: int, holders: str, use: m.GrantPurpose = "results") -> str:
        """Why `nbytes` cannot be granted now."""
        own = self.own.explain(nbytes, holders)
        if use == "rows":
            own += f". One byte in {RESULTS_SHARE} is reserved for results"
        if not self.remote:
            return own
        others = ", ".join(
            f"shard {number}: {lender.used:,} of {lender.allocator.capacity:,} bytes"
            + (", drains" if lender.draining else "")
            for number, lender in sorted(self.remote.items())
        )
        return f"{own}. Nor is one in a remote shard ({others})"

    # ------------------------------------------------------------ freed memory

    @contextmanager
    def granting(self, shard: int, offset: int, nbytes: int, now: float) -> Iterator[None]:
        """Around the grant of taken memory. If the grant fails, the memory is free again."""
        with OnFailure(self.give_back, FreeExtent(0, shard, offset, nbytes), now):
            yield

    def give_back(self, freed: FreeExtent, now: float) -> None:
        """Free an extent as soon as it is not held. Does nothing if its shard is gone."""
        if freed.extent in self._holds:
            self._freed_while_held[freed.extent] = freed
        elif freed.shard == SHARD:
            for part in self._parts:
                part.memory_freed(freed.extent)
            self.own.give_back(freed.offset, freed.nbytes, now)
            self._wake(("memory",))
        elif (lender := self.remote.get(freed.shard)) is not None:
            lender.give_back(freed.extent, freed.offset, freed.nbytes, now)

    def hold(self, extents: Iterable[int]) -> None:
        """Keep the bytes of these extents until `release`, even if they are freed meanwhile. Each hold needs its own
        `release`."""
        self._holds.update(set(extents))

    def release(self, extents: Iterable[int], now: float) -> None:
        """End one hold on each of these extents, and free those that were freed meanwhile and that no other holds."""
        for extent in set(extents):
            self._holds[extent] -= 1
            if self._holds[extent] > 0:
                continue
            del self._holds[extent]
            if (freed := self._freed_while_held.pop(extent, None)) is not None:
                self.give_back(freed, now)

    def freed_while_held(self, shard: int) -> list[int]:
        """The extents of a shard that the ledger has freed, but whose bytes are held."""
        return [freed.extent for freed in self._freed_while_held.values() if freed.shard == shard]


def for_rows(lender: AnyLender) -> int:
    """The bytes of a shard that new rows may take."""
    return for_loads(lender) - (0 if _backlog_of(lender) is None else lender.grantable // LOADS_SHARE)


def for_loads(lender: AnyLender) -> int:
    """The bytes of a shard that rows may take, new ones and those that come back from disk."""
    return lender.grantable - lender.grantable // RESULTS_SHARE


def _check_rows(nbytes: int, lending: Sequence[AnyLender]) -> None:
    """`Impossible` if none of these shards could ever grant so much to new rows."""
    room, capacity = max((for_rows(lender), lender.allocator.capacity) for lender in lending)
    if nbytes > room:
        raise Impossible(
            f"{nbytes:,} bytes for new rows can never be granted: of {capacity:,} bytes of memory new "
            f"rows may use {room:,}, the rest is for results; put fewer rows at a time, or start the server "
            "with a larger --arena-bytes"
        )


def _backlog_of(lender: AnyLender) -> Backlog | None:
    """The books of arena and spill disk together; None for a remote shard, which has no such disk."""
    return lender.backlog if isinstance(lender, OwnShardMemory) else None


def _has_room(lender: AnyLender, nbytes: int, use: m.GrantPurpose) -> bool:
    """Whether the shard may grant so much now. Its memory decides whether it can. Weights are no rows: they are not
    spilled."""
    if use == "rows" and lender.used + nbytes > for_rows(lender):
        return False
    backlog = _backlog_of(lender)
    return (
        backlog is None
        or use == "weights"
        or (not backlog.is_held and backlog.admits(nbytes, lender.used, rows=use == "rows"))
    )


def _room_for_rows(lender: AnyLender) -> int:
    room, backlog = for_rows(lender) - lender.used, _backlog_of(lender)
    if backlog is None or not backlog.on_disk:
        return room
    return 0 if backlog.is_held else min(room, backlog.room_for_rows(lender.used))


def _fill(lender: AnyLender) -> float:
    return lender.used / lender.allocator.capacity
