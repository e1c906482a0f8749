"""A row's life as the page shows it: sessions by name, because their numbers exceed the integers of JavaScript; and of
a row that lives, what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.errors import ColumnFreed, NotFound, TransferQueueError
from transferqueue.web.rollouts.document import RowContent, content_of
from transferqueue.web.rollouts.questions import REWARDS
from transferqueue.web.rollouts.tokenizer import RunTexts
from transferqueue.wire.answers.row import RowLife

_SHAPES: Final = ((), (None,))
"""Of the columns that are shown. Arrays of several dimensions are not read."""
_VALUE: Final = "value"


class LabelledRowLife(msgspec.Struct, frozen=True, kw_only=True):
    """A row's life with the names of sessions, "" for no session.

    Attributes:
        life: The life of the row.
        put_by: The session that put it.
        held_by: By task, the session that leases it.
        done_by: The session of each event, in order.
        content: What it says; None: it ended.
    """

    life: RowLife
    put_by: str
    held_by: dict[str, str]
    done_by: list[str]
    content: RowContent | None = None


def named(life: RowLife, content: RowContent | None = None) -> LabelledRowLife:
    """Add the labels of the sessions to a row's life."""
    return LabelledRowLife(
        life=life,
        put_by=life.name_of(life.put_by),
        held_by={task: life.name_of(where.session) for task, where in life.tasks.items()},
        done_by=[life.name_of(event.session) for event in life.events],
        content=content,
    )


async def live_content(queue: tq.AsyncQueue, life: RowLife, texts: Callable[[], RunTexts]) -> RowContent | None:
    """Read what a row says, without a lease; None if it has ended. texts: is called in another thread."""
    if life.state != "live":
        return None
    try:
        table = await queue.table(life.table)
        fields = {name: field for name, field in table.fields.items() if _is_shown(life, name, field)}
        rows = await table.read([life.row], fields=list(fields))
        try:
            row = {name: _value(rows[name], field) for name, field in fields.items()}
        finally:
            rows.release()
    except (NotFound, ColumnFreed):  # it ended, or a column of it did
        return None
    except (TransferQueueError, TypeError, ValueError) as error:  # bytes that are lost, a type that Arrow lacks
        return RowContent(why_not=f"what the row says cannot be read: {error}")
    row["_tokens"] = life.tokens
    return await asyncio.to_thread(_content, row, texts)


def _content(row: dict[str, Any], texts: Callable[[], RunTexts]) -> RowContent:
    found = texts()
    return content_of(row, next((name for name in REWARDS if name in row), ""), found.terms, found.decode)


def _is_shown(life: RowLife, name: str, field: tq.Field) -> bool:
    """Whether the row has a column, of one value or one list."""
    return name in life.fields and life.fields[name].set and field.shape in _SHAPES


def _value(column: Any, field: tq.Field) -> Any:
    """The value of the only row of a column, in plain Python as a record has it."""
    return column.list()[0] if field.dtype == _VALUE else column.arrow().to_pylist()[0]
