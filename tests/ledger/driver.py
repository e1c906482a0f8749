"""A comfortable way to talk to a ledger in tests: numpy in and out, one method a request, a fake arena.

`Driver` is one client session; `world()` makes a ledger with an arena that reuses freed extents at once, so that
a bug in extent accounting shows as overlapping grants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from transferqueue.ledger import Blocked, Effect, FreeExtent, LeaseEnded, Ledger, WakeWaiters
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import PAGE_BYTES, Limits
from transferqueue.policies import Pacing, Predicate, Retention, Task
from transferqueue.schema import Field, align, layout
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.sessions import SessionStats
from transferqueue.wire.answers.stats import AuditAnswer, Stats, TableStats

KINDS: Final[dict[str, Any]] = {
    "stats": Stats,
    "audit": AuditAnswer,
    "doctor": DoctorAnswer,
    "row": RowLife,
    "sessions": dict[str, SessionStats],
}


def i64(values: Any) -> bytes:
    return np.asarray(values, "<i8").tobytes()


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i8").tolist()


@dataclass
class World:
    """A ledger, a clock that tests move, and an arena."""

    ledger: Ledger = field(default_factory=Ledger)
    now: float = 0.0
    capacity: int = 1 << 40
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    """extent -> (offset, nbytes)"""
    shard_of: dict[int, int] = field(default_factory=dict)
    """extent -> shard, of extents ever granted"""
    freed: list[int] = field(default_factory=list)
    woken: list[tuple[str, ...]] = field(default_factory=list)
    ended: list[LeaseEnded] = field(default_factory=list)
    sessions: int = 0

    def client(self, label: str = "", client: bytes = b"") -> Driver:
        self.sessions += 1
        name = client or f"client-{self.sessions:09d}".encode()
        self.ledger.open_session(self.sessions, name, self.now, label=label)
        return Driver(self, self.sessions)

    def allocate(self, nbytes: int, shard: int = 0) -> tuple[int, int]:
        size, at = align(nbytes, PAGE_BYTES), 0
        mine = (place for extent, place in self.taken.items() if self.shard_of.get(extent, 0) == shard)
        for offset, taken in sorted(mine):
            if offset - at >= size:
                break
            at = offset + taken
        return at, size

    def collect(self) -> list[Effect]:
        """Act on effects as a node would; a freed extent must be one that is taken, freed once."""
        effects = self.ledger.take_effects()
        for effect in effects:
            if isinstance(effect, FreeExtent):
                assert self.taken.pop(effect.extent) == (effect.offset, effect.nbytes)
                assert self.shard_of.get(effect.extent, 0) == effect.shard
                self.freed.append(effect.extent)
            elif isinstance(effect, WakeWaiters):
                self.woken.append(effect.key)
            else:
                self.ended.append(effect)
        return effects

    def lose_shard(self, shard: int) -> dict[str, list[int]]:
        """The shard's memory is gone: nothing of it is ever freed, and a new shard of the number begins with none
        taken."""
        lost = self.ledger.shard_lost(shard, self.now)
        self.taken = {extent: place for extent, place in self.taken.items() if self.shard_of.get(extent, 0) != shard}
        self.collect()
        return lost

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.tick(self.now)
        self.collect()

    def table(self, name: str = "t") -> TableState:
        """The state itself, for what no request shows."""
        return self.ledger.state.tables[name]

    def audit(self) -> AuditAnswer:
        return self.ledger.observe(m.Observe("audit"), self.now)

    def stats(self, table: str = "t") -> TableStats:
        return self.ledger.observe(m.Observe("stats"), self.now).tables[table]


@dataclass
class Given:
    """A lease as a test wants to see it."""

    reply: m.Leased

    @property
    def rows(self) -> list[int]:
        return ids(self.reply.content.rows)

    @property
    def lease(self) -> int:
        return self.reply.lease

    @property
    def token(self) -> int:
        return self.reply.token

    def column(self, name: str, dtype: str = "<f8") -> list[Any]:
        (data,) = [one.data for one in self.reply.content.inline if one.field == name]
        return np.frombuffer(data, dtype).tolist()

    def blocks(self) -> list[int]:
        return [at.block for part in self.reply.content.parts for at in part.blocks]


@dataclass
class Driver:
    """One session. Every method sends one request with the next call id."""

    world: World
    session: int
    call: int = 0
    shard: int = 0
    """Where its grants are."""
    copies: list[int] = field(default_factory=list)
    """Shards where it writes each block too."""

    # ------------------------------------------------------------ raw

    def apply(self, request: m.Request, call: int | None = None) -> Any:
        if call is None:
            self.call += 1
            call = self.call
        try:
            return self.world.ledger.apply(request, session=self.session, call=call, now=self.world.now)
        finally:
            self.world.collect()

    # ------------------------------------------------------------ tables

    def create(
        self,
        name: str = "t",
        *,
        tasks: Sequence[Task] = (),
        fields: Sequence[Field] = (),
        limits: Limits | None = None,
        pacing: Pacing | None = None,
        retention: Retention | None = None,
        exist_ok: bool = False,
        replicas: int = 1,
        extra_fields: bool | None = None,
    ) -> m.TableTerms:
        return self.apply(
            m.CreateTable(
                name, list(fields), list(tasks), limits or Limits(), pacing, retention, exist_ok, replicas, extra_fields
            )
        )

    def add_task(self, task: Task, *, table: str = "t") -> m.TableTerms:
        return self.apply(m.AddTask(table, task))

    # ------------------------------------------------------------ columns

    def grant(self, nbytes: int, shard: int | None = None) -> m.Granted:
        shard = self.shard if shard is None else shard
        offset, size = self.world.allocate(nbytes, shard)
        self.call += 1
        reply = self.world.ledger.grant(self.session, shard, offset, size, self.world.now, call=self.call)
        self.world.taken[reply.extent] = (offset, size)
        self.world.shard_of[reply.extent] = shard
        return reply

    def block(
        self, fields: Sequence[Field], rows: int, *, counts: Sequence[int] | None = None, slots: Any = None
    ) -> m.WrittenBlock:
        """A block in an extent of its own, of exactly its size."""
        counts = list(counts or [0 if field.dense else rows for field in fields])
        _, nbytes = layout(fields, rows, counts)
        given = self.grant(max(nbytes, 1))
        others = [self.grant(max(nbytes, 1), shard) for shard in self.copies]
        return m.WrittenBlock(
            given.extent, given.offset, nbytes, rows, [field.name for field in fields], counts,
            None if slots is None else np.asarray(slots, "<i4").tobytes(),
            copies=[m.WrittenCopy(one.extent, one.offset) for one in others],
        )  # fmt: skip

    def columns(
        self,
        rows: int,
        big: Sequence[str | Field] = (),
        inline: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> m.Columns:
        """big: ragged int64 fields, all in one block of their own. inline: float64 scalars."""
        placed = [one if isinstance(one, Field) else Field(one, "int64", (None,)) for one in big]
        values = {name: np.broadcast_to(np.asarray(value, "<f8"), (rows,)) for name, value in (inline or {}).items()}
        return m.Columns(
            fields=[*placed, *(Field(name, "float64") for name in values)],
            blocks=[self.block(placed, rows)] if placed else [],
            inline=[m.Inline(name, value.tobytes()) for name, value in values.items()],
            facts=row_facts(rows, **facts),
        )

    # ------------------------------------------------------------ rows

    def put(
        self,
        rows: int = 1,
        big: Sequence[str | Field] = (),
        inline: Mapping[str, Any] | None = None,
        *,
        table: str = "t",
        reservation: int = 0,
        wait_s: float = 0.0,
        **facts: Any,
    ) -> Any:
        """Row ids, or Wait."""
        columns = self.columns(rows, big, inline, **facts)
        reply = self.apply(m.PutRequest(table, rows, columns, reservation, wait_s))
        return reply if isinstance(reply, Blocked) else list(range(reply.first, reply.first + reply.rows))

    def update(
        self,
        rows: Sequence[int],
        big: Sequence[str | Field] = (),
        inline: Mapping[str, Any] | None = None,
        *,
        table: str = "t",
        overwrite: bool = False,
        **facts: Any,
    ) -> Any:
        return self.apply(m.Update(table, i64(rows), self.columns(len(rows), big, inline, **facts), overwrite))

    def lease(
        self,
        task: str,
        rows: int = 0,
        *,
        table: str = "t",
        where: Sequence[Predicate] = (),
        wait_s: float = 0.0,
        **terms: Any,
    ) -> Any:
        """Given, or Wait."""
        reply = self.apply(m.LeaseRequest(table, task, rows=rows, where=list(where), wait_s=wait_s, **terms))
        return Given(reply) if isinstance(reply, m.Leased) else reply

    def ack(
        self,
        lease: Given,
        rows: Sequence[int] | None = None,
        *,
        table: str = "t",
        columns: m.Columns | None = None,
        drop: str = "",
        step: int = -1,
    ) -> Any:
        named = None if rows is None else i64(rows)
        return self.apply(m.Ack(table, lease.lease, lease.token, named, columns, drop, step))

    def ack_leases(self, leases: Sequence[Given], step: int = -1, *, table: str = "t") -> Any:
        numbers, tokens = [lease.lease for lease in leases], [lease.token for lease in leases]
        return self.apply(m.AckLeases(table, i64(numbers), i64(tokens), step))

    def checkpointed(self, step: int, task: str = "", *, table: str = "t") -> Any:
        return self.apply(m.CommitCheckpoint(table, step, task))

    def rollback(self, step: int, task: str = "", *, version: int = -1, table: str = "t") -> Any:
        return self.apply(m.Rollback(table, step, task, version))

    def cursor(self, start: int = 0, *, table: str = "t") -> Any:
        return self.apply(m.Cursor(table, start)).ordinal

    def release(
        self,
        lease: Given,
        rows: Sequence[int] | None = None,
        *,
        table: str = "t",
        failed: bool = False,
        reason: str = "",
        columns: m.Columns | None = None,
    ) -> Any:
        named = None if rows is None else i64(rows)
        return self.apply(m.ReleaseRequest(table, lease.lease, lease.token, named, failed, reason, columns))

    def renew(self, lease: Given, lease_s: float = 0.0, *, table: str = "t") -> Any:
        return self.apply(m.Renew(table, lease.lease, lease.token, lease_s))

    def drop(self, rows: Sequence[int], reason: str = "test", *, table: str = "t") -> Any:
        return self.apply(m.Drop(table, i64(rows), reason))

    def delete(self, rows: Sequence[int], *, table: str = "t") -> Any:
        return self.apply(m.Delete(table, i64(rows)))

    def free(self, rows: Sequence[int], fields: Sequence[str], *, again: bool = False, table: str = "t") -> Any:
        return self.apply(m.FreeColumns(table, i64(rows), list(fields), again))

    def reserve(self, rows: int, version: int = -1, *, table: str = "t", wait_s: float = 0.0) -> Any:
        return self.apply(m.Reserve(table, rows, version, wait_s))

    def advance(self, version: int, *, table: str = "t", wait_s: float = 0.0) -> Any:
        return self.apply(m.AdvanceClock(table, version, wait_s))

    def seal(self, table: str = "t") -> Any:
        return self.apply(m.Seal(table))

    def read(self, rows: Sequence[int] | None = None, *, table: str = "t", **terms: Any) -> m.ReplyRows:
        return self.apply(m.ReadRequest(table, None if rows is None else i64(rows), **terms)).content

    def unpin(self, blocks: Sequence[int], counts: Sequence[int] | None = None) -> Any:
        return self.apply(m.Unpin(i64(blocks), i64(counts if counts is not None else [1] * len(blocks))))

    def observe(self, what: str, table: str = "", row: int = -1) -> Any:
        return codec.decode_observed(self.apply(m.Observe(what, table, row)), KINDS[what])

    def close(self, *, pins: bool = True) -> None:
        self.world.ledger.close_session(self.session, self.world.now, pins=pins)
        self.world.collect()


_DTYPES = {"group_size": "<i4", "priority": "<f8"}


def row_facts(rows: int, *, keys: Any = None, tags: Any = None, **numbers: Any) -> m.RowFacts:
    """Facts from scalars (for every row) or sequences."""
    arrays = {
        name: np.broadcast_to(np.asarray(value, _DTYPES.get(name, "<i8")), (rows,)).tobytes()
        for name, value in numbers.items()
    }
    return m.RowFacts(**arrays, keys=keys, tags=tags)
