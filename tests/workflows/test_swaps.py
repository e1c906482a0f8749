"""Stops of generation around a change of weights, from made-up spans."""

from transferqueue.workflows.events import Span
from transferqueue.workflows.grpo.swaps import Swaps, measure


def span(name: str, start: float, end: float) -> Span:
    return Span(name=name, start=start, end=end)


def test_the_longest_stop_is_of_any_process_and_waiting_is_told_apart() -> None:
    first = [span("work", 0, 1), span("wait", 1, 3), span("swap", 3, 3.25), span("work", 3, 5)]
    second = [span("work", 0, 1), span("swap", 1, 1.5), span("work", 1, 2)]
    assert measure([first, second]) == Swaps(count=2, swap_s_max=0.5, gap_s_max=2.25, request_s=1.0)


def test_the_first_weights_interrupt_nothing() -> None:
    assert measure([[span("swap", 0, 1), span("work", 0, 2)]]) == Swaps(
        count=0, swap_s_max=0.0, gap_s_max=0.0, request_s=2.0
    )
    assert measure([]).request_s == 0.0
