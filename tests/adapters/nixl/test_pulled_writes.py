"""Writes whose bytes the shard reads out of its client's memory, without sockets: who may, how much, and what happens
when a read fails."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.adapters.nixl.one_process import AGENTS, Copy, LocalAgent
from tests.scale import only_long
from tests.server.test_bulk import ARENA_BYTES, SESSION, Bench, refused
from transferqueue.adapters.carriers.nixl.shard import client_memory
from transferqueue.adapters.carriers.nixl.shard.carrier import OneSidedShard
from transferqueue.adapters.carriers.nixl.shard.client_memory import (
    BUFFERS_MAX,
    QUARANTINED_MAX,
    QUARANTINED_OF_ONE,
    ClientMemory,
)
from transferqueue.adapters.carriers.nixl.shard.registered_arena import RegisteredArena
from transferqueue.errors import BY_NAME, Unreachable, UsageError
from transferqueue.limits import BULK_SILENCE_S, BULK_WINDOW_FRAMES, FRAME_BYTES, KIB, MIB
from transferqueue.server.shards.bulk_endpoint import ShardTransfers
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk import protocol as b

TOTAL = 20 * MIB
DATA = np.random.default_rng(1).integers(0, 1 << 63, TOTAL // 8).view(np.uint8)


class Pulled(Bench):
    """A bench whose shard reads its clients' memory; and one client, with `data` registered."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        arena.ensure(32 * MIB, TOTAL)
        self.agents: list[LocalAgent] = []
        self.client = LocalAgent()
        self.memory = ClientMemory(self.open)
        self.exchange = ShardTransfers(
            self.backing,
            self.tickets,
            OneSidedShard(RegisteredArena(self.backing, LocalAgent()), self.memory),
        )
        self.data = DATA.copy()
        self.address = int(self.data.__array_interface__["data"][0])
        self.client.register(self.address, TOTAL)

    def open(self) -> LocalAgent:
        self.agents.append(LocalAgent())
        return self.agents[-1]

    @property
    def agent(self) -> LocalAgent:
        return self.agents[-1]

    def ranges(self, start: int, end: int, step: int = FRAME_BYTES) -> list[b.ByteRange]:
        return [self.range(at, min(step, end - at)) for at in range(start, end, step)]

    def range(self, at: int, nbytes: int) -> b.ByteRange:
        return b.ByteRange(self.address + at, nbytes, b.digest((self.data[at : at + nbytes].data,)))

    def put(self, ranges: Sequence[b.ByteRange], total: int = TOTAL, number: int = 1, **changes: Any) -> b.WriteRanges:  # type: ignore[override]
        facts: dict[str, Any] = {
            "agent": self.client.name,
            "generation": 0,
            "regions": 1,
            "metadata": self.client.metadata(),
        }
        written = self.write(self.grant(TOTAL), total, number=number)
        return b.WriteRanges(**msgspec.structs.asdict(written), ranges=list(ranges), **(facts | changes))

    def turns(self, count: int = 40) -> list[Any]:
        """What was answered in so many turns of the endpoint."""
        for _ in range(count):
            self.exchange.pull()
        return [head for _, head, _ in self.heard()]

    @property
    def stored(self) -> Any:
        return self.arena[32 * MIB : 32 * MIB + TOTAL]


@pytest.fixture
def bench() -> Iterator[Pulled]:
    arena = Arena.create(None, ARENA_BYTES)
    yield Pulled(arena)
    arena.close()
    AGENTS.clear()


def pending(monkeypatch: pytest.MonkeyPatch, done: Callable[[Any], bool] = lambda _: False) -> None:
    """Reads do not end, unless `done` says so."""
    copied = Copy.done
    monkeypatch.setattr(Copy, "done", lambda read: done(read) and copied(read))


def test_what_a_client_names_is_stored_and_acknowledged_frame_by_frame(bench: Pulled) -> None:
    bench.say(bench.put(bench.ranges(0, 8 * MIB)))
    bench.say(b.WriteRangesFrame(1, 1, bench.ranges(8 * MIB, 16 * MIB)))
    assert [(head.frames, head.done) for head in bench.turns()] == [(1, False), (2, False)]
    bench.say(b.WriteRangesFrame(1, 2, bench.ranges(16 * MIB, TOTAL, 300 * KIB)))
    assert [(head.frames, head.done) for head in bench.turns()] == [(3, True)]
    assert np.array_equal(bench.stored, bench.data)
    assert (len(bench.exchange), bench.exchange.received_bytes["one_sided"], bench.memory.quarantined) == (0, TOTAL, 0)
    assert bench.agent.reads == 5, "reads of 4 MiB, of ranges that follow each other"
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 2, metadata=b""))
    assert [head.done for head in bench.turns()] == [True], "the metadata is known"


def test_a_client_that_was_unloaded_between_two_frames_takes_no_buffer(bench: Pulled) -> None:
    bench.say(bench.put(bench.ranges(0, 4 * MIB)))
    bench.turns()
    free = len(bench.memory._free)
    bench.memory.keep_only(lambda session: False)  # as when others need its place
    bench.say(b.WriteRangesFrame(1, 1, bench.ranges(4 * MIB, 8 * MIB)))
    with pytest.raises(BY_NAME["Unreachable"], match="has forgotten the metadata"):
        raise refused_after(bench)
    assert (len(bench.memory._free), bench.memory.quarantined, len(bench.exchange)) == (free, 0, 0)


def test_bytes_that_do_not_match_their_checksum_change_nothing(bench: Pulled) -> None:
    bench.say(bench.put([bench.range(0, MIB), bench.range(MIB, MIB)], 2 * MIB))
    bench.data[MIB + 5] ^= 1
    with pytest.raises(BY_NAME["Corruption"], match="do not match their checksum: they changed there, or on the way"):
        raise refused_after(bench)
    assert not bench.stored[MIB:].any()
    assert (len(bench.exchange), bench.memory.quarantined) == (0, 0), "the read itself ended well"


def refused_after(bench: Pulled) -> Exception:
    bench.exchange.pull()
    return refused(bench)


@pytest.mark.parametrize(
    ("error", "rule", "named"),
    [
        ("ProtocolError", "names 0 bytes at address", lambda bench: [bench.range(0, 0)]),
        ("ProtocolError", "name 1 to 1048576 bytes", lambda bench: [bench.range(0, MIB + 1)]),
        ("ProtocolError", "bytes at address 0", lambda bench: [b.ByteRange(0, MIB, bytes(8))]),
        ("Corruption", "more than it announced", lambda bench: [*bench.ranges(0, TOTAL), bench.range(0, 1)]),
        ("Unreachable", "has not registered that", lambda bench: [b.ByteRange(bench.address - 1, 64, bytes(8))]),
        ("Unreachable", "has not registered that", lambda bench: [b.ByteRange((1 << 62) - 1, MIB, bytes(8))]),
    ],
    ids=["empty", "long", "null", "more", "outside", "far outside"],
)
def test_ranges_that_are_none_are_refused(bench: Pulled, error: str, rule: str, named: Any) -> None:
    bench.say(bench.put(named(bench)))
    with pytest.raises(BY_NAME[error], match=rule):
        raise refused_after(bench)
    assert not bench.stored.any()
    assert len(bench.exchange) == 0


def test_counts_beyond_every_bound_are_refused_before_any_work(bench: Pulled) -> None:
    head = bench.put([])
    far = b.ByteRange(1 << 62, 1, bytes(8))
    for changed in (
        {"ranges": [far] * (b.RANGES_MAX + 1)},
        {"ranges": [b.ByteRange(-1, 1)]},
        {"regions": -1},
        {"ranges": [b.ByteRange(1 << 63, 1)]},
    ):
        bench.say(msgspec.structs.replace(head, **changed))
        with pytest.raises(BY_NAME["ProtocolError"], match="are not a bulk message"):
            raise refused(bench)
    bench.say(head, [b"content"])
    with pytest.raises(BY_NAME["ProtocolError"], match="has no content, but this one has 7 bytes"):
        raise refused(bench)
    assert not bench.agent.loaded


def test_who_has_no_ticket_is_not_read(bench: Pulled) -> None:
    head = bench.put(bench.ranges(0, MIB))
    for changes in ({"ticket": bytes(16)}, {"extent": 9}, {"nbytes": TOTAL + 4096}, {"session": SESSION + 1}):
        bench.say(msgspec.structs.replace(head, **changes))
        with pytest.raises(BY_NAME["UsageError"], match="no such ticket"):
            raise refused(bench)
    bench.say(msgspec.structs.replace(head, at=head.offset - 1))
    with pytest.raises(BY_NAME["UsageError"], match="write inside it"):
        raise refused(bench)
    bench.tickets.revoke(head.extent)
    bench.say(head)
    with pytest.raises(BY_NAME["Disconnected"], match="freed since"):
        raise refused(bench)
    assert not bench.agent.loaded


def test_a_ticket_that_is_shown_again_ends_the_earlier_write(bench: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.say(bench.put(bench.ranges(0, 8 * MIB)), peer=b"first")
    with monkeypatch.context() as stopped:
        pending(stopped)
        bench.turns(3)
    bench.say(bench.put(bench.ranges(0, TOTAL)), peer=b"second")
    assert [(head.frames, head.done) for head in bench.turns()] == [(1, True)]
    assert np.array_equal(bench.stored, bench.data)
    assert len(bench.exchange) == 0
    bench.say(b.WriteRangesFrame(1, 1, bench.ranges(8 * MIB, TOTAL)), peer=b"first")
    with pytest.raises(BY_NAME["Unreachable"], match="not under way on this connection"):
        raise refused(bench)


def test_further_ranges_belong_to_a_write_of_ranges(bench: Pulled) -> None:
    bench.say(bench.write(bench.grant(TOTAL), TOTAL), [b"some"])
    bench.say(b.WriteRangesFrame(1, 1, []))
    with pytest.raises(BY_NAME["ProtocolError"], match="is no write of ranges"):
        raise refused(bench)
    bench.say(bench.put([], number=2))
    bench.say(b.WriteFrame(2, 1), [b"some"])
    bench.say(b.WriteRangesFrame(2, 2, []))
    with pytest.raises(BY_NAME["Corruption"], match="frame 2 came instead of frame 1"):
        raise refused(bench)
    bench.say(bench.put([], number=3))
    for number in range(1, BULK_WINDOW_FRAMES):
        bench.say(b.WriteRangesFrame(3, number, bench.ranges(0, KIB)))
    bench.say(b.WriteRangesFrame(3, BULK_WINDOW_FRAMES, []))
    with pytest.raises(BY_NAME["ProtocolError"], match="8 frames of ranges were named ahead, and that is the most"):
        raise refused(bench)
    assert not bench.stored[4:].any()


def test_a_buffer_that_a_read_may_still_write_is_not_used_until_the_read_has_ended(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as stopped:
        pending(stopped)
        bench.say(bench.put(bench.ranges(0, TOTAL)))
        bench.turns(3)
        written = [pull.buffer for pull in bench.memory._under_way]
        assert len(written) == 2, "the second is read while the first is stored"
        bench.exchange.lost(b"p")
        assert (len(bench.exchange), bench.memory.quarantined) == (0, 2)
        bench.say(bench.put(bench.ranges(0, MIB), MIB))
        assert bench.turns(3) == [], "its agent cannot be loaded afresh yet"
        assert not any(pull.buffer is buffer for pull in bench.memory._under_way for buffer in written)
    assert [head.done for head in bench.turns()] == [True], "the client goes on"
    assert bench.memory.quarantined == 0
    assert not bench.stored[MIB:].any(), "what was given up is not stored, though its reads ended"


def fail(bench: Pulled, puts: int) -> None:
    """So many reads of the client's memory fail, each with a buffer."""

    def lose() -> None:
        raise Unreachable("the client is gone")

    bench.agent.before = lose
    before = bench.memory.quarantined
    for number in range(1, puts + 1):
        bench.say(bench.put(bench.ranges(0, MIB), MIB, number))
        with pytest.raises(BY_NAME["Unreachable"], match="the client is gone"):
            raise refused_after(bench)
        assert bench.memory.quarantined == before + number
    bench.agent.before = lambda: None


def by_another(bench: Pulled, client: LocalAgent, number: int, **changes: Any) -> Any:
    """A put of 1 MiB by the next session, whose agent is `client`."""
    granted = bench.tickets.granted(SESSION + 1, bench.grant(TOTAL))
    head = bench.put(
        bench.ranges(0, MIB), MIB, number, **{"agent": client.name, "metadata": client.metadata()} | changes
    )
    return msgspec.structs.replace(head, session=SESSION + 1, ticket=granted.ticket)


def test_a_failed_read_costs_its_buffer_until_the_shard_begins_anew(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_memory, "QUARANTINED_MAX", 3)
    fail(bench, 4)
    lost = [weakref.ref(pull.buffer) for pull in bench.memory._lost]
    assert len(bench.agent.regions) == 4, "lost buffers stay registered, and are not freed"
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 5))
    assert [head.done for head in bench.turns()] == [True]
    assert [agent.closed for agent in bench.agents] == [True, False]
    assert bench.memory.quarantined == 0
    assert not any(buffer() for buffer in lost)
    assert QUARANTINED_MAX < 100


def test_a_shard_begins_anew_only_when_it_reads_nothing_and_seldom(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_memory, "QUARANTINED_MAX", 1)
    other = LocalAgent()
    other.register(bench.address, TOTAL)
    fail(bench, 2)
    with monkeypatch.context() as slow:
        pending(slow)
        bench.memory._anew_from = math.inf
        monkeypatch.setattr(client_memory, "QUARANTINED_MAX", 9)
        bench.say(by_another(bench, other, 3), peer=b"other")
        bench.turns(2)
        monkeypatch.setattr(client_memory, "QUARANTINED_MAX", 1)
        bench.memory._anew_from = 0.0
        bench.say(bench.put(bench.ranges(0, MIB), MIB, 4))
        with pytest.raises(BY_NAME["Unreachable"], match=r"failed or have not ended, 2 of them of session .* for now"):
            raise refused(bench)
    assert [(head.transfer, head.done) for head in bench.turns()] == [(3, True)]
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 5))
    assert [head.done for head in bench.turns()] == [True]
    fail(bench, 2)
    bench.now = client_memory.ANEW_EVERY_S - 1
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 6))
    with pytest.raises(BY_NAME["Unreachable"], match="for now"):
        raise refused(bench)
    bench.now = client_memory.ANEW_EVERY_S
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 7))
    assert [head.done for head in bench.turns()] == [True]
    assert len(bench.agents) == 3


def test_others_need_not_say_again_what_they_registered(bench: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_memory, "QUARANTINED_MAX", 1)
    other = LocalAgent()
    other.register(bench.address, TOTAL)
    bench.say(by_another(bench, other, 1), peer=b"other")
    assert [head.done for head in bench.turns()] == [True]
    fail(bench, 2)
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 5))
    assert [head.done for head in bench.turns()] == [True]
    bench.say(by_another(bench, other, 6, metadata=b""), peer=b"other")
    assert [head.done for head in bench.turns()] == [True]
    assert set(bench.agent.loaded) == {bench.client.name, other.name}
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 7, agent=other.name))
    with pytest.raises(BY_NAME["UsageError"], match="another session's"):
        raise refused_after(bench)
    bench.memory.keep_only(lambda _: False)
    assert (bench.memory.loaded, bench.memory._metadata, bench.agent.loaded) == ({}, {}, {})


@pytest.mark.parametrize("why", ["no other agent", "somebody keeps a read"])
def test_what_cannot_be_confirmed_is_not_freed(bench: Pulled, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(client_memory, "QUARANTINED_MAX", 1)
    fail(bench, 2)
    lost = [weakref.ref(pull.buffer) for pull in bench.memory._lost]
    bench.agent.held = True
    if why == "no other agent":
        monkeypatch.setattr(bench.memory, "_open", lambda: (_ for _ in ()).throw(UsageError("no RDMA")))
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 5))
    if why == "no other agent":
        with pytest.raises(BY_NAME["Unreachable"], match="for now"):
            raise refused(bench)
    else:
        assert [head.done for head in bench.turns()] == [True]
    gc.collect()
    assert all(buffer() is not None for buffer in lost)


def test_a_client_that_stands_still_is_refused_after_the_silence(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending(monkeypatch)
    bench.say(bench.put(bench.ranges(0, TOTAL)))
    assert bench.turns(3) == []
    bench.exchange.now = BULK_SILENCE_S
    with pytest.raises(BY_NAME["Unreachable"], match="no byte of the client's memory could be read for 10 s"):
        raise refused_after(bench)
    assert (len(bench.exchange), bench.memory.quarantined) == (0, 2)


def test_a_session_that_ends_while_it_is_read_writes_nothing_more(bench: Pulled) -> None:
    bench.say(bench.put(bench.ranges(0, 8 * MIB)))
    bench.turns(1)
    bench.tickets.close(SESSION)
    bench.exchange.pull()
    with pytest.raises(BY_NAME["Disconnected"], match="session is over"):
        raise refused(bench)
    assert not bench.stored[4 * MIB :].any()
    bench.exchange.tick(0.0)
    assert not bench.memory.loaded or bench.memory.quarantined, "its agent is unloaded once nothing reads from it"


def test_many_writes_share_a_bounded_number_of_buffers(bench: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferqueue.server.shards.bulk_endpoint.BULK_TRANSFERS_MAX", 99)
    with monkeypatch.context() as stopped:
        pending(stopped)
        for at in range(BUFFERS_MAX):
            head = bench.put(bench.ranges(at * MIB, at * MIB + MIB, 256 * KIB), MIB)
            head = msgspec.structs.replace(head, at=head.offset + at * MIB)
            bench.say(head, peer=bytes([at]))
        bench.turns(3)
        bench.say(msgspec.structs.replace(bench.put(bench.ranges(16 * MIB, 17 * MIB), MIB), at=48 * MIB), peer=b"late")
        bench.turns(3)
        assert len(bench.agent.regions) == BUFFERS_MAX == len(bench.memory._under_way)
    assert len([head for head in bench.turns() if head.done]) == BUFFERS_MAX + 1
    assert np.array_equal(bench.stored[: 17 * MIB], bench.data[: 17 * MIB])
    bench.memory.close()
    assert not bench.agent.regions
    assert not bench.agent.loaded


def test_memory_that_was_registered_anew_is_loaded_afresh_when_nothing_reads_it(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.say(bench.put(bench.ranges(0, MIB), MIB))
    bench.turns(3)
    bench.client.regions.clear()
    bench.client.register(bench.address, TOTAL)
    with monkeypatch.context() as stopped:
        pending(stopped)
        bench.say(bench.put(bench.ranges(0, MIB), MIB, 2, metadata=b""))
        bench.turns(2)
        fresh = msgspec.structs.replace(
            bench.put(bench.ranges(MIB, 2 * MIB), MIB, 3, generation=1, regions=2), at=33 * MIB
        )
        bench.say(fresh, peer=b"q")
        bench.turns(2)
        assert [version.generation for version in bench.memory.loaded.values()] == [0], "reads are under way"
    answers = bench.turns()
    assert [type(head).__name__ for head in answers] == ["TransferFailed", "FlowAck"], (
        "the old key is refused, the new one holds"
    )
    assert [version.generation for version in bench.memory.loaded.values()] == [1]


def test_a_session_names_memory_of_its_own(bench: Pulled) -> None:
    bench.say(bench.put(bench.ranges(0, MIB), MIB, metadata=b""))
    with pytest.raises(BY_NAME["Unreachable"], match="has forgotten the metadata"):
        raise refused_after(bench)
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 2, agent="another"))
    with pytest.raises(BY_NAME["Corruption"], match="not that of agent 'another'"):
        raise refused_after(bench)
    assert not bench.agent.loaded
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 3))
    bench.turns(3)
    granted = bench.tickets.granted(SESSION + 1, bench.grant(TOTAL))
    other = msgspec.structs.replace(
        bench.put(bench.ranges(0, MIB), MIB, 4), session=SESSION + 1, ticket=granted.ticket, regions=2
    )
    bench.say(other)
    with pytest.raises(BY_NAME["UsageError"], match="is another session's; name memory of its own"):
        raise refused_after(bench)


def test_a_shard_with_a_stream_alone_says_what_to_do(bench: Pulled) -> None:
    bench.exchange = ShardTransfers(bench.backing, bench.tickets)
    bench.say(bench.put(bench.ranges(0, MIB)))
    with pytest.raises(
        BY_NAME["Impossible"], match=r"reads no memory of its clients; start it with the client's carrier"
    ):
        raise refused(bench)


@pytest.mark.parametrize("seed", [0, *only_long(*range(1, 60))])
def test_whatever_clients_do_buffers_are_counted_and_only_matching_bytes_are_stored(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Writes begin, are named on, hold wrong ranges, stand still, fail, and lose their connections, in random order."""
    draw = np.random.default_rng(seed)
    state = {"stands": False, "fails": False}
    copied = Copy.done

    def done(read: Any) -> bool:
        if state["fails"] and draw.random() < 0.3:
            raise Unreachable("the client is gone")
        return not state["stands"] and copied(read)

    monkeypatch.setattr(Copy, "done", done)
    peers, number = [b"a", b"b", b"c"], 0
    open_at: dict[bytes, tuple[int, int]] = {}
    for _ in range(150):
        peer = peers[draw.integers(3)]
        match int(draw.integers(9)):
            case 0 | 1 | 2:
                number += 1
                total = int(draw.integers(1, 6)) * MIB
                named = bench.ranges(0, int(draw.integers(1, total + 1)), int(draw.integers(200 * KIB, MIB + 1)))
                if draw.random() < 0.2:
                    named[0] = msgspec.structs.replace(named[0], address=named[0].address + int(draw.integers(-9, 9)))
                bench.say(bench.put(named, total, number), peer=peer)
                open_at[peer] = number, 1
            case 3 | 4 if peer in open_at:
                at, frame = open_at[peer]
                bench.say(b.WriteRangesFrame(at, frame, bench.ranges(MIB, 2 * MIB)), peer=peer)
                open_at[peer] = at, frame + 1
            case 5:
                bench.exchange.lost(peer)
            case 6:
                state["stands"] = not state["stands"]
            case 7:
                state["fails"] = not state["fails"]
            case _:
                bench.exchange.pull()
        failures = [head.error for _, head, _ in bench.heard() if isinstance(head, b.TransferFailed)]
        assert set(failures) <= {"Unreachable", "Corruption", "ProtocolError", "Impossible"}, failures
        memory = bench.memory
        held = len(memory._free) + len(memory._under_way) + memory.quarantined
        assert held == len(memory._registrations)
        assert len(memory._under_way) <= BUFFERS_MAX
    state.update(stands=False, fails=False)
    for peer in peers:
        bench.exchange.lost(peer)
    bench.heard()
    bench.memory._lost.clear()
    bench.say(bench.put(bench.ranges(0, 8 * MIB), 8 * MIB, number + 1))
    assert [head.done for head in bench.turns()] == [True]
    assert np.array_equal(bench.stored[: 8 * MIB], bench.data[: 8 * MIB])


def test_a_write_that_names_nothing_yet_is_not_looked_after(bench: Pulled) -> None:
    bench.say(bench.put([]))
    bench.exchange.now = 5.0
    bench.turns(3)
    assert bench.exchange.moved_at is None, (
        "else the endpoint would never sleep while its client makes checksums, or is stopped"
    )
    bench.say(b.WriteRangesFrame(1, 1, bench.ranges(0, 4 * MIB)))
    assert [head.frames for head in bench.turns()] == [2]
    bench.exchange.now = 5.0 + BULK_SILENCE_S
    assert bench.turns(3) == [], "its silence is counted from what it names next"
    assert bench.exchange.moved_at is None


def test_writes_take_turns_at_the_buffers(bench: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_memory, "BUFFERS_MAX", 2)
    for at, peer in enumerate((b"a", b"b", b"c")):
        half = at * 6 * MIB
        head = bench.put(bench.ranges(half, half + MIB), 6 * MIB)
        bench.say(msgspec.structs.replace(head, at=head.offset + half), peer=peer)
        for frame in range(1, 6):
            bench.say(
                b.WriteRangesFrame(1, frame, bench.ranges(half + frame * MIB, half + (frame + 1) * MIB)), peer=peer
            )
    monkeypatch.setattr("transferqueue.adapters.carriers.nixl.shard.pulled_write.PULL_BYTES", MIB)
    for _ in range(40):
        bench.exchange.pull()
    order = [peer for peer, _, _ in bench.heard()]
    assert sorted(order) == [b"a"] * 6 + [b"b"] * 6 + [b"c"] * 6
    assert set(order[:4]) == {b"a", b"b", b"c"}, "none waits for the end of another"


def test_a_write_that_ends_while_it_waits_for_a_buffer_gives_up_its_turn(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_memory, "BUFFERS_MAX", 1)
    with monkeypatch.context() as stopped:
        pending(stopped)
        for at, peer in enumerate((b"a", b"b", b"c")):
            head = bench.put(bench.ranges(at * MIB, (at + 1) * MIB), MIB)
            bench.say(msgspec.structs.replace(head, at=head.offset + at * MIB), peer=peer)
        bench.turns(2)
        bench.exchange.lost(b"b")
    assert [head.done for head in bench.turns()] == [True, True]


def test_what_is_registered_in_addition_does_not_wait_for_the_reads_of_another_put(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = DATA[:MIB].copy()
    address = int(more.__array_interface__["data"][0])
    first = bench.data[4 * MIB :]
    with monkeypatch.context() as stopped:
        pending(stopped, lambda read: read.ranges[0].remote == address)
        bench.say(bench.put(bench.ranges(4 * MIB, 12 * MIB), 8 * MIB), peer=b"long")
        bench.turns(2)
        bench.client.register(address, MIB)
        head = bench.put([b.ByteRange(address, MIB, b.digest((more.data,)))], MIB, regions=2)
        bench.say(msgspec.structs.replace(head, at=head.offset + 12 * MIB), peer=b"short")
        assert [head.done for head in bench.turns(3)] == [True], "the other is read meanwhile"
    assert [head.done for head in bench.turns()] == [True]
    assert np.array_equal(bench.stored[: 8 * MIB], first[: 8 * MIB])
    assert np.array_equal(bench.stored[12 * MIB : 13 * MIB], more)


def test_metadata_that_cannot_be_loaded_leaves_nothing_loaded(bench: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.say(bench.put(bench.ranges(0, MIB), MIB))
    bench.turns(2)
    load = bench.agent.load

    def half(metadata: bytes) -> str:
        load(metadata)
        raise Unreachable("NIXL_ERR_BACKEND")

    bench.agent.load = half  # type: ignore[method-assign]
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 2, regions=2))
    with pytest.raises(BY_NAME["Unreachable"], match="NIXL_ERR_BACKEND"):
        raise refused_after(bench)
    assert (bench.agent.loaded, bench.memory.loaded) == ({}, {}), "nobody would unload it"


def test_a_client_whose_reads_fail_again_and_again_turns_pulls_off_for_itself_alone(bench: Pulled) -> None:
    fail(bench, QUARANTINED_OF_ONE + 1)
    bench.memory._anew_from = 1.0
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 50))
    with pytest.raises(BY_NAME["Unreachable"], match=f"{QUARANTINED_OF_ONE + 1} of them of session {SESSION}"):
        raise refused(bench)
    assert QUARANTINED_OF_ONE * 4 <= QUARANTINED_MAX
    other = LocalAgent()
    other.register(bench.address, TOTAL)
    bench.say(by_another(bench, other, 51))
    assert [head.done for head in bench.turns()] == [True]
    bench.now = 1.0
    bench.say(bench.put(bench.ranges(0, MIB), MIB, 52))
    assert [head.done for head in bench.turns()] == [True], "the shard began anew"


def test_reads_that_may_still_end_turn_pulls_off_for_a_while_only(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_memory, "QUARANTINED_OF_ONE", 1)
    bench.memory._anew_from = math.inf
    with monkeypatch.context() as stopped:
        pending(stopped)
        bench.say(bench.put(bench.ranges(0, TOTAL)))
        bench.turns(3)
        bench.exchange.lost(b"p")
        bench.say(bench.put(bench.ranges(0, TOTAL)))
        with pytest.raises(BY_NAME["Unreachable"], match=r"2 reads of the memory of clients .* have not ended"):
            raise refused(bench)
    bench.say(bench.put(bench.ranges(0, MIB), MIB))
    assert [head.done for head in bench.turns()] == [True]


def test_what_a_late_read_may_write_is_not_freed_when_the_shard_closes(
    bench: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded server may stop while its process lives on."""
    bench.say(bench.put(bench.ranges(0, TOTAL)))
    with monkeypatch.context() as stopped:
        pending(stopped)
        bench.turns(3)
        bench.memory._free.append(bench.memory._fresh())
        free, late = bench.memory._free[:], [pull.buffer for pull in bench.memory._under_way]
        assert (len(free), len(late)) == (1, 2)
        addresses = {memory_address(buffer) for buffer in late}
        buffers = [weakref.ref(buffer) for buffer in (*free, *late)]
        del free, late
        bench.exchange.stop()
        bench.heard()
        bench.memory.close()
        bench.memory = bench.exchange = None  # type: ignore[assignment]
        gc.collect()
        assert [buffer() is not None for buffer in buffers] == [False, True, True]
        assert {low for low, _ in bench.agent.regions.values()} == addresses, "the others are given up"
