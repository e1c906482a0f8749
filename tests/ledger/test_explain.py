"""Explanations when very many leases are open: they name the holders of the oldest, and count the rest."""

from __future__ import annotations

from tests.ledger.driver import World
from transferqueue.ledger.rules.explain import LEASES_SAMPLED
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer


def test_leases_beyond_those_looked_at_are_counted() -> None:
    world = World()
    client = world.client(label="worker")
    client.create(tasks=[Task("grade", ["x"])], fields=[Field("x", "float64")])
    client.put(LEASES_SAMPLED + 20, inline={"x": [0.0] * (LEASES_SAMPLED + 20)})
    for _ in range(LEASES_SAMPLED + 20):
        client.lease("grade", 1)
    text = world.ledger.explain(m.LeaseRequest("t", "grade", rows=1), world.now)
    assert f'{LEASES_SAMPLED} rows are leased for "grade" by worker' in text
    assert '20 more rows are leased for "grade"' in text


def test_rows_that_were_dropped_are_told_to_who_waits_for_some() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", ["x"])], fields=[Field("x", "float64")])
    client.put(9, inline={"x": [0.0] * 9})
    for reason, rows in (("stale", [0, 1, 2]), ("bad", [3]), ("worse", [4, 5]), ("odd", [6])):
        client.drop(rows, reason)
    client.ack(client.lease("train", 2))
    text = world.ledger.explain(m.LeaseRequest("t", "train", rows=1), world.now)
    dropped = "nothing to do: no unfinished rows; 7 were dropped: stale 3, worse 2, bad 1"
    assert text.endswith(f"{dropped}; the table is still open")


def test_the_doctor_says_which_share_of_the_ended_rows_was_dropped_by_reason() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", ["x"])], fields=[Field("x", "float64")])
    client.put(8, inline={"x": [0.0] * 8})
    assert about_the_table(world) == []
    client.drop([0], "environment_timeout")
    client.ack(client.lease("train", 4))
    assert about_the_table(world) == ["of 5 ended rows, some were dropped: environment_timeout 20.0%"]


def about_the_table(world: World) -> list[str]:
    answer: DoctorAnswer = world.ledger.observe(m.Observe("doctor"), world.now)
    return [each.text for each in answer.tables["t"] if not each.task]


def test_a_field_that_no_task_gives_is_said_to_come_from_outside() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", ["x", "rewards"])], fields=[Field("x", "float64")])
    client.put(1, inline={"x": [0.0]})
    text = world.ledger.explain(m.LeaseRequest("t", "train", rows=2), world.now)
    assert text.endswith('0 rows are ready; 1 row lacks "rewards" (given by no task: put or update must bring it)')


def test_a_task_whose_table_is_not_sealed_is_said_to_wait_for_puts() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", ["x"])], fields=[Field("x", "float64")])
    client.put(1, inline={"x": [0.0]})
    request = m.LeaseRequest("t", "train", rows=2)
    assert world.ledger.explain(request, world.now).endswith("waits for 2 rows: 1 row is ready")
    client.ack(client.lease("train", 1))
    text = world.ledger.explain(request, world.now)
    assert text.endswith("nothing to do: no unfinished rows; the table is still open")
