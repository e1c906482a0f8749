"""Describes rows in a reply: facts, inline values, and the places of their columns.

A reply contains only fields that all of its rows have. The caller pins each block that the reply names for the session,
once per reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.ledger.arrays import Index, IntArray, are_equal
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.rows import BlockSlots, Nodes, TooManyNodes, nodes_of_fields
from transferqueue.ledger.rows.blocks import BlockRegistry
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import NAMED_NS, NODE_NS, TURN_S_MAX
from transferqueue.wire import codec
from transferqueue.wire.messages import Inline, ReplyColumns, ReplyRows, ReplyTree

Value = TypeVar("Value")

_FIRST: Final = codec.encode_constant(np.zeros(1, np.int32))
"""Index for a reply in which every row is in the first block."""


def describe_rows(table: TableState, rows: IntArray, at: Index, names: Sequence[str]) -> tuple[ReplyRows, list[int]]:
    """Content of `rows` with the fields `names`, which all of them have (`complete_fields`), and the blocks that it
    names.
    """
    inline, placed, definitions = table.rows.reply_fields(names)
    blocks: dict[int, None] = {}
    parts = [
        part for places in table.column_groups.locate(placed, at) for part in _parts(table.core.blocks, places, blocks)
    ]
    content = ReplyRows(
        rows=rows.tobytes(),
        **table.rows.reply_facts(at, rows.size),
        keys=_of_rows(table.rows.keys, rows, "") if table.rows.keys else None,
        tags=_of_rows(table.rows.tags, rows, {}) if table.rows.tags else None,
        inline=[Inline(name, table.rows.inline[name].a[at].tobytes()) for name in inline] if inline else [],
        parts=parts,
        definitions=definitions,
    )
    return content, list(blocks)


def await_bytes(table: TableState, at: Index, names: Sequence[str]) -> Blocked | None:
    """The condition that a request describing these rows waits for, if their bytes are on a disk. None: they are all in
    memory."""
    cold = table.core.blocks.cold
    return None if cold is None or not cold.on_disk else cold.want(_blocks_of(table, at, names), table.core)


def are_awaited(table: TableState, at: Index, names: Sequence[str]) -> bool:
    """Whether bytes of these rows are on a disk, and a request waits for them."""
    cold = table.core.blocks.cold
    return cold is not None and bool(cold.on_disk) and cold.is_wanted(_blocks_of(table, at, names))


def _blocks_of(table: TableState, at: Index, names: Sequence[str]) -> set[int]:
    """The blocks that a description of these rows names."""
    _, placed, _ = table.rows.reply_fields(names)
    blocks: set[int] = set()
    for places in table.column_groups.locate(placed, at):
        blocks.update(np.unique(places.blocks).tolist())
        for nodes, _ in _trees(table.core.blocks, places):
            blocks.update(np.unique(nodes.blocks).tolist())
    return blocks - {0}


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


def check_nodes(table: TableState, at: Index, names: Sequence[str], what: str, *, ranks: int = 1) -> None:
    """Raise `UsageError` if a reply with these rows would name too many stored values, since they continue others.
    `ranks`: they are shared by so many replies."""
    blocks = table.core.blocks
    if not blocks.continued:
        return
    left = most = TURN_S_MAX * 1e9 * ranks
    _, placed, _ = table.rows.reply_fields(names)
    try:
        for places in table.column_groups.locate(placed, at):
            for nodes, _ in _trees(blocks, places, int(left // NODE_NS)):
                numbers = np.unique(nodes.blocks).tolist()
                left -= NODE_NS * nodes.blocks.size
                left -= NAMED_NS * sum(len(blocks.blocks[number].at.fields) for number in numbers)
        if left >= 0:
            return
    except TooManyNodes:
        pass
    raise UsageError(
        f"{what}, which continue others, names so many stored values that it takes the server more than "
        f"{most / 1e6:.0f} ms, and all other clients wait meanwhile; take fewer rows at a time, or fewer fields"
    )


def _trees(blocks: BlockRegistry, places: BlockSlots, most: int | None = None) -> list[tuple[Nodes, list[str]]]:
    """The forests of those fields of which some of these values continue others, each with its fields."""
    trees = nodes_of_fields(blocks, dict.fromkeys(places.fields, (places.blocks, places.slots)), most)
    fields: dict[int, tuple[Nodes, list[str]]] = {}
    for name, nodes in trees.items():
        fields.setdefault(id(nodes), (nodes, []))[1].append(name)
    return [*fields.values()]


def _parts(blocks: BlockRegistry, places: BlockSlots, named: dict[int, None]) -> list[ReplyColumns]:
    trees = _trees(blocks, places)
    if not trees:
        return [_part(blocks, places, named)]
    in_trees = {name for _, names in trees for name in names}
    whole = [name for name in places.fields if name not in in_trees]
    parts = [_part(blocks, BlockSlots(whole, places.blocks, places.slots), named)] if whole else []
    return parts + [_tree(blocks, names, nodes, named) for nodes, names in trees]


def _tree(blocks: BlockRegistry, names: list[str], nodes: Nodes, named: dict[int, None]) -> ReplyTree:
    part = _part(blocks, BlockSlots(names, nodes.blocks, nodes.slots), named)
    return ReplyTree(
        part.fields, part.blocks, part.block_of_row, part.slot_of_row,
        parents=nodes.parents.astype("<i4").tobytes(), node_of_row=nodes.of_row.astype("<i4").tobytes(),
    )  # fmt: skip


def _part(blocks: BlockRegistry, places: BlockSlots, named: dict[int, None]) -> ReplyColumns:
    numbers, index = _distinct(places.blocks)
    named.update(dict.fromkeys(numbers))
    return ReplyColumns(
        fields=places.fields,
        blocks=[blocks.blocks[number].at for number in numbers],
        block_of_row=index,
        slot_of_row=codec.encode_ascending(places.slots),
    )


def _distinct(blocks: IntArray) -> tuple[list[int], bytes]:
    """The distinct blocks, and for each row the index of its block, encoded as `codec.encode_constant` does."""
    if blocks.size and are_equal(blocks):
        return [int(blocks[0])], _FIRST
    numbers, index = np.unique(blocks, return_inverse=True)
    return numbers.tolist(), index.astype(np.int32).tobytes()
