"""A row's life as the page shows it: sessions by name, because their numbers exceed the integers of JavaScript."""

from __future__ import annotations

import msgspec

from transferqueue.wire.answers.row import RowLife


class LabelledRowLife(msgspec.Struct, frozen=True, kw_only=True):
    """A row's life with the names of sessions, "" for no session.

    Attributes:
        life: The life of the row.
        put_by: The session that put it.
        held_by: By task, the session that leases it.
        done_by: The session of each event, in order.
    """

    life: RowLife
    put_by: str
    held_by: dict[str, str]
    done_by: list[str]


def named(life: RowLife) -> LabelledRowLife:
    """Add the labels of the sessions to a row's life."""
    return LabelledRowLife(
        life=life,
        put_by=life.name_of(life.put_by),
        held_by={task: life.name_of(where.session) for task, where in life.tasks.items()},
        done_by=[life.name_of(event.session) for event in life.events],
    )
