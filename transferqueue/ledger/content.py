"""Rows as a reply tells them: facts, inline values, and the places of their columns.

Only fields that every row of the reply has are in it. Naming a block pins it for the session, once per reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.blocks import Blocks
from transferqueue.ledger.facts import DTYPES
from transferqueue.ledger.parts import Places
from transferqueue.ledger.table import Table
from transferqueue.wire.messages import Content, Inline, Part

Value = TypeVar("Value")


def describe_rows(table: Table, rows: IntArray, at: IntArray, there: Sequence[str]) -> tuple[Content, list[int]]:
    """Content of `rows` with fields that all of them have (`complete_fields`), and the blocks it names."""
    inline = [name for name in there if name in table.rows.inline]
    placed = [name for name in there if name not in table.rows.inline]
    blocks: dict[int, None] = {}
    parts = [_part(table.core.blocks, places, blocks) for places in table.parts.locate(placed, at)]
    content = Content(
        rows=rows.tobytes(),
        **{name: table.rows.facts[name].a[at].tobytes() for name in DTYPES},
        keys=_of_rows(table.rows.keys, rows, ""),
        tags=_of_rows(table.rows.tags, rows, {}),
        inline=[Inline(name, table.rows.inline[name].a[at].tobytes()) for name in inline],
        parts=parts,
        fields=[table.rows.fields[name] for name in there],
    )
    return content, list(blocks)


def complete_fields(table: Table, at: IntArray, fields: Sequence[str]) -> list[str]:
    """Those of `fields` that all rows have."""
    known = [name for name in dict.fromkeys(fields) if name in table.rows.fields]
    if bool(table.rows.has_all(at, table.rows.mask(known)).all()):
        return known
    return [name for name in known if bool(table.rows.has_all(at, table.rows.mask((name,))).all())]


def _of_rows(values: dict[int, Value], rows: IntArray, default: Value) -> list[Value] | None:
    """The value of each row; None if none has one."""
    if not values:
        return None
    found = [values.get(row) for row in rows.tolist()]
    return [default if one is None else one for one in found] if any(one is not None for one in found) else None


def _part(blocks: Blocks, places: Places, named: dict[int, None]) -> Part:
    numbers, index = _distinct(places.blocks)
    named.update(dict.fromkeys(numbers))
    return Part(
        fields=places.fields,
        blocks=[blocks.blocks[number].at for number in numbers],
        block_of_row=index.tobytes(),
        slot_of_row=places.slots.tobytes(),
    )


def _distinct(blocks: IntArray) -> tuple[list[int], npt.NDArray[np.int32]]:
    """The distinct blocks, and for each row which of them it is in."""
    if blocks.size and (blocks == blocks[0]).all():
        return [int(blocks[0])], np.zeros(blocks.size, np.int32)
    found, index = np.unique(blocks, return_inverse=True)
    return found.tolist(), index.astype(np.int32)
