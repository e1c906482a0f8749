"""Kills each process of a job at each of its phases, resumes, and checks that nothing is lost or doubled.

    python -m tests.workflows.job.kill_matrix --runs 20 --seed 1 --at-once 2
    python -m tests.workflows.job.kill_matrix --runs 10 --kind ppo --kills 4
    python -m tests.workflows.job.kill_matrix --runs 10 --kind async async-ppo async-agent

The last one is ten runs each of GRPO, PPO and an agent, asynchronous, with two generators and twenty SIGKILLs among
them, whose final weights must be equal bit for bit.

Each run of the short job (`tests.workflows.job.short_run`) loses `--kills` processes by SIGKILL: a task's, the serving
process, its supervisor, the run itself ("run") or all at once ("all"). A kill names a process and a phase
(`tests.workflows.job.killed_run`). A task's process stops at a point of its phase and waits to be killed, so that no
phase is too short to be met. Pairs of process and phase that were not met come first in the next run; if some are left
after `--runs`, more runs follow, at most `--extra`. The run is resumed whenever it is gone. A row of the table says
what was killed after which step, and how the run ended:

- put, done, dropped: rows; all 32 must be done, and none dropped; those with uses left at the end count as done.
- trained: places of the data that the last checkpoint counts as trained, of those that its steps took: equal if each
  was trained once.
- weights: whether the final policy, and the critic, are those of an undisturbed run, bit for bit.
- left: files and shared memory of the queue that are left; none.

Exit code 1 if a run is not as it must be, or if a process was not met in one of its phases (with `--sample`, the first
alone). A run takes twenty seconds of one core, most of it for importing torch and transformers in two processes (three
where the evaluation may be killed: the others do without); a kill of one of those takes six seconds more, one of all as
much as a run.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.workflows.job import short_run
from tests.workflows.job.killed_run import SERVING, STARTS, Kill, KilledRun, kill_of, phases_of
from transferqueue.workflows.job.graph import stage_jobs
from transferqueue.workflows.job.settings.read import job_from_file
from transferqueue.workflows.job.training.checkpoint import Checkpoints, checkpoint_state

LEAST_S = 300.0
RUNS_LONGEST = 10
"""A run that takes as many times as long as the undisturbed one hangs."""


class Plan:
    """Which kills the next run gets: pairs of process and phase that were met least often, and of those any."""

    def __init__(self, targets: list[str], kills: int, seed: int) -> None:
        self.wanted = [(what, phase) for what in targets for phase in phases_of(what)]
        self.met: Counter[tuple[str, str]] = Counter()
        self._tried: Counter[tuple[str, str]] = Counter()
        self._kills, self._draws, self._lock = kills, random.Random(seed), threading.Lock()

    def next(self) -> list[Kill]:
        """Return the kills of one run, in their order: those of processes that start come first, and of those the
        queue's own."""
        with self._lock:
            drawn = self._draws.sample(self.wanted, len(self.wanted))
            pairs = sorted(drawn, key=lambda pair: self.met[pair] + self._tried[pair])[: self._kills]
            self._tried.update(pairs)
            kills = [kill_of(*pair, self._draws) for pair in pairs]
        return sorted(kills, key=lambda kill: (kill.after, kill.phase != STARTS, kill.what not in SERVING))

    def count(self, kills: list[Kill]) -> None:
        """Note which kills came."""
        with self._lock:
            self._tried.subtract((kill.what, kill.phase) for kill in kills)
            self.met.update((kill.what, kill.phase) for kill in kills if kill.step >= 0)

    def unmet(self) -> list[str]:
        """Processes with the phases in which none was killed."""
        with self._lock:
            return [f"{what} {phase}" for what, phase in self.wanted if not self.met[what, phase]]


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
    processes = dict.fromkeys(process.name for process in stage_jobs(job_from_file(place / "job.toml")))
    return [*processes, *SERVING]


def result_of(place: Path, folder: Path, kills: list[Kill], wanted: dict[str, bytes], longest_s: float) -> RunResult:
    """Run once with these kills, and compare. wanted: final weights that the run must have, by trainer."""
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
    used = summary["rows_dropped"].pop("surplus_use", 0)  # trained, with uses left at the end
    result.done, result.dropped = result.done + used, sum(summary["rows_dropped"].values())
    result.left = len(list(folder.glob("state/**/*")))
    _check_trained(result, folder)
    if (result.put, result.done, result.dropped, result.left) != (short_run.ROWS, short_run.ROWS, 0, 0):
        result.problems.append(
            f"rows: {result.put} put, {result.done} done, dropped {summary['rows_dropped']}; {result.left} files left"
        )
    for use, (task, counts) in enumerate(summary["uses"].items()):
        of_step = short_run.ROWS // short_run.STEPS
        if counts != {"trained": short_run.ROWS - use * of_step, "dropped": use * of_step}:
            result.problems.append(f"{task}: {counts}")
    weights = short_run.final_weights(folder)
    differ = [task for task in wanted if weights.get(task) != wanted[task]]
    result.weights = f"differ: {', '.join(differ)}" if differ else "equal"
    if differ:
        result.problems.append(f"weights of {', '.join(differ)} differ from those of the undisturbed run")
    return result


def _check_trained(result: RunResult, folder: Path) -> None:
    """Compare the places that the last checkpoint counts as trained with those that its steps took: neither a gap nor
    one twice."""
    oldest, finished_above, _ = checkpoint_state(
        Checkpoints(folder / "checkpoints" / "train").path(short_run.STEPS)
    ).position
    taken = short_run.STEPS * {step["rows"] for step in short_run.lines(folder / "steps.jsonl")}.pop()
    per_place = taken // oldest if oldest else 0
    result.trained = f"{oldest + len(finished_above)}/{taken // per_place if per_place else taken}"
    if finished_above or not per_place or oldest * per_place != short_run.ROWS:
        result.problems.append(f"trained: places below {oldest} and {finished_above}, of {short_run.ROWS} rows")


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix and print it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.workflows.job.kill_matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(short_run.JOBS), nargs="+", default=["grpo"])
    parser.add_argument("--kills", type=int, default=2, help="processes that one run loses, one after the other")
    parser.add_argument(
        "--extra", type=int, default=10, help="runs more for pairs of process and phase that were not met"
    )
    parser.add_argument("--sample", action="store_true", help="not every pair need be met: no extra runs")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as temporary:
        codes = [_matrix(short_run.make_place(Path(temporary) / kind, kind), kind, options) for kind in options.kind]
    return max(codes)


def _matrix(place: Path, kind: str, options: argparse.Namespace) -> int:
    began = time.monotonic()
    short_run.undisturbed(place)
    whole_s = time.monotonic() - began
    longest_s = max(LEAST_S, RUNS_LONGEST * options.at_once * whole_s)
    wanted = short_run.final_weights(place / "whole")
    plan = Plan(targets(place), options.kills, options.seed)
    print(f"kind={kind} runs={options.runs} seed={options.seed}; undisturbed: {whole_s:.0f} s", flush=True)
    print("| run | killed (what, phase @ step) | starts | put | done | dropped | trained | weights | left | s |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)

    def run(number: int) -> bool | None:
        if number >= options.runs and not plan.unmet():
            return None
        kills = plan.next()
        result = result_of(place, place / f"run-{number}", kills, wanted, longest_s)
        plan.count(kills)
        print(
            "\n".join([_row(number, result), *(f"run {number}: {problem}" for problem in result.problems)]), flush=True
        )
        return not result.problems

    extra = 0 if options.sample else options.extra
    with ThreadPoolExecutor(options.at_once) as pool:
        ended = [good for good in pool.map(run, range(options.runs + extra)) if good is not None]
    bad, unmet = ended.count(False), plan.unmet()
    print(
        f"{len(ended)} runs, {len(ended) - options.runs} of them extra, {plan.met.total()} kills, {bad} runs not as "
        f"they must be; {_met(plan, unmet)}"
    )
    return 1 if bad or (unmet and not options.sample) else 0


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
