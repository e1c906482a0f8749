"""What a client puts and a shard reads out of its memory: it is what was put, or the stream carries it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.adapters.nixl.carried import CarriedBacking, OverCarrier, ShardEnd
from tests.adapters.nixl.one_process import AGENTS, Copy, LocalAgent
from tests.scale import only_long
from transferqueue.adapters.carriers.nixl.client import pulled_store
from transferqueue.adapters.carriers.nixl.client.one_sided import OneSidedMemory
from transferqueue.adapters.carriers.nixl.shard import pulled_write
from transferqueue.adapters.carriers.nixl.shard.carrier import OneSidedShard
from transferqueue.adapters.carriers.nixl.shard.client_memory import ClientMemory
from transferqueue.adapters.carriers.nixl.shard.registered_arena import RegisteredArena
from transferqueue.client.memory import remote
from transferqueue.client.memory.client_transfer import write_head
from transferqueue.client.session.calls import Deadline
from transferqueue.errors import DeadlineExceeded, Forked, Unreachable
from transferqueue.limits import MIB
from transferqueue.storage.memory.backing import ArenaBacking, Range
from transferqueue.testing.conformance.backings import BACKING_CHECKS, content, what_is_forgotten_is_free, write
from transferqueue.testing.conformance.report import Verdict, judge
from transferqueue.transport.bulk import protocol
from transferqueue.transport.system import threads
from transferqueue.wire import messages as m

PLACE = Range(1, 0, 70 * MIB // 8)
OTHERS = [check for check in BACKING_CHECKS if check is not what_is_forgotten_is_free]


def pulling(backing: ArenaBacking) -> OneSidedShard:
    return OneSidedShard(RegisteredArena(backing, LocalAgent()), ClientMemory(LocalAgent))


@pytest.fixture
def backing() -> Iterator[CarriedBacking]:
    with OverCarrier(lambda: ShardEnd(pulling), None, OneSidedMemory(LocalAgent)).open() as opened:
        opened.ensure(0, 20 * MIB)
        yield opened
    AGENTS.clear()


def received(backing: CarriedBacking) -> tuple[int, int]:
    found = backing.shard.answer("received")
    return found["stream"], found["one_sided"]


def puller(backing: CarriedBacking) -> LocalAgent:
    """The agent by which the shard reads."""
    assert isinstance(backing.shard, ShardEnd)
    assert backing.shard.carrier is not None
    agent = backing.shard.carrier.clients._agent
    assert isinstance(agent, LocalAgent)
    return agent


def put(backing: CarriedBacking, place: Range = PLACE) -> None:
    """Put bytes there, and see that they are there."""
    write(backing, place, content(place.nbytes, place.extent))
    assert np.array_equal(backing.read([place])[0], content(place.nbytes, place.extent))


@pytest.mark.parametrize("check", [what_is_forgotten_is_free, *only_long(*OTHERS)], ids=lambda check: check.__name__)
def test_an_arena_behind_pulled_writes_is_a_backing(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulled_store, "PULLED_BYTES_MIN", 1)
    outcome = judge(check, OverCarrier(lambda: ShardEnd(pulling), None, OneSidedMemory(LocalAgent)))
    if outcome.verdict is Verdict.UNSUPPORTED:
        pytest.skip(outcome.text)
    assert outcome.verdict is Verdict.PASSED, outcome.text


def test_what_is_put_is_read_out_of_a_buffer_that_the_next_put_uses(backing: CarriedBacking) -> None:
    for extent in (1, 2):
        put(backing, Range(extent, (extent - 1) * 9 * MIB, PLACE.nbytes))
    assert received(backing) == (0, 2 * PLACE.nbytes)
    writer = backing.carrier.writer
    assert writer is not None
    assert writer.bytes_pulled == 2 * PLACE.nbytes
    assert writer.memory.buffers.version == (0, 1), "one buffer was registered, once"
    put(backing, Range(9, 18 * MIB, 1000))
    assert received(backing) == (1000, 2 * PLACE.nbytes), "few bytes are one message"


def test_a_read_that_fails_leaves_the_put_to_the_stream(
    backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backing)

    def fail() -> None:
        raise Unreachable("the client is gone")

    puller(backing).before = fail
    put(backing)
    assert received(backing) == (PLACE.nbytes, PLACE.nbytes)
    puller(backing).before = lambda: None
    put(backing)
    assert received(backing) == (2 * PLACE.nbytes, PLACE.nbytes), "a moment later the stream is still used"
    monkeypatch.setattr(backing.carrier.writer, "_not_before", 0.0)
    put(backing)
    assert received(backing) == (2 * PLACE.nbytes, 2 * PLACE.nbytes)


def test_bytes_that_change_on_the_way_are_not_believed(backing: CarriedBacking) -> None:
    """They are the caller's until the put ends: here something else changes them, so the shard drops what it read, and
    the stream carries them."""
    flipped: list[int] = []
    agent = puller(backing)

    def flip() -> None:
        if not flipped:
            (region,) = backing.carrier.writer.memory.agent.regions.values()  # type: ignore[union-attr, attr-defined]
            memory = (np.ctypeslib.ctypes.c_ubyte * 1).from_address(region[0] + 64)
            flipped.append(memory[0])
            memory[0] ^= 1

    agent.before = flip
    write(backing, PLACE, content(PLACE.nbytes))
    assert received(backing)[0] == PLACE.nbytes


def test_a_shard_that_does_not_read_is_left_after_the_silence(
    backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backing)
    monkeypatch.setattr(pulled_write, "BULK_SILENCE_S", 0.05)
    with monkeypatch.context() as stopped:
        stopped.setattr(Copy, "done", lambda _: False)
        put(backing)
    assert received(backing) == (PLACE.nbytes, PLACE.nbytes)
    monkeypatch.setattr(backing.carrier.writer, "_not_before", 0.0)
    put(backing)
    assert received(backing) == (PLACE.nbytes, 2 * PLACE.nbytes), "its reads have ended, so it is loaded afresh"


def test_closing_ends_a_put_that_is_not_read(backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    failed: list[BaseException] = []
    monkeypatch.setattr(Copy, "done", lambda _: bool(begun.set()))

    def write_it() -> None:
        try:
            put(backing)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    writing = threading.Thread(target=write_it)
    writing.start()
    assert begun.wait(20)
    backing.client.close()
    writing.join(20)
    assert [type(error).__name__ for error in failed] == ["Disconnected"]


def test_a_shard_that_takes_the_stream_alone_is_asked_once() -> None:
    with OverCarrier(lambda: ShardEnd(lambda _: None), None, OneSidedMemory(LocalAgent)).open() as opened:
        opened.ensure(0, 10 * MIB)
        put(opened)
        assert opened.carrier.writer.take(MIB) is None
        assert received(opened) == (PLACE.nbytes, 0)


def test_a_client_that_cannot_register_puts_over_the_stream(
    backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> object:
        raise Unreachable("see `ulimit -l`")

    monkeypatch.setattr(LocalAgent, "register", refuse)
    put(backing)
    assert received(backing) == (PLACE.nbytes, 0)


def test_the_caller_s_deadline_ends_a_put_that_is_not_read(
    backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copy, "done", lambda _: False)
    monkeypatch.setattr(remote, "STALLED_S", 0.01)
    caller = remote.Caller(backing.client._interrupt)
    caller.bound(Deadline(time.monotonic, 0.05))
    granted = backing._tickets.granted(7, m.Granted(1, 0, 0, PLACE.nbytes))
    with pytest.raises(DeadlineExceeded, match=r"did not cross within the 0.05 s that the call was given"):
        backing.client._write(granted, 0, PLACE.nbytes, lambda _: None, caller)


def test_the_first_frame_leaves_before_the_next_ones_are_hashed(backing: CarriedBacking) -> None:
    data = backing.carrier.writer.take(3 * protocol.RANGES_FRAME_BYTES)
    assert data is not None
    granted = m.Granted(1, 0, 0, len(data))
    head = write_head(1, 7, granted, 0, len(data))
    messages = iter(pulled_store.PulledStore(head, data.data, 1, backing.carrier.writer).opening())
    next(messages)
    data[:] = 7
    (second,) = protocol.to_shard(next(messages)[0]).ranges[:1]
    assert second.digest == protocol.digest((data[:MIB].data,)), "what is hashed later sees what is there later"


def test_a_forked_child_waits_for_nothing_of_its_parent(
    backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of the parent was registering memory, so it held the lock when the child was made."""
    put(backing)
    monkeypatch.setattr(backing.client, "_pid", -1)
    failed: list[BaseException] = []

    def write_it() -> None:
        try:
            put(backing)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    with backing.carrier.writer.memory._guard:
        writing = threading.Thread(target=write_it)
        writing.start()
        writing.join(5)
        assert [type(error) for error in failed] == [Forked]
    writing.join(20)
    monkeypatch.undo()


@pytest.mark.parametrize("part", ["tick", "pull"])
def test_a_defect_in_a_turn_of_the_shard_ends_no_service(
    backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """Such as an error of the carrier that nobody foresaw. The thread went on before only where a transfer had
    failed."""
    put(backing)
    shard, failed = backing.shard, threading.Event()
    assert isinstance(shard, ShardEnd)
    monkeypatch.setattr("transferqueue.server.shards.bulk_endpoint.DEFECT_PAUSE_S", 0.01)
    exchange = shard.endpoint._exchange
    works = getattr(exchange, part)

    def fail(*arguments: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("NIXL_ERR_UNKNOWN")
        works(*arguments)

    monkeypatch.setattr(exchange, part, fail)
    shard.endpoint._wakeup.set()
    assert failed.wait(20)
    put(backing)
    assert received(backing) == (0, 2 * PLACE.nbytes)
    assert "NIXL_ERR_UNKNOWN" in caplog.text


def test_a_shard_whose_thread_stands_still_is_left_as_it_is(
    backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be in a call of a device that does not return: what it uses is neither closed nor freed."""
    put(backing)
    stuck, begun = threading.Event(), threading.Event()
    shard = backing.shard
    assert isinstance(shard, ShardEnd)
    monkeypatch.setattr(threads.still_runs, "__defaults__", (0.05,))
    monkeypatch.setattr(shard.endpoint, "_turn", lambda _: begun.set() or stuck.wait())
    shard.endpoint._wakeup.set()
    assert begun.wait(20)
    registered = dict(puller(backing).regions)
    shard.endpoint.stop()
    assert "the bulk endpoint did not end within" in caplog.text
    assert puller(backing).regions == registered
    stuck.set()
    monkeypatch.undo()
    shard.endpoint.stop()
    assert puller(backing).regions == {}
    shard.endpoint.stop = lambda: None  # type: ignore[method-assign]
