"""Groups of a table: their members, and how many members there should be.

`group_id` and `group_size` are stored on the row. All members of a group state the same size, and the table never has
more members than that. A later put may replace a dropped member. A group is known while one of its rows is live;
afterwards the same id begins a new group.

For tasks that take whole groups, a row without a group is a group of one. Its unit id is -2 - row. So a unit id is
either a group id (>= 0), or names its only row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np

from transferqueue.errors import Impossible, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import NO_ROWS, AnyArray, Index, IntArray, runs_of, tally_in_order
from transferqueue.ledger.attributes import COUNT_MAX, Attribute, Columns, columns_of, rows_of
from transferqueue.ledger.rows.row_state import RowStore

ATTRIBUTES: Final = {
    "id": Attribute("group_id", "i8", -1, 0, COUNT_MAX),
    "size": Attribute("group_size", "i8", 1, 1, COUNT_MAX),
    "present": Attribute("present", "i8", 0, 0, COUNT_MAX),
}
"""What is stored of a `GroupState`."""


class GroupState:
    """One known group. `present`: members that were put and not dropped."""

    __slots__ = ("id", "present", "rows", "size")

    def __init__(self, number: int, size: int) -> None:
        self.id = number
        self.size = size
        self.rows: dict[int, None] = {}
        """Live members, in the order in which they were put."""
        self.present = 0


class GroupIndex:
    """The known groups of one table."""

    def __init__(self, rows: RowStore) -> None:
        self._rows = rows
        self._by_id: dict[int, GroupState] = {}
        self._sizes: dict[int, int] = {}
        """Group size -> number of known groups of that size."""
        self.members_live = 0
        """Live rows that have a group."""

    # ------------------------------------------------------------ sizes

    @property
    def largest(self) -> int:
        """Size of the largest known group."""
        return max(self._sizes, default=1)

    @property
    def smallest(self) -> int:
        """Size of the smallest known group."""
        return min(self._sizes, default=1)

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, number: int) -> GroupState | None:
        """The group, or None if it is not known."""
        return self._by_id.get(number)

    def size_of(self, unit: int) -> int:
        """Number of rows that complete the unit."""
        return self._by_id[unit].size if unit >= 0 else 1

    def members(self, unit: int) -> list[int]:
        """Live rows of the unit."""
        return list(self._by_id[unit].rows) if unit >= 0 else [-2 - unit]

    def members_of(self, units: Sequence[int]) -> tuple[list[int], list[int]]:
        """Live rows of some units, unit by unit, and how many each has."""
        by_id = self._by_id
        members = [by_id[unit].rows if unit >= 0 else (-2 - unit,) for unit in units]
        return list(chain.from_iterable(members)), list(map(len, members))

    def units(self, rows: IntArray, at: IntArray | slice) -> IntArray:
        """Unit id of each row."""
        ids: IntArray = self._rows.group_id.a[at]
        return np.where(ids < 0, -2 - rows, ids)

    def stored(self) -> Columns:
        """The stored columns of the known groups."""
        return columns_of(self._by_id.values(), ATTRIBUTES)

    def live(self) -> IntArray:
        """What an image has beside `stored`: the live members of the groups, in their order."""
        return np.array(list(chain.from_iterable(group.rows for group in self._by_id.values())), np.int64)

    def restore(self, known: Columns, rows: IntArray, ids: AnyArray) -> None:
        """Restore stored groups (columns `known`). `rows`: live rows, members of one group in their order. `ids`: the
        group of each."""
        sizes = dict(zip(known["group_id"].tolist(), known["group_size"].tolist(), strict=True))
        self.add(rows, ids, np.array([sizes.get(number, 1) for number in ids.tolist()], np.int64))
        self._by_id = {number: self._by_id[number] for number in known["group_id"].tolist()}
        for stored in rows_of(known, ATTRIBUTES):
            group = self._by_id[stored["id"]]
            for name, value in stored.items():
                setattr(group, name, value)

    # ------------------------------------------------------------ rows in

    def check_put(self, table: str, ids: AnyArray, sizes: AnyArray, rows_max: int) -> None:
        """Raise unless rows of these groups may be put."""
        if not self._are_new_and_fit(ids, sizes, rows_max):
            self._check_each(table, ids, sizes, rows_max)

    def _are_new_and_fit(self, ids: AnyArray, sizes: AnyArray, rows_max: int) -> bool:
        """Whether none of these groups is known, and `_check_each` finds nothing wrong: it takes a hundred times as
        long."""
        numbers, starts, counts, order = _by_group(ids)
        declared = sizes[order][starts]
        return bool(
            self._by_id.keys().isdisjoint(numbers)
            and (np.repeat(declared, counts) == sizes[order]).all()
            and (counts <= declared).all()
            and (declared <= rows_max).all()
        )

    def _check_each(self, table: str, ids: AnyArray, sizes: AnyArray, rows_max: int) -> None:
        pairs, counts = np.unique(np.stack([ids, sizes.astype(np.int64)]), axis=1, return_counts=True)
        seen: dict[int, int] = {}
        for number, size, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            if number < 0:
                continue
            known = self._by_id.get(number)
            declared = known.size if known else seen.setdefault(number, size)
            if size != declared:
                raise UsageError(
                    f'group {number} of table "{table}" has group_size {declared}, but this put says {size}; '
                    "all members of a group carry the same size"
                )
            present = known.present if known else 0
            if present + count > size:
                raise UsageError(
                    f'group {number} of table "{table}" would have {present} + {count} = {present + count} rows; '
                    f"its group_size is {size}; give another group_id"
                )
            if size > rows_max:
                raise Impossible(
                    f'group {number} of {counted(size, "row")} can never be complete in table "{table}", which holds '
                    f"at most {counted(rows_max, 'row')}"
                )

    def add(self, rows: IntArray, ids: AnyArray, sizes: AnyArray) -> None:
        """Add rows that `check_put` accepted."""
        numbers, starts, counts, order = _by_group(ids)
        members = rows[order].tolist()
        declared = sizes[order][starts].tolist()
        for number, start, count, size in zip(numbers, starts.tolist(), counts.tolist(), declared, strict=True):
            group = self._by_id.get(number)
            if group is None:
                group = self._by_id[number] = GroupState(number, size)
                self._sizes[size] = self._sizes.get(size, 0) + 1
            for row in members[start : start + count]:
                group.rows[row] = None
            group.present += count
        self.members_live += len(members)

    # ------------------------------------------------------------ rows out

    def leave(self, rows: IntArray, at: Index, *, dropped: bool) -> list[int]:
        """Remove rows that got a fate. Returns the units that have no live row left."""
        ids: IntArray = self._rows.group_id.a[at]
        gone: list[int] = (-2 - rows[ids < 0]).tolist()
        numbers, starts, counts, order = _by_group(ids)
        members = rows[order].tolist()
        self.members_live -= len(members)
        for number, start, count in zip(numbers, starts.tolist(), counts.tolist(), strict=True):
            group = self._by_id[number]
            if len(group.rows) == count:
                group.rows.clear()
                self._forget(group)
                gone.append(number)
                continue
            for row in members[start : start + count]:
                del group.rows[row]
            group.present -= count if dropped else 0
        return gone

    def _forget(self, group: GroupState) -> None:
        del self._by_id[group.id]
        self._sizes[group.size] -= 1
        if not self._sizes[group.size]:
            del self._sizes[group.size]

    def counts(self, units: IntArray) -> list[tuple[int, int]]:
        """(unit, number of its rows) for the units of some rows, in the order in which they first appear."""
        return tally_in_order(units)


def _by_group(ids: AnyArray) -> tuple[list[int], IntArray, IntArray, IntArray]:
    """The groups of some rows, ascending; where the rows of each begin in `order` and how many there are; and the
    positions of the rows that have a group, group by group, each group in the order of the rows."""
    order = np.argsort(ids, kind="stable")
    order = order[int(np.searchsorted(ids[order], 0)) :]
    if not order.size:
        return [], NO_ROWS, NO_ROWS, order
    starts, counts = runs_of(ids[order])
    return ids[order[starts]].tolist(), starts, counts, order
