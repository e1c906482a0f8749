"""Handlers of the ledger: one function for each request, registered by a decorator beside its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import TaskState
from transferqueue.wire import messages as m

Outcome = m.Reply | Blocked
"""The reply to a request, or the condition that it waits for."""
Handler = Callable[[Any, Any, SessionState, int], Outcome]
"""(state of the ledger, request, session, call) -> outcome."""
TableHandler = TypeVar("TableHandler", bound=Callable[[TableState, Any, int, float], Outcome])
AnyHandler = TypeVar("AnyHandler", bound=Handler)


class HasTables(Protocol):
    """The part of a ledger's state that operations on rows need. `now`: the latest time that a caller passed."""

    now: float

    def table(self, name: str) -> TableState:
        """A table; `NotFound` if there is none."""

    def task(self, table: str, name: str) -> tuple[TableState, TaskState]:
        """A task of a table; `NotFound` if there is none."""


HANDLERS: Final[dict[type[m.Request], Handler]] = {}
"""Filled when `transferqueue.ledger.dispatch` is imported."""


def carries_out(kind: type[m.Request]) -> Callable[[AnyHandler], AnyHandler]:
    """Register the decorated function for requests of this class."""

    def register(handler: AnyHandler) -> AnyHandler:
        HANDLERS[kind] = handler
        return handler

    return register


def in_table(kind: type[m.Request]) -> Callable[[TableHandler], TableHandler]:
    """Register the decorated function for requests whose `table` must exist: it gets (table, request, session, now)."""

    def register(handler: TableHandler) -> TableHandler:
        def carry_out(state: Any, request: Any, session: SessionState, call: int) -> Outcome:
            return handler(state.table(request.table), request, session.id, state.now)

        HANDLERS[kind] = carry_out
        return handler

    return register
