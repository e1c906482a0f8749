"""Partial results: columns of a release replace those of its rows."""

from __future__ import annotations

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import LeaseExpired, SchemaError, UsageError
from transferqueue.limits import Limits
from transferqueue.policies import Complete, Pacing, Requeue, Task

ROLLOUT = Task("rollout", ["so_far"], ["score"], lease_s=10.0)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    driver = world.client("generator")
    driver.create(tasks=[ROLLOUT, Task("train", ["score"])], pacing=Pacing("train", 4, 1, 1, Requeue("rollout")))
    return driver


def versions(client: Driver, rows: list[int]) -> list[int]:
    return [client.observe("row", "t", row).policy_version for row in rows]


# ---------------------------------------------------------------- bad input


def test_a_late_release_with_columns_changes_nothing(world: World, client: Driver) -> None:
    rows = client.put(2, ["so_far"])
    late = client.lease("rollout", 2)
    world.pass_time(11)
    before = client.lease("rollout", 2)
    with pytest.raises(LeaseExpired):
        client.release(late, columns=client.columns(2, ["so_far"], policy_version=0))
    assert versions(client, rows) == [-1, -1]
    client.release(before)
    assert client.lease("rollout", 2).blocks() == before.blocks()


def test_progress_that_does_not_fit_leaves_the_rows_leased(client: Driver) -> None:
    client.put(2, ["so_far"])
    lease = client.lease("rollout", 2)
    with pytest.raises(SchemaError, match="block of so_far has 3 rows; the request has 2"):
        client.release(lease, columns=client.columns(3, ["so_far"]))
    with pytest.raises(UsageError, match="group_id and group_size are set by put"):
        client.release(lease, columns=client.columns(2, group_id=1, group_size=2))
    assert client.ack(lease, columns=client.columns(2, inline={"score": 1.0})).rows == 2


def test_replicas_cannot_say_how_far_rows_are(client: Driver) -> None:
    client.put(2, ["so_far"])
    lease = client.lease("rollout", 2, replica=0, replicas=2)
    with pytest.raises(UsageError, match=r"lease 1 is shared by 2 replicas.*release them without columns"):
        client.release(lease, columns=client.columns(2, ["so_far"]))
    assert client.release(lease).rows == 2


def test_progress_of_rows_that_were_dropped_is_discarded(client: Driver) -> None:
    client.put(3, ["so_far"])
    lease = client.lease("rollout", 3)
    client.drop([0, 1])
    assert client.release(lease, [0], columns=client.columns(1, ["so_far"])).rows == 0
    assert client.release(lease, columns=client.columns(2, ["so_far"])).rows == 1


# ---------------------------------------------------------------- what it does


def test_whoever_leases_next_has_what_the_one_before_made(world: World, client: Driver) -> None:
    client.put(1, ["so_far"])
    first = client.lease("rollout", 1)
    assert client.release(first, columns=client.columns(1, ["so_far"], policy_version=3, tokens=5)).rows == 1
    client.unpin(first.blocks())
    other = world.client("another")
    again = other.lease("rollout", 1)
    assert again.rows == first.rows
    assert set(again.blocks()).isdisjoint(first.blocks())
    assert len(world.freed) == 1, "what it replaced is freed"
    assert versions(client, again.rows) == [3]
    assert client.observe("row", "t", 0).tasks["rollout"].attempts == 0


def test_progress_too_old_to_be_trained_is_requeued_and_its_version_forgotten(client: Driver) -> None:
    client.put(1, ["so_far"])
    client.release(client.lease("rollout", 1), columns=client.columns(1, ["so_far"], policy_version=0))
    client.advance(1)
    assert versions(client, [0]) == [0]
    client.advance(2)
    assert versions(client, [0]) == [-1], "no progress that anybody may go on with"
    lease = client.lease("rollout", 1)
    client.release(lease, columns=client.columns(1, ["so_far"], policy_version=0))
    assert versions(client, [0]) == [-1]


def test_progress_may_complete_what_others_need(client: Driver) -> None:
    client.put(1, ["so_far"])
    client.release(client.lease("rollout", 1), columns=client.columns(1, inline={"score": 1.0}, policy_version=0))
    assert client.lease("train", 1).column("score") == [1.0]


def test_whole_groups_give_back_whole(world: World) -> None:
    client = world.client()
    client.create(tasks=[Task("all", ["so_far"], groups=Complete())], limits=Limits(rows=8))
    client.put(2, ["so_far"], group_id=1, group_size=2)
    lease = client.lease("all", groups=1)
    with pytest.raises(UsageError, match="takes whole groups: release all rows of group 1 together"):
        client.release(lease, [0], columns=client.columns(1, ["so_far"]))
    assert client.release(lease, columns=client.columns(2, ["so_far"])).rows == 2
    assert client.lease("all", groups=1).rows == [0, 1]
