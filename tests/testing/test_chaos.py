"""Chaos on real processes: short runs that must keep every promise, and what a run does with a wrong call and an
interrupt."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from bench.measurement_record import load_record
from tests.chaos import run as run_module
from tests.chaos.fault_plan import FLOODERS, PROXY, SERVER, SERVER_GAP_S, Fault, plan, settings
from tests.chaos.log import ProcessLog, ReadLog, read_logs
from tests.chaos.payload import LARGE_WORDS, SMALL_WORDS, Payload
from tests.chaos.process_context import ProcessContext, ServerEndpoint
from tests.chaos.processes import ManagedProcess
from tests.chaos.proxy import LoopbackHosts, Proxy
from tests.chaos.recovery import of_leases, of_server
from tests.chaos.run import Chaos
from tests.chaos.server_process import ServerUnderTest
from tests.chaos.verify import Account
from tests.scale import only_long, sizes
from transferqueue.errors import UsageError


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "tests.chaos", *options]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": 0.5}, r"seconds=0.5 of chaos cannot be run; give 1 to 86400"),
        ({"seed": -1}, r"seed=-1 is out of range; give 0 to"),
        ({"durability": "memory"}, r"durability 'memory' cannot be judged.*only process and disk outlive"),
        ({"spill": True}, r"durability 'process' and spill do not go together"),
    ],
)
def test_a_run_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(**{"seconds": 10, "seed": 1, "durability": "process", "tcp": False, **wrong})


@pytest.mark.parametrize(
    ("carrier", "said", "judged"),
    [
        ("nixl:tcp", "ucp_request.inl:356 Fatal: unexpected error: Endpoint timeout", False),
        ("nixl:tcp", "free(): invalid pointer", True),
        ("nixl:cma", "ucp_request.inl:356 Fatal: unexpected error: Endpoint timeout", True),
    ],
)
def test_what_ucx_ends_over_tcp_is_a_fault_and_any_other_abort_is_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: str, said: str, judged: bool
) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_BYTES", carrier)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a run ignores interrupts while it cleans up
    with Chaos(settings(10, 1, "process", tcp=False), tmp_path, print) as run:
        run._draining = True  # the role is not started again
        (tmp_path / f"{FLOODERS[0]}.log").write_text(said)
        run._ended(cast(ManagedProcess, SimpleNamespace(role=FLOODERS[0])), -signal.SIGABRT)
    assert (bool(run.violations), [fault.kind for fault in run.faults]) == (judged, [] if judged else ["abort of UCX"])


def test_two_runs_at_once_take_no_port_of_each_other() -> None:
    """The next life of a server may get a port that the server of another run had, whose proxy still listens there."""

    async def forward(port: int) -> None:
        proxies = [Proxy(1, LoopbackHosts.of_one_run()) for _ in range(8)]
        for proxy in proxies:
            await proxy._forward(port)
        for proxy in proxies:
            proxy._listening[port].close()

    with socket.create_server((LoopbackHosts.of_one_run().server, 0)) as listening:
        asyncio.run(forward(listening.getsockname()[1]))


def test_a_process_that_is_told_to_stop_before_it_first_runs_stops(tmp_path: Path) -> None:
    """On one core the parent sends the signal before the child is scheduled."""
    (tmp_path / "events").mkdir()
    cores, before = os.sched_getaffinity(0), signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a run does
    os.sched_setaffinity(0, {min(cores)})
    try:
        for life in range(20):
            process = ManagedProcess(FLOODERS[0], lambda: _wait_until_stopped(tmp_path, life), tmp_path / "log")  # noqa: B023
            process.signal(signal.SIGTERM)
            assert process.wait() == 0, (tmp_path / "log").read_text()
    finally:
        os.sched_setaffinity(0, cores)
        signal.signal(signal.SIGTERM, before)


def _wait_until_stopped(directory: Path, life: int) -> None:
    context = ProcessContext(directory, ServerEndpoint("ipc://none"), FLOODERS[0], life, seed=1)
    context.pace(20)
    assert context.stopping


# ---------------------------------------------------------------- the plan


def test_a_seed_decides_every_fault_and_another_others() -> None:
    first, again, other = (plan(settings(180, seed, "process", True)) for seed in (1, 1, 2))
    assert first == again != other
    assert sum(fault.target != PROXY for fault in first) >= 350
    assert {fault.kind for fault in first} >= {
        "kill",
        "freeze",
        "freeze_beyond",
        "fill",
        "disk_full",
        "restart",
        "flip",
    }


def test_a_server_is_left_alone_between_its_faults() -> None:
    hurt = [fault.at for fault in plan(settings(600, 3, "process", False)) if fault.target == SERVER]
    assert min(later - earlier for earlier, later in itertools.pairwise(hurt)) >= SERVER_GAP_S


def test_a_server_whose_rows_end_with_it_is_not_killed() -> None:
    run = settings(300, 3, None, tcp=False, spill=True)
    assert run.command == "python -m tests.chaos --seconds 300 --seed 3 --spill"
    hurt = [fault for fault in plan(run) if fault.target == SERVER]
    assert {fault.kind for fault in hurt} == {"freeze", "disk_full"}
    assert all(fault.for_s for fault in hurt), "they end while it lives"


# ---------------------------------------------------------------- the bytes


@pytest.mark.parametrize("words", [SMALL_WORDS, LARGE_WORDS])
def test_every_byte_of_a_row_is_compared(words: tuple[int, int]) -> None:
    payload = Payload(1, words)
    row = payload.of(1 << 30)
    assert words[0] <= len(row) < words[1]
    assert payload.matches(1 << 30, row)
    assert not payload.matches((1 << 30) + 1, row)
    assert not Payload(2, words).matches(1 << 30, row)
    row[-1] ^= 1
    assert not payload.matches(1 << 30, row)


# ---------------------------------------------------------------- the check


class Written:
    """Event logs of a run that never was."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.lives = directory, 0

    def life(self, role: str, *lines: list[Any]) -> None:
        self.lives += 1
        log = ProcessLog(self.directory, role, self.lives)
        for kind, *values in lines:
            log.write(kind, *values)

    def checked(self, **audit: Any) -> Account:
        flood = {"rows_put": 0, "rows_done": 0, "rows_live": 0, "rows_dropped": 0, "dropped": {}, "balanced": True}
        self.life("probe", ["audit", {"rollouts": {**flood, **audit}, "flood": flood}])
        return Account(read_logs(self.directory), drained=True)


@pytest.fixture
def logs(tmp_path: Path) -> Written:
    found = Written(tmp_path)
    found.life("producer-0", ["put?", "rollouts", 10, 2, 0], ["put", 10], ["put?", "rollouts", 12, 2, 0])
    return found


def worked(*numbers: int, step: int = -1, lease: int = 1) -> list[list[Any]]:
    return [["lease", lease, list(numbers)], ["ack?", lease], ["ack", lease, step]]


def test_what_was_put_and_done_once_is_right_and_an_unknown_put_may_not_have_been(logs: Written) -> None:
    logs.life("reward-0", *worked(10, 11))
    logs.life("trainer-0", *worked(10, 11, step=0))
    account = logs.checked(rows_put=2, rows_done=2)
    assert (account.violations, account.lost, account.duplicates, account.verified) == ([], 0, 0, 4)


def test_an_unknown_put_that_was_seen_must_be_done_whole(logs: Written) -> None:
    logs.life("reward-0", *worked(10, 11, 12))
    logs.life("trainer-0", *worked(10, 11, 12, step=0))
    account = logs.checked(rows_put=4, rows_done=4)
    assert account.lost == 2
    assert "task reward: rows lost, or counted as done though no worker acked them: 1, such as 13" in account.violations


def test_a_row_done_twice_is_a_duplicate(logs: Written) -> None:
    logs.life("reward-0", *worked(10, 11))
    logs.life("reward-1", *worked(11))
    logs.life("trainer-0", *worked(10, 11, step=0))
    account = logs.checked(rows_put=2, rows_done=2)
    assert account.duplicates == 1
    assert account.violations == ["task reward: rows done twice: 1, such as 11"]


def test_a_lost_row_is_found_and_an_ack_nobody_lived_to_see_is_none(logs: Written) -> None:
    logs.life("reward-0", *worked(10), ["lease", 2, [11]], ["ack?", 2])
    logs.life("trainer-0", *worked(10, step=0))
    account = logs.checked(rows_put=2, rows_done=2)
    assert account.violations == [
        "task train: rows lost, or counted as done though no worker acked them: 1, such as 11"
    ]


def test_a_rollback_undoes_later_steps_so_that_they_are_done_again_once(logs: Written) -> None:
    logs.life("reward-0", *worked(10, 11))
    logs.life("trainer-0", *worked(10, step=0), *worked(11, step=1, lease=2))
    logs.life("trainer-0", ["rollback", 0], *worked(11, step=1))
    assert logs.checked(rows_put=2, rows_done=2).violations == []


def test_a_step_that_was_rolled_back_and_not_done_again_is_lost(logs: Written) -> None:
    logs.life("reward-0", *worked(10, 11))
    logs.life("trainer-0", *worked(10, 11, step=1))
    logs.life("trainer-0", ["rollback", 0])
    assert logs.checked(rows_put=2, rows_done=2).lost == 2


def test_an_audit_that_disagrees_and_a_broken_promise_are_violations(logs: Written) -> None:
    logs.life("reward-0", *worked(10, 11), ["broken", "other bytes"])
    logs.life("trainer-0", *worked(10, 11, step=0))
    account = logs.checked(rows_put=3, rows_done=3)
    assert account.violations[0] == "reward-0, life 2: other bytes"
    assert "by the logs 2 rows were put" in account.violations[1]


def test_rows_of_a_frozen_producer_may_be_stale_and_no_others(tmp_path: Path) -> None:
    logs = Written(tmp_path)
    logs.life("trainer-0", ["advance?", 9])
    logs.life("producer-0", ["put?", "rollouts", 10, 2, 0], ["put", 10], ["put?", "rollouts", 20, 1, 5], ["put", 20])
    account = logs.checked(rows_put=3, rows_done=1, rows_dropped=2, dropped={"stale": 2})
    assert account.lost == 2, "row 20, of both tasks"
    assert account.stale == 2


def test_the_torn_last_line_of_a_killed_process_says_nothing(tmp_path: Path) -> None:
    ProcessLog(tmp_path, "reward-0", 1).write("ack?", 1)
    path = tmp_path / "reward-0.000001.jsonl"
    path.write_bytes(path.read_bytes() + b'["ack",12')
    assert [line[0] for line in ReadLog(path).lines] == ["ack?"]


# ---------------------------------------------------------------- times


def written(tmp_path: Path, role: str, life: int, *lines: list[Any]) -> None:
    (tmp_path / f"{role}.{life:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_recovery_ends_with_the_first_call_that_began_after_the_death(tmp_path: Path) -> None:
    written(tmp_path, "probe", 1, ["call", 10.4, 9.9], ["call", 10.6, 10.5])
    (found,) = of_server([Fault(10.0, "kill", "server")], read_logs(tmp_path)).samples
    assert found == pytest.approx(0.6)


def test_rows_are_leased_again_by_another_worker_of_the_task(tmp_path: Path) -> None:
    written(tmp_path, "reward-0", 1, ["lease", 1.0, 1, [5]], ["ack", 1.1, 1, -1], ["lease", 1.2, 2, [6]])
    written(tmp_path, "trainer-0", 2, ["lease", 2.1, 3, [6]])
    written(tmp_path, "reward-1", 3, ["lease", 2.2, 4, [5]], ["lease", 2.5, 5, [6]])
    kills = [Fault(2.0, "kill", "reward-0"), Fault(1.5, "freeze", "reward-2", 3.0)]
    (found,) = of_leases(kills, read_logs(tmp_path), remote=False).samples
    assert found == pytest.approx(0.5)


def test_a_death_that_nobody_unhurt_could_take_over_is_no_sample(tmp_path: Path) -> None:
    written(tmp_path, "drainer-0", 1, ["lease", 1.2, 2, [6]])
    written(tmp_path, "drainer-1", 3, ["lease", 4.0, 5, [6]])
    kills = [Fault(2.0, "kill", "drainer-0"), Fault(1.5, "fill", "drainer", 2.0)]
    assert of_leases(kills, read_logs(tmp_path), remote=False).samples == []


# ---------------------------------------------------------------- real runs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("least_s", sizes(6, 20))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--seed", "5"), marks=pytest.mark.long),
        pytest.param(("--seed", "7", "--spill"), marks=pytest.mark.long),
        ("--seed", "6", "--tcp", "--durability", "disk"),
    ],
)
def test_a_short_run_keeps_every_promise(options: tuple[str, ...], least_s: int, tmp_path: Path) -> None:
    """How many rows are leased in a time depends on what else the machine does: a run without any is followed by a
    longer one."""
    for seconds in (least_s, 4 * least_s, 10 * least_s):
        found = reported(seconds, options, tmp_path / "report.json")
        if found["verified"] and found.get("spilled_blocks", 1):
            return
    pytest.fail("no run has leased a row, or spilled one")


def reported(seconds: int, options: tuple[str, ...], out: Path) -> dict[str, float]:
    """Run it, check what does not depend on time, and return its figures."""
    run = command("--seconds", str(seconds), "--out", str(out), *options)
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = load_record(out)
    found = {result.name: result.median for result in record.results}
    assert record.details["kept"]
    assert found["violations"] == 0
    assert found["faults_of_processes"] >= seconds
    assert f"again                 python -m tests.chaos --seconds {seconds} {' '.join(options[:2])}" in ended.stdout
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, *only_long(signal.SIGTERM)])
def test_an_interrupted_run_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    run = subprocess.Popen(
        command("--seconds", "60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert run.stdout is not None
    assert any("faults" in line for line in run.stdout)  # after the load of a busy machine, if there is one
    (directory,) = tmp_path.glob("tq-chaos-*")
    arena = (directory / "state" / "arena").readlink().parent
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert list(tmp_path.iterdir()) == []
    assert not arena.exists()
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if _names(pid, str(directory))]


def _names(process: Path, text: str) -> bool:
    try:
        return text in (process / "cmdline").read_text()
    except OSError:
        return False


def test_the_end_of_a_run_removes_no_directory_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level ``disk`` the link to the arena is relative: its directory was taken for that in which chaos was
    started."""
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "state" / "arena").symlink_to("arena-1")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "precious").touch()
    monkeypatch.chdir(tmp_path / "here")
    run = settings(1.0, 1, "disk", tcp=False)
    monkeypatch.setattr(ServerUnderTest, "start", lambda self: None)
    server = ServerUnderTest(tmp_path / "run", run, None)
    server.process = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE, start_new_session=True)
    server.remove()
    assert (tmp_path / "here" / "precious").exists()
    assert (tmp_path / "run" / "state" / "arena").is_symlink()


def test_event_logs_are_read_when_all_processes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an early end they go on putting and leasing: rows would seem to be nobody's, since a log is read before
    they are put."""
    order: list[str] = []

    class Brief:
        faults = violations = ()

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            order.append("gone")

        def go(self) -> None:
            order.append("ran")

    monkeypatch.setattr(run_module, "Chaos", Brief)
    monkeypatch.setattr(run_module, "read_logs", lambda _: order.append("read"))
    monkeypatch.setattr(run_module, "report", lambda *_: None)
    run_module.chaos(settings(1.0, 0, None, tcp=False), lambda _: None)
    assert order == ["ran", "gone", "read"]
