"""Writes the whole state of a ledger as bytes (an image), and reads a ledger from it that continues exactly as the
first one.

An image has the tables' columns, as a snapshot (`snapshot.TableSnapshot`), and a *live part*: what a snapshot leaves
out, since it means nothing to another server. That is sessions and their replies, leases, reservations, extents, pins,
waits and deadlines; the stamps that say which entry of a queue is valid; and the exact places of values. Indexes and
ready queues are in neither: they follow from the columns, as after the restore of a snapshot.

Invariant: for any history, a ledger read from an image gives to any further requests the replies and effects that the
first ledger would give. The reader passes the selectors that the server has installed.

The bytes are MessagePack of the types below, which are decoded as declared: no name in the data is called. Only the
version that wrote an image can read it, or one with the same types and attributes, which its fingerprint tells. To keep
data across versions, take a snapshot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from transferqueue.errors import Corruption, InternalError, TransferQueueError, UsageError
from transferqueue.ledger.arrays import AnyArray, IntArray
from transferqueue.ledger.effects import Effects, Expiring
from transferqueue.ledger.persistence.restore import restored_table
from transferqueue.ledger.persistence.snapshot import TableSnapshot, columns_of_table
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.rows import RowRecord, SpentRow, TableEvent, groups, row_state
from transferqueue.ledger.rows.blocks import OwnerBytes, StoredBlocks
from transferqueue.ledger.rows.column_places import PartPlaces
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import SharedState, TableState
from transferqueue.ledger.tasks import group_task, task_state
from transferqueue.ledger.tasks.leases import LeaseTable
from transferqueue.ledger.tasks.reservations import FlowControl
from transferqueue.ledger.tasks.selectors import PluginFactory
from transferqueue.ledger.tasks.shared_batches import SharedBatches
from transferqueue.ledger.tasks.task_state import LiveTask

_SAME: Final = 0.0
"""The moment as of which an image has times, so that they are exact."""


class _Table(msgspec.Struct):
    """A table: its columns, and its live part."""

    columns: TableSnapshot
    tasks: list[LiveTask]
    facts_given: list[str]
    tags_most: int
    parts: list[PartPlaces]
    members: IntArray
    usage: OwnerBytes
    flow: FlowControl
    shared_batches: dict[tuple[str, int, int], SharedBatches]
    known_puts: dict[bytes, int]
    dropped: dict[int, SpentRow]
    lost: dict[str, int]
    events: list[TableEvent]
    events_forgotten: int
    record: RowRecord | None


class _State(msgspec.Struct):
    """A ledger. `due`: positions in `_subjects` of those that have a deadline, in the order in which they are due."""

    now: float
    sessions: dict[int, SessionState]
    tables: list[_Table]
    channels: dict[str, WeightChannelState]
    dropped_tables: dict[str, int]
    effects: Effects
    leases: LeaseTable
    blocks: StoredBlocks
    labels: dict[int, str]
    last_message_at: dict[int, float]
    last_reservation: int
    due: list[int]


class _Header(NamedTuple):
    magic: str
    fingerprint: bytes
    epoch: int
    digest: bytes
    state: bytes


MAGIC: Final = "transferqueue ledger image 2"
_DECLARED: Final = (row_state.ATTRIBUTES, task_state.ATTRIBUTES, groups.ATTRIBUTES, group_task.ATTRIBUTES)


@cache
def fingerprint() -> bytes:
    """Hash of the types and attributes that a state is made of. The first call takes 12 ms."""
    types = msgspec.inspect.type_info(_State)
    return hashlib.blake2b(f"{types}{_DECLARED}".encode(), digest_size=16).digest()


def write(state: LedgerState, epoch: int) -> bytes:
    """An image of the state."""
    try:
        body = _encoder.encode(_stored(state))
    except (OverflowError, TypeError, KeyError, NotImplementedError) as error:
        raise InternalError(f"the state cannot be written: {error!r}") from error
    return msgspec.msgpack.encode(_Header(MAGIC, fingerprint(), epoch, _digest(body), body))


def read(image: bytes, selectors: Mapping[str, PluginFactory]) -> tuple[LedgerState, int]:
    """The state of an image, and its epoch. `Corruption` if it is damaged, `UsageError` if another version wrote it."""
    try:
        header = msgspec.msgpack.decode(image, type=_Header)
    except msgspec.MsgspecError as error:
        raise Corruption(f"{len(image)} bytes are no image of a ledger: {error}") from error
    if header.magic != MAGIC or header.fingerprint != fingerprint():
        raise UsageError(
            f"image {header.magic!r} has the state of another version of this package; start that version, drain its "
            "tables or take a snapshot there, and begin with an empty state directory"
        )
    if _digest(header.state) != header.digest:
        raise Corruption(f"image of {len(image):,} bytes is damaged: its digest differs; restore a snapshot")
    try:
        return _restored(_decoder.decode(header.state), selectors), header.epoch
    except TransferQueueError:
        raise
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Corruption(f"{len(image):,} bytes are no image of a state: {error!r}") from error


def _digest(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__module__}.{type(value).__qualname__} has no stored form: {value!r}")


def _array(kind: type, value: Any) -> AnyArray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()  # the ledger writes to its arrays


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: Final = msgspec.msgpack.Decoder(_State, dec_hook=_array)


# ---------------------------------------------------------------- a ledger


def _stored(state: LedgerState) -> _State:
    core = state.core
    return _State(
        now=state.now,
        sessions=state.sessions,
        tables=[_stored_table(table) for table in state.tables.values()],
        channels=state.channels,
        dropped_tables=state.dropped_tables,
        effects=core.effects,
        leases=core.leases,
        blocks=core.blocks.stored(_owners(state)),
        labels=core.labels,
        last_message_at=core.last_message_at,
        last_reservation=core.last_reservation,
        due=core.deadlines.order([*_subjects(state)]),
    )


def _restored(stored: _State, selectors: Mapping[str, PluginFactory]) -> LedgerState:
    core = SharedState(
        effects=stored.effects,
        leases=stored.leases,
        plugins=selectors,
        labels=stored.labels,
        last_message_at=stored.last_message_at,
        last_reservation=stored.last_reservation,
    )
    state = LedgerState(
        core, stored.sessions, channels=stored.channels, dropped_tables=stored.dropped_tables, now=stored.now
    )
    for table in stored.tables:
        state.add(_restored_table(core, table))
    core.blocks.restore(stored.blocks, _owners(state))
    subjects = [*_subjects(state)]
    core.deadlines.restore([subjects[at] for at in stored.due])
    return state


def _owners(state: LedgerState) -> list[OwnerBytes]:
    """The accounts of all blocks."""
    return [*(table.usage for table in state.tables.values()), *(one.usage for one in state.channels.values())]


def _subjects(state: LedgerState) -> Iterator[Expiring]:
    """Everything that may have a deadline."""
    yield from state.core.leases.by_id.values()
    for table in state.tables.values():
        for task in table.tasks.values():
            yield from (task.retries, task.circuit)
        yield from chain.from_iterable(task.forming.values() for task in table.group_tasks)
    for channel in state.channels.values():
        yield from channel.update_slots.values()
        if channel.pending is not None:
            yield channel.pending
    missing = state.core.blocks.missing
    yield from missing.orders.values()
    yield from chain.from_iterable(members.values() for members in missing.postponed.values())


# ---------------------------------------------------------------- a table


def _stored_table(table: TableState) -> _Table:
    rows = table.rows.pages.resident_rows()
    at = table.rows.pages.index(rows)
    return _Table(
        columns=columns_of_table(table, rows, _SAME),
        tasks=[task.live(at) for task in table.tasks.values()],
        facts_given=list(table.rows.facts_given),
        tags_most=table.rows.tags_most,
        parts=table.column_groups.stored(at),
        members=table.groups.live(),
        usage=table.usage,
        flow=table.flow,
        shared_batches=table.shared_batches,
        known_puts=table.known_puts.stored,
        dropped=table.dropped.by_row,
        lost=table.lost,
        events=table.history.since(0, table.history.end),
        events_forgotten=table.history.forgotten,
        record=table.record,
    )


def _restored_table(core: SharedState, stored: _Table) -> TableState:
    table, at = restored_table(core, stored.columns, stored.members, _SAME)
    rows = stored.columns.rows["row_id"]
    for task, live in zip(table.tasks.values(), stored.tasks, strict=True):
        task.go_on(live, rows, at)
    table.rows.facts_given = dict.fromkeys(stored.facts_given)
    table.rows.tags_most = stored.tags_most
    table.column_groups.restore(stored.parts, at)
    table.usage, table.flow, table.lost = stored.usage, stored.flow, stored.lost
    table.shared_batches, table.known_puts.stored = stored.shared_batches, stored.known_puts
    for row, spent in stored.dropped.items():
        table.dropped.keep(row, spent)
    table.history.restore(stored.events, stored.events_forgotten)
    table.record = stored.record
    return table
