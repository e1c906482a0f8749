"""State of one task: the state of each row in it, and its ready queue.

Each row has, for each task, one of these states:

    PENDING --all needs set--> READY --lease--> LEASED --ack--> DONE
       |                         ^                |
       |                         +--release, expiry, death of the holder
       |                         |                +--failure--> RETRYING --its wait is over--> READY
       +--> WAITING_FOR_GROUP ---+  (tasks that take groups: the row is complete, its group not yet)

    RETRYING:        a lease of the row failed; it waits as `Task.retry` says (`tasks.retries`)
    ACKED_WITH_STEP: acked with a step that no checkpoint covers yet; then DONE, or READY again (`requests.checkpoints`)
    ABSENT:          the task never sees the row (it was declared later with from_="now", or had finished the group)
    KEPT_STALE:      stale under `KeepStale`: never leased again, readable until deleted
    GONE:            the row has a fate

`hold` of a READY or RETRYING row is the stamp of its entry in its queue, of a LEASED row its lease, of an
ACKED_WITH_STEP row its step, and of a DONE row too if its table records its rows (-1: none). `order` numbers rows as
they first became ready, and decides among equal keys. A row that returns keeps it, and with it its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np

from transferqueue.ledger.arrays import BoolArray, Index, IntArray, by_value, is_run, tally
from transferqueue.ledger.attributes import COUNT_MAX, Attribute, Columns, Count
from transferqueue.ledger.rows import FieldMask, RowStore, StepIndex
from transferqueue.ledger.tasks.circuit import Circuit
from transferqueue.ledger.tasks.errors import TaskErrors
from transferqueue.ledger.tasks.predicates import matches
from transferqueue.ledger.tasks.ready_queue import ORDER, STAMP, UNIT, Entries, ReadyQueue, in_order
from transferqueue.ledger.tasks.retries import PostponedRows, RetryQueue
from transferqueue.ledger.tasks.selectors import Ranker, UnitFacts
from transferqueue.limits import OUTAGE_LEASES, VIEWS_MAX
from transferqueue.policies import Predicate, Task

PENDING, WAITING_FOR_GROUP, RETRYING, READY, LEASED, ACKED_WITH_STEP, DONE, ABSENT, KEPT_STALE, GONE = range(10)
STATES: Final = ("pending", "held", "retrying", "ready", "leased", "stepped", "done", "absent", "kept", "gone")
ATTRIBUTES: Final = (
    Attribute("state", "u1", PENDING, PENDING, GONE, codes=STATES),
    Attribute("attempts", "i4", 0, 0),
    Attribute("order", "i8", 0, 0, COUNT_MAX),
)
"""What is stored of each row in a task. A new attribute of a row in a task is declared here."""
STEP: Final = Attribute("step", "i8", -1, -1, COUNT_MAX)
"""Of snapshots, which lack `hold`: the step with which a row was acked and that no checkpoint covers; -1: none."""
STORED: Final = (*ATTRIBUTES, STEP)
_HOLD: Final = Attribute("hold", "i8")
_READY: Final = bytes([READY])
OPEN: Final = (PENDING, WAITING_FOR_GROUP, RETRYING, READY, LEASED)
"""States in which the task still has work with the row."""


class TaskCounters(msgspec.Struct, forbid_unknown_fields=True):
    """Counters of rows in one task. Each only grows, so that a rate is a difference.

    Args:
        checkpoint: the latest step that a checkpoint covers; -1: none.
        given: leased, or put into a share of a rank (twice counts as two).
        done: finished by the task.
        failed: returned from a lease that failed.
        worker_deaths: returned from a lease whose holder died or was late.
        dropped: ended before the task was done with them.
    """

    checkpoint: Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)] = -1
    given: Count = 0
    done: Count = 0
    failed: Count = 0
    dropped: Count = 0
    worker_deaths: Count = 0


class LiveTask(msgspec.Struct):
    """What an image has of a task, and a snapshot has not.

    Args:
        hold: of each row, as the column of this name.
        counts: of rows in each state, those that were freed since included.
        views: the `where` of each view.
        stamps: of each group that is queued, in their order; of a task that takes single rows: none.
    """

    hold: IntArray
    counts: list[int]
    stamp: int
    retries: RetryQueue
    circuit: Circuit
    errors: TaskErrors
    views: list[list[Predicate]]
    stamps: list[int] = []


class FilteredReady(NamedTuple):
    """The ready units that satisfy all predicates of `where`."""

    where: list[Predicate]
    queue: ReadyQueue


def _none_alive(units: IntArray, stamps: IntArray) -> BoolArray:
    return np.zeros(units.size, np.bool_)


class TaskState:
    """Columns, counts and ready queue of a task that takes single rows."""

    def __init__(self, task: Task, rows: RowStore, ranker: Ranker) -> None:
        self.task = task
        self.rows = rows
        self.ranker = ranker
        self.columns = {one.name: rows.pages.column(one) for one in ATTRIBUTES}
        """The columns of `ATTRIBUTES`."""
        self.state = self.columns["state"]
        self.hold = rows.pages.column(_HOLD)
        self.order = self.columns["order"]
        self.attempts = self.columns["attempts"]
        """Leases of the row that failed."""
        self.retries = RetryQueue(rows.table, task.name)
        self.circuit = Circuit(rows.table, task.name)
        self.errors = TaskErrors()
        self.stepped = StepIndex(rows, self.state, self.hold, ACKED_WITH_STEP)
        self.needs = frozenset(task.needs)
        self.required_results: frozenset[str] = frozenset()
        """Fields that this task gives and another task needs. `TableState.add_task` updates it."""
        self.counts = [0] * len(STATES)
        self.counters = TaskCounters()
        self.ready = ReadyQueue(self.alive)
        self.views: dict[bytes, FilteredReady] = {}
        """Queues of the units that satisfy a `where`, by its encoding (in which 1 and True differ)."""
        self._stamp = 0
        self._mask: FieldMask | None = None

    # ------------------------------------------------------------ needs

    def mask(self) -> FieldMask | None:
        """Mask of the needed fields; None while the table does not have all of them."""
        if self._mask is None and all(name in self.rows.fields for name in self.task.needs):
            self._mask = self.rows.mask(self.task.needs)
        return self._mask

    def completed(self, at: Index) -> BoolArray:
        """Which rows have every field that the task needs."""
        mask = self.mask()
        if mask is None:
            return np.zeros(self.state.a[at].size, np.bool_)
        return self.rows.has_all(at, mask)

    # ------------------------------------------------------------ rows change state

    def move(self, at: Index, count: int, before: int, after: int) -> None:
        """Move `count` rows from one state to another."""
        self.state.a[at] = after
        self.counts[before] -= count
        self.counts[after] += count

    def arrive(self, rows: IntArray, at: Index, *, complete: bool, now: float) -> None:
        """Add new rows."""
        self.counts[PENDING] += rows.size
        if complete:
            self.complete(rows, at, now)

    def complete(self, rows: IntArray, at: Index, now: float) -> None:
        """Make pending rows ready: they have every field that the task needs."""
        first = self._stamp + 1
        self.move(at, rows.size, PENDING, READY)
        stamps = self.stamps(rows.size)
        self.order.a[at] = self.hold.a[at] = stamps
        if not self.ranker.by_arrival:
            self.push(in_order(self._entries(rows, at, stamps, stamps)))
        elif isinstance(at, slice) or is_run(rows):
            self.ready.push_range(rows.item(0), first, rows.size, self.counts[READY])
            if self.views:
                self._push_to_views(self._entries(rows, at, stamps, stamps))
        else:  # new orders ascend
            self.push(self._entries(rows, at, stamps, stamps))

    def return_rows(self, rows: IntArray, at: IntArray, now: float, before: int = LEASED) -> None:
        """Make leased (or acked) rows ready again, at their old place in the order."""
        self.move(at, rows.size, before, READY)
        self._return(rows, at)

    def postpone(self, rows: IntArray, at: IntArray, until: float | None) -> None:
        """Make leased rows, whose lease failed, wait until a time (None: see `circuit`)."""
        self.move(at, rows.size, LEASED, RETRYING)
        self._stamp += 1
        self.hold.a[at] = self._stamp
        self.retries.add(until, self._stamp, rows)

    def resumed(self, waits: Iterable[PostponedRows], now: float) -> None:
        """Make the rows of these waits ready again, but for those that left their wait before."""
        for wait in waits:
            at, waiting = self.rows.pages.find(wait.rows)
            waiting &= (self.state.a[at] == RETRYING) & (self.hold.a[at] == wait.stamp)
            if waiting.any():
                self.return_rows(wait.rows[waiting], at[waiting], now, RETRYING)

    def rerank(self, rows: IntArray, at: IntArray) -> None:
        """Rank ready rows again after their facts changed."""
        ready = self.state.a[at] == READY
        if ready.any():
            at = at[ready]
            self._return(rows[ready], at)

    def step(self, rows: IntArray, at: Index, step: int) -> None:
        """Record that leased rows were acked with `step`. They are done once a checkpoint covers it."""
        self.move(at, rows.size, LEASED, ACKED_WITH_STEP)
        self.hold.a[at] = step
        self.stepped.file(rows, step)

    def finish(self, rows: IntArray, at: Index, before: int = LEASED) -> None:
        """Mark leased (or acked) rows as done."""
        self.counters.done += rows.size
        self.move(at, rows.size, before, DONE)

    def remove(self, rows: IntArray, at: IntArray, to: int = GONE) -> None:
        """Remove rows from the task: they end, or the task has no work for them. The caller removes them from
        leases."""
        if to == GONE:
            self.counters.dropped += int((self.state.a[at] < DONE).sum())
        self._set_state(at, to)

    def set_pending(self, rows: IntArray, at: IntArray) -> None:
        """Make rows pending again, whatever their state: they lost fields that the task needs."""
        self._set_state(at, PENDING)

    def take_again(self, rows: IntArray, at: IntArray, states: IntArray, now: float) -> None:
        """Add rows that had ended, in these states: pending, or one in which the task has no work with them."""
        self._set_state(at, PENDING)
        self.counts[PENDING] -= rows.size
        self.state.a[at], self.attempts.a[at] = states, 0
        for state, count in tally(states[states != PENDING]):
            self.counts[state] += count
        again = states == PENDING
        if again.any():
            self.arrive(rows[again], at[again], complete=False, now=now)
            complete: BoolArray = (self.state.a[at] == PENDING) & self.completed(at)
            if complete.any():
                self.complete(rows[complete], at[complete], now)

    def _set_state(self, at: IntArray, to: int) -> None:
        for state, count in enumerate(np.bincount(self.state.a[at], minlength=len(STATES)).tolist()):
            self.counts[state] -= count
        self.counts[to] += at.size
        self.state.a[at] = to

    @property
    def times_ready(self) -> int:
        """How often a unit became ready, was returned, or was ranked again: only grows."""
        return self._stamp

    def stamps(self, count: int) -> IntArray:
        """Return `count` new stamps."""
        self._stamp += count
        return np.arange(self._stamp - count + 1, self._stamp + 1)

    def stored(self, at: IntArray) -> Columns:
        """The stored columns of rows at positions `at`: `STORED`."""
        columns = {name: column.a[at] for name, column in self.columns.items()}
        return columns | {STEP.name: np.where(columns["state"] == ACKED_WITH_STEP, self.hold.a[at], STEP.fill)}

    def restore(self, rows: IntArray, at: IntArray, stored: Columns) -> None:
        """Restore stored rows in a task without rows. Ready rows enter the queue by `rerank`, or `go_on`."""
        for name, column in self.columns.items():
            column.a[at] = stored[name]
        self.counts = np.bincount(stored["state"], minlength=len(STATES)).tolist()
        self._stamp = int(stored["order"].max(initial=0))
        self.hold.a[at] = step = stored[STEP.name]
        for number, positions in by_value(step):
            if number >= 0:
                self.stepped.file(rows[positions], number)

    def live(self, at: IntArray) -> LiveTask:
        """What an image has of the task beside `stored`. `at`: the positions of all resident rows."""
        return LiveTask(
            self.hold.a[at], self.counts, self._stamp, self.retries, self.circuit, self.errors,
            [view.where for view in self.views.values()],
        )  # fmt: skip

    def go_on(self, live: LiveTask, rows: IntArray, at: IntArray) -> None:
        """Continue as the task of an image, after `restore`. `rows`, at `at`: all resident rows."""
        self.hold.a[at], self.counts, self._stamp = live.hold, live.counts, live.stamp
        self.retries, self.circuit, self.errors = live.retries, live.circuit, live.errors
        self._queue_again(live, rows, at)
        for where in live.views:
            self.queue(where)

    def _queue_again(self, live: LiveTask, rows: IntArray, at: IntArray) -> None:
        """Fill the ready queue from the columns of the ready rows."""
        ready = self.state.a[at] == READY
        rows, at = rows[ready], at[ready]
        orders, stamps = self.order.a[at], self.hold.a[at]
        if self.ranker.by_arrival:
            new = orders == stamps
            self.ready.restore_arrivals(rows[new], stamps[new])
            rows, at, orders, stamps = rows[~new], at[~new], orders[~new], stamps[~new]
        if rows.size:
            self.ready.push(in_order(self._entries(rows, at, orders, stamps)), self.ready_units)

    # ------------------------------------------------------------ the ready queue

    def _return(self, rows: IntArray, at: Index) -> None:
        """Add rows that were ready before, at their old place in the order."""
        self.hold.a[at] = stamps = self.stamps(rows.size)
        self.push(in_order(self._entries(rows, at, self.order.a[at], stamps)))

    def _entries(self, rows: IntArray, at: Index, orders: IntArray, stamps: IntArray) -> Entries:
        entries = np.zeros((4, rows.size), np.int64)
        if not self.ranker.by_arrival:
            places = np.arange(at.start, at.stop) if isinstance(at, slice) else at
            entries[0] = self.ranker.keys(UnitFacts(self.rows, rows, places, None))
        entries[ORDER] = -rows if self.ranker.newest_first else orders
        entries[STAMP] = stamps
        entries[UNIT] = rows
        return entries

    def push(self, entries: Entries) -> None:
        """Add sorted entries to the queue, and to each view whose predicates they satisfy."""
        self.ready.push(entries, self.ready_units)
        self._push_to_views(entries)

    def _push_to_views(self, entries: Entries) -> None:
        for view in self.views.values():
            view.queue.push(entries[:, self.matching(entries[UNIT], view.where)], self.ready_units)

    def end(self) -> None:
        """Forget what refers back to this task, as its table is dropped: its columns return at once, and not at some
        garbage collection."""
        self.ready = ReadyQueue(_none_alive)
        self.views.clear()
        self.retries.deadline = self.circuit.deadline = None

    @property
    def ready_units(self) -> int:
        """Number of units that can be leased."""
        return self.counts[READY]

    def alive(self, units: IntArray, stamps: IntArray) -> BoolArray | None:
        """Which queue entries are valid; None: all are.

        The position of a freed row belongs to another row by now. That does no harm: a stamp is used once in the life
        of a task, so the `hold` of the other row differs from it.
        """
        at = self.rows.pages.where(units)
        if self.hold.a[at].tobytes() == stamps.tobytes() and self.state.a[at].tobytes() == _READY * units.size:
            return None
        alive: BoolArray = (self.hold.a[at] == stamps) & (self.state.a[at] == READY)
        return alive

    def matching(self, units: IntArray, where: Sequence[Predicate]) -> BoolArray:
        """Which units satisfy all predicates."""
        return matches(self.rows, where, units, self.rows.pages.index(units))

    def queue(self, where: Sequence[Predicate]) -> ReadyQueue:
        """The ready queue of the units that satisfy `where`: built at the first call, then kept up to date."""
        if not where:
            return self.ready
        key = msgspec.msgpack.encode(where)
        view = self.views.pop(key, None) or self._view(list(where))
        self.views[key] = view
        while len(self.views) > VIEWS_MAX:
            del self.views[next(iter(self.views))]
        return view.queue

    def _view(self, where: list[Predicate]) -> FilteredReady:
        view = FilteredReady(where, ReadyQueue(self.alive))
        entries = self.ready.all()
        view.queue.push(entries[:, self.matching(entries[UNIT], where)], self.ready_units)
        return view

    # ------------------------------------------------------------ units and their rows

    def members(self, units: IntArray) -> tuple[IntArray, IntArray]:
        """Rows of ready units, and the number of rows of each."""
        return units, np.ones(units.size, np.int64)

    def lease(self, rows: IntArray, at: Index, lease: int | IntArray) -> None:
        """Mark ready rows, of whole units, as leased. `lease`: its number, or that of each row."""
        self.counters.given += rows.size
        self.move(at, rows.size, READY, LEASED)
        self.hold.a[at] = lease

    # ------------------------------------------------------------ remaining rows

    @property
    def open_rows(self) -> int:
        """Rows that the task is not done with and may still lease."""
        return sum(self.counts[state] for state in OPEN)

    @property
    def at_work(self) -> bool:
        """Whether a row is ready, leased, or waits for another try."""
        counts = self.counts
        return bool(counts[READY] or counts[LEASED] or counts[RETRYING])

    @property
    def failing(self) -> bool:
        """Whether its last leases all failed: as many as pause a task, or all that there is to do."""
        counts, failures = self.counts, self.circuit.failures
        return failures >= OUTAGE_LEASES or bool(failures and counts[RETRYING] and not counts[READY] + counts[LEASED])

    @property
    def final(self) -> bool:
        """Whether no row can become ready except a new one, or one that returns from a lease or after a failure."""
        return not self.counts[PENDING] and not self.counts[WAITING_FOR_GROUP]
