"""What an explanation says when a great many leases are out: the oldest by name, the rest by number."""

from __future__ import annotations

from tests.ledger.driver import World
from transferqueue.ledger.explain import LEASES_SEEN
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m


def test_leases_beyond_those_looked_at_are_counted() -> None:
    world = World()
    client = world.client(label="worker")
    client.create(tasks=[Task("grade", ["x"])], fields=[Field("x", "float64")])
    client.put(LEASES_SEEN + 20, inline={"x": [0.0] * (LEASES_SEEN + 20)})
    for _ in range(LEASES_SEEN + 20):
        client.lease("grade", 1)
    text = world.ledger.explain(m.Lease("t", "grade", rows=1), world.now)
    assert f'{LEASES_SEEN} rows are leased for "grade" by worker' in text
    assert '20 more rows are leased for "grade"' in text
