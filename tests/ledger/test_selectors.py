"""Every selector: its order, each row once, no row lost, no group split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import transferqueue as tq
from tests.ledger.driver import Driver, World
from tests.ledger.model import ROW_ORDERS, Row, rank
from tests.scale import examples
from transferqueue.errors import DeadlineExceeded, EndOfTable, LedgerTorn
from transferqueue.ledger import Ledger, UnitFacts
from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.tasks.ready_queue import ReadyQueue, in_order
from transferqueue.ledger.tasks.selectors import sortable
from transferqueue.ledger.tasks.task_state import ABSENT
from transferqueue.limits import PAGE_ROWS, Limits
from transferqueue.policies import (
    Compare,
    Complete,
    Fifo,
    Freshest,
    LongestFirst,
    OldestVersionFirst,
    Plugin,
    Priority,
    PutOrder,
    Selector,
    TagIs,
    Task,
    TokenBalanced,
)

SELECTORS: list[Selector] = [*ROW_ORDERS, TokenBalanced()]
rows = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from([-2.5, 0.0, 0.5, 7.0])), min_size=1, max_size=40
)


def drain(client: Driver, number: int, **terms: Any) -> list[list[int]]:
    """Leases of a sealed table until its end."""
    batches = []
    while True:
        try:
            batch = client.lease("x", **{"rows": number, **terms})
        except EndOfTable:
            return batches
        batches.append(batch.rows)
        client.ack(batch)


def test_the_order_of_every_selector_is_checked() -> None:
    assert {*map(type, SELECTORS), Plugin} == {*get_args(Selector)}


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda one: type(one).__name__)
@given(facts=rows, cuts=st.lists(st.integers(1, 7), min_size=1), number=st.integers(1, 9))
@settings(max_examples=examples(25))
def test_order_is_that_of_the_policy_and_each_row_comes_once(
    selector: Selector, facts: list[tuple[int, int, float]], cuts: list[int], number: int
) -> None:
    client = World().client()
    client.create(tasks=[Task("x", selector=selector)])
    at = 0
    for cut in cuts * len(facts):
        part = facts[at : at + cut]
        if part:
            version, tokens, priority = zip(*part, strict=True)
            client.put(len(part), policy_version=version, tokens=tokens, priority=priority)
        at += cut
    client.seal()
    placed = [Row(at, version=row[0], tokens=row[1], priority=row[2]) for at, row in enumerate(facts)]
    wanted = [row.id for row in sorted(placed, key=lambda row: rank(selector, [row], row.id))]
    batches = drain(client, number)
    assert [row for batch in batches for row in batch] == wanted
    assert all(len(batch) == number for batch in batches[:-1])


@given(completed=st.permutations(range(12)), number=st.integers(1, 5), task_first=st.booleans())
@settings(max_examples=examples(25))
def test_put_order_is_by_row_whichever_became_ready_first(completed: list[int], number: int, task_first: bool) -> None:
    client = World().client()
    task = Task("x", ["r"], selector=PutOrder())
    client.create(tasks=[task] if task_first else [Task("never", ["s"])])
    client.put(12)
    for row in completed[:9]:
        client.update([row], inline={"r": 1.0})
    if not task_first:
        client.add_task(task)
    batch = client.lease("x", number)
    assert batch.rows == sorted(completed[:9])[:number]
    client.release(batch)  # rows that return keep their place
    for row in completed[9:]:
        client.update([row], inline={"r": 1.0})
    assert client.lease("x", 12).rows == list(range(12))


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda one: type(one).__name__)
@given(data=st.data())
@settings(max_examples=examples(25))
def test_whole_groups_only_under_every_selector(selector: Selector, data: st.DataObject) -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x", ["r"], selector=selector, groups=Complete())])
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8), "sizes")
    waiting = dict(enumerate(sizes))
    seen: list[int] = []
    members: dict[int, list[int]] = {}
    while waiting:
        group = data.draw(st.sampled_from(sorted(waiting)))
        count = data.draw(st.integers(1, waiting[group]))
        waiting[group] -= count
        if not waiting[group]:
            del waiting[group]
        tokens = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        put = client.put(
            count, inline={"r": 0.0}, group_id=group, group_size=sizes[group], tokens=tokens, policy_version=group % 3
        )
        members.setdefault(group, []).extend(put)
        try:
            batch = client.lease("x", groups=1)
        except DeadlineExceeded:
            continue
        whole = [group for group, rows in members.items() if sorted(batch.rows) == sorted(rows)]
        assert len(whole) == 1
        assert whole[0] not in waiting
        seen += batch.rows
        if data.draw(st.booleans()):
            client.ack(batch)
        else:
            client.release(batch)
            seen = [row for row in seen if row not in batch.rows]
    client.seal()
    rest = [row for batch in drain(client, 0, groups=2) for row in batch]
    assert sorted(seen + rest) == sorted(row for rows in members.values() for row in rows)


def test_a_group_ranks_by_its_oldest_member_its_sum_of_tokens_and_its_highest_priority() -> None:
    client = World().client()
    selectors = {"old": OldestVersionFirst(), "new": Freshest(), "long": LongestFirst(), "first": Priority()}
    client.create(tasks=[Task(name, selector=one, groups=Complete()) for name, one in selectors.items()])
    facts = {"policy_version": [5, 5, 1, 9], "tokens": [3, 3, 5, 0], "priority": [1.0, 1.0, 0.0, 2.0]}
    client.put(4, group_id=[0, 0, 1, 1], group_size=2, **facts)
    assert [client.lease(name, groups=1).rows for name in selectors] == [[2, 3], [0, 1], [0, 1], [2, 3]]


def test_a_row_that_comes_back_keeps_its_place() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x")])
    client.put(6)
    first = client.lease("x", 2)
    second = client.lease("x", 2)
    client.release(first, failed=True)
    client.release(second, [3])
    world.pass_time(1)
    assert client.lease("x", 4).rows == [0, 1, 3, 4]


def test_facts_that_change_move_a_ready_row() -> None:
    client = World().client()
    client.create(tasks=[Task("long", selector=LongestFirst()), Task("first", selector=Priority())])
    client.put(3, tokens=[1, 2, 3], priority=[0.0, 1.0, 2.0])
    client.update([0], tokens=9)
    client.update([1], priority=5.0)
    assert client.lease("long", 3).rows == [0, 2, 1]
    assert client.lease("first", 3).rows == [1, 2, 0]


def test_token_budget_takes_what_fits_and_hands_out_alone_what_never_would() -> None:
    client = World().client()
    client.create(tasks=[Task("x")])
    client.put(6, tokens=[4, 4, 3, 50, 0, 2])
    assert client.lease("x", tokens=11).rows == [0, 1, 2]
    assert client.lease("x", tokens=11).rows == [3]
    with pytest.raises(DeadlineExceeded, match="waits for 11 tokens"):
        client.lease("x", tokens=11)
    assert client.lease("x", tokens=11, at_least=3).rows == [4, 5]  # a row never told its tokens counts as one


def test_at_least_is_enough() -> None:
    client = World().client()
    client.create(tasks=[Task("x")])
    client.put(3)
    with pytest.raises(DeadlineExceeded, match="waits for 8 rows"):
        client.lease("x", 8, at_least=4)
    assert client.lease("x", 8, at_least=3).rows == [0, 1, 2]


def test_where_takes_from_the_middle_and_stays_up_to_date() -> None:
    client = World().client()
    client.create(tasks=[Task("x")])
    tags = [{"kind": "math"}, {"kind": "code"}, {}, {"kind": "math"}, {"n": 1}, {"n": True}]
    client.put(6, tags=tags, inline={"reward": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]})
    math = [TagIs("kind", "math")]
    first = client.lease("x", 2, where=math)
    assert first.rows == [0, 3]
    client.put(2, tags=[{"kind": "code"}, {"kind": "math"}])
    assert client.lease("x", 1, where=math).rows == [7]
    client.release(first)
    client.update([0], tags=[{}])
    assert client.lease("x", 2, where=math, at_least=1).rows == [3]
    client.update([2], tags=[{"kind": "math"}])
    assert client.lease("x", 1, where=math).rows == [2]
    assert client.lease("x", 2, where=[TagIs("n", 1)], at_least=1).rows == [4]
    assert client.lease("x", 2, where=[TagIs("n", True)], at_least=1).rows == [5]
    assert client.lease("x", 9, where=[Compare("reward", ">=", 1)], at_least=1).rows == [1]
    assert client.lease("x", 9, at_least=1).rows == [0, 6]


def test_many_different_wheres_are_all_right() -> None:
    client = World().client()
    client.create(tasks=[Task("x")])
    for number in range(40):
        client.put(1, tokens=number)
    for number in reversed(range(0, 40, 2)):
        assert client.lease("x", 1, where=[Compare("tokens", "==", number)]).rows == [number]
    assert client.lease("x", 20).rows == list(range(1, 40, 2))


def test_a_where_waiter_is_woken_by_a_tag() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x")])
    client.put(1)
    where = [TagIs("ok", True)]
    waits = client.lease("x", 1, where=where, wait_s=9)
    world.woken.clear()
    client.update([0], tags=[{"ok": True}])
    assert set(waits.keys) & set(world.woken)
    assert client.lease("x", 1, where=where).rows == [0]


class Shortest:
    """A plugin: fewest tokens first."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.bad = bool(options.get("bad"))

    def keys(self, units: UnitFacts) -> Any:
        return np.zeros(units.count + 1) if self.bad else units.tokens.astype(np.float32)


def test_a_plugin_ranks() -> None:
    world = World(Ledger(selectors={"shortest": Shortest}))
    client = world.client()
    client.create(
        tasks=[Task("x", selector=Plugin("shortest")), Task("y", selector=TokenBalanced(inner=LongestFirst()))]
    )
    client.put(3, tokens=[5, 1, 3])
    assert client.lease("x", 3).rows == [1, 2, 0]
    assert client.lease("y", 3).rows == [0, 2, 1]
    client.create("bad", tasks=[Task("x", selector=Plugin("shortest", {"bad": True}))])
    with pytest.raises(LedgerTorn, match=r"Put met InternalError .*gave float64.* the server ends"):
        client.put(1, table="bad")


# ---------------------------------------------------------------- the ready queue by itself


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=30))
def test_floats_sort_as_their_integers(values: list[float]) -> None:
    found = sortable(np.array(values))
    assert np.array(values)[np.argsort(found, kind="stable")].tolist() == sorted(values)


@given(st.data())
@settings(max_examples=examples(60))
def test_ready_gives_the_alive_in_order_whatever_was_pushed_taken_and_killed(data: st.DataObject) -> None:
    alive: dict[int, tuple[int, int]] = {}

    def stands(units: IntArray, stamps: IntArray) -> Any:
        return np.array([unit in alive and unit == stamp for unit, stamp in zip(units, stamps, strict=True)], np.bool_)

    ready, made = ReadyQueue(stands), 0
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.sampled_from([1, 2, 70, 300, 2000]))
        keys = np.array(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))[np.arange(count) % 1]
        keys = keys + data.draw(st.sampled_from([0, 1])) * (np.arange(count) % 5)
        order = np.arange(made, made + count) * data.draw(st.sampled_from([1, -1]))
        entries = in_order(np.stack([keys, order, np.arange(made, made + count), np.arange(made, made + count)]))
        alive |= {int(unit): (int(key), int(place)) for key, place, _, unit in entries.T}
        made += count
        ready.push(entries, len(alive))
        for victim in list(alive)[:: data.draw(st.sampled_from([2, 3, 1000]))]:
            del alive[victim]
        want = data.draw(st.integers(1, 400))
        expected = sorted(alive, key=lambda unit: alive[unit])[:want]
        assert ready.first(want).tolist() == expected
        taken = data.draw(st.integers(0, len(expected)))
        ready.taken(taken)
        for unit in expected[:taken]:
            del alive[unit]
    assert ready.all()[3].tolist() == sorted(alive, key=lambda unit: alive[unit])


@given(st.data())
@settings(max_examples=examples(60))
def test_ready_gives_ranges_and_returned_rows_in_the_order_in_which_rows_first_came(data: st.DataObject) -> None:
    """As a Fifo task pushes them: new rows as ranges, returned ones with a new stamp and their old order."""
    alive: dict[int, tuple[int, int]] = {}  # unit -> order, stamp
    leased: dict[int, int] = {}

    def stands(units: IntArray, stamps: IntArray) -> Any:
        stand = [
            alive.get(unit, (0, 0))[1] == stamp for unit, stamp in zip(units.tolist(), stamps.tolist(), strict=True)
        ]
        return None if all(stand) else np.array(stand)

    def in_turn() -> list[int]:
        return sorted(alive, key=lambda unit: alive[unit][0])

    ready, stamp, row = ReadyQueue(stands), 0, 0
    for _ in range(data.draw(st.integers(1, 25))):
        row += data.draw(st.sampled_from([0, 0, 3]))
        count = data.draw(st.sampled_from([0, 1, 2, 70, 2000]))
        if count:
            alive |= {row + at: (stamp + at + 1, stamp + at + 1) for at in range(count)}
            ready.push_range(row, stamp + 1, count, len(alive))
            stamp, row = stamp + count, row + count
        returned = list(leased)[:: data.draw(st.sampled_from([1, 3, 1000]))]
        if returned:
            stamps = np.arange(stamp + 1, stamp + 1 + len(returned))
            stamp += len(returned)
            orders = np.array([leased.pop(unit) for unit in returned])
            alive |= dict(zip(returned, zip(orders.tolist(), stamps.tolist(), strict=True), strict=True))
            entries = np.stack([np.zeros_like(stamps), orders, stamps, np.array(returned)])
            ready.push(in_order(entries), len(alive))
        for victim in list(alive)[1 :: data.draw(st.sampled_from([2, 3, 100_000]))]:
            del alive[victim]
        want = data.draw(st.integers(1, 400))
        expected = in_turn()[:want]
        assert ready.first(want).tolist() == expected
        taken = data.draw(st.integers(0, len(expected)))
        ready.taken(taken)
        leased |= {unit: alive.pop(unit)[0] for unit in expected[:taken]}
    assert ready.all()[3].tolist() == in_turn()


def test_rows_put_one_by_one_are_one_range() -> None:
    client = World().client()
    client.create(tasks=[Task("x")])
    for _ in range(20):
        client.put(1)
    client.lease("x", 3)
    client.put(5)
    assert list(client.world.table().tasks["x"].ready._arrivals.ranges) == [[3, 4, 22]]


def test_rows_that_die_in_the_queue_do_not_stay_there() -> None:
    client = World().client()
    client.create(tasks=[Task("x")], limits=Limits(rows=1 << 16))
    for _ in range(60):
        rows = client.put(100)
        client.drop(rows[1:])
    queue = client.world.table().tasks["x"].ready
    assert queue.size < 2 * 60 + 1200
    assert client.lease("x", 60).rows == list(range(0, 6000, 100))


def test_a_number_of_64_bits_is_compared_with_truth_values() -> None:
    """It raised OverflowError in the server: the typed fuzz found it, with seed 705."""
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["b"])])
        table.put(b=[True, False])
        with table.lease("a", rows=2, timeout_s=20, where=tq.Compare("b", "<", (1 << 64) - 1)) as batch:
            assert len(batch) == 2


def test_times_ready_grows_with_every_row_that_becomes_ready_or_returns() -> None:
    client = World().client()
    client.create(tasks=[Task("x", ["r"], selector=PutOrder()), Task("kept", ["never"])])
    answer = client.world.ledger.times_ready
    assert answer("t", "other") is answer("other", "x") is None
    life = answer("t", "x")[0]
    assert answer("t", "x") == (life, 0)
    pending = client.put(4)
    assert answer("t", "x") == (life, 0)
    client.put(3, inline={"r": 1.0})
    client.update(pending, inline={"r": 2.0})
    assert answer("t", "x") == (life, 7)
    first, second = client.lease("x", 3), client.lease("x", 2)
    client.ack(first)
    client.update(pending[-1:], inline={"s": 1.0})
    assert answer("t", "x") == (life, 7)
    client.release(second)
    assert answer("t", "x") == (life, 9)


@pytest.mark.parametrize("selector", [Fifo(), PutOrder(), Freshest()])
def test_a_task_that_is_declared_late_gets_the_rows_of_all_pages(selector: Selector) -> None:
    """Two pages and a bit, with rows that have ended, rows that lack the field, and pages of which nothing is left."""
    client = World().client()
    client.create(tasks=[Task("kept", ["never"])], limits=Limits(rows=1 << 16))
    for _ in range(3):
        client.put(PAGE_ROWS // 2, inline={"r": 1.0})
        client.put(PAGE_ROWS // 2)
    late = client.put(5, inline={"r": 1.0})
    client.drop([*range(3), 7, *range(PAGE_ROWS, 2 * PAGE_ROWS)])
    client.add_task(Task("x", ["r"], selector=selector))
    wanted = [3, 4, 5, 6, *range(8, PAGE_ROWS // 2), *range(2 * PAGE_ROWS, 2 * PAGE_ROWS + PAGE_ROWS // 2), *late]
    assert client.lease("x", len(wanted)).rows == (wanted[::-1] if selector == Freshest() else wanted)
    counts = client.world.table().tasks["x"].counts
    assert (sum(counts), min(counts)) == (client.world.table().rows.pages.resident, 0)
    client.add_task(Task("now", ["r"], from_="now"))
    assert client.world.table().tasks["now"].counts[ABSENT] == client.world.table().rows.pages.resident
