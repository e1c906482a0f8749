"""The error of a request that the server did not answer, and the requests that undo a reply that came too late.

A caller may be interrupted, cancelled or run out of time while the server is about to answer. The reply still arrives,
and with it rows, a reservation, memory or pins. The client returns each at once, so that an abandoned wait never holds
anything until a deadline.
"""

from __future__ import annotations

from transferqueue.errors import DeadlineExceeded, TransferQueueError, Unreachable
from transferqueue.wire import messages as m
from transferqueue.wire.requests import declaration, undo


def discard_reply(request: m.Request, reply: m.Reply) -> list[m.Request]:
    """Requests that undo `reply` to `request`; none if the reply gave nothing."""
    return undo(request, reply, "abandoned wait")


def unanswered(request: m.Request, address: str, wait_s: float, why: str) -> TransferQueueError:
    """The error for a caller whose deadline passed without a word of the server.

    Args:
        request: the request.
        address: of the server.
        wait_s: seconds that the caller gave.
        why: the known cause of the silence.

    Returns:
        `DeadlineExceeded` where a late reply leaves nothing behind, else `Unreachable`: the server may have carried it
        out.
    """
    name = m.tag_of(request)
    silent = f"{address} did not answer {name} within the {wait_s:g} s that it was given; {why}"
    if declaration(request).leaves_nothing:
        return DeadlineExceeded(f"{silent}, so the cause of the wait is not known; nothing was changed")
    return Unreachable(silent + in_doubt(request))


def in_doubt(request: m.Request) -> str:
    """The end of an error about an unanswered request: that it may have been carried out, and the remedy."""
    declared = declaration(request)
    if declared.leaves_nothing:
        return ""
    return f"; whether it was carried out is not known: {declared.unanswered}"
