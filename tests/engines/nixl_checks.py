"""What holds of one-sided reads by a real NIXL: each check in a process of its own, since UCX reads its transports
once.

TRANSFERQUEUE_BYTES=nixl:cma python -m tests.engines.nixl_checks NAME
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from tests.adapters.nixl.carried import CarriedBacking, OtherProcess, OverCarrier
from tests.client.deployments import Served, Worker, served
from transferqueue.adapters.carriers.nixl.agent import (
    CopiedRange,
    MemoryAgent,
    NixlAgent,
    PendingRead,
    Transports,
    load_nixl,
)
from transferqueue.adapters.carriers.nixl.client import one_sided
from transferqueue.adapters.carriers.nixl.client.one_sided import OneSidedMemory, Quarantine
from transferqueue.client.memory import remote
from transferqueue.limits import MIB
from transferqueue.storage.memory.backing import Range
from transferqueue.testing.conformance.backings import BACKING_CHECKS, content, write
from transferqueue.testing.conformance.report import Verdict, judge
from transferqueue.transport.bulk.carriers import BYTES_VARIABLE

CARRIER: Final = Transports(os.environ.get(BYTES_VARIABLE, Transports.CMA))


def memory() -> OneSidedMemory:
    return OneSidedMemory(lambda: NixlAgent(CARRIER))


def subject(shared: OneSidedMemory) -> OverCarrier:
    return OverCarrier(lambda: OtherProcess(str(CARRIER)), shared, memory())


def process_of(backing: CarriedBacking) -> subprocess.Popen[str]:
    assert isinstance(backing.shard, OtherProcess)
    return backing.shard.process


def kit() -> None:
    """Every check of the kit of backings, over the carrier; and the reads were one-sided."""
    remote.BULK_SILENCE_S = 1.0
    shared = memory()
    for check in BACKING_CHECKS:
        outcome = judge(check, subject(shared))
        assert outcome.verdict is Verdict.PASSED, (check.__name__, outcome.text)
    with subject(shared).open() as backing:
        place, data = Range(1, 0, 8 * MIB), content(8 * MIB)
        backing.ensure(0, 8 * MIB)
        write(backing, place, data)
        assert np.array_equal(backing.read([place])[0], data)
        assert backing.shard.answer("sent")["one_sided"] == 8 * MIB
        assert backing.shard.answer("received") == {"stream": 0, "one_sided": 8 * MIB}


def deployment(work: Callable[[Served], None]) -> None:
    with tempfile.TemporaryDirectory() as directory, served(Path(directory)) as server:
        work(server)


def rows(count: int, mean: int, seed: int = 0) -> list[np.ndarray]:
    lengths = np.random.default_rng(seed).integers(mean // 8, 2 * mean - mean // 8, count)
    return [content(int(n), seed * 1000 + at) for at, n in enumerate(lengths)]


def sent(queue: tq.Queue) -> dict[str, int]:
    found: dict[str, int] = queue.stats().server.bulk_sent_bytes
    return found


def received(queue: tq.Queue) -> dict[str, int]:
    found: dict[str, int] = queue.stats().server.bulk_received_bytes
    return found


def agents() -> None:
    """An agent costs a process no torch, though `nixl` looks for CUDA there; which is loaded afterwards as if nothing
    had been."""
    assert not {"torch", "nixl"} & {*sys.modules}
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("from torch.version import cuda")
        (package / "version.py").write_text("cuda = None")
        sys.path.insert(0, directory)
        assert NixlAgent(CARRIER).close()
        assert "torch" not in sys.modules
        import nixl
        import torch

        assert torch.__file__ == str(package / "__init__.py")
        assert nixl._api is load_nixl(), "one build in a process, whoever loads it"


def columns() -> None:
    """Dense, ragged and text columns; whole, in part, in random order, of many puts: what comes is what was put."""

    def work(server: Served) -> None:
        with tq.connect(server.tcp, data="remote") as queue:
            table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
            kept: list[list[np.ndarray]] = []
            ids: list[int] = []
            for seed in range(6):
                long = rows(16, 48 << 10, seed)
                put = table.put(
                    x=long,
                    y=np.arange(16) + seed,
                    z=[f"row {at}" for at in range(16)],
                    w=np.stack([content(1 << 15, at) for at in range(16)]),
                )
                ids += list(put)
                kept.append(long)
            pulled = received(queue)
            assert pulled["one_sided"] > 6 * 16 * (32 << 10), pulled
            assert pulled["stream"] == 0, pulled
            before = sent(queue)
            every = [row for long in kept for row in long]
            order = np.random.default_rng(1).permutation(len(ids))
            for chosen in (np.arange(16), np.arange(3, 9), order, order[:7], np.array([5])):
                with table.read([ids[at] for at in chosen]) as found:
                    for at, row in zip(chosen, found["x"].list(), strict=True):
                        assert np.array_equal(np.asarray(row, np.uint8), every[at])
                    assert found["y"].list() == [at % 16 + at // 16 for at in chosen]
                    assert found["z"].list() == [f"row {at % 16}" for at in chosen]
                    assert all(
                        np.array_equal(row, content(1 << 15, at % 16))
                        for at, row in zip(chosen, found["w"].numpy(), strict=True)
                    )
            after = sent(queue)
            assert after["one_sided"] - before["one_sided"] > 9 * MIB, (before, after)
            half = tq.Slice((0, 1 << 14))
            with table.read([ids[at] for at in order], fields={"w": half}) as found:
                for at, row in zip(order, found["w"].numpy(), strict=True):
                    assert np.array_equal(row, content(1 << 15, at % 16)[: 1 << 14])
            assert sent(queue)["one_sided"] - after["one_sided"] >= len(order) << 14, "slices are named, too"
            assert after["stream"] - before["stream"] < 2 * MIB, "short rows and padding"

    deployment(work)


def threads() -> None:
    """Four threads of one client read at once, while another client puts and drops."""

    def work(server: Served) -> None:
        with tq.connect(server.tcp, data="remote") as queue:
            table = queue.create_table("t")
            data = [content(4 * MIB, seed).reshape(4, MIB) for seed in range(4)]
            put = [list(table.put(x=each)) for each in data]
            failed: list[BaseException] = []

            def read(number: int) -> None:
                try:
                    for _ in range(10):
                        with table.read(put[number]) as found:
                            assert np.array_equal(found["x"].numpy(), data[number])
                except BaseException as error:
                    failed.append(error)

            working = [threading.Thread(target=read, args=(number,)) for number in range(4)]
            for thread in working:
                thread.start()
            for thread in working:
                thread.join(60)
            assert not failed, failed
            assert sent(queue)["one_sided"] == 40 * 4 * MIB

    deployment(work)


def putting_threads() -> None:
    """Four threads of one client put ever larger batches at once: what they register meanwhile is loaded while the
    shard reads for the others."""

    def work(server: Served) -> None:
        with tq.connect(server.tcp, data="remote") as queue:
            table = queue.create_table("t")
            failed: list[BaseException] = []

            def put(number: int) -> None:
                try:
                    for turn in range(6):
                        data = content((2 + 3 * turn) * MIB, number * 100 + turn).reshape(2 + 3 * turn, MIB)
                        with table.read(list(table.put(x=data))) as found:
                            assert np.array_equal(found["x"].numpy(), data)
                except BaseException as error:
                    failed.append(error)

            working = [threading.Thread(target=put, args=(number,)) for number in range(4)]
            for thread in working:
                thread.start()
            for thread in working:
                thread.join(120)
            assert not failed, failed
            assert received(queue) == {"stream": 0, "one_sided": 4 * (6 * 2 + 3 * 15) * MIB}

    deployment(work)


def reader_killed() -> None:
    """A client is killed in the middle of its reads: the server lives, its pins return, others read on."""

    def work(server: Served) -> None:
        with tq.connect(server.ipc) as local:
            table = local.create_table("t")
            ids = list(table.put(x=content(64 * MIB).reshape(64, MIB)))
            program = """
                queue = tq.connect(sys.argv[1], data="remote")
                table = queue.table("t")
                ids = [int(one) for one in sys.argv[2].split(",")]
                while True:
                    with table.read(ids):
                        print("read", flush=True)
            """
            for _ in range(3):
                with Worker(server.tcp, program, ",".join(map(str, ids))) as reader:
                    for _ in range(4):
                        assert reader.line() == "read"
                    reader.send(signal.SIGKILL)
                    reader.process.wait()
            with tq.connect(server.tcp, data="remote") as queue, queue.table("t").read(ids) as found:
                assert np.array_equal(found["x"].numpy().reshape(-1), content(64 * MIB))
            table.drop(ids, "done")
            deadline = time.monotonic() + 30
            while local.stats().server.used_bytes:
                assert time.monotonic() < deadline, local.stats().server

    deployment(work)


SCATTERED_READER: Final = """
    import numpy as np
    queue = tq.connect(sys.argv[1], data="remote")
    table, ids = queue.table("t"), np.array([int(one) for one in sys.argv[2].split(",")])
    while True:
        order = np.random.permutation(len(ids))[:512]
        with table.read(ids[order]) as found:
            values, offsets = found["x"].ragged()
            for at, row in enumerate(order.tolist()):
                assert (values[offsets[at] : offsets[at + 1]] == row % 251).all(), row
        print("read", flush=True)
"""


def scattered() -> None:
    """Random rows of 4 KiB are staged: by six threads at once, which share the slots; while readers are stopped and
    killed; the slots return."""

    def work(server: Served) -> None:
        with tq.connect(server.tcp, data="remote") as queue, tq.connect(server.ipc) as local:
            table = queue.create_table("t")
            lengths = np.random.default_rng(1).integers(0, 8 << 10, 2048)
            ids = np.array(list(table.put(x=[np.full(n, at % 251, np.uint8) for at, n in enumerate(lengths)])))

            def read(reads: int, seed: int) -> None:
                for _ in range(reads):
                    order = np.random.default_rng(seed).permutation(len(ids))
                    with table.read(ids[order]) as found:
                        for row, got in zip(order, found["x"].list(), strict=True):
                            assert np.array_equal(np.asarray(got, np.uint8), np.full(lengths[row], row % 251, np.uint8))

            def is_staged() -> None:
                before = sent(queue)
                read(1, 0)
                after = sent(queue)
                assert after["one_sided"] - before["one_sided"] > 0.99 * lengths.sum(), (before, after)

            is_staged()
            failed: list[BaseException] = []

            def run(number: int) -> None:
                try:
                    read(3, number)
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            assert not failed, failed
            for life in range(4):
                with Worker(server.tcp, SCATTERED_READER, ",".join(map(str, ids))) as reader:
                    assert [reader.line() for _ in range(3)] == ["read"] * 3
                    time.sleep(0.003 * life)  # somewhere in a read
                    reader.send(signal.SIGSTOP)
                    read(1, life)
                    if life % 2:
                        reader.send(signal.SIGCONT)
                        assert [reader.line() for _ in range(3)] == ["read"] * 3
                    reader.send(signal.SIGKILL)
                    reader.process.wait()
            is_staged()
            table.drop(ids, "done")
            deadline = time.monotonic() + 30
            while local.stats().server.used_bytes:
                assert time.monotonic() < deadline, local.stats().server

    deployment(work)


PUTTER: Final = """
    from transferqueue.testing.conformance.backings import content
    queue = tq.connect(sys.argv[1], data="remote")
    table, seed = queue.table("t"), int(sys.argv[2])
    while True:
        key = [f"{seed}-{row}" for row in range(4)]
        data = content(32 << 20, seed).reshape(4, 8 << 20)
        print("begin", seed, flush=True)
        sys.stdin.readline()
        table.put(x=data, key=key, timeout_s=60)
        print("put", seed, flush=True)
        seed += 1
"""


def weights() -> None:
    """Whole versions, and the parts of four ranks along any dimension: they are what was published, and cross
    one-sided."""

    def work(server: Served) -> None:
        rng = np.random.default_rng(1)
        shapes = {"q": (1024, 2048), "o": (2048, 1024), "experts": (8, 256, 512), "norm": (1024,)}
        model = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
        cuts = {
            "q": lambda part: tq.Slice(part),
            "o": lambda part: tq.Slice(None, part),
            "experts": lambda part: tq.Slice(None, part),
        }
        with tq.connect(server.ipc) as trainer, tq.connect(server.tcp, data="remote") as queue:
            channel = queue.weights("policy")
            for version in range(2):
                trainer.weights("policy").publish(version, model)
                before = sent(queue)
                with channel.pull(version=version) as whole:
                    assert all(np.array_equal(whole.numpy()[name], value) for name, value in model.items())
                _crossed_one_sided(queue, before, sum(value.nbytes for value in model.values()))
                for rank in range(4):
                    before = sent(queue)
                    share = tq.Share(rank, 4)
                    only = {name: cuts[name](share) if name in cuts else None for name in model}
                    with channel.pull(version=version, only=only) as part:
                        found = part.numpy()
                        rows, columns = slice(256 * rank, 256 * rank + 256), slice(64 * rank, 64 * rank + 64)
                        assert np.array_equal(found["q"], model["q"][rows])
                        assert np.array_equal(found["o"], model["o"][:, rows])
                        assert np.array_equal(found["experts"], model["experts"][:, columns])
                        assert np.array_equal(found["norm"], model["norm"])
                        _crossed_one_sided(queue, before, sum(value.nbytes for value in found.values()))
                model = {name: value + 1 for name, value in model.items()}

    deployment(work)


def _crossed_one_sided(queue: tq.Queue, before: dict[str, int], nbytes: int) -> None:
    """Nothing but these bytes, and all but what is small."""
    ways = {way: count - before[way] for way, count in sent(queue).items()}
    assert nbytes <= sum(ways.values()) <= 1.02 * nbytes, (ways, nbytes)
    assert ways["stream"] <= 0.01 * nbytes, ways


def _put_by(putter: Worker, count: int) -> list[int]:
    """The numbers of the next puts of a putter, which are there."""
    found: list[int] = []
    for _ in range(count):
        putter.tell("go on")
    while len(found) < count:
        word, _, number = putter.line().partition(" ")
        found += [int(number)] if word == "put" else []
    return found


def _holds(queue: tq.Queue, there: list[int], perhaps: list[int]) -> None:
    """The table has these puts whole, and of the others all rows or none; it has no row twice."""
    table = queue.table("t")
    keys = {f"{seed}-{row}": (seed, row) for seed in (*there, *perhaps) for row in range(4)}
    found = table.find(list(keys))
    whole = {seed: [found[at * 4 + row] for row in range(4)] for at, seed in enumerate((*there, *perhaps))}
    for seed, ids in whole.items():
        known = [row for row in ids if row is not None and row >= 0]
        assert len(known) == 4 or (seed in perhaps and not known), (seed, ids)
        if known:
            with table.read(known) as read:
                assert np.array_equal(read["x"].numpy().reshape(-1), content(32 << 20, seed)), seed
            table.drop(known, "done")
    deadline = time.monotonic() + 60
    while queue.stats().server.used_bytes:
        assert time.monotonic() < deadline, queue.stats().server


def _pulled(queue: tq.Queue, nbytes: int) -> None:
    """Return once the shard has read so many bytes out of its clients' memory."""
    deadline = time.monotonic() + 60
    while received(queue)["one_sided"] < nbytes:
        assert time.monotonic() < deadline, received(queue)


def putter_killed() -> None:
    """A client is killed while the shard reads out of its memory: what it was told is there is there, the rest is not,
    and memory returns."""

    def work(server: Served) -> None:
        with tq.connect(server.ipc) as local:
            local.create_table("t", limits=tq.Limits(rows=4096))
            for life in range(8):
                with Worker(server.tcp, PUTTER, str(life * 100)) as putter:
                    there = _put_by(putter, 2)
                    assert putter.line() == f"begin {there[-1] + 1}"
                    before = received(local)["one_sided"]
                    putter.tell("go on")
                    _pulled(local, before + life * 4 * MIB)  # of the 32 MiB of that put
                    putter.send(signal.SIGKILL)
                    putter.process.wait()
                _holds(local, there, [there[-1] + 1])
            assert received(local)["one_sided"] >= 16 * 32 * MIB

    deployment(work)


def putter_stopped() -> None:
    """A client stands still while the shard reads out of its memory, for less and for more than the shard's silence,
    and goes on."""

    def work(server: Served) -> None:
        with tq.connect(server.ipc) as local:
            local.create_table("t", limits=tq.Limits(rows=4096))
            for stopped_s in (0.5, 2.5, remote.BULK_SILENCE_S + 2):
                seed = int(stopped_s * 1000)
                with Worker(server.tcp, PUTTER, str(seed)) as putter:
                    there = _put_by(putter, 2)
                    assert putter.line() == f"begin {there[-1] + 1}"
                    before = received(local)["one_sided"]
                    putter.tell("go on")
                    _pulled(local, before + 4 * MIB)
                    putter.send(signal.SIGSTOP)
                    time.sleep(stopped_s)
                    putter.send(signal.SIGCONT)
                    there += _put_by(putter, 2)  # the one that was stopped, and the next
                    putter.send(signal.SIGKILL)
                    putter.process.wait()
                _holds(local, there, [there[-1] + 1])

    deployment(work)


def shard_killed_in_a_put() -> None:
    """The shard is killed while it reads: the client gets an error of the peer, lives, and puts to the next shard."""
    remote.BULK_SILENCE_S = 1.0
    shared = subject(memory())
    for life in range(3):
        with shared.open() as backing:
            place, data = Range(1, 0, 32 * MIB), content(32 * MIB, life)
            backing.ensure(0, 32 * MIB)
            write(backing, place, data)
            assert backing.shard.answer("received")["one_sided"] == 32 * MIB
            threading.Timer(0.02 * life, process_of(backing).kill).start()
            try:
                while True:
                    write(backing, place, data)
            except tq.TransferQueueError as error:
                assert isinstance(error, tq.Unreachable), error  # noqa: PT017


def shard_stopped_in_a_put() -> None:
    """The shard stands still while it reads, longer than its client waits, and goes on: the stream carries the bytes,
    later puts are pulled again."""
    remote.BULK_SILENCE_S = 1.0
    with subject(memory()).open() as backing:
        place = Range(1, 0, 32 * MIB)
        backing.ensure(0, 32 * MIB)
        write(backing, place, content(32 * MIB))

        def stop() -> None:
            os.kill(process_of(backing).pid, signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(process_of(backing).pid, signal.SIGCONT)

        stopping, turn = threading.Timer(0.01, stop), 0
        stopping.start()
        while stopping.is_alive():
            turn += 1
            write(backing, place, content(32 * MIB, turn))
            assert np.array_equal(backing.read([place])[0], content(32 * MIB, turn))
        before = backing.shard.answer("received")["one_sided"]
        writer = backing.carrier.writer
        writer._not_before = 0.0
        write(backing, place, content(32 * MIB))
        assert np.array_equal(backing.read([place])[0], content(32 * MIB))
        assert backing.shard.answer("received")["one_sided"] - before == 32 * MIB, "pulled again"


TARGET: Final = """
import os, sys, time
import numpy as np
from transferqueue.adapters.carriers.nixl.agent import NixlAgent, Transports
agent, memory = NixlAgent(Transports(os.environ['TRANSFERQUEUE_BYTES'])), np.full(32 << 20, 5, np.uint8)
agent.register(memory.ctypes.data, len(memory))
print(memory.ctypes.data, agent.metadata().hex(), flush=True)
while True:
    agent.progress()
    time.sleep(0.0005)
"""


def late_reads() -> None:
    """Reads from a peer that stands still, before and after it was connected: once their agent is gone, nothing writes
    what they were to write, though the peer goes on or dies; the quarantine is empty, and no socket is left. The next
    agent reads. (Over TCP the peer may end when it goes on: UCX sends a signal where the reader of a read that it
    serves has gone.)"""
    for connected, killed in ((False, False), (True, False), (True, True)):
        with _target() as peer, _target() as other:
            try:
                _read_late(peer, other, connected=connected, killed=killed)
            finally:
                peer.kill()
                other.kill()


def _target() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE, text=True)


def _read_late(peer: subprocess.Popen[str], other: subprocess.Popen[str], *, connected: bool, killed: bool) -> None:
    quarantine, before = Quarantine(), len(os.listdir("/proc/self/fd"))
    shared = OneSidedMemory(lambda: NixlAgent(CARRIER), quarantine)
    buffers = [np.full(8 * MIB, 7, np.uint8) for _ in range(4)]
    assert shared.begin()
    read = _reader(shared.agent, peer, buffers)
    if connected:
        _wait(read(0))
    peer.send_signal(signal.SIGSTOP)
    for at, buffer in enumerate(buffers):
        late = read(at)
        late.done()
        shared.quarantine([buffer])
        late.abandon()
    del read
    one_sided.QUARANTINE_BYTES_MAX = 0
    assert not shared.begin(), "a transfer uses the agent"
    shared.end()
    assert shared.begin()
    assert quarantine.nbytes == 0
    assert len(os.listdir("/proc/self/fd")) <= before
    for buffer in buffers:
        buffer[:] = 9
    peer.send_signal(signal.SIGKILL if killed else signal.SIGCONT)
    time.sleep(1.0)
    assert all((buffer == 9).all() for buffer in buffers)
    _wait(_reader(shared.agent, other, buffers)(0))
    assert (buffers[0] == 5).all()


def _reader(agent: MemoryAgent, peer: subprocess.Popen[str], buffers: list[np.ndarray]) -> Callable[[int], PendingRead]:
    """Begins to read the peer's memory into one of these buffers."""
    assert peer.stdout is not None
    address, metadata = peer.stdout.readline().split()
    for buffer in buffers:
        agent.register(buffer.ctypes.data, len(buffer))
    name = agent.load(bytes.fromhex(metadata))
    return lambda at: agent.read(name, [CopiedRange(buffers[at].ctypes.data, int(address) + at * 8 * MIB, 8 * MIB)])


def _wait(read: PendingRead) -> None:
    deadline = time.monotonic() + 30
    while not read.done():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    read.abandon()


def emulated() -> None:
    """Where no transport reads by itself, the stream carries what is put and read, and the shard lives. Over TCP it
    would answer emulated reads, and a shard that does is ended if the reader dies."""
    os.environ |= {
        "UCX_TLS": "tcp,self",
        "UCX_LOG_LEVEL": "fatal",
    }  # it writes errors to standard output, where the shard answers
    with subject(memory()).open() as backing:
        place, data = Range(1, 0, 8 * MIB), content(8 * MIB)
        backing.ensure(0, 8 * MIB)
        write(backing, place, data)
        assert np.array_equal(backing.read([place])[0], data)
        way = "one_sided" if CARRIER is Transports.TCP else "stream"
        assert backing.shard.answer("received")[way] == 8 * MIB
        assert backing.shard.answer("sent")[way] == 8 * MIB


def shard_killed() -> None:
    """The shard is killed in the middle of a read: the reader gets an error of the peer, lives, and reads from the next
    shard."""
    remote.BULK_SILENCE_S = 1.0
    shared = memory()
    for life in range(3):
        with subject(shared).open() as backing:
            place, data = Range(1, 0, 32 * MIB), content(32 * MIB, life)
            backing.ensure(0, 32 * MIB)
            write(backing, place, data)
            assert np.array_equal(backing.read([place])[0], data)
            threading.Timer(0.02 * life, process_of(backing).kill).start()
            try:
                while True:
                    assert np.array_equal(backing.read([place])[0], data)
            except tq.TransferQueueError as error:
                assert isinstance(error, tq.Unreachable), error  # noqa: PT017


def shard_stopped() -> None:
    """The shard stands still in the middle of a read, longer than a reader waits, and goes on: nothing is lost, and no
    byte is written late."""
    remote.BULK_SILENCE_S = 1.0
    shared = memory()
    with subject(shared).open() as backing:
        place, data = Range(1, 0, 32 * MIB), content(32 * MIB)
        backing.ensure(0, 32 * MIB)
        write(backing, place, data)
        assert np.array_equal(backing.read([place])[0], data)
        _stand_still(backing, place, data)
        before = backing.shard.answer("sent")["one_sided"]
        reader = backing.carrier.reader
        reader._not_before = 0.0
        assert np.array_equal(backing.read([place])[0], data)
        assert backing.shard.answer("sent")["one_sided"] - before == 32 * MIB, "one-sided again"
    gc.collect()


def _stand_still(backing: CarriedBacking, place: Range, data: Any) -> None:
    def stop() -> None:
        os.kill(process_of(backing).pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process_of(backing).pid, signal.SIGCONT)

    stopping = threading.Timer(0.01, stop)
    stopping.start()
    while stopping.is_alive():
        assert np.array_equal(backing.read([place])[0], data)


CHECKS: Final[dict[str, Callable[[], None]]] = {
    check.__name__: check
    for check in (
        kit,
        agents,
        columns,
        threads,
        putting_threads,
        reader_killed,
        scattered,
        late_reads,
        emulated,
        weights,
        shard_killed,
        shard_stopped,
        putter_killed,
        putter_stopped,
        shard_killed_in_a_put,
        shard_stopped_in_a_put,
    )
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    print("passed", flush=True)
