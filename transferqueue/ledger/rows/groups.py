"""Groups of a table: their members, and how many members there should be.

`group_id` and `group_size` are stored on the row. All members of a group state the same size, and the table never has
more members than that. A later put may replace a dropped member. A group is known while one of its rows is live;
afterwards the same id begins a new group.

For tasks that take whole groups, a row without a group is a group of one. Its unit id is -2 - row. So a unit id is
either a group id (>= 0), or names its only row.
"""

from __future__ import annotations

import numpy as np

from transferqueue.errors import Impossible, UsageError
from transferqueue.ledger.rows.arrays import AnyArray, Index, IntArray, tally_in_order
from transferqueue.ledger.rows.row_state import RowStore
from transferqueue.text import counted


class GroupState:
    """One known group. present: members that were put and not dropped."""

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

    def units(self, rows: IntArray, at: IntArray | slice) -> IntArray:
        """Unit id of each row."""
        ids: IntArray = self._rows.group_id.a[at]
        return np.where(ids < 0, -2 - rows, ids)

    def known(self) -> list[tuple[int, int, int]]:
        """Id, size and present members of each known group."""
        return [(group.id, group.size, group.present) for group in self._by_id.values()]

    def restore(self, known: dict[str, AnyArray], rows: IntArray, ids: AnyArray) -> None:
        """Restore the groups of a snapshot (columns `known`). rows: live rows, ascending; ids: the group of each."""
        sizes = dict(zip(known["group_id"].tolist(), known["group_size"].tolist(), strict=True))
        self.add(rows, ids, np.array([sizes.get(number, 1) for number in ids.tolist()], np.int64))
        for number, present in zip(known["group_id"].tolist(), known["present"].tolist(), strict=True):
            self._by_id[number].present = present

    # ------------------------------------------------------------ rows in

    def check_put(self, table: str, ids: AnyArray, sizes: AnyArray, rows_max: int) -> None:
        """Raise unless rows of these groups may be put."""
        pairs, counts = np.unique(np.stack([ids, sizes.astype(np.int64)]), axis=1, return_counts=True)
        seen: dict[int, int] = {}
        for number, size, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            if number < 0:
                continue
            known = self._by_id.get(number)
            declared = known.size if known else seen.setdefault(number, size)
            if size != declared:
                raise UsageError(
                    f'group {number} of table "{table}" has group_size {declared}, but {size} was given; '
                    "all members of a group carry the same size"
                )
            present = known.present if known else 0
            if present + count > size:
                raise UsageError(
                    f'group {number} of table "{table}" would have {present} + {count} = {present + count} rows; '
                    f"its group_size is {size}"
                )
            if size > rows_max:
                raise Impossible(
                    f'group {number} of {counted(size, "row")} can never be complete in table "{table}", which holds '
                    f"at most {counted(rows_max, 'row')}"
                )

    def add(self, rows: IntArray, ids: AnyArray, sizes: AnyArray) -> None:
        """Add rows that `check_put` accepted."""
        for row, number, size in zip(rows.tolist(), ids.tolist(), sizes.tolist(), strict=True):
            if number < 0:
                continue
            group = self._by_id.get(number)
            if group is None:
                group = self._by_id[number] = GroupState(number, size)
                self._sizes[size] = self._sizes.get(size, 0) + 1
            group.rows[row] = None
            group.present += 1
            self.members_live += 1

    # ------------------------------------------------------------ rows out

    def leave(self, rows: IntArray, at: Index, *, dropped: bool) -> list[int]:
        """Remove rows that got a fate. Returns the units that have no live row left."""
        ids: IntArray = self._rows.group_id.a[at]
        gone: list[int] = (-2 - rows[ids < 0]).tolist()
        for row, number in zip(rows.tolist(), ids.tolist(), strict=True):
            if number < 0:
                continue
            group = self._by_id[number]
            del group.rows[row]
            self.members_live -= 1
            group.present -= dropped
            if not group.rows:
                self._forget(group)
                gone.append(number)
        return gone

    def _forget(self, group: GroupState) -> None:
        del self._by_id[group.id]
        self._sizes[group.size] -= 1
        if not self._sizes[group.size]:
            del self._sizes[group.size]

    def counts(self, units: IntArray) -> list[tuple[int, int]]:
        """(unit, number of its rows) for the units of some rows, in the order in which they first appear."""
        return tally_in_order(units)
