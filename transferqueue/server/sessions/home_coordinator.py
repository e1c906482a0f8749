"""What a coordinator opens: only what belongs to its index (see `transferqueue.wire.home_coordinator`). Whatever else names a table finds none."""

from __future__ import annotations

from transferqueue.errors import TransferQueueError
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex


def wrong_coordinator(index: CoordinatorIndex, request: m.Request) -> TransferQueueError | None:
    """Why this coordinator will not carry out a request that makes, or waits for, a table or channel; None: it will."""
    try:
        match request:
            case m.CreateTable():
                index.check("table", request.name)
                if request.pacing is not None and request.pacing.channel is not None:
                    index.check_together(request.name, request.pacing.channel)
            case m.OpenTable():
                index.check("table", request.name)
            case (
                m.Publish()
                | m.GetLatestVersion()
                | m.Pull()
                | m.ReportApplied()
                | m.AcquireUpdateSlot()
                | m.ReleaseUpdateSlot()
            ):
                index.check("weight channel", request.channel)
    except TransferQueueError as error:
        return error
    return None
