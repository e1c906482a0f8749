"""What happens to rows whose lease failed: they wait, each longer than before, and are dropped only if their task says
so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import Driver, Given, World
from transferqueue.errors import DeadlineExceeded, EndOfTable, Full, NotFound, Sealed, UsageError
from transferqueue.ledger import Ledger
from transferqueue.limits import Limits
from transferqueue.policies import Acked, Complete, DropGroup, Manual, Retry, Task, TokenBalanced
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import TaskError, TaskStats


def failing(rows: int = 1, **terms: Any) -> tuple[World, Driver]:
    world = World()
    client = world.client("reward-0")
    client.create(tasks=[Task("x", lease_s=100, **terms)])
    client.put(rows)
    return world, client


def fail(client: Driver, batch: Given, reason: str = "KeyError: 'answer'") -> None:
    client.release(batch, failed=True, reason=reason)


def stats(world: World) -> TaskStats:
    return world.stats().tasks["x"]


# ---------------------------------------------------------------- waits


def test_a_failed_row_waits_longer_each_time_up_to_the_most() -> None:
    world, client = failing(retry=Retry(first_s=1, factor=3, max_s=20))
    for wait_s in (1, 3, 9, 20, 20):
        fail(client, client.lease("x", 1))
        assert (stats(world).retrying, stats(world).retry_s, stats(world).ready) == (1, wait_s, 0)
        world.pass_time(wait_s - 0.5)
        with pytest.raises(DeadlineExceeded):
            client.lease("x", 1)
        world.pass_time(0.5)
        assert stats(world).retry_s is None


def test_the_end_of_a_wait_wakes_the_waiting_leases() -> None:
    world, client = failing()
    fail(client, client.lease("x", 1))
    assert world.ledger.next_deadline() == 1
    world.collect()
    world.woken.clear()
    world.pass_time(1)
    assert ("task", "t", "x") in world.woken


def test_rows_of_one_batch_wait_as_often_as_each_has_failed() -> None:
    world, client = failing(3)
    fail(client, client.lease("x", 1))
    world.pass_time(1)
    fail(client, client.lease("x", 3))  # row 0 for the second time
    world.pass_time(1)
    assert client.lease("x", 2).rows == [1, 2]
    world.pass_time(1)
    assert client.lease("x", 1).rows == [0]


def test_a_release_without_failure_returns_rows_at_once() -> None:
    world, client = failing(retry=Retry(attempts=1))
    for _ in range(5):
        client.release(client.lease("x", 1))
    assert stats(world).failed == 0


def test_a_death_is_no_failure_and_its_rows_return_at_once() -> None:
    world, client = failing(2, retry=Retry(attempts=1))
    for _ in range(5):
        worker = world.client()
        worker.lease("x", 2)
        worker.close()
    client.lease("x", 2)
    world.pass_time(100)
    found = stats(world)
    assert (found.ready, found.failed, found.worker_deaths) == (2, 0, 12)
    assert client.observe("row", "t", 0).tasks["x"].attempts == 0


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_a_row_is_dropped_after_exactly_its_attempts(attempts: int) -> None:
    world, client = failing(retry=Retry(attempts=attempts))
    for _ in range(attempts):
        assert world.table().rows_dropped == {}
        fail(client, client.lease("x", 1))
        world.pass_time(60)
    assert world.table().rows_dropped == {"attempts": 1}


# ---------------------------------------------------------------- the end of a table


def test_a_sealed_table_ends_after_its_last_retry() -> None:
    world, client = failing(2)
    client.seal()
    fail(client, client.lease("x", 1))
    client.ack(client.lease("x", 2))  # what is ready does not wait for what is not
    with pytest.raises(DeadlineExceeded):
        client.lease("x", 1)
    world.pass_time(1)
    client.ack(client.lease("x", 1))
    with pytest.raises(EndOfTable):
        client.lease("x", 1)


def test_rows_that_wait_are_dropped_with_their_table() -> None:
    world, client = failing()
    fail(client, client.lease("x", 1))
    client.apply(m.DropTable("t"))
    assert world.ledger.next_deadline() is None


# ---------------------------------------------------------------- groups and shares


def test_a_group_waits_as_a_whole() -> None:
    world, client = failing(0, groups=Complete())
    client.put(2, group_id=[1, 1], group_size=[2, 2])
    fail(client, client.lease("x", groups=1))
    assert stats(world).retrying == 2
    world.pass_time(1)
    assert client.lease("x", groups=1).rows == [0, 1]


def test_a_member_dropped_during_the_wait_ends_its_group() -> None:
    world, client = failing(0, groups=Complete(incomplete=DropGroup()))
    client.put(2, group_id=[1, 1], group_size=[2, 2])
    fail(client, client.lease("x", groups=1))
    client.drop([0], "bad")
    assert world.table().rows_dropped == {"bad": 1, "group_incomplete": 1}


def test_a_share_of_a_batch_waits() -> None:
    world, client = failing(4, selector=TokenBalanced())
    other = world.client()
    first = client.lease("x", 4, world=2, rank=0)
    second = other.lease("x", 4, world=2, rank=1)
    fail(client, first)
    other.ack(second)
    assert stats(world).retrying == 2
    world.pass_time(1)
    assert stats(world).ready == 2


# ---------------------------------------------------------------- the policy


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"first_s": -1}, "first_s=-1 is not a number of seconds"),
        ({"factor": 0.5}, "factor=0.5 is below 1"),
        ({"max_s": 0.5}, "max_s=0.5 is below first_s=1.0"),
        ({"attempts": 0}, "attempts=0 is not a positive number"),
        ({"attempts": True}, "attempts=True is not a positive number"),
        ({"first_s": float("nan")}, "first_s=nan"),
        ({"first_s": "1"}, "first_s='1' is str; give a number"),
        ({"max_s": 1e10}, "too long"),
    ],
)
def test_a_retry_that_makes_no_sense_is_refused_when_it_is_made(terms: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Retry(**terms)


def test_waits_do_not_overflow() -> None:
    assert Retry(factor=1e9).wait_s(10**6) == 60


# ---------------------------------------------------------------- a task whose leases all fail


def outage(rows: int = 20, **retry: Any) -> tuple[World, Driver]:
    """A task that is paused since its first three leases failed."""
    world, client = failing(rows, retry=Retry(**retry))
    leases = [client.lease("x", 1) for _ in range(3)]
    for batch in leases:
        fail(client, batch)
    return world, client


def test_a_paused_task_gives_one_lease_at_a_time_each_later_than_the_one_before() -> None:
    world, client = outage()
    tried = []
    for wait_s in (1, 2, 4, 8):
        assert stats(world).paused_s == wait_s
        world.pass_time(wait_s - 0.5)
        with pytest.raises(DeadlineExceeded, match="all its leases fail, so it is paused"):
            client.lease("x", 1)
        world.pass_time(0.5)
        trial = client.lease("x", 1)
        with pytest.raises(DeadlineExceeded):
            client.lease("x", 1)
        tried += trial.rows
        fail(client, trial)
    assert len(set(tried)) == 4  # each row once before any comes twice


def test_an_outage_of_minutes_drops_nothing_and_its_end_releases_all() -> None:
    world, client = outage(attempts=2)
    for _ in range(30):
        paused_s = stats(world).paused_s
        world.pass_time(paused_s)
        fail(client, client.lease("x", 1))
    assert world.now > 1000
    assert world.table().rows_dropped == {}
    world.pass_time(60)
    client.ack(client.lease("x", 1))  # the judge is back
    found = stats(world)
    assert (found.ready, found.retrying, found.paused_s) == (19, 0, None)
    client.ack(client.lease("x", 19))


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_fail_alone_are_no_outage(rows: int) -> None:
    """A poison row, or a batch with one, that is all there is: it ends after its attempts."""
    world, client = failing(rows, retry=Retry(attempts=5))
    for _ in range(5):
        fail(client, client.lease("x", rows))
        assert stats(world).paused_s is None
        world.pass_time(60)
    assert world.table().rows_dropped == {"attempts": rows}


def test_two_poison_rows_among_good_ones_are_dropped_after_exactly_their_attempts() -> None:
    world, client = failing(20, retry=Retry(attempts=4))
    for _ in range(200):
        try:
            batch = client.lease("x", 1)
        except DeadlineExceeded:
            world.pass_time(1)
            continue
        if batch.rows[0] in (7, 8):
            fail(client, batch)
        else:
            client.ack(batch)
    assert (world.table().rows_done, world.table().rows_dropped) == (18, {"attempts": 2})
    assert stats(world).failed == 8


def test_an_outage_that_does_not_end_counts_failures_again() -> None:
    world, client = outage(rows=3, attempts=2)
    for _ in range(200):
        world.pass_time(60)
        if world.table().rows_live:
            fail(client, client.lease("x", 1))
    assert world.table().rows_dropped == {"attempts": 3}
    assert world.now > 3600


def test_the_death_of_a_trials_worker_lets_the_next_one_begin() -> None:
    world, client = outage()
    world.pass_time(1)
    worker = world.client()
    worker.lease("x", 1)
    worker.close()
    assert stats(world).paused_s == 0
    assert client.lease("x", 1).rows


def test_a_request_for_many_rows_finds_those_that_were_tried() -> None:
    """Parked rows come back if a trial is due and no request takes the few that are ready."""
    world, client = outage(rows=4)
    world.pass_time(1)
    fail(client, client.lease("x", 1))
    world.pass_time(2)
    world.pass_time(2)
    assert client.lease("x", 4).rows == [0, 1, 2, 3]


def test_a_paused_group_task_tries_one_group() -> None:
    world, client = failing(0, groups=Complete())
    for group in range(4):
        client.put(2, group_id=[group] * 2, group_size=[2] * 2)
    for batch in [client.lease("x", groups=1) for _ in range(3)]:
        fail(client, batch)
    assert stats(world).paused_s == 1
    world.pass_time(1)
    client.ack(client.lease("x", groups=1))
    client.ack(client.lease("x", groups=3))


def test_a_paused_task_without_waits_is_tried_at_once() -> None:
    world, client = outage(first_s=0)
    for _ in range(50):
        world.pass_time(0)
        fail(client, client.lease("x", 1))
    world.pass_time(0)
    client.ack(client.lease("x", 1))
    client.ack(client.lease("x", 19))


def test_a_restart_keeps_waits_the_pause_and_the_errors() -> None:
    world, client = outage()
    before = world.stats()
    world.ledger = Ledger.from_image(world.ledger.image())
    assert world.stats() == before
    world.pass_time(1)
    client.ack(client.lease("x", 1))
    assert stats(world).ready == 19


def test_a_snapshot_ends_waits() -> None:
    world, _ = outage()
    snapshot = world.ledger.take_snapshot(world.now)
    other = World()
    other.ledger.restore_snapshot(snapshot, 0.0)
    found = other.stats().tasks["x"]
    assert (found.ready, found.retrying, found.paused_s) == (20, 0, None)


# ---------------------------------------------------------------- why


def test_the_errors_of_a_task_are_counted_by_kind_with_the_latest_first() -> None:
    world, client = failing(30)
    for at in range(30):
        batch = client.lease("x", 1) if stats(world).paused_s is None else None
        if batch is None:
            break
        fail(client, batch, "KeyError: 'answer'" if at % 2 == 0 else "no type at all")
    world.pass_time(2)
    one, other = stats(world).errors
    assert one == TaskError(type="KeyError", text="'answer'", worker="reward-0", count=2, first_s=2.0, last_s=2.0)
    assert (other.type, other.text) == ("", "no type at all")


def test_few_kinds_of_errors_are_kept_and_each_is_cut() -> None:
    world, client = failing(1, retry=Retry(first_s=0))
    for at in range(20):
        world.pass_time(0)
        fail(client, client.lease("x", 1), f"E{at}: " + 4000 * "x")
    errors = stats(world).errors
    assert [error.type for error in errors] == [f"E{at}" for at in range(19, 11, -1)]
    assert {len(error.text) for error in errors} == {300}


def test_a_wait_for_a_column_says_why_nobody_gives_it() -> None:
    world = World()
    client = world.client("reward-0")
    client.create(tasks=[Task("reward", gives=["rewards"]), Task("train", ["rewards"])])
    client.put(4)
    fail(client, client.lease("reward", 4))
    world.pass_time(0.5)
    said = r'4 rows lack "rewards" \(given by "reward", which fails: KeyError \'answer\', once, 0 s ago, by reward-0'
    with pytest.raises(DeadlineExceeded, match=said):
        client.lease("train", 4)
    with pytest.raises(DeadlineExceeded, match=r"it fails: KeyError 'answer'.*; 4 rows wait to be tried again"):
        client.lease("reward", 4)
    audit = world.audit().tables["t"]
    assert audit.errors["reward"][0].text == "'answer'"
    reward, train = client.observe("doctor").tables["t"][:2]
    assert (reward.failing, reward.errors[0].type, train.failing) == (True, "KeyError", False)
    assert "task \"reward\" fails: KeyError 'answer'" in reward.text


# ---------------------------------------------------------------- what was dropped


def spent(rows: int = 1, **terms: Any) -> tuple[World, Driver]:
    """Rows that were dropped as they failed once, and one that is live."""
    world = World()
    client = world.client("reward-0")
    tasks = [Task("prepare"), Task("x", retry=Retry(attempts=1)), Task("train", ["score"])]
    client.create(tasks=tasks, **terms)
    client.put(rows, ["a"], inline={"score": 0.0}, keys=[f"row {at}" for at in range(rows)])
    client.ack(client.lease("prepare", rows))
    fail(client, client.lease("x", rows))
    client.put(1, ["a"])
    return world, client


def listed(client: Driver, limit: int = 0) -> list[m.DroppedRow]:
    rows: list[m.DroppedRow] = client.apply(m.ListDropped("t", limit)).rows
    return rows


def again(client: Driver, *rows: int) -> int:
    taken: int = client.apply(m.RetryRows("t", np.array(rows, "<i8").tobytes())).rows
    return taken


def test_what_was_dropped_for_failing_is_listed_with_its_reason_and_values() -> None:
    world, client = spent(2)
    world.pass_time(3)
    assert listed(client, 1) == [m.DroppedRow(1, "row 1", "x", "attempts", "KeyError: 'answer'", "reward-0", 3.0)]
    assert [row.row for row in listed(client)] == [1, 0]
    assert world.audit().balanced
    assert client.read([0], fields=["a"])
    assert world.stats().rows_resident == 1  # it takes no room


@pytest.mark.parametrize("retention", [Acked(), Manual()])
def test_a_row_that_is_taken_again_is_live_for_the_tasks_that_were_not_done_with_it(retention: Any) -> None:
    world, client = spent(2, retention=retention)
    assert again(client, 0) == 1
    assert (world.table().rows_dropped["attempts"], world.stats().rows_live, world.audit().balanced) == (
        1,
        2,
        True,
    )
    assert client.observe("row", "t", 0).tasks["x"].attempts == 0
    assert [client.observe("row", "t", 0).tasks[task].state for task in ("prepare", "x", "train")] == [
        "done", "ready", "ready",
    ]  # fmt: skip
    assert [row.row for row in listed(client)] == [1]
    client.ack(client.lease("x", 2))
    client.ack(client.lease("train", 1))
    assert world.table().rows_done == 1
    with pytest.raises(NotFound, match='row 0 of table "t" cannot be taken again'):
        again(client, 0)


def test_dropped_rows_survive_a_restart_and_end_in_a_snapshot() -> None:
    world, client = spent()
    restored = World()
    restored.ledger.restore_snapshot(world.ledger.take_snapshot(world.now), 0.0)
    assert restored.audit().balanced
    assert restored.stats().rows_resident == 1
    world.ledger = Ledger.from_image(world.ledger.image())
    assert len(listed(client)) == 1
    assert again(client, 0) == 1


def test_kept_rows_are_bounded_and_the_oldest_are_freed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferqueue.ledger.rows.dropped.DROPPED_ROWS_MAX", 3)
    world, client = spent(5)
    assert [row.row for row in listed(client)] == [4, 3, 2]
    assert (world.audit().balanced, world.table().rows.pages.resident) == (True, 4)


def test_kept_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferqueue.ledger.rows.dropped.DROPPED_BYTES_MAX", 1)
    world, client = spent(5)
    assert listed(client) == []
    assert len(world.taken) == 1  # that of the live row


def test_deleted_and_dropped_tables_leave_nothing() -> None:
    world, client = spent(2)
    client.delete([0])
    assert [row.row for row in listed(client)] == [1]
    client.apply(m.DropTable("t"))
    assert not world.taken
    world.collect()


def test_a_table_that_has_ended_takes_nothing_again() -> None:
    world, client = spent()
    client.seal()
    assert again(client, 0) == 1  # another row is live
    fail(client, client.lease("x", 2))
    assert world.table().rows_live == 0
    with pytest.raises(Sealed, match="has ended"):
        again(client, 0)


def test_a_group_is_taken_again_as_a_whole() -> None:
    world, client = failing(0, groups=Complete(), retry=Retry(attempts=1))
    client.put(2, group_id=[7, 7], group_size=[2, 2])
    fail(client, client.lease("x", groups=1))
    assert world.table().rows_dropped == {"attempts": 2}
    assert again(client, 0, 1) == 2
    assert client.lease("x", groups=1).rows == [0, 1]


def test_a_full_table_takes_nothing_again() -> None:
    world, client = spent(2, limits=Limits(rows=2))
    client.put(1, ["a"])
    with pytest.raises(Full, match="cannot be taken again"):
        again(client, 0)
    assert world.table().rows_dropped == {"attempts": 2}
