"""Finds the clients of the previous run after a server was restarted.

- A client that is alive continues its session with its leases, grants and pins. No other client got them meanwhile.
- The kernel tells which clients died while no server ran. Their leases end at once. Their memory returns when their
  lock is free.
- A remote shard is a session too: either it continues with all its extents, or it is lost (`Part.sessions_resumed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from transferqueue.errors import listing
from transferqueue.server.coordinator import Coordinator
from transferqueue.server.sessions import liveness
from transferqueue.server.sessions.exit_status import DIED
from transferqueue.server.sessions.session_table import decode_hello
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.server")

ReopenProcess = Callable[[m.Hello], tuple[liveness.ProcessHandle | None, bool]]
"""As `liveness.reopen_process`."""


class PreviousRun(Protocol):
    """The facts about the previous run that `resume_sessions` needs. See `StateDirectory`."""

    @property
    def rebooted(self) -> bool:
        """Whether the machine was rebooted since. Then no process of the previous run is alive."""

    def clock(self) -> float:
        """Seconds for which servers of this state have run."""

    def damaged(self) -> list[int]:
        """The numbers of blocks whose bytes do not match their checksum."""


def resume_sessions(
    coordinator: Coordinator, state: PreviousRun, reopen: ReopenProcess = liveness.reopen_process
) -> dict[str, list[int]]:
    """Find every client that the ledger knows, and end those that died. Then report damaged blocks as lost.

    Returns the rows that were dropped because of damage, by table.
    """
    now = state.clock()
    _find_sessions(coordinator, now, reopen, rebooted=state.rebooted)
    dropped: dict[str, list[int]] = {}
    if damaged := state.damaged():
        values = _listed(coordinator.ledger.values_in(damaged))
        dropped = coordinator.ledger.blocks_lost(damaged, now)
        _log.error(
            "%d blocks are damaged on disk. Values that are gone: %s. Rows that were dropped for it, by table: %s; the "
            "others go on without these values, which are made again where a task waits for them",
            len(damaged),
            values,
            dropped,
        )
    coordinator.tick(now)
    return dropped


def _listed(values: dict[str, dict[str, list[int]]]) -> str:
    """Fields and rows as text, such as ``table "t", field "x": rows 3, 4``."""
    texts = [
        f'table "{table}", field "{field}": rows {listing(rows)}'
        for table, fields in values.items()
        for field, rows in fields.items()
    ]
    return "; ".join(texts) or "none of a row"


def _find_sessions(coordinator: Coordinator, now: float, reopen: ReopenProcess, *, rebooted: bool) -> None:
    ledger = coordinator.ledger
    granted = ledger.extents  # before any session ends: a remote shard keeps the memory that this frees until told
    for known in ledger.known_sessions():
        hello = decode_hello(known.id, known.origin)
        process, alive = (None, False) if rebooted else reopen(hello)
        if process is None:
            _close_dead_session(coordinator, known.id, hello, now)
        else:
            session = coordinator.sessions.restore(known.id, hello, process, now)
            if alive and known.open:
                coordinator.clients.watch(session)
            else:
                coordinator.clients.end(session, now, "", how=DIED)
    for part in coordinator.parts:
        part.sessions_resumed(granted)


def _close_dead_session(coordinator: Coordinator, session: int, hello: m.Hello, now: float) -> None:
    coordinator.ledger.close_session(session, now)
    if coordinator.ledger.knows_session(session):  # it was closed before, and its memory was still in view
        coordinator.ledger.end_pins(session)
    for part in coordinator.parts:
        part.session_ended(hello, now)
