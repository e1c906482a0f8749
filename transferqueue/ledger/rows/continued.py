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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
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

    def add(self, field: str, keys: IntArray) -> None:
        """Note what the values of a field continue. Fields of the same keys share them."""
        self.before[field] = next((one for one in self.before.values() if np.array_equal(one, keys)), keys)

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
    def continued(self) -> AbstractSet[int]:
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
    known, of_key = np.unique(keys, return_inverse=True)
    depths: list[int] = []
    for number, slots in _runs(known.tolist()):
        continued = blocks[number].continued
        depths += _at(None if continued is None else continued.depths, slots)
    found: IntArray = np.array(depths, np.int64)[of_key]
    return found


def nodes_of_fields(
    registry: _Registry, places: Mapping[str, tuple[IntArray, Slots]], most: int | None = None
) -> dict[str, Nodes]:
    """The forests of those fields of which some of these values continue others. Rows without a value have block 0.
    Fields at the same places, of which the values continue the same ones, have the same forest. `most`: the nodes of
    all forests; beyond, `TooManyNodes`."""
    if not registry.continued:
        return {}
    fields_at: dict[tuple[int, int], list[str]] = {}
    for name, (numbers, slots) in places.items():
        fields_at.setdefault((id(numbers), id(slots)), []).append(name)
    found: dict[str, Nodes] = {}
    for left in fields_at.values():
        keys = keys_of(*places[left[0]])
        roots = np.unique(keys[keys >= _NOTHING])
        if registry.continued.isdisjoint(np.unique(roots >> _SLOT_BITS).tolist()):
            continue
        while left:
            before, alike = _chains(registry.blocks, left, roots.tolist(), most)
            if any(before.values()):
                nodes = _nodes(keys, before)
                found |= dict.fromkeys(alike, nodes)
                most = None if most is None else most - len(before)
            left = [name for name in left if name not in alike]
    return found


class TooManyNodes(Exception):
    """Rows have more stored values in their chains than a request may name."""


def _chains(
    blocks: Mapping[int, _Block], fields: Sequence[str], keys: list[int], most: int | None
) -> tuple[dict[int, int], list[str]]:
    """Which value each of these values, which ascend, and each that comes before them continues in the first of the
    fields (0: none), and those of the fields in which it is the same for all."""
    first, alike = fields[0], [*fields[1:]]
    before: dict[int, int] = {}
    while keys:
        if most is not None and len(before) + len(keys) > most:
            raise TooManyNodes
        above: list[int] = []
        for number, slots in _runs(keys):
            continued = blocks[number].continued
            of_field = None if continued is None else continued.before.get(first)
            if alike and continued is not None:
                alike = [name for name in alike if _same(of_field, continued.before.get(name))]
            above += _at(of_field, slots)
        before.update(zip(keys, above, strict=True))
        keys = sorted({key for key in above if key and key not in before})
    return before, [first, *alike]


def _nodes(keys: IntArray, before: dict[int, int]) -> Nodes:
    every = np.array(sorted(before), np.int64)
    above = np.array([before[key] for key in every.tolist()], np.int64)
    parents = np.where(above > 0, np.searchsorted(every, above), -1)
    of_row = np.where(keys >= _NOTHING, np.searchsorted(every, keys), -1)
    return Nodes(every >> _SLOT_BITS, (every & _SLOTS).astype(np.int32), parents, of_row)


def _runs(keys: list[int]) -> Iterator[tuple[int, list[int]]]:
    """The blocks of values that ascend, each with its slots."""
    for number, run in groupby(keys, _SLOT_BITS.__rrshift__):
        yield number, [key & _SLOTS for key in run]


def _at(numbers: IntArray | None, slots: list[int]) -> list[int]:
    if numbers is None:
        return [0] * len(slots)
    if len(slots) == 1:  # mostly: a turn of an agent is a put
        return [int(numbers[slots[0]])]
    found: list[int] = numbers[slots].tolist()
    return found


def _same(one: IntArray | None, other: IntArray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def blocks_below(blocks: Mapping[int, _Block], continued: Iterable[int], lost: Collection[int]) -> set[int]:
    """Those of the blocks `lost`, and of `continued`, in which a value may contain one of `lost`."""
    below = set(lost)
    for number in sorted(continued):
        of_block = blocks[number].continued
        if of_block is not None and not below.isdisjoint(of_block.blocks(number)):
            below.add(number)
    return below


def blocks_above(blocks: Mapping[int, _Block], numbers: Iterable[int], known: dict[int, list[int]]) -> set[int]:
    """These blocks, and all that their values continue. `known`: what each refers to, as found by earlier calls."""
    every: set[int] = set()
    left = [*numbers]
    while left:
        number = left.pop()
        if number in every or number not in blocks:
            continue
        every.add(number)
        if number not in known:
            continued = blocks[number].continued
            known[number] = [] if continued is None else continued.blocks(number)
        left += known[number]
    return every
