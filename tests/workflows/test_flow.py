"""The supervisor: flows end when their work is done, survive killed processes, and leave none behind."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import transferqueue as tq
from transferqueue.workflows.flow import flow as flow_module
from transferqueue.workflows.flow.events import RESTART, START, Event, Figures, TimeSpan
from transferqueue.workflows.flow.flow import RESTARTS_MAX, Flow, StageFailed
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Stage

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HERE = "tests.workflows.flow_stages"
GENEROUS_S = 60.0
DOUBLE = tq.Task("double", needs=["x"], gives=["y"], retry=tq.Retry(first_s=0.01))


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect(label="supervisor") as queue:
        queue.create_table(
            "t",
            fields=[tq.Field("x", "int64"), tq.Field("y", "int64")],
            tasks=[DOUBLE],
            pacing=tq.Pacing("double", 8),
            retention=tq.Manual(),
        )
        yield queue


def jobs(factory: str, *, total: int = 32, marks: Path | None = None) -> list[StageJob]:
    settings = {"total": total, "marks": str(marks or "")}
    stage = Stage(task=DOUBLE, rows=4, at_least=1, failures_max=3)
    return [
        StageJob(name="numbers", table="t", factory=f"{HERE}:numbers", settings=settings),
        StageJob(name="double", table="t", factory=f"{HERE}:{factory}", stage=stage, settings=settings),
    ]


def run(queue: tq.Queue, jobs: list[StageJob], directory: Path) -> tuple[list[tuple[str, Event]], dict[str, int]]:
    """Run to the end; what was told, and the pids at the start."""
    told: list[tuple[str, Event]] = []
    with Flow(queue, jobs, directory=directory, observe=lambda label, event: told.append((label, event))) as flow:
        pids = flow.pids()
        flow.run()
    return told, pids


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet (Z) has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Pids that still live after ``timeout_s``; each death is waited for, not looked for."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            death = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([death], [], [], max(0.0, deadline - time.monotonic()))
        os.close(death)
    return [pid for pid in pids if not gone(pid)]


def figures(told: list[tuple[str, Event]], kind: str) -> list[Figures]:
    return [event for _, event in told if isinstance(event, Figures) and event.kind == kind]


def test_a_flow_ends_when_all_rows_are_done(queue: tq.Queue, tmp_path: Path) -> None:
    told, pids = run(queue, jobs("double"), tmp_path)
    found = queue.table("t").read(fields=["x", "y"])
    assert sorted(found["y"].numpy().tolist()) == [2 * x for x in range(32)]
    assert len(figures(told, "finished")) == 1
    assert set(pids) == {"numbers-0", "double-0"}
    assert all(map(gone, pids.values()))
    assert len(set(map(os.path.basename, map(str, tmp_path.glob("*.log"))))) == 2


def test_a_loop_leases_rows_itself_and_knows_the_folder_of_the_run(queue: tq.Queue, tmp_path: Path) -> None:
    source, _ = jobs("double")
    loop = StageJob(name="double", table="t", factory=f"{HERE}:loop", loop=True, directory=str(tmp_path))
    told, _ = run(queue, [source, loop], tmp_path)
    assert sorted(queue.table("t").read()["y"].numpy().tolist()) == [2 * x for x in range(32)]
    assert [event.values["directory"] for event in figures(told, "finished")] == [str(tmp_path)]


def test_rows_of_a_killed_process_are_done_by_its_next_life(queue: tq.Queue, tmp_path: Path) -> None:
    killed: list[int] = []
    flow = Flow(
        queue,
        jobs("hangs_in_its_first_life", marks=tmp_path),
        directory=tmp_path,
        observe=lambda label, event: kill(label) if getattr(event, "kind", "") == "holding" else None,
    )

    def kill(label: str) -> None:
        killed.append(flow.pids()[label])
        os.kill(killed[-1], signal.SIGKILL)

    with flow:
        flow.run()
    assert len(killed) == 1
    assert sorted(queue.table("t").read()["y"].numpy().tolist()) == [2 * x for x in range(32)]


def test_processes_that_belong_together_die_together_and_start_together(queue: tq.Queue, tmp_path: Path) -> None:
    """`prepare` is called when none of them lives."""
    queue.create_table("u", fields=[tq.Field("x", "int64"), tq.Field("y", "int64")], tasks=[DOUBLE])
    source, double = jobs("hangs_in_its_first_life", marks=tmp_path)
    waits = msgspec.structs.replace(double, name="waits", table="u", factory=f"{HERE}:double")
    pair = [msgspec.structs.replace(job, together="pair") for job in (double, waits)]
    lives: list[dict[str, int]] = []
    living: list[list[int]] = []

    def prepare(together: str) -> None:
        assert together == "pair"
        living.append([pid for life in lives for label, pid in life.items() if label != "numbers-0" and not gone(pid)])

    def hear(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == "holding":
            lives.append(flow.pids())
            os.kill(lives[0]["waits-0"], signal.SIGKILL)
        if label == "double-0" and len(lives) == 1 and not gone(flow.pids()[label]) and len(living) == 2:
            lives.append(flow.pids())
            queue.table("u").seal()

    flow = Flow(queue, [source, *pair], directory=tmp_path, observe=hear, prepare=prepare)
    with flow:
        flow.run()
    assert living == [[], []]
    assert lives[0]["double-0"] != lives[1]["double-0"]
    assert lives[0]["numbers-0"] == lives[1].get("numbers-0", lives[0]["numbers-0"])
    assert sorted(queue.table("t").read()["y"].numpy().tolist()) == [2 * x for x in range(32)]


def test_a_generator_killed_in_the_middle_of_a_batch_loses_nothing(queue: tq.Queue, tmp_path: Path) -> None:
    """What it had given stays given, the rest of its batch comes again, and every row is done once."""
    told: list[tuple[str, Event]] = []
    flow = Flow(
        queue,
        jobs("hangs_in_the_middle_of_its_first_batch", marks=tmp_path),
        directory=tmp_path,
        observe=lambda label, event: hear(label, event),
    )

    def hear(label: str, event: Event) -> None:
        told.append((label, event))
        if isinstance(event, Figures) and event.kind == "unfinished":
            os.kill(flow.pids()[label], signal.SIGKILL)

    with flow:
        flow.run()
    (unfinished,) = (event.values["numbers"] for event in figures(told, "unfinished"))
    given = [number for event in figures(told, "batch") for number in event.values["numbers"]]
    assert sorted(given) == sorted([*range(32), *unfinished])
    found = queue.table("t").read(fields=["x", "y"])
    assert sorted(zip(found["x"].numpy().tolist(), found["y"].numpy().tolist(), strict=True)) == [
        (x, 2 * x) for x in range(32)
    ]
    audit = queue.table("t").audit()
    assert (audit.rows_done, dict(audit.dropped)) == (32, {})


def test_a_stage_that_raises_ends_the_flow_with_its_traceback(queue: tq.Queue, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r'stage "double-0".*RuntimeError: cannot double 4 rows') as failed:
        run(queue, jobs("raises"), tmp_path)
    assert failed.value.stage == "double-0"
    assert "flow_stages.py" in failed.value.last_words


def test_a_process_that_keeps_dying_ends_the_flow(queue: tq.Queue, tmp_path: Path) -> None:
    told: list[Event] = []
    with (
        pytest.raises(StageFailed, match=r'stage "double-0" was killed by SIGKILL, after 2 restarts without work'),
        Flow(queue, jobs("dies"), directory=tmp_path, observe=lambda label, event: told.append(event)) as flow,
    ):
        flow.run()
    assert [event.kind for event in told if isinstance(event, Figures)] == ["dying", RESTART] * 2 + ["dying"]
    assert flow.pids() == {}


def test_a_process_that_is_killed_while_it_waits_is_started_again_each_time(queue: tq.Queue, tmp_path: Path) -> None:
    """It has no batch that could be the cause: five kills, though the flow may restart it twice."""
    table = queue.create_table("u", fields=[tq.Field("x", "int64"), tq.Field("y", "int64")], tasks=[DOUBLE])
    starts: list[str] = []

    def observe(label: str, event: Event) -> None:
        if not isinstance(event, TimeSpan) or event.name != START:
            return
        starts.append(label)
        if len(starts) <= 5:
            os.kill(flow.pids()[label], signal.SIGKILL)
        else:
            table.put(x=[1, 2])
            table.seal()

    waits = msgspec.structs.replace(jobs("double")[1], table="u")
    with Flow(queue, [waits], directory=tmp_path, observe=observe) as flow:
        flow.run()
    assert starts == ["double-0"] * 6
    assert table.audit().rows_done == 2


def test_a_process_that_works_between_its_deaths_is_started_again_each_time(queue: tq.Queue, tmp_path: Path) -> None:
    """A preempted worker is no broken one: it dies after each batch, eight times, and the flow may restart it twice."""
    told, _ = run(queue, jobs("dies_after_each_batch"), tmp_path)
    assert len(figures(told, "life")) > 2 + RESTARTS_MAX
    assert sorted(queue.table("t").read()["y"].numpy().tolist()) == [2 * x for x in range(32)]


def test_processes_that_work_only_together_are_started_again_together(queue: tq.Queue, tmp_path: Path) -> None:
    """The first waits for ever when the second is killed: it is ended, and both begin again."""
    job = StageJob(
        name="pair",
        table="t",
        factory=f"{HERE}:works_only_together",
        settings={"marks": str(tmp_path)},
        loop=True,
        together="double",
    )
    told, _ = run(queue, [job, msgspec.structs.replace(job, instance=1)], tmp_path / "logs")
    lives = [event.values for event in figures(told, "life")]
    assert {(each["instance"], each["life"]) for each in lives} >= {(0, 1), (1, 0), (1, 1)}


def test_a_stage_that_cannot_start_ends_the_flow_with_what_it_wrote(queue: tq.Queue, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="RuntimeError: no such model"):
        run(queue, jobs("cannot_start"), tmp_path)


def test_an_engine_that_dies_twice_of_the_same_exception_ends_the_flow_with_the_first(
    queue: tq.Queue, tmp_path: Path
) -> None:
    """Its restart is told with the cause, and the same cause again ends the flow, though it may restart five times."""
    told: list[Event] = []
    with (
        pytest.raises(
            StageFailed,
            match=r"ended with exit code 1, after 1 restarts without work in between, twice in a row of the same "
            r"exception, so it is not started again; its first exception was OSError: no offset, its last words were "
            r"TypeError: 'NoneType' object is not callable; see .*double-0.log",
        ),
        Flow(
            queue,
            jobs("engine_dies")[1:],
            directory=tmp_path,
            observe=lambda label, event: told.append(event),
            restarts_max=5,
        ) as flow,
    ):
        flow.run()
    (restart,) = [event.values for event in told if isinstance(event, Figures) and event.kind == RESTART]
    assert restart["label"] == "double-0"
    assert restart["text"].startswith("double-0 ended with exit code 1; its first exception was OSError: no offset, ")
    assert restart["next"].startswith("it is started again, restart 1 of 5 without work in between; see ")


@pytest.mark.parametrize(
    ("variable", "given", "threads"), [(None, {}, 2), ("3", {}, 3), ("3", {"OMP_NUM_THREADS": "5"}, 5)]
)
def test_threads_of_a_process_are_its_share_of_the_cores_unless_they_are_set(
    queue: tq.Queue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    given: dict[str, str],
    threads: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    flow = Flow(queue, jobs("double"), directory=tmp_path, observe=lambda *_: None, environment=given)
    assert flow._environment["OMP_NUM_THREADS"] == str(threads)


def test_a_server_that_is_away_is_no_exception_of_the_process() -> None:
    assert flow_module._is_of_peer("transferqueue.errors.Disconnected: the server has gone")
    assert not flow_module._is_of_peer("RuntimeError: no such model")


def test_ctrl_c_that_another_thread_receives_ends_the_wait(queue: tq.Queue, tmp_path: Path) -> None:
    interrupted: list[Event] = []

    def interrupt(label: str, event: Event) -> None:  # in the supervising thread, which the system may choose
        if not interrupted:  # a second one would interrupt the end of the flow
            interrupted.append(event)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    flow = Flow(queue, jobs("hangs"), directory=tmp_path, observe=interrupt)

    def work() -> None:
        with flow:
            flow.run()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert flow.pids() == {}


def test_a_stage_that_refuses_a_setting_is_not_started_again(queue: tq.Queue, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"exit code 65; its last words were .*UsageError: slots=0: give at least 1"):
        run(queue, jobs("refuses"), tmp_path)


def test_words_for_people_do_not_begin_with_the_name_of_a_class(queue: tq.Queue, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"its last words were UsageError: slots=0") as failed:
        run(queue, jobs("refuses"), tmp_path)
    assert "StageFailedInProcess" not in failed.value.last_words


def test_what_a_stage_started_ends_with_it(queue: tq.Queue, tmp_path: Path) -> None:
    told, _ = run(queue, jobs("leaves_a_child"), tmp_path)
    assert wait_gone([figures(told, "child")[0].values["pid"]], 2.0) == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda table: table.lease("check", rows=4, timeout_s=GENEROUS_S),
        lambda table: table.put(x=list(range(64)), timeout_s=GENEROUS_S),
        lambda table: next(table.loader("check", rows=4, timeout_s=GENEROUS_S)),
    ],
    ids=["lease", "put", "loader"],
)
def test_whoever_waits_for_a_stage_that_cannot_work_is_told_without_run(
    tmp_path: Path, wait: Callable[[tq.Table], object]
) -> None:
    """The program waits for what only the stage gives; the stage dies, and the wait ends with the reason and not with
    its deadline."""
    with tq.connect() as queue:
        check = tq.Task("check", needs=["y"])
        fields = [tq.Field("x", "int64"), tq.Field("y", "int64")]
        table = queue.create_table("t", fields=fields, tasks=[DOUBLE, check], limits=tq.Limits(rows=64))
        table.put(x=[0, 1, 2, 3])
        flow = Flow(
            queue, jobs("cannot_start")[1:], directory=tmp_path, observe=lambda label, event: None, restarts_max=0
        )
        with (
            pytest.raises(
                StageFailed, match=r'"double-0" ended with exit code 1; .*RuntimeError: no such model'
            ) as failed,
            flow,
        ):
            wait(table)
        assert failed.value.stage == "double-0"
        assert "flow_stages.py" in failed.value.last_words
        with pytest.raises(tq.DeadlineExceeded):  # the flow is left, and its queue waits as ever
            table.lease("check", rows=4, timeout_s=0.01)
        assert table.audit().balanced


def test_a_stage_is_started_again_while_the_program_does_something_else(queue: tq.Queue, tmp_path: Path) -> None:
    flow = Flow(
        queue,
        jobs("hangs_in_its_first_life", marks=tmp_path),
        directory=tmp_path,
        observe=lambda label, event: (
            os.kill(flow.pids()[label], signal.SIGKILL) if getattr(event, "kind", "") == "holding" else None
        ),
    )
    with flow:
        for pid in flow.pids().values():
            wait_gone([pid], GENEROUS_S)
        flow.run()
    assert sorted(queue.table("t").read()["y"].numpy().tolist()) == [2 * x for x in range(32)]


def test_leaving_a_flow_that_has_failed_says_so(queue: tq.Queue, tmp_path: Path) -> None:
    flow = Flow(queue, jobs("cannot_start"), directory=tmp_path, observe=lambda label, event: None, restarts_max=0)
    with pytest.raises(StageFailed, match="RuntimeError: no such model"), flow:
        assert wait_gone(list(flow.pids().values()), GENEROUS_S) == []
    assert flow.pids() == {}


def test_an_observer_that_raises_ends_the_flow_with_its_error(queue: tq.Queue, tmp_path: Path) -> None:
    def hear(label: str, event: Event) -> None:
        raise RuntimeError("no disk for figures")

    flow = Flow(queue, jobs("double"), directory=tmp_path, observe=hear)
    with pytest.raises(RuntimeError, match="no disk"), flow:
        flow.run()
    assert flow.pids() == {}


SUPERVISOR = """
import sys
from pathlib import Path
import transferqueue as tq
from tests.workflows.test_flow import DOUBLE, jobs
from transferqueue.workflows.flow import Flow

directory = Path(sys.argv[1])
with tq.connect() as queue:
    queue.create_table("t", fields=[tq.Field("x", "int64")], tasks=[DOUBLE], pacing=tq.Pacing("double", 8))
    def told(label, event):
        if getattr(event, "kind", "") == "holding":
            print("holding", *flow.pids().values(), queue.address, flush=True)
    with Flow(queue, jobs("hangs_in_its_first_life", marks=directory), directory=directory,
              observe=told) as flow:
        flow.run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_its_supervisor(number: signal.Signals, tmp_path: Path) -> None:
    """Whether it is interrupted or killed, all processes have gone within 3 s."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert supervisor.stdout is not None
    _, *pids, address = supervisor.stdout.readline().split()
    assert len(pids) >= 1
    supervisor.send_signal(number)
    assert wait_gone([*map(int, pids), supervisor.pid], 3.0) == []
    supervisor.communicate()
    if number == signal.SIGINT:
        assert not Path(address.removeprefix("ipc://")).exists()
