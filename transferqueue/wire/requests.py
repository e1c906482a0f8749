"""Look-ups of what requests declare (see `transferqueue.wire.messages.declarations`)."""

from __future__ import annotations

from transferqueue.wire import messages as m
from transferqueue.wire.messages.declarations import DECLARED, Declaration


def declaration(request: m.Request) -> Declaration:
    """The declaration of a request's class."""
    return DECLARED[type(request)]


def is_notice(request: m.Request) -> bool:
    """Whether a request is answered only if it is refused."""
    return DECLARED[type(request)].reply is None


def undo(request: m.Request, reply: m.Reply, reason: str) -> list[m.Request]:
    """Requests that return the grants of `reply` to `request`; none if it has none. `reason` is for the rows'
    history."""
    declared = DECLARED[type(request)]
    if declared.undo is None or type(reply) is not declared.reply:
        return []
    return declared.undo(request, reply, reason)
