"""Stops of generation around a change of weights, from made-up spans."""

from transferqueue.workflows.flow.events import TimeSpan
from transferqueue.workflows.flow.reports.weight_swaps import Swaps, publish_lag_s, swaps_of


def span(name: str, start: float, end: float) -> TimeSpan:
    return TimeSpan(name=name, start=start, end=end)


def test_the_longest_stop_is_of_any_process_and_waiting_is_told_apart() -> None:
    first = [span("work", 0, 1), span("wait", 1, 3), span("swap", 3, 3.25), span("work", 3, 5)]
    second = [span("work", 0, 1), span("swap", 1, 1.5), span("work", 1, 2)]
    assert swaps_of([first, second]) == Swaps(count=2, swap_s_max=0.5, gap_s_max=2.25, request_s=1.0)


def test_the_first_weights_interrupt_nothing() -> None:
    assert swaps_of([[span("swap", 0, 1), span("work", 0, 2)]]) == Swaps(
        count=0, swap_s_max=0.0, gap_s_max=0.0, request_s=2.0
    )
    assert swaps_of([]).request_s == 0.0


def test_the_publish_lag_is_of_each_process_that_loaded_a_version_that_the_trainer_published() -> None:
    trained = [
        TimeSpan(name="publish", start=at, end=at + 0.5, version=version)
        for version, at in ((1, 1.0), (2, 5.0), (1, 9.0))
    ]
    first = [
        TimeSpan(name="swap", start=2.0, end=2.5, version=1),
        TimeSpan(name="weights", start=6.0, end=8.5, version=2),
    ]
    second = [
        TimeSpan(name="swap", start=4.0, end=4.5, version=1),
        TimeSpan(name="swap", start=0.0, end=0.5, version=0),
    ]
    assert publish_lag_s([first, second], [trained]) == 3.0
    assert publish_lag_s([[second[1]]], [trained]) == 0.0
