"""Every deadline that a caller gives is kept, whatever the server does: here it stands still (SIGSTOP), in the middle
of everything."""

from __future__ import annotations

import inspect
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import LoopThread, Served
from transferqueue.adapters.transfer_queue.samples.partitions import put_at_once
from transferqueue.client.memory import remote
from transferqueue.client.session.calls import Deadline
from transferqueue.limits import ANSWER_S, LATE_ANSWER_S
from transferqueue.transport.bulk import protocol as bulk
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.wire import messages as m

WAIT_S = 0.2
LATE_S = 4.0
"""What a busy machine may add before a test fails; it is far from the 30 s that a call without a deadline waits for an
answer."""
UNKNOWN = r"did not answer \w+ within the 0.2 s .*whether it was carried out is not known: "

Call = Callable[[Any, Any, Any, Any], object]

CALLS: dict[str, tuple[Call, type[tq.TransferQueueError], str]] = {
    "Queue.table": (lambda q, t, w, v: q.table("later", timeout_s=WAIT_S), tq.DeadlineExceeded, "OpenTable"),
    "Queue.snapshot": (lambda q, t, w, v: q.snapshot("s", timeout_s=WAIT_S), tq.Unreachable, UNKNOWN),
    "Queue.restore": (lambda q, t, w, v: q.restore("s", timeout_s=WAIT_S), tq.Unreachable, UNKNOWN),
    "Table.put": (lambda q, t, w, v: t.put(y=[1], timeout_s=WAIT_S), tq.Unreachable, UNKNOWN + ".*give rows keys"),
    "Table.put not waiting": (lambda q, t, w, v: t.put(y=[1], timeout_s=0), tq.Unreachable, "within the 0 s"),
    "Table.put of a new field": (
        lambda q, t, w, v: t.put(z=[1], timeout_s=WAIT_S),
        tq.DeadlineExceeded,
        "OpenTable.*nothing was changed",
    ),
    "Table.put of many bytes": (
        lambda q, t, w, v: t.put(big=np.zeros((1, 1 << 16)), timeout_s=WAIT_S),
        tq.DeadlineExceeded,
        "Grant.*nothing was changed",
    ),
    "Table.lease": (
        lambda q, t, w, v: t.lease("work", rows=1, timeout_s=WAIT_S),
        tq.DeadlineExceeded,
        "did not answer Lease within the 0.2 s that it was given; the server may be stopped or out of reach",
    ),
    "Table.leases": (
        lambda q, t, w, v: next(t.leases("work", rows=1, timeout_s=WAIT_S)),
        tq.DeadlineExceeded,
        "did not answer Lease",
    ),
    "Table.loader": (
        lambda q, t, w, v: next(iter(t.loader("work", rows=1, timeout_s=WAIT_S))),
        tq.DeadlineExceeded,
        "did not answer Lease",
    ),
    **{
        f"{kind}.{name}": (report, tq.Unreachable, "did not answer (Observe|ListEvents) within the 0.2 s")
        for kind, name, report in (
            ("Queue", "stats", lambda q, t, w, v: q.stats(timeout_s=WAIT_S)),
            ("Queue", "audit", lambda q, t, w, v: q.audit(timeout_s=WAIT_S)),
            ("Queue", "doctor", lambda q, t, w, v: q.doctor(timeout_s=WAIT_S)),
            ("Queue", "inspect", lambda q, t, w, v: q.inspect(t.name, 0, timeout_s=WAIT_S)),
            ("Queue", "events", lambda q, t, w, v: q.events(t.name, timeout_s=WAIT_S)),
            ("Queue", "sessions", lambda q, t, w, v: q.sessions(timeout_s=WAIT_S)),
            ("Table", "stats", lambda q, t, w, v: t.stats(timeout_s=WAIT_S)),
            ("Table", "audit", lambda q, t, w, v: t.audit(timeout_s=WAIT_S)),
        )
    },
    "Table.reserve": (lambda q, t, w, v: t.reserve(1, timeout_s=WAIT_S), tq.DeadlineExceeded, "Reserve"),
    "Pipeline.put": (lambda q, t, w, v: pipelined(t), tq.Unreachable, UNKNOWN),
    "Table.advance": (
        lambda q, t, w, v: t.advance(1, timeout_s=WAIT_S),
        tq.Unreachable,
        UNKNOWN + "advance to the same",
    ),
    "WeightChannel.publish": (
        lambda q, t, w, v: w.publish(2, {"a": np.ones(4)}, timeout_s=WAIT_S),
        tq.DeadlineExceeded,
        "Basis",
    ),
    "WeightChannel.pull": (lambda q, t, w, v: w.pull(timeout_s=WAIT_S), tq.DeadlineExceeded, "Pull"),
    "WeightChannel.turn": (
        lambda q, t, w, v: enter(w.turn(timeout_s=WAIT_S), q),
        tq.Unreachable,
        UNKNOWN,
    ),
}


def pipelined(table: Any) -> None:
    """Put in a pipeline, whose block waits for the answer."""
    with table.pipeline() as pipeline:
        pipeline.put(y=[1], timeout_s=WAIT_S)


def enter(context: Any, queue: Any) -> object:
    """Enter a context of either front."""
    return context.__enter__() if hasattr(context, "__enter__") else queue._run(context.__aenter__())


def test_no_call_with_a_deadline_is_forgotten() -> None:
    public = [value for name in tq.__all__ if inspect.isclass(value := getattr(tq, name))]
    found = {
        f"{one.__name__.removeprefix('Async')}.{name}"
        for one in public
        for name, call in vars(one).items()
        if inspect.isfunction(call) and not name.startswith("_") and "timeout_s" in inspect.signature(call).parameters
    }
    asks_ray, reads_files = {"Deployment.token"}, {"RecordedRows.arrow", "Run.sql"}
    assert found - asks_ray - reads_files == {name.split(" ")[0] for name in CALLS}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[str], float]]]:
    """A server that stands still, and for each way to it a function that makes one of `CALLS`: how long it took."""
    server = Served(tmp_path_factory.mktemp("stopped"), "256MiB")
    with ExitStack() as opened:
        opened.callback(server.stop)
        loop = opened.enter_context(LoopThread())
        ways = {
            "ipc": tq.connect(server.ipc),
            "tcp": tq.connect(server.tcp),
            "remote": tq.connect(server.tcp, data="remote"),
            "async": loop.connect(server.ipc),
            "async remote": loop.connect(server.tcp, data="remote"),
        }
        made: dict[str, tuple[Any, Any, Any, Any]] = {}
        for way, queue in ways.items():
            table = queue.create_table(way.replace(" ", "_"), tasks=[tq.Task("work", needs=["x"])])
            table.put(y=[1], big=np.zeros((1, 1 << 16)))
            channel = queue.weights(way.replace(" ", "_"))
            channel.publish(1, {"a": np.ones(4)})
            made[way] = (queue, table, channel, channel.pull())
        server.process.send_signal(signal.SIGSTOP)

        def call(way: str, name: str) -> float:
            work, error, text = CALLS[name]
            began = time.monotonic()
            with pytest.raises(error, match=text):
                work(*made[way])
            return time.monotonic() - began

        with ThreadPoolExecutor(len(ways) * len(CALLS)) as pool:
            running = {(way, name): pool.submit(call, way, name) for way in ways for name in CALLS}
            opened.callback(lambda: [queue.close() for queue in ways.values()])
            opened.callback(server.process.send_signal, signal.SIGCONT)
            yield {"took": lambda key: running[key].result(), "ipc": server.ipc, "tcp": server.tcp}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", ["ipc", "tcp", "remote", "async", "async remote"])
def test_a_call_ends_at_its_deadline_though_the_server_stands_still(stopped: Any, way: str, name: str) -> None:
    assert stopped["took"]((way, name)) < WAIT_S + LATE_S


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_so_does_connect(stopped: Any, way: str) -> None:
    with pytest.raises(tq.Unreachable, match=r"nothing answered at .* within 0.2 s"):
        tq.connect(stopped[way], timeout_s=WAIT_S)


def test_bytes_that_stand_still_end_at_the_deadline_too(tmp_path: Path) -> None:
    """The server answers, and its bulk endpoint takes connections but says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        welcome = m.Welcome(1, 1, "t", "t", {}, 0, bulk_port=port)
        memory = remote.RemoteMemory(
            lambda told: BulkClient("127.0.0.1", port, told.epoch),
            welcome,
            lambda _: None,
            lambda: None,
            lambda: None,
        )
        caller = remote.Caller(memory._interrupt)
        caller.bound(Deadline(time.monotonic, 0.0))

        class Asked:
            done, coming = False, 0
            serve_s = math.inf

            def serve(self) -> bool:
                return True

            def opening(self) -> list[Any]:
                return []

            def ask(self) -> bulk.Message:
                return bulk.message(bulk.FlowAck(1, 0))

            def expect(self, head: bytes, nbytes: int) -> None: ...

        with pytest.raises(tq.DeadlineExceeded, match=r"did not cross within the 0 s .*: nothing has moved for"):
            memory._carry(lambda _: Asked(), caller)  # type: ignore[arg-type, return-value]
        memory.close()


def test_no_refusal_of_the_server_is_cut_off(tmp_path: Path) -> None:
    """A server that runs says itself what was missing: the caller hears that, and not that nobody answered."""
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"])])
        with pytest.raises(tq.DeadlineExceeded, match='task "work"'):
            table.lease("work", rows=1, timeout_s=0.01)


def test_a_put_at_once_has_time_for_its_answer_and_does_not_wait_for_room() -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", limits=tq.Limits(rows=1))
        put_at_once(table, {"x": [1]})
        with pytest.raises(tq.Full, match="has no room"):
            put_at_once(table, {"x": [1]})


def test_what_a_caller_waits_past_its_deadline_is_bounded_in_all() -> None:
    now = [100.0]
    deadline = Deadline(lambda: now[0], 1.0)
    assert deadline.patience() == pytest.approx(1 + LATE_ANSWER_S)
    now[0] += 0.5
    deadline.waited(100.0)
    assert deadline.patience() == pytest.approx(0.5 + LATE_ANSWER_S)
    now[0] += 3  # copying, which nobody waits for
    assert deadline.patience() == pytest.approx(LATE_ANSWER_S)
    since = now[0]
    now[0] += LATE_ANSWER_S / 2
    deadline.waited(since)
    assert deadline.patience() == pytest.approx(LATE_ANSWER_S / 2)
    now[0] += LATE_ANSWER_S
    deadline.waited(now[0] - LATE_ANSWER_S)
    assert deadline.patience() == 0.0


def test_a_late_answer_is_awaited_for_less_than_a_call_is() -> None:
    assert ANSWER_S > LATE_ANSWER_S
