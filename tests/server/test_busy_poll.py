"""A server that polls for a bounded time after each request, by a clock of its own: each look takes 10 microseconds."""

import math

import pytest

from transferqueue.errors import UsageError
from transferqueue.limits import BUSY_POLL_S_MAX
from transferqueue.server.loop import BusyPoll
from transferqueue.server.process.serve import serve

LOOK_S = 10e-6


class World:
    """A clock, and an event that comes at `event_at`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.event_at = math.inf
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        self.now += LOOK_S
        return self.now >= self.event_at


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def polling(world: World) -> BusyPoll:
    return BusyPoll(400e-6, world.look, lambda: world.now)


@pytest.mark.parametrize("patience_s", [None, 0.0, 5.0])
def test_without_a_request_nothing_polls(world, polling, patience_s):
    assert polling.wait(patience_s) == patience_s
    assert world.looks == 0


def test_an_event_within_the_time_ends_the_polling_and_the_loop_does_not_sleep(world, polling):
    polling.request_came()
    world.event_at = world.now + 100e-6
    assert polling.wait(None) == 0.0
    assert world.looks == pytest.approx(10, abs=1)


@pytest.mark.parametrize("patience_s", [None, 5.0])
def test_after_the_time_the_loop_sleeps_and_does_not_poll_again_before_a_request(world, polling, patience_s):
    polling.request_came()
    left_s = polling.wait(patience_s)
    assert left_s == (None if patience_s is None else pytest.approx(5.0 - 400e-6, abs=2 * LOOK_S))
    looks = world.looks
    assert looks == pytest.approx(40, abs=1)
    assert polling.wait(patience_s) == patience_s
    assert world.looks == looks


def test_a_deadline_ends_the_polling(world, polling):
    polling.request_came()
    assert polling.wait(50e-6) == 0.0
    assert world.looks == pytest.approx(5, abs=1)


@pytest.mark.parametrize("busy_poll_s", [-1e-6, BUSY_POLL_S_MAX * 1.01, math.inf, math.nan])
def test_a_time_out_of_range_is_refused_before_anything_starts(busy_poll_s):
    with pytest.raises(UsageError, match=r"out of range; give 0 .* to 10000"):
        serve(busy_poll_s=busy_poll_s, on_ready=print)
