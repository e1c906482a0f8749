"""Describes rows in a reply: facts, inline values, and the places of their columns.

A reply contains only fields that all of its rows have. The caller pins each block that the reply names for the session,
once per reply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from transferqueue.ledger.arrays import Index, IntArray, are_equal
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.rows import BlockSlots, Nodes, forests, keys_of, values_of
from transferqueue.ledger.rows.blocks import BlockRegistry
from transferqueue.ledger.table_state import TableState
from transferqueue.wire import codec
from transferqueue.wire.messages import Inline, ReplyColumns, ReplyRows, ReplyTree

Value = TypeVar("Value")

_FIRST: Final = codec.encode_constant(np.zeros(1, np.int32))
"""Index for a reply in which every row is in the first block."""


class ReplyPlaces(NamedTuple):
    """The places of the columns of a reply, with the fields that lie together, in their order.

    Args:
        columns: places of each row; or, with a forest, of its nodes, since some rows continue others.
        fit: how many of the rows, from the first on, a reply may name, and then `columns` is empty; None: all.
    """

    columns: list[tuple[BlockSlots, Nodes | None]]
    fit: int | None = None

    def blocks(self) -> set[int]:
        """All blocks in which they lie."""
        return {number for places, _ in self.columns for number in np.unique(places.blocks).tolist()} - {0}


def places_of(table: TableState, at: Index, names: Sequence[str], most: float = math.inf) -> ReplyPlaces:
    """Where these rows have the fields `names`, which all of them have (`complete_fields`). `most` bounds the stored
    values to name, if rows continue others; default: no bound."""
    located = table.column_groups.locate(table.rows.reply_fields(names)[1], at)
    if not table.usage.continued:
        return ReplyPlaces([(places, None) for places in located])
    found = forests(
        table.usage.continued, {name: (one.blocks, one.slots) for one in located for name in one.fields}, most
    )
    columns: dict[tuple[int, int], tuple[BlockSlots, Nodes | None]] = {}
    for places in located if found.fit is None else ():
        for name in places.fields:
            nodes = found.nodes.get(name)
            lie = places if nodes is None else nodes
            column, _ = columns.setdefault((id(places), id(nodes)), (BlockSlots([], lie.blocks, lie.slots), nodes))
            column.fields.append(name)
    return ReplyPlaces([*columns.values()], found.fit)


def values_named(table: TableState, at: Index, names: Sequence[str]) -> IntArray:
    """How many stored values a reply names for each of these rows, if they have nothing in common."""
    values = np.zeros(table.rows.pages.fate.a[at].size, np.int64)
    for places in table.column_groups.locate(table.rows.reply_fields(names)[1], at):
        each = values_of(table.usage.continued, keys_of(places.blocks, places.slots))
        values += each if (each > 1).any() else 0
    return values


def describe_rows(
    table: TableState, rows: IntArray, at: Index, names: Sequence[str], places: ReplyPlaces | None = None
) -> tuple[ReplyRows, list[int]]:
    """Content of `rows` with the fields `names`, which all of them have (`complete_fields`), and the blocks that it
    names. `places`: those of these rows and fields, if the caller has them.
    """
    if places is None:
        places = places_of(table, at, names)
    inline, _, definitions = table.rows.reply_fields(names)
    blocks: dict[int, None] = {}
    content = ReplyRows(
        rows=rows.tobytes(),
        **table.rows.reply_facts(at, rows.size),
        keys=_of_rows(table.rows.keys, rows, "") if table.rows.keys else None,
        tags=_of_rows(table.rows.tags, rows, {}) if table.rows.tags else None,
        inline=[Inline(name, table.rows.inline[name].a[at].tobytes()) for name in inline] if inline else [],
        parts=[_part(table.core.blocks, column, nodes, blocks) for column, nodes in places.columns],
        definitions=definitions,
    )
    return content, list(blocks)


def await_bytes(table: TableState, places: ReplyPlaces) -> Blocked | None:
    """The condition that a request naming these places waits for, if their bytes are on a disk. None: they are all in
    memory."""
    cold = table.core.blocks.cold
    return None if cold is None or not cold.on_disk else cold.want(places.blocks(), table.core)


def are_awaited(table: TableState, places: ReplyPlaces) -> bool:
    """Whether bytes in these places are on a disk, and a request waits for them."""
    cold = table.core.blocks.cold
    return cold is not None and bool(cold.on_disk) and cold.is_wanted(places.blocks())


def complete_fields(table: TableState, at: Index, fields: Sequence[str]) -> list[str]:
    """Those of `fields` that all rows have."""
    known = list(filter(table.rows.fields.__contains__, dict.fromkeys(fields)))
    if bool(table.rows.has_all(at, table.rows.mask(known)).all()):
        return known
    return [name for name in known if bool(table.rows.has_all(at, table.rows.mask((name,))).all())]


def _of_rows(values: dict[int, Value], rows: IntArray, default: Value) -> list[Value] | None:
    """The value of each row; None if no row has one."""
    of_row = [values.get(row) for row in rows.tolist()]
    if all(value is None for value in of_row):
        return None
    return [default if value is None else value for value in of_row]


def _part(
    blocks: BlockRegistry, places: BlockSlots, nodes: Nodes | None, named: dict[int, None]
) -> ReplyColumns | ReplyTree:
    numbers, index = _distinct(places.blocks)
    named.update(dict.fromkeys(numbers))
    part = ReplyColumns(
        fields=places.fields,
        blocks=[blocks.blocks[number].at for number in numbers],
        block_of_row=index,
        slot_of_row=codec.encode_ascending(places.slots),
    )
    if nodes is None:
        return part
    parents, node_of_row = (of.astype("<i4").tobytes() for of in (nodes.parents, nodes.of_row))
    return ReplyTree(part.fields, part.blocks, part.block_of_row, part.slot_of_row, parents, node_of_row)


def _distinct(blocks: IntArray) -> tuple[list[int], bytes]:
    """The distinct blocks, and for each row the index of its block, encoded as `codec.encode_constant` does."""
    if blocks.size and are_equal(blocks):
        return [int(blocks[0])], _FIRST
    numbers, index = np.unique(blocks, return_inverse=True)
    return numbers.tolist(), index.astype(np.int32).tobytes()
