"""Columns that a client reads from a shard's registered memory: they are what was put, or the stream carries them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.adapters.nixl.carried import SESSION, SHARD, CarriedBacking, OverCarrier, ShardEnd
from tests.adapters.nixl.one_process import AGENTS, LocalAgent
from tests.scale import only_long
from transferqueue.adapters.carriers.nixl.agent import NixlAgent, Transports, check_machine, load_nixl
from transferqueue.adapters.carriers.nixl.client import one_sided
from transferqueue.adapters.carriers.nixl.client.carrier import OneSidedSession
from transferqueue.adapters.carriers.nixl.client.one_sided import OneSidedMemory, Quarantine, RegisteredPool
from transferqueue.adapters.carriers.nixl.shard.carrier import OneSidedShard
from transferqueue.adapters.carriers.nixl.shard.client_memory import ClientMemory
from transferqueue.adapters.carriers.nixl.shard.registered_arena import RegisteredArena
from transferqueue.client.client import _carrier_to
from transferqueue.client.memory import remote
from transferqueue.client.memory.client_transfer import RequestedColumns, RequestedRows
from transferqueue.errors import Corruption, Unreachable, UsageError
from transferqueue.limits import MIB
from transferqueue.schema import Field
from transferqueue.storage.memory.backing import ArenaBacking, Range
from transferqueue.testing.conformance.backings import BACKING_CHECKS, content, what_is_forgotten_is_free, write
from transferqueue.testing.conformance.report import Verdict, judge
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.carriers import chosen_carrier
from transferqueue.transport.system.rdma import rdma_devices
from transferqueue.wire import messages as m

PLACE = Range(1, 0, 9 * MIB)


OTHERS = [check for check in BACKING_CHECKS if check is not what_is_forgotten_is_free]


def registered(backing: ArenaBacking) -> OneSidedShard:
    return OneSidedShard(RegisteredArena(backing, LocalAgent()), ClientMemory(LocalAgent))


@pytest.fixture
def agent() -> Iterator[LocalAgent]:
    yield LocalAgent()
    AGENTS.clear()


@pytest.fixture
def backing(agent: LocalAgent) -> Iterator[CarriedBacking]:
    first = iter([agent])
    memory = OneSidedMemory(lambda: next(first, None) or LocalAgent(), Quarantine())
    with OverCarrier(lambda: ShardEnd(registered), memory).open() as opened:
        opened.ensure(0, 16 * MIB)
        write(opened, PLACE, content(PLACE.nbytes))
        yield opened


def is_read(backing: CarriedBacking) -> bool:
    return np.array_equal(backing.read([PLACE])[0], content(PLACE.nbytes))


@pytest.mark.parametrize("check", [what_is_forgotten_is_free, *only_long(*OTHERS)], ids=lambda check: check.__name__)
def test_an_arena_behind_one_sided_reads_is_a_backing(check: Any) -> None:
    memory = OneSidedMemory(LocalAgent)
    outcome = judge(check, OverCarrier(lambda: ShardEnd(registered), memory))
    if outcome.verdict is Verdict.UNSUPPORTED:
        pytest.skip(outcome.text)
    assert outcome.verdict is Verdict.PASSED, outcome.text


def test_what_is_read_one_sided_is_what_was_put(backing: CarriedBacking, agent: LocalAgent) -> None:
    assert is_read(backing)
    assert backing.shard.answer("sent") == {"stream": 0, "one_sided": PLACE.nbytes}
    assert backing.carrier.reader.bytes_read == PLACE.nbytes
    reads = agent.reads
    assert is_read(backing)
    assert agent.reads == reads + 2, "a read for each 8 MiB"


def test_rows_that_lie_apart_are_staged_and_read_in_few_ranges(backing: CarriedBacking, agent: LocalAgent) -> None:
    rows = content(PLACE.nbytes)[: 2048 * 4096].reshape(2048, 4096)
    field = Field("x", "uint8", (4096,))
    at = m.BlockLocation(1, SHARD, PLACE.extent, PLACE.offset, rows.nbytes, 2048, ["x"], [0])
    ticket = backing._tickets.block(SESSION, at).ticket
    block = b.BulkBlock(1, at.extent, at.offset, at.nbytes, at.rows, 0, at.counts, ticket)
    order = np.random.default_rng(1).permutation(2048).astype(np.int32)
    wanted = RequestedRows(b.RowSelection(["x"], [["x"]], [block], b"", order.tobytes()), 2048, order)
    for _ in range(3):
        before = agent.reads
        fetched = backing.client._fetch(
            RequestedColumns(SESSION, SHARD, {"x": field}, [wanted]), remote.Caller(backing.client._interrupt)
        )
        assert np.array_equal(fetched.landed[0].memory.reshape(2048, 4096), rows[order])
        assert agent.reads - before == 4, "one for each 2 MiB"
    assert backing.shard.answer("sent") == {"stream": 0, "one_sided": 3 * rows.nbytes}
    assert isinstance(backing.shard, ShardEnd)
    assert backing.shard.carrier is not None
    assert backing.shard.answer("used")
    assert backing.shard.carrier.registered.staging.taken == 0


def test_a_read_that_fails_comes_over_the_stream_and_its_buffer_is_not_used_before_its_agent_is_gone(
    backing: CarriedBacking, agent: LocalAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise Unreachable("the peer is gone")

    agent.before = fail
    monkeypatch.setattr(one_sided, "PAUSE_S", 1e6)
    assert is_read(backing)
    memory = backing.carrier.reader.memory
    assert memory._quarantine.nbytes == PLACE.nbytes
    agent.before = lambda: None
    reads = agent.reads
    assert is_read(backing)
    assert agent.reads == reads, "a moment later the stream is still used"
    monkeypatch.setattr(backing.carrier.reader, "_not_before", 0.0)
    assert is_read(backing)
    assert agent.reads > reads
    monkeypatch.setattr(one_sided, "QUARANTINE_BYTES_MAX", MIB)
    reads = agent.reads
    agent.held = True
    assert is_read(backing)
    assert (agent.reads, agent.closed, memory._quarantine.nbytes) == (reads, True, PLACE.nbytes), "it is not gone"
    agent.held = False
    assert is_read(backing)
    assert (agent.reads, memory._quarantine.nbytes) == (reads, 0)
    assert memory.agent.reads == 2, "by another agent, which loaded anew what the shard registered"


def test_bytes_that_change_on_the_way_are_not_believed(backing: CarriedBacking, agent: LocalAgent) -> None:
    shard = backing.shard
    assert isinstance(shard, ShardEnd)
    flipped: list[int] = []

    def flip() -> None:
        if not flipped:
            shard.backing.memory[5 * MIB] ^= 1
            flipped.append(1)

    agent.before = flip
    with pytest.raises(Corruption, match="does not match its checksum"):
        is_read(backing)
    shard.backing.memory[5 * MIB] ^= 1
    assert is_read(backing)


def test_a_read_that_never_ends_is_left_after_the_silence(
    backing: CarriedBacking, agent: LocalAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BULK_SILENCE_S", 0.05)
    monkeypatch.setattr("tests.adapters.nixl.one_process.Copy.done", lambda self: False)
    assert is_read(backing), "over the stream"
    assert agent.loaded == {}, "the peer was forgotten"


def test_closing_ends_a_read_that_never_ends(backing: CarriedBacking, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    failed: list[BaseException] = []
    monkeypatch.setattr("tests.adapters.nixl.one_process.Copy.done", lambda self: bool(begun.set()))

    def read() -> None:
        try:
            is_read(backing)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(20)
    backing.client.close()
    reading.join(20)
    assert [type(error).__name__ for error in failed] == ["Disconnected"]


def test_a_shard_that_serves_the_stream_alone_is_asked_once(agent: LocalAgent) -> None:
    with OverCarrier(lambda: ShardEnd(lambda _: None), OneSidedMemory(lambda: agent)).open() as opened:
        opened.ensure(0, 32 * MIB)
        write(opened, PLACE, content(PLACE.nbytes))
        assert is_read(opened)
        assert not opened.carrier.reader.usable
        assert agent.reads == 0


def test_a_buffer_is_registered_as_long_as_it_is_kept(agent: LocalAgent) -> None:
    pool = RegisteredPool(agent, kept_bytes=2 * MIB)
    buffers = [pool.take(MIB) for _ in range(3)]
    assert all(agent.covers(each.__array_interface__["data"][0], MIB) for each in buffers)
    small = pool.take(100)
    assert not agent.covers(small.__array_interface__["data"][0], 100)
    del buffers
    assert len(agent.regions) == 3, "what is dropped waits for the next take"
    kept = pool.take(8 * MIB)
    assert len(agent.regions) == 3, "one was dropped, one came"
    assert agent.covers(kept.__array_interface__["data"][0], 8 * MIB)


def test_production_refuses_a_machine_without_rdma_and_without_the_package(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("transferqueue.adapters.carriers.nixl.agent.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"bytes='nixl' needs the package nixl, .*pip install --no-deps nixl"):
        check_machine(Transports.RDMA)
    monkeypatch.setattr("transferqueue.adapters.carriers.nixl.agent.find_spec", lambda _: object())
    for state in ("", "1: DOWN"):
        if state:
            (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
            (tmp_path / "mlx5_0/ports/1/state").write_text(state)
        with pytest.raises(UsageError, match=r"no RDMA device with an active port .*twice as slow as a stream"):
            check_machine(Transports.RDMA, tmp_path)
        check_machine(Transports.TCP, tmp_path)
    (tmp_path / "mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    check_machine(Transports.RDMA, tmp_path)
    assert rdma_devices(tmp_path) == ["mlx5_0"]


def test_a_carrier_is_chosen_by_name_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFERQUEUE_BYTES", raising=False)
    assert chosen_carrier() is None
    monkeypatch.setenv("TRANSFERQUEUE_BYTES", "nixl:cma")
    assert (str(chosen_carrier()), chosen_carrier("stream")) == ("nixl:cma", None)
    for name in ("rdma", "NIXL"):
        with pytest.raises(UsageError, match=f"bytes='{name}' is no carrier of columns; choose one of stream, nixl "):
            chosen_carrier(name)
    with pytest.raises(
        UsageError, match="bytes='nixl:udp' is no carrier of columns; those by NIXL are nixl, nixl:tcp, "
    ):
        chosen_carrier("nixl:udp")


def test_what_is_encrypted_crosses_over_the_stream() -> None:
    session = OneSidedSession(lambda: OneSidedMemory(LocalAgent), lambda: None)
    assert _carrier_to(None, encrypted=False) is None
    assert _carrier_to(session, encrypted=True) is None, "the carrier would not encrypt it"
    first, second = (_carrier_to(session, encrypted=False) for _ in range(2))
    assert first.reader.memory is second.reader.memory is not first.writer.memory  # type: ignore[union-attr]


def test_what_a_late_read_may_write_is_not_freed_when_the_queue_closes() -> None:
    """A process may close its queue, and live on."""
    buffer = np.empty(100, np.uint8)
    late = weakref.ref(buffer)
    quarantine = Quarantine()
    memory = OneSidedMemory(LocalAgent, quarantine)
    memory.quarantine([buffer])
    agent = memory.agent
    del memory, buffer
    gc.collect()
    assert late() is not None
    quarantine.settle()
    assert (agent.closed, late(), quarantine.nbytes) == (True, None, 0), "its session is over"


def test_the_next_session_of_a_process_knows_what_earlier_ones_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "QUARANTINE_BYTES_MAX", 150)
    shared = Quarantine()
    sessions = [OneSidedMemory(LocalAgent, shared) for _ in range(2)]
    agents = [session.agent for session in sessions]
    for session in sessions:
        assert session.begin()
        session.quarantine([np.empty(100, np.uint8)])
    assert not OneSidedMemory(LocalAgent, shared).begin(), "transfers use both agents"
    sessions[0].end()
    assert OneSidedMemory(LocalAgent, shared).begin()
    assert ([agent.closed for agent in agents], shared.nbytes) == ([True, False], 100)
    assert sessions[0].agent is not agents[0]
    assert sessions[1].agent is agents[1]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs packages with a module `_api`, which stand for NIXL's. What was loaded of them is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for variable in ("UCX_TLS", "UCX_PROTO_EMULATION_ENABLE", "NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        monkeypatch.setenv(variable, "as the user says")

    def install(name: str, api: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "_api.py").write_text(api)
        invalidate_caches()

    yield install
    for module in [*sys.modules]:
        if module.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13"):
            del sys.modules[module]


def test_the_only_build_is_loaded_without_looking_for_the_right_one(installed: Callable[[str, str], None]) -> None:
    """`nixl` imports torch to find out which build fits, where torch is there without CUDA."""
    installed("nixl", "raise ImportError('nixl was asked')")
    installed("nixl_cu12", "loaded = 'nixl_cu12'")
    assert load_nixl().loaded == "nixl_cu12"
    installed("nixl_cu13", "loaded = 'nixl_cu13'")
    with pytest.raises(ImportError, match="nixl was asked"):
        load_nixl()


def test_nixl_is_asked_where_that_costs_nothing_or_the_build_fails(
    installed: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("nixl", "loaded = 'nixl'")
    installed("nixl_cu13", "raise AttributeError('of another numpy')")
    assert load_nixl().loaded == "nixl", "the build fails"
    installed("nixl_cu12", "loaded = 'nixl_cu12'")
    sys.modules["nixl_cu13"] = ModuleType("nixl_cu13")  # of no file, and so not installed
    assert load_nixl().loaded == "nixl", "it was loaded"
    del sys.modules["nixl"], sys.modules["nixl._api"]
    with monkeypatch.context() as process:
        process.setitem(sys.modules, "torch", ModuleType("torch"))
        assert load_nixl().loaded == "nixl", "torch was loaded"
    del sys.modules["nixl"], sys.modules["nixl._api"]
    assert load_nixl().loaded == "nixl_cu12"


def test_a_package_that_cannot_be_loaded_is_named(installed: Callable[[str, str], None]) -> None:
    installed("nixl", "raise ImportError('libucp.so.0: cannot open shared object file')")
    with pytest.raises(UsageError, match=r"nixl:cma.*cannot be loaded.*libucp.so.0"):
        NixlAgent(Transports.CMA)


def test_every_build_that_failed_says_why(installed: Callable[[str, str], None]) -> None:
    """`nixl` alone would say that it found no build, which is no help."""
    installed("nixl", "raise RuntimeError('no build of nixl is installed')")
    installed("nixl_cu12", "raise AttributeError('compiled for numpy 1')")
    with pytest.raises(
        UsageError,
        match=(
            r"cannot be loaded on this machine \(nixl_cu12: AttributeError: compiled for numpy 1; nixl: RuntimeError: "
            r"no build of nixl is installed\)"
        ),
    ) as raised:
        NixlAgent(Transports.CMA)
    assert raised.value.__cause__ is not None
