"""Commits the columns and facts of a request: all of them, or none.

`check_columns` raises for everything that can be wrong and changes nothing. `reserve_blocks` adds the blocks, and
`write_columns` makes them visible for some or all rows. A commit may wait between the two: the results of a lease
shared by replicas wait for the last ack. `unused` returns the references of rows that are never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from transferqueue.errors import AlreadyExists, Impossible, SchemaError, UsageError
from transferqueue.ledger.rows.arrays import AnyArray, BoolArray, Index, IntArray, decode, some
from transferqueue.ledger.rows.blocks import BlockRegistry, OwnerBytes
from transferqueue.ledger.rows.column_places import ColumnGroup, ColumnGroups, Retired
from transferqueue.ledger.rows.commit_shape import CommitShapes
from transferqueue.ledger.rows.facts import CheckedFacts, check_facts
from transferqueue.ledger.rows.row_state import RowStore
from transferqueue.schema import Field
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
    shapes: CommitShapes, blocks: BlockRegistry, session: int, columns: Columns, count: int, replicas: int
) -> StagedCommit:
    """Check `columns` for `count` rows, each block in `replicas` shards: everything that does not depend on the rows
    themselves.
    """
    shape = shapes.of(columns)
    inline = [
        (field.name, _check_inline(field, column.data, count))
        for field, column in zip(shape.inline, columns.inline, strict=True)
    ]
    slots, nbytes = [], 0
    for block, placed in zip(shape.blocks, columns.blocks, strict=True):
        slots.append(block.check(placed, count))
        nbytes += placed.nbytes
    blocks.check(session, columns.blocks, replicas)
    facts = check_facts(columns.facts, count)
    if shape.new_fields:
        shapes.rows.check_added(field.name for field in shape.new_fields)
    return StagedCommit(count, shape.new_fields, columns.blocks, slots, inline, facts, shape.names, replicas * nbytes)


@cache
def _little_endian(dtype: str) -> str:
    """The dtype of a field as messages carry its values."""
    return np.dtype(dtype).newbyteorder("<").str


def _check_inline(field: Field, data: bytes, count: int) -> AnyArray:
    values = decode(f'field "{field.name}"', data, _little_endian(field.dtype), count)
    if field.dtype == "bool" and count and int(values.view(np.uint8).max()) > 1:
        raise SchemaError(f'field "{field.name}" is bool, but a byte of it is neither 0 nor 1')
    return values


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
