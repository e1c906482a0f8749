"""What a snapshot restores in an empty ledger: rows, states, groups, steps, clock, counts; leases end."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.ledger.driver import Driver, World
from tests.ledger.test_determinism import run
from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.ledger import Ledger
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot
from transferqueue.ledger.persistence.snapshot_checks import check
from transferqueue.ledger.table_state import Absence
from transferqueue.limits import PAGE_BYTES, PAGE_ROWS, Limits
from transferqueue.policies import Complete, DeliverPartial, LongestFirst, Manual, Pacing, Recorded, Refill, Retry, Task
from transferqueue.schema import Field, align
from transferqueue.wire import messages as m


def moved(snapshot: LedgerSnapshot, world: World) -> LedgerSnapshot:
    """The same snapshot, with every block in an extent of its own in the arena of `world`."""
    blocks = {}
    for number, at in snapshot.blocks.items():
        offset, nbytes = world.allocate(max(at.nbytes, 1))
        world.taken[-number] = (offset, nbytes)
        blocks[number] = msgspec.structs.replace(at, offset=offset, nbytes=at.nbytes)
    snapshot.blocks = blocks
    return snapshot


def restored(world: World) -> tuple[World, Driver]:
    other = World(now=100.0)
    snapshot = moved(world.ledger.take_snapshot(world.now), other)
    other.ledger.restore_snapshot(snapshot, other.now)
    extents = other.ledger.state.core.blocks.extents
    other.taken = {one.id: (one.offset, align(max(one.nbytes, 1), PAGE_BYTES)) for one in extents.values()}
    return other, other.client()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    return world.client()


def test_a_snapshot_is_restored_only_into_an_empty_ledger(world: World, client: Driver) -> None:
    client.create("rollouts")
    snapshot = world.ledger.take_snapshot(world.now)
    with pytest.raises(UsageError, match=r"into an empty deployment; this one has rollouts: start another server"):
        world.ledger.restore_snapshot(snapshot, world.now)


def test_texts_after_a_restore_say_who_is_missing(world: World, client: Driver) -> None:
    client.create(tasks=[Task("reward", ["x"], ["reward"]), Task("train", ["x", "reward"])])
    client.put(2, inline={"x": 1.0})
    other = World(now=100.0)
    gone = Absence("reward-0, which ended", 3.0)
    other.ledger.explain_absence_with(lambda table, task, now: gone if task == "reward" else None)
    other.ledger.restore_snapshot(world.ledger.take_snapshot(world.now), other.now)
    with pytest.raises(DeadlineExceeded, match="reward-0, which ended"):
        other.client().lease("train", 2)


def test_rows_keep_ids_facts_values_keys_and_tags(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train")])
    client.put(PAGE_ROWS + 3, inline={"x": range(PAGE_ROWS + 3)}, tokens=range(PAGE_ROWS + 3))
    client.put(2, keys=["a", "b"], tags=[{"n": 1}, {}], policy_version=4, priority=2.5)
    client.ack(client.lease("train", PAGE_ROWS))
    other, again = restored(world)
    content, wanted = again.read(), client.read()
    assert content == wanted
    assert again.put(1) == [PAGE_ROWS + 5]
    assert again.lease("train", 3).rows == [PAGE_ROWS, PAGE_ROWS + 1, PAGE_ROWS + 2]
    assert other.audit().balanced


@pytest.mark.timeout(60)
def test_a_snapshot_of_many_recorded_rows_with_tags_takes_little_time(world: World, client: Driver) -> None:
    """Tags of rows that wait for their file are left out, by one search for all."""
    rows, at_once = 1 << 16, 1 << 13
    client.create(tasks=[Task("train")], retention=Recorded("run"), limits=Limits(rows=rows))
    for _ in range(rows // at_once):
        client.put(at_once, tags=[{"source": "math"}] * at_once)
    client.drop([0])
    (table,) = world.ledger.take_snapshot(world.now).tables
    assert sorted(table.tags) == list(range(1, rows))


def test_leases_end_as_no_attempt_and_attempts_are_kept(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train", retry=Retry(attempts=3))])
    client.put(3)
    client.release(client.lease("train", 1), failed=True)
    client.lease("train", 2)
    other, again = restored(world)
    assert again.lease("train", 3).rows == [0, 1, 2]
    assert other.table().tasks["train"].attempts.a[:3].tolist() == [1, 0, 0]


def test_steps_the_checkpoint_and_the_cursor_are_kept(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train")])
    client.put(3, ordinal=[0, 1, 2])
    for step in range(3):
        client.ack(client.lease("train", 1), step=step)
    client.checkpointed(0)
    _other, again = restored(world)
    assert again.cursor() == 1
    assert again.rollback(1).rows == 1
    assert again.checkpointed(1).rows == 1
    assert again.lease("train", 1).rows == [2]
    with pytest.raises(UsageError, match="cannot go back to step 0"):
        again.rollback(0)


def test_order_is_that_of_the_selector_and_of_arrival(world: World, client: Driver) -> None:
    client.create(tasks=[Task("long", selector=LongestFirst()), Task("fifo", needs=["x"])])
    rows = client.put(4, tokens=[1, 3, 2, 3])
    client.update([rows[2]], inline={"x": 1.0})
    client.update([rows[0]], inline={"x": 1.0})
    _other, again = restored(world)
    assert again.lease("long", 4).rows == [1, 3, 2, 0]
    assert again.lease("fifo", 2).rows == [2, 0]


def test_groups_go_on_as_they_were(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train", groups=Complete(incomplete=DeliverPartial(), min_size=2, deadline_s=9))])
    client.put(3, group_id=7, group_size=4)  # forming, with a deadline
    client.put(2, group_id=1, group_size=2)  # queued
    client.put(2, group_id=2, group_size=2)
    out = client.lease("train", groups=1)
    assert out.rows == [3, 4]
    world.pass_time(5)
    other, again = restored(world)
    lease = again.lease("train", groups=2)
    assert sorted(lease.rows) == [3, 4, 5, 6]
    assert other.ledger.next_deadline() == 104.0
    other.pass_time(5)
    assert again.lease("train", groups=1).rows == [0, 1, 2]


def test_promised_refills_are_asked_for_again(world: World, client: Driver) -> None:
    client.create(
        tasks=[Task("train", groups=Complete(incomplete=Refill()))], pacing=Pacing("train", 4), limits=Limits(rows=16)
    )
    rows = client.put(2, group_id=0, group_size=2)
    client.drop([rows[0]])
    assert client.reserve(1).refills == [(0, 1)]
    other, again = restored(world)
    assert again.reserve(1).refills == [(0, 1)]
    assert other.table().flow.reserved == 1


def test_terms_clock_seal_and_counts_are_kept(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train")], pacing=Pacing("train", 2, max_staleness=1), retention=Manual())
    client.put(4, policy_version=[0, 0, 1, 1])
    client.ack(client.lease("train", 1))
    client.advance(2)
    client.seal()
    other, again = restored(world)
    before, after = world.stats(), other.stats()
    for name in (
        "rows_put",
        "rows_done",
        "dropped",
        "rows_live",
        "rows_resident",
        "version",
        "sealed",
        "staleness",
        "staleness_in_queue",
    ):
        assert getattr(before, name) == getattr(after, name), name
    again.advance(3)
    assert other.stats().dropped == {"stale": 3}


def test_bytes_are_freed_when_their_last_row_is(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train")])
    client.put(3, ["a", "b"])
    client.put(2, ["a"])
    other, again = restored(world)
    assert other.table().usage.bytes >= world.table().usage.bytes
    again.ack(again.lease("train", 3))
    again.ack(again.lease("train", 2))
    again.close()
    assert not other.ledger.state.core.blocks.extents


def test_weights_are_kept(world: World, client: Driver) -> None:
    block = client.block([Field("w", "float32", (4,))], 1)
    client.apply(m.Publish("actor", 3, [Field("w", "float32", (4,))], [block]))
    _other, again = restored(world)
    weights = again.apply(m.Pull("actor"))
    assert (weights.version, [one.name for one in weights.fields], weights.blocks[0].nbytes) == (3, ["w"], block.nbytes)
    with pytest.raises(UsageError):
        again.apply(m.Publish("actor", 2, [], []))


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_balance_and_a_second_snapshot_is_the_same(seed: int) -> None:
    _, fuzz = run(seed, 300)
    check(fuzz.ledger.take_snapshot(fuzz.now))
    snapshot = fuzz.ledger.take_snapshot(1e6)
    check(snapshot)
    other = Ledger()
    arena = World()
    other.restore_snapshot(moved(snapshot, arena), 0.0)
    assert other.observe(m.Observe("audit"), 0.0).balanced
    second = other.take_snapshot(0.0)
    third = Ledger()
    third.restore_snapshot(moved(other.take_snapshot(0.0), World()), 0.0)
    assert_alike(second, third.take_snapshot(0.0))


def assert_alike(one: LedgerSnapshot, other: LedgerSnapshot) -> None:
    for left, right in zip(one.tables, other.tables, strict=True):
        assert (left.terms, left.counts, left.keys, left.tags) == (right.terms, right.counts, right.keys, right.tags)
        for mine, theirs in ((left.rows, right.rows), (left.groups, right.groups), *_tasks(left, right)):
            for name in mine:
                if name not in ("age_s", "order"):
                    np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


def _tasks(left: Any, right: Any) -> list[tuple[Any, Any]]:
    return [(left.tasks[name], right.tasks[name]) for name in left.tasks]
