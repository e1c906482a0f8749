"""Events cross a pipe whole, in order, whatever pieces they arrive in."""

import os

from hypothesis import given
from hypothesis import strategies as st

from transferqueue.workflows.flow.events import Event, Failure, Figures, Receiver, Sender, TimeSpan

EVENTS: list[Event] = [
    TimeSpan(name="work", start=1.5, end=2.5, rows=8, version=3),
    Figures(kind="step", at=2.0, values={"loss": 0.5, "staleness": {"0": 8}, "note": "line\nbreak"}),
    Failure(text="Traceback:\n  é", rows=2),
]


def sent(events: list[Event]) -> bytes:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as received:
        for event in events:
            Sender(writer)(event)
        os.close(writer)
        return received.read()


def test_events_arrive_as_they_were_sent() -> None:
    assert list(Receiver().feed(sent(EVENTS))) == EVENTS


@given(st.lists(st.integers(1, 40), min_size=1))
def test_pieces_do_not_matter(sizes: list[int]) -> None:
    stream, receiver = sent(EVENTS), Receiver()
    found: list[Event] = []
    while stream:
        for size in sizes:
            found += receiver.feed(stream[:size])
            stream = stream[size:]
    assert found == EVENTS


def test_the_cut_line_of_a_killed_process_is_no_event() -> None:
    stream = sent(EVENTS)
    assert list(Receiver().feed(stream[:-5])) == EVENTS[:-1]


def test_times_of_another_machine_come_as_those_of_the_supervisors() -> None:
    reader, writer = os.pipe()
    emit = Sender(writer, shift_s=10.0)
    for event in EVENTS:
        emit(event)
    emit.close()
    with os.fdopen(reader, "rb") as received:
        span, figures, failure = Receiver().feed(received.read())
    assert span == TimeSpan(name="work", start=11.5, end=12.5, rows=8, version=3)
    assert isinstance(figures, Figures)
    assert figures.at == 12.0
    assert failure == EVENTS[2]
