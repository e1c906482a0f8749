"""What to do with a reply that nobody waits for any more: hand back at once what it gave.

A caller may be interrupted, cancelled or run out of time while the server is about to answer. The reply
still arrives, and with it rows, a reservation, memory or pins. Each is returned here, so that an abandoned
wait never strands anything until a deadline.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from transferqueue.errors import DeadlineExceeded, TransferQueueError, Unreachable
from transferqueue.wire import messages as m

CHANGES_NOTHING: Final = (
    m.LeaseRequest, m.Reserve, m.Grant, m.Pull, m.ReadRequest, m.Find, m.Observe, m.OpenTable, m.ListTables, m.ListShards, m.GetLatestVersion,
    m.Cursor, m.WatchJob,
)  # fmt: skip
"""Requests whose late replies leave nothing behind: they gave nothing, or what they gave is handed back."""

AGAIN: Final[Mapping[type[m.Message], str]] = {
    m.PutRequest: "if they were, the same put again adds them twice: give rows keys (key=), and the second is AlreadyExists, or look first (find, audit)",
    m.Publish: "if it was, the same publish again is refused, and pull(above=) sees it",
    m.AdvanceClock: "advance to the same version again: it changes nothing twice",
    m.AcquireUpdateSlot: "if it was granted, it ends after its length_s",
    m.SnapshotRequest: "if it was begun, it goes on at the server, and another one is Full until it has ended",
    m.Restore: "if it was begun, it goes on at the server",
    m.Hello: "connect again",
}
"""What is done again after a request of which nobody knows whether it was carried out."""


def give_back(request: m.Request, reply: m.Reply) -> list[m.Request]:
    """Requests that undo `reply` to `request`; none if it gave nothing away."""
    match request, reply:
        case m.LeaseRequest(), m.Leased():
            release = m.ReleaseRequest(
                table=request.table, lease=reply.lease, token=reply.token, reason="abandoned wait"
            )
            return [release, *unpin(blocks_of(reply.content.parts))]
        case m.Reserve(), m.Reserved():
            return [m.Unreserve(table=request.table, reservation=reply.reservation)]
        case _, m.Granted():
            return [m.ReturnGrant(extent=reply.extent)]
        case _, m.ReadRows():
            return unpin(blocks_of(reply.content.parts))
        case _, m.WeightsReply():
            return unpin({block.block: 1 for block in reply.blocks})
    return []


def unanswered(request: m.Request, address: str, wait_s: float) -> TransferQueueError:
    """The error for a caller whose deadline passed without a word of the server.

    `DeadlineExceeded` where a late reply leaves nothing behind; `Unreachable` for what may have been carried out all the same.
    """
    name = m.tag_of(request)
    silent = f"{address} did not answer {name} within the {wait_s:g} s that it was given; the server may be stopped or out of reach"
    if isinstance(request, CHANGES_NOTHING):
        return DeadlineExceeded(f"{silent}, so what is missing is not known; nothing was changed")
    return Unreachable(silent + in_doubt(request))


def in_doubt(request: m.Request) -> str:
    """For the error of a request that nobody answered: what is not known, and what to do about it."""
    if isinstance(request, CHANGES_NOTHING):
        return ""
    again = AGAIN.get(type(request), "ask for the state before it is done again")
    return f"; whether it was carried out is not known: {again}"


def blocks_of(parts: Iterable[m.ReplyColumns]) -> Sequence[int]:
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
