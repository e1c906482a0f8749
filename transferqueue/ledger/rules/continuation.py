"""Rows of a put that continue rows of the table: checks what they continue, and notes it of their values.

The parents must be resident, live or not, and have the fields. Since the put looks them up by id, they were put before
it, into the same table. Nothing else is asked of them: they may end at once (`rows.continued`).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transferqueue.errors import ColumnFreed, NotFound, SchemaError, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import IntArray, agreed, decode, numbered
from transferqueue.ledger.rows import Continued, StagedCommit, keys_of, values_of
from transferqueue.ledger.rules.column_ends import why_freed
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import CONTINUED_MAX, CONTINUED_NS, CONTINUED_ROWS, NODES_MAX, check_work
from transferqueue.wire.messages import ContinueRequest


def continue_rows(table: TableState, staged: StagedCommit, request: ContinueRequest, now: float) -> None:
    """Add to a checked put what its values continue. Raises without a change to the table."""
    parents = decode("parents", request.parents, "<i8", request.rows)
    children = np.flatnonzero(parents != -1)
    names = dict.fromkeys(request.fields)
    check_work(
        f"a put of {counted(children.size, 'row')} that {agreed(children, 'continues', 'continue')} others in "
        f"{counted(len(names), 'field')}",
        children.size,
        CONTINUED_NS * len(names) * (children.size + CONTINUED_ROWS),
    )
    if not children.size or not names:
        raise UsageError("a put that continues no row, or none of their fields, is a plain put; leave out parent=")
    rows = parents[children]
    at = table.rows.places(rows)
    place_of = _places_of(table, staged, names.keys())
    for name in names:
        _check_complete(table, name, rows, at, now)
    fields_in: dict[int, list[tuple[list[str], IntArray]]] = {}
    """By block of the put: fields that continue values at the same places, and the keys of these."""
    for where in table.column_groups.locate(names, at):
        keys = np.zeros(request.rows, np.int64)
        keys[children] = keys_of(where.blocks, where.slots)
        by_place: dict[int, list[str]] = {}
        for name in where.fields:
            by_place.setdefault(place_of[name], []).append(name)
        for place, fields in by_place.items():
            fields_in.setdefault(place, []).append((fields, keys))
    values = np.zeros(children.size, np.int64)
    for place, parts in sorted(fields_in.items()):
        depths = np.zeros(request.rows, np.int64)
        for _, keys in parts:
            depths[children] = np.maximum(depths[children], values_of(table.usage.continued, keys[children]))
        if (deepest := int(depths.max())) > CONTINUED_MAX:
            raise UsageError(
                f'{numbered(parents[depths == deepest])} of table "{table.name}" cannot be continued: '
                f"{deepest - 1} rows come before, and a row continues at most {CONTINUED_MAX}; put the row whole"
            )
        of_field = {name: number for number, (fields, _) in enumerate(parts) for name in fields}
        alike = len(parts) == 1 and len(of_field) == len(staged.placed[place].fields)
        staged.continued[place] = Continued.of([keys for _, keys in parts], of_field, depths, alike=alike)
        values += (depths[children] + 1) * len(parts)
    sizes = staged.facts.numbers.get("group_size")
    if sizes is not None and (named := int((values * sizes[children]).max())) > NODES_MAX:
        raise UsageError(
            f"a group of such rows would have {named:,} stored values, and a lease names at most {NODES_MAX:,}; "
            "put the rows whole, or in smaller groups"
        )


def _places_of(table: TableState, staged: StagedCommit, names: Collection[str]) -> dict[str, int]:
    """The places among the blocks of the put of these fields, which must have a value for each row."""
    places = {name: place for place, placed in enumerate(staged.placed) for name in placed.fields}
    fields = table.rows.fields | {new.name: new for new in staged.new_fields}
    for name in names:
        if (place := places.get(name)) is None:
            raise UsageError(f'field "{name}" is continued, and the put has no column of that name in a block; give it')
        if not fields[name].ragged:
            raise SchemaError(
                f'field "{name}" of table "{table.name}" is {fields[name].describe()}; only ragged columns are '
                "continued: name those in continued="
            )
        placed = staged.placed[place]
        if placed.content or placed.members is not None or staged.slots[place] is not None:
            raise UsageError(
                f'field "{name}" is continued, and its values are shared by rows or puts; give one value for each row, '
                "without Repeat"
            )
    return places


def _check_complete(table: TableState, name: str, rows: IntArray, at: IntArray, now: float) -> None:
    if name not in table.rows.fields:
        raise table.rows.unknown_field(name)
    has_field = table.rows.has_all(at, table.rows.mask((name,)))
    if has_field.all():
        return
    freed = table.rows.were_freed(at, name)
    if freed.any():
        raise ColumnFreed(why_freed(table, name, rows[freed], now))
    lacking = np.unique(rows[~has_field])
    raise NotFound(
        f'{numbered(lacking)} of table "{table.name}" {agreed(lacking, "does", "do")} not have "{name}", so no row '
        "continues it there; name the columns that are continued (continued=)"
    )
