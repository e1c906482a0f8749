"""Who worked and who waited, from what a real server says."""

from __future__ import annotations

import threading

import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits
from transferqueue.observe.answers.stats import Stats, parse
from transferqueue.observe.frame import frame
from transferqueue.web.page.timeline import MOMENTS_MAX, Lane, Timeline


def stats(queue):
    return parse("stats", queue.stats(), Stats)


def test_who_holds_a_lease_works_and_who_waits_for_one_is_idle():
    with tq.connect() as queue, tq.connect(queue.address, label="trainer") as other:
        table = queue.create_table(
            "rows", tasks=[tq.Task("a", needs=["x"]), tq.Task("b", needs=["x", "y"])], limits=tq.Limits(rows=3)
        )
        before = stats(queue)
        table.put(x=[1.0, 2.0, 3.0])
        waits = [
            threading.Thread(target=pytest.raises, args=(tq.NotFound, work))
            for work in (
                lambda: other.table("rows").lease("b", rows=1, timeout_s=30),
                lambda: other.table("rows").put(x=[4.0], timeout_s=30),
            )
        ]
        for thread in waits:
            thread.start()
        until_someone_waits(queue, "rows", 2)
        line = Timeline()
        with table.lease("a", rows=2):
            moment = line.add(frame(queue.address, before, stats(queue)))
        found = moment.tables["rows"]
        assert found.put_s > 0
        assert found.producers == Lane(busy=1, idle=1)
        assert found.tasks == {"a": Lane(busy=1, idle=0), "b": Lane(busy=0, idle=1)}
        queue.drop_table("rows")
        for thread in waits:
            thread.join()


def test_the_oldest_moments_go():
    with tq.connect() as queue:
        now = stats(queue)
        line = Timeline()
        for _ in range(MOMENTS_MAX + 3):
            line.add(frame(queue.address, None, now))
        assert len(line.moments) == MOMENTS_MAX
