"""Kills each process of a job at random moments, resumes, and checks that nothing is lost or doubled.

    python -m tests.workflows.job.kill_matrix --runs 20 --seed 1
    python -m tests.workflows.job.kill_matrix --runs 20 --seed 1 --kind ppo

Each run of the short job (`tests.workflows.job.short_run`) loses several processes by SIGKILL: a task's, the serving process, its supervisor, the run itself ("run") or
all at once ("all"). Over the runs each is killed equally often. The run is resumed whenever it is gone. A row of the table says what was killed when,
and how the run ended:

- what, step, phase: the process, the steps reported before its death, and what it did: ``works`` (it holds rows), ``waits`` (for rows
  or room), or ``starts`` (neither: it loads, or is between two requests).
- put, done, dropped: rows; all 32 must be done, and none dropped.
- trained: places of the data that the last checkpoint counts as trained, of those that its steps took: equal if each was trained once.
- weights: whether the final policy is that of an undisturbed run, bit for bit. For ppo they may differ: the critic keeps what it learned from steps that
  the policy takes back.
- left: files and shared memory of the queue that are left; none.

Exit code 1 if a run is not as it must be. It takes about a minute a run on one core.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
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

KILLS = 3
"""Processes that one run loses, one after the other."""
WITHIN_S = 0.8
"""A kill comes at a random moment within so long after a random step."""
RUN_S = 420.0
"""Longest run, with its kills and resumes."""
SERVING = ("server", "supervisor", "run", "all")


@dataclass
class Kill:
    """One planned death: of what, after how many steps, how long later; and what was seen."""

    what: str
    after: int
    later_s: float
    step: int = -1
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.what}@{self.step} {self.phase}" if self.phase else f"{self.what} (not killed)"


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


def plans(wanted: list[str], runs: int, seed: int) -> list[list[Kill]]:
    """What to kill in each run: each target equally often, at random moments."""
    draws = random.Random(seed)
    chosen: list[str] = []
    while len(chosen) < runs * KILLS:
        chosen += draws.sample(wanted, len(wanted))
    planned = [Kill(what, draws.randrange(STEPS), draws.uniform(0, WITHIN_S)) for what in chosen[: runs * KILLS]]
    return [sorted(planned[at::runs], key=lambda kill: kill.after) for at in range(runs)]


class KilledRun:
    """One run in `folder`, which is started again until it is finished."""

    def __init__(self, place: Path, folder: Path, kills: list[Kill]) -> None:
        self.place, self.folder, self.kills = place, folder, kills
        self.process: subprocess.Popen[str] = self._start()
        self.deadline = time.monotonic() + RUN_S

    def _start(self) -> subprocess.Popen[str]:
        resume = ["--resume"] if (self.folder / "run.json").exists() else []
        return train(self.place, "job.toml", "--out", str(self.folder), "--json", *resume)

    def end(self) -> dict:
        """Kill as planned, and return the summary. Raises `AssertionError` for a run that fails or hangs."""
        try:
            for kill in self.kills:
                if not self._is_at(kill):
                    break
                self._kill(kill)
            return finished(self.process)
        finally:
            for pid in [*descendants(self.process.pid), self.process.pid]:
                _kill(pid)
            self.process.communicate(timeout=60)

    @property
    def steps(self) -> int:
        path = self.folder / "steps.jsonl"
        return max((line["step"] for line in lines(path)), default=0)

    def _is_at(self, kill: Kill) -> bool:
        """Wait for the moment of a kill; False if the run ends before."""
        while self.steps < kill.after:
            assert time.monotonic() < self.deadline, f"the run hangs after step {self.steps}"
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                return False
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(kill.later_s)
            return False
        return True

    def _kill(self, kill: Kill) -> None:
        pid = pid_of(self.process.pid, "run" if kill.what == "all" else kill.what)
        if pid is None:
            return
        kill.step, kill.phase = self.steps, self._phase(kill.what)
        for each in [*(descendants(pid) if kill.what == "all" else ()), pid]:
            _kill(each)
        if kill.what in ("run", "all"):
            self.process.communicate(timeout=60)
            self.process = self._start()

    def _phase(self, what: str) -> str:
        if what in SERVING:
            return "runs"
        supervisor = pid_of(self.process.pid, "supervisor")
        words = Path(f"/proc/{supervisor}/cmdline").read_text().split("\0") if supervisor else []
        if "--address" not in words:
            return "starts"
        try:
            with tq.connect(words[words.index("--address") + 1], timeout_s=5, label="kill matrix") as queue:
                stats, label = queue.stats(), f"{what}-0"
                task = stats["tables"].get(names.TABLE, {}).get("tasks", {}).get(what, {})
                if label in str(task.get("holders")):
                    return "works"
                return "waits" if label in str(stats["waiting"]) else "starts"
        except TransferQueueError:
            return "without server"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def result_of(place: Path, folder: Path, kills: list[Kill], wanted: bytes | None) -> RunResult:
    """Run once with these kills, and compare. wanted: final weights that the run must have."""
    result = RunResult(kills)
    began = time.monotonic()
    try:
        summary = KilledRun(place, folder, kills).end()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        result.problems.append(str(error)[-600:])
        return result
    finally:
        result.seconds = time.monotonic() - began
    result.starts, result.put, result.done = summary["starts"], summary["rows_put"], summary["rows_done"]
    result.dropped = sum(summary["rows_dropped"].values())
    result.left = len(list(folder.glob("state/**/*")))
    _check_trained(result, folder)
    if (result.put, result.done, result.dropped) != (ROWS, ROWS, 0):
        result.problems.append(f"rows: {result.put} put, {result.done} done, dropped {summary['rows_dropped']}")
    if wanted is not None:
        result.weights = "equal" if final_weights(folder) == wanted else "differ"
        if result.weights == "differ":
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
    parser.add_argument("--first", type=int, default=0, help="the first of the runs, to go on or to repeat one")
    options = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as temporary:
        place = make_place(Path(temporary), options.kind)
        finished(train(place, "job.toml", "--out", "whole", "--json"))
        wanted = final_weights(place / "whole") if options.kind == "grpo" else None
        planned = plans(targets(place), options.runs, options.seed)
        print(f"kind={options.kind} runs={options.runs} seed={options.seed} kills={KILLS}", flush=True)
        print("| run | killed (what@step phase) | starts | put | done | dropped | trained | weights | left | s |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for number in range(options.first, options.runs):
            result = result_of(place, place / f"run-{number}", planned[number], wanted)
            print(_row(number, result), flush=True)
            for problem in result.problems:
                print(f"run {number}: {problem}", flush=True)
            failed += bool(result.problems)
    killed = [kill for kills in planned for kill in kills if kill.phase]
    print(f"{options.runs - options.first} runs, {len(killed)} kills, {failed} runs not as they must be")
    return 1 if failed else 0


def _row(number: int, result: RunResult) -> str:
    kills = ", ".join(map(str, result.kills))
    figures = (result.starts, result.put, result.done, result.dropped, result.trained, result.weights, result.left)
    return f"| {number} | {kills} | {' | '.join(map(str, figures))} | {result.seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
