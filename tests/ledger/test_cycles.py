"""A table that is dropped returns its memory at once: nothing of it waits for a garbage collection."""

import pytest

from tests.cycles import none_of_a_server
from tests.ledger.driver import World
from transferqueue.policies import Compare, Complete, Pacing, Task
from transferqueue.wire import messages as m

GRADE = Task("grade", [], ["score"], lease_s=20)
KINDS = {"rows": Task("train", ["score"]), "groups": Task("train", ["score"], groups=Complete())}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_table_is_no_garbage(kind: str) -> None:
    world = World()
    client = world.client()
    with none_of_a_server():
        client.create(tasks=[GRADE, KINDS[kind]], pacing=Pacing("train", batch_rows=4, depth=1))
        for number in range(1, 3):
            promise = client.reserve(2)
            rows = client.put(2, ["text"], reservation=promise.reservation, group_id=number, group_size=2)
            client.update(rows, inline={"score": 1.0})
        client.lease("train", 2, where=[Compare("score", ">=", 0.5)])
        client.ack(client.lease("train", 2))
        client.apply(m.DropTable("t"))
