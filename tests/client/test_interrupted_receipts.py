"""An interrupt at any step of a public call: the server has no pin, lease, reservation or grant left of it."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from typing import Any, Self

import numpy as np
import pytest

import transferqueue as tq
from tests.client.test_interrupted_finalizers import Interrupts, every_step, until
from transferqueue.client.session.deferred_interrupts import DeferredInterrupts
from transferqueue.wire.answers.sessions import SessionStats

LARGE = 1 << 13
"""Values of a row that is mapped, not copied."""
WHOLE = 1 << 19
"""Values of a row that has an extent of its own."""
STORM = 4000
"""Interrupts of the storm."""
GRANTS_KEPT = 4
"""Extents that a session keeps open for its next puts."""


@pytest.fixture(autouse=True)
def interrupts_raise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background; what finalizers raise is
    not kept."""
    pytest.importorskip(
        "torch"
    )  # pulled weights are tensors, and an import of torch that was interrupted cannot be repeated
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded", label="interrupted") as made:
        yield made


def lease_and_release(table: tq.Table, rows: Any) -> None:
    with table.lease("train", rows=2) as batch:
        batch["x"].numpy()
        batch.release()


def reserve_and_return(table: tq.Table, rows: Any) -> None:
    with table.reserve(1):
        pass


def pull_and_release(channel: tq.WeightChannel) -> None:
    weights = channel.pull()
    weights["a"]
    weights.release()


def put_without_waiting(table: tq.Table, rows: Any) -> None:
    with table.pipeline() as pipeline:
        pipeline.put(x=np.zeros((2, LARGE)))


CALLS: dict[str, Callable[[tq.Table, Any], Any]] = {
    "read": lambda table, rows: table.read(rows)["x"].numpy(),
    "lease": lease_and_release,
    "reserve": reserve_and_return,
    "put": lambda table, rows: table.put(x=np.zeros((2, LARGE))),
    "put of a whole extent": lambda table, rows: table.put(x=np.zeros((2, LARGE)), whole=np.zeros((2, WHOLE))),
    "pipeline": put_without_waiting,
    "update": lambda table, rows: table.update(rows, overwrite=True, y=np.zeros((2, LARGE))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_step_leaves_nothing_at_the_server(queue: tq.Queue, name: str) -> None:
    with tq.connect(queue.address, label="observer") as observer:

        def seen() -> SessionStats:
            return next(each for each in observer.sessions().values() if each.label == "interrupted")

        def held() -> tuple[int, int, int]:
            session = seen()
            return session.pins, len(session.leases), session.reserved

        def once(at: int) -> int:
            table = queue.create_table(f"t{at}", tasks=[tq.Task("train", needs=["x"])])
            rows = table.put(x=np.zeros((2, LARGE)))
            interrupts = Interrupts(at)
            with suppress(KeyboardInterrupt), interrupts:
                CALLS[name](table, rows)
            assert until(lambda: held() == (0, 0, 0)), f"interrupted at step {at}, {held()} stay"
            queue.drop_table(table.name)
            return interrupts.steps

        assert every_step(once) > 20
        assert until(lambda: seen().grants <= GRANTS_KEPT), f"{seen().grants} grants stay"


@pytest.mark.slow
def test_an_interrupt_at_any_step_of_a_pull_leaves_no_pin(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(1, {"a": np.ones(LARGE)})
    with tq.connect(queue.address) as observer:

        def once(at: int) -> int:
            interrupts = Interrupts(at)
            with suppress(KeyboardInterrupt), interrupts:
                pull_and_release(channel)
            assert until(lambda: observer.stats().bytes.blocks_pinned == 0), f"a pin stays after step {at}"
            return interrupts.steps

        assert every_step(once) > 20


class Storm:
    """Sends SIGINT at random moments; each raises KeyboardInterrupt once in `rounds`, which repeat a call until one
    comes."""

    def __init__(self) -> None:
        self.armed, self.over, self.interrupts = False, threading.Event(), 0
        self._main = threading.get_ident()
        self._sender = threading.Thread(target=self._send)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGINT, self._arrive)
        self._sender.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self._sender.join()

    def rounds(self, count: int, calls: Iterable[Callable[[], Any]]) -> None:
        for call in islice(cycle(calls), count):
            with suppress(KeyboardInterrupt):
                self.armed = True
                while self.armed:
                    call()

    def _send(self) -> None:
        moments = random.Random(41)
        while not self.over.wait(moments.uniform(0, 1e-3)):
            if self.armed:
                signal.pthread_kill(self._main, signal.SIGINT)

    def _arrive(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            self.interrupts += 1
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_storm_of_interrupts_leaves_nothing_at_the_server(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    rows = table.put(x=np.zeros((2, LARGE)))
    channel = queue.weights("policy")
    channel.publish(1, {"a": np.ones(LARGE)})
    names = ("read", "lease", "reserve", "update")
    calls: list[Callable[[], Any]] = [partial(CALLS[name], table, rows) for name in names]

    def add_and_drop() -> None:
        table.drop(table.put(x=np.zeros((2, LARGE))), "done")

    with tq.connect(queue.address) as observer, Storm() as storm:
        storm.rounds(STORM, [*calls, add_and_drop, lambda: pull_and_release(channel)])
        assert storm.interrupts == STORM

        def left() -> tuple[int, int, int, bool]:
            session = next(each for each in observer.sessions().values() if each.label == "interrupted")
            return session.pins, len(session.leases), session.reserved, session.grants <= GRANTS_KEPT

        assert until(lambda: left() == (0, 0, 0, True)), f"pins, leases, rows reserved, few grants: {left()}"


def test_a_deferred_interrupt_comes_at_the_end_and_once() -> None:
    interrupts = DeferredInterrupts()
    interrupts.begin()
    interrupts.begin()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()
    interrupts.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_no_python_code_is_left_alone(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    interrupts = DeferredInterrupts()
    interrupts.begin()
    assert signal.getsignal(signal.SIGINT) == handler
    interrupts.end()
    assert signal.getsignal(signal.SIGINT) == handler
