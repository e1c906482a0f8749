"""Bytes that are gone: rows go back to the task that gave them, where that can be, and end otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import LeaseExpired
from transferqueue.policies import Complete, Task
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
    (places,) = table.parts.locate([field], table.rows.pages.index(np.array(rows)))
    lost = world.ledger.lose(set(places.blocks.tolist()) - {0}, world.now)
    world.collect()
    return lost


def states(world: World, row: int) -> dict[str, str]:
    return {
        name: one["state"] for name, one in world.ledger.observe(m.Observe("row", "t", row), world.now)["tasks"].items()
    }


def test_what_no_task_gives_is_lost_with_its_row(world: World, client: Driver) -> None:
    client.create(tasks=TASKS)
    client.put(2, ["prompt"])
    client.put(1, ["prompt"])
    assert lose(world, [0], "prompt") == {"t": [0, 1]}
    assert world.audit()["tables"]["t"]["dropped"] == {"lost": 2}
    assert world.audit()["balanced"]
    assert client.lease("generate", 1).rows == [2]


def test_what_a_task_gave_it_gives_again_and_what_came_of_it_too(world: World, client: Driver) -> None:
    client.create(tasks=TASKS)
    client.put(2, ["prompt"])
    give(client, "generate", 2, big=["text"])
    give(client, "reward", 2, inline={"score": 1.0})
    held = client.lease("train", 1)
    assert lose(world, [0], "text") == {}
    assert states(world, 0) == {"generate": "ready", "reward": "pending", "train": "pending"}
    with pytest.raises(LeaseExpired):
        client.ack(held)
    give(client, "generate", 2, big=["text"])
    give(client, "reward", 2, inline={"score": 2.0})
    lease = client.lease("train", 2)
    assert (lease.rows, lease.column("score")) == ([0, 1], [2.0, 2.0])
    client.ack(lease)
    audit = world.audit()["tables"]["t"]
    assert (audit["rows_done"], audit["rows_dropped"], audit["balanced"]) == (2, 0, True)


@pytest.mark.parametrize("step", [-1, 3])
def test_a_row_that_was_trained_is_not_trained_again(world: World, client: Driver, step: int) -> None:
    client.create(tasks=[*TASKS, Task("log", ["never"])])
    client.put(1, ["prompt"])
    give(client, "generate", 1, big=["text"])
    give(client, "reward", 1, inline={"score": 1.0})
    client.ack(client.lease("train", 1), step=step)
    assert lose(world, [0], "text") == {"t": [0]}
    assert world.audit()["balanced"]


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


def test_a_group_that_was_handed_over_loses_its_member(world: World, client: Driver) -> None:
    client.create(tasks=[*TASKS[:2], Task("train", ["text", "score"], groups=Complete())])
    client.put(2, ["prompt"], group_id=0, group_size=2)
    give(client, "generate", 1, big=["text"])
    give(client, "generate", 1, big=["text"])
    give(client, "reward", 2, inline={"score": 1.0})
    lease = client.lease("train", groups=1)
    assert lose(world, [0], "text") == {"t": [0]}
    assert client.ack(lease).rows == 1
    assert world.audit()["balanced"]


def test_a_field_that_was_put_by_hand_is_given_by_the_task_that_still_has_the_row(world: World, client: Driver) -> None:
    client.create(tasks=TASKS)
    client.put(1, ["prompt"])
    client.update([0], ["text"])
    assert lose(world, [0], "text") == {}
    give(client, "generate", 1, big=["text"])
    assert client.lease("reward", 1).rows == [0]
