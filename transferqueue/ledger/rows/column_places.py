"""Records in which block, and in which slot of it, each row has each column.

Fields that were written together lie in one block, so they have the same place. Each distinct set of fields written
together is a *column group* (`parts` in names): a block number and a slot for each row (block 0: none). Block numbers
ascend. So the current place of a field is the entry with the highest block number among the parts that contain the
field. An entry replaces the one before it in its part, also one of a higher number, if it refers to an older block of
the same content (`newest_beside`). Results that waited for the last ack of replicas lie in an older block too: what
rows got meanwhile makes way (`make_way`).

An entry is kept exactly while some field of it is read there. Unread entries are returned as (block, rows), for
`BlockRegistry.retire`.

A table with more than `PARTS_MAX` sets of fields stores further sets as one part per field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from transferqueue.ledger.arrays import NO_ROWS, BoolArray, Index, IntArray, are_equal, tally
from transferqueue.ledger.attributes import Attribute
from transferqueue.ledger.rows.row_pages import StateColumn
from transferqueue.ledger.rows.row_state import RowStore
from transferqueue.limits import PAGE_ROWS, PARTS_MAX

_BLOCK: Final = Attribute("block", "i8")
_SLOT: Final = Attribute("slot", "i4")
Slots = npt.NDArray[np.int32]
TOGETHER_KEPT = 64
"""Size of the cache of field sets that leases ask for; every step asks for the same few."""
Retired = list[tuple[int, int]]
"""Blocks, each with the number of references that ended."""


class ColumnGroup:
    """A set of fields that were written together, and where each row has them."""

    __slots__ = ("block", "entries", "fields", "slot")

    def __init__(self, fields: tuple[str, ...], block: StateColumn, slot: StateColumn) -> None:
        self.fields = fields
        self.block = block
        self.slot = slot
        self.entries = 0


class PartPlaces(NamedTuple):
    """The entries of one column group: the block (0: none) and the slot of each row."""

    fields: tuple[str, ...]
    blocks: IntArray
    slots: Slots


class BlockSlots(msgspec.Struct):
    """Fields that lie together for some rows: block number (0: not set) and slot of each row."""

    fields: list[str]
    blocks: IntArray
    slots: Slots


class ColumnGroups:
    """All column groups of a table."""

    def __init__(self, rows: RowStore) -> None:
        self._rows = rows
        self._by_fields: dict[tuple[str, ...], ColumnGroup] = {}
        self._of_field: dict[str, list[ColumnGroup]] = {}
        self._together: dict[tuple[str, ...], list[list[str]]] = {}
        """Requested fields -> those that lie in the same parts. Cleared when a part is added."""

    def parts_of(self, fields: Iterable[str]) -> list[ColumnGroup]:
        """The parts to which a block with `fields` is written: one, or one per field beyond `PARTS_MAX`."""
        names = tuple(sorted(fields))
        part = self._by_fields.get(names)
        if part is not None:
            return [part]
        if len(self._by_fields) < PARTS_MAX or len(names) == 1:
            return [self._add(names)]
        return [part for name in names for part in self.parts_of((name,))]

    def has_group(self, fields: Iterable[str]) -> bool:
        """Whether there is a part of exactly these fields."""
        return tuple(sorted(fields)) in self._by_fields

    def named(self, names: Sequence[tuple[str, ...]]) -> list[ColumnGroup]:
        """The parts of exactly these sets of fields, which `parts_of` gave before."""
        if len(names) == 1:
            return [self._by_fields[names[0]]]
        return [self._by_fields[fields] for fields in names]

    def stored(self, at: IntArray) -> list[PartPlaces]:
        """The entries of rows at positions `at`, as an image has them."""
        return [PartPlaces(fields, part.block.a[at], part.slot.a[at]) for fields, part in self._by_fields.items()]

    def restore(self, stored: Iterable[PartPlaces], at: IntArray) -> None:
        """Restore the entries of rows at positions `at`, which have none."""
        for fields, blocks, slots in stored:
            part = self._by_fields.get(fields) or self._add(fields)
            part.block.a[at], part.slot.a[at] = blocks, slots
            part.entries += int((blocks > 0).sum())

    def _add(self, names: tuple[str, ...]) -> ColumnGroup:
        pages = self._rows.pages
        part = ColumnGroup(names, pages.column(_BLOCK), pages.column(_SLOT))
        self._by_fields[names] = part
        self._together.clear()
        for name in names:
            self._of_field.setdefault(name, []).append(part)
        return part

    # ------------------------------------------------------------ writing

    def take_out(self, at: Index, parts: Sequence[ColumnGroup]) -> Retired:
        """Return the references of entries that `write` is about to replace."""
        return [reference for part in parts if part.entries for reference in self._take_out(part, part.block.a[at])]

    def write(self, at: Index, count: int, parts: Sequence[ColumnGroup], block: int, slots: Slots | None) -> None:
        """Record that `count` rows, which have no entry there, have the fields of `parts` in `block`. `slots`: of each
        row; None: the first ones.
        """
        if slots is None:
            values = _SLOTS[:count] if count <= PAGE_ROWS else np.arange(count, dtype=np.int32)
        else:
            values = slots
        for part in parts:
            part.block.a[at] = block
            part.slot.a[at] = values
            part.entries += count

    @staticmethod
    def _take_out(part: ColumnGroup, blocks: IntArray) -> Retired:
        if are_equal(blocks):  # as after one put
            first = int(blocks[0])
            if not first:
                return []
            part.entries -= blocks.size
            return [(first, blocks.size)]
        held = blocks[blocks > 0]
        part.entries -= held.size
        return tally(held)

    def prune(self, at: IntArray, fields: Iterable[str]) -> Retired:
        """Remove unread entries of parts with `fields`. Returns their references."""
        retired: Retired = []
        suspects = {id(part): part for name in fields for part in self._of_field.get(name, ())}
        for part in suspects.values():
            if not part.entries:
                continue
            unread = (part.block.a[at] > 0) & ~self._read(part, at)
            if unread.any():
                retired += self._take_out(part, part.block.a[at[unread]])
                part.block.a[at[unread]] = 0
        return retired

    def make_way(
        self, at: IntArray, fields: Sequence[str], into: Iterable[tuple[str, ...]], than: int
    ) -> tuple[Retired, Retired]:
        """Remove `fields` of these rows from blocks above `than`, so that they are read in older ones that are about to
        be written, to `into`. What lies beside them there, and is read, gets entries of its own. Returns references to
        add, and those that end after that.
        """
        added: Retired = []
        retired: Retired = []
        replaced = set(into)
        for part in [part for name in fields for part in self._of_field.get(name, ()) if part.fields not in replaced]:
            newer = at[part.block.a[at] > than] if part.entries else NO_ROWS
            if not newer.size:
                continue
            staying = [name for name in part.fields if name not in fields]
            for beside in self.parts_of(staying) if staying else ():
                rows = newer[beside.block.a[newer] < part.block.a[newer]]
                if rows.size:
                    added += tally(part.block.a[rows])
                    retired += self._take_out(beside, beside.block.a[rows])
                    beside.block.a[rows], beside.slot.a[rows] = part.block.a[rows], part.slot.a[rows]
                    beside.entries += rows.size
            retired += self._take_out(part, part.block.a[newer])
            part.block.a[newer] = 0
            retired += self.prune(newer, staying)
        return added, retired

    def _read(self, part: ColumnGroup, at: IntArray) -> BoolArray:
        """Which rows read a field of `part` there: the field is set, and `part` is the newest that has it."""
        read = np.zeros(at.size, np.bool_)
        for name in part.fields:
            newest = part.block.a[at] >= self._newest(name, at)
            read |= newest & self._rows.has_all(at, self._rows.mask((name,)))
        return read

    def _newest(self, name: str, at: IntArray) -> IntArray:
        newest: IntArray = np.max([part.block.a[at] for part in self._of_field[name]], axis=0)
        return newest

    def newest_beside(self, name: str, at: IntArray) -> int:
        """The highest number of a block in which one of the rows has the field beside others, read or not; 0 if there
        is none. A block of the field alone does not replace it."""
        beside = [part for part in self._of_field.get(name, ()) if part.entries and len(part.fields) > 1]
        return max([int(part.block.a[at].max(initial=0)) for part in beside], default=0)

    def release(self, at: Index) -> Retired:
        """Remove all entries of finished rows. Returns their references."""
        retired: Retired = []
        for part in self._by_fields.values():
            if part.entries:
                retired += self._take_out(part, part.block.a[at])
                part.block.a[at] = 0
        return retired

    # ------------------------------------------------------------ reading

    def lies_in(self, at: IntArray, blocks: IntArray) -> BoolArray:
        """Which rows have an entry in one of `blocks`."""
        in_blocks = np.zeros(at.size, np.bool_)
        for part in self._by_fields.values():
            if part.entries:
                in_blocks |= np.isin(part.block.a[at], blocks)
        return in_blocks

    def locate(self, fields: Iterable[str], at: Index) -> list[BlockSlots]:
        """Where rows have fields (which must be set). Fields that lie together share one result."""
        key = tuple(fields)
        together = self._together.get(key)
        if together is None:
            if len(self._together) > TOGETHER_KEPT:
                self._together.clear()
            together = self._together[key] = self._grouped(key)
        return [self._places(names, at) for names in together]

    def places(self, at: IntArray, has: Mapping[str, BoolArray]) -> dict[str, tuple[IntArray, Slots]]:
        """The block (0: none) and slot of rows, of fields that these rows have. Fields with the same places share
        them."""
        found: dict[str, tuple[IntArray, Slots]] = {}
        for where in self.locate(has, at):
            shared: dict[bytes, tuple[IntArray, Slots]] = {}
            for name in where.fields:
                places = shared.get(key := has[name].tobytes())
                if places is None:
                    places = shared[key] = np.where(has[name], where.blocks, 0), where.slots
                found[name] = places
        return {name: found[name] for name in has}

    def _grouped(self, fields: Iterable[str]) -> list[list[str]]:
        together: dict[tuple[int, ...], list[str]] = {}
        for name in fields:
            together.setdefault(tuple(id(part) for part in self._of_field.get(name, ())), []).append(name)
        return list(together.values())

    def _places(self, names: list[str], at: Index) -> BlockSlots:
        parts = self._of_field.get(names[0], [])
        if len(parts) == 1:
            return BlockSlots(names, parts[0].block.a[at], parts[0].slot.a[at])
        if not parts:
            count = self._rows.pages.fate.a[at].size
            return BlockSlots(names, np.zeros(count, np.int64), np.zeros(count, np.int32))
        blocks = np.stack([part.block.a[at] for part in parts])
        newest = blocks.argmax(axis=0)[np.newaxis]
        slots = np.stack([part.slot.a[at] for part in parts])
        return BlockSlots(names, np.take_along_axis(blocks, newest, 0)[0], np.take_along_axis(slots, newest, 0)[0])


_SLOTS: Final[Slots] = np.arange(PAGE_ROWS, dtype=np.int32)

"""The slots of a block that has a row for each row of its put."""
