"""What a coordinator of several carries out: nothing that makes, or waits for, what belongs to another."""

import pytest

from transferqueue.errors import Impossible, UsageError
from transferqueue.limits import Limits
from transferqueue.policies import Acked, Pacing, Task
from transferqueue.server.sessions.home_coordinator import wrong_coordinator
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex, home_coordinator

HERE, THERE = (next(f"t{n}" for n in range(99) if home_coordinator(f"t{n}", 2) == seat) for seat in (1, 2))
SEAT = CoordinatorIndex(1, 2)


def create(name, channel=None):
    pacing = Pacing("train", batch_rows=1, channel=channel)
    task = Task("train", needs=["x"])
    return m.CreateTable(name=name, fields=[], tasks=[task], limits=Limits(), pacing=pacing, retention=Acked())


def requests(name):
    """Each that makes, or waits for, a table or channel."""
    yield create(name)
    yield m.OpenTable(name=name)
    yield m.BeginVersion(channel=name, version=1, parts=2, length_s=1.0)
    yield m.GiveUpVersion(channel=name, pending=1)
    yield m.GetLatestVersion(channel=name)
    yield m.Pull(channel=name)
    yield m.ReportApplied(channel=name, version=0)
    yield m.ReleaseUpdateSlot(channel=name)


@pytest.mark.parametrize("request_", [*requests(THERE)], ids=lambda one: type(one).__name__)
def test_what_belongs_to_another_is_refused(request_):
    assert isinstance(wrong_coordinator(SEAT, request_), UsageError)
    assert wrong_coordinator(CoordinatorIndex(2, 2), request_) is None
    assert wrong_coordinator(CoordinatorIndex(), request_) is None


@pytest.mark.parametrize("request_", [*requests(HERE)], ids=lambda one: type(one).__name__)
def test_its_own_is_not(request_):
    assert wrong_coordinator(SEAT, request_) is None


def test_every_request_of_a_channel_is_looked_at():
    """A new one has to be named in `seating`, or a coordinator would make a channel that belongs to another."""
    kinds = [kind for kind in m.Request.__args__ if "channel" in kind.__struct_fields__]
    assert {m.tag_of(kind) for kind in kinds} == {
        "Publish",
        "Begin",
        "GiveUp",
        "Basis",
        "Pull",
        "Applied",
        "DropDeltas",
        "Turn",
        "EndTurn",
    }


def test_a_clock_of_another_is_refused():
    assert isinstance(wrong_coordinator(SEAT, create(HERE, THERE)), Impossible)
    assert wrong_coordinator(SEAT, create(HERE, f"{HERE}/policy")) is None
    assert wrong_coordinator(CoordinatorIndex(), create(HERE, THERE)) is None
