"""Rates are differences of counters; where counters cannot be compared there is no rate."""

import pytest

from tests.observe.snapshots import stats, table, task
from transferqueue.observe.frame import frame, rates
from transferqueue.wire.answers.stats import Stats

BEFORE = stats(
    now_s=10.0,
    tables={"t": table(rows_put=100, rows_done=40, rows_dropped=2, tasks={"train": task(given=50, done=40, failed=4)})},
)
AFTER = stats(
    now_s=12.0,
    tables={"t": table(rows_put=300, rows_done=60, rows_dropped=3, tasks={"train": task(given=90, done=60, failed=4)})},
)


def test_rates_are_differences_over_the_servers_time() -> None:
    found = rates(BEFORE, AFTER)["t"]
    assert (found.put_s, found.done_s, found.dropped_s) == (100.0, 10.0, 0.5)
    train = found.tasks["train"]
    assert (train.given_s, train.done_s, train.failed_s) == (20.0, 10.0, 0.0)


@pytest.mark.parametrize(
    "later", [stats(now_s=12.0, epoch=2, tables=AFTER.tables), stats(now_s=10.0, tables=AFTER.tables)]
)
def test_no_rate_over_a_restart_or_over_no_time(later: Stats) -> None:
    assert rates(BEFORE, later) == {}


def test_no_rate_for_a_table_made_anew_or_a_task_not_there_before() -> None:
    fresh = stats(now_s=12.0, tables={"t": table(rows_put=5), "u": table(rows_put=7)})
    assert rates(BEFORE, fresh) == {}
    added = stats(now_s=12.0, tables={"t": table(rows_put=100, rows_done=40, rows_dropped=2, tasks={"new": task()})})
    assert rates(BEFORE, added)["t"].tasks == {}


def test_the_first_frame_has_no_rates() -> None:
    first = frame("ipc:///x", None, AFTER)
    assert (first.interval_s, first.rates) == (None, {})
    assert frame("ipc:///x", BEFORE, AFTER).interval_s == 2.0
