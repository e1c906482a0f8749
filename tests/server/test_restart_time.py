"""A restarted server serves within two seconds of processor time, whatever the rows came in."""

import itertools
import time

import pytest

from tests.ledger.driver import World
from tests.scale import sizes
from transferqueue.limits import Limits
from transferqueue.policies import Complete, Task
from transferqueue.server.durability.journal import SqliteJournal
from transferqueue.server.durability.recorded_ledger import RecordedLedger, replay_journal
from transferqueue.server.durability_level import Level

ROWS = sizes(25_000, 100_000)
SERVES_WITHIN_S = 2.0


def live_rows(path, rows, batch, *, checkpoint):
    """A journal of a table with so many live rows, put `batch` at a time."""
    journal = SqliteJournal(path, Level.PROCESS)
    ledger, tail = replay_journal(journal)
    world = World(RecordedLedger(ledger, journal, tail, epoch=1))
    places = itertools.count(0, 4096)
    world.allocate = lambda nbytes, shard: (next(places), 4096)
    client = world.client()
    tasks = [Task("reward", ["x"], ["reward"]), Task("train", ["x", "reward"], groups=Complete())]
    client.create(tasks=tasks, limits=Limits(rows=2 * rows))
    for first in range(0, rows, batch):
        groups = [row // 8 for row in range(first, first + batch)]
        client.put(batch, ["x"], {"length": 1.0}, group_id=groups, group_size=8, policy_version=0)
        world.ledger.forget_replies(client.session, client.call)
        world.ledger.commit()
    if checkpoint:
        world.ledger.checkpoint()
    journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("checkpoint", [True, False])
def test_many_live_rows_are_there_again(tmp_path, checkpoint, rows):
    live_rows(tmp_path / "journal.sqlite", rows, 64, checkpoint=checkpoint)
    began = time.process_time()
    journal = SqliteJournal(tmp_path / "journal.sqlite", Level.PROCESS)
    ledger, tail = replay_journal(journal)
    took = time.process_time() - began
    journal.close()
    print(
        f"{took:.3f} s, tail of {tail.records} records, {tail.nbytes / 1e6:.1f} MB, image "
        f"{tail.image_nbytes / 1e6:.1f} MB"
    )
    assert ledger.state.tables["t"].rows_live >= rows - 64
    assert took < SERVES_WITHIN_S
