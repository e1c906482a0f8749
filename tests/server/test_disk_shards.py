"""Shards of a coordinator at level disk: each block has a copy in the coordinator's own memory, which a reboot
leaves."""

import pytest

from tests.server.lives import Life, struct_q
from tests.server.test_replicas import REPLICATED
from tests.server.test_shards import BIG, Joined, local
from transferqueue.limits import MIB, PAGE_BYTES
from transferqueue.policies import Task
from transferqueue.schema import layout
from transferqueue.server.durability import journal_head, state_directory
from transferqueue.server.durability_level import Level
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import Stats

SIZE = layout([BIG], 2, [2])[1]


@pytest.fixture
def lives(tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    made = []

    def begin(level=Level.DISK):
        if made:
            made[-1].crash()
        made.append(Life(tmp_path / "state", level, shared))
        made[-1].clients = 100 * len(made)
        return made[-1]

    yield begin
    made[-1].crash()


def placed(life, granted, copies=()):
    """A block of two values in a grant, written if that is in the coordinator's memory."""
    data = b"".join(map(struct_q, (0, 1, 2))).ljust(64, b"\0") + struct_q(5) + struct_q(6)
    data = data.ljust(SIZE, b"\0")
    if granted.shard == 0:
        with open(life.file, "r+b") as file:
            file.seek(granted.offset)
            file.write(data)
    copies = [m.WrittenCopy(copy.extent, copy.offset) for copy in copies]
    return m.WrittenBlock(granted.extent, granted.offset, SIZE, 2, ["x"], [2], checksum=checksum(data), copies=copies)


def put(client, block):
    return client.ask(m.PutRequest("t", 2, m.Columns(blocks=[block])))


def test_a_block_in_shards_alone_is_refused(lives):
    life = lives()
    Joined(life).work()
    client = local(life)
    client.ask(m.CreateTable("t", fields=[BIG], tasks=[Task("train", ["x"])]))
    granted = client.ask(m.Grant(PAGE_BYTES, apart=[0]))
    assert granted.shard == 1
    refused = put(client, placed(life, granted))
    assert refused.error == "UsageError"
    assert refused.text == (
        "block of x lies only in remote shards (1): this server survives a reboot, and they do not; write it into a "
        "grant of the server's own memory too, in a table with replicas"
    )
    refused = client.ask(m.Publish("c", 1, [BIG], [placed(life, granted)]))
    assert "lies only in remote shards" in refused.text
    assert life.coordinator.ledger.live_rows() == {"t": 0}


def test_more_than_the_own_memory_can_ever_hold_is_refused(lives):
    life = lives()
    Joined(life).work()
    client = local(life)
    for use in ("rows", "results"):
        refused = client.ask(m.Grant(MIB + 1, 5.0, use=use))
        assert refused.error == "Impossible", refused


def test_first_copies_are_the_coordinators_and_others_lie_in_shards(lives):
    life = lives()
    for _ in range(2):
        Joined(life).work()
    client = local(life)
    assert {client.ask(m.Grant(PAGE_BYTES)).shard for _ in range(4)} == {0}
    assert client.ask(m.Grant(PAGE_BYTES, apart=[0])).shard in (1, 2)
    assert client.ask(m.Grant(PAGE_BYTES, apart=[1, 2])).shard == 0
    assert client.ask(m.Grant(PAGE_BYTES, apart=[1])).shard == 0
    process = Level.PROCESS
    assert not process.survives_reboot


@pytest.mark.parametrize("first", ["own", "shard"])
def test_rows_outlive_a_reboot_and_are_copied_to_a_shard_that_comes(lives, monkeypatch, first):
    life = lives()
    Joined(life).work()
    client = local(life)
    assert isinstance(client.ask(REPLICATED), m.TableTerms)
    own, other = client.ask(m.Grant(PAGE_BYTES)), client.ask(m.Grant(PAGE_BYTES, apart=[0]))
    assert (own.shard, other.shard) == (0, 1)
    placed(life, own)
    main, copy = (own, other) if first == "own" else (other, own)
    assert isinstance(put(client, placed(life, main, [copy])), m.PutRows)
    for module in (journal_head, state_directory):
        monkeypatch.setattr(module, "boot_name", lambda: "another boot")
    life = lives()
    assert life.lost == {}
    client = local(life)
    stats = codec.decode_observed(client.ask(m.Observe("stats")), Stats).tables["t"]
    assert (stats.rows_live, stats.rows_one_copy) == (2, 2)
    (part,) = client.ask(m.LeaseRequest("t", "train", rows=2)).content.parts
    assert [(at.shard, at.copies) for at in part.blocks] == [(0, [])]
    shard = Joined(life)
    shard.work()
    order = shard.client.ask(m.TakeCopies())
    assert (order.target.shard, [at.shard for at in order.blocks]) == (2, [0])
    shard.client.post(m.TakeCopies(order.target.extent, [at.block for at in order.blocks], 60.0))
    stats = codec.decode_observed(client.ask(m.Observe("stats")), Stats).tables["t"]
    assert stats.rows_one_copy == 0
