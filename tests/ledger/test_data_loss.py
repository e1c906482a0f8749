"""Lost bytes: rows are requeued to the task that gave them if possible, and dropped as lost otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import LeaseExpired, NotFound
from transferqueue.policies import Complete, Pacing, Requeue, Task
from transferqueue.wire import messages as m


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    return world.client("worker")


TASKS = [
    Task("generate", ["prompt"], ["text"]),
    Task("reward", ["text"], ["score"]),
    Task("train", ["text", "score"]),
]


def give(client: Driver, task: str, rows: int, **columns: object) -> list[int]:
    lease = client.lease(task, rows)
    client.ack(lease, columns=client.columns(rows, **columns))  # type: ignore[arg-type]
    return lease.rows


def lose(world: World, rows: list[int], field: str) -> dict[str, list[int]]:
    """Lose the blocks that hold a field of rows."""
    table = world.table()
    (places,) = table.column_groups.locate([field], table.rows.pages.index(np.array(rows)))
    lost = world.ledger.blocks_lost(set(places.blocks.tolist()) - {0}, world.now)
    world.collect()
    return lost


def states(world: World, row: int) -> dict[str, str]:
    return {name: one.state for name, one in world.ledger.observe(m.Observe("row", "t", row), world.now).tasks.items()}


def test_what_no_task_gives_is_lost_with_its_row(world: World, client: Driver) -> None:
    client.create(tasks=TASKS)
    client.put(2, ["prompt"])
    client.put(1, ["prompt"])
    assert lose(world, [0], "prompt") == {"t": [0, 1]}
    assert world.audit().tables["t"].dropped == {"lost": 2}
    assert world.audit().balanced
    assert client.lease("generate", 1).rows == [2]


def test_what_a_task_gave_it_gives_again_and_what_came_of_it_too(world: World, client: Driver) -> None:
    client.create(tasks=TASKS)
    client.put(2, ["prompt"])
    give(client, "generate", 2, big=["text"])
    give(client, "reward", 2, inline={"score": 1.0})
    assert lose(world, [0], "text") == {}
    assert states(world, 0) == {"generate": "ready", "reward": "pending", "train": "pending"}
    give(client, "generate", 2, big=["text"])
    give(client, "reward", 2, inline={"score": 2.0})
    lease = client.lease("train", 2)
    assert (lease.rows, lease.column("score")) == ([0, 1], [2.0, 2.0])
    client.ack(lease)
    audit = world.audit().tables["t"]
    assert (audit.rows_done, audit.rows_dropped, audit.balanced) == (2, 0, True)


def trainable(client: Driver, rows: int = 1) -> None:
    """Rows that went all the way to "train", each step by one request."""
    client.create(tasks=TASKS)
    client.put(rows, ["prompt"])
    give(client, "generate", rows, big=["text"])
    give(client, "reward", rows, inline={"score": 1.0})


def test_a_row_on_lease_stays_with_its_holder_who_may_have_read_it(world: World, client: Driver) -> None:
    trainable(client)
    held = client.lease("train", 1)
    assert lose(world, [0], "text") == {}
    assert client.ack(held).rows == 1
    assert world.audit().tables["t"].rows_done == 1


@pytest.mark.parametrize("failed", [False, True])
def test_a_row_that_comes_back_from_a_lease_is_made_again(world: World, client: Driver, failed: bool) -> None:
    trainable(client)
    held = client.lease("train", 1)
    assert lose(world, [0], "text") == {}
    client.release(held, failed=failed)
    assert states(world, 0) == {"generate": "ready", "reward": "pending", "train": "pending"}


def test_a_row_that_comes_back_without_what_nobody_gives_ends(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train", ["text"])])
    client.put(2, ["text"])
    held = client.lease("train", 1)
    assert lose(world, [0, 1], "text") == {"t": [1]}
    world.pass_time(1000)
    assert world.ended[-1].lease == held.lease
    assert world.audit().tables["t"].dropped == {"lost": 2}
    with pytest.raises(LeaseExpired):
        client.ack(held)


def test_a_row_set_aside_for_a_rank_that_has_not_come_is_lost(world: World, client: Driver) -> None:
    client.create(tasks=[Task("train", ["text"])])
    client.put(1, ["text"])
    client.put(1, ["text"])
    first = client.lease("train", 2, rank=0, world=2)
    (other,) = {0, 1} - set(first.rows)
    assert lose(world, [other], "text") == {"t": [other]}
    assert client.lease("train", 2, rank=1, world=2).rows == []


def test_what_no_task_waits_for_is_only_missing(world: World, client: Driver) -> None:
    client.create(tasks=TASKS)
    client.put(1, ["prompt"])
    client.put(1, ["prompt"])
    give(client, "generate", 2, big=["text"])
    assert lose(world, [0], "prompt") == {}
    assert [one.detail for one in client.observe("row", "t", 0).events if one.what == "damaged bytes"] == ["prompt"]
    give(client, "reward", 2, inline={"score": 1.0})
    with pytest.raises(NotFound, match='row 0 of table "t" does not have "prompt"'):
        client.read([0, 1], fields=["prompt"])
    assert client.lease("train", 2).rows == [0, 1]


def test_what_is_made_again_needs_what_it_was_made_of(world: World, client: Driver) -> None:
    """The prompt was only missing; as the text is lost too, the row could be made again of nothing."""
    trainable(client, 2)
    assert lose(world, [0], "prompt") == {}
    assert lose(world, [0], "text") == {"t": [0, 1]}
    assert world.audit().tables["t"].rows_lost == 2


def test_a_stale_row_cannot_go_back_to_a_task_whose_input_is_gone(world: World, client: Driver) -> None:
    client.create(tasks=TASKS, pacing=Pacing("train", 2, 2, 1, Requeue("generate")))
    client.put(2, ["prompt"], policy_version=0)
    give(client, "generate", 2, big=["text"])
    assert lose(world, [0], "prompt") == {}
    client.advance(2)
    assert world.audit().tables["t"].dropped == {"lost": 2}


def test_a_row_that_was_trained_is_not_trained_again(world: World, client: Driver) -> None:
    client.create(tasks=[*TASKS, Task("log", ["text", "never"])])
    client.put(1, ["prompt"])
    give(client, "generate", 1, big=["text"])
    give(client, "reward", 1, inline={"score": 1.0})
    client.ack(client.lease("train", 1))
    assert lose(world, [0], "text") == {"t": [0]}
    assert world.audit().balanced


@pytest.mark.parametrize("covered", [True, False])
def test_a_row_acked_with_a_step_is_missed_only_by_a_rollback(world: World, client: Driver, covered: bool) -> None:
    client.create(tasks=[Task("train", ["text"])])
    client.put(1, ["text"])
    client.ack(client.lease("train", 1), step=3)
    assert lose(world, [0], "text") == {}
    if covered:
        client.checkpointed(3)
        assert world.audit().tables["t"].rows_done == 1
    else:
        client.rollback(2)
        assert world.audit().tables["t"].dropped == {"lost": 1}


def test_of_a_group_that_waits_a_member_is_made_again(world: World, client: Driver) -> None:
    client.create(tasks=[*TASKS[:2], Task("train", ["text", "score"], groups=Complete())])
    client.put(2, ["prompt"], group_id=0, group_size=2)
    give(client, "generate", 1, big=["text"])
    give(client, "generate", 1, big=["text"])
    give(client, "reward", 2, inline={"score": 1.0})
    assert lose(world, [0], "text") == {}
    assert states(world, 1)["train"] == "held"
    give(client, "generate", 1, big=["text"])
    give(client, "reward", 1, inline={"score": 1.0})
    assert sorted(client.lease("train", groups=1).rows) == [0, 1]


def test_a_group_that_was_handed_over_stays_whole_with_its_holder(world: World, client: Driver) -> None:
    client.create(tasks=[*TASKS[:2], Task("train", ["text", "score"], groups=Complete())])
    client.put(2, ["prompt"], group_id=0, group_size=2)
    give(client, "generate", 1, big=["text"])
    give(client, "generate", 1, big=["text"])
    give(client, "reward", 2, inline={"score": 1.0})
    lease = client.lease("train", groups=1)
    assert lose(world, [0], "text") == {}
    assert client.ack(lease).rows == 2
    assert world.audit().balanced


def test_a_field_that_was_put_by_hand_is_given_by_the_task_that_still_has_the_row(world: World, client: Driver) -> None:
    client.create(tasks=TASKS)
    client.put(1, ["prompt"])
    client.update([0], ["text"])
    assert lose(world, [0], "text") == {}
    give(client, "generate", 1, big=["text"])
    assert client.lease("reward", 1).rows == [0]
