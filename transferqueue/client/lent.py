"""The lease of a batch as its holder sees it: what is left of it, and how it ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transferqueue.client import checks
from transferqueue.client.client import Client
from transferqueue.client.source import Source
from transferqueue.client.terms import Terms
from transferqueue.errors import BatchEnded, LeaseExpired, NotFound, listing
from transferqueue.wire import messages as m


class Lent:
    """Rows lent to this process. `left`: ids of those that are not acked, dropped or released yet."""

    def __init__(self, client: Client, terms: Terms, task: str, leased: m.Leased, source: Source) -> None:
        self.client, self.terms, self.task, self.source = client, terms, task, source
        self.lease, self.token = leased.lease, leased.token
        self.left: NDArray[np.int64] = np.frombuffer(leased.content.rows, "<i8")
        self.ended = ""
        self.expired = False

    @property
    def table(self) -> str:
        """Name of the table."""
        return self.terms.name

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

    def end(self, how: str) -> None:
        """The lease is over: `how` completes "the batch ..." in later errors. Its memory returns."""
        if not self.ended:
            self.ended = how
            self.left = self.left[:0]
            self.source.end(how)

    def expire(self) -> None:
        """The server says that the lease is not ours any more."""
        self.expired = True
        self.end("has expired")

    def check(self) -> None:
        """Raise `LeaseExpired` if the lease was lost, `BatchEnded` if the holder ended it."""
        if self.expired:
            raise LeaseExpired(
                f'lease {self.lease} of task "{self.task}" (table "{self.table}") has expired, and its rows went back to '
                "others; lease other rows, and renew in time or ask for a longer lease_s"
            )
        if self.ended:
            raise BatchEnded(
                f'the batch of task "{self.task}" (table "{self.table}", lease {self.lease}) {self.ended}; '
                "lease another one"
            )
