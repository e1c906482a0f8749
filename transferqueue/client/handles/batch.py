"""The base of `Batch` and `AsyncBatch`: their properties, and the release of a batch that is collected before its
end."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Final

from transferqueue.client.operations.lease import BatchLease
from transferqueue.client.operations.rows import RowsBase
from transferqueue.errors import LeaseExpired, UsageError
from transferqueue.errors.text import shown
from transferqueue.storage.memory.private_pages import when_gone
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.client")


GIVEN_BACK: Final = "the block of this batch has ended, so its rows go back as failed; ack them inside the block"
"""Added to the refusal of the ack that a clean exit makes: the refusal itself says that the rows stay leased."""


class BatchBase(RowsBase):
    """A batch without the verbs that talk to the server. A batch that is collected before its end releases its rows."""

    def __init__(self, lease: BatchLease, leased: m.Leased) -> None:
        self._content, self._source, self._lease = leased.content, lease.source, lease
        self._version = leased.version
        self._lease_s = leased.lease_s
        self._goes_on = False
        """Whether the batch comes from a loop over batches, which continues if this lease is lost."""
        release = m.ReleaseRequest(
            table=lease.table, lease=lease.number, token=lease.token, reason="the batch was collected"
        )
        self._forgotten = weakref.finalize(self, _release_at_collection, lease, release)
        when_gone(self, lambda: _release_at_collection(lease, release))

    def __repr__(self) -> str:
        state = f", {self._lease.ended}" if self._lease.ended else ""
        return f"{super().__repr__()[:-1]}; task {self.task!r} of table {self.table!r}{state}>"

    @property
    def table(self) -> str:
        """Name of the table."""
        return self._lease.table

    @property
    def task(self) -> str:
        """The task that these rows were leased for."""
        return self._lease.task

    @property
    def version(self) -> int:
        """The table's clock (the trainer's version) when the rows were leased; 0 until it advances."""
        return self._version

    @property
    def lease(self) -> int:
        """Number of the lease, as `transferqueue inspect` shows it."""
        return self._lease.number

    @property
    def lease_s(self) -> float:
        """Seconds for which the rows were leased, counted from the lease or the last `renew`."""
        return self._lease_s

    @property
    def ended(self) -> bool:
        """Whether no row of the batch is leased here any more."""
        return bool(self._lease.ended) or self._lease.lost

    def _check_enter(self) -> None:
        """Raise if the batch has ended. In a loop over batches, the ack of a lost batch reports the loss, and ends only
        its block."""
        if not (self._goes_on and self._lease.lost):
            self._lease.check()

    def _is_passed_over(self, error: BaseException | None) -> bool:
        """Whether the batch was lost in a loop over batches: then the loop continues, and a warning is logged."""
        if not (self._goes_on and isinstance(error, LeaseExpired) and self._lease.expired):
            return False
        _log.warning("%s; results of these rows made here are not counted, and the next batch is leased", error)
        return True


def _release_at_collection(lease: BatchLease, release: m.ReleaseRequest) -> None:
    """Release the rows of a batch that was collected, so no caller can ack them. Runs in a finalizer."""
    if not lease.ended:
        if (
            threading.main_thread().is_alive()
        ):  # at the end of the interpreter every batch is collected, also one that a loader fetched
            lease.terms.forgotten = lease.task  # the next lease logs it: a finalizer must not
        lease.client.connection.post(release)
        lease.end("was collected, as nothing held it")


def lease_of(batch: object) -> BatchLease:
    """The lease of a batch. `UsageError` for anything else."""
    if not isinstance(batch, BatchBase):
        raise UsageError(f"batch {shown(batch)} is {type(batch).__name__}; give a batch that was leased")
    return batch._lease


def leases_of(batches: Iterable[object]) -> list[BatchLease]:
    """The leases of batches. `UsageError` for anything else, a single batch too."""
    if isinstance(batches, BatchBase) or not isinstance(batches, Iterable):
        raise UsageError(f"batches={shown(batches)} is {type(batches).__name__}; give a list of batches")
    return [lease_of(batch) for batch in batches]
