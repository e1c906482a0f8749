"""What undoes a reply that could not be sent: the rows, pins and permissions it gave go back."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from transferqueue.wire import messages as m


def withdraw(request: m.Request, reply: m.Reply) -> list[m.Request]:
    """Requests that undo `reply` to `request`. Only replies that name many rows can be too large to send."""
    match request, reply:
        case m.LeaseRequest(), m.Leased():
            release = m.ReleaseRequest(
                request.table, reply.lease, reply.token, reason="the reply was too large to send"
            )
            return [release, *_unpin(reply.content.parts)]
        case _, m.ReadRows():
            return _unpin(reply.content.parts)
    return []


def _unpin(parts: Iterable[m.ReplyColumns]) -> list[m.Request]:
    blocks = list(dict.fromkeys(block.block for part in parts for block in part.blocks))
    if not blocks:
        return []
    form = f"<{len(blocks)}q"
    return [m.Unpin(struct.pack(form, *blocks), struct.pack(form, *(1 for _ in blocks)))]
