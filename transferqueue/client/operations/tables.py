"""Operations on queues and tables, one for each method of `Queue` and `Table` (leases: `lease`, weights: `weights`,
`publish`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations import name_suggestions
from transferqueue.client.operations.column_source import ColumnsWanted, content_source
from transferqueue.client.operations.device import destination
from transferqueue.client.operations.lease import LOST_MAX, predicates
from transferqueue.client.operations.row_metadata import check_key
from transferqueue.client.operations.rows import Rows
from transferqueue.client.session.operation_runner import Operation, request_reply
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import DeadlineExceeded, NotFound, ShardLost, Unreachable, UsageError
from transferqueue.errors.text import shown
from transferqueue.limits import FIELDS_MAX, REPORT_S, ROWS_DESCRIBED_MAX, TASKS_MAX, Limits, check_name
from transferqueue.policies import Pacing, Predicate, Retention, Task
from transferqueue.schema import Field, FieldsWanted, sliced_fields
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.events import EventsAnswer
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.sessions import Sessions, SessionStats
from transferqueue.wire.answers.stats import AuditAnswer, Stats, TableAudit, TableStats
from transferqueue.wire.codec import decode_observed

R = TypeVar("R")
A = TypeVar("A")

# ---------------------------------------------------------------- queue


def create_table(
    client: ClientSession,
    name: str,
    fields: Sequence[Field],
    tasks: Sequence[Task],
    limits: Limits,
    pacing: Pacing | None,
    retention: Retention | None,
    exist_ok: bool,
    replicas: int,
    extra_fields: bool | None,
) -> Operation[TableInfo]:
    """Create a table, or open an existing one with the same terms."""
    if extra_fields is not None and not isinstance(extra_fields, bool):
        raise UsageError(
            f"extra_fields={shown(extra_fields)} is {type(extra_fields).__name__}; give True, False or None"
        )
    request = m.CreateTable(
        name=check_name("table", name),
        fields=_each("fields", fields, Field, FIELDS_MAX),
        tasks=_each("tasks", tasks, Task, TASKS_MAX),
        limits=_one("limits", limits, Limits),
        pacing=None if pacing is None else _one("pacing", pacing, Pacing),
        retention=None if retention is None else _one("retention", retention, Retention),
        exist_ok=checks.flag("exist_ok", exist_ok),
        replicas=checks.whole("replicas", replicas, least=1),
        extra_fields=extra_fields,
    )
    name_suggestions.check_declared(name, request.fields, request.tasks)
    name_suggestions.check_needs(request.tasks, {field.name for field in request.fields})
    return client.table_info((yield from request_reply(request, m.TableTerms)))


def open_table(client: ClientSession, name: str, timeout_s: float | None) -> Operation[TableInfo]:
    """Open a table, waiting up to `timeout_s` until it exists; 0: it must exist now, which the server answers at
    once."""
    check_name("table", name)
    wait_s = 0.0 if timeout_s == 0 else (yield from checks.within(timeout_s)).wait_s
    request = m.OpenTable(name=name, wait_s=wait_s)
    try:
        return client.table_info((yield from request_reply(request, m.TableTerms)))
    except NotFound as error:
        if client.embedded_at is None:
            raise
        age_s = client.clock() - client.embedded_at
        raise NotFound(
            f"{error}; this queue was embedded {age_s:.1f} s ago; TRANSFERQUEUE_ADDRESS is not set"
        ) from None


def drop_table(client: ClientSession, name: str, empty: bool) -> Operation[None]:
    """Drop a table with its rows."""
    yield from request_reply(
        m.DropTable(name=check_name("table", name), empty=checks.flag("empty", empty)), m.DoneReply
    )
    client.tables.pop(name, None)


def tables() -> Operation[list[str]]:
    """Names of all tables."""
    return (yield from request_reply(m.ListTables(), m.Tables)).names


def observe(kind: type[A], table: str = "", row: int = -1, *, timeout_s: float | None = REPORT_S) -> Operation[A]:
    """Ask for an answer of this kind. `Unreachable` if the server gives none within `timeout_s`."""
    if table != "" or kind is RowLife:
        check_name("table", table)
    request = m.Observe(what=_OBSERVED[kind], table=table, row=checks.whole("row", row, least=-1))
    return (yield from _answer(kind, request, timeout_s))


_OBSERVED: Final[dict[type, str]] = {
    Stats: "stats",
    AuditAnswer: "audit",
    DoctorAnswer: "doctor",
    RowLife: "row",
}


def events(table: str, after: int, every: int, timeout_s: float | None) -> Operation[EventsAnswer]:
    """Ask what happened to rows of a table since an earlier answer. Errors as of `observe`."""
    request = m.ListEvents(
        table=check_name("table", table),
        after=checks.whole("after", after, least=-1),
        every=checks.whole("every", every, least=1),
    )
    return (yield from _answer(EventsAnswer, request, timeout_s))


def sessions(timeout_s: float | None) -> Operation[Sessions]:
    """Ask who is connected. Errors as of `observe`."""
    return Sessions((yield from _answer(dict[str, SessionStats], m.Observe("sessions"), timeout_s)))


def _answer(kind: type[A], request: m.Observe | m.ListEvents, timeout_s: float | None) -> Operation[A]:
    yield from checks.within(timeout_s)
    try:
        reply = yield from request_reply(request, m.Observed)
    except DeadlineExceeded as late:  # no report waits at the server
        raise Unreachable(str(late)) from None
    return decode_observed(reply, kind)


def table_stats(table: str, timeout_s: float | None) -> Operation[TableStats]:
    """Ask for the statistics of one table. Errors as of `observe`."""
    return (yield from observe(Stats, table, timeout_s=timeout_s)).tables[table]


def table_audit(table: str, timeout_s: float | None) -> Operation[TableAudit]:
    """Ask for the books of one table. Errors as of `observe`."""
    return (yield from observe(AuditAnswer, table, timeout_s=timeout_s)).tables[table]


# ---------------------------------------------------------------- rows


def read(
    client: ClientSession,
    terms: TableInfo,
    rows: object,
    where: Predicate | Iterable[Predicate],
    fields: FieldsWanted,
    limit: int | None,
    values: bool,
    device: Any,
) -> Operation[Rows]:
    """Read rows without a lease."""
    values = checks.flag("values", values)
    to = destination(device, values=values)
    names, slices = checks.field_slices(fields)
    sliced_fields(terms.fields, slices)
    request = m.ReadRequest(
        table=terms.name,
        rows=None if rows is None else checks.row_ids(rows),
        fields=names,
        where=predicates(where),
        limit=0 if limit is None else checks.positive("limit", limit),
    )
    wanted = ColumnsWanted(slices, to, values)
    for _ in range(LOST_MAX):
        try:
            return (yield from _read(client, terms, request, wanted))
        except ShardLost:
            continue  # the next reply names copies in other shards, or says that the rows are gone
    return (yield from _read(client, terms, request, wanted))


def _read(client: ClientSession, terms: TableInfo, request: m.ReadRequest, wanted: ColumnsWanted) -> Operation[Rows]:
    content = (yield from request_reply(request, m.ReadRows)).content
    source = yield from content_source(client, content, terms, f'table "{terms.name}"', wanted)
    left_out = [name for name in terms.fields if name not in source.fields] if request.fields is None else []
    return Rows(content, source.without(left_out), tuple(left_out))


def find(terms: TableInfo, keys: str | Sequence[str]) -> Operation[NDArray[np.int64]]:
    """Find the row id of each key."""
    if not isinstance(keys, Iterable):
        raise UsageError(f"keys={shown(keys)} is {type(keys).__name__}; give a key, or a list of keys")
    wanted = [check_key(key) for key in ([keys] if isinstance(keys, str) else keys)]
    found = []
    for first in range(0, max(1, len(wanted)), ROWS_DESCRIBED_MAX):
        request = m.Find(table=terms.name, keys=wanted[first : first + ROWS_DESCRIBED_MAX])
        reply = yield from request_reply(request, m.Found)
        found.append(np.frombuffer(reply.rows, "<i8").astype(np.int64))
    return np.concatenate(found)


def drop(terms: TableInfo, rows: object, reason: str) -> Operation[int]:
    """Drop rows. Returns how many."""
    request = m.Drop(table=terms.name, rows=checks.row_ids(rows), reason=check_name("drop reason", reason))
    return (yield from request_reply(request, m.DoneReply)).rows


def dropped(terms: TableInfo, limit: int) -> Operation[list[m.DroppedRow]]:
    """List rows that were dropped for failing too often, the latest first."""
    request = m.ListDropped(table=terms.name, limit=checks.whole("limit", limit))
    return (yield from request_reply(request, m.DroppedRows)).rows


def retry(terms: TableInfo, rows: object) -> Operation[int]:
    """Take dropped rows again. Returns how many."""
    if isinstance(rows, list | tuple):  # perhaps what `dropped` gave
        rows = [getattr(row, "row", row) for row in rows]
    return (yield from request_reply(m.RetryRows(table=terms.name, rows=checks.row_ids(rows)), m.DoneReply)).rows


def delete(terms: TableInfo, rows: object) -> Operation[int]:
    """Free rows of a table with manual retention. Returns how many."""
    return (yield from request_reply(m.Delete(table=terms.name, rows=checks.row_ids(rows)), m.DoneReply)).rows


def free_columns(terms: TableInfo, rows: object, fields: Iterable[str], again: bool) -> Operation[int]:
    """Free columns of rows that live on. Returns how many values."""
    names = checks.names("field", fields)
    if not names:
        raise UsageError("free_columns frees the columns that it names; give at least one field, or delete the rows")
    request = m.FreeColumns(
        table=terms.name, rows=checks.row_ids(rows), fields=names, again=checks.flag("again", again)
    )
    return (yield from request_reply(request, m.DoneReply)).rows


# ---------------------------------------------------------------- flow and terms


def reserve(
    client: ClientSession,
    terms: TableInfo,
    rows: int,
    policy_version: int | None,
    timeout_s: float | None,
    make: Callable[[ClientSession, TableInfo, m.Reserved], R],
) -> Operation[R]:
    """Reserve rows and make a reservation of the reply: permission to start producing them."""
    deadline = yield from checks.within(timeout_s)
    request = m.Reserve(
        table=terms.name,
        rows=checks.positive("rows", rows),
        policy_version=-1 if policy_version is None else checks.whole("policy_version", policy_version),
        wait_s=deadline.wait_s,
    )
    return make(client, terms, (yield from request_reply(request, m.Reserved)))


def unreserve(terms: TableInfo, reservation: int, rows: int | None) -> Operation[int]:
    """Return rows of a reservation that will not be produced."""
    count = 0 if rows is None else checks.positive("rows", rows)
    request = m.Unreserve(table=terms.name, reservation=reservation, rows=count)
    return (yield from request_reply(request, m.DoneReply)).rows


def advance(terms: TableInfo, version: int, timeout_s: float | None) -> Operation[None]:
    """Advance the table's clock to the trainer's version."""
    deadline = yield from checks.within(timeout_s)
    request = m.AdvanceClock(table=terms.name, version=checks.whole("version", version), wait_s=deadline.wait_s)
    yield from request_reply(request, m.DoneReply)


def checkpointed(terms: TableInfo, step: int, task: str | None) -> Operation[int]:
    """Report a checkpoint of the model at `step`. Returns how many rows are done now."""
    request = m.CommitCheckpoint(table=terms.name, step=checks.step(step), task=_task_name(task))
    return (yield from request_reply(request, m.DoneReply)).rows


def rollback(terms: TableInfo, step: int, task: str | None, version: int | None) -> Operation[int]:
    """Roll back to the checkpoint at `step`. Returns how many rows are ready again."""
    request = m.Rollback(
        table=terms.name,
        step=checks.step(step, -1),
        task=_task_name(task),
        version=-1 if version is None else checks.whole("version", version),
    )
    return (yield from request_reply(request, m.DoneReply)).rows


def _task_name(task: str | None) -> str:
    return "" if task is None else check_name("task", task)


def cursor(terms: TableInfo, start: int) -> Operation[int]:
    """The lowest ordinal, from `start` on, that was not put or whose row is live."""
    return (
        yield from request_reply(m.Cursor(table=terms.name, start=checks.whole("start", start)), m.CursorValue)
    ).ordinal


def seal(terms: TableInfo) -> Operation[None]:
    """Seal the table: it takes no more rows."""
    yield from request_reply(m.Seal(table=terms.name), m.DoneReply)


def add_task(client: ClientSession, terms: TableInfo, task: Task) -> Operation[None]:
    """Declare one more task."""
    request = m.AddTask(table=terms.name, task=_one("task", task, Task))
    name_suggestions.check_declared(terms.name, (), [request.task])
    name_suggestions.check_new_task(request.task, terms)
    client.table_info((yield from request_reply(request, m.TableTerms)))


def add_fields(client: ClientSession, terms: TableInfo, fields: Sequence[Field]) -> Operation[None]:
    """Declare more fields."""
    request = m.AddFields(table=terms.name, fields=_each("fields", fields, Field, FIELDS_MAX))
    name_suggestions.check_declared(terms.name, request.fields, ())
    client.table_info((yield from request_reply(request, m.TableTerms)))


def _one(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", str(kind).replace("transferqueue.policies.", ""))
        raise UsageError(f"{name}={shown(value)} is {type(value).__name__}; give {wanted}")
    return checks.policy(name, value, kind)


def _each(name: str, values: Any, kind: Any, most: int) -> list[Any]:
    if isinstance(values, kind | str | Mapping) or not isinstance(values, Iterable):
        raise UsageError(f"{name}={shown(values)} is not a list; give a list of {kind.__name__}")
    return [_one(name, value, kind) for value in checks.few(name, values, most)]


def drain_shard(number: int) -> Operation[None]:
    """Drain a remote shard: its process ends when it is empty."""
    yield from request_reply(m.Drain(checks.whole("number", number)), m.DoneReply)
