"""Traces of rows, put together from events alone."""

from __future__ import annotations

from transferqueue.observe.tracing.row_trace import MARKS_MAX, SPANS_MAX, TAKEN, Mark, RowTrace, TableTraces
from transferqueue.wire.answers.events import RowsEvent


def event(what: str, *rows: int, task: str = "", session: int = 0, detail: str = "") -> RowsEvent:
    return RowsEvent(ago_s=0.0, what=what, task=task, session=session, detail=detail, rows=list(rows))


def followed(*events: RowsEvent, rows_max: int = 100) -> tuple[TableTraces, list[RowTrace]]:
    """Events one second apart, from second 1 on."""
    traces = TableTraces("t", rows_max)
    ended = [trace for at, each in enumerate(events, 1) for trace in traces.add(each, float(at))]
    return traces, ended


def leases(trace: RowTrace) -> list[tuple[str, int, float, float, str, bool]]:
    return [(one.task, one.worker, one.began_s, one.ended_s, one.outcome, one.failed) for one in trace.leases]


def test_a_row_goes_from_its_put_through_its_leases_to_its_end() -> None:
    _, ended = followed(
        event("put", 7, 8, session=3),
        event("leased", 7, task="reward", session=4),
        event("updated", 7, session=3, detail="note"),
        event("acked", 7, task="reward", session=4),
        event("leased", 7, task="train", session=5),
        event("acked", 7, task="train", session=5, detail="step 2"),
        event("done", 7),
    )
    (trace,) = ended
    assert (trace.row, trace.put_by, trace.began_s, trace.ended_s, trace.state) == (7, 3, 1.0, 7.0, "done")
    assert leases(trace) == [("reward", 4, 2.0, 4.0, "acked", False), ("train", 5, 5.0, 6.0, "acked", False)]
    assert trace.leases[1].detail == "step 2"
    assert trace.marks == [Mark(3.0, "updated", "", "note")]


def test_a_lease_that_was_lost_is_a_failure_and_the_row_is_leased_again() -> None:
    _, (trace,) = followed(
        event("put", 1),
        event("leased", 1, task="train", session=4),
        event("its holder is gone", 1, task="train", session=4),
        event("leased", 1, task="train", session=5),
        event("acked as dropped", 1, task="train", session=5, detail="too long"),
        event("dropped", 1, detail="too long"),
    )
    assert [(one.outcome, one.failed) for one in trace.leases] == [
        ("its holder is gone", True),
        ("acked as dropped", False),
    ]
    assert (trace.state, trace.reason) == ("dropped", "too long")


def test_a_requeued_row_is_a_mark_and_its_lost_lease_ends_with_the_next_one() -> None:
    _, (trace,) = followed(
        event("put", 1),
        event("leased", 1, task="train"),
        event("requeued as stale", 1, task="sample"),
        event("leased", 1, task="train"),
        event("dropped", 1, detail="stale"),
    )
    assert [one.outcome for one in trace.leases] == [TAKEN, "row dropped"]
    assert trace.marks == [Mark(3.0, "requeued as stale", "sample", "")]


def test_a_row_whose_put_was_not_seen_has_no_trace() -> None:
    assert followed(event("leased", 1, task="train"), event("acked", 1, task="train"), event("done", 1))[1] == []


def test_rows_beyond_the_bound_have_none_and_are_counted() -> None:
    traces, ended = followed(event("put", 1, 2, 3), event("done", 1, 2, 3), event("put", 4), rows_max=2)
    assert [trace.row for trace in ended] == [1, 2]
    assert traces.skipped == 1
    assert [trace.row for trace in traces.end(9.0, "unknown")] == [4]


def test_leases_and_marks_beyond_the_bound_are_counted() -> None:
    attempts = [event("leased", 1, task="t"), event("failed", 1, task="t")] * (SPANS_MAX + 2)
    marks = [event("updated", 1)] * MARKS_MAX
    _, (trace,) = followed(event("put", 1), *attempts, *marks, event("done", 1))
    assert (len(trace.leases), len(trace.marks)) == (SPANS_MAX, MARKS_MAX)
    assert trace.omitted == 2 + 2  # two leases, and the two failures of leases that have no span became marks


def test_a_row_id_that_comes_again_ends_the_trace_before() -> None:
    _, (before,) = followed(event("put", 0), event("put", 0))
    assert (before.state, before.ended_s) == ("gone", 2.0)
