"""What stalled and who works, from what a real server's doctor says."""

from __future__ import annotations

import threading

import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits
from transferqueue.observe.answers.stats import parse
from transferqueue.observe.diagnosis import DoctorAnswer, diagnose
from transferqueue.observe.workers import workers
from transferqueue.web.page.stalls import STALLS_MAX, Stalls


@pytest.fixture
def waiting():
    """What the doctor says while a trainer holds a row and another waits for a field that nobody gives."""
    with tq.connect() as queue, tq.connect(queue.address, label="trainer-1") as other:
        table = queue.create_table("rows", tasks=[tq.Task("train", needs=["x", "score"]), tq.Task("read", needs=["x"])])
        table.put(x=[1.0, 2.0])
        waiter = threading.Thread(
            target=pytest.raises, args=(tq.NotFound, lambda: other.table("rows").lease("train", rows=1, timeout_s=30))
        )
        waiter.start()
        until_someone_waits(queue, "rows", 1)
        with table.lease("read", rows=2):
            yield parse("doctor", queue.doctor(), DoctorAnswer)
        queue.drop_table("rows")
        waiter.join()


@pytest.fixture
def idle():
    """What the doctor says of a queue without a table."""
    with tq.connect() as queue:
        return parse("doctor", queue.doctor(), DoctorAnswer)


def test_a_stall_is_kept_with_its_words_after_it_ended(waiting, idle):
    stalls = Stalls()
    stalls.see(10.0, diagnose(waiting, patience_s=0.0))
    stalls.see(12.0, diagnose(waiting, patience_s=0.0))
    (lasting,) = stalls.all
    assert (lasting.table, lasting.from_s, lasting.until_s) == ("rows", 10.0, None)
    assert "score" in lasting.text
    assert "trainer-1 has waited" in lasting.text
    stalls.see(14.0, diagnose(idle))
    (ended,) = stalls.all
    assert (ended.text, ended.from_s, ended.until_s) == (lasting.text, 10.0, 14.0)
    stalls.forget(14.5)
    assert stalls.all == []


def test_the_stalls_that_are_kept_are_bounded_and_go_with_the_server(waiting, idle):
    stalls = Stalls()
    for at in range(2 * STALLS_MAX + 2):
        stalls.see(100.0 + at, diagnose(idle) if at % 2 else diagnose(waiting, patience_s=0.0))
    assert len(stalls.all) == STALLS_MAX
    stalls.see(1.0, diagnose(idle))  # a new server, whose clock is behind
    assert stalls.all == []


def test_workers_are_told_with_what_they_hold_and_wait_for(waiting, idle):
    trainer, reader = workers(waiting)
    assert trainer.name == "trainer-1"
    assert trainer.holds == []
    assert len(trainer.waits) == 1
    assert "score" in trainer.waits[0]
    assert trainer.waited_s is not None
    assert reader.holds == ["rows: 2 rows for read"]
    assert (reader.waits, reader.waited_s) == ([], None)
    assert workers(idle) == []
