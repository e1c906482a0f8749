"""Staleness, reservations, capacity, seal: bounds of the table, and the end of every wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import DeadlineExceeded, EndOfTable, Full, LeaseExpired, NotFound, Sealed
from transferqueue.ledger import Blocked
from transferqueue.limits import Limits
from transferqueue.policies import (
    Acked,
    DropStale,
    HoldClock,
    KeepStale,
    Manual,
    OldestVersionFirst,
    Pacing,
    Requeue,
    Retry,
    Task,
    VersionBetween,
)
from transferqueue.schema import Field
from transferqueue.wire import messages as m

DROP = DropStale()


def paced(on_stale: Any = DROP, *, bound: int | None = 1, rows: int = 64, **terms: Any) -> tuple[World, Driver]:
    world = World()
    client = world.client()
    tasks = [Task("grade", ["r"], ["score"]), Task("train", ["r", "score"], lease_s=50)]
    pacing = Pacing("train", 4, 1, bound, on_stale)
    client.create(tasks=tasks, limits=Limits(rows=rows), pacing=pacing, **terms)
    return world, client


def graded(client: Driver, count: int, version: Any) -> list[int]:
    rows: list[int] = client.put(count, inline={"r": 0.0, "score": 1.0}, policy_version=version)
    return rows


# ---------------------------------------------------------------- staleness


def test_no_row_over_the_bound_is_handed_over() -> None:
    world, client = paced()
    graded(client, 4, [0, 1, 2, -1])
    client.advance(3)
    assert client.lease("train", 4, at_least=1).rows == [2, 3]  # never stamped is never stale
    assert world.table().rows_dropped == {"stale": 2}


def test_rows_in_work_were_handed_over_in_bound_and_are_judged_when_they_return() -> None:
    world, client = paced()
    graded(client, 2, 0)
    batch = client.lease("train", 2)
    client.advance(5)
    client.ack(batch, [0])
    client.release(batch)
    assert (world.stats().rows_live, world.table().rows_dropped) == (1, {"stale": 1})


def test_a_row_stamped_old_is_stale_on_arrival_and_by_update() -> None:
    world, client = paced()
    client.advance(5)
    graded(client, 1, 3)
    fresh = graded(client, 2, 5)
    client.update(fresh[:1], policy_version=1)
    assert world.table().rows_dropped == {"stale": 2}


def test_a_new_stamp_makes_a_row_fresh() -> None:
    world, client = paced()
    rows = graded(client, 1, 0)
    client.update(rows, policy_version=4)
    client.advance(5)
    assert world.stats().rows_live == 1
    client.advance(6)
    assert world.table().rows_dropped == {"stale": 1}


def test_a_result_of_a_row_dropped_meanwhile_is_left_out() -> None:
    """One row of a batch went stale while it was graded: the others' results count, and the worker is told how many."""
    world, client = paced()
    client.put(3, inline={"r": 0.0}, policy_version=[0, 5, 5])
    batch = client.lease("grade", 3)
    client.advance(5)
    assert client.ack(batch, columns=client.columns(3, ["long"], {"score": [1.0, 2.0, 3.0]})).rows == 2
    assert client.lease("train", 2).column("score") == [2.0, 3.0]
    assert world.audit().balanced


def test_an_ack_of_nothing_but_dropped_rows_ends_none() -> None:
    world, client = paced()
    client.put(2, inline={"r": 0.0}, policy_version=0)
    batch = client.lease("grade", 2)
    client.advance(5)
    assert client.renew(batch)
    assert client.ack(batch, [batch.rows[1]], columns=client.columns(1, ["long"], {"score": 1.0})).rows == 0
    assert client.ack(batch, drop="bad").rows == 0
    with pytest.raises(LeaseExpired, match="it was acked"):
        client.ack(batch)
    assert world.table().rows_dropped == {"stale": 2}
    assert not world.taken  # nor does the result of the dropped row stay
    assert world.audit().balanced


def test_kept_rows_stay_readable_until_deleted() -> None:
    world, client = paced(KeepStale())
    rows = graded(client, 2, 0)
    client.ack(client.lease("grade", 2))
    client.advance(2)
    assert client.read(rows, fields=["score"]).inline
    assert world.stats().outstanding == 0
    client.seal()
    with pytest.raises(EndOfTable):
        client.lease("train", 1)
    client.delete(rows)
    assert world.table().rows_dropped == {"deleted": 2}


def test_a_requeued_row_is_given_anew() -> None:
    world, client = paced(Requeue("grade"), bound=0)
    client.put(2, ["big"], {"r": 0.0}, policy_version=0)
    first = client.lease("grade", 2)
    client.ack(first, columns=client.columns(2, ["trace"], {"score": 1.0}))
    other = client.lease("train", 1)
    client.advance(1)
    again = client.lease("grade", 1)
    assert again.rows == [1]
    client.ack(again, columns=client.columns(1, inline={"score": 2.0}, policy_version=1))
    assert client.lease("train", 1).column("score") == [2.0]
    client.ack(other)
    assert world.audit().balanced


def test_a_task_to_which_rows_may_be_requeued_ends_with_the_pacing_task() -> None:
    """The simulator found a trainer that waited for rows of which nobody was left to give the score anew."""
    _, client = paced(Requeue("grade"), bound=0)
    client.put(1, ["big"], {"r": 0.0}, policy_version=0)
    client.seal()
    client.ack(client.lease("grade", 1), columns=client.columns(1, ["trace"], {"score": 1.0}))
    with pytest.raises(DeadlineExceeded):
        client.lease("grade", 1)
    client.advance(1)
    again = client.lease("grade", 1)
    client.ack(again, columns=client.columns(1, inline={"score": 2.0}, policy_version=1))
    client.ack(client.lease("train", 1))
    for task in ("grade", "train"):
        with pytest.raises(EndOfTable):
            client.lease(task, 1)


def test_requeue_ends_leases_of_what_follows() -> None:
    world = World()
    client = world.client()
    tasks = [Task("roll", [], ["r"]), Task("grade", ["r"], ["s"]), Task("train", ["r", "s"]), Task("log", ["s"])]
    client.create(tasks=tasks, pacing=Pacing("train", 4, 1, 0, Requeue("roll")))
    client.put(2)
    client.ack(client.lease("roll", 2), columns=client.columns(2, inline={"r": 1.0}, policy_version=0))
    client.ack(client.lease("grade", 2), columns=client.columns(2, inline={"s": 1.0}))
    held = client.lease("log", 2)
    client.advance(1)
    assert [one.lease for one in world.ended] == [held.lease]
    stats = world.stats().tasks
    assert (stats["roll"].ready, stats["grade"].pending, stats["log"].pending) == (2, 2, 2)
    with pytest.raises(LeaseExpired, match="went back to an earlier task"):
        client.ack(held)


def test_the_clock_is_held_by_rows_that_it_would_make_stale() -> None:
    world, client = paced(HoldClock())
    graded(client, 2, 0)
    client.advance(1)
    with pytest.raises(
        DeadlineExceeded, match=r"held at 1: 2 rows of versions below 1 would be stale at 2 .* \"train\""
    ):
        client.advance(2)
    waits = client.advance(2, wait_s=9)
    assert isinstance(waits, Blocked)
    world.woken.clear()
    batch = client.lease("train", 2)  # handed over in bound: they hold the clock no more
    assert set(waits.keys) & set(world.woken)
    client.advance(2)
    client.release(batch)
    assert world.table().rows_dropped == {"stale": 2}


def test_a_held_clock_is_freed_by_a_new_stamp() -> None:
    world, client = paced(HoldClock())
    rows = graded(client, 1, 0)
    waits = client.advance(2, wait_s=9)
    world.woken.clear()
    client.update(rows, policy_version=2)
    assert set(waits.keys) & set(world.woken)
    client.advance(2)


# ---------------------------------------------------------------- reservations and room


def test_admission_is_what_the_design_says() -> None:
    world, client = paced(bound=None)
    first = client.reserve(8)
    assert (first.rows, first.version, first.refills) == (8, 0, [])
    with pytest.raises(Full, match=r"8 of 8 rows are ahead of task \"train\" \(depth 1, batch_rows 4\)"):
        client.reserve(1)
    waits = client.reserve(1, wait_s=9)
    client.put(8, inline={"r": 0.0, "score": 0.0}, reservation=first.reservation)
    assert isinstance(client.reserve(1, wait_s=9), Blocked)  # put, not done: still outstanding
    batch = client.lease("train", 4)
    world.woken.clear()
    client.ack(batch)
    assert set(waits.keys) & set(world.woken)
    assert client.reserve(4).rows == 4
    client.drop([4, 5])
    assert client.reserve(2).rows == 2


def test_rows_that_could_not_be_trained_in_bound_are_not_started() -> None:
    _, client = paced(bound=1)
    assert client.reserve(4, 0).rows == 4
    with pytest.raises(Full):
        client.reserve(5, 0)
    assert client.reserve(4, 0).rows == 4


def test_the_second_batch_of_old_weights_is_not_started() -> None:
    _, client = paced(bound=0)
    client.reserve(4, 0)
    text = r"trained at version 1, 1 version after theirs, since 4 rows are ahead: above max_staleness 0"
    with pytest.raises(Full, match=text):
        client.reserve(1, 0)


def test_reservations_return_with_their_session() -> None:
    world, client = paced()
    other = world.client()
    other.reserve(8)
    waits = client.reserve(8, wait_s=9)
    world.woken.clear()
    other.close()
    assert set(waits.keys) & set(world.woken)
    assert client.reserve(8).rows == 8


def test_what_is_reserved_finds_room_and_others_do_not_take_it() -> None:
    world, client = paced(rows=10)
    promise = client.reserve(8)
    with pytest.raises(Full, match="0 are resident and 8 reserved, of at most 10"):
        client.put(3)
    client.put(2)
    client.put(8, reservation=promise.reservation)
    assert world.stats().rows_live == 10


def test_bytes_are_bounded_for_who_did_not_reserve() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x")], limits=Limits(rows=100, bytes=300))
    client.put(4, ["a"])
    promise = client.reserve(4)
    client.put(4, ["a"])
    waits = client.put(4, ["a"], wait_s=9)
    assert isinstance(waits, Blocked)
    client.put(4, ["a"], reservation=promise.reservation)  # work that was admitted is never refused
    assert world.stats().bytes == 384
    world.woken.clear()
    client.ack(client.lease("x", 12, at_least=8))
    assert set(waits.keys) & set(world.woken)


def test_a_smaller_overwrite_makes_room() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x")], limits=Limits(rows=100, bytes=8192))
    (row,) = client.put(1)
    field = Field("a", "int64", (None,))
    big = client.block([field], 1, counts=[900])
    client.apply(m.Update("t", row.to_bytes(8, "little"), m.Columns(fields=[field], blocks=[big])))
    again = m.Columns(fields=[field], blocks=[client.block([field], 1, counts=[900])])
    waits = client.apply(m.PutRequest("t", 1, again, wait_s=9))
    world.woken.clear()
    client.update([row], ["a"], overwrite=True)
    assert set(waits.keys) & set(world.woken)
    assert isinstance(client.apply(m.PutRequest("t", 1, again, wait_s=9)), m.PutRows)


# ---------------------------------------------------------------- seal and the end


def test_a_partial_batch_waits_for_rows_that_can_still_come() -> None:
    world, client = paced(bound=None)
    client.put(6, inline={"r": 0.0})
    client.update([0, 1, 2], inline={"score": 1.0})
    client.seal()
    waits = client.lease("train", 4, wait_s=9)
    assert isinstance(waits, Blocked)
    client.update([3], inline={"score": 1.0})
    assert client.lease("train", 4).rows == [0, 1, 2, 3]
    client.update([4], inline={"score": 1.0})
    assert isinstance(client.lease("train", 4, wait_s=9), Blocked)
    world.woken.clear()
    client.drop([5])
    assert set(waits.keys) & set(world.woken)
    assert client.lease("train", 4).rows == [4]


def test_the_end_waits_for_what_others_hold_and_comes_when_it_is_done() -> None:
    world, client = paced(bound=None)
    graded(client, 2, 0)
    client.seal()
    other = world.client()
    batch = other.lease("train", 2)
    waits = client.lease("train", 2, wait_s=9)
    assert isinstance(waits, Blocked)
    world.woken.clear()
    other.ack(batch)
    assert set(waits.keys) & set(world.woken)
    with pytest.raises(EndOfTable, match='table "t" is sealed and task "train" has drained it'):
        client.lease("train", 2)


def test_what_comes_back_after_the_seal_is_handed_out() -> None:
    world, client = paced(bound=None)
    graded(client, 2, 0)
    client.seal()
    other = world.client()
    other.lease("train", 2)
    other.close()
    assert client.lease("train", 2).rows == [0, 1]


def test_the_end_for_a_where_that_matches_nothing_more() -> None:
    _, client = paced(bound=None)
    graded(client, 2, [1, 5])
    client.seal()
    old = [VersionBetween(high=2)]
    client.ack(client.lease("train", 2, where=old))
    with pytest.raises(EndOfTable):
        client.lease("train", 2, where=old)
    assert client.lease("train", 2).rows == [1]


def test_waiters_of_a_sealed_or_dropped_table_are_told() -> None:
    world, client = paced()
    promise = client.reserve(8)
    put, lease = client.put(64, wait_s=9), client.lease("train", 1, wait_s=9)
    held = client.reserve(1, wait_s=9)
    world.woken.clear()
    client.seal()
    assert all(set(one.keys) & set(world.woken) for one in (put, lease, held))
    with pytest.raises(Sealed):
        client.put(1, reservation=promise.reservation)
    world.woken.clear()
    client.apply(m.DropTable("t"))
    assert all(set(one.keys) & set(world.woken) for one in (put, lease, held))
    with pytest.raises(NotFound):
        client.lease("train", 1, wait_s=9)


def test_a_dropped_table_leaves_nothing_behind() -> None:
    world, client = paced(retention=Manual())
    graded(client, 4, 0)
    client.put(2, ["big"])
    client.ack(client.lease("train", 2))
    held = client.lease("train", 2)
    client.apply(m.DropTable("t"))
    assert [one.lease for one in world.ended] == [held.lease]
    assert not world.taken
    assert world.ledger.next_deadline() is None
    totals = world.audit().dropped_tables
    assert totals["put"] == totals["done"] + totals["dropped"] == 6
    client.create()
    assert client.put(1) == [0]


# ---------------------------------------------------------------- retention, tasks declared late


def test_acked_frees_and_manual_keeps_until_deleted() -> None:
    for retention in (Acked(), Manual()):
        world = World()
        client = world.client()
        client.create(tasks=[Task("x"), Task("y")], retention=retention, limits=Limits(rows=4))
        client.put(4, ["a"], keys=["k0", "k1", "", ""])
        client.ack(client.lease("x", 4))
        assert world.stats().rows_done == 0
        client.ack(client.lease("y", 3))
        client.ack(client.lease("y", 1), drop="bad")
        stats = world.stats()
        assert (stats.rows_done, stats.rows_live, world.table().rows_dropped) == (3, 0, {"bad": 1})
        if isinstance(retention, Acked):
            assert stats.rows_resident == stats.bytes == 0
            assert client.put(4, keys=["k0", "", "", ""])
            continue
        assert stats.rows_resident == 4
        with pytest.raises(Full):
            client.put(1)
        assert client.read([0, 1, 2, 3]).keys == ["k0", "k1", "", ""]
        assert client.read().rows == client.read([0, 1, 2]).rows
        client.delete([0, 1, 3])
        assert client.put(3) == [4, 5, 6]
        assert world.audit().balanced


def test_a_task_declared_late_sees_what_it_asked_for() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x", ["a"])])
    client.put(2, inline={"a": 1.0})
    client.put(1)
    client.ack(client.lease("x", 1))
    client.apply(m.AddTask("t", Task("all", ["a"])))
    client.apply(m.AddTask("t", Task("new", ["a"], from_="now")))
    client.put(1, inline={"a": 1.0})
    assert client.lease("all", 3, at_least=1).rows == [1, 3]
    assert client.lease("new", 3, at_least=1).rows == [3]
    assert (world.stats().rows_live, world.stats().rows_done) == (3, 1)
    client.update([2], inline={"a": 1.0})
    assert client.lease("all", 1).rows == [2]


def test_rows_put_before_any_task_wait_for_tasks() -> None:
    world = World()
    client = world.client()
    client.create()
    client.put(3)
    client.apply(m.AddTask("t", Task("now", from_="now")))
    client.apply(m.AddTask("t", Task("x", selector=OldestVersionFirst())))
    client.ack(client.lease("x", 3))
    assert world.stats().rows_done == 3


# ---------------------------------------------------------------- leases and time


def test_a_lease_expires_is_renewed_and_counts_as_a_death() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x", lease_s=10, retry=Retry(attempts=1))])
    client.put(1)
    batch = client.lease("x", 1)
    assert (batch.reply.lease_s, world.ledger.next_deadline()) == (10.0, 10.0)
    world.pass_time(8)
    assert client.renew(batch).lease_s == 10.0
    world.pass_time(9)
    assert client.renew(batch, 3).lease_s == 3.0
    world.pass_time(3)
    assert world.ended[-1].why == "it expired after 3 s without renewal"
    second = client.lease("x", 1)
    assert second.token > batch.token
    client.release(second, failed=False)
    client.release(client.lease("x", 1), failed=True, reason="ValueError: no")
    assert world.stats().tasks["x"].worker_deaths == 1
    assert world.table().rows_dropped == {"attempts": 1}
    life = client.observe("row", "t", 0)
    assert [event.what for event in life.events][-2:] == ["failed", "dropped"]


def test_tokens_ascend_over_all_tables() -> None:
    world = World()
    client = world.client()
    tokens = []
    for name in ("a", "b"):
        client.create(name, tasks=[Task("x")])
        client.put(1, table=name)
    for _ in range(3):
        for name in ("a", "b"):
            batch = client.lease("x", 1, table=name)
            tokens.append(batch.token)
            client.release(batch, table=name)
    assert tokens == sorted(set(tokens))


def test_a_row_is_not_dropped_for_failing_unless_its_task_says_so() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("x")])
    client.put(1)
    for _ in range(300):
        client.release(client.lease("x", 1), failed=True)
        world.pass_time(60)
    assert world.stats().rows_live == 1
