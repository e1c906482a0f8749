"""Refuses requests for tables and channels whose home is another coordinator (see
`transferqueue.wire.home_coordinator`)."""

from __future__ import annotations

from transferqueue.errors import TransferQueueError
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.requests import declaration


def wrong_coordinator(index: CoordinatorIndex, request: m.Request) -> TransferQueueError | None:
    """The refusal if a request makes or waits for a table or channel of another coordinator; None if this one is its
    home."""
    home = declaration(request).home
    if home is None:
        return None
    name: str = getattr(request, home.attribute)
    pacing = getattr(request, "pacing", None)
    try:
        index.check(home.kind, name)
        if pacing is not None and pacing.channel is not None:
            index.check_together(name, pacing.channel)
    except TransferQueueError as error:
        return error
    return None
