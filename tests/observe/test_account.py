"""What the ledger says of itself, key by key as the pages have it: counters, ages, lives, and who is silent."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import NotFound
from transferqueue.observe.verdict import QueueVerdict
from transferqueue.policies import Complete, Manual, Pacing, Requeue, Retry, Task
from transferqueue.wire import messages as m
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.stats import TableAudit, TaskStats

DOCS = Path(__file__).resolve().parents[2] / "docs" / "operate" / "waiting.md"
TASKS = [
    Task("reward", needs=["x"], gives=["r"]),
    Task("train", needs=["x", "r"], groups=Complete(), retry=Retry(attempts=2)),
]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def maker(world: World) -> Driver:
    """A client with table t, and two groups of two in it."""
    client = world.client("maker")
    client.create("t", tasks=TASKS, pacing=Pacing("train", batch_rows=2, depth=3, max_staleness=3))
    client.put(4, inline={"x": np.arange(4.0)}, group_id=[1, 1, 2, 2], group_size=2, policy_version=[0, 0, 1, 1])
    return client


def life(world: World, row: int) -> RowLife:
    return world.ledger.observe(m.Observe("row", "t", row), world.now)


def train(world: World) -> TaskStats:
    return world.stats().tasks["train"]


def why(world: World, groups: int) -> str:
    return world.ledger.explain(m.LeaseRequest("t", "train", groups=groups, wait_s=1.0), world.now)


def test_counters_only_grow(world: World, maker: Driver) -> None:
    maker.update([0, 1, 2, 3], inline={"r": 1.0})
    first = maker.lease("train", groups=1)
    maker.release(first, failed=True)
    world.pass_time(1)
    again = maker.lease("train", groups=2)
    assert (train(world).given, train(world).failed, train(world).done) == (6, 2, 0)
    maker.ack(again)
    assert (train(world).done, train(world).dropped, train(world).leased) == (4, 0, 0)
    maker.drop([0, 1], "filtered")  # done by train, never by reward
    assert (train(world).done, train(world).dropped) == (4, 0)
    assert world.stats().tasks["reward"].dropped == 2


def test_staleness_counts_rows_as_they_are_handed_to_the_pacing_task(world: World, maker: Driver) -> None:
    maker.update([0, 1, 2, 3], inline={"r": 1.0})
    maker.advance(2)
    maker.lease("train", groups=2)
    maker.lease("reward", rows=4)
    assert world.stats().staleness == {"1": 2, "2": 2}


def test_staleness_is_in_flight_until_the_row_has_its_version_and_in_the_queue_after(world: World) -> None:
    client = world.client()
    client.create("p", tasks=[Task("train", ["r"])], pacing=Pacing("train", batch_rows=4, depth=3, max_staleness=3))
    client.put(1, policy_version=0, inline={"r": 0.0}, table="p")  # all of its staleness is of the queue
    late = client.put(2, table="p")
    client.advance(1, table="p")
    client.update(late, table="p", inline={"r": 0.0}, policy_version=[0, 1])  # one was generated across an update
    client.advance(2, table="p")
    client.lease("train", rows=3, table="p")
    stats = world.stats("p")
    assert stats.staleness == {"1": 1, "2": 2}
    assert stats.staleness_in_flight == {"0": 2, "1": 1}
    assert stats.staleness_in_queue == {"1": 2, "2": 1}


def test_a_row_that_was_requeued_is_in_flight_anew(world: World) -> None:
    client = world.client()
    tasks = [Task("make", gives=["r"]), Task("train", ["r"])]
    pacing = Pacing("train", batch_rows=1, depth=3, max_staleness=1, on_stale=Requeue("make"))
    client.create("q", tasks=tasks, pacing=pacing)
    client.put(1, table="q")
    for version in (0, 2):  # at clocks 0 and 3; what the first was in the queue for is not told
        batch = client.lease("make", 1, table="q")
        client.advance(version + version // 2, table="q")
        given = client.columns(1, inline={"r": 0.0}, policy_version=version)
        client.ack(batch, table="q", columns=given)
        client.advance(version + 2 - version // 2, table="q")
    client.lease("train", 1, table="q")
    stats = world.stats("q")
    assert (stats.staleness, stats.staleness_in_flight, stats.staleness_in_queue) == ({"1": 1}, {"1": 1}, {"0": 1})


def test_ages_are_of_what_is_next_and_of_what_is_oldest(world: World, maker: Driver) -> None:
    world.pass_time(5.0)
    stats = world.stats()
    assert (stats.age_s, stats.tasks["reward"].age_s, stats.tasks["train"].age_s) == (5.0, 5.0, None)
    empty = world.client()
    empty.create("u", tasks=[Task("a", needs=["x"])])
    assert world.stats("u").age_s is None


def test_a_rows_life_from_put_to_fate(world: World, maker: Driver) -> None:
    worker = world.client("worker")
    world.pass_time(1.0)
    held = worker.lease("reward", rows=1)
    found = life(world, held.rows[0])
    assert (found.state, found.age_s, found.put_by, found.group_id) == ("live", 1.0, maker.session, 1)
    assert found.fields["x"].set
    assert (found.tasks["reward"].state, found.tasks["reward"].session) == ("leased", worker.session)
    assert (found.tasks["train"].state, found.tasks["train"].lacks) == ("pending", ["r"])
    maker.drop(held.rows, "filtered")
    found = life(world, held.rows[0])
    assert (found.state, found.reason, found.resident, found.fields) == ("dropped", "filtered", False, {})
    assert [event.what for event in found.events][:2] == ["put", "leased"]
    assert found.events_complete


def test_a_row_that_was_never_put(world: World, maker: Driver) -> None:
    with pytest.raises(NotFound, match=r'row 99 was never put into table "t"; ids so far end at 3'):
        life(world, 99)


def test_a_dropped_row_that_stays_says_why(world: World) -> None:
    client = world.client()
    client.create("t", tasks=[Task("a", needs=["x"])], retention=Manual())
    client.put(1, inline={"x": 1.0})
    client.drop([0], "filtered")
    found = life(world, 0)
    assert (found.state, found.reason, found.resident) == ("dropped", "filtered", True)


def test_a_wait_is_explained_by_groups_holders_and_silence(world: World, maker: Driver) -> None:
    maker.update([0, 1, 2], inline={"r": 1.0})
    worker = world.client("rollout-5")
    worker.lease("train", groups=1, lease_s=1000.0)
    text = why(world, 3)
    assert 'task "train" of table "t" waits for 3 complete groups' in text
    assert '1 group is leased for "train" by rollout-5, for 0 s' in text
    assert '1 row lacks "r" (given by "reward": 1 ready and not leased)' in text
    world.pass_time(74.0)
    assert "by rollout-5 (silent 74 s), for 74 s" in why(world, 3)
    world.ledger.message_received(worker.session, world.now)
    assert "by rollout-5, for 74 s" in why(world, 3)


def test_doctor_has_a_line_for_each_task_and_for_its_table(world: World, maker: Driver) -> None:
    answer = world.ledger.observe(m.Observe("doctor"), world.now)
    assert [one.task for one in answer.pipelines["t"].stages] == ["", "reward", "train"]
    assert answer.pipelines["t"].stages[2].lacks == {"r": 4}
    assert [one.task for one in answer.tables["t"]] == ["reward", "train"]


def test_every_key_of_a_verdict_is_documented() -> None:
    words = set(re.findall(r"[a-z_0-9]+", DOCS.read_text()))
    assert set(QueueVerdict.__annotations__) <= words


def test_the_account_has_every_key_that_is_shown(world: World, maker: Driver) -> None:
    assert world.stats().rows_live == 4
    assert world.audit().tables["t"] == TableAudit(
        rows_put=4,
        rows_live=4,
        rows_done=0,
        rows_dropped=0,
        rows_lost=0,
        dropped={},
        balanced=True,
        errors={},
    )
