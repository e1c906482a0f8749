"""Which rows are over their staleness bound: an index by policy version, walked only as the clock moves.

Every stamped row is filed under its version. When the clock advances, the versions that fall below the
bound are taken out; so each row is looked at once for its stamp, whatever the table holds. A row that was
stamped anew is filed again; the entry under its old version is void.
"""

from __future__ import annotations

import heapq

import numpy as np

from transferqueue.ledger.arrays import IntArray, tally
from transferqueue.ledger.pages import LIVE
from transferqueue.ledger.rows import Rows

SLACK = 8192


class VersionIndex:
    """Live rows by policy version."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._filed: dict[int, list[IntArray]] = {}
        self._versions: list[int] = []
        self._size = 0

    def file(self, rows: IntArray, versions: IntArray) -> None:
        """Rows were stamped. Those without a version (-1) are never stale."""
        for version, count in tally(versions):
            if version < 0:
                continue
            if version not in self._filed:
                self._filed[version] = []
                heapq.heappush(self._versions, version)
            self._filed[version].append(rows if count == rows.size else rows[versions == version])
            self._size += count
        if self._size > 2 * self._rows.pages.resident + SLACK:
            self._compact()

    def _standing(self, version: int) -> IntArray:
        rows = np.concatenate(self._filed[version])
        at, there = self._rows.pages.find(rows)
        there &= (self._rows.version.a[at] == version) & (self._rows.pages.fate.a[at] == LIVE)
        return np.unique(rows[there])

    def _compact(self) -> None:
        for version in list(self._filed):
            rows = self._standing(version)
            if rows.size:
                self._filed[version] = [rows]
            else:
                del self._filed[version]
        self._versions = sorted(self._filed)
        self._size = sum(one[0].size for one in self._filed.values())

    def below(self, bound: int) -> list[IntArray]:
        """Live rows of versions below `bound`, oldest version first; they stay filed."""
        return [self._standing(version) for version in sorted(self._filed) if version < bound]

    def take_below(self, bound: int) -> IntArray:
        """Live rows of versions below `bound`; they are filed no more."""
        taken = []
        while self._versions and self._versions[0] < bound:
            version = heapq.heappop(self._versions)
            taken.append(self._standing(version))
            self._size -= sum(rows.size for rows in self._filed.pop(version))
        return np.concatenate(taken) if taken else np.empty(0, np.int64)
