"""What the next life finds is what this life had told, whenever it ended."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from tests.ledger.driver import World
from tests.ledger.test_determinism import Fuzz
from transferqueue.errors import Corruption, InternalError, LedgerTorn, OutOfMemory, UsageError
from transferqueue.ledger import Blocked, Ledger
from transferqueue.ledger.dispatch import HANDLERS
from transferqueue.policies import Task
from transferqueue.server.durability import recorded_ledger as recording
from transferqueue.server.durability.recorded_ledger import RecordedLedger, Tail, replay_journal
from transferqueue.wire import messages as m


class Paper:
    """A journal in memory that forgets what was not committed, as a crash does."""

    def __init__(self):
        self.image, self.records, self.pending = None, [], []
        self.checkpoints = 0

    def append(self, record):
        self.pending.append(record)

    def commit(self):
        self.records += self.pending
        self.pending = []

    def checkpoint(self, image):
        self.image, self.records, self.pending = image, [], []
        self.checkpoints += 1

    def load(self):
        return self.image, list(self.records)

    def close(self):
        self.pending = []


def reborn(paper):
    paper.close()
    ledger, tail = replay_journal(paper)
    return RecordedLedger(ledger, paper, tail, epoch=ledger.epoch + 1)


class Told(Fuzz):
    """Notes all but what calls do that change nothing: who was heard when, and who is woken for a view that a waiting
    lease has built."""

    def note(self, data):
        for untold in (rb"WakeWaiters\(key=\([^)]*\)\)(, )?", rb" \(silent [0-9]+ s\)", rb"(?s)silent_s.{9}"):
            data = re.sub(untold, b"", data)
        super().note(data.replace(b", ]", b"]"))


@pytest.mark.parametrize("seed", range(4))
def test_a_ledger_that_dies_again_and_again_does_what_one_that_lives_does(seed):
    alive = Told(seed)
    for _ in range(400):
        alive.step()
    fuzz, dice, paper = Told(seed), random.Random(seed), Paper()
    fuzz.ledger = RecordedLedger(fuzz.ledger, paper, epoch=1)
    fuzz.ledger.checkpoint()
    for step in range(400):
        fuzz.step()
        fuzz.ledger.commit()
        if dice.random() < 0.05 and not fuzz.ledger.state.core.effects._events:
            fuzz.ledger = reborn(paper)
        if dice.random() < 0.02:
            fuzz.ledger.checkpoint()
        if step % 20 == 0:
            fuzz.check()
    fuzz.check()
    assert fuzz.log.hexdigest() == alive.log.hexdigest()
    assert fuzz.ledger.epoch > 5


@pytest.fixture
def paper():
    return Paper()


@pytest.fixture
def world(paper):
    ledger, tail = replay_journal(paper)
    assert (ledger.epoch, tail) == (0, Tail())
    return World(RecordedLedger(ledger, paper, tail, epoch=1))


def test_what_was_not_committed_never_happened(world, paper):
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(2)
    world.ledger.commit()
    client.put(3)
    world.ledger = reborn(paper)
    assert world.table().rows_put == 2
    assert client.put(1) == [2]


def test_what_changes_nothing_is_not_written(world, paper):
    client = world.client()
    client.create(tasks=[Task("t")])
    world.ledger.commit()
    with pytest.raises(UsageError):
        client.drop([3, 3])
    assert isinstance(client.lease("t", 1, wait_s=9), Blocked)
    client.observe("stats")
    client.apply(m.Find("t", ["k"]))
    client.apply(m.OpenTable("t"))
    client.apply(m.ListTables())
    world.pass_time(5)
    assert paper.pending == []


def test_time_stands_still_between_two_lives(world, paper):
    client = world.client()
    client.create(tasks=[Task("t", lease_s=10.0)])
    client.put(1)
    world.now = 100.0
    held = client.lease("t", 1)
    world.ledger.commit()
    world.ledger = reborn(paper)
    assert world.ledger.state.now == 100.0
    assert world.ledger.next_deadline() == 110.0
    client.ack(held)
    assert world.audit().tables["t"].rows_done == 1


def test_what_expired_had_expired_at_that_very_time(world, paper):
    client = world.client()
    client.create(tasks=[Task("t", lease_s=10.0)])
    client.put(1)
    lost = client.lease("t", 1)
    world.pass_time(11)
    held = client.lease("t", 1)
    world.ledger.commit()
    world.ledger = reborn(paper)
    with pytest.raises(Exception, match="it expired after 10 s"):
        client.ack(lost)
    assert world.ledger.next_deadline() == 21.0
    client.ack(held)


def test_a_call_sent_again_to_the_next_life_gets_its_reply(world, paper):
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(2)
    request = m.LeaseRequest("t", "t", rows=2)
    reply = client.apply(request, call=50)
    world.ledger.commit()
    world.ledger = reborn(paper)
    assert client.apply(request, call=50) == reply
    assert world.audit().tables["t"].rows_live == 2


def test_sessions_keep_what_the_server_knew_of_them(world, paper):
    world.ledger.open_session(9, b"c" * 16, 0.0, label="me", origin=b"from here")
    world.ledger.commit()
    world.ledger.checkpoint()
    session = reborn(paper).state.sessions[9]
    assert (session.client, session.label, session.origin, session.open) == (b"c" * 16, "me", b"from here", True)


@pytest.mark.parametrize("defect", [ZeroDivisionError, MemoryError, RecursionError, KeyboardInterrupt])
def test_a_request_that_tears_the_ledger_is_not_carried_out_by_the_next_life(world, paper, monkeypatch, defect):
    client = world.client()
    client.create(tasks=[Task("t")])

    def half(state, request, session, call):
        state.core.begin()
        state.dropped_tables["half"] = 1
        state.core.effects.wake("half")
        raise defect

    monkeypatch.setitem(HANDLERS, m.Seal, half)
    with pytest.raises(LedgerTorn, match=rf"Seal met {defect.__name__} .* after its first write"):
        client.apply(m.Seal("t"))
    for act in (
        lambda: client.put(1),
        lambda: world.ledger.close_session(1, 0.0),
        lambda: world.ledger.forget_replies(1, 1),
        world.ledger.checkpoint,
    ):
        with pytest.raises(LedgerTorn, match="followed one that was interrupted"):
            act()
    assert world.ledger.take_effects() == []
    assert world.ledger.torn
    monkeypatch.undo()
    world.ledger.commit()  # what was accepted before may be made durable
    again = reborn(paper)
    assert not again.torn
    assert (again.state.dropped_tables, again.state.tables["t"].sealed) == ({}, False)


def test_a_change_that_cannot_be_written_down_tears_the_ledger(world, paper, monkeypatch):
    client = world.client()
    client.create(tasks=[Task("t")])

    def no_memory(record):
        raise MemoryError

    monkeypatch.setattr(paper, "append", no_memory)
    with pytest.raises(LedgerTorn, match="Put met MemoryError"):
        client.put(1)
    monkeypatch.undo()
    world.ledger.commit()
    assert reborn(paper).state.tables["t"].rows_put == 0


def test_a_new_image_is_made_when_the_tail_outgrows_it(world, paper, monkeypatch):
    monkeypatch.setattr(recording, "TAIL_RECORDS_MAX", 20)
    client = world.client()
    client.create(tasks=[Task("t")])
    for _ in range(100):
        client.put(1)
        world.ledger.commit()
    assert paper.checkpoints == 4
    assert len(paper.records) <= 21
    world.ledger = reborn(paper)  # what is in the journal already counts
    for _ in range(21 - len(paper.records)):
        client.put(1)
        world.ledger.commit()
    assert paper.checkpoints == 5


def test_a_record_that_is_none_is_reported(paper):
    paper.records = [b"\x93\x01\x02\x03"]
    with pytest.raises(Corruption, match=r"record 0 of the journal is invalid: .*; restore a snapshot"):
        replay_journal(paper)


def test_a_record_that_is_refused_now_is_reported(world, paper):
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(1)
    world.ledger.commit()
    del paper.records[1]
    with pytest.raises(
        Corruption,
        match=(
            r"record 1 .*\(CreateTable\) has another outcome now: the journal recorded an acceptance, the replay gave "
            r"Disconnected: session 1"
        ),
    ):
        replay_journal(paper)


def test_a_record_that_would_wait_now_is_reported(world, paper):
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(1)
    client.lease("t", 1, wait_s=5)
    world.ledger.commit()
    del paper.records[3]
    with pytest.raises(
        Corruption,
        match=r"\(Lease\) has another outcome now: the journal recorded \[1, 1, 1, \d+\], the replay gave a wait",
    ):
        replay_journal(paper)


def test_a_record_whose_replay_gives_other_rows_is_reported(world, paper):
    """As after a put that had failed once and was replayed as if it could succeed: later leases would get other
    rows."""
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(2)
    client.put(1)
    world.ledger.commit()
    del paper.records[3]
    with pytest.raises(
        Corruption,
        match=r"record 3 .*\(Put\) has another outcome now: the journal recorded \[2, 1\], the replay gave \[0, 1\]",
    ):
        replay_journal(paper)


def test_a_replay_without_memory_says_so(world, paper, monkeypatch):
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(2)
    world.ledger.commit()

    def none_left(state, request, session, call):
        raise MemoryError

    monkeypatch.setitem(HANDLERS, m.PutRequest, none_left)
    with pytest.raises(OutOfMemory, match=r"record 3 .* cannot be replayed.*start the server with more memory"):
        replay_journal(paper)


def test_a_server_that_is_told_to_stop_while_it_replays_stops(world, paper, monkeypatch):
    """It was refused for a damaged journal, and not started again."""
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(2)
    world.ledger.commit()

    def stopped(state, request, session, call):
        state.core.begin()
        raise SystemExit(0)

    monkeypatch.setitem(HANDLERS, m.PutRequest, stopped)
    with pytest.raises(SystemExit):
        replay_journal(paper)


def test_the_ledger_keeps_its_face(paper):
    ledger = RecordedLedger(Ledger(), paper, epoch=3)
    with pytest.raises(UsageError, match="session 0 is open already"):
        ledger.open_session(0, b"x" * 16, 0.0)
    ledger.open_session(1, b"x" * 16, 0.0)
    with pytest.raises(InternalError, match="session 1 is open; close it"):
        ledger.end_pins(1)
    ledger.close_session(1, 1.0, pins=False)
    ledger.end_pins(1)
    ledger.commit()
    assert reborn(paper).image() != b""
    assert [msgspec.msgpack.decode(record)[0] for record in paper.records] == [
        "_Begun",
        "_Opened",
        "_Closed",
        "_PinsEnded",
    ]
