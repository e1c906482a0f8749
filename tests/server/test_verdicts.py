"""The verdict on a real coordinator in each state, in time that the test decides."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.server.nodes import Bench, local, numbers, rows_of
from transferqueue.limits import Limits
from transferqueue.observe.stages import all_stages
from transferqueue.observe.verdict import QueueVerdict, report
from transferqueue.policies import Manual, Pacing, Task
from transferqueue.schema import Field
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.stats import Stats

TASKS = [
    Task("rollout", needs=["x"], gives=["y"], lease_s=600.0),
    Task("train", needs=["x", "y"], lease_s=600.0),
]


def looks(client) -> tuple[Stats, DoctorAnswer]:
    """Both answers, as a person's tool asks for them."""
    stats = codec.decode_observed(client.ask(m.Observe("stats")), Stats)
    return stats, codec.decode_observed(client.ask(m.Observe("doctor")), DoctorAnswer)


def verdict_of(client, patience_s: float = 10.0) -> QueueVerdict:
    return report(*looks(client), patience_s=patience_s).verdict


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def boss(bench):
    """Puts rows."""
    return bench.client(label="boss", **local())


def later(bench, seconds, *living):
    """Time passes; all of `living` have just sent something."""
    bench.pass_time(seconds)
    for client in living:
        client.ask(m.Observe("sessions"))


def lease(task, rows=2, wait_s=0.0):
    return m.LeaseRequest("t", task, rows=rows, wait_s=wait_s)


def given(rows):
    """The column that rollout gives."""
    value = m.Inline("y", np.zeros(len(rows), "<i8").tobytes())
    return m.Columns(fields=[Field("y", "int64")], inline=[value])


def finish(client, task):
    """Lease two rows of a task, and ack them."""
    lent = client.ask(lease(task))
    columns = given(rows_of(lent)) if task == "rollout" else None
    client.ask(m.Ack("t", lent.lease, lent.token, columns=columns))


def test_a_job_whose_stages_move(bench, boss):
    boss.create_table(tasks=TASKS)
    boss.ask(boss.put(4))
    rollout, trainer = bench.client(label="rollout-0", **local()), bench.client(label="trainer", **local())
    finish(rollout, "rollout")
    rollout.ask(lease("rollout"))
    trainer.ask(lease("train"))
    bench.pass_time(2)
    found = verdict_of(boss)
    assert (found.state, found.text) == ("healthy", "t: all stages move")
    stages = all_stages(*looks(boss))["t"]
    shown = {stage.name: [(worker.name, worker.state, worker.rows) for worker in stage.workers] for stage in stages}
    assert shown == {
        "producers": [("boss", "idle", 0)],
        "rollout": [("rollout-0", "works", 2)],
        "train": [("trainer", "works", 2)],
    }


def test_a_task_that_no_session_works_on(bench, boss):
    boss.create_table(tasks=TASKS)
    boss.ask(boss.put(2))
    rollout, trainer = bench.client(label="rollout-0", **local()), bench.client(label="trainer", **local())
    trainer.post(lease("train", wait_s=600.0))
    bench.pass_time(5)
    assert verdict_of(boss).trouble is False
    later(bench, 10, trainer)
    assert verdict_of(boss).text == "t/rollout: 2 rows ready, no worker connected; start one"
    finish(rollout, "rollout")
    rollout.ask(m.Goodbye())
    boss.ask(boss.put(2))
    later(bench, 20, trainer)
    found = verdict_of(boss)
    assert (found.state, found.task) == ("missing", "rollout")
    assert found.text.endswith("its last worker left 20 s ago (rollout-0, said goodbye); start it again")


def test_workers_that_are_silent_with_rows(bench, boss):
    boss.create_table(tasks=TASKS)
    boss.ask(boss.put(4))
    for label in ("rollout-0", "rollout-1"):
        bench.client(label=label, **local()).ask(lease("rollout"))
    trainer = bench.client(label="trainer", **local())
    trainer.post(lease("train", wait_s=600.0))
    bench.pass_time(7)
    states = {stage.name: stage.state for stage in all_stages(*looks(boss))["t"]}
    assert states["rollout"] == "silent", "drawn before it is told"
    later(bench, 4, trainer)
    found = verdict_of(boss)
    assert (found.state, found.text) == ("silent", "rollout-0 and rollout-1 silent for 11 s with 4 rows")


def test_a_task_whose_leases_all_fail(bench, boss):
    boss.create_table(tasks=TASKS)
    boss.ask(boss.put(8))
    rollout = bench.client(label="rollout-0", **local())
    for _ in range(8):
        if isinstance(lent := rollout.take(rollout.post(lease("rollout"))), m.Leased):
            rollout.ask(m.ReleaseRequest("t", lent.lease, lent.token, failed=True, reason="KeyError: 'answer'"))
    stats, _ = looks(boss)
    if not stats.tables["t"].tasks["rollout"].errors:
        pytest.skip("this server does not keep the errors of a task yet")
    found = verdict_of(boss)
    assert (found.state, found.task) == ("failing", "rollout")
    assert found.text.startswith("rollout fails: KeyError 'answer', ")


def test_a_column_that_no_task_gives_any_more(bench, boss):
    boss.create_table(tasks=[Task("train", needs=["x", "score"])])
    boss.ask(boss.put(3))
    bench.client(label="trainer", **local()).post(lease("train", wait_s=600.0))
    bench.pass_time(11)
    found = verdict_of(boss)
    assert (found.state, found.text) == ("stuck", 't: train lacks "score" of 3 rows, and no task gives it')
    assert found.chain == ["trainer has waited 11 s for train"]


def test_a_table_that_is_full_of_rows_that_ended(bench, boss):
    boss.create_table(tasks=[Task("train", needs=["x"])], limits=Limits(rows=2), retention=Manual())
    boss.ask(boss.put(2))
    trainer = bench.client(label="trainer", **local())
    finish(trainer, "train")
    trainer.post(lease("train", wait_s=600.0))
    boss.post(m.PutRequest("t", 1, numbers(1), wait_s=600.0))
    bench.pass_time(11)
    found = verdict_of(boss)
    assert (found.state, found.text) == ("full", "t is full: 2 of 2 rows; 2 rows have ended and are kept")


def test_a_table_of_which_each_row_is_stale(bench, boss):
    boss.create_table(tasks=TASKS, pacing=Pacing("train", batch_rows=2, max_staleness=1))
    for version in range(4):
        facts = m.RowFacts(policy_version=np.full(2, version, "<i8").tobytes())
        columns = msgspec.structs.replace(numbers(2), facts=facts)
        boss.ask(m.PutRequest("t", 2, columns))
        boss.ask(m.AdvanceClock("t", version + 2))
    bench.client(label="trainer", **local()).post(lease("train", wait_s=600.0))
    bench.pass_time(11)
    found = verdict_of(boss)
    assert (found.state, found.task) == ("stale", "train")
    assert found.text == "t: all rows come too late for train: the last 8 were over 1 version behind"


def test_a_table_into_which_no_session_puts(bench, boss):
    boss.create_table(tasks=[Task("train", needs=["x"])])
    maker = bench.client(label="maker", **local())
    maker.ask(maker.put(1))
    trainer = bench.client(label="trainer", **local())
    trainer.post(lease("train", wait_s=600.0))
    bench.coordinator.peer_lost(maker.peer, bench.now)
    later(bench, 11, trainer)
    found = verdict_of(boss)
    assert (found.state, found.trouble) == ("starved", True)
    assert found.text == "t: no producer connected; its last producer left 11 s ago (maker, its connection ended)"


def test_a_job_that_finished(bench, boss):
    boss.create_table(tasks=[Task("train", needs=["x"])])
    boss.ask(boss.put(2))
    finish(bench.client(label="trainer", **local()), "train")
    assert verdict_of(boss).state == "idle"
    boss.ask(m.Seal("t"))
    found = verdict_of(boss)
    assert (found.state, found.text) == ("finished", "finished: 2 done, 0 dropped")
    boss.ask(m.DropTable("t"))
    assert verdict_of(boss).text == "no tables yet"


def test_the_life_of_a_row_names_sessions_that_are_gone_too(bench, boss):
    boss.create_table(tasks=TASKS)
    boss.ask(boss.put(2))
    rollout = bench.client(label="rollout-0", **local())
    finish(rollout, "rollout")
    rollout.ask(m.Goodbye())
    life = codec.decode_observed(boss.ask(m.Observe("row", "t", 0)), RowLife)
    assert [life.name_of(event.session) for event in life.events[:3]] == ["boss", "rollout-0", "rollout-0"]
    assert life.name_of(None) == ""
