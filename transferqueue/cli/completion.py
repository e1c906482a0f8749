"""Shell completion: tables and rows of a running server, pages and public names.

A completion prints no error and does not wait long: without an answer within `COMPLETE_S`, it offers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from transferqueue.cli.connection import address_of, check_sockets
from transferqueue.errors import TransferQueueError

if TYPE_CHECKING:
    from transferqueue.client import Queue

COMPLETE_S: Final = 0.5
"""A server on this machine answers in milliseconds; a person who presses Tab does not wait longer."""
EVENTS_LOOKED_AT: Final = 64
ROWS_SHOWN: Final = 20

T = TypeVar("T")
Candidate = tuple[str, str]
"""A word, and its explanation, which zsh and fish show."""


def complete_table(context: typer.Context, incomplete: str) -> list[str]:
    """Names of tables that begin so."""
    return [name for name in _asked(context, lambda queue: queue.tables()) if name.startswith(incomplete)]


def complete_row(context: typer.Context, incomplete: str) -> list[Candidate]:
    """Rows of the named table that begin so, from its latest events, the latest first, each with its last event."""
    table = context.params.get("table") or ""
    rows = _asked(context, lambda queue: _recent_rows(queue, table)) if table else []
    return [row for row in rows if row[0].startswith(incomplete)][:ROWS_SHOWN]


def complete_page(incomplete: str) -> list[str]:
    """Pages of the documentation and public names that begin so."""
    import transferqueue as tq
    from transferqueue.cli.doc_pages import pages

    return [name for name in (*pages(), *sorted(tq.__all__)) if name.startswith(incomplete)]


def _asked(context: typer.Context, question: Callable[[Queue], list[T]]) -> list[T]:
    """The answer of the server that the command line so far names; nothing if there is none."""
    with suppress(TransferQueueError), _connected(context) as queue:
        return question(queue)
    return []


@contextmanager
def _connected(context: typer.Context) -> Iterator[Queue]:
    import transferqueue as tq

    address = address_of(context.params.get("where") or context.params.get("address"))
    check_sockets(address)
    with tq.connect(address, timeout_s=COMPLETE_S, label="completion") as queue:
        yield queue


def _recent_rows(queue: Queue, table: str) -> list[Candidate]:
    end = queue.events(table).next
    latest: dict[int, str] = {}
    for event in queue.events(table, after=max(end - EVENTS_LOOKED_AT, 0)).events:
        for row in event.rows[-ROWS_SHOWN:]:
            latest.pop(row, None)
            latest[row] = f"{event.what} {event.task}".strip()
    return [(str(row), what) for row, what in reversed(latest.items())]
