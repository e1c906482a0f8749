"""The lease of a batch as its holder sees it: what is left of it, and how it ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transferqueue.client import checks
from transferqueue.client.client import Client
from transferqueue.client.keeping import Kept
from transferqueue.client.source import Source
from transferqueue.client.terms import Terms
from transferqueue.errors import BatchEnded, LeaseExpired, NotFound, listing
from transferqueue.wire import messages as m


class Lent:
    """Rows lent to this process. `left`: ids of those that are not acked, dropped or released yet. kept: how the lease is
    renewed; None: only by its holder."""

    def __init__(
        self, client: Client, terms: Terms, task: str, leased: m.Leased, source: Source, kept: Kept | None = None
    ) -> None:
        self.client, self.terms, self.task, self.source = client, terms, task, source
        self.lease, self.token = leased.lease, leased.token
        self.left: NDArray[np.int64] = np.frombuffer(leased.content.rows, "<i8")
        self.ended = ""
        self.expired = False
        self._kept = kept
        if kept is not None:
            client.connection.keep(kept, leased.lease_s)

    @property
    def table(self) -> str:
        """Name of the table."""
        return self.terms.name

    @property
    def lost(self) -> bool:
        """Whether the server has said that the lease is not ours any more."""
        return self.expired or (self._kept is not None and self._kept.lost)

    @property
    def overdue(self) -> bool:
        """Whether the time limit has passed: by now the rows are, or will soon be, with others."""
        return self.lost or (self._kept is not None and self.client.clock() >= self._kept.until)

    def renewed(self, lease_s: float) -> None:
        """The holder itself has renewed the lease, which lasts `lease_s` from now: its time limit is counted from here."""
        if self._kept is not None:
            self.client.connection.keep(self._kept, lease_s)

    def restart(self) -> None:
        """The holder has shown that it lives: its time limit is counted from here."""
        if self._kept is not None:
            self.client.connection.keep_on(self._kept)

    def chosen(self, rows: object) -> bytes | None:
        """Rows that a verb speaks of: None while it is all of the lease; else ids, which must be of the lease."""
        if rows is None:
            return None if len(self.left) * 8 == self._whole else self.left.tobytes()
        wanted = np.frombuffer(checks.row_ids(rows), "<i8")
        foreign = wanted[~np.isin(wanted, self.left)]
        if foreign.size:
            raise NotFound(
                f'row {foreign[0]} is not, or not any more, in this batch of task "{self.task}"; it has '
                f"{listing(self.left.tolist())}"
            )
        return wanted.tobytes()

    @property
    def _whole(self) -> int:
        return self.source.rows * 8

    def take(self, rows: bytes | None, how: str) -> None:
        """These rows are no longer of the lease; without any left it has ended."""
        if rows is not None:
            self.left = self.left[~np.isin(self.left, np.frombuffer(rows, "<i8"))]
        if rows is None or not len(self.left):
            self.end(how)
        else:
            self.restart()

    def end(self, how: str) -> None:
        """The lease is over: `how` completes "the batch ..." in later errors. Its memory returns."""
        if self._kept is not None:
            self._kept.end()
        if not self.ended:
            self.ended = how
            self.left = self.left[:0]
            self.source.end(how)

    def expire(self) -> None:
        """The server says that the lease is not ours any more."""
        self.expired = True
        self.end("has expired")

    def _limit(self) -> str:
        return f" ({self._kept.limit_s:g} s)" if self._kept is not None else ""

    def check(self) -> None:
        """Raise `LeaseExpired` if the lease was lost, `BatchEnded` if the holder ended it."""
        if self.lost and not self.ended:
            self.expire()
        if self.expired:
            raise LeaseExpired(
                f'lease {self.lease} of task "{self.task}" (table "{self.table}") has expired, and its rows went back to '
                f"others; lease other rows. A lease is renewed for a worker that lives, up to the time limit of its task{self._limit()}"
            )
        if self.ended:
            raise BatchEnded(
                f'the batch of task "{self.task}" (table "{self.table}", lease {self.lease}) {self.ended}; '
                "lease another one"
            )
