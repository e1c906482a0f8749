"""Values that continue values: the suffix of a row is stored in its own block, and what comes before it once.

1. That a value continues another one is a fact of the stored value, not of a row: a block says for each of its slots
   which value, by block and slot, comes before it (`Continued`). So rows, their fates and their columns know nothing of
   it. A row that others continue may end, or get another value: theirs stays what it was.
2. A block has one reference to each other block that its values continue, until its own last reference ends
   (`BlockRegistry.retire`).
3. What a value continues was there before it: in a block of a lower number, or in a lower slot of the same block, as
   snapshots restore them. So there is no cycle, and ascending order is an order from roots to leaves.
4. A chain has at most `CONTINUED_MAX` values before its last one. Each block knows the depth of its values, so a put
   that would exceed this is refused without a walk.
5. Readers get each value of a forest once (`Nodes`), and join them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray
from transferqueue.ledger.rows.column_places import Slots
from transferqueue.limits import BLOCK_ROWS_MAX

_SLOT_BITS: Final = (BLOCK_ROWS_MAX - 1).bit_length()
_SLOTS: Final = (1 << _SLOT_BITS) - 1
_NOTHING: Final = 1 << _SLOT_BITS
"""Keys below this are of block 0, which does not exist."""


class Continued(msgspec.Struct):
    """What the values of a block continue.

    Args:
        before: by field, the key of the value before each slot (`keys_of`); 0: none.
        depths: the number of values before each slot, the most of all fields.
    """

    before: dict[str, IntArray]
    depths: IntArray

    def blocks(self, own: int) -> list[int]:
        """The other blocks to which these values need references. `own`: the number of their block."""
        keys = np.concatenate([*self.before.values()])
        return [number for number in np.unique(keys >> _SLOT_BITS).tolist() if number and number != own]

    def sever(self, own: int, lost: Collection[int]) -> list[int]:
        """Forget that values, which no row reads, continue values in these lost blocks. Returns those that it needed
        references to."""
        severed = [number for number in self.blocks(own) if number in lost]
        for keys in self.before.values() if severed else ():
            keys[np.isin(keys >> _SLOT_BITS, severed)] = 0
        return severed


class _Block(Protocol):
    @property
    def continued(self) -> Continued | None:
        """What its values continue; None: all are whole."""


class _Registry(Protocol):
    @property
    def blocks(self) -> Mapping[int, _Block]:
        """All blocks."""

    @property
    def continued(self) -> Collection[int]:
        """Those with values that continue others."""


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

    def sums(self, of_node: AnyArray) -> AnyArray:
        """The sum of these numbers over the nodes of each row."""
        sums = of_node.copy()
        for node in np.flatnonzero(self.parents >= 0).tolist():
            sums[node] += sums[self.parents[node]]
        return np.where(self.of_row >= 0, sums[self.of_row], 0)

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

    def rows_below(self, nodes: BoolArray) -> BoolArray:
        """The rows whose values contain one of these nodes."""
        below = nodes.copy()
        for node in np.flatnonzero(self.parents >= 0).tolist():
            below[node] |= below[self.parents[node]]
        rows: BoolArray = (self.of_row >= 0) & below[self.of_row]
        return rows


def depths_in(parents: IntArray) -> IntArray:
    """The number of nodes before each node of a forest, in which parents come first."""
    depths = np.zeros(len(parents), np.int64)
    for node in np.flatnonzero(parents >= 0).tolist():
        depths[node] = depths[parents[node]] + 1
    return depths


def keys_of(blocks: IntArray, slots: Slots) -> IntArray:
    """One number for each place; below a bound that no block 0 reaches for rows without a place."""
    keys: IntArray = blocks << _SLOT_BITS | slots
    return keys


def depths_of(blocks: Mapping[int, _Block], keys: IntArray) -> IntArray:
    """The number of values before each of these values."""
    depths = np.zeros(keys.size, np.int64)
    numbers = keys >> _SLOT_BITS
    for number in np.unique(numbers).tolist():
        continued = blocks[number].continued
        if continued is not None:
            there = numbers == number
            depths[there] = continued.depths[keys[there] & _SLOTS]
    return depths


def nodes_of(blocks: Mapping[int, _Block], field: str, numbers: IntArray, slots: Slots) -> Nodes | None:
    """The forest of these values of a field; None if all of them are whole. Rows without a value have block 0."""
    keys = keys_of(numbers, slots)
    known = np.unique(keys[keys >= _NOTHING])
    before: dict[int, int] = {}
    for number in np.unique(known >> _SLOT_BITS).tolist():
        continued = blocks[number].continued
        if continued is not None and field in continued.before:
            _add_chains(blocks, field, known[known >> _SLOT_BITS == number].tolist(), before)
    if not any(before.values()):
        return None
    every = np.union1d(known, np.fromiter(before, np.int64, len(before)))
    above = np.array([before.get(key, 0) for key in every.tolist()], np.int64)
    parents = np.where(above > 0, np.searchsorted(every, above), -1)
    of_row = np.where(keys >= _NOTHING, np.searchsorted(every, keys), -1)
    return Nodes(every >> _SLOT_BITS, (every & _SLOTS).astype(np.int32), parents, of_row)


def nodes_of_fields(registry: _Registry, places: Mapping[str, tuple[IntArray, Slots]]) -> dict[str, Nodes]:
    """The forests of those fields of which some of these values continue others."""
    if not registry.continued:
        return {}
    nodes = {name: nodes_of(registry.blocks, name, *at) for name, at in places.items()}
    return {name: of_field for name, of_field in nodes.items() if of_field is not None}


def _add_chains(blocks: Mapping[int, _Block], field: str, keys: list[int], before: dict[int, int]) -> None:
    """Note of each of these values, and of all that come before them, which value it continues; 0: none."""
    for key in keys:
        while key and key not in before:
            continued = blocks[key >> _SLOT_BITS].continued
            above = continued.before.get(field) if continued is not None else None
            before[key] = 0 if above is None else int(above[key & _SLOTS])
            key = before[key]


def blocks_below(blocks: Mapping[int, _Block], continued: Iterable[int], lost: Collection[int]) -> set[int]:
    """Those of the blocks `lost`, and of `continued`, in which a value may contain one of `lost`."""
    below = set(lost)
    for number in sorted(continued):
        of_block = blocks[number].continued
        if of_block is not None and not below.isdisjoint(of_block.blocks(number)):
            below.add(number)
    return below
