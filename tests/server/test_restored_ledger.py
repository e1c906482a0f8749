"""A restore into a durable server outlives it: the commit after it leaves an image."""

from __future__ import annotations

from pathlib import Path

from tests.ledger.driver import World
from transferqueue.ledger import Ledger
from transferqueue.policies import Task
from transferqueue.server.durability.journal import SqliteJournal
from transferqueue.server.durability.recorded_ledger import RecordedLedger, replay_journal
from transferqueue.server.durability_level import Level
from transferqueue.wire import messages as m


def test_a_restored_snapshot_is_there_in_the_next_run(tmp_path: Path) -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train")])
    client.put(3, inline={"x": [1.0, 2.0, 3.0]}, ordinal=[0, 1, 2])
    client.ack(client.lease("train", 1), step=4)
    snapshot = world.ledger.take_snapshot(0.0)

    journal = SqliteJournal(tmp_path / "journal.sqlite", Level.PROCESS)
    first = RecordedLedger(Ledger(), journal, epoch=1)
    first.restore_snapshot(snapshot, 5.0)
    first.commit()
    first.open_session(1, b"c" * 16, 6.0)
    assert first.apply(m.Rollback("t", 3), session=1, call=1, now=6.0) == m.DoneReply(1)
    first.commit()
    journal.close()

    journal = SqliteJournal(tmp_path / "journal.sqlite", Level.PROCESS)
    second, _ = replay_journal(journal)
    leased = second.apply(m.LeaseRequest("t", "train", rows=3), session=1, call=2, now=7.0)
    assert isinstance(leased, m.Leased)
    assert leased.content.rows == client.read().rows
    journal.close()
