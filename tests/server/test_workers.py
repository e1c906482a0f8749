"""Who works on a task, who did last, and how that one left: what is known, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from tests.server.nodes import Bench, local
from tests.server.test_verdicts import verdict_of
from transferqueue.policies import Task
from transferqueue.server.sessions.exit_status import CUT, GOODBYE, SessionEnding
from transferqueue.server.sessions.session_table import GONE_MAX, Workers
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer, TaskDiagnosis
from transferqueue.wire.answers.stats import Stats


def process(program: str) -> tuple[subprocess.Popen[bytes], int]:
    started = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE)
    return started, os.pidfd_open(started.pid)


@pytest.mark.parametrize(
    ("program", "kill", "text"),
    [
        ("input()", signal.SIGKILL, "killed by SIGKILL"),
        ("raise SystemExit(3)", None, "exited with code 3"),
        ("pass", None, "exited with code 0"),
    ],
)
def test_the_kernel_tells_how_a_process_ended(program: str, kill: signal.Signals | None, text: str) -> None:
    worker, pidfd = process(program)
    ending = SessionEnding(CUT, pidfd)
    try:
        if kill is not None:
            assert ending.text == CUT, "it lives"
            worker.send_signal(kill)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert ending.text == text
        worker.communicate()
        assert ending.text == text, "known once, it is kept"
    finally:
        ending.close()
        os.close(pidfd)
        worker.communicate()


def test_what_the_kernel_does_not_tell_is_not_guessed() -> None:
    assert SessionEnding("silent for 10 s").text == "silent for 10 s"
    worker, pidfd = process("pass")
    worker.communicate()
    late = SessionEnding(GOODBYE, pidfd)
    assert (late.text, late.was_announced) == (GOODBYE, True)
    late.close()
    os.close(pidfd)


def pidfds(pid: int) -> int:
    """How many descriptors of this process watch that one. What other tests left to the collector may close
    meanwhile."""
    watching = 0
    for descriptor in Path("/proc/self/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            watching += f"Pid:\t{pid}\n" in descriptor.read_text()
    return watching


def test_the_memory_of_those_who_left_is_bounded() -> None:
    workers, (worker, pidfd) = Workers(), process("input()")
    for number in range(2 * GONE_MAX):
        workers.record_request(number, "t", f"task-{number}", 0.0)
        workers.record_end(number, f"w-{number}", CUT, pidfd, 1.0)
    assert workers.last_gone("t", "task-0") is None
    assert workers.last_gone("t", f"task-{2 * GONE_MAX - 1}") is not None
    assert pidfds(worker.pid) <= 1 + GONE_MAX
    workers.record_request(1, "t", "task-1", 0.0)
    workers.forget_table("t")
    workers.record_end(1, "w-1", CUT, -1, 2.0)
    assert workers.last_gone("t", "task-1") is None
    os.close(pidfd)
    assert pidfds(worker.pid) == 0
    worker.kill()
    worker.communicate()


# ---------------------------------------------------------------- in a node


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def told(client, task="reward"):
    found = codec.decode_observed(client.ask(m.Observe("doctor")), DoctorAnswer)
    return next(one for one in found.tables["t"] if one.task == task)


@pytest.fixture
def boss(bench):
    client = bench.client(label="boss", **local())
    tasks = [Task("reward", needs=["x"], gives=["r"], lease_s=5.0), Task("train", needs=["x", "r"])]
    client.create_table(tasks=tasks)
    client.ask(client.put(2))
    return client


def reward(rows=1, wait_s=0.0):
    return m.LeaseRequest("t", "reward", rows=rows, wait_s=wait_s)


def test_a_task_that_nobody_ever_worked_on_says_so(bench, boss):
    bench.pass_time(8)
    assert told(boss) == TaskDiagnosis(
        task="reward",
        text=(
            'task "reward" has 2 rows ready, and 0 rows leased; no worker of "reward" has connected since this server '
            "started 8 s ago; start it"
        ),
        stranded=False,
        unattended_s=8.0,
        died=False,
        errors=[],
        failing=False,
    )


def test_who_waits_for_what_a_dead_worker_gives_is_told_of_it(bench, boss):
    worker = bench.client(label="reward-0", **local())
    worker.ask(reward())
    assert told(boss).unattended_s is None, "it has rows"
    waiting = boss.post(m.LeaseRequest("t", "train", rows=2, wait_s=60.0))
    bench.coordinator.peer_lost(worker.peer, bench.now)
    bench.pass_time(48)
    text = 'no worker of "reward" is connected; the last left 48 s ago (reward-0, its connection ended); start it again'
    assert text in told(boss).text
    assert told(boss).died
    bench.pass_time(12)
    refused = boss.take(waiting)
    assert refused.error == "DeadlineExceeded"
    assert (
        '2 rows lack "r" (given by "reward": 2 ready and not leased, and no worker of "reward" is connected; the last '
        "left 60 s ago (reward-0," in (refused.text)
    )
    stats = codec.decode_observed(boss.ask(m.Observe("stats", "t")), Stats).tables["t"].tasks
    assert (stats["reward"].unattended_s, stats["train"].unattended_s) == (60.0, None)
    assert stats["reward"].unattended.endswith("left 60 s ago (reward-0, its connection ended); start it again")


def test_a_worker_that_waits_or_has_just_asked_works_and_one_that_is_idle_is_named(bench, boss):
    worker = bench.client(label="reward-0", **local())
    waiting = worker.post(reward(rows=5, wait_s=20.0))
    bench.pass_time(10)
    assert told(boss).unattended_s is None, "it waits"
    bench.pass_time(10)
    assert worker.take(waiting).error == "DeadlineExceeded"
    worker.ask(reward(rows=5))
    bench.pass_time(2)
    assert told(boss).unattended_s is None, "it has just asked"
    bench.pass_time(5)
    assert told(boss).text.endswith(
        'no worker asks for "reward": reward-0 is connected, and last asked for rows 7 s ago'
    )
    worker.ask(m.Goodbye())
    bench.pass_time(30)
    found = told(boss)
    assert found.text.endswith(
        'no worker of "reward" is connected; the last left 30 s ago (reward-0, said goodbye); start it again'
    )
    assert not found.died


def test_requests_for_tasks_that_do_not_exist_are_not_kept(bench, boss):
    for number in range(100):
        boss.ask(m.LeaseRequest("t", f"task-{number}", rows=1))
        boss.ask(m.LeaseRequest(f"t-{number}", "reward", rows=1))
    assert list(bench.coordinator.workers._sessions) == [("t", "")], "boss, who put rows"


def test_a_table_of_the_same_name_begins_without_workers(bench, boss):
    worker = bench.client(label="reward-0", **local())
    worker.ask(reward())
    worker.ask(m.Goodbye())
    boss.ask(m.DropTable("t"))
    boss.create_table(tasks=[Task("reward", needs=["x"])])
    boss.ask(boss.put(1))
    bench.pass_time(1)
    assert 'no worker of "reward" has connected since' in told(boss).text


def test_a_task_that_can_never_progress_says_so(bench, boss):
    boss.ask(m.CreateTable("u", tasks=[Task("reward", needs=["x"], gives=["r"]), Task("log", needs=["x"])]))
    boss.ask(msgspec.structs.replace(boss.put(1), table="u"))
    lent = boss.ask(m.LeaseRequest("u", "reward", rows=1))
    boss.ask(m.Ack("u", lent.lease, lent.token))
    boss.ask(m.AddTask("u", Task("train", needs=["r"])))
    boss.ask(m.Seal("u"))
    answer = codec.decode_observed(boss.ask(m.Observe("doctor")), DoctorAnswer)
    train = next(one for one in answer.tables["u"] if one.task == "train")
    assert train.stranded
    assert 'task "train" of table "u" can never progress: the table is sealed, and 1 row lacks "r"' in train.text
    found = verdict_of(boss)
    assert (found.state, found.table, found.task) == ("stuck", "u", "train")
