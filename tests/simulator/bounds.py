"""Bounds on the events of a simulated world, so that a loop without end fails its seed and does not hang the run.

Two kinds of such loops are told apart: an event that does not end, and events that follow each other while time stands
still, such as a server that is due again as soon as it has done what was due.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from tests.simulator.machine import PromiseBroken
from tests.simulator.world import World

EVENT_S: Final = 5.0
"""Processor time that one event may take. A usual one takes less than a millisecond."""
EVENTS_MAX: Final = 20_000
"""Events between two looks at a world, which are a quarter of a second apart at most. Usual are less than 500."""


class _TooLong(BaseException):
    """No `Exception`: production code guards itself against these."""


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _TooLong


@contextmanager
def bounded(world: World) -> Iterator[Callable[[float], None]]:
    """Gives the function that has a world make all calls that are due until a time; `PromiseBroken` if they do not end.
    For the main thread of a process: in others an event without end is not ended."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda until: _run(world, until, 0.0)
        return
    before = signal.signal(signal.SIGVTALRM, _end)
    try:
        yield lambda until: _run(world, until, EVENT_S)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _run(world: World, until: float, event_s: float) -> None:
    for _ in range(EVENTS_MAX):
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, event_s)
            if not world.step(until):
                return
        except _TooLong as error:
            raise PromiseBroken(f"what happened at {world.now:.6f} s did not end within {EVENT_S:g} s") from error
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    raise PromiseBroken(f"{EVENTS_MAX:,} events, and time is at {world.now:.6f} s: something is due again and again")
