"""Values that continue values: the suffix of a row is stored in its own block, and what comes before it once.

1. That a value continues another one is a fact of the stored value, not of a row: a block says for each of its slots
   which value, by block and slot, comes before it (`Continued`). So rows, their fates and their columns know nothing of
   it. A row that others continue may end, or get another value: theirs stays what it was.
2. A block has one reference to each other block that its values continue. When its own last reference ends, it gives
   these back; of long chains, some at a time (`BlockRegistry.end_some`).
3. What a value continues was there before it: in a block of a lower number, or in a lower slot of the same block, as
   snapshots restore them. So there is no cycle, and ascending order is an order from roots to leaves.
4. A chain has at most `CONTINUED_MAX` values before its last one. Each block knows the depth of its values, so a put
   that would exceed this is refused without a walk.
5. Readers get each value of a forest once (`Nodes`), and join them. A reply names as many as the server may take the
   time for (`forests`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray, by_value
from transferqueue.ledger.rows.column_places import Slots
from transferqueue.limits import BLOCK_ROWS_MAX, CHAIN_NS, NAMED_NS, NODE_NS
from transferqueue.wire.messages import BlockLocation

_SLOT_BITS: Final = (BLOCK_ROWS_MAX - 1).bit_length()
_SLOTS: Final = (1 << _SLOT_BITS) - 1
_NOTHING: Final = 1 << _SLOT_BITS
"""Keys below this are of block 0, which does not exist."""


class Continued(msgspec.Struct):
    """What the values of a block continue.

    Args:
        before: by field, the key of the value before each slot (`keys_of`); 0: none.
        depths: the number of values before each slot, the most of all fields.
        above: the other blocks to which these values need references.
        alike: says which fields share keys: the same text for blocks whose fields do so alike.
    """

    before: dict[str, IntArray]
    depths: IntArray
    above: list[int] = []
    alike: str = ""

    def add(self, field: str, keys: IntArray) -> None:
        """Note what the values of a field continue. Fields of the same keys share them."""
        self.before[field] = next((one for one in self.before.values() if np.array_equal(one, keys)), keys)

    def refer(self, own: int) -> None:
        """Set `above` and `alike`, as these are all values of block `own`."""
        arrays = {id(keys): keys for keys in self.before.values()}
        numbers = np.unique(np.concatenate([*arrays.values()]) >> _SLOT_BITS).tolist()
        self.above = [number for number in numbers if number and number != own]
        order = [*arrays]
        self.alike = repr({name: order.index(id(keys)) for name, keys in self.before.items()})

    def sever(self, lost: Collection[int]) -> list[int]:
        """Forget that values, which no row reads, continue values in these lost blocks. Returns those that it needed
        references to."""
        severed = [number for number in self.above if number in lost]
        for keys in self.before.values() if severed else ():
            keys[np.isin(keys >> _SLOT_BITS, severed)] = 0
        self.above = [number for number in self.above if number not in lost]
        return severed


class _Block(Protocol):
    at: BlockLocation
    continued: Continued | None
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
    depths = np.zeros(keys.size, np.int64)
    for number, at in by_value(keys >> _SLOT_BITS):
        if (continued := blocks[number].continued) is not None:
            depths[at] = continued.depths[keys[at] & _SLOTS]
    return depths


class Forests(NamedTuple):
    """The forests of those fields of which some values continue others.

    Args:
        nodes: by field. Fields at the same places, of which the values continue the same ones, have the same one.
        fit: how many of the rows may be named, at most, since all take too long, and then `nodes` is empty; None: all.
        ns: the estimated time of a reply that names these nodes.
    """

    nodes: dict[str, Nodes]
    fit: int | None
    ns: float

    def groups(self) -> list[tuple[Nodes, list[str]]]:
        """Each forest, with its fields."""
        fields: dict[int, tuple[Nodes, list[str]]] = {}
        for name, nodes in self.nodes.items():
            fields.setdefault(id(nodes), (nodes, []))[1].append(name)
        return [*fields.values()]


def forests(registry: _Registry, places: Mapping[str, tuple[IntArray, Slots]], ns_max: float = math.inf) -> Forests:
    """The stored values of which these are made. Rows without a value have block 0.

    Args:
        registry: of the blocks.
        places: block and slot of each row, by field.
        ns_max: the most that a reply may take that names the nodes; default: no bound.
    """
    fields_at: dict[tuple[int, int], list[str]] = {}
    for name, (numbers, slots) in places.items() if registry.continued else ():
        fields_at.setdefault((id(numbers), id(slots)), []).append(name)
    nodes: dict[str, Nodes] = {}
    ns = 0.0
    for left in fields_at.values():
        keys = keys_of(*places[left[0]])
        keys[keys < _NOTHING] = 0
        if registry.continued.isdisjoint(np.unique(keys >> _SLOT_BITS).tolist()):
            continue
        while left:
            walk = _Walk(registry.blocks, left, ns_max - ns)
            if (fit := walk.rows(keys.tolist())) is not None:
                return Forests({}, fit, ns)
            if any(walk.before.values()):
                nodes |= dict.fromkeys(walk.fields, _nodes(keys, walk.before))
                ns += walk.ns
            left = [name for name in left if name not in walk.fields]
    return Forests(nodes, None, ns)


class _Walk:
    """From some values of the first of these fields to all that come before them."""

    def __init__(self, blocks: Mapping[int, _Block], fields: Sequence[str], ns_max: float) -> None:
        self._blocks, self._fields, self._ns_max = blocks, fields, ns_max
        self._numbers: set[int] = set()
        self._alike: dict[str, Continued] = {}
        self.before: dict[int, int] = {}
        """Which value each value continues; 0: none."""
        self.ns = 0.0

    def rows(self, keys: Sequence[int]) -> int | None:
        """Walk from these values. Returns for how many, from the first on, the time suffices; None: for all."""
        blocks, numbers, alike, before = self._blocks, self._numbers, self._alike, self.before
        first, ns, ns_max = self._fields[0], self.ns, self._ns_max
        for row, key in enumerate(keys):
            while key and key not in before:
                number = key >> _SLOT_BITS
                block = blocks[number]
                continued = block.continued
                if number not in numbers:
                    numbers.add(number)
                    ns += CHAIN_NS + NAMED_NS * len(block.at.fields)
                    if continued is not None:
                        alike.setdefault(continued.alike, continued)
                ns += NODE_NS
                if ns > ns_max:
                    return row
                keys_before = None if continued is None else continued.before.get(first)
                above = 0 if keys_before is None else keys_before.item(key & _SLOTS)
                before[key] = above
                key = above
        self.ns = ns
        return None

    @property
    def fields(self) -> list[str]:
        """Those of the fields of which the values continue the same ones."""
        befores, first = [one.before for one in self._alike.values()], self._fields[0]
        return [name for name in self._fields if all(one.get(name) is one.get(first) for one in befores)]


def _nodes(keys: IntArray, before: dict[int, int]) -> Nodes:
    every = np.array(sorted(before), np.int64)
    above = np.array([before[key] for key in every.tolist()], np.int64)
    parents = np.where(above > 0, np.searchsorted(every, above), -1)
    of_row = np.where(keys >= _NOTHING, np.searchsorted(every, keys), -1)
    return Nodes(every >> _SLOT_BITS, (every & _SLOTS).astype(np.int32), parents, of_row)


def blocks_below(blocks: Mapping[int, _Block], continued: Iterable[int], lost: Collection[int]) -> set[int]:
    """Those of the blocks `lost`, and of `continued`, in which a value may contain one of `lost`."""
    below = set(lost)
    for number in sorted(continued):
        of_block = blocks[number].continued
        if of_block is not None and not below.isdisjoint(of_block.above):
            below.add(number)
    return below


def blocks_above(blocks: Mapping[int, _Block], numbers: Iterable[int], most: int) -> set[int] | None:
    """These blocks, and all that their values continue. None: they are more than `most`."""
    every: set[int] = set()
    left = [*numbers]
    while left:
        number = left.pop()
        if number in every or number not in blocks:
            continue
        every.add(number)
        if len(every) > most:
            return None
        continued = blocks[number].continued
        left += () if continued is None else continued.above
    return every
