"""A restarted server serves within two seconds, whatever the rows came in."""

import itertools
import time

import pytest

from tests.ledger.driver import World
from transferqueue.limits import Limits
from transferqueue.policies import Complete, Task
from transferqueue.server.durability.journal import Level, SqliteJournal
from transferqueue.server.durability.recorded_ledger import RecordedLedger, recover

ROWS = 100_000
SERVES_WITHIN_S = 2.0


def live_rows(path, batch, *, checkpoint):
    """A journal of a table with 100,000 live rows, put `batch` at a time."""
    journal = SqliteJournal(path, Level.PROCESS)
    ledger, tail = recover(journal)
    world = World(RecordedLedger(ledger, journal, tail, epoch=1))
    places = itertools.count(0, 4096)
    world.allocate = lambda nbytes, shard: (next(places), 4096)
    client = world.client()
    tasks = [Task("reward", ["x"], ["reward"]), Task("train", ["x", "reward"], groups=Complete())]
    client.create(tasks=tasks, limits=Limits(rows=2 * ROWS))
    for first in range(0, ROWS, batch):
        groups = [row // 8 for row in range(first, first + batch)]
        client.put(batch, ["x"], {"length": 1.0}, group_id=groups, group_size=8, policy_version=0)
        world.ledger.seen(client.session, client.call)
        world.ledger.commit()
    if checkpoint:
        world.ledger.checkpoint()
    journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_hundred_thousand_live_rows_are_there_again(tmp_path, checkpoint):
    live_rows(tmp_path / "journal.sqlite", 64, checkpoint=checkpoint)
    began = time.perf_counter()
    journal = SqliteJournal(tmp_path / "journal.sqlite", Level.PROCESS)
    ledger, tail = recover(journal)
    took = time.perf_counter() - began
    journal.close()
    print(
        f"{took:.3f} s, tail of {tail.records} records, {tail.nbytes / 1e6:.1f} MB, image {tail.image_nbytes / 1e6:.1f} MB"
    )
    assert ledger.state.tables["t"].rows_live >= ROWS - 64
    assert took < SERVES_WITHIN_S
