"""A row's life as the page shows it: sessions by name, since their numbers are longer than those of JavaScript."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from transferqueue.observe.answers.row import RowLife

GONE: Final = "one that is gone"


class LabelledRowLife(msgspec.Struct, frozen=True, kw_only=True):
    """A row's life, and the names of those in it, "" where nobody is. put_by: who put it. held_by: by task, who
    has it on lease. done_by: who did each of the events, in their order.
    """

    life: RowLife
    put_by: str
    held_by: dict[str, str]
    done_by: list[str]


def named(life: RowLife, names: Mapping[int, str]) -> LabelledRowLife:
    """The life, with what people call the sessions that are open."""

    def who(session: int | None) -> str:
        return names.get(session, GONE) if session else ""

    return LabelledRowLife(
        life=life,
        put_by=who(life.put_by),
        held_by={task: who(one.session) for task, one in life.tasks.items()},
        done_by=[who(one.session) for one in life.events],
    )
