"""An interrupt inside a finalizer: pins, rows and reservations return all the same.

Python raises KeyboardInterrupt in the main thread between any two instructions, in a finalizer too; there it prints the
error and goes on. What the finalizer had not done yet would never be done.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest

import transferqueue as tq

SOON_S = 20.0
"""A client looks for what interrupts left undone once a second."""


class Interrupts:
    """Sends SIGINT at the `at`-th line or call inside this package while the block runs, which is to be nothing but a
    finalizer."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps = 0

    def __enter__(self) -> Self:
        sys.settrace(self._step)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if name != "weakref" and not name.startswith("transferqueue"):
            return None
        if event in ("call", "line"):
            self.steps += 1
            if self.steps == self.at:
                signal.raise_signal(signal.SIGINT)
        return self._step


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints what a finalizer raises; pytest would keep it, and with its frames what is to be collected."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as made:
        yield made


def until(holds: Callable[[], bool]) -> bool:
    """Whether it comes true soon. Each look asks the server."""
    deadline = time.monotonic() + SOON_S
    while not holds():
        if time.monotonic() > deadline:
            return False
    return True


def every_step(act: Callable[[int], int]) -> int:
    """Do it with an interrupt at the first step, the second, and so on, until there is none left. How many there
    were."""
    at = 1
    while act(at) >= at:
        at += 1
    return at - 1


def interrupted(at: int, let_go: list[Any]) -> int:
    """Collect what is in the list, with an interrupt at a step."""
    gc.disable()
    try:
        with Interrupts(at) as interrupts:
            let_go.pop()
    finally:
        sys.settrace(None)
        gc.enable()
    return interrupts.steps


def used(queue: tq.Queue) -> int:
    return int(queue.stats().server.used_bytes)


def test_a_pin_returns(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train")])

    def once(at: int) -> int:
        rows = table.put(x=[np.arange(1 << 16)])
        view = [table.read(rows)["x"][0]]
        table.drop(rows, "done")
        assert used(queue) > 0
        steps = interrupted(at, view)
        assert until(lambda: used(queue) == 0), f"interrupted at step {at}, the pin never returned"
        return steps

    assert every_step(once) > 10


def test_a_pin_of_an_extent_that_others_view_returns(queue: tq.Queue) -> None:
    """The second look at an extent has a mapping of its own."""
    table = queue.create_table("t", tasks=[tq.Task("train")])

    def once(at: int) -> int:
        rows = table.put(x=[np.arange(1 << 16)])
        first, second = table.read(rows)["x"][0], [table.read(rows)["x"][0]]
        table.drop(rows, "done")
        steps = interrupted(at, second)
        assert int(first[-1]) == (1 << 16) - 1
        del first
        assert until(lambda: used(queue) == 0), f"interrupted at step {at}, a pin never returned"
        return steps

    once(1 << 30)  # without an interrupt: the arena is mapped as a whole from now on
    before = mappings()
    assert every_step(once) > 10
    assert until(lambda: mappings() == before), "an interrupt left a mapping"


def mappings() -> int:
    """Pieces of arenas that this process maps."""
    with open("/proc/self/maps") as maps:
        return maps.read().count("transferqueue-arena")


def test_rows_of_a_batch_return(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", lease_s=600)])
    table.put(n=[1])

    def once(at: int) -> int:
        batch = [table.lease("train", rows=1, timeout_s=SOON_S)]
        return interrupted(at, batch)

    assert every_step(once) > 10


def test_a_reservation_returns(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train")], pacing=tq.Pacing("train", batch_rows=1, depth=0))

    def once(at: int) -> int:
        return interrupted(at, [table.reserve(1, timeout_s=SOON_S)])

    assert every_step(once) > 5
