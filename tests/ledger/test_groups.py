"""Groups are leased whole or not at all, and their policy applies to those that never become whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import DeadlineExceeded, EndOfTable, LeaseExpired
from transferqueue.limits import Limits
from transferqueue.policies import Complete, DeliverPartial, DropGroup, KeepStale, Pacing, Refill, Requeue, Retry, Task
from transferqueue.wire import messages as m


def table(rule: Complete, **terms: Any) -> tuple[World, Driver]:
    world = World()
    client = world.client()
    tasks = [Task("grade", [], ["score"], retry=Retry(attempts=2), lease_s=20), Task("train", ["score"], groups=rule)]
    client.create(tasks=tasks, **terms)
    return world, client


def group(client: Driver, count: int, size: int, number: int = 1, **facts: Any) -> list[int]:
    rows: list[int] = client.put(count, group_id=number, group_size=size, **facts)
    return rows


def give(client: Driver, rows: list[int]) -> None:
    client.update(rows, inline={"score": 1.0})


def test_a_group_is_handed_out_when_its_last_member_is_ready() -> None:
    _, client = table(Complete())
    rows = group(client, 2, 4)
    give(client, rows)
    rows += group(client, 2, 4)
    give(client, rows[2:3])
    with pytest.raises(DeadlineExceeded, match="group 1: 3 of 4 ready, 1 not complete"):
        client.lease("train", groups=1)
    give(client, rows[3:])
    assert client.lease("train", groups=1).rows == rows


def test_rows_without_a_group_are_groups_of_one() -> None:
    _, client = table(Complete())
    give(client, client.put(2) + group(client, 2, 2))
    assert client.lease("train", groups=2).rows == [0, 1]
    assert client.lease("train", 5, at_least=1).rows == [2, 3]


def test_rows_are_filled_with_groups_that_fit() -> None:
    _, client = table(Complete())
    for number in range(3):
        give(client, group(client, 4, 4, number))
    assert len(client.lease("train", 11).rows) == 8


# ---------------------------------------------------------------- incomplete groups


@pytest.mark.parametrize("whole", [False, True])
def test_a_row_dropped_with_its_group_ends_no_lease_of_other_rows(whole: bool) -> None:
    """The holder drops a member, and the rest of its group ends with it. It goes on with the rows that it has."""
    world, client = table(Complete(incomplete=DropGroup()))
    rows = group(client, 3, 3) + ([] if whole else group(client, 1, 1, number=2))
    lease = client.lease("grade", len(rows))
    assert client.ack(lease, rows[:1], drop="timeout").rows == 1
    assert client.ack(lease, rows[1:2], columns=client.columns(1, inline={"score": 1.0})).rows == 0
    assert client.release(lease, rows[2:3], failed=True).rows == 0
    if not whole:
        assert client.renew(lease)
        assert client.ack(lease, columns=client.columns(1, inline={"score": 1.0})).rows == 1
    with pytest.raises(LeaseExpired, match=r"it was (acked|released)"):
        client.ack(lease)
    assert not world.ended
    assert world.table().rows_dropped == {"timeout": 1, "group_incomplete": 2}
    assert world.audit().balanced


@pytest.mark.parametrize("columns", [False, True])
def test_replicas_end_a_batch_whose_rows_were_all_dropped(columns: bool) -> None:
    world, client = table(Complete())
    rows = client.put(2)
    first, second = (client.lease("grade", 2, replica=replica, replicas=2) for replica in range(2))
    client.ack(first, columns=client.columns(2, ["long"], {"score": 1.0}) if columns else None)
    client.drop(rows)
    assert client.ack(second, columns=client.columns(2, ["long"], {"score": 1.0})).rows == 0
    assert not world.taken
    assert world.audit().balanced


def test_drop_group_drops_the_rest_at_once_when_a_member_is_dropped() -> None:
    world, client = table(Complete(incomplete=DropGroup()))
    rows = group(client, 3, 4)
    client.drop(rows[:1], "bad")
    assert world.table().rows_dropped == {"bad": 1, "group_incomplete": 2}
    assert world.audit().balanced


def test_drop_group_drops_at_the_deadline() -> None:
    world, client = table(Complete(deadline_s=30))
    rows = group(client, 4, 4)
    world.pass_time(100)  # nothing is ready: the deadline has not begun
    give(client, rows[:1])
    assert world.ledger.next_deadline() == 130
    world.pass_time(29)
    assert world.stats().rows_live == 4
    world.pass_time(1)
    assert world.table().rows_dropped == {"group_incomplete": 4}
    assert world.ledger.next_deadline() is None


def test_release_hands_over_what_is_ready_at_the_deadline() -> None:
    world, client = table(Complete(min_size=2, deadline_s=30, incomplete=DeliverPartial()))
    rows = group(client, 4, 5)
    give(client, rows[:3])
    world.pass_time(30)
    batch = client.lease("train", groups=1)
    assert batch.rows == rows[:3]
    assert world.table().rows_dropped == {"group_incomplete": 1}
    client.release(batch)
    assert client.lease("train", groups=1).rows == rows[:3]


def test_release_drops_what_is_too_small_at_the_deadline() -> None:
    world, client = table(Complete(min_size=3, deadline_s=30, incomplete=DeliverPartial()))
    give(client, group(client, 4, 4)[:2])
    world.pass_time(30)
    assert world.table().rows_dropped == {"group_incomplete": 4}


def test_release_waits_for_members_that_can_still_become_ready() -> None:
    """A member dropped upstream while the others are in work must not cost the group that min_size tolerates."""
    world, client = table(Complete(min_size=3, incomplete=DeliverPartial()))
    rows = group(client, 4, 4)
    give(client, rows[:1])
    client.drop(rows[3:], "bad")
    assert world.stats().rows_live == 3
    give(client, rows[1:3])
    assert client.lease("train", groups=1).rows == rows[:3]


def test_release_gives_up_as_soon_as_min_size_is_out_of_reach() -> None:
    world, client = table(Complete(min_size=3, incomplete=DeliverPartial()))
    rows = group(client, 4, 4)
    client.drop(rows[2:], "bad")
    assert world.table().rows_dropped == {"bad": 2, "group_incomplete": 2}


def test_members_that_come_after_the_release_are_not_for_the_task() -> None:
    world, client = table(Complete(min_size=1, deadline_s=5, incomplete=DeliverPartial()))
    give(client, group(client, 1, 3))
    world.pass_time(5)
    batch = client.lease("train", groups=1)
    late = group(client, 1, 3)
    give(client, late)
    client.ack(batch)
    assert world.table().rows_dropped == {}
    later = group(client, 1, 3)
    states = client.observe("row", "t", later[0]).tasks
    assert states["train"].state == "absent"
    grade = client.lease("grade", 3)
    give(client, later)
    client.ack(grade)
    assert (world.stats().rows_done, world.stats().rows_live) == (3, 0)


def test_late_members_that_no_task_wants_are_dropped() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", groups=Complete(min_size=1, deadline_s=5, incomplete=DeliverPartial()))])
    group(client, 1, 3)
    world.pass_time(5)
    batch = client.lease("train", groups=1)
    group(client, 1, 3)
    client.ack(batch)
    assert world.table().rows_dropped == {"group_incomplete": 1}


def test_refill_asks_for_dropped_members_again() -> None:
    world, client = table(Complete(incomplete=Refill()))
    rows = group(client, 4, 4)
    client.drop(rows[1:3], "bad")
    assert world.stats().refills == 2
    promise = client.reserve(3)
    assert promise.refills == [(1, 2)]
    more = group(client, 2, 4, reservation=promise.reservation)
    give(client, [rows[0], rows[3], *more])
    assert sorted(client.lease("train", groups=1).rows) == sorted([rows[0], rows[3], *more])


def test_refill_asks_for_what_was_never_put_at_the_deadline_and_takes_slow_members_back() -> None:
    world, client = table(Complete(deadline_s=10, incomplete=Refill()))
    rows = group(client, 3, 5)
    slow = world.client("slow")
    held = slow.lease("grade", 2)
    give(client, rows[2:])
    world.pass_time(10)
    assert world.stats().refills == 2
    assert [one.why for one in world.ended] == ["its group waited past the deadline"]
    with pytest.raises(Exception, match="its group waited past the deadline"):
        slow.ack(held)
    assert world.stats().tasks["grade"].ready == 3
    assert world.ledger.next_deadline() == 20  # the deadline begins anew
    slow.lease("grade", 2)
    world.pass_time(10)  # a second time: a slow worker is no failure
    assert world.table().rows_dropped == {}
    assert world.stats().tasks["grade"].ready == 3


def test_a_refill_that_is_not_produced_is_asked_of_the_next() -> None:
    world, client = table(Complete(incomplete=Refill()))
    client.drop(group(client, 4, 4)[:3], "bad")
    other = world.client()
    assert other.reserve(2).refills == [(1, 2)]
    assert client.reserve(5).refills == [(1, 1)]
    other.close()
    assert world.stats().refills == 2
    client.apply(m.DropTable("t"))


def test_refills_are_admitted_past_the_bound_they_were_part_of() -> None:
    """Other groups may have taken the place of dropped members; a full table must still let its groups finish."""
    pacing = Pacing("train", 4, 0)
    world, client = table(Complete(incomplete=Refill()), pacing=pacing, limits=Limits(rows=16))
    rows = group(client, 4, 4)
    client.drop(rows[:1], "bad")
    assert world.stats().outstanding == 4  # three there, one asked for
    with pytest.raises(Exception, match=r"4 of 4 rows are ahead of task \"train\" \(depth 0, batch_rows 4\)"):
        client.reserve(2)
    assert client.reserve(1).refills == [(1, 1)]
    assert world.stats().outstanding == 4


def test_a_group_whose_members_are_all_gone_asks_for_nothing() -> None:
    world, client = table(Complete(incomplete=Refill()))
    rows = group(client, 4, 4)
    client.drop(rows[:2], "bad")
    promise = client.reserve(1)
    client.drop(rows[2:], "bad")
    assert world.stats().refills == 0
    client.apply(m.Unreserve("t", promise.reservation))
    assert world.stats().refills == 0
    assert len(world.table().groups) == 0


def test_attempts_of_one_member_end_the_group() -> None:
    world, client = table(Complete())
    rows = group(client, 2, 2)
    give(client, rows)
    client.release(client.lease("grade", 1), failed=True)
    world.pass_time(1)
    client.release(client.lease("grade", 1), failed=True)
    assert world.table().rows_dropped == {"attempts": 1, "group_incomplete": 1}


def test_a_member_dropped_while_its_group_is_leased_leaves_the_rest_with_the_holder() -> None:
    world, client = table(Complete())
    rows = group(client, 3, 3)
    give(client, rows)
    batch = client.lease("train", groups=1)
    client.drop(rows[:1], "bad")
    assert world.stats().tasks["train"].leased == 2
    assert client.ack(batch).rows == 2


# ---------------------------------------------------------------- sealed tables


@pytest.mark.parametrize("rule", [DropGroup(), Refill(), DeliverPartial()])
def test_the_end_arrives_past_groups_that_will_never_be_whole(rule: Any) -> None:
    world, client = table(Complete(incomplete=rule, min_size=2))
    whole, part = group(client, 2, 2, 1), group(client, 3, 5, 2)
    give(client, whole + part[:2])
    grade = client.lease("grade", 5)
    client.ack(grade, whole + part[:2])
    client.seal()
    assert world.stats().rows_live == 5  # the third member may still become ready
    client.ack(client.lease("train", groups=1))
    give(client, part[2:])
    if isinstance(rule, DeliverPartial):
        client.ack(client.lease("train", groups=1))
    else:
        assert world.table().rows_dropped == {"group_incomplete": 3}
    with pytest.raises(EndOfTable):
        client.lease("train", groups=1)
    assert world.audit().balanced


def test_a_group_returned_after_the_seal_is_handed_out_again() -> None:
    _, client = table(Complete(incomplete=DeliverPartial(), min_size=1))
    give(client, group(client, 2, 3))
    client.seal()
    client.release(client.lease("train", groups=1))
    assert client.lease("train", groups=1).rows == [0, 1]


# ---------------------------------------------------------------- groups and staleness


def test_one_stale_member_resolves_the_group_by_its_policy() -> None:
    pacing = Pacing("train", 4, 3, max_staleness=1)
    world, client = table(Complete(), pacing=pacing)
    rows = group(client, 4, 4, policy_version=[0, 3, 3, 3])
    give(client, rows)
    client.advance(2)
    assert world.table().rows_dropped == {"stale": 1, "group_incomplete": 3}


def test_a_stale_member_within_min_size_costs_only_itself() -> None:
    pacing = Pacing("train", 4, 3, max_staleness=1)
    world, client = table(Complete(min_size=3, incomplete=DeliverPartial()), pacing=pacing)
    rows = group(client, 4, 4, policy_version=[0, 3, 3, 3])
    give(client, rows)
    client.advance(2)
    assert world.table().rows_dropped == {"stale": 1}
    assert client.lease("train", groups=1).rows == rows[1:]


def test_a_group_is_kept_as_a_whole() -> None:
    pacing = Pacing("train", 4, 3, max_staleness=1, on_stale=KeepStale())
    world, client = table(Complete(), pacing=pacing)
    give(client, group(client, 4, 4, policy_version=[0, 3, 3, 3]))
    client.advance(2)
    assert world.stats().tasks["train"].kept == 4
    assert world.stats().outstanding == 0


def test_a_group_is_requeued_as_a_whole() -> None:
    pacing = Pacing("train", 4, 3, max_staleness=1, on_stale=Requeue("grade"))
    world, client = table(Complete(), pacing=pacing)
    rows = group(client, 2, 2, policy_version=[0, 3])
    batch = client.lease("grade", 2)
    client.ack(batch, columns=client.columns(2, inline={"score": 1.0}))
    client.advance(2)
    again = client.lease("grade", 2)
    assert again.rows == rows
    client.ack(again, columns=client.columns(2, inline={"score": 2.0}, policy_version=2))
    assert client.lease("train", groups=1).column("score") == [2.0, 2.0]
    assert world.audit().balanced
