"""Requests about tables: create and drop a table, declare tasks. Terms that could never work are refused here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transferqueue.errors import AlreadyExists, Impossible, UsageError, listing
from transferqueue.ledger.arrays import BoolArray, Index, IntArray, repeated
from transferqueue.ledger.rows import LIVE
from transferqueue.ledger.rules.column_ends import why_freed
from transferqueue.ledger.rules.finish import drop_rows, end_lease, free_rows
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules
from transferqueue.ledger.table_state import SharedState, TableState
from transferqueue.ledger.tasks.selectors import Ranker
from transferqueue.ledger.tasks.task_order import downstream
from transferqueue.ledger.tasks.task_state import ABSENT, PENDING, TaskState
from transferqueue.limits import COPIES_MAX, FIELDS_MAX, NEEDS_MAX, TASKS_MAX, check_name
from transferqueue.policies import Acked, Pacing, Requeue, Task
from transferqueue.wire.messages import CreateTable, TableTerms

SECONDS_MAX = 1e9
"""Longest duration, as in messages: thirty years."""


def check_create(core: SharedState, request: CreateTable) -> None:
    """Raise unless a table with these terms can be created."""
    check_name("table", request.name)
    names = [task.name for task in request.tasks]
    _check_once("task", names, TASKS_MAX)
    _check_once("field", [field.name for field in request.fields], FIELDS_MAX)
    if request.replicas > COPIES_MAX:
        raise Impossible(
            f'table "{request.name}" would have replicas={request.replicas}; at most {COPIES_MAX} shards keep each '
            "block"
        )
    if (named := sum(len(task.needs) + len(task.gives) for task in request.tasks)) > NEEDS_MAX:
        raise Impossible(
            f'the tasks of table "{request.name}" need and give {named:,} fields together; at most {NEEDS_MAX:,} may '
            "be declared at once: add tasks by add_task"
        )
    for task in request.tasks:
        _check_task(core, task, request.limits.rows)
    if request.pacing is not None:
        _check_pacing(request.name, request.pacing, request.tasks, request.limits.rows)


def _check_task(core: SharedState, task: Task, rows_max: int) -> None:
    Ranker(task.selector, core.plugins)
    if len(task.needs) > FIELDS_MAX or len(task.gives) > FIELDS_MAX:
        raise Impossible(
            f'task "{task.name}" needs {len(task.needs)} and gives {len(task.gives)} fields; a table has at most '
            f"{FIELDS_MAX}"
        )
    least = task.groups.min_size if task.groups else None
    if least is not None and least > rows_max:
        raise Impossible(
            f'task "{task.name}" takes groups of min_size={least} or more, and the table holds at most {rows_max} '
            f"rows: {least} > {rows_max}; give a smaller min_size, or a larger limits.rows"
        )
    deadline_s = task.groups.deadline_s if task.groups else None
    for what, seconds in (
        ("lease_s", task.lease_s),
        ("time_limit_s", task.time_limit_s),
        ("deadline_s of groups", deadline_s),
    ):
        if seconds is not None and seconds > SECONDS_MAX:
            raise UsageError(f'task "{task.name}": {what} is {seconds}; at most {SECONDS_MAX:g} s')


def _check_once(kind: str, names: Sequence[str], most: int) -> None:
    if len(names) > most:
        raise UsageError(f"{len(names)} {kind}s are declared; at most {most} are allowed")
    if len(set(names)) != len(names):
        twice = repeated(names)[0]
        raise AlreadyExists(f'{kind} "{twice}" is declared twice')


def _check_pacing(table: str, pacing: Pacing, tasks: Sequence[Task], rows_max: int) -> None:
    by_name = {task.name: task for task in tasks}
    if pacing.task not in by_name:
        raise Impossible(
            f'pacing of table "{table}" names task "{pacing.task}", which is not declared; it has {listing(by_name)}'
        )
    if pacing.batch_rows > rows_max:
        raise Impossible(
            f'a batch of batch_rows={pacing.batch_rows} never fits table "{table}" of limits.rows={rows_max}: '
            f"{pacing.batch_rows} > {rows_max}"
        )
    if pacing.rows_ahead_max > rows_max:
        raise Impossible(
            f"depth={pacing.depth} lets ({pacing.depth} + 1) * {pacing.batch_rows} = {pacing.rows_ahead_max} rows be "
            f'ahead, but table "{table}" holds limits.rows={rows_max}; raise the limit or lower depth'
        )
    if isinstance(pacing.on_stale, Requeue):
        _check_requeue(pacing, pacing.on_stale.task, by_name)
        if pacing.max_staleness is None:
            raise UsageError(
                f'pacing of table "{table}" has on_stale=Requeue("{pacing.on_stale.task}") and no max_staleness, so no '
                "row is ever stale; set max_staleness, or leave on_stale out"
            )


def _check_requeue(pacing: Pacing, target: str, tasks: dict[str, Task]) -> None:
    if target not in tasks:
        raise Impossible(f'Requeue names task "{target}", which is not declared; it has {listing(tasks)}')
    if not tasks[target].gives:
        raise Impossible(
            f'Requeue("{target}"): that task declares no gives, so it would regenerate nothing; declare them'
        )
    if pacing.task not in downstream(list(tasks.values()), tasks[target])[1]:
        raise Impossible(
            f'Requeue("{target}"): task "{pacing.task}" needs no column of it, so stale rows would stay '
            "ready; name a task that gives one of its columns"
        )


def create_table(core: SharedState, request: CreateTable) -> TableState:
    """Create a table of terms that `check_create` accepted."""
    table = TableState(
        core, request.name, request.limits, request.pacing, request.retention or Acked(), request.replicas
    )
    for field in request.fields:
        table.rows.add_field(field)
    table.add_tasks(request.tasks)
    table.restrict_fields(_extra_fields(request))
    return table


def _extra_fields(request: CreateTable) -> bool | None:
    """Whether rows may add fields. A request that declares fields and says nothing else means: no others."""
    return False if request.extra_fields is None and request.fields else request.extra_fields


def other_terms(table: TableState, request: CreateTable) -> list[str]:
    """The terms in which an existing table differs from the request. The table may have gained fields and tasks."""
    tasks = {name: state.task for name, state in table.tasks.items()}
    different = [f'field "{field.name}"' for field in request.fields if table.rows.fields.get(field.name) != field]
    different += [f'task "{task.name}"' for task in request.tasks if tasks.get(task.name) != task]
    terms = {
        "limits": (table.limits, request.limits),
        "pacing": (table.pacing, request.pacing),
        "retention": (table.retention, request.retention or Acked()),
        "replicas": (table.usage.replicas, request.replicas),
        "extra_fields": (table.extra_fields, _extra_fields(request)),
    }
    return different + [name for name, (existing, wanted) in terms.items() if existing != wanted]


def add_task(table: TableState, task: Task, now: float) -> TableTerms:
    """Declare a task. The same declaration again is no error."""
    existing = table.tasks.get(task.name)
    if existing is not None:
        if existing.task == task:
            return table.terms()
        raise AlreadyExists(
            f'task "{task.name}" of table "{table.name}" exists with other terms: {existing.task}; give the same, or '
            "another name"
        )
    if len(table.tasks) >= TASKS_MAX:
        raise UsageError(f'table "{table.name}" has {TASKS_MAX} tasks, which is the maximum')
    _check_task(table.core, task, table.limits.rows)
    _check_not_freed(table, task, now)
    table.begin(table.rows.pages.resident, columns=1)
    _introduce(table, task, now)
    apply_group_and_stale_rules(table, now)
    return table.terms()


def _check_not_freed(table: TableState, task: Task, now: float) -> None:
    """Raise `Impossible` if the task would wait for ever for columns of live rows that were freed."""
    if task.from_ == "now" or not table.rows.freed:
        return
    rows = table.rows.pages.resident_rows()
    at = table.rows.pages.index(rows)
    for name in task.needs:
        if name in table.rows.fields:
            gone = table.rows.were_freed(at, name) & (table.rows.pages.fate.a[at] == LIVE)
            if gone.any():
                raise Impossible(
                    f'task "{task.name}" would wait for ever: {why_freed(table, name, rows[gone], now)}. Declare the '
                    'task with from_="now" for rows that are put from now on, or write the column again first'
                )


def _introduce(table: TableState, task: Task, now: float) -> None:
    """Add the live rows to the new task, or mark them as absent for it. Visits all rows, once; page by page, since
    arrays of all rows would cost more than the work on them.
    """
    state, pages = table.add_task(task), table.rows.pages
    for rows in [pages.resident_rows()] if task.groups is not None else map(pages.rows_of, pages.pages()):
        _introduce_rows(table, state, rows, now)
    table.wake_task(task.name)


def _introduce_rows(table: TableState, state: TaskState, rows: IntArray, now: float) -> None:
    pages, task = table.rows.pages, state.task
    at = pages.where(rows)
    live = pages.fate.a[at] == LIVE
    state.state.a[at] = ABSENT
    state.counts[ABSENT] += rows.size
    if task.from_ == "now" or not live.any():
        return
    rows, at = _chosen(table, rows, at, live)
    state.move(at, rows.size, ABSENT, PENDING)
    table.rows.tasks_left.a[at] += 1
    ready = state.completed(at) if task.needs else np.ones(rows.size, np.bool_)
    if ready.any():
        state.complete(*_chosen(table, rows, at, ready), now)


def _chosen(table: TableState, rows: IntArray, at: Index, which: BoolArray) -> tuple[IntArray, Index]:
    """Some of the rows, and their positions."""
    if which.all():
        return rows, at
    rows = rows[which]
    return rows, table.rows.pages.where(rows)


def check_all_recorded(table: TableState) -> None:
    """`UsageError` if rows of a table that records them would end without a file."""
    if table.record is not None and table.rows.pages.resident:
        raise UsageError(
            f'table "{table.name}" records its rows, and {table.rows_live:,} live ones and {table.record.waiting:,} '
            "that have ended are in no file yet; end the live ones by drop(rows, reason), and drop the table when "
            "stats() says rows_to_record = 0 for it"
        )


def drop_table(table: TableState, now: float) -> None:
    """Drop every row, end every lease, and wake every request that waits."""
    rows = table.rows.pages.resident_rows()
    drop_rows(table, rows, "table_dropped", now)
    apply_group_and_stale_rules(table, now)
    left = table.rows.pages.resident_rows()
    if left.size:
        free_rows(table, left, table.rows.pages.index(left))
    for lease in [lease for lease in table.core.leases.by_id.values() if lease.table == table.name]:
        end_lease(table, lease, "its table was dropped", by_holder=False)
    table.known_puts.forget_all()
    for task in table.group_tasks:
        for unit in list(task.forming):
            task.forget(unit)
    table.wake_tasks()
    table.wake_room()
    table.core.effects.wake("table", table.name)
    for ended in table.tasks.values():
        ended.end()
