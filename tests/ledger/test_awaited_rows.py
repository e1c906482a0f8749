"""A waiting lease is answered when the rows that it waits for have ended, or when only rows are left that its session
holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import Driver, World, i64
from transferqueue.errors import DeadlineExceeded, EndOfTable, Impossible, ProtocolError, UsageError
from transferqueue.ledger import Blocked
from transferqueue.policies import Compare, Complete, Task
from transferqueue.wire import messages as m


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    client = world.client()
    client.create(tasks=[Task("train", groups=Complete())])
    return client


def put(client: Driver, *groups: int) -> list[int]:
    """Groups of two rows, with neighbouring ordinals."""
    rows = []
    for group in groups:
        rows += client.put(2, group_id=[group] * 2, group_size=[2] * 2, ordinal=[2 * group, 2 * group + 1])
    return rows


def awaiting(client: Driver, *groups: int, units: int = 1, **terms: Any) -> Any:
    """The answer to a lease of `units` groups below the last awaited one. Ended groups come as their numbers."""
    below = [Compare("ordinal", "<", 2 * (max(groups) + 1))]
    spans = i64([number for group in groups for number in (2 * group, 2 * group + 1)])
    reply = client.lease("train", groups=units, where=below, awaited=spans, **terms)
    if isinstance(reply, m.OrdinalsEnded):
        return [int(first) // 2 for first, _ in np.frombuffer(reply.awaited, "<i8").reshape(-1, 2)]
    return reply


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([3], "awaited has 1 ordinals; give the first and the last"),
        ([-1, 2], "names -1 after nothing"),
        ([4, 3], "names 3 after 4"),
        ([0, 3, 3, 4], "names 3 after 3"),
        ([0, 1, -(1 << 63), 5], "spans ascend without overlap"),
    ],
)
def test_spans_that_do_not_ascend_are_refused(client: Driver, spans: list[int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        client.lease("train", groups=1, awaited=i64(spans))
    with pytest.raises(ProtocolError, match="whole number of int64"):
        client.lease("train", groups=1, awaited=bytes(7))


def test_ranks_with_shares_of_a_batch_do_not_await_rows(client: Driver) -> None:
    with pytest.raises(UsageError, match="let one rank lease for all"):
        client.lease("train", groups=2, world=2, awaited=i64([0, 1]))


# ---------------------------------------------------------------- rows that have ended


def test_a_waiting_lease_is_woken_by_the_end_of_its_rows(world: World, client: Driver) -> None:
    rows = put(client, 0, 1)
    other = world.client()
    held = other.lease("train", groups=2)
    waits = awaiting(client, 0, 1, 2, wait_s=9)
    assert isinstance(waits, Blocked)
    world.woken.clear()
    client.drop(rows[2:], "equal")
    assert set(waits.keys) & set(world.woken)
    assert awaiting(client, 0, 1, 2, wait_s=9) == [1]
    assert isinstance(awaiting(client, 0, 2, wait_s=9), Blocked)  # one is leased, the other was never put
    other.ack(held, rows[:2])
    assert awaiting(client, 0, 2, wait_s=9) == [0]
    with pytest.raises(DeadlineExceeded):
        awaiting(client, 2)


def test_rows_that_are_ready_come_before_the_end_of_others(client: Driver) -> None:
    rows = put(client, 0, 1)
    client.drop(rows[:2], "equal")
    assert awaiting(client, 0, 1).rows == rows[2:]
    assert awaiting(client, 0, 1, units=2) == [0]


def test_a_span_with_a_live_row_has_not_ended(client: Driver) -> None:
    rows = put(client, 0)
    client.drop(rows[:1], "late")  # which drops the other member too
    client.put(1, group_id=[9], group_size=[2], ordinal=[1])
    assert isinstance(awaiting(client, 0, wait_s=9), Blocked)


def test_spans_are_judged_as_by_a_plain_set(client: Driver) -> None:
    dice = np.random.default_rng(7)
    live, ended = {}, set()
    for _ in range(200):
        group = int(dice.integers(0, 12))
        if group in live:
            client.drop(live.pop(group), "equal")
            ended.add(group)
        else:
            live[group] = put(client, group)
        asked = sorted(dice.choice(14, 5, replace=False).tolist())
        over = [group for group in asked if group in ended and group not in live]
        reply = awaiting(client, *asked, units=14, wait_s=9)
        assert reply == over if over else isinstance(reply, Blocked)


def test_ended_rows_are_told_before_the_end_of_the_table(client: Driver) -> None:
    rows = put(client, 0, 1)
    client.drop(rows[:2], "equal")
    client.seal()
    assert awaiting(client, 0) == [0]  # the caller then asks for later ones
    assert awaiting(client, 1).rows == rows[2:]


# ---------------------------------------------------------------- rows that the session holds


def test_the_end_waits_for_rows_that_the_session_may_give_back(world: World, client: Driver) -> None:
    rows = put(client, 0)
    client.lease("train", groups=1)
    assert isinstance(client.lease("train", groups=1, wait_s=9, but_held=True), Blocked)
    waits = client.lease("train", groups=1, wait_s=9)
    world.woken.clear()
    client.seal()
    assert set(waits.keys) & set(world.woken)
    assert isinstance(client.lease("train", groups=1, wait_s=9), Blocked)
    with pytest.raises(EndOfTable, match="has drained it but for 2 rows that this session holds"):
        client.lease("train", groups=1, wait_s=9, but_held=True)
    client.drop(rows, "late")
    with pytest.raises(EndOfTable, match=r"has drained it$"):
        client.lease("train", groups=1, but_held=True)


def test_the_end_waits_for_what_another_session_holds(world: World, client: Driver) -> None:
    put(client, 0, 1)
    client.lease("train", groups=1)
    other = world.client()
    theirs = other.lease("train", groups=1)
    client.seal()
    waits = client.lease("train", groups=1, wait_s=9, but_held=True)
    assert isinstance(waits, Blocked)
    world.woken.clear()
    other.ack(theirs)
    assert set(waits.keys) & set(world.woken)
    with pytest.raises(EndOfTable, match="but for 2 rows"):
        client.lease("train", groups=1, wait_s=9, but_held=True)


def test_held_rows_are_ended_before_the_session_hears_of_stranded_ones(client: Driver) -> None:
    client.create("late", tasks=[Task("score", ["x"], ["r"]), Task("log", ["x"])])
    rows = client.put(2, ["x"], table="late")
    client.ack(client.lease("score", 2, table="late"), table="late")
    client.update(rows[:1], inline={"r": 1.0}, table="late")
    client.add_task(Task("train", ["r"]), table="late")
    held = client.lease("train", 1, table="late")
    client.seal("late")
    terms = {"table": "late", "wait_s": 9, "but_held": True}
    with pytest.raises(EndOfTable, match="but for 1 row that"):
        client.lease("train", 1, **terms)
    client.ack(held, table="late")
    with pytest.raises(Impossible, match="can never progress"):
        client.lease("train", 1, **terms)
