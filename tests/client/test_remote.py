"""Bytes over the network: healed when they change on the way, bounded when nobody reads, gone with their session."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, Worker
from tests.scale import only_long
from transferqueue.client.memory import remote
from transferqueue.client.memory.client_transfer import FetchTransfer, RequestedColumns, rows_of
from transferqueue.limits import BULK_TRIES
from transferqueue.schema import Field
from transferqueue.storage.memory.buffer_pool import BufferPool
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.messages import Welcome

MIB = 1 << 20
LABEL = "reads from afar"
HOST = "127.0.0.2"
"""Where a relay of the bulk port listens, under the same number as the server's own: a client dials the host it
knows."""


def image(rows: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (rows, MIB), dtype=np.uint8)


class Relay(AbstractContextManager["Relay"]):
    """Passes bytes on to a port of loopback, and lets `meddle(passed, data, up)` change them or hold them back."""

    def __init__(self, port: int, at: tuple[str, int]) -> None:
        self.port, self.meddle = port, lambda _passed, data, _up: data
        self.listener = socket.create_server(at)
        self.address = f"tcp://{at[0]}:{self.listener.getsockname()[1]}"
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self.port))
            except OSError:  # the server is gone
                client.close()
                continue
            self._sockets += [client, server]
            for source, sink, up in ((client, server, True), (server, client, False)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, sink, up)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self.meddle(passed, data, up))
                passed += len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()


class Between(AbstractContextManager["Between"]):
    """A server's two ports again, at another host: `bulk` is the relay of its bytes."""

    def __init__(self, server: Served) -> None:
        with tq.connect(server.ipc) as queue:
            port = queue.stats().server.bulk_port
        control = int(server.tcp.rpartition(":")[2])
        self.control, self.bulk = Relay(control, (HOST, 0)), Relay(port, (HOST, port))

    def __exit__(self, *error: object) -> None:
        self.control.__exit__(*error)
        self.bulk.__exit__(*error)


@pytest.fixture
def between(server: Served) -> Iterator[Between]:
    with Between(server) as found:
        yield found


@pytest.fixture
def queue(between: Between) -> Iterator[tq.Queue]:
    with tq.connect(between.control.address, data="remote", label=LABEL) as found:
        yield found


@pytest.fixture
def table(queue: tq.Queue, name: str) -> tq.Table:
    return queue.create_table(name, tasks=[tq.Task("a", needs=["x"])])


class Flip:
    """Changes one bit of the byte at each of these places of a direction, each once."""

    def __init__(self, *places: int, up: bool) -> None:
        self.left, self.up = sorted(places), up

    def __call__(self, passed: int, data: bytes, up: bool) -> bytes:
        if up is not self.up or not self.left or not passed <= self.left[0] < passed + len(data):
            return data
        changed = bytearray(data)
        changed[self.left.pop(0) - passed] ^= 0x10
        return bytes(changed)


def test_a_read_without_values_moves_no_bytes_and_pins_nothing(queue: tq.Queue, table: tq.Table) -> None:
    rows = table.put(x=image(4), key=list("abcd"), tags=[{"n": n} for n in range(4)])
    table.update(rows[:2], late=[1.0, 2.0])
    sent = queue.stats().server.bulk_sent_bytes
    read = table.read(rows, values=False)
    assert (read.fields, list(read.keys), read.left_out) == (("x",), list("abcd"), ("late",))
    assert [tags["n"] for tags in read.tags] == list(range(4))
    assert table.read(rows[:2], values=False).fields == ("x", "late")
    with pytest.raises(tq.BatchEnded, match="was read without values"):
        read["x"].numpy()
    table.update(rows, x=image(4, seed=1), overwrite=True, if_unchanged=read)
    assert queue.stats().server.bulk_sent_bytes == sent
    with pytest.raises(tq.RowsChanged):
        table.update(rows, x=image(4), overwrite=True, if_unchanged=read)
    table.delete(rows)
    assert [each.pins for each in queue.sessions().values() if each.label == LABEL] == [0]


@pytest.mark.parametrize("place", [300_000, 5 * MIB + 77])
def test_a_bit_that_changes_on_its_way_to_a_reader_is_noticed_and_healed(
    between: Between, table: tq.Table, place: int
) -> None:
    rows = table.put(x=image())
    between.bulk.meddle = flip = Flip(place, up=False)
    with table.read(rows) as found:
        assert np.array_equal(found["x"].numpy(), image())
    assert not flip.left
    assert between.bulk.connections > 1, "it was asked for again, over another connection"


@pytest.mark.parametrize("place", [300_000, 5 * MIB + 77])
def test_a_bit_that_changes_on_its_way_to_the_server_is_noticed_and_healed(
    between: Between, table: tq.Table, place: int
) -> None:
    between.bulk.meddle = flip = Flip(place, up=True)
    rows = table.put(x=image())
    assert not flip.left
    with table.read(rows) as found:
        assert np.array_equal(found["x"].numpy(), image())


def test_bits_that_always_change_are_told_and_never_served(between: Between, table: tq.Table) -> None:
    rows = table.put(x=image())

    def spoil(passed: int, data: bytes, up: bool) -> bytes:
        return data if up or passed < 200_000 else bytes([data[0] ^ 1]) + data[1:]

    between.bulk.meddle = spoil
    with pytest.raises((tq.Corruption, tq.Unreachable), match=r"did not cross in 3 attempts"):
        table.read(rows)
    with pytest.raises((tq.Corruption, tq.Unreachable)):
        table.lease("a", rows=8)
    between.bulk.meddle = lambda _passed, data, _up: data
    with table.lease("a", rows=8, timeout_s=20) as batch:  # it went back
        assert np.array_equal(batch["x"].numpy(), image())


def test_a_bit_that_changes_in_the_servers_memory_after_a_remote_put_is_told(server: Served, table: tq.Table) -> None:
    content = image(seed=77)  # no other test leaves it in the server's memory
    rows = table.put(x=content)
    with tq.connect(server.ipc) as local:
        (path,) = local._client.memory._paths.values()
    with open(path, "r+b") as arena, mmap.mmap(arena.fileno(), 0) as memory:
        at = memory.find(content[5, :64].tobytes())
        memory[at] ^= 1
        with pytest.raises(tq.Corruption, match=r"did not cross in 3 attempts; at last: .*does not match its checksum"):
            table.read(rows)
        memory[at] ^= 1
    with table.read(rows) as found:
        assert np.array_equal(found["x"].numpy(), content)


def test_connections_that_are_cut_are_made_again(
    between: Between, table: tq.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table.put(x=image())
    monkeypatch.setattr(remote, "ASK_S", 0.1)
    cut: list[int] = []

    def cut_once(passed: int, data: bytes, up: bool) -> bytes:
        if not up and passed > 3 * MIB and not cut:
            cut.append(passed)
            raise OSError("cut")
        return data

    between.bulk.meddle = cut_once
    with table.read(rows) as found:
        assert np.array_equal(found["x"].numpy(), image())
    assert cut


def test_a_server_that_was_started_anew_costs_no_attempt() -> None:
    """Attempts are counted within one life of the server: a caller's own deadline ends a wait for one that keeps
    dying."""
    welcomes = [Welcome(1, epoch, "t", "t", {}, 0, bulk_port=1) for epoch in range(1, 9)]
    dials = iter(welcomes[1:])

    def dial(_told: Welcome) -> BulkClient:
        if (told := next(dials, None)) is not None:
            memory.welcomed(told)
        else:
            again.append(1)
        raise tq.Unreachable("it died again")

    again: list[int] = []
    memory = remote.RemoteMemory(dial, welcomes[0], lambda _: None, lambda: None, lambda: None)
    with pytest.raises(tq.Unreachable, match=f"{BULK_TRIES} attempts; at last: it died again"):
        memory._carry(lambda _: None, remote.Caller(lambda: None))
    assert len(again) == BULK_TRIES
    memory.close()


def test_silence_is_waited_for_so_long_and_then_told(
    between: Between, table: tq.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table.put(x=image())
    monkeypatch.setattr(remote, "BULK_SILENCE_S", 0.1)
    monkeypatch.setattr(remote, "ASK_S", 0.05)
    between.bulk.meddle = lambda _passed, data, up: data if up else b""
    with pytest.raises(tq.Unreachable, match=r"3 attempts; at last: the bulk endpoint at port \d+ was silent"):
        table.read(rows)
    with pytest.raises(tq.Unreachable, match="silent"):
        table.put(x=image())


def test_what_failed_to_be_put_is_not_there_and_its_memory_returns(
    between: Between, queue: tq.Queue, table: tq.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BULK_SILENCE_S", 0.1)
    monkeypatch.setattr(remote, "ASK_S", 0.1)
    used = queue.stats().server.used_bytes
    between.bulk.meddle = lambda _passed, data, up: data if up else b""
    for columns in ({"x": image()}, {"x": image(1)[:, :100]}):
        with pytest.raises(tq.Unreachable):
            table.put(**columns)
    between.bulk.meddle = lambda _passed, data, _up: data
    queue.tables()  # a call later than what was returned
    assert queue.stats().server.used_bytes == used
    assert table.audit().rows_put == 0
    table.put(x=image())
    with table.lease("a", rows=8) as batch:
        assert np.array_equal(batch["x"].numpy(), image())


@pytest.mark.slow
def test_a_reader_that_stalls_holds_few_bytes_at_the_server(server: Served, name: str) -> None:
    def resident() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

    program = """
        import transferqueue.client.memory.remote as remote
        class Stalled(remote.FetchTransfer):
            def receive(self):
                print("stalled", flush=True)
                sys.stdin.readline()
                return super().receive()
        remote.FetchTransfer = Stalled
        print(len(tq.connect(sys.argv[1], data="remote").table(sys.argv[2]).read(limit=10**6)["x"].list()))
    """
    with tq.connect(server.ipc) as queue:
        table = queue.create_table(name)
        for seed in range(12):  # 96 MiB in blocks of rows that are gathered
            table.put(x=list(image(8, seed)))
        before = resident()
        readers = [Worker(server.tcp, program, name) for _ in range(3)]
        try:
            for reader in readers:
                assert reader.line() == "stalled"
            queue.tables()
            held = resident() - before
            readers[0].send(signal.SIGKILL)
            readers[0].process.wait(20)
            for reader in readers[1:]:
                reader.process.stdin.close()  # type: ignore[union-attr]
                reader.process.stdin = None
                while (told := reader.line()) == "stalled":
                    pass
                assert told == "96"
        finally:
            for reader in readers:
                reader.__exit__()
    assert held < 3 * 12 * MIB, "eight frames of one MiB each, and what the first look at a gather costs"


def test_views_stay_and_are_nobody_elses(table: tq.Table) -> None:
    kept = []
    for seed in range(3):
        with table.read(table.put(x=image(4, seed))) as found:
            kept.append(found["x"].numpy())
        with pytest.raises(tq.BatchEnded):
            found["x"].numpy()
    for seed, view in enumerate(kept):
        assert np.array_equal(view, image(4, seed))
        view[:] = 0


def test_a_buffer_is_used_again_when_no_view_of_it_is_left() -> None:
    buffers = BufferPool(kept_bytes=3 * MIB)
    first = buffers.take(MIB - 5)
    address, part = first.__array_interface__["data"][0], first[7:9]
    assert (len(first), address % 64) == (MIB - 5, 0)
    del first
    assert buffers.kept == 0
    assert buffers.take(MIB - 5).__array_interface__["data"][0] != address
    del part
    assert buffers.kept == 2 * MIB
    assert address in [buffers.take(MIB).__array_interface__["data"][0] for _ in range(1)]
    many = [buffers.take(MIB) for _ in range(9)]
    del many
    assert buffers.kept == 3 * MIB
    assert len(buffers.take(0)) == 0
    assert len(buffers.take(100)) == 100
    assert buffers.kept == 3 * MIB, "small ones are not worth keeping"


def test_a_free_buffer_serves_batches_that_differ_a_little() -> None:
    """Ragged rows do. A new buffer costs more than what is received into it."""
    buffers = BufferPool(kept_bytes=64 * MIB)
    address = buffers.take(9 * MIB).__array_interface__["data"][0]
    for nbytes in (10 * MIB, 9 * MIB - 1, 8 * MIB, 7 * MIB):
        assert buffers.take(nbytes).__array_interface__["data"][0] == address
        assert buffers.kept == 10 * MIB
    for nbytes in (10 * MIB + 1, 4 * MIB):
        assert buffers.take(nbytes).__array_interface__["data"][0] != address, "too small, or much too large"
    assert len(buffers.take(2 << 30)) == 2 << 30
    assert buffers.kept == (10 + 12 + 4) * MIB, "the largest are not kept"


def test_rows_that_share_a_value_cross_once(between: Between, table: tq.Table) -> None:
    down = []

    def count(_passed: int, data: bytes, up: bool) -> bytes:
        if not up:
            down.append(len(data))
        return data

    rows = table.put(x=tq.Repeat(image(2), 8), y=np.arange(16))
    between.bulk.meddle = count
    with table.read(rows[::-1]) as found:
        assert np.array_equal(found["x"].numpy(), np.repeat(image(2), 8, axis=0)[::-1])
        assert found["y"].list() == list(range(15, -1, -1))
    assert 2 * MIB < sum(down) < 2.1 * MIB


def test_only_what_is_asked_for_crosses(between: Between, table: tq.Table) -> None:
    down = []

    def count(_passed: int, data: bytes, up: bool) -> bytes:
        if not up:
            down.append(len(data))
        return data

    rows = table.put(x=image(), y=image()[:, :100], z=[np.arange(at) for at in range(8)])
    between.bulk.meddle = count
    with table.read(rows[[6, 1]], fields=["y", "z"]) as found:
        assert np.array_equal(found["y"].numpy(), image()[[6, 1], :100])
        assert [row.tolist() for row in found["z"]] == [[0, 1, 2, 3, 4, 5], [0]]
    assert sum(down) < 2000


def test_many_threads_move_bytes_at_once(queue: tq.Queue, table: tq.Table) -> None:
    def work(seed: int) -> None:
        for turn in range(4):
            sent = image(2, seed * 100 + turn)
            with table.read(table.put(x=sent)) as found:
                assert np.array_equal(found["x"].numpy(), sent)

    with ThreadPoolExecutor(9) as pool:
        list(pool.map(work, range(9)))
    assert len(queue._client.memory._idle) <= 4  # type: ignore[union-attr]


def test_closing_ends_what_is_under_way(between: Between, queue: tq.Queue, table: tq.Table) -> None:
    rows = table.put(x=image())
    held = threading.Event()

    def hold(_passed: int, data: bytes, up: bool) -> bytes:
        if not up:
            held.set()
        return data if up else b""

    between.bulk.meddle = hold
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(table.read, rows)
        assert held.wait(20)
        queue.close()
        with pytest.raises(tq.Disconnected):
            reading.result(timeout=20)


def test_a_cancelled_read_ends_and_the_loop_goes_on(
    between: Between, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ASK_S", 0.1)
    held = threading.Event()

    def hold(_passed: int, data: bytes, up: bool) -> bytes:
        if not up:
            held.set()
        return data if up else b""

    async def run() -> None:
        async with tq.aconnect(between.control.address, data="remote") as queue:
            table = await queue.create_table(name, tasks=[tq.Task("a", needs=["x"])])
            await table.put(x=image())
            between.bulk.meddle = hold
            leasing = asyncio.ensure_future(table.lease("a", rows=8))
            await asyncio.to_thread(held.wait, 20)
            leasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leasing
            between.bulk.meddle = lambda _passed, data, _up: data
            async with await table.lease("a", rows=8, timeout_s=20) as batch:
                assert np.array_equal(batch["x"].numpy(), image())

    asyncio.run(run())


def test_weights_cross_too(queue: tq.Queue, name: str) -> None:
    channel = queue.weights(name)
    tensors = {"layer.weight": image(3), "0.bias": np.arange(7, dtype=np.float32), "scalar": np.float32(3).reshape(())}
    channel.publish(4, tensors)
    with channel.pull() as weights:
        assert weights.version == 4
        for tensor, values in weights.numpy().items():
            assert np.array_equal(values, tensors[tensor])
            assert values.shape == tensors[tensor].shape


def test_a_client_that_cannot_map_the_arena_goes_over_the_network_by_itself(server: Served, name: str) -> None:
    program = """
        import os
        from transferqueue.client import client
        client._can_map = lambda path: False
        queue = tq.connect(sys.argv[1])
        table = queue.create_table(sys.argv[2], tasks=[tq.Task("a", needs=["x"])])
        table.put(x=[np.arange(5), np.arange(6)])
        with table.lease("a", rows=2) as batch:
            print(type(queue._client.memory).__name__, [row.tolist() for row in batch["x"]])
    """
    with Worker(server.tcp, program, name) as worker:
        assert worker.line() == "RemoteMemory [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]"


def test_only_tcp_can_be_remote(server: Served) -> None:
    for address in (None, server.ipc):
        with pytest.raises(tq.UsageError, match=r'data="remote" needs a tcp address'):
            tq.connect(address, data="remote")
    with pytest.raises(tq.UsageError, match=r"data='elsewhere' is none of auto, remote"):
        tq.connect(server.tcp, data="elsewhere")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["process", *only_long("disk")])
def test_a_remote_client_outlives_its_server(tmp_path: Path, level: str, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start() -> subprocess.Popen[str]:
        found = subprocess.Popen(
            [
                *(sys.executable, "-m", "transferqueue.server", "--address", f"ipc://{tmp_path}/run/q.sock"),
                *("--tcp", f"127.0.0.1:{port}", "--arena-bytes", "256MiB"),
                *("--durability", level, "--state", str(tmp_path / "state")),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert found.stdout is not None
        assert found.stdout.readline().split()[:1] == ["ready"]
        return found

    server = start()
    try:
        with tq.connect(f"tcp://127.0.0.1:{port}", data="remote") as queue:
            table = queue.create_table(name, tasks=[tq.Task("a", needs=["x"])])
            table.put(x=list(image(4)), y=[[1]] * 4)
            batch = table.lease("a", rows=2, lease_s=300)
            for life in range(2):
                server.send_signal(signal.SIGKILL)
                server.wait()
                server.stdout.close()  # type: ignore[union-attr]
                server = start()
                table.put(
                    x=[np.full(50, life, np.uint8)], timeout_s=60
                )  # into the extent that it has from the life before
                with table.lease("a", rows=1, timeout_s=60) as other:
                    assert np.array_equal(other["x"][0], image(4)[2 + life])
            batch.ack()
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        server.stdout.close()  # type: ignore[union-attr]
    assert os.path.exists(tmp_path / "state")


def test_of_weights_only_what_changed_crosses(between: Between, queue: tq.Queue, name: str) -> None:
    down = [0]

    def count(_passed: int, data: bytes, up: bool) -> bytes:
        down[0] += 0 if up else len(data)
        return data

    between.bulk.meddle = count
    channel = queue.weights(name)
    tensors = {"a": image(2), "b": image(2, seed=1), "c": image(2, seed=2), "d": np.arange(7, dtype=np.float32)}
    channel.publish(0, tensors)
    with channel.subscribe() as subscription:
        subscription.pull(timeout_s=30)
        assert down[0] > 6 * MIB
        down[0] = 0
        channel.publish(1, tensors | {"d": np.zeros(7, np.float32)})
        weights = subscription.pull(timeout_s=30)
        assert weights.changed() == {"d"}
        assert np.array_equal(weights.numpy()["b"], tensors["b"])
        assert down[0] < MIB / 8


@pytest.mark.parametrize(
    ("blocks", "slots", "rows", "asked"),
    [
        (0, [3, 4, 5], 3, [3, 4, 5]),
        (0, [7], 1, [7]),
        (0, [3, 5], 2, [3, 5]),
        (0, [4, 3], 2, [4, 3]),
        ([0, 1], [3, 4], 2, [3, 4]),
        (0, [5, 5, 2, 5], 4, [5, 2]),
    ],
)
def test_a_request_names_each_row_once(blocks: int | list[int], slots: list[int], rows: int, asked: list[int]) -> None:
    block_of_row = np.array(blocks, "<i4").tobytes()
    located = [m.BlockLocation(at, 0, at, 0, 4096, 64, ["x"], [0], b"ticket") for at in range(2)][: np.max(blocks) + 1]
    part = m.ReplyColumns(["x"], located, block_of_row, codec.encode_ascending(np.array(slots, "<i4")))
    found = rows_of(part, rows)
    assert np.frombuffer(found.wanted.slot_of_row, "<i4").tolist() == asked
    assert (asked if found.slot_of_row is None else [asked[at] for at in found.slot_of_row]) == slots


def test_a_frame_of_another_transfer_puts_no_byte_where_those_of_this_one_are_due():
    part = m.ReplyColumns(["x"], [m.BlockLocation(1, 0, 1, 0, 64, 8, ["x"], [0])], bytes(4), bytes(4))
    asked = RequestedColumns(7, 0, {"x": Field("x", "int64")}, [rows_of(part, 8)])
    fetch = FetchTransfer(2, asked, BufferPool())
    head, _ = b.message(b.ReadFrame(2, 0, [b.PartHead(0, [0])], last=False))
    fetch.expect(head, 0)
    late, _ = b.message(b.ReadFrame(1, 0, [], last=True), [bytes(64)])
    with pytest.raises(tq.Corruption, match="a frame of bulk transfer 1 came where 2 was under way"):
        fetch.expect(late, 64)
