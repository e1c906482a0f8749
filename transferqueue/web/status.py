"""The HTTP status of each error of the queue."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from transferqueue.errors import (
    AlreadyExists,
    DeadlineExceeded,
    EndOfTable,
    FlowSignal,
    LeaseExpired,
    NotFound,
    OutOfMemory,
    PeerError,
    PermissionDenied,
    RowsChanged,
    Sealed,
    TransferQueueError,
    UsageError,
)

STATUS: Final[tuple[tuple[type[TransferQueueError], HTTPStatus], ...]] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (AlreadyExists, HTTPStatus.CONFLICT),
    (Sealed, HTTPStatus.CONFLICT),
    (PermissionDenied, HTTPStatus.FORBIDDEN),
    (UsageError, HTTPStatus.BAD_REQUEST),
    (LeaseExpired, HTTPStatus.CONFLICT),
    (RowsChanged, HTTPStatus.CONFLICT),
    (EndOfTable, HTTPStatus.GONE),
    (DeadlineExceeded, HTTPStatus.GATEWAY_TIMEOUT),
    (FlowSignal, HTTPStatus.SERVICE_UNAVAILABLE),
    (OutOfMemory, HTTPStatus.INSUFFICIENT_STORAGE),
    (PeerError, HTTPStatus.SERVICE_UNAVAILABLE),
    (TransferQueueError, HTTPStatus.INTERNAL_SERVER_ERROR),
)
"""The first class in this list that an error is an instance of gives its status."""


def status_of(error: TransferQueueError) -> HTTPStatus:
    """The HTTP status of an error."""
    return next(status for kind, status in STATUS if isinstance(error, kind))
