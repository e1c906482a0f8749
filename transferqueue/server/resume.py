"""How a server finds the clients of the life before it.

A client that lives goes on under the session it had, with its leases, grants and pins: nobody else gets them meanwhile.
Who died while no server ran is told by the kernel, as ever: its leases return now, its memory once its lock is free.
A shard is a session: it goes on with all that was lent of it, or is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from transferqueue.errors import Corruption, listing
from transferqueue.ledger.rows.blocks import ExtentState
from transferqueue.ledger.sessions import SessionState as Known
from transferqueue.server.sessions import liveness as evidence
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from transferqueue.server.node import Coordinator

_log: Final = logging.getLogger("transferqueue.server")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(m.Hello).decode


FindAgain = Callable[[m.Hello], tuple[evidence.ProcessHandle | None, bool]]
"""As `evidence.reopen_process`."""


class PreviousRun(Protocol):
    """What the life before left, as far as `resume_sessions` asks: see `durable.Durable`."""

    @property
    def rebooted(self) -> bool:
        """Whether the machine was started anew since: no process of then lives."""

    def clock(self) -> float:
        """Seconds that only servers have lived."""

    def damaged(self) -> list[int]:
        """Blocks whose bytes are not what they were."""


def encode_hello(hello: m.Hello) -> bytes:
    """What the ledger keeps of a client, to find it by."""
    return _encode(hello)


def resume_sessions(
    node: Coordinator, state: PreviousRun, find_again: FindAgain = evidence.reopen_process
) -> dict[str, list[int]]:
    """Have a new node go on from `state`: find every client again that the ledger knows, and see to what is damaged.

    Returns the rows that ended for it, by table.
    """
    now = state.clock()
    _find_sessions(node, now, find_again, rebooted=state.rebooted)
    lost: dict[str, list[int]] = {}
    if damaged := state.damaged():
        gone = _told(node.ledger.values_in(damaged))
        lost = node.ledger.blocks_lost(damaged, now)
        _log.error(
            "%d blocks are damaged on disk. Values that are gone: %s. Rows that were dropped for it, by table: %s; the others "
            "go on without these values, which are made again where a task waits for them",
            len(damaged),
            gone,
            lost,
        )
    node.tick(now)
    return lost


def _told(values: dict[str, dict[str, list[int]]]) -> str:
    """Fields and rows for people, such as ``table "t", field "x": rows 3, 4``."""
    told = [
        f'table "{table}", field "{field}": rows {listing(rows)}'
        for table, fields in values.items()
        for field, rows in fields.items()
    ]
    return "; ".join(told) or "none of a row"


def _find_sessions(node: Coordinator, now: float, find_again: FindAgain, *, rebooted: bool) -> None:
    """rebooted: no process of then can live."""
    lent = list(node.ledger.state.core.blocks.extents.values())  # before those of sessions that ended are given back
    for known in list(node.ledger.state.sessions.values()):
        hello = _hello_of(known)
        found, alive = (None, False) if rebooted else find_again(hello)
        if found is None:
            _close_dead_session(node, known, hello, now)
        else:
            session = node.sessions.restore(known.id, hello, found, now)
            if alive and known.open:
                node.watch(session)
            else:
                node.end(session, now)
    _find_shards(node, lent)


def _find_shards(node: Coordinator, extents: list[ExtentState]) -> None:
    """Those whose sessions go on; what the others held is lost already. extents: lent when the last life ended."""
    sessions = list(node.sessions)
    for session in sessions:
        if (offer := session.hello.shard) is not None:
            lent = {one.id: (one.offset, one.nbytes) for one in extents if one.shard == offer.number and not one.lost}
            node.shards.join(session, lent, [one.number for one in sessions])


def _close_dead_session(node: Coordinator, known: Known, hello: m.Hello, now: float) -> None:
    node.ledger.close_session(known.id, now)
    if known.id in node.ledger.state.sessions:  # it was closed before, and lingered
        node.ledger.end_pins(known.id)
    if hello.shard is not None:
        node.ledger.shard_lost(hello.shard.number, now)


def _hello_of(known: Known) -> m.Hello:
    try:
        return _decode(known.origin)
    except msgspec.MsgspecError as error:
        raise Corruption(f"session {known.id} of the journal says nothing of its process: {error}") from error
