"""Kills each process of a job at each of its phases, resumes, and checks that nothing is lost or doubled.

    python -m tests.workflows.job.kill_matrix --runs 20 --seed 1
    python -m tests.workflows.job.kill_matrix --runs 10 --seed 1 --kind ppo --kills 4

Each run of the short job (`tests.workflows.job.short_run`) loses `--kills` processes by SIGKILL: a task's, the serving process, its supervisor, the run itself ("run") or
all at once ("all"). A kill names a process and a phase, and comes when the process is seen in that phase after a random step: ``starts`` (it has
neither waited nor held rows yet), ``works`` (it holds rows), ``waits`` (for rows, room or weights); the queue's own processes, the run and all at once have
``starts`` and ``runs``. A phase that the run did not come to again is left to a later run, so that all are met. The run is resumed whenever it is gone. A row
of the table says what was killed after which step, and how the run ended:

- put, done, dropped: rows; all 32 must be done, and none dropped.
- trained: places of the data that the last checkpoint counts as trained, of those that its steps took: equal if each was trained once.
- weights: whether the final policy is that of an undisturbed run, bit for bit. For ppo they may differ (`short_run.JOBS`).
- left: files and shared memory of the queue that are left; none.

Exit code 1 if a run is not as it must be, or if a process was not met in one of its phases though there were kills enough. A run takes twenty seconds of one
core, most of it for importing torch and transformers in two processes (three where the evaluation may be killed: the others do without); a kill of one of those takes six
seconds more, one of all as much as a run.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import transferqueue as tq
from tests.workflows.job.short_run import (
    JOBS,
    ROWS,
    STEPS,
    descendants,
    final_weights,
    finished,
    lines,
    make_place,
    pid_of,
    train,
)
from transferqueue.errors import TransferQueueError
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import task_names
from transferqueue.workflows.job.settings.read import job_from_file
from transferqueue.workflows.job.training.checkpoint import Checkpoints, checkpoint_state

STARTS, WORKS, WAITS, RUNS = "starts", "works", "waits", "runs"
PHASES = (STARTS, WORKS, WAITS)
"""Of a task's process."""
SERVING = ("server", "supervisor", "run", "all")
WATCH_S = 0.01
"""Time between two looks at a run from outside: a phase may be over in a tenth of a second."""
LATER_S = {STARTS: 0.3, RUNS: 1.0}
"""A kill in these phases comes at a random moment within so long."""
LEAST_S = 300.0
RUNS_LONGEST = 10
"""A run that takes as many times as long as the undisturbed one hangs."""


@dataclass
class Kill:
    """One planned death: of what, in which phase, after how many steps, how long after that; and after which step it came, -1 if it did not."""

    what: str
    phase: str
    after: int
    later_s: float
    step: int = -1

    def __str__(self) -> str:
        return f"{self.what} {self.phase} @{self.step}" if self.step >= 0 else f"{self.what} {self.phase} (not met)"


class Plan:
    """Which kills the next run gets. Every process in every phase comes as often as every other; what a run did not meet comes again in a later one."""

    def __init__(self, targets: list[str], kills: int, seed: int) -> None:
        self.wanted = [(what, phase) for what in targets for phase in phases_of(what)]
        self.met: Counter[tuple[str, str]] = Counter()
        self._kills, self._draws, self._lock = kills, random.Random(seed), threading.Lock()
        self._left: deque[tuple[str, str]] = deque()

    def next(self) -> list[Kill]:
        """Return the kills of one run, in their order: those of processes that start come first."""
        with self._lock:
            kills = [self._kill(*pair) for pair in islice(self._pairs(), self._kills)]
        return sorted(kills, key=lambda kill: kill.after)

    def count(self, kills: list[Kill]) -> None:
        """Note which kills came."""
        with self._lock:
            self.met.update((kill.what, kill.phase) for kill in kills if kill.step >= 0)
            self._left.extendleft((kill.what, kill.phase) for kill in kills if kill.step < 0)

    def unmet(self) -> list[str]:
        """Processes with the phases in which none was killed."""
        return [f"{what} {phase}" for what, phase in self.wanted if not self.met[what, phase]]

    def _pairs(self) -> Iterator[tuple[str, str]]:
        while True:
            if not self._left:
                self._left.extend(self._draws.sample(self.wanted, len(self.wanted)))
            yield self._left.popleft()

    def _kill(self, what: str, phase: str) -> Kill:
        after = 0 if phase == STARTS else self._draws.randrange(STEPS - 1)
        return Kill(what, phase, after, self._draws.uniform(0, LATER_S.get(phase, 0.0)))


def phases_of(what: str) -> tuple[str, ...]:
    """The phases of a process."""
    return (STARTS, RUNS) if what in SERVING else PHASES


@dataclass
class RunResult:
    """How a run ended. problems: what is not as it must be."""

    kills: list[Kill]
    seconds: float = 0.0
    starts: int = 0
    put: int = 0
    done: int = 0
    dropped: int = 0
    trained: str = ""
    weights: str = ""
    left: int = 0
    problems: list[str] = field(default_factory=list)


def targets(place: Path) -> list[str]:
    """What can be killed in the job of `place`."""
    tasks = task_names(job_from_file(place / "job.toml"))
    return [names.PROMPTS, *tasks, names.EVALUATE, *SERVING]


class KilledRun:
    """One run in `folder`, which is started again until it is finished. longest_s: after that it hangs."""

    def __init__(self, place: Path, folder: Path, kills: list[Kill], longest_s: float) -> None:
        self.place, self.folder, self.kills = place, folder, kills
        self.process: subprocess.Popen[str] = self._start()
        self.longest_s, self.deadline = longest_s, time.monotonic() + longest_s
        self._queue: tq.Queue | None = None
        self._begun: set[int] = set()
        """Processes that have waited or held rows."""

    def _start(self) -> subprocess.Popen[str]:
        if (self.folder / "job.toml").exists():
            return train(self.place, "job.toml", "--out", str(self.folder), "--json", "--resume")
        evaluates = any(kill.what in (names.EVALUATE, "run", "all") for kill in self.kills)
        words = () if evaluates else ("--set", 'evaluation.path=""')
        return train(self.place, "job.toml", "--out", str(self.folder), "--json", *words)

    def end(self) -> dict:
        """Kill as planned, and return the summary. Raises `AssertionError` for a run that fails or hangs."""
        try:
            for kill in self.kills:
                pid = self._wait_for(kill)
                if pid is not None:
                    self._kill(kill, pid)
            try:
                return finished(self.process, self.longest_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the run hangs after step {self.steps}: {self._waiting()}") from None
        finally:
            self._forget()
            for pid in [*descendants(self.process.pid), self.process.pid]:
                _kill(pid)
            self.process.communicate(timeout=60)

    @property
    def steps(self) -> int:
        return max((line["step"] for line in lines(self.folder / "steps.jsonl")), default=0)

    def _wait_for(self, kill: Kill) -> int | None:
        """Wait until the process of a kill is in its phase, and return its pid; None if the run ends before, or it has started already."""
        ready_at = None
        while True:
            assert time.monotonic() < self.deadline, f"the run hangs after step {self.steps}: {self._waiting()}"
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(WATCH_S)
                return None
            pid = pid_of(self.process.pid, "run" if kill.what == "all" else kill.what)
            if self.steps < kill.after or pid is None:
                continue
            if (phase := self._phase(kill, pid)) != kill.phase:
                if kill.phase == STARTS and phase in (RUNS, WORKS, WAITS):
                    return None
                ready_at = None
                continue
            ready_at = ready_at or time.monotonic() + kill.later_s
            if time.monotonic() >= ready_at:
                return pid

    def _kill(self, kill: Kill, pid: int) -> None:
        kill.step = self.steps
        for each in [*(descendants(pid) if kill.what == "all" else ()), pid]:
            _kill(each)
        if kill.what in ("run", "all"):
            self._forget()
            self.process.communicate(timeout=60)
            self.process = self._start()

    # ------------------------------------------------------------ what a process does

    def _phase(self, kill: Kill, pid: int) -> str:
        stats = self._stats()
        if kill.what in SERVING:
            serves = stats is not None and names.TABLE in stats["tables"]
            return RUNS if serves and (kill.what in ("server", "supervisor") or self._has_tasks()) else STARTS
        if stats is None:
            return "without server"
        label = f"{kill.what}-0"
        if _holds(stats, label):
            self._begun.add(pid)
            return WORKS
        if any(wait["label"] == label for wait in stats["waiting"]):
            self._begun.add(pid)
            return WAITS
        return "between" if pid in self._begun else STARTS

    def _has_tasks(self) -> bool:
        return pid_of(self.process.pid, names.TRAIN) is not None

    def _stats(self) -> dict | None:
        """Ask the run's queue; None while it has none."""
        try:
            if self._queue is None:
                supervisor = pid_of(self.process.pid, "supervisor")
                words = Path(f"/proc/{supervisor}/cmdline").read_text().split("\0") if supervisor else []
                if "--address" not in words:
                    return None
                address = words[words.index("--address") + 1]
                if not Path(address.removeprefix("ipc://")).exists():
                    return None
                self._queue = tq.connect(address, timeout_s=2, label="kill matrix")
            return self._queue.stats()
        except (TransferQueueError, OSError):
            self._forget()
            return None

    def _forget(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            with suppress(TransferQueueError):
                queue.close()

    def _waiting(self) -> str:
        stats = self._stats()
        return "its server does not answer" if stats is None else str([wait["why"] for wait in stats["waiting"]])


def _holds(stats: dict, label: str) -> bool:
    """Whether the process `label` holds rows, or the source room for them."""
    tables = stats["tables"].values()
    if label.startswith(names.PROMPTS):
        return any(table["reserved"] for table in tables)
    return any(label in task["holders"] for table in tables for task in table["tasks"].values())


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def result_of(place: Path, folder: Path, kills: list[Kill], wanted: bytes, longest_s: float) -> RunResult:
    """Run once with these kills, and compare. wanted: final weights that the run must have."""
    result = RunResult(kills)
    began = time.monotonic()
    try:
        summary = KilledRun(place, folder, kills, longest_s).end()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        result.problems.append(str(error)[-1200:])
        return result
    finally:
        result.seconds = time.monotonic() - began
    result.starts, result.put, result.done = summary["starts"], summary["rows_put"], summary["rows_done"]
    result.dropped = sum(summary["rows_dropped"].values())
    result.left = len(list(folder.glob("state/**/*")))
    _check_trained(result, folder)
    if (result.put, result.done, result.dropped, result.left) != (ROWS, ROWS, 0, 0):
        result.problems.append(
            f"rows: {result.put} put, {result.done} done, dropped {summary['rows_dropped']}; {result.left} files left"
        )
    result.weights = "equal" if final_weights(folder) == wanted else "differ"
    if result.weights == "differ" and not (place / "critic").exists():  # see `short_run.JOBS`
        result.problems.append("the weights differ from those of the undisturbed run")
    return result


def _check_trained(result: RunResult, folder: Path) -> None:
    """Compare the places that the last checkpoint counts as trained with those that its steps took: neither a gap nor one twice."""
    oldest, finished_above = checkpoint_state(Checkpoints(folder / "checkpoints" / "train").path(STEPS)).position
    taken = STEPS * {step["rows"] for step in lines(folder / "steps.jsonl")}.pop()
    per_place = taken // oldest if oldest else 0
    result.trained = f"{oldest + len(finished_above)}/{taken // per_place if per_place else taken}"
    if finished_above or not per_place or oldest * per_place != ROWS:
        result.problems.append(f"trained: places below {oldest} and {finished_above}, of {ROWS} rows")


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix and print it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.workflows.job.kill_matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(JOBS), default="grpo")
    parser.add_argument("--kills", type=int, default=2, help="processes that one run loses, one after the other")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as temporary:
        return _matrix(make_place(Path(temporary), options.kind), options)


def _matrix(place: Path, options: argparse.Namespace) -> int:
    began = time.monotonic()
    finished(train(place, "job.toml", "--out", "whole", "--json"))
    whole_s = time.monotonic() - began
    longest_s = max(LEAST_S, RUNS_LONGEST * options.at_once * whole_s)
    wanted = final_weights(place / "whole")
    plan = Plan(targets(place), options.kills, options.seed)
    print(f"kind={options.kind} runs={options.runs} seed={options.seed}; undisturbed: {whole_s:.0f} s", flush=True)
    print("| run | killed (what, phase @ step) | starts | put | done | dropped | trained | weights | left | s |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)

    def run(number: int) -> bool:
        kills = plan.next()
        result = result_of(place, place / f"run-{number}", kills, wanted, longest_s)
        plan.count(kills)
        print(
            "\n".join([_row(number, result), *(f"run {number}: {problem}" for problem in result.problems)]), flush=True
        )
        return not result.problems

    with ThreadPoolExecutor(options.at_once) as pool:
        good = sum(pool.map(run, range(options.runs)))
    unmet = plan.unmet()
    print(
        f"{options.runs} runs, {plan.met.total()} kills, {options.runs - good} runs not as they must be; {_met(plan, unmet)}"
    )
    enough = options.runs * options.kills > len(plan.wanted)
    return 1 if good < options.runs or (enough and unmet) else 0


def _met(plan: Plan, unmet: list[str]) -> str:
    if unmet:
        return f"not met: {', '.join(unmet)}"
    return f"every process was killed in each of its phases, {len(plan.wanted)} in all"


def _row(number: int, result: RunResult) -> str:
    kills = ", ".join(map(str, result.kills))
    figures = (result.starts, result.put, result.done, result.dropped, result.trained, result.weights, result.left)
    return f"| {number} | {kills} | {' | '.join(map(str, figures))} | {result.seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
