"""The records of a journal have the bytes that were recorded: a server reads what another build of its version wrote.

``python -m tests.server.test_golden_records`` records them anew. Raise `FORMAT` of the journal first, unless no release
has written it yet.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from tests.server.test_recording import Paper
from transferqueue.ledger import Ledger
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.server.durability.journal import FORMAT
from transferqueue.server.durability.recorded_ledger import RecordedLedger, replay_journal
from transferqueue.wire import messages as m

FILE = Path(__file__).parent / "golden" / f"records-{FORMAT}.json"
KINDS = {
    *("_Begun", "_Opened", "_Closed", "_PinsEnded", "_Granted", "_Seen"),
    *("_Lost", "_ShardLost", "_Ticked", "_Applied"),
}
BYTES = Field("b", "int64", (2,))


def made() -> list[bytes]:
    """Records of a ledger to which everything happens that is recorded."""
    paper = Paper()
    ledger = RecordedLedger(Ledger(epoch=0), paper, epoch=7)
    ledger.open_session(5, bytes(range(16)), 1.0, label="worker", origin=b"origin")
    ledger.open_session(6, bytes(range(1, 17)), 1.5)

    def ask(call: int, request: m.Request, now: float) -> None:
        ledger.forget_replies(5, call - 1)
        ledger.apply(request, session=5, call=call, now=now)

    ask(1, m.CreateTable("t", [BYTES], [Task("train", ["b"], lease_s=2.0)]), 2.0)
    extent = ledger.grant(5, 0, 0, 4096, 2.5, call=2).extent
    for at in (0, 1):
        block = m.WrittenBlock(extent, 64 * at, 64, 2, ["b"], [0])
        ask(3 + at, m.PutRequest("t", 2, m.Columns([BYTES], [block])), 3.0)
    ask(5, m.LeaseRequest("t", "train", rows=1, wait_s=5.0), 4.0)
    ledger.tick(9.0)  # the lease expires
    ledger.blocks_lost([1], 9.5)
    ledger.shard_lost(0, 10.0)
    ledger.close_session(6, 11.0, pins=False)
    ledger.end_pins(6)
    ledger.commit()
    return paper.records


def recorded() -> list[bytes]:
    """The records in the file."""
    return [bytes.fromhex(text) for text in json.loads(FILE.read_text())]


def test_every_kind_of_record_is_recorded():
    assert {msgspec.msgpack.decode(record)[0] for record in recorded()} == KINDS


def test_records_are_written_as_they_were_recorded():
    assert [record.hex() for record in made()] == [record.hex() for record in recorded()]


def test_a_ledger_is_made_from_recorded_records():
    paper = Paper()
    paper.records = recorded()
    ledger, tail = replay_journal(paper)
    assert (ledger.epoch, tail.records) == (7, len(paper.records))
    assert ledger.observe(m.Observe("audit"), 14.0).tables["t"].dropped == {"lost": 4}


if __name__ == "__main__":
    FILE.write_text(json.dumps([record.hex() for record in made()], indent=0) + "\n")
