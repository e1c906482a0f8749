"""Loaders: batches fetched ahead, in order, kept while they wait, given back when they are not taken."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits
from tests.scale import only_long

ROWS, BATCH = 24, 4


@pytest.fixture
def table(queue: Any, name: str) -> Any:
    return queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])


def fill(table: Any, rows: int = ROWS) -> None:
    table.put(x=np.arange(rows, dtype=np.int64)[:, None])


def count(table: Any, state: str) -> int:
    return int(getattr(table.stats().tasks["train"], state))


def test_batches_come_in_order_and_end(table: Any) -> None:
    fill(table)
    table.seal()
    seen = []
    for batch in table.loader("train", rows=BATCH, timeout_s=10):
        with batch:
            seen += batch["x"].numpy()[:, 0].tolist()
    assert seen == list(range(ROWS))
    assert table.audit().rows_done == ROWS


@pytest.mark.parametrize("prefetch", [1, 3])
def test_as_many_are_fetched_ahead_as_asked_for(table: Any, prefetch: int) -> None:
    fill(table)
    with table.loader("train", rows=BATCH, prefetch=prefetch, timeout_s=10) as loader:
        batch = next(iter(loader))
        while count(table, "leased") < BATCH * (1 + prefetch):
            pass
        batch.ack()
    assert count(table, "ready") == ROWS - BATCH
    assert count(table, "leased") == 0


def test_what_was_not_taken_is_no_failed_attempt(table: Any) -> None:
    fill(table)
    with table.loader("train", rows=BATCH, timeout_s=10) as loader, next(iter(loader)):
        pass
    with table.lease("train", rows=ROWS - BATCH, timeout_s=10) as batch:
        assert sorted(batch["x"].numpy()[:, 0].tolist()) == list(range(BATCH, ROWS))
    assert table.audit().rows_dropped == 0


LEASED = pytest.mark.parametrize(
    ("way", "queue"),
    [
        ("ipc", "sync"),
        ("remote", "async"),
        *only_long(
            ("embedded", "sync"),
            ("embedded", "async"),
            ("ipc", "async"),
            ("tcp", "sync"),
            ("tcp", "async"),
            ("remote", "sync"),
        ),
    ],
    indirect=True,
)
"""Leases are renewed and expire at the server, which is the same by every way: two of them show it."""


@LEASED
def test_batches_that_wait_are_renewed(table: Any) -> None:
    """A lease of the same length that nobody renews tells that the time has passed."""
    fill(table, 4 * BATCH)
    with table.loader("train", rows=BATCH, lease_s=0.9, timeout_s=10) as loader:
        batches = iter(loader)
        with next(batches):
            while count(table, "leased") < 3 * BATCH:
                pass
            silent = table.lease("train", rows=BATCH, lease_s=1.2, time_limit_s=0)
            with table.lease("train", rows=BATCH, timeout_s=10):  # once the other has expired
                pass
        with pytest.raises(tq.LeaseExpired):
            silent.ack()
        for _ in range(2):
            with next(batches):
                pass
    assert table.audit().rows_done == 4 * BATCH
    assert table.stats().tasks["train"].worker_deaths == BATCH, "only those of the lease that nobody renewed"


@LEASED
def test_what_waits_for_a_consumer_that_hangs_goes_back_and_the_loader_goes_on(table: Any) -> None:
    fill(table, 3 * BATCH)
    with table.loader("train", rows=BATCH, lease_s=0.2, time_limit_s=0.4, timeout_s=10) as loader:
        for batch in loader:
            with batch:
                if not table.audit().rows_done:
                    while count(table, "leased") < 3 * BATCH:
                        pass
                    with table.lease("train", rows=3 * BATCH, timeout_s=10):  # all that it held, and had ahead
                        pass
                    table.put(x=np.zeros((BATCH, 1), np.int64), timeout_s=10)
                    table.seal()
    assert table.audit().rows_done == 4 * BATCH


def test_the_wait_begins_when_it_is_asked(table: Any) -> None:
    """Two requests that found nothing before anybody asked do not shorten the caller's wait."""
    with table.loader("train", rows=BATCH, timeout_s=0) as loader:
        with pytest.raises(tq.DeadlineExceeded, match=table.name):
            next(iter(loader))
        fill(table)
        with next(iter(loader)) as batch:
            assert batch["x"].numpy()[:, 0].tolist() == list(range(BATCH))


def test_errors_of_fetching_are_the_callers(table: Any) -> None:
    with table.loader("nobody", rows=BATCH) as loader, pytest.raises(tq.NotFound, match='"nobody"'):
        next(iter(loader))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rows": 4, "prefetch": 0}, "prefetch"),
        ({"rows": 4, "prefetch": 1.5}, "prefetch"),
        ({"rows": 4, "tokens": 4}, "exactly one"),
        ({}, "exactly one"),
    ],
)
def test_bad_arguments(table: Any, arguments: dict[str, Any], said: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(tq.UsageError, match=said):
        table.loader("train", **arguments)
    assert set(threading.enumerate()) <= before


def test_a_closed_loader_says_so(table: Any) -> None:
    fill(table)
    with table.loader("train", rows=BATCH) as loader:
        next(iter(loader)).ack()
    with pytest.raises(tq.UsageError, match="closed"):
        next(iter(loader))


def test_a_forgotten_loader_gives_back_and_its_thread_ends(name: str) -> None:
    with tq.connect() as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        fill(table)
        before = set(threading.enumerate())
        for batch in table.loader("train", rows=BATCH, timeout_s=10):
            batch.ack()
            break
        del batch
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            while thread.ident is None:  # it is just being started, and cannot be joined before
                pass
            thread.join(20)
            assert not thread.is_alive()
        while count(table, "ready") < ROWS - BATCH:  # a lease that was cancelled is given back when its reply has come
            pass
        assert count(table, "leased") == 0


def test_closing_tells_who_waits(name: str) -> None:
    with tq.connect() as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        loader = table.loader("train", rows=BATCH, timeout_s=60)
        found: list[BaseException] = []

        def wait() -> None:
            try:
                next(loader)
            except tq.UsageError as error:
                found.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        until_someone_waits(queue, name)
        loader.close()
        waiter.join(20)
        assert "closed" in str(found[0])


def test_a_batch_that_its_holder_forgets_is_given_back_without_the_collector(table: Any) -> None:
    fill(table)
    gc.disable()
    try:
        with table.loader("train", rows=BATCH, timeout_s=10, prefetch=1) as loader:
            batches = iter(loader)
            forgotten, held = next(batches), next(batches)
            del forgotten
        while count(table, "leased") > BATCH:
            pass
        held.ack()
    finally:
        gc.enable()
    assert table.audit().rows_done == BATCH


def test_a_queue_that_closes_ends_its_loaders(name: str) -> None:
    with tq.connect() as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        fill(table)
        loader = table.loader("train", rows=BATCH, timeout_s=10)
        next(loader).ack()
    with pytest.raises(tq.Disconnected):
        list(loader)
    loader.close()


def test_a_cancelled_wait_takes_nothing(name: str) -> None:
    async def run() -> None:
        async with await tq.aconnect() as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
            async with table.loader("train", rows=BATCH, timeout_s=60) as loader:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(loader), 0.05)
                await table.put(x=np.arange(BATCH)[:, None])
                async with await anext(loader) as batch:
                    assert batch["x"].numpy()[:, 0].tolist() == list(range(BATCH))

    asyncio.run(run())


def test_the_end_of_the_table_leaves_no_task_behind(name: str) -> None:
    """A task that is pending when its loop ends is garbage with a warning of asyncio: "Task was destroyed but it is
    pending"."""

    async def run() -> None:
        async with await tq.aconnect() as queue:
            table = await queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
            await table.put(x=np.arange(ROWS)[:, None])
            await table.seal()
            async for batch in table.loader("train", rows=BATCH, prefetch=4, timeout_s=60):
                await batch.ack()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.slow
def test_a_program_may_end_with_an_open_loader(name: str) -> None:
    """Its fetching thread warned of batches that were "neither acked nor released": of those that the program never
    took."""
    program = f"""
import numpy as np, transferqueue as tq
queue = tq.connect("embedded")
table = queue.create_table({name!r}, tasks=[tq.Task("train", needs=["x"])])
table.put(x=np.arange(64)[:, None])
loader = table.loader("train", rows=4, prefetch=3, timeout_s=30)
next(loader).ack()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_fork_is_told(name: str) -> None:
    with tq.connect() as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        fill(table)
        with table.loader("train", rows=BATCH, timeout_s=10) as loader:
            next(loader).ack()
            loader._pid += 1  # a real fork of a process with threads is a warning from Python 3.12 on
            with pytest.raises(tq.Forked, match=str(os.getpid())):
                next(loader)
            loader._pid -= 1
