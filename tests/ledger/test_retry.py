"""What happens to rows whose lease failed: they wait, each longer than before, and are dropped only if their task says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ledger.driver import Driver, Given, World
from transferqueue.errors import DeadlineExceeded, EndOfTable, UsageError
from transferqueue.policies import Complete, DropGroup, Retry, Task, TokenBalanced
from transferqueue.wire import messages as m


def failing(rows: int = 1, **terms: Any) -> tuple[World, Driver]:
    world = World()
    client = world.client("reward-0")
    client.create(tasks=[Task("x", lease_s=100, **terms)])
    client.put(rows)
    return world, client


def fail(client: Driver, batch: Given, reason: str = "KeyError: 'answer'") -> None:
    client.release(batch, failed=True, reason=reason)


def stats(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.stats()["tasks"]["x"]
    return found


# ---------------------------------------------------------------- waits


def test_a_failed_row_waits_longer_each_time_up_to_the_most() -> None:
    world, client = failing(retry=Retry(first_s=1, factor=3, max_s=20))
    for wait_s in (1, 3, 9, 20, 20):
        fail(client, client.lease("x", 1))
        assert (stats(world)["retrying"], stats(world)["retry_s"], stats(world)["ready"]) == (1, wait_s, 0)
        world.pass_time(wait_s - 0.5)
        with pytest.raises(DeadlineExceeded):
            client.lease("x", 1)
        world.pass_time(0.5)
        assert stats(world)["retry_s"] is None


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
    assert stats(world)["failed"] == 0


def test_a_death_is_no_failure_and_its_rows_return_at_once() -> None:
    world, client = failing(2, retry=Retry(attempts=1))
    for _ in range(5):
        worker = world.client()
        worker.lease("x", 2)
        worker.close()
    client.lease("x", 2)
    world.pass_time(100)
    found = stats(world)
    assert (found["ready"], found["failed"], found["worker_deaths"]) == (2, 0, 12)
    assert client.observe("row", "t", 0)["tasks"]["x"]["attempts"] == 0


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
    assert stats(world)["retrying"] == 2
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
    assert stats(world)["retrying"] == 2
    world.pass_time(1)
    assert stats(world)["ready"] == 2


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
