"""An interrupt at any step of a public call: the server has no pin, lease, reservation or grant left of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.test_interrupted_finalizers import Interrupts, every_step, until
from transferqueue.client.session.deferred_interrupts import DeferredInterrupts

LARGE = 1 << 13
"""Values of a row that is mapped, not copied."""
GRANTS_KEPT = 4
"""Extents that a session keeps open for its next puts."""


@pytest.fixture(autouse=True)
def interrupts_raise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background; what finalizers raise is not kept."""
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


CALLS: dict[str, Callable[[tq.Table, Any], Any]] = {
    "read": lambda table, rows: table.read(rows)["x"].numpy(),
    "lease": lease_and_release,
    "reserve": reserve_and_return,
    "put": lambda table, rows: table.put(x=np.zeros((2, LARGE))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_step_leaves_nothing_at_the_server(queue: tq.Queue, name: str) -> None:
    with tq.connect(queue.address, label="observer") as observer:

        def seen() -> dict[str, Any]:
            return next(each for each in observer.sessions().values() if each["label"] == "interrupted")

        def held() -> tuple[int, int, int]:
            session = seen()
            return session["pins"], len(session["leases"]), session["reserved"]

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
        assert until(lambda: seen()["grants"] <= GRANTS_KEPT), f"{seen()['grants']} grants stay"


@pytest.mark.slow
def test_an_interrupt_at_any_step_of_a_pull_leaves_no_pin(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(1, {"a": np.ones(LARGE)})
    with tq.connect(queue.address) as observer:

        def once(at: int) -> int:
            interrupts = Interrupts(at)
            with suppress(KeyboardInterrupt), interrupts:
                pull_and_release(channel)
            assert until(lambda: observer.stats()["bytes"]["blocks_pinned"] == 0), f"a pin stays after step {at}"
            return interrupts.steps

        assert every_step(once) > 20


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
