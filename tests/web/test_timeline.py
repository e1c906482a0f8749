"""Who worked and who waited, from what a real server says."""

from __future__ import annotations

import threading
from itertools import pairwise

import msgspec
import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits
from transferqueue.observe.frame import frame
from transferqueue.observe.stages import TableStage, Worker, all_stages
from transferqueue.web.page.timeline import KEPT_S, RECENT_S, Lane, Moment, TableMoment, Timeline, joined


def stats(queue):
    return queue.stats()


def stages(queue):
    return all_stages(stats(queue), queue.doctor())


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
            moment = line.add(frame(queue.address, before, stats(queue)), stages(queue), longest_s=2.0)
        found = moment.tables["rows"]
        assert found.put_s > 0
        assert found.producers == Lane(busy=1, idle=1)
        assert found.tasks == {"a": Lane(busy=1, idle=0), "b": Lane(busy=0, idle=1)}
        queue.drop_table("rows")
        for thread in waits:
            thread.join()


def test_a_silent_worker_neither_works_nor_waits():
    frozen = Worker(name="rollout-0", state="silent", rows=2, silent_s=30.0)
    made = TableStage(task="rollout", state="silent", workers=[frozen])
    with tq.connect() as queue:
        moment = Timeline().add(frame("here", None, stats(queue)), {"rows": [made]}, longest_s=2.0)
    assert moment.tables["rows"].tasks == {"rollout": Lane(busy=0, idle=0, silent=1)}


def a_frame(now, seconds_later, since=None):
    """The frame of a real answer, as if it had come some seconds later."""
    later = msgspec.structs.replace(now, now_s=now.now_s + seconds_later)
    return frame("here", since, later)


def an_hour(now, seconds, pauses=()):
    """A timeline sampled once a second for so long, but not in the pauses."""
    line, before = Timeline(), None
    for second in range(seconds):
        if not any(start <= second < end for start, end in pauses):
            shown = a_frame(now, second, before)
            before = shown.stats
            line.add(shown, {}, longest_s=2.0)
    return line


def test_the_last_minutes_are_kept_whole_older_ones_joined_and_what_is_older_than_an_hour_goes():
    with tq.connect() as queue:
        now = stats(queue)
    line = an_hour(now, 2 * int(KEPT_S))
    newest = line.moments[-1].at_s
    assert line.moments[0].at_s >= newest - KEPT_S
    assert line.moments[0].at_s <= newest - KEPT_S + 10
    recent = [moment for moment in line.moments if moment.at_s >= newest - RECENT_S]
    assert len(recent) == RECENT_S + 1
    assert len(line.moments) <= RECENT_S + 1 + (KEPT_S - RECENT_S) / 10 + 1
    assert all(later.follows(earlier) for earlier, later in pairwise(line.moments)), "nothing is forgotten in between"


def test_what_was_not_sampled_stays_a_gap_when_moments_are_joined():
    with tq.connect() as queue:
        now = stats(queue)
    line = an_hour(now, 1000, pauses=[(105, 150)])
    gaps = [(a.at_s - now.now_s, b.at_s - b.lasts_s - now.now_s) for a, b in pairwise(line.moments) if not b.follows(a)]
    assert gaps == [(pytest.approx(104), pytest.approx(148))], "two seconds before the first sample are its own"


def test_joined_moments_have_the_mean_over_their_time():
    one = Moment(10.0, 1.0, {"rows": TableMoment(10.0, 0.0, Lane(1, 0), {"a": Lane(2, 0)})})
    three = Moment(13.0, 3.0, {"rows": TableMoment(2.0, 4.0, Lane(0, 1), {"a": Lane(0, 2), "b": Lane(1, 1)})})
    found = joined(one, three)
    assert (found.at_s, found.lasts_s) == (13.0, 4.0)
    assert found.tables["rows"] == TableMoment(4.0, 3.0, Lane(0.25, 0.75), {"a": Lane(0.5, 1.5), "b": Lane(1.0, 1.0)})


def test_a_server_that_began_anew_begins_the_hour_anew():
    with tq.connect() as queue:
        now = stats(queue)
    line = an_hour(now, 400)
    line.add(a_frame(now, 5), {}, longest_s=2.0)
    assert len(line.moments) == 1
