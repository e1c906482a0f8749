"""Unexpected exceptions: each is logged once, with a number, and ends no more than it must.

- Before the ledger writes: the sender gets `InternalError` with that number, and its session ends.
- In a step of a tick: it is counted, and only that step is tried again, after `DEFECT_PAUSE_S`.
- If it tears the ledger, or leaves undone an order of the ledger or the end of a session, the server ends
  (`LedgerTorn`).
- `JournalFailed` is raised again: no client may be told of a change that is not durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar

from transferqueue.errors import InternalError, JournalFailed, LedgerTorn
from transferqueue.limits import DEFECT_PAUSE_S
from transferqueue.server.answers import failed
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.state import ServerState
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.server")
_CAUSE_CHARS: Final = 300
"""A client gets this much of the text of an unexpected exception. The log has all of it."""

T = TypeVar("T")

Step = tuple[str, Callable[[float], object]]
"""A step of a tick, and its name."""


class Defects:
    """The defects that one server met."""

    def __init__(self, state: ServerState) -> None:
        self.sessions: Final[list[tuple[int, str]]] = []
        """Sessions that a defect ends, and the reason for their waiting requests."""
        self._state = state
        self._paused: dict[str, float] = {}
        """Steps of the tick in which a defect occurred, and the time of their next try."""

    def caught(self, what: str, error: Exception, session: OpenSession | None = None) -> m.Failed:
        """Count and log an unexpected exception, and end its session. Returns the error for its client."""
        if isinstance(error, JournalFailed):
            raise error
        if self._state.ledger.torn:
            raise torn(what, error) from error
        self._state.counters.internal_errors += 1
        number = f"{self._state.identity.epoch}-{self._state.counters.internal_errors}"
        _log.error("defect %s: %s failed%s", number, what, f" for {session.label}" if session else "", exc_info=error)
        if session is not None:
            self.sessions.append((session.number, f"the server met defect {number}"))
        text = f"{type(error).__name__}: {str(error)[:_CAUSE_CHARS]}"
        over = "; this session is over, connect again" if session else ""
        return failed(
            InternalError(f"{what} failed ({text}){over}; please report defect {number} with the server's log")
        )

    def guard(self, what: str, act: Callable[[], T], session: OpenSession | None = None) -> T | m.Failed:
        """Do one of several steps, without which the server works on. Returns its result, or the error for the client
        after a defect, which is logged and ends the session."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001  (logged with its cause)
            return self.caught(what, error, session)

    def must(self, what: str, act: Callable[[], object]) -> None:
        """Do a step that the ledger, or the end of a session, demands. A defect ends the server."""
        try:
            act()
        except JournalFailed:
            raise
        except Exception as error:
            raise torn(what, error) from error

    def tick(self, steps: Iterable[Step], now: float) -> None:
        """Do all steps that are not paused."""
        for name, step in steps:
            if self._paused and now < self._paused.get(name, now):
                continue
            if isinstance(self.guard(f"tick ({name})", partial(step, now)), m.Failed):
                self._paused[name] = now + DEFECT_PAUSE_S
        if self._paused:
            self._paused = {name: until for name, until in self._paused.items() if until > now}

    def next_tick(self, due: float | None) -> float | None:
        """When to call `tick`, if a step is due at `due`: not before the end of a pause."""
        return due if due is None or not self._paused else max(due, min(self._paused.values()))


def torn(what: str, error: Exception) -> LedgerTorn:
    """The end of the server, since `what` was not done."""
    return LedgerTorn(
        f"{what} met {type(error).__name__} ({error}) and was not done, so the state of the server is not known and it "
        "ends. With durability process or disk the next run continues from the journal"
    )
