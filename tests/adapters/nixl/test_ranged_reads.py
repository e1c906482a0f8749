"""Reads whose client fetches the bytes itself, without sockets: what is named, what is registered, and for how long."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.adapters.nixl.one_process import LocalAgent
from tests.server.test_bulk import ARENA_BYTES, EXTENT, Bench, refused
from transferqueue.adapters.carriers.nixl.shard.carrier import OneSidedShard
from transferqueue.adapters.carriers.nixl.shard.client_memory import ClientMemory
from transferqueue.adapters.carriers.nixl.shard.registered_arena import RegionUse, RegisteredArena
from transferqueue.cluster.shard import ShardProcess
from transferqueue.errors import BY_NAME
from transferqueue.limits import ARENA_STEP_BYTES, BULK_WINDOW_FRAMES, KIB, MIB
from transferqueue.schema import Field
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.durability_level import Level
from transferqueue.server.process import assembly
from transferqueue.server.runtime_directory import private_arena
from transferqueue.server.shards.bulk_endpoint import ShardTransfers
from transferqueue.storage.columns.slicing import dense_slices
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.checksum import checksum
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.carriers import chosen_carrier
from transferqueue.transport.security import keyring


class Named(Bench):
    """A bench whose arena is registered."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        arena.ensure(0, 48 * MIB)
        self.owner = arena
        self.agent = LocalAgent()
        self.registered = RegisteredArena(self.backing, self.agent)
        self.exchange = ShardTransfers(
            self.backing, self.tickets, OneSidedShard(self.registered, ClientMemory(LocalAgent))
        )

    def read_ranges(self, at, wanted=None, loaded=("", 0, 0), **changes):
        asked = self.read(at, wanted, **changes)
        return b.ReadRanges(asked.transfer, asked.session, asked.shard, asked.fields, asked.parts, *loaded)

    def in_arena(self, frames: Sequence[b.RangesFrame]) -> int:
        """How many bytes these frames name where they lie, and not staged."""
        base = self.arena.__array_interface__["data"][0]
        ranges = [each for frame in frames for each in frame.ranges]
        return sum(each.nbytes for each in ranges if base <= each.address < base + len(self.arena))

    def bytes_of(self, frame: b.RangesFrame, content: Sequence[memoryview]) -> bytes:
        """What a client makes of a frame."""
        rest, made = memoryview(b"".join(content)), b""
        for each in frame.ranges:
            if each.address:
                assert self.agent.covers(each.address, each.nbytes), "it is registered"
                found = ctypes.string_at(each.address, each.nbytes)
                assert b.digest((found,)) == each.digest
                made += found
            else:
                made, rest = made + bytes(rest[: each.nbytes]), rest[each.nbytes :]
        assert not len(rest)
        return made


@pytest.fixture
def bench() -> Iterator[Named]:
    arena = Arena.create(None, ARENA_BYTES)
    yield Named(arena)
    arena.close()


def frames(bench: Named) -> list[b.RangesFrame]:
    """All frames of a read, by a reader that takes each; what they say is compared with what lies there."""
    found: list[b.RangesFrame] = []
    while not (found and found[-1].last):
        bench.exchange.advance()
        for _, head, content in bench.heard():
            if isinstance(head, b.TransferFailed):
                raise BY_NAME[head.error](head.text)
            found.append(head)
            bench.made += bench.bytes_of(head, content)
            bench.say(b.FlowAck(head.transfer, head.number + 1))
    return found


def test_a_block_is_named_where_it_lies(bench: Named) -> None:
    x = np.random.default_rng(1).integers(0, 255, (40, MIB), np.uint8)
    at, bench.made = bench.put(x=x), b""
    bench.say(bench.read_ranges(at))
    found = frames(bench)
    assert bench.made == x.tobytes()
    assert not any(not each.address for frame in found for each in frame.ranges)
    assert len(found) == 5, "of 8 MiB each"
    assert [bool(frame.metadata) for frame in found] == [True, False, False, False, False]
    assert len(bench.exchange) == 0


def test_rows_that_lie_apart_are_named_if_they_are_long(bench: Named) -> None:
    lengths = np.random.default_rng(2).integers(8 * KIB, 40 * KIB, 64)
    long = [np.full(n, at, np.uint8) for at, n in enumerate(lengths)]
    at, order = bench.put(x=long, y=[row[:100] for row in long]), np.random.default_rng(3).permutation(64)
    bench.made = b""
    bench.say(bench.read_ranges(at, order))
    found = frames(bench)
    bench.say(bench.read(at, order))
    assert bench.made == Bench.frames(bench), "as over the stream"
    named = sum(int(lengths[row]) for row in order if lengths[row] >= b.RANGE_BYTES_MIN)
    assert bench.in_arena(found) == named


@pytest.mark.parametrize(
    ("cut", "named"),
    [
        (b.BulkCut([1 * KIB, 5 * KIB], []), 64 * 4 * KIB * 8),
        (b.BulkCut([1, 4, 1], []), 64 * 2 * 2 * KIB * 8),
        (b.BulkCut([0, 1 * KIB], []), 0),
        (b.BulkCut([], [[0, 4]]), 0),
    ],
    ids=["a range", "a zigzag share", "short runs", "inner ranges"],
)
def test_slices_are_named_if_their_runs_are_long(bench: Named, cut: b.BulkCut, named: int) -> None:
    """Rows of 16 Ki steps of 8 bytes, all of a block and some that lie apart."""
    steps = np.random.default_rng(2).integers(0, 255, (64, 16 * KIB, 8), np.uint8)
    at = bench.put(x=steps)
    whole, apart = np.arange(64), np.random.default_rng(3).permutation(64)
    for order in (whole, apart):
        asked = bench.read_ranges(at, order)
        asked.parts[0].slices["x"] = cut
        bench.made = b""
        bench.say(asked)
        found = frames(bench)
        streamed = bench.read(at, order)
        streamed.parts[0].slices["x"] = cut
        bench.say(streamed)
        assert bench.made == Bench.frames(bench), "as over the stream"
        assert bench.in_arena(found) == named


@pytest.mark.parametrize(
    ("shape", "cut", "in_arena"),
    [
        ((2048, 4096), b.BulkCut([], [[1024, 2048]]), 0),
        ((8, 512, 2048), b.BulkCut([], [[1, 4, 0]]), 4 * MIB),
        ((8, 512, 2048), b.BulkCut([], [[], [1024, 2048]]), 0),
        ((4096, 2048), b.BulkCut([1, 4, 0], []), 4 * MIB),
    ],
    ids=["columns of a matrix", "rows of experts", "columns of experts", "rows of a matrix"],
)
def test_of_a_part_of_a_tensor_all_is_named_and_compared(
    bench: Named, shape: tuple[int, ...], cut: b.BulkCut, in_arena: int
) -> None:
    """Where it lies, if its runs are long, else staged: no byte crosses as content. Damaged, it is refused."""
    values = np.random.default_rng(2).integers(0, 1 << 16, (1, *shape), np.uint16)
    at = bench.put(x=values)
    asked = bench.read_ranges(at)
    part = msgspec.structs.replace(
        asked.parts[0], slices={"x": cut}, sums=[checksum(np.array(bench.arena[: at.nbytes]))]
    )
    asked = msgspec.structs.replace(asked, parts=[part])
    bench.made = b""
    bench.say(asked)
    found = frames(bench)
    wanted = cut.slice()
    index = (slice(None), *dense_slices(Field("x", "uint16", shape), wanted))
    assert bench.made == values[index].tobytes()
    assert bench.in_arena(found) == in_arena
    assert all(each.address for frame in found for each in frame.ranges)
    bench.arena[at.nbytes - 9 * MIB] ^= 1
    bench.say(asked)
    with pytest.raises(BY_NAME["Corruption"], match=r"does not match its checksum"):
        frames(bench)
    assert len(bench.exchange) == 0


def test_few_bytes_come_as_content(bench: Named) -> None:
    at, bench.made = bench.put(x=np.arange(6000, dtype=np.float64)), b""
    bench.say(bench.read_ranges(at))
    (frame,) = frames(bench)
    assert (frame.metadata, frame.regions, len(frame.ranges)) == (b"", 0, 1)
    assert bench.made == bytes(bench.arena[: at.nbytes])


def test_a_reader_that_has_the_metadata_gets_none(bench: Named) -> None:
    at, bench.made = bench.put(x=np.zeros((4, MIB), np.uint8)), b""
    bench.say(bench.read_ranges(at))
    (first,) = frames(bench)
    bench.say(bench.read_ranges(at, loaded=(first.agent, first.generation, first.regions)))
    assert [frame.metadata for frame in frames(bench)] == [b""]
    bench.say(bench.read_ranges(at, loaded=("another run", first.generation, first.regions)))
    assert [bool(frame.metadata) for frame in frames(bench)] == [True]


def test_who_has_no_ticket_learns_nothing(bench: Named) -> None:
    at = bench.put(x=np.zeros((4, MIB), np.uint8))
    for changes in ({"ticket": bytes(16)}, {"nbytes": at.nbytes + 64}, {"extent": 9}):
        bench.say(bench.read_ranges(at, **changes))
        with pytest.raises(BY_NAME["UsageError"], match="no such ticket"):
            raise refused(bench)
    bench.tickets.revoke(EXTENT)
    bench.say(bench.read_ranges(at))
    with pytest.raises(BY_NAME["Disconnected"], match="freed since"):
        raise refused(bench)
    assert not bench.agent.regions


def test_a_shard_that_registers_nothing_says_what_to_do(bench: Named) -> None:
    bench.exchange = ShardTransfers(bench.backing, bench.tickets)
    bench.say(bench.read_ranges(bench.put(x=np.zeros((4, MIB), np.uint8))))
    with pytest.raises(
        BY_NAME["Impossible"], match=r"names no ranges of its memory; start it with the client's carrier"
    ):
        raise refused(bench)


def test_a_reader_that_stalls_is_given_a_window_and_its_memory_stays_until_it_ends(bench: Named) -> None:
    at = bench.put(x=np.ones((32, MIB), np.uint8))
    bench.say(bench.read_ranges(at))
    for _ in range(20):
        bench.exchange.advance()
    assert 1 < len(bench.heard()) <= BULK_WINDOW_FRAMES
    bench.owner.punch(0, MIB)
    assert bench.owner.backed == 48 * MIB, "a read needs it"
    bench.exchange.lost(b"p")
    bench.owner.punch(0, MIB)
    assert bench.owner.backed == 47 * MIB
    assert not bench.agent.regions, "given up before its page went"


def test_only_pages_that_are_there_are_registered_and_a_new_generation_is_loaded_afresh(bench: Named) -> None:
    at, bench.made = bench.put(x=np.ones((4, MIB), np.uint8)), b""
    bench.say(bench.read_ranges(at))
    (first,) = frames(bench)
    assert bench.registered.registered_bytes == 48 * MIB < ARENA_STEP_BYTES
    bench.owner.punch(40 * MIB, 8 * MIB)
    assert bench.registered.registered_bytes == 0
    bench.say(bench.read_ranges(at, loaded=(first.agent, first.generation, first.regions)))
    (again,) = frames(bench)
    assert (again.generation, again.regions, bool(again.metadata)) == (first.generation + 1, first.regions + 1, True)
    assert bench.registered.registered_bytes == 40 * MIB
    bench.owner.ensure(40 * MIB, 8 * MIB)
    use = RegionUse()
    base = bench.arena.__array_interface__["data"][0]
    parts = [(base + 39 * MIB, MIB), (base + 40 * MIB, MIB)]
    assert bench.registered.ranges(base + 39 * MIB, 2 * MIB, use) == parts, "two regions, two ranges"
    assert bench.registered.ranges(base + 47 * MIB, 2 * MIB, use) == [], "there is no page"
    bench.registered.end(use)
    bench.registered.close()
    assert not bench.agent.regions


def test_a_server_refuses_what_cannot_be_read_one_sided(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o700)
    keyring.add(tmp_path / "keys", "a", "admin")
    with pytest.raises(
        BY_NAME["UsageError"],
        match=r"with keys refused: a carrier does not encrypt the bytes that it moves; add --plain-bytes",
    ):
        assembly._check_carrier(chosen_carrier("nixl"), private_arena(MIB), encrypted=True)
    disk = StateDirectory(tmp_path / "state", Level.DISK, first_epoch=1, arena_bytes=MIB, accept_loss=False)
    with pytest.raises(BY_NAME["UsageError"], match=r"the rows lie in .*state, .* serve with --durability process"):
        assembly._check_carrier(chosen_carrier("nixl"), disk, encrypted=False)
    disk.close()


def test_a_shard_refuses_another_store_and_an_unknown_carrier() -> None:
    with pytest.raises(BY_NAME["UsageError"], match=r"with store 'file:///nowhere' refused: .*--bytes stream"):
        ShardProcess("tcp://127.0.0.1:9", store="file:///nowhere", host="127.0.0.1", carrier="nixl:tcp")
    with pytest.raises(BY_NAME["UsageError"], match=r"bytes='udp' is no carrier"):
        ShardProcess("tcp://127.0.0.1:9", host="127.0.0.1", carrier="udp")
