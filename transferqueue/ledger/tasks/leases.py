"""Leases: which rows are lent to whom, until when, under which fencing token.

A lease ends when none of its rows is held any more: acked, released, expired, or lost because the row was
dropped meanwhile. Tokens ascend strictly over the life of the ledger, so whoever stores the token of a
later holder can refuse an earlier one.

Two masks follow the rows of a lease. `open`: its holder has not ended the row yet, so it may still name it.
`held`: the row is still lent. A row that was dropped meanwhile is open but not held: naming it in an ack
together with others is no error, its result is left out.
"""

from __future__ import annotations

import numpy as np

from transferqueue.errors import LeaseExpired, UsageError
from transferqueue.ledger.rows.arrays import BoolArray, IntArray, some
from transferqueue.ledger.rows.commit import StagedCommit
from transferqueue.limits import LEASES_REMEMBERED_MAX
from transferqueue.wire.messages import Leased


class LeaseState:
    """Rows lent until `deadline`."""

    __slots__ = (
        "_sorter",
        "acked",
        "deadline",
        "dropped_as",
        "fields",
        "held",
        "holders",
        "id",
        "length_s",
        "open",
        "replicas",
        "reply",
        "rows",
        "share",
        "since",
        "staged",
        "staged_order",
        "table",
        "task",
        "token",
    )  # fmt: skip

    def __init__(self, number: int, token: int, table: str, task: str, rows: IntArray, length_s: float, now: float):
        self.id = number
        self.token = token
        self.table = table
        self.task = task
        self.rows = rows
        self.held: BoolArray = np.ones(rows.size, np.bool_)
        self.open: BoolArray = np.ones(rows.size, np.bool_)
        self.length_s = length_s
        self.since = now
        self.deadline: float | None = None
        self.replicas = 1
        self.holders: dict[int, int] = {}
        """Replica -> session. Empty: a share that nobody has claimed yet."""
        self.acked: dict[int, None] = {}
        """Replicas that have acked."""
        self.staged: StagedCommit | None = None
        """Result columns of the first replica that carried them, committed with the last ack."""
        self.staged_order: IntArray | None = None
        """Positions of the rows of `staged`; None: those of the lease, in order."""
        self.dropped_as = ""
        """Why the rows will end as dropped when all replicas have acked."""
        self.share: tuple[int, int] | None = None
        """(world, replicas) of the agreement this is a share of."""
        self.reply: Leased | None = None
        self.fields: list[str] | None = None
        self._sorter: IntArray | None = None

    @property
    def left(self) -> int:
        """Rows still held."""
        return int(self.held.sum())

    def positions(self, rows: IntArray | None) -> IntArray:
        """Positions in the lease of rows its holder names (None: all that it has not ended)."""
        if rows is None:
            return np.flatnonzero(self.open)
        if rows.size == self.rows.size and bool((rows == self.rows).all()):
            at: IntArray = np.arange(rows.size)
        else:
            at = self._find(rows)
        ended = ~self.open[at]
        if ended.any():
            raise LeaseExpired(
                f"row {some(rows[ended])} of lease {self.id} was acked or released before; it ended there"
            )
        return at

    def _find(self, rows: IntArray) -> IntArray:
        if self._sorter is None:
            self._sorter = np.argsort(self.rows, kind="stable")
        if not self.rows.size:
            raise UsageError(f"row {some(rows)} is not in lease {self.id}, which has no rows")
        slot = np.searchsorted(self.rows, rows, sorter=self._sorter).clip(max=self.rows.size - 1)
        at: IntArray = self._sorter[slot]
        strange = self.rows[at] != rows
        if strange.any():
            raise UsageError(f"row {some(rows[strange])} is not in lease {self.id}; name rows of that lease")
        return at

    def begin(self, now: float) -> None:
        """The first holder has come: rows that were lost before that are not in the lease."""
        self.since = now
        self.rows = self.rows[self.held]
        self.held = np.ones(self.rows.size, np.bool_)
        self.open = np.ones(self.rows.size, np.bool_)
        self._sorter = None

    def remove(self, rows: IntArray) -> None:
        """Rows are lent no more, through no doing of the holder."""
        self.held[self._find(rows)] = False


class LeaseTable:
    """All leases that have not ended, and why recent ones did."""

    def __init__(self) -> None:
        self._next = 1
        self.by_id: dict[int, LeaseState] = {}
        self.of_session: dict[int, dict[int, None]] = {}
        self._ended: dict[int, str] = {}

    def open(self, table: str, task: str, rows: IntArray, length_s: float, now: float) -> LeaseState:
        """A new lease, not held by anybody yet."""
        lease = LeaseState(self._next, self._next, table, task, rows, length_s, now)
        self._next += 1
        self.by_id[lease.id] = lease
        return lease

    def hold(self, lease: LeaseState, session: int, replica: int) -> None:
        """`session` holds the lease as `replica`."""
        lease.holders[replica] = session
        self.of_session.setdefault(session, {})[lease.id] = None

    def get(self, number: int, token: int, table: str, session: int) -> LeaseState:
        """The lease, if `session` holds it; `LeaseExpired` with the reason if not."""
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
        """The session is gone, but its part in the lease stands (it had acked)."""
        held = self.of_session.get(session, {})
        held.pop(lease.id, None)
        if not held:
            self.of_session.pop(session, None)

    def end(self, lease: LeaseState, why: str) -> None:
        """The lease is over."""
        if self.by_id.pop(lease.id, None) is None:
            return
        lease.deadline = None
        for session in lease.holders.values():
            self.leave(lease, session)
        self._ended[lease.id] = why
        while len(self._ended) > LEASES_REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]
