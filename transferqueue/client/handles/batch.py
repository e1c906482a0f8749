"""What the batches of both APIs share."""

from __future__ import annotations

import logging
import weakref
from typing import Final

from transferqueue.client.operations.lease import BatchLease
from transferqueue.client.operations.rows import RowsBase
from transferqueue.errors import LeaseExpired
from transferqueue.storage.memory.private_pages import when_gone
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.client")


GIVEN_BACK: Final = "the block of this batch has ended, so its rows go back as failed; ack them inside the block"
"""Added to the refusal of the ack that a clean exit makes: the refusal itself says that the rows stay leased."""


class BatchBase(RowsBase):
    """What the batches of both fronts share: what a batch is, and what happens when it is forgotten."""

    def __init__(self, lent: BatchLease, leased: m.Leased) -> None:
        super().__init__(leased.content, lent.source)
        self._lent = lent
        self._version = leased.version
        self._lease_s = leased.lease_s
        self._goes_on = False
        """Whether it comes from a loop over batches, which goes on when this one was lost."""
        unasked = m.ReleaseRequest(
            table=lent.table, lease=lent.lease, token=lent.token, reason="the batch was collected"
        )
        self._forgotten = weakref.finalize(self, _give_up, lent, unasked)
        when_gone(self, lambda: _give_up(lent, unasked))

    def __repr__(self) -> str:
        state = f", {self._lent.ended}" if self._lent.ended else ""
        return f"{super().__repr__()[:-1]}; task {self.task!r} of table {self.table!r}{state}>"

    @property
    def table(self) -> str:
        """Name of the table."""
        return self._lent.table

    @property
    def task(self) -> str:
        """The task that these rows were leased for."""
        return self._lent.task

    @property
    def version(self) -> int:
        """The table's clock (the trainer's version) when the rows were handed over; -1: it never advanced."""
        return self._version

    @property
    def lease(self) -> int:
        """Number of the lease, as `transferqueue inspect` shows it."""
        return self._lent.lease

    @property
    def lease_s(self) -> float:
        """Seconds for which the rows were lent, from the hand-over or the last `renew`."""
        return self._lease_s

    @property
    def ended(self) -> bool:
        """Whether no row of the batch is leased here any more."""
        return bool(self._lent.ended) or self._lent.lost

    def _check_enter(self) -> None:
        """Raise if the batch has ended; in a loop over batches, a lost one is found out by its ack, which ends its block alone."""
        if not (self._goes_on and self._lent.lost):
            self._lent.check()

    def _is_passed_over(self, error: BaseException | None) -> bool:
        """Whether the block of this batch ends because its lease was lost, which the loop that it comes from goes on after."""
        if not (self._goes_on and isinstance(error, LeaseExpired) and self._lent.expired):
            return False
        _log.warning("%s; what was made of these rows here is not counted, and the next batch is leased", error)
        return True


def _give_up(lent: BatchLease, unasked: m.ReleaseRequest) -> None:
    """Runs in a finalizer: the rows of a batch that nobody can ack any more go back now, not at the deadline."""
    if not lent.ended:
        lent.terms.forgotten = lent.task  # the next lease logs it: a finalizer must not
        lent.client.connection.post(unasked)
        lent.end("was collected, as nothing held it")
