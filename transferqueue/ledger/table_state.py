"""State of one table: its terms, its rows, its tasks, and counters that must always balance.

The functions that change it are in `rules` (`finish`: how rows end; `groups_and_staleness`: incomplete groups and stale
rows) and in `requests` (`put`, `lease`, `ack`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from transferqueue.errors import Full
from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.effects import Deadlines, Effects
from transferqueue.ledger.rows import (
    ColumnGroups,
    CommitFields,
    FinishedOrdinals,
    GroupIndex,
    KnownPuts,
    RowRecord,
    RowStore,
    SpentRows,
    TableHistory,
    VersionIndex,
)
from transferqueue.ledger.rows.blocks import BlockRegistry, OwnerBytes
from transferqueue.ledger.rows.copies import Copies
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.leases import LeaseTable
from transferqueue.ledger.tasks.reservations import FlowControl
from transferqueue.ledger.tasks.selectors import PluginFactory, Ranker
from transferqueue.ledger.tasks.shared_batches import SharedBatches
from transferqueue.ledger.tasks.task_order import TasksOfField, tasks_that_hold
from transferqueue.ledger.tasks.task_state import OPEN, TaskState
from transferqueue.limits import (
    KEY_MEMORY_BYTES,
    MEMORY_MARGIN_BYTES,
    MIB,
    NEW_ROW_MEMORY_BYTES,
    RECORDED_EVENT_ROWS_MAX,
    RECORDED_EVENTS_MAX,
    ROW_MEMORY_BYTES,
    Limits,
)
from transferqueue.policies import Acked, Pacing, Recorded, Retention, Task
from transferqueue.wire.messages import TableTerms


class Absence(NamedTuple):
    """No session works on a task. `text`: about the last one. `died`: it left without a goodbye."""

    text: str
    since_s: float
    died: bool = False


def unknown(table: str, task: str, now: float) -> Absence | None:
    """The default of `SharedState.absence`: a ledger alone does not know who works on a task but holds none of its
    rows.
    """
    return None


def no_memory(nbytes: int = 0) -> Full:
    """The refusal of an operation for which the process has no memory. `nbytes`: requested; 0: unknown."""
    asked = f"this request ({(nbytes + MEMORY_MARGIN_BYTES) / MIB:.1f} MiB)" if nbytes else "this request"
    return Full(
        f"the memory of the server process is exhausted: the system has none left for {asked}, and nothing was "
        "changed; put or lease fewer rows at once, finish or delete rows, or start the server with more address space "
        "(ulimit -v) and memory"
    )


@dataclass(slots=True)
class SharedState:
    """State that all tables share."""

    effects: Effects = field(default_factory=Effects)
    deadlines: Deadlines = field(default_factory=Deadlines)
    leases: LeaseTable = field(default_factory=LeaseTable)
    blocks: BlockRegistry = field(init=False)
    plugins: Mapping[str, PluginFactory] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    """Name of each session in messages to people."""
    last_message_at: dict[int, float] = field(default_factory=dict)
    """When each session last sent something."""
    last_reservation: int = 0
    absence: Callable[[str, str, float], Absence | None] = unknown
    """Says whether a session works on a task, for texts. The caller sets it; no image contains it, and no decision
    depends on it.
    """
    recorded_block_max: int | None = None
    """The most bytes of a block of a table that records its rows; None: any. The caller sets it; no image contains it.
    """
    writing: bool = False
    """Whether an operation has begun to write and has not ended: see `begin`. No image contains it."""

    def begin(self, nbytes: int = 0) -> None:
        """The checks of an operation have ended, and its writes begin: from here on it is carried out whole, or the
        ledger is torn.

        `Full`, and no change, if the process has no memory for the operation: `nbytes`, beside a margin.
        """
        if self.writing:
            return
        try:
            np.empty(nbytes + MEMORY_MARGIN_BYTES, np.uint8)
        except MemoryError as error:
            raise no_memory(nbytes) from error
        self.writing = True

    def __post_init__(self) -> None:
        self.blocks = BlockRegistry(self.effects)
        Copies(self.blocks)

    def silent_s(self, session: int, now: float) -> float:
        """For how long a session has sent nothing."""
        return now - self.last_message_at.get(session, now)


class TableState:
    """State of one table."""

    def __init__(
        self, core: SharedState, name: str, limits: Limits, pacing: Pacing | None, retention: Retention, replicas: int
    ) -> None:
        self.core = core
        self.name = name
        self.limits = limits
        self.pacing = pacing
        self.retention = retention
        self.keeps_ended: Final = not isinstance(retention, Acked)
        """Whether rows that have ended stay: until they are deleted, or recorded."""
        self.record = RowRecord("") if isinstance(retention, Recorded) else None
        """Rows that ended and that no file contains. None: the table records none."""
        self.extra_fields: bool | None = None
        """Whether rows may add fields that the terms do not name. None: yes, but clients refuse near misses."""
        self.sealed = False
        self.clock = 0
        self.rows = RowStore(name)
        self.column_groups = ColumnGroups(self.rows)
        self.groups = GroupIndex(self.rows)
        self.tasks: dict[str, TaskState] = {}
        self.holders: TasksOfField = {}
        """Field -> the tasks that must be done with a row before its value may be freed (see `rules.column_ends`)."""
        self.columns_freed = 0
        """Number of values that were freed though their rows lived on."""
        self.column_bytes_freed = 0
        """Bytes of the blocks that ended thereby. The block of a put ends with the last of its columns."""
        self.group_tasks: list[GroupTaskState] = []
        """Tasks that take whole groups."""
        self.flow = FlowControl()
        self.versions = VersionIndex(self.rows) if pacing and pacing.max_staleness is not None else None
        self.ordinals = FinishedOrdinals(self.rows)
        bounds = () if self.record is None else (RECORDED_EVENTS_MAX, RECORDED_EVENT_ROWS_MAX)
        self.history = TableHistory(*bounds)
        self.usage = OwnerBytes(replicas, table=name)
        self.shared_batches: dict[tuple[str, int, int], SharedBatches] = {}
        """(task, world, replicas) -> the batches that its ranks share."""
        self.rows_put = 0
        self.rows_done = 0
        self.rows_dropped: dict[str, int] = {}
        self.rows_recorded = 0
        """Rows that a file contains."""
        self.rows_unrecorded = 0
        """Rows that ended and that no file contains, since the disk failed."""
        self.lost: dict[str, int] = {}
        """Number of rows that ended because bytes were lost, by cause; for reports."""
        self.staleness: dict[int, int] = {}
        """Versions behind the clock -> rows leased to the pacing task."""
        self.staleness_in_flight: dict[int, int] = {}
        """The part of the staleness that arose before the row got its version, while it was generated."""
        self.staleness_in_queue: dict[int, int] = {}
        """The part that arose after that."""
        self.known_puts = KnownPuts()
        self.latest_fields: CommitFields | None = None
        """The checked fields of the latest commit of one block."""
        self.dropped = SpentRows()
        """Rows that were dropped for failing, and can be taken again."""
        self.to_drop: list[tuple[IntArray, str]] = []
        """Rows that will be dropped before the request ends, and the reason."""

    # ------------------------------------------------------------ terms

    def add_task(self, task: Task) -> TaskState:
        """Declare a task. The caller introduces existing rows to it."""
        self.add_tasks([task])
        return self.tasks[task.name]

    def add_tasks(self, tasks: Iterable[Task]) -> None:
        """Declare tasks. The caller introduces existing rows to them."""
        for task in tasks:
            self._add_state(task)
        self.restrict_fields(self.extra_fields)
        self.group_tasks = [other for other in self.tasks.values() if isinstance(other, GroupTaskState)]
        needed = frozenset(name for other in self.tasks.values() for name in other.task.needs)
        for other in self.tasks.values():
            other.required_results = needed.intersection(other.task.gives)
        self.holders = tasks_that_hold([other.task for other in self.tasks.values()], self.pacing)

    def _add_state(self, task: Task) -> None:
        ranker = Ranker(task.selector, self.core.plugins)
        if task.groups is None:
            state = TaskState(task, self.rows, ranker)
        else:
            state = GroupTaskState(task, self.rows, ranker, task.groups, self.groups, self.core.deadlines)
        self.tasks[task.name] = state

    def terms(self) -> TableTerms:
        """The terms of the table, as a reply."""
        return TableTerms(
            self.name, list(self.rows.fields.values()), [state.task for state in self.tasks.values()], self.limits,
            self.pacing, self.retention, self.sealed, self.clock, self.usage.replicas, self.extra_fields,
        )  # fmt: skip

    def restrict_fields(self, extra_fields: bool | None) -> None:
        """Set whether rows may add fields that neither the table's declaration nor a task names."""
        self.extra_fields = extra_fields
        self.rows.may_add = self.expected_fields() if extra_fields is False else None

    def expected_fields(self) -> frozenset[str]:
        """Fields that some task needs or gives, declared or not."""
        return frozenset(name for state in self.tasks.values() for name in (*state.task.needs, *state.task.gives))

    @property
    def pacing_task(self) -> TaskState | None:
        """State of the pacing task, if the table has pacing."""
        return self.tasks[self.pacing.task] if self.pacing else None

    # ------------------------------------------------------------ counters

    @property
    def rows_live(self) -> int:
        """Number of rows without a fate."""
        return self.rows_put - self.rows_done - sum(self.rows_dropped.values())

    @property
    def rows_resident(self) -> int:
        """Rows that count towards the limit: all resident ones but those that are only kept to be taken again."""
        return self.rows.pages.resident - (0 if self.keeps_ended else len(self.dropped.by_row))

    @property
    def outstanding(self) -> int:
        """Rows that the pacing task is not done with: reserved, promised as refills, or put."""
        pacing_task = self.pacing_task
        put = self.rows_live if pacing_task is None else sum(pacing_task.counts[state] for state in OPEN)
        return put + self.flow.reserved + self.flow.refill_rows

    @property
    def oldest_fresh_version(self) -> int:
        """Rows whose version is below this (and not -1) are over the staleness bound."""
        if self.pacing is None or self.pacing.max_staleness is None:
            return 0
        return self.clock - self.pacing.max_staleness

    # ------------------------------------------------------------ writes

    def begin(self, rows: int = 0, new: int = 0, columns: int = 0) -> None:
        """See `SharedState.begin`. The operation touches `rows` rows, adds `new` of them, and at most `columns` columns
        of row state."""
        nbytes = rows * ROW_MEMORY_BYTES
        if new or columns:
            nbytes += self.rows.pages.growth(new, columns)
        if new:
            nbytes += new * NEW_ROW_MEMORY_BYTES + len(self.rows.keys) * KEY_MEMORY_BYTES
        self.core.begin(nbytes)

    # ------------------------------------------------------------ wakes

    def wake_task(self, task: str) -> None:
        """Have waiting leases of `task` applied again."""
        self.core.effects.wake("task", self.name, task)

    def wake_tasks(self) -> None:
        """Have waiting leases of all tasks applied again."""
        for task in self.tasks:
            self.wake_task(task)

    def wake_room(self) -> None:
        """Have waiting puts, reservations and clock changes applied again."""
        self.core.effects.wake("room", self.name)
        self.core.effects.wake("clock", self.name)
