"""A caller that waits on the socket itself: no other thread is woken, and an interrupt at any step loses no reply and
no connection."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import in_this_process
from tests.client.test_interrupted_finalizers import Interrupts, every_step, until
from transferqueue.client.session.connection import Connection
from transferqueue.limits import HEARTBEAT_S
from transferqueue.transport.control.frame_stream import HEARD_AFTER
from transferqueue.transport.system.wakeup import Wakeup
from transferqueue.wire import messages as m

CALLS = 200
OTHER_WAKES = CALLS // 4
"""A heartbeat a second, and what a busy machine adds."""


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with in_this_process(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def queue(address: str) -> Iterator[tq.Queue]:
    with tq.connect(address) as joined:
        yield joined


@pytest.fixture
def _interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def connection_of(queue: tq.Queue) -> Connection:
    return queue._client.connection


class Sleeps:
    """Counts how often the I/O thread goes to sleep, from now on: once each time that it was woken."""

    def __init__(self, connection: Connection) -> None:
        self.count = 0
        channel = connection._io.channel
        sleep = channel.sleep

        def counted(wakeup: Wakeup, timeout_s: float | None) -> None:
            self.count += 1
            sleep(wakeup, timeout_s)

        setattr(channel, "sleep", counted)  # noqa: B010  (mypy lets no method be replaced)


@pytest.mark.parametrize("address", ["ipc", "tcp", "keyed"], indirect=True)
def test_a_caller_alone_wakes_no_other_thread(queue: tq.Queue) -> None:
    connection = connection_of(queue)
    queue.tables()
    sleeps = Sleeps(connection)
    for _ in range(CALLS):
        assert queue.tables() == []
    assert sleeps.count < OTHER_WAKES


def test_large_calls_wait_for_no_heartbeat(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=1 << 20))
    values = np.zeros(1 << 13)  # scalars travel in the message: 512 KiB, more than the kernel takes at once
    columns = {f"y{number}": values for number in range(7)}
    began = time.monotonic()
    for _ in range(12):
        table.put(x=values, **columns)
    assert time.monotonic() - began < 2 * HEARTBEAT_S


def test_a_pipeline_hears_answers_that_came_while_it_sent(queue: tq.Queue) -> None:
    """A channel reads after so many frames that it sent: nothing says then that something has come."""
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    began = time.monotonic()
    for _ in range(8):
        with table.pipeline() as pipeline:
            for _ in range(HEARD_AFTER - 1):
                pipeline.put(x=[1])
    assert time.monotonic() - began < HEARTBEAT_S


def test_pins_of_small_rows_travel_with_calls(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    connection = connection_of(queue)

    def turn() -> None:
        table.put(x=["text"])
        table.lease("train", rows=1, timeout_s=20).ack()

    turn()
    sleeps = Sleeps(connection)
    for _ in range(CALLS):
        turn()
    assert sleeps.count < OTHER_WAKES
    assert until(lambda: queue.stats().bytes.blocks_pinned == 0)


def test_pins_of_small_rows_return_while_a_caller_waits(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"]), tq.Task("other", needs=["x"])])
    table.put(x=["text"])
    batch = table.lease("train", rows=1, timeout_s=20)
    waiting = threading.Thread(target=lambda: table.lease("train", rows=1, timeout_s=20))
    waiting.start()
    with tq.connect(queue.address) as watching:
        assert until(lambda: watching.stats().bytes.blocks_pinned == 0)
    table.put(x=["text"])
    waiting.join()
    batch.ack()


def test_pins_that_cannot_be_sent_do_not_end_the_call_beside_them(
    queue: tq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads at the server for a moment: the call waits on, gets its rows, and the pins go over the next
    connection."""
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"]), tq.Task("other", needs=["x"])])
    channel = connection_of(queue)._io.channel
    refused: list[int] = []

    def refuse(frames: list[bytes]) -> int:
        monkeypatch.undo()
        refused.append(len(frames))
        raise tq.Unreachable("has taken none of the last messages")

    table.put(x=["text"])
    batch = table.lease("train", rows=1, timeout_s=20)
    assert batch["x"].list() == ["text"]
    monkeypatch.setattr(channel, "send_some", refuse)
    leased: list[tq.Batch] = []
    waiting = threading.Thread(target=lambda: leased.append(table.lease("train", rows=1, timeout_s=20)))
    connection_of(queue)._io.unpinned_at = time.monotonic() + 1.0  # pins go while the caller waits, not before its call
    waiting.start()
    assert until(lambda: bool(refused))
    with tq.connect(queue.address) as other:
        other.table("t").put(x=["more"])
        waiting.join()
        assert [found["x"].list() for found in leased] == [["more"]]
        leased[0].ack()
        batch.ack()
        assert until(lambda: other.stats().bytes.blocks_pinned == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_at_any_step_returns_each_pin_once(queue: tq.Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A call takes along the pins of what was read before it."""
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    connection = connection_of(queue)

    def once(at: int) -> int:
        rows = table.put(x=np.zeros((1, 1 << 10)))
        assert table.read(rows)["x"].numpy().size == 1 << 10
        interrupts = Interrupts(at)
        connection._io.unpinned_at = 0.0  # long ago: the next call takes pins along
        with suppress(KeyboardInterrupt), interrupts:
            connection.call(m.ListTables())
        table.drop(rows, "done")
        return interrupts.steps

    assert every_step(once) > 20
    assert until(lambda: queue.stats().bytes.blocks_pinned == 0)
    assert not caplog.records, "a pin was returned twice"


def test_two_threads_share_a_connection(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    got: list[int] = []

    def work() -> None:
        for batch in table.leases("train", rows=1, timeout_s=20):
            with batch:
                got.extend(batch["x"].list())

    worker = threading.Thread(target=work)
    worker.start()
    for number in range(CALLS):
        table.put(x=[number])
    table.seal()
    worker.join(20)
    assert sorted(got) == list(range(CALLS))


@pytest.mark.slow
@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("address", ["ipc", "tcp", "keyed"], indirect=True)
def test_an_interrupt_at_any_step_of_a_call_leaves_the_connection_usable(queue: tq.Queue) -> None:
    """Rows that an interrupted lease got come back, and further calls are answered."""
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    table.put(x=[1])
    connection = connection_of(queue)

    def once(at: int) -> int:
        interrupts = Interrupts(at)
        try:
            with interrupts:
                reply = connection.call(m.LeaseRequest("t", "train", rows=1, wait_s=10.0))
        except KeyboardInterrupt:
            pass
        else:
            assert isinstance(reply, m.Leased)
            connection.call(m.ReleaseRequest("t", reply.lease, reply.token))
        assert until(lambda: table.stats().tasks["train"].ready == 1), f"the row is away after step {at}"
        return interrupts.steps

    assert every_step(once) > 20


@pytest.mark.usefixtures("_interrupts")
def test_a_signal_handler_may_call_while_a_caller_waits(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    main = threading.main_thread().ident
    assert main is not None
    done = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if not done.is_set():
            table.put(x=[7])
            done.set()

    signal.signal(signal.SIGINT, handle)

    def ring() -> None:
        deadline = time.monotonic() + 20
        while not queue.doctor() and time.monotonic() < deadline:
            pass
        while not done.is_set() and time.monotonic() < deadline:
            signal.pthread_kill(main, signal.SIGINT)  # one that comes just before the wait begins does not end it
            done.wait(0.2)

    other = threading.Thread(target=ring)
    other.start()
    batch = table.lease("train", rows=1, timeout_s=20)
    other.join()
    assert done.is_set()
    assert batch["x"].list() == [7]
    batch.ack()
