"""Operations of the ledger: one function for each request, registered by a decorator beside its code."""

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
Operation = Callable[[Any, Any, SessionState, int], Outcome]
"""(state of the ledger, request, session, call) -> outcome."""
TableOperation = TypeVar("TableOperation", bound=Callable[[TableState, Any, int, float], Outcome])
AnyOperation = TypeVar("AnyOperation", bound=Operation)


class HasTables(Protocol):
    """The part of a ledger's state that operations on rows need. `now`: the latest time that a caller passed."""

    now: float

    def table(self, name: str) -> TableState:
        """A table; `NotFound` if there is none."""

    def task(self, table: str, name: str) -> tuple[TableState, TaskState]:
        """A task of a table; `NotFound` if there is none."""


OPERATIONS: Final[dict[type[m.Request], Operation]] = {}
"""Filled when `transferqueue.ledger.dispatch` is imported."""


def carries_out(kind: type[m.Request]) -> Callable[[AnyOperation], AnyOperation]:
    """Register the decorated function for requests of this class."""

    def register(operation: AnyOperation) -> AnyOperation:
        OPERATIONS[kind] = operation
        return operation

    return register


def in_table(kind: type[m.Request]) -> Callable[[TableOperation], TableOperation]:
    """Register the decorated function for requests whose `table` must exist: it gets (table, request, session, now)."""

    def register(operation: TableOperation) -> TableOperation:
        def carry_out(state: Any, request: Any, session: SessionState, call: int) -> Outcome:
            return operation(state.table(request.table), request, session.id, state.now)

        OPERATIONS[kind] = carry_out
        return operation

    return register
