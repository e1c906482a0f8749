"""A follower of a real queue: it gives the trace of each row that ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import transferqueue as tq
from transferqueue.errors import UsageError
from transferqueue.ledger.reports import listed_events
from transferqueue.observe.tracing import follower as module
from transferqueue.observe.tracing.follower import RowFollower
from transferqueue.observe.tracing.row_trace import RowTrace

Ended = list[tuple[RowTrace, Mapping[int, str]]]


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded", arena_bytes="16MiB", label="maker") as found:
        yield found


def following(queue: tq.Queue, **options: Any) -> tuple[RowFollower, Ended]:
    ended: Ended = []
    follower = RowFollower(queue, lambda trace, names: ended.append((trace, dict(names))), **options)
    follower.look()
    return follower, ended


def scored(queue: tq.Queue, name: str = "t") -> tq.Table:
    return queue.create_table(name, tasks=[tq.Task("score", needs=["text"], gives=["score"])])


def test_a_row_that_ended_is_given_with_its_times_and_workers(queue: tq.Queue) -> None:
    follower, ended = following(queue, every=1, clock=lambda: 1_000_000.0)
    table = scored(queue)
    table.put(text=["one", "two"])
    with tq.connect(queue.address, label="worker") as other, other.table("t").lease("score", rows=1) as batch:
        batch.ack(score=[1.0])
    follower.look()
    ((trace, names),) = ended
    assert (trace.table, trace.row, trace.state, names[trace.put_by]) == ("t", 0, "done", "maker")
    (lease,) = trace.leases
    assert (lease.task, lease.outcome) == ("score", "acked")
    assert 1_000_000 - 60 < trace.began_s <= lease.began_s <= lease.ended_s <= trace.ended_s <= 1_000_000
    follower.close()
    assert [(trace.row, trace.state) for trace, _ in ended] == [(0, "done"), (1, "unknown")]
    assert follower.exported == 2


def test_rows_put_before_the_follower_came_have_no_trace(queue: tq.Queue) -> None:
    table = scored(queue)
    table.put(text=["one"])
    follower, ended = following(queue, every=1)
    table.lease("score", rows=1).ack(score=[1.0])
    follower.look()
    assert ended == []


def test_a_table_that_is_dropped_ends_its_rows(queue: tq.Queue) -> None:
    follower, ended = following(queue, every=1)
    scored(queue).put(text=["one"])
    follower.look()
    queue.drop_table("t")
    follower.look()
    assert [(trace.row, trace.state) for trace, _ in ended] == [(0, "table dropped")]


def test_only_the_share_that_was_asked_for_is_followed(queue: tq.Queue) -> None:
    follower, ended = following(queue, every=16)
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    table.put(x=list(range(1600)))
    table.lease("train", rows=1600).ack()
    follower.look()
    assert 50 < len(ended) < 150


def test_missed_events_end_what_is_in_flight_as_unknown(queue: tq.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWERS_MAX", 1)
    follower, ended = following(queue, every=1)
    table = scored(queue)
    rows = table.put(text=["one"])
    follower.look()
    with table.pipeline() as pipeline:
        for number in range(4200):
            pipeline.update(rows, overwrite=True, note=[number])
    follower.look()
    assert [(trace.row, trace.state) for trace, _ in ended] == [(0, "unknown")]


def test_rows_of_a_table_made_again_are_not_taken_for_those_before(queue: tq.Queue) -> None:
    follower, ended = following(queue, every=1)
    table = scored(queue)
    table.put(text=["one"])
    for number in range(3):
        table.update([0], overwrite=True, note=[number])
    follower.look()
    queue.drop_table("t")
    scored(queue)
    follower.look()
    assert [(trace.row, trace.state) for trace, _ in ended] == [(0, "unknown")]


def test_rows_that_an_answer_does_not_name_end_what_is_in_flight(
    queue: tq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, ended = following(queue, every=1)
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    table.put(x=list(range(20)))
    follower.look()
    monkeypatch.setattr(listed_events, "EVENT_ROWS_TOLD_MAX", 8)
    table.lease("train", rows=20).ack()
    follower.look()
    assert len(ended) == 20
    assert {trace.state for trace, _ in ended[8:]} == {"unknown"}


def test_what_is_no_position_or_share_is_refused(queue: tq.Queue) -> None:
    scored(queue)
    for wrong in ({"after": -2}, {"every": 0}, {"every": "2"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            queue.events("t", **wrong)  # type: ignore[arg-type]
    with pytest.raises(tq.NotFound, match='table "u"'):
        queue.events("u")
