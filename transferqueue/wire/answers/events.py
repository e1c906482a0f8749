"""What happened to rows of a table since an earlier answer."""

from __future__ import annotations

from typing import Annotated

from transferqueue.wire.answers.answer import Answer
from transferqueue.wire.answers.row import RowEvent


class RowsEvent(RowEvent, frozen=True, kw_only=True):
    """Something that happened to rows."""

    rows: Annotated[list[int], "Ids of the chosen rows, at most 65,536."] = []
    omitted: Annotated[int, "Chosen rows that it does not name."] = 0


class EventsAnswer(Answer, frozen=True, kw_only=True):
    """Events of a table, oldest first, and where the next answer begins."""

    now_s: Annotated[float, "The server's clock."]
    epoch: Annotated[int, "This life of the coordinator."] = 0
    next: Annotated[int, "Give it as `after` of the next call."]
    missed: Annotated[int, "Events between that the server had forgotten: it remembers 4,096 of a table."] = 0
    more: Annotated[bool, "Ask again at once: an answer has at most 1,024 events, or 65,536 rows."] = False
    events: Annotated[list[RowsEvent], "Oldest first."] = []
