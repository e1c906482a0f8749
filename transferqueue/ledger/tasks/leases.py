"""Leases: which rows are leased to which session, until when, under which fencing token.

A lease ends when its holder has acked, dropped or released all of its rows, when it expires, or when others may lease
the last row that it held (a rollback, a requeue). Tokens ascend strictly over the life of the ledger. So a system that
stores the token of a later holder can refuse an earlier holder.

Two masks follow the rows of a lease. `open`: the holder has not ended the row yet, so it may still name it. `held`: the
row is still leased. A row that was dropped meanwhile (by its group's policy, as stale, by a delete) is open but not
held. The holder may name it as the others: it is passed over, and its result is discarded. So what becomes of one row
never ends the lease of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from transferqueue.errors import LeaseExpired, UsageError
from transferqueue.ledger.arrays import BoolArray, IntArray, agreed, all_true, numbered
from transferqueue.ledger.rows import StagedCommit
from transferqueue.limits import LEASES_REMEMBERED_MAX
from transferqueue.wire.messages import Leased


class LeaseState(msgspec.Struct, eq=False, array_like=True):
    """Rows leased until `deadline`.

    Args:
        id: its number.
        token: the fencing token.
        held: which rows are still leased.
        open: which rows the holder has not ended.
        length_s: what a renewal adds.
        since: when it began.
        holders: replica -> session; empty: a share that no rank has claimed yet.
        acked: replicas that have acked.
        staged: result columns, from the first replica that sent any. The last ack commits them.
        staged_order: positions in the lease of the rows of `staged`; None: the rows of the lease, in order.
        dropped_as: the reason with which the rows will be dropped when all replicas have acked.
        share: (world, replicas) of the shared batches that this is a share of.
    """

    id: int
    token: int
    table: str
    task: str
    rows: IntArray
    held: BoolArray
    open: BoolArray
    length_s: float
    since: float
    deadline: float | None = None
    replicas: int = 1
    holders: dict[int, int] = {}
    acked: dict[int, None] = {}
    staged: StagedCommit | None = None
    staged_order: IntArray | None = None
    dropped_as: str = ""
    share: tuple[int, int] | None = None
    reply: Leased | None = None
    fields: list[str] | None = None
    _sorter: IntArray | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of its rows are held, and none was ended."""
        return 0 not in self.held.tobytes() and 0 not in self.open.tobytes()

    @property
    def left(self) -> int:
        """Number of rows still held."""
        return int(self.held.sum())

    def positions(self, rows: IntArray | None) -> IntArray:
        """Positions in the lease of the rows that its holder names (None: all rows that it has not ended)."""
        if rows is None:
            return np.flatnonzero(self.open)
        if rows.size == self.rows.size and bool((rows == self.rows).all()):
            at: IntArray = np.arange(rows.size)
        else:
            at = self._find(rows)
        ended = ~self.open[at]
        if ended.any():
            raise LeaseExpired(
                f"{numbered(rows[ended])} of lease {self.id} {agreed(rows[ended], 'was', 'were')} acked or released "
                "before, and ended there"
            )
        return at

    def _find(self, rows: IntArray) -> IntArray:
        if self._sorter is None:
            self._sorter = np.argsort(self.rows, kind="stable")
        if not self.rows.size:
            raise UsageError(f"{numbered(rows)} {agreed(rows, 'is', 'are')} not in lease {self.id}, which has no rows")
        slot = np.searchsorted(self.rows, rows, sorter=self._sorter).clip(max=self.rows.size - 1)
        at: IntArray = self._sorter[slot]
        strange = self.rows[at] != rows
        if strange.any():
            raise UsageError(
                f"{numbered(rows[strange])} {agreed(rows[strange], 'is', 'are')} not in lease {self.id}; name rows of "
                "that lease"
            )
        return at

    def begin(self, now: float) -> None:
        """Start the lease for its first holder, without rows that were removed before."""
        self.since = now
        self.rows = self.rows[self.held]
        self.held = all_true(self.rows.size)
        self.open = all_true(self.rows.size)
        self._sorter = None

    def remove(self, rows: IntArray) -> None:
        """Remove rows without a call of the holder. They are of this lease, each once."""
        self.held[slice(None) if rows.size == self.rows.size else self._find(rows)] = False


@dataclass(slots=True, eq=False)
class LeaseTable:
    """All open leases, and why recent ones ended."""

    by_id: dict[int, LeaseState] = field(default_factory=dict)
    of_session: dict[int, dict[int, None]] = field(default_factory=dict)
    _next: int = 1
    _ended: dict[int, str] = field(default_factory=dict)

    def open(self, table: str, task: str, rows: IntArray, length_s: float, now: float) -> LeaseState:
        """Add a lease without a holder."""
        held = all_true(rows.size)
        lease = LeaseState(self._next, self._next, table, task, rows, held, held.copy(), length_s, now)
        self._next += 1
        self.by_id[lease.id] = lease
        return lease

    def hold(self, lease: LeaseState, session: int, replica: int) -> None:
        """Make `session` a holder of the lease, as `replica`."""
        lease.holders[replica] = session
        self.of_session.setdefault(session, {})[lease.id] = None

    def get(self, number: int, token: int, table: str, session: int) -> LeaseState:
        """The lease, if `session` holds it; else `LeaseExpired` with the reason."""
        lease = self.by_id.get(number)
        if lease is None or lease.table != table:
            why = self._ended.get(number) if lease is None else None
            raise LeaseExpired(
                f'lease {number} of table "{table}" is not held: {why or "it is unknown"}; its rows may be '
                "with another worker, so lease again"
            )
        if session not in lease.holders.values() or lease.token != token:
            raise LeaseExpired(f'lease {number} of table "{table}" belongs to another session; it was not changed')
        return lease

    def of(self, session: int) -> list[LeaseState]:
        """Leases of a session, oldest first."""
        return [self.by_id[number] for number in self.of_session.get(session, ())]

    def leave(self, lease: LeaseState, session: int) -> None:
        """Forget that `session` holds the lease. An ack that it sent stays valid."""
        held = self.of_session.get(session, {})
        held.pop(lease.id, None)
        if not held:
            self.of_session.pop(session, None)

    def end(self, lease: LeaseState, why: str) -> None:
        """Remove the lease and remember why it ended."""
        if self.by_id.pop(lease.id, None) is None:
            return
        lease.deadline = None
        for session in lease.holders.values():
            self.leave(lease, session)
        self._ended[lease.id] = why
        while len(self._ended) > LEASES_REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]
