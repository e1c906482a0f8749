"""An event loop that reads its own replies: no thread is woken for a call, and whatever the loop does, the session goes
on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import in_this_process
from tests.client.test_driver import CALLS, OTHER_WAKES, Sleeps
from tests.client.test_interrupted_finalizers import Interrupts, until
from transferqueue.client.session.connection import Connection
from transferqueue.limits import HEARTBEAT_S
from transferqueue.transport.control.channel import DrivableChannel
from transferqueue.transport.control.frame_stream import HEARD_AFTER
from transferqueue.transport.system.wakeup import Wakeup
from transferqueue.wire import messages as m

TASKS = [tq.Task("train", needs=["x"], lease_s=1)]


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with in_this_process(request.param, tmp_path) as found:
        yield found


def connection_of(queue: tq.AsyncQueue) -> Connection:
    return queue._client.connection


@asynccontextmanager
async def reading(address: str) -> AsyncIterator[tuple[tq.AsyncQueue, Connection, DrivableChannel]]:
    """A queue with a table, and what its event loop reads from."""
    async with tq.aconnect(address) as queue:
        await queue.create_table("t", tasks=TASKS)
        connection = connection_of(queue)
        channel = connection._io.drivable
        assert channel is not None
        yield queue, connection, channel


@pytest.mark.parametrize("address", ["ipc", "tcp", "keyed"], indirect=True)
def test_a_loop_wakes_no_thread_for_its_calls(address: str) -> None:
    async def work() -> int:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            sleeps = Sleeps(connection_of(queue))
            for number in range(CALLS):
                await table.put(x=[number])
                batch = await table.lease("train", rows=1, timeout_s=20)
                assert batch["x"].list() == [number]
                await batch.ack()
            return sleeps.count

    assert asyncio.run(work()) < OTHER_WAKES


def test_many_calls_at_once_are_answered(address: str) -> None:
    """More than a channel sends before it reads what has come meanwhile."""

    async def work() -> list[int]:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            for _ in range(3):
                rows = await asyncio.gather(*[table.put(x=[1]) for _ in range(HEARD_AFTER)])
            return [one for some in rows for one in some.tolist()]

    began = time.monotonic()
    assert sorted(asyncio.run(work())) == list(range(2 * HEARD_AFTER, 3 * HEARD_AFTER))
    assert time.monotonic() - began < HEARTBEAT_S, "an answer lay there until the next heartbeat"


def test_a_blocked_loop_keeps_its_lease(address: str) -> None:
    """The I/O thread renews it, and hears the answers."""

    async def work() -> int:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            await table.put(x=[1])
            batch = await table.lease("train", rows=1, timeout_s=20)
            time.sleep(1.5)  # noqa: ASYNC251  (longer than the lease, in the loop's thread)
            await batch.ack()
            return int((await table.stats()).rows_done)

    assert asyncio.run(work()) == 1


def test_a_thread_may_share_the_session_of_a_blocked_loop(address: str) -> None:
    async def work() -> list[Any]:
        async with tq.aconnect(address) as queue:
            connection, replies = connection_of(queue), list[Any]()
            await queue.create_table("t", tasks=TASKS)
            calls = threading.Thread(target=lambda: replies.extend(connection.call(m.ListTables()) for _ in range(20)))
            calls.start()
            calls.join(20)  # in the loop's thread
            return replies

    assert [reply.names for reply in asyncio.run(work())] == [["t"]] * 20


def test_a_second_loop_goes_on_with_the_session(address: str) -> None:
    opened: list[tq.AsyncQueue] = []

    async def first() -> None:
        opened.append(await tq.aconnect(address))
        await opened[0].create_table("t", tasks=TASKS)

    async def second() -> None:
        table = await opened[0].table("t")
        for number in range(CALLS):
            await table.put(x=[number])
        await opened[0].close()

    asyncio.run(first())
    asyncio.run(second())


def test_two_loops_may_use_one_session(address: str) -> None:
    async def other(queue: tq.AsyncQueue) -> None:
        table = await queue.table("t")
        for number in range(20):
            await table.put(x=[number])

    async def work() -> None:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            thread = threading.Thread(target=lambda: asyncio.run(other(queue)))
            thread.start()
            for number in range(20):
                await table.put(x=[number])
            thread.join(20)  # blocks this loop
            assert (await table.stats()).rows_put == 40

    asyncio.run(work())


def test_a_session_that_ends_leaves_no_descriptor_in_the_loop(address: str) -> None:
    async def work() -> int:
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(5):
            queue = await tq.aconnect(address)
            await queue.tables()
            await queue.close()
        await asyncio.sleep(0)
        return len(set(os.listdir("/proc/self/fd")) - before)

    assert asyncio.run(work()) <= 2  # of the executor that closes


def test_a_session_that_is_over_leaves_what_the_loop_watches_alone(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop closes it as soon as it sees that the session is over, perhaps before the I/O thread has ended."""

    async def work() -> str:
        queue = await tq.aconnect(address)
        await queue.tables()
        connection = connection_of(queue)
        io = connection._io

        def turn() -> None:
            io._end(tq.Disconnected("over"))
            connection._reader._frames.close()  # type: ignore[union-attr]

        monkeypatch.setattr(io, "_turn", turn)
        io.wakeup.set()
        await asyncio.to_thread(io.thread.join, 20)
        return repr(io.over)

    assert asyncio.run(work()) == repr(tq.Disconnected("over"))


def test_a_loop_hears_that_its_server_stopped() -> None:
    async def work(address: str, stop: Any) -> None:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            waiting = asyncio.ensure_future(table.lease("train", rows=1, timeout_s=60))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(stop)
            with pytest.raises(tq.PeerError):
                await waiting

    server = tq.connect()
    asyncio.run(work(server.address, server.close))


def test_what_a_loop_calls_while_the_connection_is_lost_delays_no_look_for_the_server(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that goes on calling would never learn that its server is gone."""

    async def work() -> None:
        async with reading(address) as (queue, connection, channel):
            spoke_at = connection._io.outbox.spoke_at
            monkeypatch.setattr(channel, "is_lost", True)
            for _ in range(2):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(queue.tables(), 0.01)
            assert connection._io.outbox.spoke_at == spoke_at
            monkeypatch.undo()

    asyncio.run(work())


def test_a_call_that_a_thread_only_started_is_answered(address: str) -> None:
    """Nobody waits at the socket for it but the I/O thread, which had left the reading to the loop."""

    async def work() -> m.Reply:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            await table.put(x=[1])
            began = time.monotonic()
            answer, _ = connection_of(queue).start(m.ListTables())
            reply = answer()  # blocks this loop
            assert time.monotonic() - began < HEARTBEAT_S / 2
            return reply

    assert asyncio.run(work()) == m.Tables(["t"])


def test_refused_and_cancelled_calls_leave_the_reading_to_the_loop(address: str) -> None:
    async def work() -> int:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            for _ in range(3):
                with pytest.raises(tq.DeadlineExceeded):
                    await table.lease("train", rows=1, timeout_s=0.01)
                waiting = asyncio.ensure_future(table.lease("train", rows=1, timeout_s=20))
                await asyncio.sleep(0.01)
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting
                await queue.tables()
            sleeps = Sleeps(connection_of(queue))
            for number in range(CALLS):
                await table.put(x=[number])
            return sleeps.count

    assert asyncio.run(work()) < OTHER_WAKES


def test_a_loop_that_is_closed_while_it_waits_loses_no_row(address: str) -> None:
    """Its lease is undone when the reply comes, and the next loop gets the row."""
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[tq.AsyncQueue, asyncio.Task[tq.AsyncBatch]]:
        queue = await tq.aconnect(address)
        table = await queue.create_table("t", tasks=TASKS)
        waiting = asyncio.ensure_future(table.lease("train", rows=1, timeout_s=60))
        await asyncio.sleep(0.05)
        return queue, waiting

    async def go_on(queue: tq.AsyncQueue) -> list[int]:
        table = await queue.table("t")
        await table.put(x=[7])
        batch = await table.lease("train", rows=1, timeout_s=20)
        found = batch["x"].list()
        await batch.ack()
        await queue.close()
        return found

    queue, waiting = loop.run_until_complete(begin())
    waiting.cancel()
    loop.run_until_complete(asyncio.wait([waiting]))
    loop.close()
    assert asyncio.run(go_on(queue)) == [7]


def test_the_next_loop_gives_back_what_a_closed_loop_waited_for(address: str) -> None:
    """Its tasks were left as they were. The next loop, in the same thread, reads the reply to their call."""
    loop, met = asyncio.new_event_loop(), list[dict[str, Any]]()

    async def begin() -> tuple[tq.AsyncQueue, asyncio.Task[tq.AsyncBatch]]:
        queue = await tq.aconnect(address)
        table = await queue.create_table("t", tasks=TASKS)
        waiting = asyncio.ensure_future(table.lease("train", rows=1, timeout_s=60))
        await asyncio.sleep(0.05)
        return queue, waiting

    async def go_on(queue: tq.AsyncQueue) -> tuple[list[int], int]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: met.append(context))
        connections_made = connection_of(queue)._io.connections_made
        table = await queue.table("t")
        await table.put(x=[7])
        batch = await table.lease("train", rows=1, timeout_s=20)
        found = batch["x"].list()
        await batch.ack()
        connections_made -= connection_of(queue)._io.connections_made
        await queue.close()
        return found, connections_made

    queue, waiting = loop.run_until_complete(begin())
    loop.close()
    assert asyncio.run(go_on(queue)) == ([7], 0), "it connected again"
    assert met == []
    waiting.get_coro().close()  # type: ignore[union-attr]
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_forked_child_takes_no_reply(address: str) -> None:
    async def work() -> None:
        async with tq.aconnect(address) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            waiting = asyncio.ensure_future(table.lease("train", rows=1, timeout_s=20))
            await asyncio.sleep(0.05)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of forks beside threads
                child = os.fork()
            if child == 0:
                try:
                    connection_of(queue)._reader._read()
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222  (a moment)
            await table.put(x=[3])
            batch = await waiting
            assert batch["x"].list() == [3]
            await batch.ack()

    asyncio.run(work())


def test_after_an_interrupted_read_the_loop_leaves_the_channel_to_the_thread_that_mends_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread registers a new connection then, and both would change what is polled."""

    async def work() -> set[int]:
        async with reading(address) as (queue, connection, channel):
            io = connection._io
            take, end_driving = io._take_channel, channel.end_driving
            comes, go_on, used_by = threading.Event(), threading.Event(), set[int]()

            def interrupt() -> None:
                monkeypatch.undo()
                monkeypatch.setattr(io, "_take_channel", wait_and_take)
                monkeypatch.setattr(channel, "end_driving", end)
                raise KeyboardInterrupt

            def wait_and_take() -> None:
                comes.set()
                assert go_on.wait(20)
                take()

            def end() -> None:
                used_by.add(threading.get_ident())
                end_driving()

            monkeypatch.setattr(channel, "hear", interrupt)
            while not used_by and not comes.is_set():  # while the thread has the channel, reading does nothing
                with suppress(KeyboardInterrupt):
                    connection._reader._read()
            assert await asyncio.to_thread(comes.wait, 20)
            waiting = asyncio.ensure_future(queue.tables())
            await asyncio.sleep(0.01)
            go_on.set()
            assert await waiting == ["t"]
            return used_by - {connection._io.thread.ident or 0}

    assert asyncio.run(work()) == set()


def test_a_second_interrupt_before_the_io_thread_was_woken_loses_no_reply(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O thread looks at its next heartbeat, and connects again."""

    async def work() -> list[str]:
        async with reading(address) as (queue, connection, channel):
            hear, told = channel.hear, list[str]()
            wake, thread = Wakeup.set, threading.get_ident()

            def first() -> None:
                hear()
                told.append("first")
                monkeypatch.setattr(Wakeup, "set", second)
                raise KeyboardInterrupt

            def second(wakeup: Wakeup) -> None:
                if threading.get_ident() != thread:
                    wake(wakeup)
                    return
                monkeypatch.undo()
                told.append("second")
                raise KeyboardInterrupt

            def read() -> None:
                with suppress(KeyboardInterrupt):
                    connection._reader._read()

            assert connection._reader._frames is not None
            asyncio.get_running_loop().add_reader(connection._reader._frames.fileno(), read)
            monkeypatch.setattr(channel, "hear", first)
            while not told:  # the I/O thread may still read
                assert await asyncio.wait_for(queue.tables(), 20) == ["t"]
            return told

    assert asyncio.run(work()) == ["first", "second"]


class InterruptedRead(Interrupts):
    """`Interrupts` in the reading of an event loop alone, at each instruction, not only at each line."""

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = True
        return super()._step(frame, "line" if event == "opcode" else "" if event == "line" else event, arg)


def _interrupted(address: str) -> int:
    """Lease and release a row, with an interrupt at each instruction of reading; the loop is run again after it.
    Returns how many there were."""
    loop = asyncio.new_event_loop()
    interrupts = InterruptedRead(0)

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(asyncio.wait_for(work, 20))

    async def opened() -> tq.AsyncQueue:
        return await tq.aconnect(address)

    queue = run(opened())
    try:
        table = run(queue.create_table("t", tasks=[tq.Task("train", needs=["x"])]))
        run(table.put(x=np.zeros((1, 1 << 10))))
        connection = connection_of(queue)
        reader, frames = connection._reader, connection._reader._frames
        assert frames is not None

        def read() -> None:
            with interrupts:
                reader._read()

        async def cycle() -> None:
            connection._io.unpinned_at = 0.0  # long ago: the next call takes pins along
            batch = await table.lease("train", rows=1, timeout_s=20)
            assert batch["x"].numpy().size == 1 << 10
            await batch.release()

        loop.add_reader(frames.fileno(), read)
        at, tries = 1, 0
        while tries < 5:
            assert until(lambda: run(asyncio.sleep(0)) or connection._io.driver is None)
            interrupts = now = InterruptedRead(at)
            pending = loop.create_task(cycle())
            with suppress(KeyboardInterrupt):
                loop.run_until_complete(asyncio.wait({pending}, timeout=20))
            interrupts = InterruptedRead(0)
            assert pending.done() or run(asyncio.wait({pending})), f"lost at {at}"
            assert pending.exception() is None, f"interrupted at {at}"
            tries = tries + 1 if now.steps < at else 0  # the I/O thread may have read, or it was the last instruction
            at += not tries
        assert until(lambda: run(queue.stats()).bytes.blocks_pinned == 0)
        return at
    finally:
        run(queue.close())
        loop.close()


@pytest.mark.slow
def test_an_interrupt_at_any_instruction_of_reading_loses_no_reply(address: str) -> None:
    """The task that waits gets it once, from whoever reads next."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert _interrupted(address) > 300
    finally:
        signal.signal(signal.SIGINT, before)
