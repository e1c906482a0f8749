"""Commits the columns and facts of a request: all of them, or none.

`check_columns` raises for everything that can be wrong and changes nothing. `reserve_blocks` adds the blocks, and
`write_columns` makes them visible for some or all rows. A commit may wait between the two: the results of a lease
shared by replicas wait for the last ack. `unused` returns the references of rows that are never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from transferqueue.errors import AlreadyExists, Impossible, SchemaError, UsageError
from transferqueue.ledger.rows.arrays import AnyArray, BoolArray, Index, IntArray, decode, some
from transferqueue.ledger.rows.blocks import BlockRegistry, OwnerBytes
from transferqueue.ledger.rows.column_places import ColumnGroup, ColumnGroups, Retired
from transferqueue.ledger.rows.facts import CheckedFacts, check_facts
from transferqueue.ledger.rows.row_state import RowStore
from transferqueue.limits import FIELDS_MAX, ROWS_PER_REQUEST_MAX
from transferqueue.schema import Field, layout
from transferqueue.wire.messages import Columns, WrittenBlock


@dataclass(slots=True)
class StagedCommit:
    """Checked columns of `rows` rows. slots: None where row i of the request is row i of the block."""

    rows: int
    new_fields: list[Field]
    placed: list[WrittenBlock]
    slots: list[AnyArray | None]
    inline: list[tuple[str, AnyArray]]
    facts: CheckedFacts
    names: list[str]
    nbytes: int
    blocks: list[int] = field(default_factory=list)
    parts: list[list[ColumnGroup]] = field(default_factory=list)
    written: int = 0
    """Number of rows whose references are in use."""

    @property
    def empty(self) -> bool:
        """Whether it has neither columns nor facts."""
        return not self.names and not self.facts


# ---------------------------------------------------------------- checks: nothing is changed


def check_columns(
    rows: RowStore, blocks: BlockRegistry, session: int, columns: Columns, count: int, replicas: int
) -> StagedCommit:
    """Check `columns` for `count` rows, each block in `replicas` shards: everything that does not depend on the rows
    themselves.
    """
    names = [name for placed in columns.blocks for name in placed.fields]
    names += [value.field for value in columns.inline]
    if len(names) > FIELDS_MAX or len(columns.blocks) > FIELDS_MAX:  # before any of them is decoded
        raise UsageError(
            f"a request gives {len(names)} columns in {len(columns.blocks)} blocks; a table has at most {FIELDS_MAX} fields"
        )
    known = rows.check_fields(columns.fields)
    inline = [(column.field, _check_inline(rows, known, column.field, column.data, count)) for column in columns.inline]
    slots = [_check_block(rows, known, placed, count) for placed in columns.blocks]
    if len(names) > 1 and len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f'field "{twice}" is given twice in one request; give each field once')
    blocks.check(session, columns.blocks, replicas)
    facts = check_facts(columns.facts, count)
    new = [] if known is rows.fields else [known[name] for name in known if name not in rows.fields]
    if new:
        rows.check_added(field.name for field in new)
    nbytes = replicas * sum([placed.nbytes for placed in columns.blocks])
    return StagedCommit(count, new, columns.blocks, slots, inline, facts, names, nbytes)


def _check_inline(rows: RowStore, known: dict[str, Field], name: str, data: bytes, count: int) -> AnyArray:
    field = known.get(name)
    if field is None:
        raise rows.unknown_field(name)
    if not field.inline:
        raise SchemaError(f'field "{name}" is {field.describe()}, which does not travel inline; place it in a block')
    values = decode(f'field "{name}"', data, np.dtype(field.dtype).newbyteorder("<").str, count)
    if field.dtype == "bool" and count and int(values.view(np.uint8).max()) > 1:
        raise SchemaError(f'field "{name}" is bool, but a byte of it is neither 0 nor 1')
    return values


def _check_block(rows: RowStore, known: dict[str, Field], placed: WrittenBlock, count: int) -> AnyArray | None:
    fields = []
    for name in placed.fields:
        field = known.get(name)
        if field is None:
            raise rows.unknown_field(name)
        if field.inline:
            raise SchemaError(f'field "{name}" is {field.describe()}, which travels inline, not in a block')
        fields.append(field)
    check_layout(placed, fields)
    if placed.slots is None and placed.rows == count:
        return None
    return _check_slots(placed, count)


def check_layout(placed: WrittenBlock, fields: Sequence[Field]) -> None:
    """Raise unless the size of the block is exactly that of its fields, rows and counts."""
    if not fields:
        raise UsageError("a block without fields holds nothing; name its fields")
    if not 1 <= placed.rows <= ROWS_PER_REQUEST_MAX:
        raise UsageError(f"a block has {placed.rows} rows; it has 1 to {ROWS_PER_REQUEST_MAX}")
    _, nbytes = layout(fields, placed.rows, placed.counts)
    if nbytes != placed.nbytes:
        raise UsageError(
            f"block of {', '.join(placed.fields)} has {placed.nbytes} bytes; {placed.rows} rows with counts "
            f"{placed.counts} take {nbytes}"
        )


def _check_slots(placed: WrittenBlock, count: int) -> AnyArray | None:
    if placed.slots is None:
        if placed.rows != count:
            raise SchemaError(f"block of {', '.join(placed.fields)} has {placed.rows} rows; the request has {count}")
        return None
    slots = decode("slots", placed.slots, "<i4", count)
    if count and (int(slots.min()) < 0 or int(slots.max()) >= placed.rows):
        raise UsageError(f"slots reach from {slots.min()} to {slots.max()}; the block has rows 0 to {placed.rows - 1}")
    return slots


def check_unset(rows: RowStore, staged: StagedCommit, ids: IntArray, at: IntArray) -> None:
    """Raise if a row already has one of the fields."""
    names = [name for name in staged.names if name in rows.fields]
    if not rows.has_any(at, rows.mask(names)).any():
        return
    for name in names:
        has_field: BoolArray = rows.has_any(at, rows.mask((name,)))
        if has_field.any():
            raise AlreadyExists(
                f'field "{name}" of row {some(ids[has_field])} in table "{rows.table}" is already set; '
                "table.update(rows, overwrite=True, ...) replaces it"
            )


def check_no_group_facts(staged: StagedCommit) -> None:
    """Raise if an update or ack carries facts that only a put may carry."""
    if "group_id" in staged.facts.numbers:
        raise UsageError("group_id and group_size are given at put and stay; they cannot be updated")


def check_size(staged: StagedCommit, table: str, bytes_max: int | None, rows: int) -> None:
    """Raise if `rows` rows of this size can never fit the table."""
    if bytes_max is not None and staged.nbytes > bytes_max * rows:
        what = f"{rows} rows of {staged.nbytes // rows} bytes each" if rows > 1 else f"{staged.nbytes} bytes"
        raise Impossible(
            f'{what} do not fit table "{table}", which holds at most {bytes_max} bytes: {staged.nbytes} > {bytes_max}'
        )


# ---------------------------------------------------------------- changes: nothing raises


def reserve_blocks(
    staged: StagedCommit, rows: RowStore, parts: ColumnGroups, blocks: BlockRegistry, usage: OwnerBytes
) -> None:
    """Declare new fields, and add the blocks of checked columns."""
    for new in staged.new_fields:
        rows.add_field(new)
    staged.parts = [parts.parts_of(placed.fields) for placed in staged.placed]
    if staged.placed:
        refs = [staged.rows * len(group) for group in staged.parts]
        staged.blocks = blocks.commit(staged.placed, usage, refs)


def write_columns(
    staged: StagedCommit,
    rows: RowStore,
    parts: ColumnGroups,
    ids: IntArray,
    at: Index,
    chosen: IntArray | None = None,
    *,
    are_new: bool = False,
) -> Retired:
    """Write columns and facts of the rows `ids`, which are the rows `chosen` of the request (None: all).

    Returns references that this replaces. Call it once for each chosen row. are_new: the rows have no column yet.
    """
    retired: Retired = []
    for number, slots, into in zip(staged.blocks, staged.slots, staged.parts, strict=True):
        if not are_new:
            retired += parts.take_out(at, into)
        parts.write(at, ids.size, into, number, _slots(slots, chosen))
    for name, values in staged.inline:
        rows.set_inline(name, at, values if chosen is None else values[chosen])
    if staged.names:
        mark = rows.begin_fields if are_new else rows.set_fields
        mark(at, rows.mask(staged.names))
    if staged.facts:
        rows.set_facts(ids, at, staged.facts if chosen is None else staged.facts.take(chosen))
    staged.written += ids.size
    return retired


def _slots(slots: AnyArray | None, chosen: IntArray | None) -> AnyArray | slice:
    if slots is None:
        return slice(None) if chosen is None else chosen.astype(np.int32)
    return slots if chosen is None else slots[chosen]


def unused(staged: StagedCommit) -> Retired:
    """References of rows that were not written and never will be."""
    left = staged.rows - staged.written
    staged.written = staged.rows
    return [(number, left * len(into)) for number, into in zip(staged.blocks, staged.parts, strict=True) if left]
