"""Rows of a table with `Recorded` that have their fate, and that no file contains yet.

Such rows stay resident, with their values, until the ledger is told that a file contains them. A request that gives
rows their fate appends them once (`RowRecord.end`), and `RowRecord.recorded` alone removes them.

Files are numbered per *life* of a table: from its creation to its end, continued by restarts. A snapshot that is
restored begins another life.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec
import numpy as np
import xxhash

from transferqueue.ledger.arrays import BoolArray, IntArray
from transferqueue.limits import RECORDED_WORKERS_MAX

_SEARCHED_AT_ONCE: Final = 4096


class EndedRows(msgspec.Struct, eq=False):
    """Rows that ended together.

    Args:
        steps: the latest step with which each was acked; -1: none.
        keys: of the rows that had one. Ended rows have no key in the table, so that another row may get it.
    """

    at: float
    fate: int
    reason: str
    rows: IntArray
    steps: IntArray
    keys: dict[int, str]

    def without(self, gone: BoolArray) -> EndedRows:
        """Those of which this mask is not true."""
        rows = self.rows[~gone]
        keys = {row: self.keys[row] for row in rows.tolist() if row in self.keys} if self.keys else {}
        return EndedRows(self.at, self.fate, self.reason, rows, self.steps[~gone], keys)


class RowRecord(msgspec.Struct, eq=False):
    """What a table knows of its record.

    Args:
        life: names the life of the table in file names.
        files: number of the last file of which the ledger was told.
        ended: rows that no file contains, in the order in which they ended.
        waiting: their number.
        workers: names of sessions that have ended, for the lineage of rows.
    """

    life: str
    files: int = 0
    ended: list[EndedRows] = []
    waiting: int = 0
    workers: dict[int, str] = {}

    def end(self, rows: EndedRows) -> None:
        """Rows have their fate."""
        self.ended.append(rows)
        self.waiting += rows.rows.size

    def first_rows(self, most: int) -> list[EndedRows]:
        """The `most` rows that ended first, of which there are more."""
        chosen = self.next_rows(most)
        over = sum(ended.rows.size for ended in chosen) - most
        if over > 0:
            size = chosen[-1].rows.size
            chosen[-1] = chosen[-1].without(np.arange(size) >= size - over)
        return chosen

    def next_rows(self, most: int, first: int = 0) -> list[EndedRows]:
        """The rows that ended first: about `most`, whole requests, from request `first` on."""
        chosen: list[EndedRows] = []
        for ended in islice(self.ended, first, None):
            chosen.append(ended)
            most -= ended.rows.size
            if most <= 0:
                break
        return chosen

    def recorded(self, number: int, rows: IntArray) -> None:
        """Files up to `number` contain these rows (0: none does, and none will). Searches all rows that ended
        before the last of them once, many requests at a time."""
        self.files = max(self.files, number)
        self.waiting -= rows.size
        left, at, kept = rows.size, 0, list[EndedRows]()
        while left and (chosen := self.next_rows(max(rows.size, _SEARCHED_AT_ONCE), at)):
            gone = np.isin(np.concatenate([ended.rows for ended in chosen]), rows)
            kept += _without(chosen, gone)
            left -= int(np.count_nonzero(gone))
            at += len(chosen)
        self.ended[:at] = kept

    def remember_worker(self, session: int, label: str) -> None:
        """The name of a session that has ended."""
        self.workers[session] = label
        while len(self.workers) > RECORDED_WORKERS_MAX:
            del self.workers[next(iter(self.workers))]


def _without(ended: list[EndedRows], gone: BoolArray) -> Iterator[EndedRows]:
    """The requests with the rows that are not `gone`, a mask of all their rows."""
    edges = np.concatenate([[0], np.cumsum([one.rows.size for one in ended])])
    counts = np.diff(np.concatenate([[0], np.cumsum(gone)])[edges])
    for one, start, count in zip(ended, edges.tolist(), counts.tolist(), strict=False):
        if count == 0:
            yield one
        elif count < one.rows.size:
            yield one.without(gone[start : start + one.rows.size])


def life_of(*origin: object) -> str:
    """A name for a life that begins: the same for the same origin."""
    return xxhash.xxh3_64_hexdigest(repr(origin).encode())
