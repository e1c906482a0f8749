"""Three environments in one job, undisturbed and with failures: ``python -m bench.environments --engine vllm``.

A calculator behind OpenEnv's protocol, whose server is a process of its own, a game (`examples/jobs/environments.py`)
and a reward function share each batch 5 : 3 : 2. Each seed is trained twice: undisturbed, and with a tenth of the calls
failing (they hang, raise, lose their connection, answer with far too much text), all processes of environments killed
every `KILL_EVERY` steps, and the calculator's server killed and away for `AWAY_S` after a third of the steps.

Exit code 1, with the reasons, unless in every run the rows balance (`audit`), each environment's share of the trained
rows is within `SHARE_MAX` of its quota, and its reward rises from the first tenth of the steps to the last third; and
unless the rewards with failures are within those of the undisturbed seeds, or at most their spread beyond.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Self

from bench.harness import ROOT
from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.run_record import into_option, save_record, show
from examples.jobs.environments import TERM, GuessNumber, result

SHARES: Final = {"sums": 0.5, "guess": 0.3, "even": 0.2}
SHARE_MAX: Final = 0.02
FAILING: Final = 0.1
RUNGS: Final = {"undisturbed": 0.0, "failing": FAILING}
"""Rungs, and the share of calls that fails in each."""
KILL_EVERY: Final = 4
AWAY_S: Final = 3.0
LEAST_SPREAD: Final = 0.02
"""Rewards that all seeds bring to their most have hardly a spread."""
DIGITS: Final = (*"0123456789",)
HANG_S: Final = 600.0
TEXT: Final = "x" * 2_000_000
SIZE: Final = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "builtin": {},
    "transformers": {},
    "vllm": {"options": {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}},
}


# ---------------------------------------------------------------- the environments


def fault(failing: float) -> str:
    """Draw how a call fails: "" in all but a share `failing` of them."""
    kinds = ("hang", "refuse", "raise", "raise", "text") if random.random() < failing else ("",)
    return random.choice(kinds)


def fail(failing: float) -> str:
    """Fail as drawn; return what the call gives instead of its text, if not nothing."""
    drawn = fault(failing)
    if drawn == "hang":
        time.sleep(HANG_S)
    if drawn == "refuse":
        raise ConnectionResetError("the tool's server ended the connection")
    if drawn == "raise":
        raise RuntimeError("the sandbox is gone")
    return TEXT if drawn else ""


class Guess(GuessNumber):
    """The game in two turns, with a part of the reward for being near. A share of the turns fails. Its episodes go on
    at the turn that failed."""

    def __init__(self, failing: float) -> None:
        super().__init__(turns=2)
        self._failing = failing

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text = fail(self._failing)
        observation, reward, ended, cut, info = super().step(action)
        near = 0.5 * (1 - abs(int(action.strip()) - self._number) / 9) if action.strip() in DIGITS else 0.0
        return text or observation, reward or near, ended, cut, info

    def state(self) -> list[int]:
        return [self._number, self._turn]

    def restore(self, state: list[int]) -> None:
        self._number, self._turn = state


def guess(failing: float = 0.0) -> Guess:
    """A factory; the job's ``args`` are its arguments."""
    return Guess(failing)


def even(completions: Sequence[str], failing: float = 0.0, **columns: Any) -> list[float]:
    """A reward function: the share of characters that are even digits."""
    fail(failing)
    return [sum(letter in "02468" for letter in text) / max(1, len(text)) for text in completions]


def even_failing(completions: Sequence[str], **columns: Any) -> list[float]:
    """The same, of which a share of the calls fails."""
    return even(completions, FAILING)


def serve(port: int, failing: float) -> None:
    """Serve the calculator: two turns, each worth half the share of characters that it can read. A tenth of its
    answers to ``step`` may be missing, an error, the end of the session, or too long."""
    from aiohttp import web

    from tests.adapters.openenv_server import Calculator

    class Sums(Calculator):
        turns = 0

        def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
            if kind == "reset":
                self.turns = 0
                return super().answer(kind, data)
            said, drawn = data["message"], fault(failing)
            self.turns += 1
            if drawn == "hang":
                return None
            if drawn == "refuse":
                raise ConnectionResetError
            if drawn == "raise":
                return {"type": "error", "data": {"message": "the sandbox is gone", "code": "EXECUTION_ERROR"}}
            reward = 0.5 * sum(letter in "0123456789+-*" for letter in said) / max(1, len(said))
            asked = TERM.search(said)
            observation = {"result": TEXT if drawn else str(result(asked.group())) if asked else ""}
            return {
                "type": "observation",
                "data": {"observation": observation, "reward": reward, "done": self.turns == 2},
            }

    async def session(request: web.Request) -> web.StreamResponse:
        return await Sums().session(request)

    app = web.Application()
    app.router.add_get("/ws", session)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=False)


class Server:
    """The calculator's server, a process. A context manager."""

    def __init__(self, failing: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._failing = failing
        self._lock = threading.Lock()
        self._start()
        deadline = time.monotonic() + 60
        while not self._answers():
            if time.monotonic() > deadline:
                raise SystemExit("the calculator's server does not start")
            time.sleep(0.1)

    def _start(self) -> None:
        with self._lock:
            words = [sys.executable, "-m", "bench.environments", "--serve", str(self.port), str(self._failing)]
            self._process = subprocess.Popen(words, stderr=subprocess.DEVNULL)

    def _answers(self) -> bool:
        with socket.socket() as found:
            return found.connect_ex(("127.0.0.1", self.port)) == 0

    def restart(self) -> None:
        """Kill it, and start it again later."""
        self._process.kill()
        self._later = threading.Timer(AWAY_S, self._start)
        self._later.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if (later := getattr(self, "_later", None)) is not None:
            later.join()
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------- a run


@dataclass
class RungRun:
    """What one run gave, by environment: its share of the trained rows, and the reward in the first tenth and in the
    last third of the steps. widest: most that an environment's part of one step differs from its quota."""

    shares: dict[str, float]
    early: dict[str, float]
    late: dict[str, float]
    widest: float
    rows: int
    seconds: float
    dropped: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    kills: int = 0


def job_values(place: Path, engine: str, url: str, failing: float, seed: int, steps: int) -> dict[str, Any]:
    """Return the values of the job file."""
    limits = {"timeout_s": 2.0, "on_error": "drop"}
    named = "bench.environments"
    return {
        "name": "environments",
        "seed": seed,
        "steps": steps,
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "data": {
            "prompt_tokens_max": 12 if engine == "builtin" else 40,
            "prompt": "question",
            "sources": [
                {"path": str(place / "data"), "environment": name, "weight": share} for name, share in SHARES.items()
            ],
        },
        "engine": [{"kind": engine, "slots": 32, **ENGINES[engine]}],
        "sampling": {"group_size": 8, "group_min": 4, "refills": 1, "tokens_max": 32, "stop": [*"0123456789"]},
        "environment": [
            {"name": "sums", "url": url, "args": {"observation": "result"}, **limits},
            {"name": "guess", "factory": f"{named}:guess", "args": {"failing": failing}, **limits},
            {"name": "even", "function": f"{named}:{'even_failing' if failing else 'even'}", **limits},
        ],
        "algorithm": {"kind": "grpo"},
        "trainer": {"prompts_per_step": 10, "lr": 0.01},
        "weights": {"dtype": "float32"},
        "checkpoint": {"every": 0},
        "queue": {"memory_gib": 0.125},
    }


def run(place: Path, engine: str, rung: str, seed: int, steps: int) -> RungRun:
    """Run the job once. Raises what ends the run, and `InternalError` for rows that do not balance."""
    from transferqueue.workflows.flow.events import Figures
    from transferqueue.workflows.flow.reports.loggers import STEP
    from transferqueue.workflows.job.run.folder import RunFolder
    from transferqueue.workflows.job.run.run import run_job
    from transferqueue.workflows.job.settings.read import job_from_values

    failing, folder, kills = RUNGS[rung], place / f"{engine}-{rung}-{seed}", 0
    began = time.monotonic()
    with Server(failing) as server:

        def observe(label: str, event: Any) -> None:
            nonlocal kills
            if not failing or not isinstance(event, Figures) or event.kind != STEP:
                return
            if (step := event.values["step"]) % KILL_EVERY == 0:
                kills += kill_environments()
            if step == steps // 3:
                server.restart()

        url = f"http://127.0.0.1:{server.port}"
        job = job_from_values(job_values(place, engine, url, failing, seed, steps))
        outcome = run_job(job, folder=RunFolder(folder), code=ROOT, observe=observe)
    outcome.audit.check_finished("rollouts")
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    summary = outcome.summary
    if summary.rows_put != summary.rows_done + sum(summary.rows_dropped.values()):
        raise SystemExit(f"{folder}: {summary.rows_put} rows put, {summary.rows_done} done, {summary.rows_dropped}")
    return RungRun(
        **of_steps(lines),
        seconds=time.monotonic() - began,
        dropped=Counter(summary.rows_dropped),
        retried=Counter(summary.retried),
        kills=kills,
    )


def of_steps(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return shares and rewards from the lines of ``steps.jsonl``."""
    rows = sum(line["rows"] for line in lines)
    parts = {name: [line.get(f"reward_share/{name}", 0.0) for line in lines] for name in SHARES}
    rewards = {name: [line[key] for line in lines if (key := f"reward/{name}") in line] for name in SHARES}
    trained = {
        name: sum(part * line["rows"] for part, line in zip(of_one, lines, strict=True)) / rows
        for name, of_one in parts.items()
    }
    return {
        "rows": rows,
        "shares": trained,
        "early": {name: _mean(of_one[: max(1, len(lines) // 10)]) for name, of_one in rewards.items()},
        "late": {name: _mean(of_one[-max(1, len(lines) // 3) :]) for name, of_one in rewards.items()},
        "widest": max(abs(part - SHARES[name]) for name, of_one in parts.items() for part in of_one),
    }


def _mean(rewards: Sequence[float]) -> float:
    """NaN of an environment that had no row in these steps."""
    return fmean(rewards) if rewards else nan


def kill_environments() -> int:
    """Kill all processes of environments of this run; return their number."""
    from tests.workflows.job.short_run import descendants

    killed = 0
    for pid in descendants(os.getpid()):
        try:
            if "environment_process" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
                killed += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    return killed


# ---------------------------------------------------------------- results


def problems(found: dict[str, list[RungRun]]) -> Iterator[str]:
    """Yield what is not as it must be."""
    for rung, runs in found.items():
        for seed, each in enumerate(runs):
            for name, share in SHARES.items():
                if abs(each.shares[name] - share) > SHARE_MAX:
                    yield f"{rung} {seed}: {name} has {each.shares[name]:.1%} of the trained rows, not {share:.0%}"
                if (late := each.late[name]) <= (early := each.early[name]):
                    yield f"{rung} {seed}: the reward of {name} goes from {early:.3f} to {late:.3f}"
    for name in SHARES:
        clean = [each.late[name] for each in found["undisturbed"]]
        spread = max(max(clean) - min(clean), LEAST_SPREAD)
        for seed, each in enumerate(found["failing"]):
            if not min(clean) - spread <= each.late[name] <= max(clean) + spread:
                yield f"failing {seed}: {name} ends at {each.late[name]:.3f}, undisturbed at {clean}"


def results(found: dict[str, list[RungRun]]) -> Iterator[MeasuredResult]:
    """Give the figures of each rung over its seeds."""
    for rung, runs in found.items():
        for name in SHARES:
            yield summarize(f"{rung}: share of {name}", "ratio", [each.shares[name] for each in runs])
            yield summarize(f"{rung}: first reward of {name}", "ratio", [each.early[name] for each in runs])
            yield summarize(f"{rung}: last reward of {name}", "ratio", [each.late[name] for each in runs])
        yield summarize(f"{rung}: widest share of a step", "ratio", [each.widest for each in runs])
        yield single(f"{rung}: rows trained", "count", sum(each.rows for each in runs))
        for what, of in (("dropped", "dropped"), ("tried again", "retried")):
            counts = sum((getattr(each, of) for each in runs), Counter())
            for cause, count in sorted(counts.items()):
                yield single(f"{rung}: {what}, {cause}", "count", count)
        if kills := sum(each.kills for each in runs):
            yield single(f"{rung}: environment processes killed", "count", kills)


def main() -> int:
    """Run both rungs with each seed, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.environments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(ENGINES), default="builtin")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "SHARE"), help=argparse.SUPPRESS)
    into_option(parser)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(int(chosen.serve[0]), float(chosen.serve[1]))
        return 0
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    measurement, found = Measurement(), {rung: list[RungRun]() for rung in RUNGS}
    with tempfile.TemporaryDirectory(prefix="transferqueue-environments-") as folder:
        place = Path(folder)
        if chosen.engine == "builtin":
            make(place / "model", kind="builtin", **SIZE)
        else:
            make(place / "model", tie_word_embeddings=False)
        write_data(place / "data", train=256, test=16)
        for seed in range(chosen.seeds):
            for rung, runs in found.items():
                runs.append(last := run(place, chosen.engine, rung, seed, chosen.steps))
                print(f"{rung} {seed}: {last}", flush=True)
    lines, wrong = [*results(found)], [*problems(found)]
    show(lines)
    details = {"engine": chosen.engine, "seeds": chosen.seeds, "steps": chosen.steps, "quotas": SHARES}
    details |= {"failing": FAILING, "problems": wrong}
    save_record(measurement, chosen.into, "environments", lines, details, name=f"environments-{chosen.engine}")
    print("\n".join(wrong) or "all as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
