"""Chooses the ready units of one lease.

Units are taken in the order of the selector while they fit the budget of rows, tokens or groups. A lease is *full* if
no further unit would fit. It may get less

- once `at_least` is ready, if the request states it;
- if the table is sealed and nothing more can become ready (see `TaskState.final`, `required_results.stranded`): it gets
  the rest.

A unit that alone exceeds a token budget is leased alone, since otherwise it would never be leased. Groups are never
split; a group larger than `rows` is refused.
"""

from __future__ import annotations

import msgspec
import numpy as np

from transferqueue.errors import Impossible
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.rules.required_results import stranded
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.ready_queue import ReadyQueue
from transferqueue.ledger.tasks.task_state import TaskState
from transferqueue.limits import GROUPS_PER_REQUEST_MAX, ROWS_PER_REQUEST_MAX
from transferqueue.wire.messages import LeaseRequest

BATCH_FIRST = 64
"""Units examined first under a token budget; doubled until the budget is filled."""


class ChosenUnits(msgspec.Struct):
    """Rows of the chosen units, unit by unit, as an array of their own: a view would keep a chunk of the queue alive.
    `count`: number of units. `sizes`: rows of each; None: each has one. `final`: nothing more can become ready.
    """

    rows: IntArray
    count: int
    sizes: IntArray | None
    queue: ReadyQueue
    """The queue of the units; the caller removes them with `taken`."""
    final: bool

    def first(self, units: int) -> ChosenUnits:
        """The first of them."""
        sizes = None if self.sizes is None else self.sizes[:units]
        rows = units if sizes is None else int(sizes.sum())
        return ChosenUnits(self.rows[:rows].copy(), units, sizes, self.queue, self.final)


def choose(table: TableState, task: TaskState, request: LeaseRequest) -> ChosenUnits | None:
    """The rows that this request would get now; None if it has to wait. Changes nothing."""
    budget = request.rows or request.tokens or request.groups
    ready = task.ready_units
    final = table.sealed and bool(ready) and (task.final or stranded(table, task))
    least = min(request.at_least or budget, budget)
    if not ready or task.circuit.holds or not (final or _may_suffice(task, request, ready, least)):
        return None
    queue = task.queue(request.where)
    units = _units_in_budget(table, task, request, queue, budget)
    count, amount, full = units.count, units.amount, units.full
    if request.world > 1 and task.ranker.equal_counts and not final:
        count -= count % request.world
        amount = count if units.costs is None else int(units.costs[:count].sum())
        full = full and count > 0
    enough = count > 0 and (final or full or (request.at_least > 0 and amount >= request.at_least))
    if not enough or (request.world > count and not final):
        return None
    return _chosen_units(task, units.ids if count == units.ids.size else units.ids[:count], queue, final=final)


def _may_suffice(task: TaskState, request: LeaseRequest, ready: int, least: int) -> bool:
    """Cheap test, without reading the queue, whether so many ready units suffice. False: the request has to wait."""
    if request.groups or (request.rows and not isinstance(task, GroupTaskState)):
        return ready >= least
    return True


class _BudgetFit(msgspec.Struct):
    ids: IntArray
    costs: IntArray | None
    """The cost of each unit against the budget; None: one."""
    count: int
    amount: int
    full: bool


def _units_in_budget(
    table: TableState, task: TaskState, request: LeaseRequest, queue: ReadyQueue, budget: int
) -> _BudgetFit:
    """The units at the front of the queue that fit the budget."""
    if request.groups or (request.rows and not isinstance(task, GroupTaskState)):
        ids = first_units(table, queue, budget)
        return _BudgetFit(ids, None, ids.size, ids.size, ids.size == budget)
    most = GROUPS_PER_REQUEST_MAX if isinstance(task, GroupTaskState) else ROWS_PER_REQUEST_MAX
    look = min(most, max(BATCH_FIRST, budget // table.groups.largest)) if request.rows else BATCH_FIRST
    while True:
        ids = first_units(table, queue, look)
        fit = _fit_budget(table, task, request, ids, budget)
        if ids.size < look or fit.count < ids.size:
            return fit
        if look >= most:
            fit.full = True
            return fit
        look = min(2 * look, most)


def first_units(table: TableState, queue: ReadyQueue, count: int) -> IntArray:
    """`ReadyQueue.first`. A queue sorts its entries when it is read: so this writes, though it changes no answer."""
    table.begin(min(count, queue.size))
    units = queue.first(count)
    table.core.writing = False
    return units


def _fit_budget(table: TableState, task: TaskState, request: LeaseRequest, ids: IntArray, budget: int) -> _BudgetFit:
    rows, sizes = task.members(ids)
    costs = sizes if request.rows else tokens_of(table, rows, sizes)
    total = np.cumsum(costs)
    count = int(np.searchsorted(total, budget, side="right"))
    if request.tokens and count < request.world:
        count = min(request.world, ids.size)
    if request.rows and not count and ids.size:
        raise _too_large(table, int(sizes[0]), request)
    amount = int(total[count - 1]) if count else 0
    spare = budget - amount
    full = count < ids.size or spare <= 0 or (bool(request.rows) and spare < _smallest_unit(table))
    return _BudgetFit(ids, costs, count, amount, full)


def check_groups_fit(table: TableState, task: TaskState, request: LeaseRequest) -> None:
    """Raise if this request could never lease the known groups."""
    if not isinstance(task, GroupTaskState) or not len(table.groups):
        return
    if request.rows and table.groups.largest * request.world > request.rows:
        raise _too_large(table, table.groups.largest, request)
    least, most = request.groups * _smallest_unit(table), request.groups * table.groups.largest
    if request.groups > GROUPS_PER_REQUEST_MAX:
        raise Impossible(f"groups={request.groups} is above {GROUPS_PER_REQUEST_MAX}, the most that one lease may have")
    if most > ROWS_PER_REQUEST_MAX or (least > table.limits.rows and not table.sealed and not request.at_least):
        bound = min(table.limits.rows, ROWS_PER_REQUEST_MAX)
        raise Impossible(
            f'{request.groups} complete groups of table "{table.name}" are at least {least} rows; at most {bound} can '
            "be there at once: ask for fewer groups"
        )


def _smallest_unit(table: TableState) -> int:
    """Size of the smallest known unit. A row without a group is a unit of one."""
    return table.groups.smallest if table.groups.members_live == table.rows_live else 1


def _too_large(table: TableState, size: int, request: LeaseRequest) -> Impossible:
    per_rank = f" for each of {request.world} ranks" if request.world > 1 else ""
    need = size * request.world
    return Impossible(
        f'table "{table.name}" has a group of {counted(size, "row")}; a lease of complete groups with '
        f"rows={request.rows} can never hold one{per_rank}: {need} > {request.rows}; ask for rows >= {need}, or for "
        f"groups={request.world}"
    )


def tokens_of(table: TableState, rows: IntArray, sizes: IntArray) -> IntArray:
    """Tokens of each unit. A row whose tokens were never set counts as one."""
    tokens = np.maximum(table.rows.facts["tokens"].a[table.rows.pages.index(rows)], 1)
    if rows.size == sizes.size:
        return tokens
    summed: IntArray = np.add.reduceat(tokens, np.cumsum(sizes) - sizes)
    return summed


def _chosen_units(task: TaskState, ids: IntArray, queue: ReadyQueue, *, final: bool) -> ChosenUnits:
    if not isinstance(task, GroupTaskState):
        return ChosenUnits(ids if ids.base is None else ids.copy(), ids.size, None, queue, final)
    rows, sizes = task.members(ids)
    return ChosenUnits(rows, ids.size, sizes, queue, final)
