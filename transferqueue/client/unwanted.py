"""What to do with a reply that nobody waits for any more: hand back at once what it gave.

A caller may be interrupted, cancelled or run out of time while the server is about to answer. The reply
still arrives, and with it rows, a reservation, memory or pins. Each is returned here, so that an abandoned
wait never strands anything until a deadline.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from transferqueue.wire import messages as m


def give_back(request: m.Request, reply: m.Reply) -> list[m.Request]:
    """Requests that undo `reply` to `request`; none if it gave nothing away."""
    match request, reply:
        case m.Lease(), m.Leased():
            release = m.Release(table=request.table, lease=reply.lease, token=reply.token, reason="abandoned wait")
            return [release, *unpin(blocks_of(reply.content.parts))]
        case m.Reserve(), m.Reserved():
            return [m.Unreserve(table=request.table, reservation=reply.reservation)]
        case _, m.Granted():
            return [m.ReturnGrant(extent=reply.extent)]
        case _, m.ReadRows():
            return unpin(blocks_of(reply.content.parts))
        case _, m.Weights():
            return unpin({block.block: 1 for block in reply.blocks})
    return []


def blocks_of(parts: Iterable[m.Part]) -> Sequence[int]:
    """The blocks that a reply names, each once: that many pins it took."""
    return list(dict.fromkeys(block.block for part in parts for block in part.blocks))


def unpin(blocks: Iterable[int]) -> list[m.Request]:
    """The notice that one pin of each of `blocks` is returned; nothing for no blocks."""
    counts: dict[int, int] = {}
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1
    if not counts:
        return []
    form = f"<{len(counts)}q"
    return [m.Unpin(blocks=struct.pack(form, *counts), counts=struct.pack(form, *counts.values()))]
