"""A bad day of a job of five processes: ``python -m tests.bad_day --out FOLDER``.

Two rollout processes, two reward processes that ask a judge over HTTP, and a trainer, each a process of a flow. The
judge is away for two minutes, one step takes 90 s, and a worker is killed every ten seconds for five minutes. Every row
must be done, none dropped.

FOLDER gets `seen.txt`: what a person saw every few seconds (`transferqueue doctor`, the title of the page), with the
events of the day between; and one log a process. The exit code is 0 if every row was done.
"""

from __future__ import annotations

import argparse
import http.server
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import transferqueue as tq
from transferqueue.observe.verdict import report
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Context, Stage, Work

ROLLOUT = tq.Task("rollout", needs=["prompt"], gives=["answer"])
REWARD = tq.Task("reward", needs=["answer"], gives=["reward"])
TRAIN = tq.Task("train", needs=["answer", "reward"], lease_s=30.0)
SEEN_S = 10.0


@dataclass(frozen=True)
class Day:
    """When what goes wrong, in seconds from the start."""

    rows: int = 4000
    judge_away_s: tuple[float, float] = (150.0, 270.0)
    long_step: int = 10
    long_step_s: float = 90.0
    kill_every_s: float = 10.0
    kills_end_s: float = 300.0

    def scaled(self, factor: float) -> Day:
        """The same day, shorter or longer by `factor`."""
        first, last = self.judge_away_s
        return Day(
            rows=max(64, int(self.rows * factor)),
            judge_away_s=(first * factor, last * factor),
            long_step=self.long_step,
            long_step_s=self.long_step_s * factor,
            kill_every_s=self.kill_every_s,
            kills_end_s=self.kills_end_s * factor,
        )


# ---------------------------------------------------------------- stages


@dataclass(frozen=True)
class Settings:
    """What the stages must know of the day."""

    judge: str = ""
    long_step: int = 0
    long_step_s: float = 0.0
    marks: str = ""


@contextmanager
def rollouts(context: Context) -> Iterator[Work]:
    """Answer each prompt by its digits, 50 ms a batch."""

    def generate(batch: tq.Batch) -> Mapping[str, Any]:
        time.sleep(0.05)  # the work
        return {"answer": [str(int(prompt)) for prompt in batch["prompt"].numpy()]}

    yield generate


@contextmanager
def rewards(context: Context) -> Iterator[Work]:
    """Ask the judge."""
    settings = context.settings(Settings)

    def score(batch: tq.Batch) -> Mapping[str, Any]:
        request = urllib.request.Request(settings.judge, json.dumps(batch["answer"].list()).encode())
        with urllib.request.urlopen(request, timeout=10) as reply:
            return {"reward": np.asarray(json.load(reply), np.float32)}

    yield score


@contextmanager
def trainer(context: Context) -> Iterator[Work]:
    """Steps of two seconds, and one, of the whole run, of `long_step_s`."""
    settings = context.settings(Settings)
    marks = Path(settings.marks)

    def step(batch: tq.Batch) -> Mapping[str, Any]:
        with marks.open("a") as steps:
            steps.write("step\n")
        if len(marks.read_text().splitlines()) == settings.long_step:
            time.sleep(settings.long_step_s)  # the work
        else:
            time.sleep(2)
        return {}

    yield step


# ---------------------------------------------------------------- what goes wrong


class Judge(http.server.BaseHTTPRequestHandler):
    """Scores answers by their length."""

    def do_POST(self) -> None:
        answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([float(len(answer)) for answer in answers]).encode())

    def log_message(self, *arguments: object) -> None:
        """Keep silent."""


class JudgeServer:
    """A judge on one port that goes and comes back."""

    def __init__(self) -> None:
        self.port = 0
        self.come()

    def come(self) -> None:
        """Listen, on the same port as before."""
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Judge)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def go(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Diary:
    """`seen.txt`: what happened, and what a person saw."""

    def __init__(self, out: Path, queue: tq.Queue) -> None:
        self._started = time.monotonic()
        self._queue = queue
        self._file = (out / "seen.txt").open("w", buffering=1)
        self._lock = threading.Lock()
        self.titles: list[str] = []

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def happened(self, text: str) -> None:
        """Write an event of the day."""
        with self._lock:
            self._file.write(f"{self.now:6.1f} s  ** {text}\n")

    def look(self) -> None:
        """Write what `doctor` and the title of the page say now."""
        stats = self._queue.stats()
        verdict = report(stats, self._queue.doctor()).verdict
        doctor = subprocess.run(
            [sys.executable, "-m", "transferqueue.cli", "doctor", "--address", self._queue.address],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        with self._lock:
            self.titles.append(verdict.short)
            said = "\n".join(f"            {line}" for line in doctor.stdout.strip().splitlines())
            self._file.write(f"{self.now:6.1f} s  title: {verdict.mark} {verdict.short}\n{said}\n")


def live_through(day: Day, out: Path) -> bool:
    """Run the job through the day. Returns whether every row was done."""
    out.mkdir(parents=True, exist_ok=True)
    over = threading.Event()
    judge = JudgeServer()
    settings = {
        "judge": f"http://127.0.0.1:{judge.port}/",
        "long_step": day.long_step,
        "long_step_s": day.long_step_s,
        "marks": str(out / "steps"),
    }
    here = "tests.bad_day"
    stages = [
        ("rollout", "rollouts", Stage(task=ROLLOUT, rows=8, at_least=1), 2),
        ("reward", "rewards", Stage(task=REWARD, rows=8, at_least=1), 2),
        ("train", "trainer", Stage(task=TRAIN, rows=32), 1),
    ]
    jobs = [
        StageJob(name=name, table="day", factory=f"{here}:{factory}", stage=stage, settings=settings, instance=number)
        for name, factory, stage, count in stages
        for number in range(count)
    ]
    with tq.connect("embedded", label="prompts") as queue:
        table = queue.create_table(
            "day",
            tasks=[ROLLOUT, REWARD, TRAIN],
            pacing=tq.Pacing("train", batch_rows=32, depth=3),
        )
        diary = Diary(out, queue)

        def watch() -> None:
            while not over.wait(SEEN_S):
                with suppress(tq.TransferQueueError):
                    diary.look()

        def put_prompts() -> None:
            for first in range(0, day.rows, 32):
                rows = min(32, day.rows - first)
                with table.reserve(rows, timeout_s=None) as reservation:
                    table.put(prompt=np.arange(first, first + rows), reservation=reservation, timeout_s=None)
            table.seal()

        def be_away() -> None:
            leaves, returns = day.judge_away_s
            if over.wait(leaves):
                return
            diary.happened(f"the judge goes away for {returns - leaves:g} s")
            judge.go()
            over.wait(returns - leaves)
            judge.come()
            diary.happened("the judge is back")

        def kill(flow: Flow) -> None:
            dice = random.Random(1)
            while not over.wait(day.kill_every_s) and diary.now < day.kills_end_s:
                label = dice.choice([label for label in flow.pids() if not label.startswith("train")])
                with suppress(ProcessLookupError, KeyError):
                    subprocess.run(["kill", "-KILL", str(flow.pids()[label])], check=False)
                    diary.happened(f"{label} is killed")

        with Flow(queue, jobs, directory=out / "logs", observe=lambda label, event: None) as flow:
            threads = [
                threading.Thread(target=act, args=args, daemon=True)
                for act, args in ((watch, ()), (put_prompts, ()), (be_away, ()), (kill, (flow,)))
            ]
            for thread in threads:
                thread.start()
            flow.run()
            over.set()
            for thread in threads:
                thread.join()
        diary.look()
        audit = table.audit()
        diary.happened(f"the end: {audit}")
        judge.go()
        print(f"rows {day.rows}; {audit}; what was seen: {out / 'seen.txt'}")
        return bool(audit.rows_done == day.rows and not audit.rows_dropped and audit.balanced)


def main() -> int:
    """Run the day."""
    parser = argparse.ArgumentParser(description="A job of five processes through a bad day.")
    parser.add_argument("--out", type=Path, required=True, help="folder for what was seen and the logs")
    parser.add_argument("--scale", type=float, default=1.0, help="length of the day, in parts of seven minutes")
    options = parser.parse_args()
    return 0 if live_through(Day().scaled(options.scale), options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
