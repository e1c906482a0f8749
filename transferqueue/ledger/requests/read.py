"""Requests that read rows without a lease: find, read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from transferqueue.errors import ColumnFreed, NotFound, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import IntArray, agreed, decode_rows, numbered, run_of
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.requests.registry import in_table
from transferqueue.ledger.requests.reply_rows import await_bytes, complete_fields, describe_rows, places_of
from transferqueue.ledger.rows import DROPPED
from transferqueue.ledger.rules.column_ends import why_freed
from transferqueue.ledger.rules.work import read_ns
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.predicates import check_where, matches
from transferqueue.limits import NODES_MAX, check_work
from transferqueue.policies import Predicate
from transferqueue.wire.messages import Cursor, CursorValue, Find, Found, ReadRequest, ReadRows


@in_table(Find)
def find(table: TableState, request: Find, session: int, now: float) -> Found:
    """Row ids of keys; -1 if no resident row has the key."""
    rows = [table.rows.row_of_key.get(key, -1) if key else -1 for key in request.keys]
    return Found(np.array(rows, np.int64).tobytes())


@in_table(ReadRequest)
def read(table: TableState, request: ReadRequest, session: int, now: float) -> ReadRows | Blocked:
    """Resident rows by id, in the order of the request; or all rows that are not dropped and match, ascending."""
    check_where(table.rows, request.where, table.expected_fields())
    for name in request.fields or ():
        if name not in table.rows.fields:
            raise table.rows.unknown_field(name)
    rows = _named(table, request) if request.rows is not None else _scan(table, request.where, request.limit)
    at = table.rows.pages.index(rows)
    if request.fields is None:
        fields = complete_fields(table, at, list(table.rows.fields))
    else:
        fields = list(dict.fromkeys(request.fields))
        _check_complete(table, rows, at, fields, now)
    check_work(
        f"a read of {counted(rows.size, 'row')} with {counted(len(fields), 'field')}",
        rows.size,
        read_ns(table, len(fields)) * rows.size,
        "read at most {rows} at a time: by their ids, or with a limit, and fewer fields",
    )
    places = places_of(table, at, fields, NODES_MAX if rows.size > 1 else math.inf)
    if places.fit is not None:
        raise UsageError(
            f"a read of {counted(rows.size, 'row')}, which continue others, names more than {NODES_MAX:,} stored "
            f"values, the most at once; read at most {max(places.fit, 1):,} of them at a time, or fewer fields"
        )
    if table.core.blocks.cold is not None and (waits := await_bytes(table, places)) is not None:
        return waits
    content, blocks = describe_rows(table, rows, run_of(at), fields, places)
    table.begin(len(blocks))
    table.core.blocks.pin(session, blocks)
    return ReadRows(content)


@in_table(Cursor)
def cursor(table: TableState, request: Cursor, session: int, now: float) -> CursorValue:
    """The lowest ordinal from `request.start` on that was not put yet or has a live row."""
    return CursorValue(table.ordinals.cursor(request.start))


def _named(table: TableState, request: ReadRequest) -> IntArray:
    rows = decode_rows(request.rows or b"")
    at = table.rows.places(rows)
    chosen = rows[matches(table.rows, request.where, rows, at)] if request.where else rows
    return chosen[: request.limit] if request.limit else chosen


def _scan(table: TableState, where: Sequence[Predicate], limit: int) -> IntArray:
    chosen: list[IntArray] = []
    count = 0
    for page in table.rows.pages.pages():
        rows = table.rows.pages.rows_of(page)
        at = table.rows.pages.index(rows)
        good = (table.rows.pages.fate.a[at] != DROPPED) & matches(table.rows, where, rows, at)
        chosen.append(rows[good])
        count += chosen[-1].size
        if limit and count >= limit:
            break
    matching = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    return matching[:limit] if limit else matching


def _check_complete(table: TableState, rows: IntArray, at: IntArray, fields: Sequence[str], now: float) -> None:
    complete = complete_fields(table, at, fields)
    for name in fields:
        if name not in complete:
            freed = table.rows.were_freed(at, name)
            if freed.any():
                raise ColumnFreed(why_freed(table, name, rows[freed], now))
            lacking = rows[~table.rows.has_all(at, table.rows.mask((name,)))]
            raise NotFound(
                f'{numbered(lacking)} of table "{table.name}" {agreed(lacking, "does", "do")} not have "{name}" yet; '
                "read rows that have it"
            )
