"""The answer to `Queue.events`, typed, as `transferqueue docs observing` describes it."""

from __future__ import annotations

import msgspec


class RowsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to rows. task: "" if none is concerned. session: 0 if none caused it. omitted: rows that
    it does not name."""

    ago_s: float
    what: str
    task: str
    session: int
    detail: str
    rows: list[int]
    omitted: int = 0


class EventsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a table since an earlier answer. next: where the next answer begins. missed: events that the server had
    forgotten."""

    now_s: float
    epoch: int
    next: int
    missed: int
    more: bool
    events: list[RowsEvent]
