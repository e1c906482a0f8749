"""Time in which a server does not listen passes for no deadline: its process is suspended, its machine paused, or one
turn is long."""

import math

import pytest

from transferqueue.limits import GAP_S
from transferqueue.server.process.loop import ListeningClock


class Clock:
    """Real seconds, set by hand."""

    def __init__(self):
        self.now = 100.0
        self.listening = ListeningClock(lambda: self.now)

    def sleep(self, planned_s, slept_s):
        """The loop sleeps. Returns the seconds that passed for it."""
        before = self.listening()
        self.listening.sleeps(planned_s)
        self.now += slept_s
        return self.listening() - before


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize(
    ("planned_s", "slept_s"), [(2.0, 2.0), (2.0, 0.3), (2.0, 2.0 + GAP_S), (None, 1000.0), (0.0, 0.1), (1000.0, 999.0)]
)
def test_a_sleep_that_ends_about_as_planned_passes(clock, planned_s, slept_s):
    assert clock.sleep(planned_s, slept_s) == pytest.approx(slept_s)


@pytest.mark.parametrize(("planned_s", "slept_s"), [(2.0, 13.0), (0.0, 13.0), (2.0, 2.1 + GAP_S), (1000.0, 5000.0)])
def test_a_gap_may_have_begun_with_the_sleep_so_nothing_of_it_passes(clock, planned_s, slept_s):
    assert clock.sleep(planned_s, slept_s) == pytest.approx(0.0)
    assert clock.sleep(1.0, 1.0) == pytest.approx(1.0)


def test_a_gap_within_a_turn_does_not_pass(clock):
    before = clock.listening()
    for _ in range(3):
        clock.now += 13.0
        assert clock.listening() == before


def test_time_goes_on_where_every_sleep_is_late(clock):
    """Otherwise nothing would ever be due on a machine that is so busy."""
    passed = [clock.sleep(1.0, 1.1 + GAP_S) for _ in range(10)]
    assert sum(passed) == pytest.approx(5.0)
    passed = []
    for _ in range(10):
        passed.append(clock.sleep(1.0, 1.1 + GAP_S))
        clock.now += 1.1 + GAP_S
        clock.listening()
    assert sum(passed) == pytest.approx(5.0)


def test_the_clock_never_goes_back(clock):
    before = -math.inf
    for number in range(1000):
        clock.listening.sleeps((0.0, 0.5, 3.0, None)[number % 4])
        clock.now += (0.0, 0.2, 0.9, 7.0, 0.001)[number % 5]
        now = clock.listening()
        assert now >= before
        before = now
