"""Rows of a put that continue rows of the table: checks what they continue, and notes it of their values.

The parents must be resident, live or not, and have the fields. Since the put looks them up by id, they were put before
it, into the same table. Nothing else is asked of them: they may end at once (`rows.continued`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from transferqueue.errors import ColumnFreed, Impossible, NotFound, SchemaError, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import IntArray, agreed, decode, numbered
from transferqueue.ledger.rows import (
    TOKENS_MAX,
    BlockSlots,
    Continued,
    StagedCommit,
    depths_of,
    forests,
    keys_of,
)
from transferqueue.ledger.rows.blocks import BlockRegistry, Cold
from transferqueue.ledger.rules.column_ends import why_freed
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import CHAIN_NS, CONTINUED_MAX, CONTINUED_NS, NODE_NS, check_work
from transferqueue.schema import Field
from transferqueue.wire.messages import ContinueRequest


def continue_rows(table: TableState, staged: StagedCommit, request: ContinueRequest, now: float) -> None:
    """Add to a checked put what its values continue. Raises without a change to the table."""
    parents = decode("parents", request.parents, "<i8", request.rows)
    children = np.flatnonzero(parents != -1)
    names = list(dict.fromkeys(request.fields))
    check_work(
        f"a put of {counted(children.size, 'row')} that {agreed(children, 'continues', 'continue')} others in "
        f"{counted(len(names), 'field')}",
        children.size,
        CONTINUED_NS * len(names) * children.size,
    )
    if not children.size or not request.fields:
        raise UsageError("a put that continues no row, or none of their fields, is a plain put; leave out parent=")
    rows = parents[children]
    at = table.rows.places(rows)
    blocks = table.core.blocks.blocks
    parts: dict[str, BlockSlots] = {}
    nodes = 0
    for name in names:
        place = _place_of(table, staged, name)
        _check_complete(table, name, rows, at, now)
        (places,) = table.column_groups.locate([name], at)
        parts[name] = places
        keys = np.zeros(request.rows, np.int64)
        keys[children] = keys_of(places.blocks, places.slots)
        depths = np.zeros(request.rows, np.int64)
        depths[children] = depths_of(blocks, keys[children]) + 1
        if (deepest := int(depths.max())) > CONTINUED_MAX:
            raise UsageError(
                f'{numbered(parents[depths == deepest])} of table "{table.name}" cannot be continued: '
                f"{deepest - 1} rows come before, and a row continues at most {CONTINUED_MAX}; put the row whole"
            )
        continued = staged.continued.setdefault(place, Continued({}, depths))
        continued.add(name, keys)
        continued.depths = np.maximum(continued.depths, depths)
        nodes += int(depths.sum())
    if (cold := table.core.blocks.cold) is not None:
        what = f"a put of {counted(children.size, 'row')} that continue {nodes:,} values, of which each is looked at,"
        check_work(what, children.size, 2 * (NODE_NS + CHAIN_NS) * nodes)
        _check_fits(table.core.blocks, cold, parts, staged.nbytes)
    if request.adds_tokens and "tokens" in staged.facts.numbers:
        tokens = staged.facts.numbers["tokens"].copy()
        tokens[children] = np.minimum(tokens[children] + table.rows.facts["tokens"].a[at], TOKENS_MAX)
        staged.facts.numbers["tokens"] = tokens


def _place_of(table: TableState, staged: StagedCommit, name: str) -> int:
    """The block of the put that has the field, which must have a value for each row."""
    place = next((place for place, placed in enumerate(staged.placed) if name in placed.fields), None)
    if place is None:
        raise UsageError(f'field "{name}" is continued, and the put has no column of that name in a block; give it')
    fields: dict[str, Field] = table.rows.fields | {new.name: new for new in staged.new_fields}
    if not fields[name].ragged:
        raise SchemaError(
            f'field "{name}" of table "{table.name}" is {fields[name].describe()}; only ragged columns are continued: '
            "name those in continued="
        )
    if staged.placed[place].content or staged.slots[place] is not None:
        raise UsageError(
            f'field "{name}" is continued, and its values are shared by rows or puts; give one value for each row, '
            "without Repeat"
        )
    return place


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


def _check_fits(registry: BlockRegistry, cold: Cold, places: Mapping[str, BlockSlots], nbytes: int) -> None:
    """`Impossible` if what a row continues could never be read with it, since its blocks do not fit into memory
    together. `places`: of its parent's values."""

    def check(some: slice) -> None:
        at = {name: (of_field.blocks[some], of_field.slots[some]) for name, of_field in places.items()}
        found = [blocks for blocks, _ in at.values()]
        found += [nodes.blocks for nodes in forests(registry, at).nodes.values()]
        cold.check_fits(np.unique(np.concatenate(found)).tolist(), nbytes)

    try:
        check(slice(None))
    except Impossible:  # all together, which need not be read at once
        for row in range(next(iter(places.values())).blocks.size):
            check(slice(row, row + 1))
