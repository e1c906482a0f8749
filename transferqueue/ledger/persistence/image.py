"""Writes the whole state of a ledger as bytes (an image), and reads a ledger from it that continues exactly as the
first one.

Invariant: for any history, a ledger read from an image gives to any further requests the replies and effects that the
first ledger would give. An image omits the selectors that the server has installed, which the reader passes again; how
a `Ranker` computes its keys, which follows from its selector; and pages without a row.

Rows are written as the columns of their attributes (`ledger.attributes`), of which snapshots have those that outlive
the server; all other objects as a graph (docs/decisions/durability.md).

Only the version that wrote an image can read it, or one whose state has the same classes and attributes, which its
fingerprint tells. To keep data across versions, take a snapshot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import ModuleType
from typing import Final

import msgspec
import xxhash

from transferqueue import limits, policies, schema
from transferqueue.errors import Corruption, UsageError
from transferqueue.ledger import attributes, effects
from transferqueue.ledger.effects import Deadlines
from transferqueue.ledger.persistence import object_graph
from transferqueue.ledger.persistence.object_graph import ClassLayout, ClassRegistry
from transferqueue.ledger.requests.pending_versions import PendingVersion, VersionPart
from transferqueue.ledger.requests.weight_channels import (
    AppliedVersion,
    PublishedVersion,
    UpdateSlot,
    WeightChannelState,
)
from transferqueue.ledger.rows import row_state
from transferqueue.ledger.rows.blocks import BlockRegistry, CommittedBlock, ExtentState, OwnerBytes
from transferqueue.ledger.rows.column_places import ColumnGroup, ColumnGroups
from transferqueue.ledger.rows.commit import MemberRows, StagedCommit
from transferqueue.ledger.rows.copies import Copies
from transferqueue.ledger.rows.dropped import LastFailure, SpentRow, SpentRows
from transferqueue.ledger.rows.groups import GroupIndex, GroupState
from transferqueue.ledger.rows.indexes import FinishedOrdinals, StepIndex, VersionIndex
from transferqueue.ledger.rows.missing_copies import CopyOrderState, MissingCopies, PostponedCopy
from transferqueue.ledger.rows.put_dedup import KnownPuts
from transferqueue.ledger.rows.row_metadata import CheckedFacts
from transferqueue.ledger.rows.row_pages import RowPages, StateColumn
from transferqueue.ledger.rows.row_state import FieldMask, RowStore
from transferqueue.ledger.rows.table_history import TableEvent, TableHistory
from transferqueue.ledger.session_state import IntervalSet, ReplyCache, SessionState
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import SharedState, TableState, unknown
from transferqueue.ledger.tasks import task_state
from transferqueue.ledger.tasks.circuit import Circuit
from transferqueue.ledger.tasks.errors import ErrorCount, TaskErrors
from transferqueue.ledger.tasks.group_task import FormingGroup, GroupTaskState
from transferqueue.ledger.tasks.leases import LeaseState, LeaseTable
from transferqueue.ledger.tasks.ready_queue import Arrivals, ReadyQueue, SortedRun
from transferqueue.ledger.tasks.reservations import FlowControl, ReservationState
from transferqueue.ledger.tasks.retries import PostponedRows, RetryQueue
from transferqueue.ledger.tasks.selectors import PluginFactory, Ranker
from transferqueue.ledger.tasks.shared_batches import SharedBatch, SharedBatches
from transferqueue.ledger.tasks.task_state import FilteredReady, TaskState
from transferqueue.wire import messages

_WHOLE: Final = (
    LedgerState, TableState, SessionState, ReplyCache, IntervalSet, effects.Effects, Deadlines, LeaseTable, LeaseState,
    BlockRegistry, MissingCopies, CopyOrderState, PostponedCopy, CommittedBlock, ExtentState, OwnerBytes, RowStore,
    KnownPuts,
    FieldMask, ColumnGroups, ColumnGroup, GroupIndex, GroupState, TaskState, GroupTaskState, FormingGroup,
    RetryQueue, Circuit, TaskErrors, ErrorCount, ReadyQueue, Arrivals, SortedRun, FlowControl, ReservationState,
    VersionIndex, StepIndex, FinishedOrdinals, TableHistory, SpentRows, SharedBatches, SharedBatch, WeightChannelState,
    PublishedVersion, AppliedVersion, UpdateSlot, PendingVersion, VersionPart, StagedCommit, MemberRows, CheckedFacts,
)  # fmt: skip

_OMITTED: Final[dict[type, frozenset[str]]] = {BlockRegistry: frozenset({"parts", "cold"})}

_FORMS: Final = [
    *(ClassLayout(cls, omitted=_OMITTED.get(cls, frozenset())) for cls in _WHOLE),
    ClassLayout(SharedState, omitted=frozenset({"plugins", "absence", "writing"})),
    ClassLayout(Ranker, omitted=frozenset(Ranker.DERIVED)),
    ClassLayout(StateColumn, omitted=frozenset({"a"})),
    ClassLayout(
        RowPages,
        omitted=frozenset({"_capacity", "_spare", "_frames", "_base", "_left", "next_row", "resident"}),
        derived=("stored",),
    ),
]


class _Header(msgspec.Struct, frozen=True, array_like=True):
    magic: str
    fingerprint: bytes
    epoch: int
    digest: bytes
    state: bytes


MAGIC: Final = "transferqueue ledger image 1"


def _structs(*modules: ModuleType) -> list[type]:
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]


_KNOWN: Final = ClassRegistry(
    _FORMS,
    structs=_structs(messages, policies, schema, limits, effects, attributes, task_state),
    tuples=[TableEvent, FilteredReady, PostponedRows, SpentRow, LastFailure],
    methods=["alive"],
)
_DECLARED: Final = repr((row_state.ATTRIBUTES, task_state.ATTRIBUTES))
FINGERPRINT: Final = hashlib.blake2b((_KNOWN.fingerprint() + _DECLARED).encode(), digest_size=16).digest()
"""Hash of the classes and attributes that a state is made of."""


def write(state: LedgerState, epoch: int) -> bytes:
    """An image of the state."""
    body = object_graph.write(state, _KNOWN)
    return msgspec.msgpack.encode(_Header(MAGIC, FINGERPRINT, epoch, _digest(body), body))


def read(image: bytes, selectors: Mapping[str, PluginFactory]) -> tuple[LedgerState, int]:
    """The state of an image, and its epoch. `Corruption` if it is damaged, `UsageError` if another version wrote it."""
    try:
        header = msgspec.msgpack.decode(image, type=_Header)
    except msgspec.MsgspecError as error:
        raise Corruption(f"{len(image)} bytes are no image of a ledger: {error}") from error
    if header.magic != MAGIC or header.fingerprint != FINGERPRINT:
        raise UsageError(
            f"image {header.magic!r} has the state of another version of this package; start that version, drain its "
            "tables or take a snapshot there, and begin with an empty state directory"
        )
    if _digest(header.state) != header.digest:
        raise Corruption(f"image of {len(image):,} bytes is damaged: its digest differs; restore a snapshot")
    state = object_graph.read(header.state, _KNOWN)
    if not isinstance(state, LedgerState):
        raise Corruption(f"image of {len(image):,} bytes holds {type(state).__name__}, not the state of a ledger")
    _complete(state, selectors)
    return state, header.epoch


def _complete(state: LedgerState, selectors: Mapping[str, PluginFactory]) -> None:
    state.core.plugins = dict(selectors)
    Copies(state.core.blocks)
    state.core.absence, state.core.writing = unknown, False
    for table in state.tables.values():
        for task in table.tasks.values():
            task.ranker.rank_by(state.core.plugins)


def _digest(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)
