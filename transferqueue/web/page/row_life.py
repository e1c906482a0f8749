"""A row's life as the page shows it: sessions by name, because their numbers exceed the integers of JavaScript."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from transferqueue.observe.answers.row import RowLife

GONE: Final = "one that is gone"


class LabelledRowLife(msgspec.Struct, frozen=True, kw_only=True):
    """A row's life, with the names of sessions, "" where there is none. put_by: the session that put it. held_by: by task, the session
    that has it on lease. done_by: the session of each event, in order.
    """

    life: RowLife
    put_by: str
    held_by: dict[str, str]
    done_by: list[str]


def named(life: RowLife, names: Mapping[int, str]) -> LabelledRowLife:
    """Add the labels of the sessions to a row's life. names: labels of the open sessions."""

    def who(session: int | None) -> str:
        return names.get(session, GONE) if session else ""

    return LabelledRowLife(
        life=life,
        put_by=who(life.put_by),
        held_by={task: who(event.session) for task, event in life.tasks.items()},
        done_by=[who(event.session) for event in life.events],
    )
