"""`ListEvents`: what happened to rows, from a position on, for one row in so many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import World
from transferqueue.errors import NotFound, UsageError
from transferqueue.ledger.reports import listed_events
from transferqueue.ledger.reports.listed_events import chosen
from transferqueue.limits import (
    EVENT_ROWS_TOLD_MAX,
    EVENT_TEXT_CHARS_MAX,
    EVENTS_TOLD_MAX,
    HISTORY_EVENTS_MAX,
    NAME_CHARS_MAX,
)
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.answers.events import EventsAnswer


@pytest.fixture
def world() -> World:
    world = World()
    world.client().create(tasks=[Task("train", needs=["x"])])
    return world


def ask(world: World, after: int = -1, every: int = 1, table: str = "t") -> EventsAnswer:
    return world.ledger.events(m.ListEvents(table, after, every), world.now)


def record(world: World, count: int, rows: Any = (1,)) -> None:
    for _ in range(count):
        world.table().history.add(world.now, "updated", np.array(rows, np.int64))


def test_the_first_answer_is_the_position_alone_and_the_next_what_came_since(world: World) -> None:
    record(world, 3)
    first = ask(world)
    assert (first.events, first.next, first.missed, first.more) == ([], 3, 0, False)
    world.table().history.add(world.now, "leased", np.array([4, 5]), "train", 9, "lease 1")
    world.now = 2.5
    answer = ask(world, first.next)
    assert [event.plain() for event in answer.events] == [
        {
            "ago_s": 2.5,
            "what": "leased",
            "task": "train",
            "session": 9,
            "detail": "lease 1",
            "rows": [4, 5],
            "omitted": 0,
        }
    ]
    assert answer.next == 4
    assert ask(world, answer.next).events == []


def test_an_event_of_too_many_rows_says_how_many_it_does_not_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed_events, "EVENT_ROWS_TOLD_MAX", 4)
    record(world, 1, np.arange(10))
    (event,) = ask(world, 0).events
    assert (event.rows, event.omitted) == ([0, 1, 2, 3], 6)


def test_the_text_of_an_event_is_bounded(world: World) -> None:
    client = world.client()
    client.put(1)
    names = [f"f{number:03}".ljust(NAME_CHARS_MAX, "x") for number in range(200)]
    client.update([0], [Field(name, "int64", (None,)) for name in names])
    detail = ask(world, 1).events[0].detail
    assert detail.startswith(names[0])
    assert detail.endswith("... and more")
    assert len(detail) <= EVENT_TEXT_CHARS_MAX + len("... and more")


def test_real_calls_are_events(world: World) -> None:
    client = world.client()
    client.put(2)
    assert [(one.what, one.rows) for one in ask(world, 0).events] == [("put", [0, 1])]


def test_one_row_in_so_many_is_the_same_one_in_every_answer(world: World) -> None:
    rows = np.arange(64_000)
    record(world, 1, rows)
    record(world, 1, rows[::-1])
    (one,) = ask(world, 0, 64).events
    (two,) = ask(world, 1, 64).events
    assert set(one.rows) == set(two.rows)
    assert 800 < len(one.rows) < 1200
    record(world, 1, [row for row in range(100) if row not in one.rows])
    assert ask(world, 2, 64).events == []


def test_groups_and_puts_do_not_decide_which_rows_are_chosen() -> None:
    rows = np.arange(1 << 16)
    for stride in (2, 8, 64, 512):
        members = {int(chosen(rows[start::stride], 64).sum()) > 0 for start in range(min(stride, 8))}
        assert members == {True}


def test_an_answer_is_bounded_and_the_next_goes_on(world: World) -> None:
    record(world, EVENTS_TOLD_MAX + 1)
    answer = ask(world, 0)
    assert (len(answer.events), answer.next, answer.more) == (EVENTS_TOLD_MAX, EVENTS_TOLD_MAX, True)
    assert [len(ask(world, answer.next).events), ask(world, answer.next).more] == [1, False]


def test_many_rows_end_an_answer_early_and_one_event_is_always_told(world: World) -> None:
    record(world, 3, np.arange(EVENT_ROWS_TOLD_MAX // 2 + 1))
    assert [ask(world, 0).next, ask(world, 1).next, ask(world, 1).more] == [1, 2, True]
    record(world, 1, np.arange(EVENT_ROWS_TOLD_MAX + 5))
    (event,) = ask(world, 3).events
    assert len(event.rows) == EVENT_ROWS_TOLD_MAX


def test_what_was_forgotten_is_counted(world: World) -> None:
    record(world, HISTORY_EVENTS_MAX + 10)
    answer = ask(world, 4)
    assert (answer.missed, answer.next) == (6, 10 + EVENTS_TOLD_MAX)
    assert ask(world, 10**15).next == HISTORY_EVENTS_MAX + 10  # a position of an earlier life of the server


@pytest.mark.parametrize(("after", "every"), [(-2, 1), (0, 0)])
def test_what_is_no_position_or_share_is_refused(world: World, after: int, every: int) -> None:
    with pytest.raises(UsageError, match=f"after={after}, every={every}; give"):
        ask(world, after, every)


def test_a_table_that_is_not_there(world: World) -> None:
    with pytest.raises(NotFound, match='table "u"'):
        ask(world, table="u")
