"""The bulk endpoint without its sockets: who may touch what, how much it holds, and how transfers end."""

import time
import tracemalloc

import numpy as np
import pytest

from tests.transport.whole_messages import deliver
from transferqueue.errors import BY_NAME
from transferqueue.limits import BULK_STALL_S, BULK_TRANSFERS_MAX, BULK_WINDOW_FRAMES, FRAME_BYTES, KIB, MIB
from transferqueue.schema import Field
from transferqueue.server.shards import bulk_endpoint, shard_transfer
from transferqueue.server.shards.bulk_endpoint import BulkEndpoint, ShardTransfers
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage import block_writers
from transferqueue.storage.inputs.prepare import prepare
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.backing import ArenaBacking
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.wire import messages as m

SESSION, EXTENT, SHARD = 7, 3, 0
ARENA_BYTES = 64 * MIB


class Bench:
    """An exchange over an arena with one block in it, and what it sent."""

    def __init__(self, arena):
        self.backing = ArenaBacking(arena)
        self.arena = self.backing.memory
        self.tickets = TicketIssuer()
        self.exchange = ShardTransfers(self.backing, self.tickets)
        self.now = 0.0

    def put(self, **columns):
        """A block at the start of the arena, as a reply names it to the session."""
        (draft,) = block_writers([prepare(name, values) for name, values in columns.items()])
        draft.write(self.arena[: draft.nbytes])
        self.fields = draft.fields
        names = [field.name for field in draft.fields]
        at = m.BlockLocation(1, SHARD, EXTENT, 0, draft.nbytes, draft.stored_rows, names, draft.counts)
        return self.tickets.issue(SESSION, m.WeightsReply(1, [], [at])).blocks[0]

    def grant(self, nbytes, offset=32 * MIB):
        return self.tickets.issue(SESSION, m.Granted(EXTENT, SHARD, offset, nbytes))

    def read(self, at, wanted=None, fields=None, number=1, session=SESSION, **changes):
        wanted = range(at.rows) if wanted is None else wanted
        located = b.BulkBlock(at.block, at.extent, at.offset, at.nbytes, at.rows, 0, at.counts, at.ticket)
        located = b.BulkBlock(*(changes.get(name, getattr(located, name)) for name in located.__struct_fields__))
        slots = np.array(list(wanted), np.int32).tobytes()
        part = b.RowSelection(fields or at.fields, [at.fields], [located], b"", slots)
        return b.ReadColumns(number, session, SHARD, self.fields, [part])

    def write(self, granted, total, at=None, number=1, **changes):
        facts = {"extent": granted.extent, "offset": granted.offset, "nbytes": granted.nbytes, "ticket": granted.ticket}
        facts |= {"session": SESSION, "shard": SHARD} | changes
        return b.WriteExtent(number, at=granted.offset if at is None else at, total=total, **facts)

    def say(self, head, pieces=(), peer=b"p"):
        self.hand_over(*b.message(head, pieces), peer=peer)

    def hand_over(self, head, pieces, peer=b"p"):
        """As a port does, with what came whole."""
        self.exchange.now = self.now
        try:
            deliver(head, pieces, self.exchange.desk(peer))
        except BY_NAME["Corruption"] as error:
            self.exchange.spoiled(peer, error)
        else:
            self.exchange.receive(peer)

    def heard(self):
        found = [(peer, b.to_client(message[0]), message[1]) for peer, message in self.exchange.outbox]
        self.exchange.outbox.clear()
        return found

    def frames(self, peer=b"p"):
        """All that comes of a read, by a reader that takes everything."""
        content = []
        while True:
            self.exchange.advance()
            for to, head, pieces in self.heard():
                assert to == peer
                if isinstance(head, b.TransferFailed):
                    raise BY_NAME[head.error](head.text)
                content += [bytes(piece) for piece in pieces]
                self.say(b.FlowAck(head.transfer, head.number + 1), peer=peer)
                if head.last:
                    return b"".join(content)


@pytest.fixture
def bench():
    arena = Arena.create(None, ARENA_BYTES)
    yield Bench(arena)
    arena.close()


def refused(bench):
    (((_, head, _)),) = bench.heard()
    assert isinstance(head, b.TransferFailed), head
    return BY_NAME[head.error](head.text)


def test_a_block_is_read_whole_and_in_part(bench):
    x, y = np.arange(60, dtype=np.float32).reshape(20, 3), [np.arange(row) for row in range(20)]
    at = bench.put(x=x, y=y)
    bench.say(bench.read(at))
    assert bench.frames() == bytes(bench.arena[: at.nbytes])
    bench.say(bench.read(at, wanted=[3, 17, 4], fields=["x"]))
    assert bench.frames()[:36] == x[[3, 17, 4]].tobytes()
    assert len(bench.exchange) == 0, "both are over"


def test_a_read_of_no_row_is_refused(bench):
    at = bench.put(x=np.arange(60).reshape(20, 3), y=[np.arange(row) for row in range(20)])
    for fields in (["x"], ["y"], ["x", "y"]):
        bench.say(bench.read(at, wanted=[], fields=fields))
        error = refused(bench)
        assert (type(error).__name__, str(error)) == ("ProtocolError", "a part of a bulk read names no row")
    assert len(bench.exchange) == 0


def test_who_has_all_of_a_read_is_told_nothing_when_it_is_freed(bench):
    at = bench.put(x=np.arange(6))
    bench.say(bench.read(at))
    bench.exchange.advance()
    assert [head.last for _, head, _ in bench.heard()] == [True]
    bench.tickets.revoke(EXTENT)
    bench.exchange.tick(1.0)
    bench.say(b.FlowAck(1, 1))
    assert (bench.heard(), len(bench.exchange)) == ([], 0)


def test_what_was_not_named_to_a_session_cannot_be_read(bench):
    at = bench.put(x=np.arange(6))
    for changes in ({"block": 2}, {"extent": 9}, {"offset": 64}, {"nbytes": at.nbytes + 64}, {"ticket": bytes(16)}):
        bench.say(bench.read(at, **changes))
        with pytest.raises(BY_NAME["UsageError"], match=r"no such ticket"):
            raise refused(bench)
    bench.say(bench.read(at, session=SESSION + 1))
    with pytest.raises(BY_NAME["UsageError"], match=f"session {SESSION + 1} no such ticket for these bytes"):
        raise refused(bench)


@pytest.mark.parametrize("rows", [[99], [-1], [0, 6]])
def test_rows_that_a_block_does_not_have_are_refused(bench, rows):
    bench.say(bench.read(bench.put(x=np.arange(6)), wanted=rows))
    with pytest.raises(BY_NAME["Corruption"], match="beyond the rows"):
        raise refused(bench)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 10**6}, "smaller than its layout"),
        ({"counts": [5]}, "count 5 is not one|smaller than its layout"),
        ({"counts": []}, "0 counts for 1 fields"),
        ({"layout": 4}, "has no layout"),
    ],
)
def test_a_block_is_not_what_a_reader_says_but_what_it_can_be(bench, changes, message):
    bench.say(bench.read(bench.put(x=np.arange(6)), **changes))
    with pytest.raises(Exception, match=message):
        raise refused(bench)


def test_offsets_that_point_outside_are_never_followed(bench):
    at = bench.put(y=[np.arange(3), np.arange(4), np.arange(5)])
    bench.arena[:32].view(np.int64)[2] = 1 << 40
    bench.say(bench.read(at))
    assert bench.frames() == bytes(bench.arena[: at.nbytes]), "as it lies: the reader checks the offsets"
    for rows in ([0, 1], [2, 0], [1, 0]):
        bench.say(bench.read(at, wanted=rows))
        with pytest.raises(BY_NAME["Corruption"], match="offsets of a block point outside it"):
            raise refused(bench)
    bench.say(bench.read(at, fields=["z"]))
    with pytest.raises(BY_NAME["NotFound"], match='"z"'):
        raise refused(bench)


@pytest.fixture
def damaged(bench):
    """A block that a remote session wrote, whose second frame changed in memory since."""
    content = np.random.default_rng(5).integers(0, 255, 3 * MIB, np.uint8)
    granted = bench.grant(4 * MIB)
    bench.say(bench.write(granted, content.nbytes), [content[:MIB].data])
    for number in (1, 2):
        bench.say(b.WriteFrame(1, number), [content[number * MIB : (number + 1) * MIB].data])
    bench.heard()
    bench.fields = [Field("x", "uint8", (MIB,))]
    block = m.BlockLocation(1, SHARD, EXTENT, granted.offset, 3 * MIB, 3, ["x"], [0])
    at = bench.tickets.issue(SESSION, m.WeightsReply(1, [], [block])).blocks[0]
    bench.say(bench.read(at))
    assert bench.frames() == content.tobytes()
    bench.arena[granted.offset + MIB + 7] ^= 1
    return at


def test_a_byte_that_changes_in_memory_is_not_sent_as_if_it_were_right(bench, damaged):
    bench.say(bench.read(damaged))
    for frame in range(3):
        bench.exchange.advance()
        ((_, (head, pieces)),) = bench.exchange.outbox
        bench.exchange.outbox.clear()
        assert (b.digest(pieces) == b.content_digest(head)) == (frame != 1)
        bench.say(b.FlowAck(1, frame + 1))


def test_checksums_are_forgotten_with_their_bytes_and_with_their_extent(bench, damaged):
    granted = bench.grant(4 * MIB)
    bench.say(bench.write(granted, MIB // 2, at=granted.offset + MIB, number=2), [bytes(MIB // 2)])
    bench.heard()
    bench.say(bench.read(damaged))
    assert len(bench.frames()) == 3 * MIB, "what touched the new bytes is hashed again"
    assert len(bench.exchange._sums.digests) == 3
    bench.tickets.revoke(EXTENT)
    bench.exchange.tick(0.0)
    assert len(bench.exchange._sums.digests) == 0


@pytest.mark.parametrize(
    ("cut", "error", "message"),
    [
        (b.BulkCut([0, 99], []), "SchemaError", "stop is at most 3"),
        (b.BulkCut([], [[0, 1]]), "SchemaError", "leave axes out"),
        (b.BulkCut([2, 1], []), "UsageError", "empty, negative or beyond"),
        (b.BulkCut([1], []), "UsageError", "two whole numbers"),
        (b.BulkCut([5, 2, 0], []), "UsageError", "0 <= index < of"),
    ],
)
def test_a_cut_that_does_not_fit_its_field_is_refused(bench, cut, error, message):
    read = bench.read(bench.put(x=np.arange(60, dtype=np.float32).reshape(20, 3)))
    read.parts[0].slices["x"] = cut
    bench.say(read)
    with pytest.raises(BY_NAME[error], match=message):
        raise refused(bench)


def test_a_cut_is_all_that_leaves(bench):
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    read = bench.read(bench.put(x=x))
    read.parts[0].slices["x"] = b.BulkCut([1, 3], [])
    bench.say(read)
    assert bench.frames() == x[:, 1:].tobytes().ljust(192, b"\0")


def test_bytes_are_written_where_they_were_granted_and_nowhere_else(bench):
    granted = bench.grant(4 * MIB)
    data = np.random.default_rng(0).integers(0, 255, 3 * MIB + 5, dtype=np.uint8)
    frames = [data[start : start + FRAME_BYTES].data for start in range(0, len(data), FRAME_BYTES)]
    bench.say(bench.write(granted, len(data), at=granted.offset + 64), [frames[0]])
    for number, frame in enumerate(frames[1:], start=1):
        bench.say(b.WriteFrame(1, number), [frame])
    _, told, _ = bench.heard()[-1]
    assert told == b.FlowAck(1, len(frames), True)
    start = granted.offset + 64
    assert np.array_equal(bench.arena[start : start + len(data)], data)
    bench.arena[start : start + len(data)] = 0
    assert not bench.arena.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ticket": bytes(16)}, "no such ticket"),
        ({"extent": 5}, "no such ticket"),
        ({"nbytes": 8 * MIB}, "no such ticket"),
        ({"session": 8}, "no such ticket"),
        ({"at": 0}, "write inside it"),
        ({"total": 9 * MIB}, "write inside it"),
    ],
)
def test_a_write_outside_its_grant_changes_nothing(bench, changes, message):
    granted = bench.grant(MIB)
    bench.say(bench.write(granted, **({"total": 100} | changes)), [bytes(range(100))])
    with pytest.raises(BY_NAME["UsageError"], match=message):
        raise refused(bench)
    assert not bench.arena.any()


def test_a_frame_that_is_missing_or_too_much_ends_a_write(bench):
    granted = bench.grant(MIB)
    bench.say(bench.write(granted, 200), [b"1" * 100])
    bench.say(b.WriteFrame(1, 2), [b"2" * 100])
    with pytest.raises(BY_NAME["Corruption"], match="frame 2 came instead of frame 1"):
        raise refused(bench)
    bench.say(bench.write(granted, 200), [b"1" * 201])
    with pytest.raises(BY_NAME["Corruption"], match="1 more than it announced"):
        raise refused(bench)
    assert len(bench.exchange) == 0


def test_a_frame_that_comes_after_its_extent_was_freed_is_not_written(bench):
    granted = bench.grant(MIB)
    bench.say(bench.write(granted, 200), [b"1" * 100])
    bench.heard()
    bench.tickets.revoke(EXTENT)
    bench.arena[:] = 0  # somebody else's now
    bench.say(b.WriteFrame(1, 1), [b"2" * 100])
    with pytest.raises(BY_NAME["Disconnected"], match="freed since"):
        raise refused(bench)
    bench.say(bench.write(granted, 200), [b"1" * 100])
    with pytest.raises(BY_NAME["Disconnected"], match="freed since"):
        raise refused(bench)
    assert not bench.arena.any()


def test_a_read_ends_when_its_extent_is_freed_before_a_strange_byte_leaves(bench):
    at = bench.put(x=np.zeros((32, MIB), np.uint8))
    bench.say(bench.read(at))
    bench.exchange.advance()
    bench.heard()
    bench.tickets.revoke(EXTENT)
    bench.arena[:] = 99  # somebody else's now
    bench.exchange.advance()
    with pytest.raises(BY_NAME["Disconnected"], match="freed since"):
        raise refused(bench)
    assert len(bench.exchange) == 0


def test_a_session_that_ends_takes_its_transfers_with_it(bench):
    at = bench.put(x=np.zeros((32, MIB), np.uint8))
    bench.say(bench.read(at))
    told = []
    bench.tickets.on_close = lambda: told.append(1)
    bench.tickets.close(SESSION + 1)
    assert not told, "it never had a ticket"
    bench.tickets.close(SESSION)
    assert told
    bench.exchange.tick(bench.now)
    with pytest.raises(BY_NAME["Disconnected"], match="session is over"):
        raise refused(bench)
    assert len(bench.exchange) == 0


def test_rows_that_lie_apart_are_gathered_in_one_buffer_by_who_keeps_up(bench):
    """In more of them only while frames have not left: memory that was just used is in the cache."""
    rows = np.random.default_rng(2).integers(0, 255, (1024, 8 * KIB), np.uint8)
    order = np.random.default_rng(3).permutation(1024)
    bench.say(bench.read(bench.put(x=rows), wanted=order))
    content, addresses = [], set()
    while len(bench.exchange):
        bench.exchange.advance()
        for _, head, pieces in bench.heard():
            content += [bytes(piece) for piece in pieces]
            addresses.add(memory_address(np.frombuffer(pieces[0], np.uint8)))
            del pieces
            bench.say(b.FlowAck(head.transfer, head.number + 1))
        bench.exchange.prepare()
    assert b"".join(content) == rows[order].tobytes()
    assert len(content) == -(-rows.nbytes // FRAME_BYTES)
    assert len(addresses) == 1


@pytest.mark.parametrize(("turn_s", "frames"), [(60.0, 4), (0.0, 1)])
def test_a_transfer_that_is_alone_sends_a_few_frames_a_turn_unless_they_take_long(bench, monkeypatch, turn_s, frames):
    """Who asks meanwhile waits for a turn."""
    monkeypatch.setattr(shard_transfer, "FRAME_BYTES", 4 * KIB)
    monkeypatch.setattr(bulk_endpoint, "TURN_BYTES", 16 * KIB)
    monkeypatch.setattr(bulk_endpoint, "TURN_S", turn_s)
    endpoint = BulkEndpoint(bench.backing, bench.tickets)
    line = BulkClient("127.0.0.1", endpoint.listen(["tcp://127.0.0.1:0"]), epoch=1)
    try:
        assert line.open(5.0)
        order = np.random.default_rng(3).permutation(64)
        line.send(b.message(bench.read(bench.put(x=np.zeros((64, KIB), np.uint8)), wanted=order)))
        sent, late = [0], time.monotonic() + 20.0
        while sent[-1] < 6 * 4 * KIB and time.monotonic() < late:
            endpoint._turn(time.monotonic())
            sent.append(endpoint.sent_bytes["stream"])
        assert max(np.diff(sent)) == frames * 4 * KIB
    finally:
        line.close()
        endpoint.stop()


@pytest.mark.parametrize("scattered", [False, True])
def test_a_reader_that_stalls_holds_its_window_and_not_more(bench, scattered):
    rows = np.random.default_rng(1).permutation(8 * 1024) if scattered else None
    at = bench.put(x=np.ones((8 * 1024, 3072), np.uint8), y=[np.ones(100, np.uint8)] * (8 * 1024))
    reads = [bench.read(at, wanted=rows) for _ in range(3)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for peer, read in enumerate(reads):
            bench.say(read, peer=b"%d" % peer)
        for _ in range(100):
            bench.exchange.advance()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(bench.exchange.outbox) == 3 * BULK_WINDOW_FRAMES
    assert held < 3 * ((BULK_WINDOW_FRAMES + 2) * FRAME_BYTES if scattered else 2 * MIB)
    assert not bench.exchange.busy()
    bench.now = bench.exchange.next_deadline()
    assert bench.now == BULK_STALL_S
    bench.exchange.tick(bench.now)
    assert len(bench.exchange) == 0


def test_a_peer_that_is_gone_and_one_that_begins_anew_free_what_they_had(bench):
    at = bench.put(x=np.zeros((32, MIB), np.uint8))
    bench.say(bench.read(at))
    bench.say(bench.read(at, number=2))
    assert len(bench.exchange) == 1
    bench.exchange.lost(b"p")
    assert len(bench.exchange) == 0
    bench.say(b.FlowAck(2, 0))
    with pytest.raises(BY_NAME["Unreachable"], match="not under way"):
        raise refused(bench)


def test_of_one_session_only_so_many_transfers_are_kept(bench):
    at = bench.put(x=np.zeros((32, MIB), np.uint8))
    for peer in range(BULK_TRANSFERS_MAX + 3):
        bench.now = float(peer)
        bench.say(bench.read(at), peer=b"%d" % peer)
    assert len(bench.exchange) == BULK_TRANSFERS_MAX
    bench.say(b.FlowAck(1, 0), peer=b"0")
    with pytest.raises(BY_NAME["Unreachable"]):
        raise refused(bench)


def test_what_cannot_be_believed_ends_what_is_under_way_there_and_nowhere_else(bench):
    at = bench.put(x=np.zeros((32, MIB), np.uint8))
    for peer in (b"p", b"q"):
        bench.say(bench.read(at), peer=peer)
    bench.hand_over(b"garbage that is long enough but no message", [])
    with pytest.raises(BY_NAME["Corruption"], match="its bytes changed on the way"):
        raise refused(bench)
    assert len(bench.exchange) == 1


def test_tickets_of_a_kept_key_go_on_for_what_is_left(bench):
    key = bytes(range(32))
    before, after = TicketIssuer(key), TicketIssuer(key)
    granted = before.issue(SESSION, m.Granted(EXTENT, SHARD, 0, MIB))
    assert after.issue(SESSION, m.Granted(EXTENT, SHARD, 0, MIB)) == granted
    after = TicketIssuer(key)
    bench.tickets, bench.exchange = after, ShardTransfers(bench.backing, after)
    bench.say(bench.write(granted, 4), [b"abcd"])
    with pytest.raises(BY_NAME["Disconnected"], match="freed since"):
        raise refused(bench)
    after.resume([SESSION], [EXTENT])
    bench.say(bench.write(granted, 4), [b"abcd"])
    assert bytes(bench.arena[:4]) == b"abcd"


def test_local_replies_carry_no_ticket(bench):
    assert m.Granted(1, 0, 0, 64).ticket == b""
    assert bench.tickets.issue(SESSION, m.DoneReply(3)) == m.DoneReply(3)


def test_a_later_write_to_the_same_place_ends_the_earlier_one_and_late_bytes_find_no_place(bench):
    granted = bench.grant(4 * MIB)
    bench.say(bench.write(granted, 2 * MIB), [b"a" * MIB], peer=b"p")
    bench.say(bench.write(granted, 1 * MIB, at=granted.offset + 3 * MIB), [b"c" * MIB], peer=b"r")
    bench.say(bench.write(granted, 2 * MIB), [b"b" * MIB], peer=b"q")
    bench.say(b.WriteFrame(1, 1), [b"b" * MIB], peer=b"q")
    bench.heard()
    bench.say(b.WriteFrame(1, 1), [b"a" * MIB], peer=b"p")
    with pytest.raises(BY_NAME["Unreachable"], match="is not under way"):
        raise refused(bench)
    place = bench.arena[granted.offset : granted.offset + 4 * MIB]
    assert bytes(place[: 2 * MIB]) == b"b" * 2 * MIB
    assert bytes(place[3 * MIB :]) == b"c" * MIB


def test_bytes_that_come_after_their_memory_was_lent_again_are_dropped(bench):
    granted = bench.grant(2 * MIB)
    head, _ = b.message(bench.write(granted, MIB), [bytes(MIB)])
    desk = bench.exchange.desk(b"p")
    desk.expect(head, MIB)
    assert desk.fill(lambda into: into.__setitem__(slice(0, 3), b"new") or 3) == 3
    bench.tickets.revoke(EXTENT)
    bench.arena[granted.offset : granted.offset + MIB] = 7
    assert desk.fill(lambda into: into.__setitem__(slice(0, 3), b"old") or 3) == 3
    assert (bench.arena[granted.offset : granted.offset + MIB] == 7).all()
    with pytest.raises(BY_NAME["Disconnected"], match="freed since"):
        raise refused(bench)


def test_who_is_clogged_gets_no_frame(bench):
    at = bench.put(x=np.zeros((4, MIB), np.uint8))
    for peer in (b"p", b"q"):
        bench.say(bench.read(at), peer=peer)
    assert bench.exchange.busy({b"p"})
    bench.exchange.advance({b"p"})
    assert [peer for peer, _, _ in bench.heard()] == [b"q"]
    assert not bench.exchange.busy({b"p", b"q"})


def test_only_writes_have_content(bench):
    at = bench.put(x=np.arange(6))
    bench.say(bench.read(at), [b"what for"])
    with pytest.raises(BY_NAME["ProtocolError"], match="a bulk Read has no content, but this one has 8 bytes"):
        raise refused(bench)
    assert len(bench.exchange) == 0
