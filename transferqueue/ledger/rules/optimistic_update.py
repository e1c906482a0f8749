"""Compares rows with a client's earlier read of them: the condition of an update that must not overwrite later writes.

No row has a counter for this. A value in a block is known by the number of its block: blocks are never changed, each
write of a field brings a new one or refers to one that has a single value, and a number is used once. An inline value
and tags are compared themselves: an update that is made of the same value is the same update, whatever happened in
between.
"""

from __future__ import annotations

import numpy as np
from msgspec.msgpack import encode

from transferqueue.errors import RowsChanged, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import BoolArray, IntArray, decode, numbered, repeated
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import FIELDS_MAX
from transferqueue.wire import codec
from transferqueue.wire.messages import BlocksRead, Inline, RowsRead


def check_unchanged(table: TableState, read: RowsRead, rows: IntArray, at: IntArray) -> None:
    """Raise `RowsChanged` unless the rows are as they were read. Changes nothing."""
    _check_names(table, read)
    for inline in read.inline:
        _refuse(table, inline.field, rows, ~_has(table, [inline.field], at) | _differ(table, inline, at))
    for placed in read.blocks:
        _check_blocks(table, placed, rows, at)
    if read.tags is not None:
        if len(read.tags) != rows.size:
            raise UsageError(
                f"if_unchanged has tags of {counted(len(read.tags), 'row')}; the update names "
                f"{counted(rows.size, 'row')}"
            )
        now = [table.rows.tags.get(row, {}) for row in rows.tolist()]
        changed = [encode(tags) != encode(seen) for tags, seen in zip(now, read.tags, strict=True)]
        _refuse(table, "tags", rows, np.array(changed, np.bool_))


def _check_names(table: TableState, read: RowsRead) -> None:
    count = len(read.inline) + sum([len(placed.fields) for placed in read.blocks])
    if count > FIELDS_MAX:
        raise UsageError(f"if_unchanged names {count} fields; a table has at most {FIELDS_MAX}: name each once")
    if not all(placed.fields for placed in read.blocks):
        raise UsageError("if_unchanged has blocks of no fields; name the fields that were read there")
    names = [inline.field for inline in read.inline] + [name for placed in read.blocks for name in placed.fields]
    if not names and read.tags is None:
        raise UsageError(
            "if_unchanged names neither fields nor tags, so it would always hold; read what must not change"
        )
    if len(set(names)) != count:
        twice = repeated(names)[0]
        raise UsageError(f'if_unchanged names field "{twice}" twice; name each once')
    for name in names:
        if name not in table.rows.fields:
            raise table.rows.unknown_field(name)


def _has(table: TableState, names: list[str], at: IntArray) -> BoolArray:
    return table.rows.has_all(at, table.rows.mask(names))


def _differ(table: TableState, inline: Inline, at: IntArray) -> BoolArray:
    """Which values of an inline field are other bytes than were read: NaN is equal to itself."""
    column = table.rows.inline.get(inline.field)
    if column is None:
        raise UsageError(f'if_unchanged has values of field "{inline.field}", which lies in blocks; name its blocks')
    values = column.a[at]
    bits = f"<u{values.itemsize}"
    differ: BoolArray = values.view(bits) != decode(f'field "{inline.field}"', inline.data, bits, at.size)
    return differ


def _check_blocks(table: TableState, placed: BlocksRead, rows: IntArray, at: IntArray) -> None:
    inline = [name for name in placed.fields if name in table.rows.inline]
    if inline:
        raise UsageError(f'if_unchanged has blocks of field "{inline[0]}", whose values travel inline; send its values')
    read = codec.decode_constant(placed.blocks, "<i8", rows.size)
    lacks = ~_has(table, placed.fields, at)
    if lacks.any():
        lost = [name for name in placed.fields if not _has(table, [name], at).all()]
        _refuse(table, lost[0], rows, lacks)
    for places in table.column_groups.locate(placed.fields, at):
        _refuse(table, places.fields[0], rows, places.blocks != read)


def _refuse(table: TableState, what: str, rows: IntArray, changed: BoolArray) -> None:
    if changed.any():
        subject = "the tags" if what == "tags" else f'field "{what}"'
        raise RowsChanged(
            f'{subject} of {numbered(rows[changed])} in table "{table.name}" changed after the read; nothing was '
            "updated: read the rows again, then update them"
        )
