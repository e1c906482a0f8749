"""One queue, many threads and loops; waits that are abandoned; closing under load; nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, served, until_someone_waits

AT_ONCE_S = 5.0
"""What a busy machine may add to no wait at all; the waits are for 60 s."""


@pytest.fixture
def sync_queue(address: str | None) -> Iterator[tq.Queue]:
    with tq.connect(address) as found:
        yield found


def test_eight_threads_share_a_queue(sync_queue: tq.Queue, name: str) -> None:
    table = sync_queue.create_table(name, tasks=[tq.Task("train", needs=["x", "who"])], limits=tq.Limits(rows=200))
    done: list[int] = []

    def produce(thread: int) -> list[int]:
        rows: list[int] = []
        for put in range(25):
            size = 1 + (put * 7 + thread) % 5
            body = np.full((size, 100 if put % 5 else 200_000), thread, np.int16)
            rows += table.put(x=list(body), who=thread).tolist()
        return rows

    def consume(_: int) -> None:
        for batch in table.leases("train", rows=3, at_least=1, timeout_s=30):
            with batch:
                for row, who in zip(batch["x"], batch["who"], strict=True):
                    assert set(np.unique(row)) == {who}
                done.extend(batch.rows.tolist())

    with ThreadPoolExecutor(8) as pool:
        consumers = [pool.submit(consume, thread) for thread in range(4)]
        put = [row for rows in pool.map(produce, range(4)) for row in rows]
        table.seal()
        for consumer in consumers:
            consumer.result(timeout=60)
    assert sorted(done) == sorted(put)
    audit = table.audit()
    assert (audit.rows_done, audit.rows_live) == (len(put), 0)


def test_threads_share_the_batches_of_one_call(sync_queue: tq.Queue, name: str) -> None:
    """A generator would raise "generator already executing" in the second thread."""
    table = sync_queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
    batches = table.leases("train", rows=2, timeout_s=60)

    def consume(_: int) -> list[int]:
        rows: list[int] = []
        for batch in batches:
            with batch:
                rows += batch.rows.tolist()
        return rows

    with ThreadPoolExecutor(3) as pool:
        consumers = [pool.submit(consume, thread) for thread in range(3)]
        until_someone_waits(sync_queue, name, 3)
        put = table.put(x=np.arange(40)).tolist()
        table.seal()
        taken = [row for consumer in consumers for row in consumer.result(timeout=60)]
    assert sorted(taken) == put
    assert list(batches) == []


def test_tasks_share_the_batches_of_one_call(address: str | None, name: str) -> None:
    async def two_at_once() -> None:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
            put = await table.put(x=np.arange(4))
            batches = table.leases("train", rows=2, timeout_s=60)
            both = await asyncio.gather(anext(batches), anext(batches))
            assert sorted(row for batch in both for row in batch.rows.tolist()) == put.tolist()

    asyncio.run(two_at_once())


def test_closing_ends_every_wait_at_once(sync_queue: tq.Queue, name: str) -> None:
    table = sync_queue.create_table(name, tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=2))
    table.put(x=np.arange(2))
    held = table.lease("train", rows=2)
    waits: list[Callable[[], Any]] = [
        lambda: table.lease("train", rows=1, timeout_s=60),
        lambda: table.put(x=np.arange(2), timeout_s=60),
        lambda: sync_queue.table("never", timeout_s=60),
        lambda: sync_queue.weights(name).pull(timeout_s=60),
    ]
    with ThreadPoolExecutor(len(waits)) as pool:
        futures = [pool.submit(wait) for wait in waits]
        while len(sync_queue._client.connection._io.calls) < len(waits):
            sync_queue.tables()
        started = time.monotonic()
        sync_queue.close()
        for future in futures:
            assert isinstance(future.exception(timeout=20), tq.Disconnected)
        assert time.monotonic() - started < AT_ONCE_S
    with pytest.raises(tq.Disconnected, match="was closed"):
        held.ack()
    sync_queue.close()


def test_an_embedded_server_that_ends_tells_those_who_joined(name: str) -> None:
    queue = tq.connect()
    queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
    with tq.connect(queue.address) as joined, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(joined.table(name).lease, "train", rows=1, timeout_s=60)
        until_someone_waits(queue, name)
        started = time.monotonic()
        queue.close()
        assert isinstance(waiting.exception(timeout=20), tq.Disconnected)
        assert time.monotonic() - started < AT_ONCE_S


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupted_lease_strands_no_row(sync_queue: tq.Queue, name: str) -> None:
    table = sync_queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not len(sync_queue._client.connection._io.calls):
            pass
        signal.pthread_kill(main, signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        table.lease("train", rows=2, timeout_s=60)
    other.join()
    rows = table.put(x=np.zeros((2, 1000)))  # the abandoned wait gets them first, and gives them back
    with table.lease("train", rows=2, timeout_s=10) as batch:
        assert batch.rows.tolist() == rows.tolist()


def test_a_cancelled_lease_strands_no_row(address: str | None, name: str) -> None:
    async def run() -> None:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await table.lease("train", rows=2, timeout_s=60)
            rows = await table.put(x=np.zeros((2, 1000)))
            async with table.lease("train", rows=2, timeout_s=10) as batch:
                assert batch.rows.tolist() == rows.tolist()

    asyncio.run(run())


def test_a_lease_may_be_a_task(address: str | None, name: str) -> None:
    async def run() -> None:
        async with await asyncio.create_task(tq.aconnect(address)) as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
            waiting = [asyncio.create_task(table.lease("train", rows=1, timeout_s=60)) for _ in range(2)]
            await table.put(x=[7])
            done, (left,) = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            async with done.pop().result() as batch:
                assert batch["x"].list() == [7]
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            async with asyncio.TaskGroup() as group:
                reserved = group.create_task(table.reserve(3))
            assert reserved.result().rows == 3

    asyncio.run(run())


def test_who_went_away_holds_up_nobody(address: str | None, name: str) -> None:
    async def run() -> None:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=4))
            await table.put(x=np.zeros((3, 1000)))
            for waits in (
                lambda: table.lease("train", rows=4, timeout_s=60),
                lambda: table.put(x=np.zeros((2, 1000)), timeout_s=60),
                lambda: table.reserve(2, timeout_s=60),
            ):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await waits()
            assert len(await table.put(x=np.zeros((1, 1000)), timeout_s=10)) == 1
            async with table.lease("train", rows=1, timeout_s=10) as batch:
                assert batch.rows.tolist() == [0]
            assert (await table.audit()).rows_put == 4

    asyncio.run(run())


def test_many_waits_in_one_loop(address: str | None, name: str) -> None:
    async def run() -> list[int]:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])

            async def consume() -> int:
                async with table.lease("train", rows=1) as batch:
                    return int(batch["x"].numpy()[0])

            waits = [asyncio.create_task(consume()) for _ in range(100)]
            await asyncio.gather(*(table.put(x=[number]) for number in range(100)))
            return sorted(await asyncio.gather(*waits))

    assert asyncio.run(run()) == list(range(100))


def test_one_async_queue_serves_two_loops(address: str | None, name: str) -> None:
    queue = asyncio.run(_opened(address))

    async def names() -> list[str]:
        return await queue.tables()

    assert asyncio.run(names()) == asyncio.run(names())
    asyncio.run(queue.close())


async def _opened(address: str | None) -> tq.AsyncQueue:
    return await tq.aconnect(address)


@pytest.mark.slow
def test_a_large_put_does_not_hold_up_the_loop(server: Served, name: str) -> None:
    async def run() -> int:
        async with tq.aconnect(server.ipc) as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            await table.put(x=np.zeros((4, 32 << 20), np.uint8))
            ticking.cancel()
            return ticks

    assert asyncio.run(run()) > 50


def _descriptors() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    return found


def _mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("transferqueue-arena")


@pytest.mark.slow
def test_nothing_is_left_behind(address: str | None, name: str, tmp_path: Path) -> None:
    """Threads, descriptors, mappings and files are as before, whatever was open at the close."""

    def use() -> None:
        queue = tq.connect(address, **({"runtime": tmp_path} if address is None else {}))
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        table.put(x=np.zeros((4, 100_000)))
        batch = table.lease("train", rows=2)
        view = batch["x"].numpy()
        assert view.shape
        queue.drop_table(name)
        queue.close()

    use()  # what libraries open once is open now
    gc.collect()
    threads, files, arenas = set(threading.enumerate()), _descriptors(), _mapped_arenas()
    use()
    gc.collect()
    assert set(threading.enumerate()) <= threads  # one of an earlier test may have ended meanwhile
    assert {path for path in _descriptors() - files if "socket" not in path and "anon_inode" not in path} == set()
    assert len(_descriptors()) <= len(files)
    assert _mapped_arenas() <= arenas  # a failed test before this one may keep its own
    assert [path.name for path in tmp_path.rglob("*")] == []


def test_a_queue_that_is_forgotten_is_closed(server: Served, name: str) -> None:
    threads = set(threading.enumerate())
    table = tq.connect(server.ipc).create_table(name, tasks=[tq.Task("train", needs=["x"])])
    assert table.put(x=np.arange(2)).tolist() == [0, 1]  # the table alone keeps the connection
    lock = table._client.memory._lock_file
    assert lock is not None
    assert lock.path.exists()
    del table
    gc.collect()
    assert set(threading.enumerate()) == threads
    assert not lock.path.exists()


@pytest.mark.slow
def test_a_killed_server_ends_waits(tmp_path: Path, name: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = Served(tmp_path)
        queue = tq.connect(server.ipc)
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        waiting = pool.submit(table.lease, "train", rows=1, timeout_s=60)
        until_someone_waits(queue, name)
        server.process.kill()
        server.process.communicate()
        assert isinstance(waiting.exception(timeout=20), tq.Disconnected)
        queue.close()
    with served(tmp_path) as again, tq.connect(again.ipc) as queue:  # what it left is no obstacle
        assert queue.tables() == []


@pytest.mark.slow
def test_a_script_that_never_closes_ends_by_itself(server: Served) -> None:
    script = (
        "import sys, transferqueue as tq\n"
        "queues = [tq.connect('embedded'), tq.connect(sys.argv[1])]\n"
        "tables = [q.create_table('s%d' % i, tasks=[tq.Task('a', needs=['x'])]) for i, q in enumerate(queues)]\n"
        "for t in tables: t.put(x=[1, 2])\n"
        "batches = [t.lease('a', rows=1) for t in tables]\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, server.ipc], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with tq.connect(server.ipc) as queue:
        queue.drop_table("s1")
