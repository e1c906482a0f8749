"""Counts of a table's rows by how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import transferqueue as tq
from transferqueue.errors import InternalError


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Rows of one table: put, live, done, and dropped by reason."""

    put: int
    live: int
    done: int
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def dropped_rows(self) -> int:
        """Rows dropped for any reason."""
        return sum(self.dropped.values())

    def check_finished(self, table: str) -> None:
        """Raise `InternalError` unless every row that was put is done or dropped with a reason."""
        if self.live or self.put != self.done + self.dropped_rows:
            raise InternalError(
                f'table "{table}" does not balance: {self.put} rows put, {self.live} live, {self.done} done, '
                f"{self.dropped_rows} dropped {dict(self.dropped)}; all that were put must be done or dropped for a "
                "reason"
            )


def audit(table: tq.Table) -> Audit:
    """Ask the queue for the counts of `table`."""
    counts = table.audit()
    return Audit(put=counts.rows_put, live=counts.rows_live, done=counts.rows_done, dropped=dict(counts.dropped))
