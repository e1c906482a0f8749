"""Values that continue values: the suffix of a row is stored in its own block, and what comes before it once.

1. That a value continues another one is a fact of the stored value, not of a row: a block says for each of its slots
   which value, by block and slot, comes before it (`Continued`). So rows, their fates and their columns know nothing of
   it. A row that others continue may end, or get another value: theirs stays what it was.
2. A block has one reference to each other block that its values continue. When its own last reference ends, it gives
   these back; of long chains, some at a time (`BlockRegistry.end_some`).
3. What a value continues was there before it, in a block of a lower number. So there is no cycle, and ascending order
   is an order from roots to leaves.
4. A chain has at most `CONTINUED_MAX` values before its last one. Each block knows the depth of its values, so a put
   that would exceed this is refused without a walk.
5. Readers get each value of a forest once (`Nodes`), and join them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np

from transferqueue.ledger.arrays import BoolArray, IntArray, by_value
from transferqueue.ledger.rows.column_places import Slots
from transferqueue.limits import BLOCK_ROWS_MAX

_SLOT_BITS: Final = (BLOCK_ROWS_MAX - 1).bit_length()
_SLOTS: Final = (1 << _SLOT_BITS) - 1


class Continued(msgspec.Struct, frozen=True, eq=False):
    """What the values of a block continue.

    Args:
        before: arrays of the key of the value before each slot (`keys_of`); 0: none.
        of_field: which of them a field has; others of the block continue nothing.
        alike: all fields of the block have the same.
        depths: the number of values before each slot, the most of all fields.
        above: the other blocks to which these values need references.
    """

    before: list[IntArray]
    of_field: dict[str, int]
    alike: bool
    depths: IntArray
    above: list[int]

    @classmethod
    def of(cls, before: list[IntArray], of_field: dict[str, int], depths: IntArray, *, alike: bool) -> Continued:
        """That of these keys."""
        numbers = np.unique(np.concatenate(before) >> _SLOT_BITS).tolist()
        return cls(before, of_field, alike, depths, [number for number in numbers if number])

    def without(self, lost: Collection[int]) -> Continued:
        """Forget that values, which no row reads, continue values in these blocks."""
        before = [np.where(np.isin(keys >> _SLOT_BITS, [*lost]), 0, keys) for keys in self.before]
        return self.of(before, self.of_field, self.depths, alike=self.alike)


ContinuedBlocks = Mapping[int, Continued]
"""Those blocks of a table with values that continue others, by number."""


class Nodes(NamedTuple):
    """Stored values of one field, those of some rows and all that come before them, from roots to leaves.

    Args:
        blocks: of each node.
        slots: of each node.
        parents: the node before each node, a lower index; -1: none.
        of_row: the node of each row; -1: the row has no value.
    """

    blocks: IntArray
    slots: Slots
    parents: IntArray
    of_row: IntArray

    def of_rows(self, at: IntArray) -> Nodes:
        """The nodes of the rows at these positions, which have values, and all before them."""
        needed = np.zeros(len(self.parents), np.bool_)
        nodes = np.unique(self.of_row[at])
        while nodes.size:
            needed[nodes] = True
            nodes = np.unique(self.parents[nodes])
            nodes = nodes[(nodes >= 0) & ~needed[nodes]]
        index = np.cumsum(needed) - 1
        parents = self.parents[needed]
        return Nodes(
            self.blocks[needed], self.slots[needed], np.where(parents < 0, -1, index[parents]), index[self.of_row[at]]
        )

    def rows_in(self, blocks: IntArray) -> BoolArray:
        """The rows of which some value lies in one of these blocks."""
        below = np.isin(self.blocks, blocks)
        for node in np.flatnonzero(self.parents >= 0).tolist():
            below[node] |= below[self.parents[node]]
        rows: BoolArray = (self.of_row >= 0) & below[self.of_row]
        return rows


def keys_of(blocks: IntArray, slots: Slots) -> IntArray:
    """One number for each place; 0 for rows without one, of which the block is 0."""
    keys: IntArray = np.where(blocks > 0, blocks << _SLOT_BITS | slots, 0)
    return keys


def values_of(continued: ContinuedBlocks, keys: IntArray) -> IntArray:
    """Of how many stored values each of these consists."""
    values = np.ones(keys.size, np.int64)
    for number, at in by_value(keys >> _SLOT_BITS):
        if (of_block := continued.get(number)) is not None:
            values[at] += of_block.depths[keys[at] & _SLOTS]
    return values


class Forests(NamedTuple):
    """The forests of those fields of which some values continue others.

    Args:
        nodes: by field. Fields of the same forest have the same one.
        fit: how many of the rows, from the first on, have as many nodes as there may be, and then `nodes` is empty;
            None: all.
    """

    nodes: dict[str, Nodes]
    fit: int | None = None


def forests(
    continued: ContinuedBlocks,
    places: Mapping[str, tuple[IntArray, Slots]],
    most: float = math.inf,
    *,
    apart: bool = False,
) -> Forests:
    """The stored values of which rows are made.

    Args:
        continued: of the table.
        places: block (0: none) and slot of each row, by field. Fields that share these arrays share their forest,
            unless values of one continue what those of another do not.
        most: nodes that there may be of all forests; default: no bound.
        apart: each field has its own forest.
    """
    fields_at: dict[object, list[str]] = {}
    for name, (blocks, slots) in places.items() if continued else ():
        fields_at.setdefault(name if apart else (id(blocks), id(slots)), []).append(name)
    keys_at = [(fields, keys_of(*places[fields[0]])) for fields in fields_at.values()]
    keys_at = [one for one in keys_at if _may_continue(continued, *one)]
    limit = most
    befores: list[dict[int, int]] = [{} for _ in keys_at]
    """Of each forest, which value each value continues; 0: none."""
    for row, keys in enumerate(zip(*(keys.tolist() for _, keys in keys_at), strict=True)):
        for (fields, _), key, before in zip(keys_at, keys, befores, strict=True):
            while key and key not in before:
                if (most := most - 1) < 0:
                    return Forests({}, row)
                above = 0
                if (of_block := continued.get(key >> _SLOT_BITS)) is not None:
                    if not of_block.alike and len(fields) > 1:
                        return forests(continued, places, limit, apart=True)
                    if (at := of_block.of_field.get(fields[0])) is not None:
                        above = of_block.before[at].item(key & _SLOTS)
                before[key] = above
                key = above
    found: dict[str, Nodes] = {}
    for (fields, of_rows), before in zip(keys_at, befores, strict=True):
        if any(before.values()):
            found |= dict.fromkeys(fields, _nodes(of_rows, before))
    return Forests(found)


def _may_continue(continued: ContinuedBlocks, fields: list[str], keys: IntArray) -> bool:
    blocks = map(continued.get, np.unique(keys >> _SLOT_BITS).tolist())
    return any(block is not None and not block.of_field.keys().isdisjoint(fields) for block in blocks)


def _nodes(keys: IntArray, before: Mapping[int, int]) -> Nodes:
    every = np.array(sorted(before), np.int64)
    above = np.array([before[key] for key in every.tolist()], np.int64)
    parents = np.where(above > 0, np.searchsorted(every, above), -1)
    of_row = np.where(keys > 0, np.searchsorted(every, keys), -1)
    return Nodes(every >> _SLOT_BITS, (every & _SLOTS).astype(np.int32), parents, of_row)


def blocks_below(continued: ContinuedBlocks, blocks: Iterable[int]) -> IntArray:
    """These blocks, and those with values that continue values of one of them."""
    below = {*blocks}
    for number in sorted(continued):
        if not below.isdisjoint(continued[number].above):
            below.add(number)
    return np.array(sorted(below), np.int64)


def blocks_above(continued: ContinuedBlocks, numbers: Iterable[int], most: float = math.inf) -> set[int] | None:
    """These blocks, and all that their values continue. None: they are more than `most`."""
    every: set[int] = set()
    left = [*numbers]
    while left:
        number = left.pop()
        if number in every:
            continue
        every.add(number)
        if len(every) > most:
            return None
        if (of_block := continued.get(number)) is not None:
            left += of_block.above
    return every
