"""Jobs whose environment fails in a tenth of its calls, and whose processes are killed: no run ends, and the books
balance. `bench.environments` compares the rewards with those of runs in which nothing fails."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from tests.adapters.openenv_server import calculator_server
from tests.scale import only_long
from tests.workflows.job.short_run import descendants, lines
from transferqueue.errors import TransferQueueError
from transferqueue.workflows.flow.events import Figures
from transferqueue.workflows.flow.reports.loggers import STEP
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.tiny_model.make import make, write_data

PROMPTS, GROUP, LEAST = 4, 8, 4
ENVIRONMENT = """
import asyncio
import socket
import time
import zlib

import aiohttp


class TwoTurns:
    \"\"\"Two turns, each worth the share of characters with an even number. Of the calls a share fails: which ones
    follows from the seed, the turn and what the policy said.\"\"\"

    def __init__(self, failing):
        self.failing = failing

    def reset(self, *, seed, options):
        self.seed, self.turn = seed, 0
        return None, {}

    def step(self, action):
        self.turn += 1
        draw = zlib.crc32(f"{self.seed} {self.turn} {action}".encode()) % 1000 / 1000
        if draw < 0.2 * self.failing:
            time.sleep(600)
        if draw < 0.25 * self.failing:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                socket.create_connection(taken.getsockname(), timeout=5)
        if draw < 0.9 * self.failing:
            raise RuntimeError("the sandbox is gone")
        if draw < self.failing:
            return "x" * 2_000_000, 0.0, False, False, {}
        reward = sum(ord(letter) % 2 == 0 for letter in action) / max(1, len(action))
        return "again", reward, self.turn == 2, False, {}

    def close(self):
        pass


def scored(completions):
    return [float(len(text)) for text in completions]


class Talks:
    \"\"\"An agent with the turns of `TwoTurns`, which asks an endpoint for them.\"\"\"

    def __init__(self, failing):
        self.failing = failing

    async def run(self, data, base_url):
        game, messages, rewards = TwoTurns(0.0), [{"role": "user", "content": data["prompt"]}], 0.0
        game.reset(seed=0, options=data)
        for turn in range(2):
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer:
                    said = (await answer.json())["choices"][0]["message"]["content"]
            observation, reward, *_ = game.step(said)
            rewards += reward
            draw = zlib.crc32(f"{messages} {said}".encode()) % 1000 / 1000
            if draw < 0.05 * self.failing:
                await asyncio.sleep(600)
            if draw < 0.9 * self.failing:
                raise RuntimeError("the sandbox is gone")
            if draw < self.failing:
                observation = "x" * 2_000_000
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observation}]
        return rewards
"""
NAMED = {"factory": "two_turns:TwoTurns", "agent": "two_turns:Talks"}
CAUSES = {"environment_timeout", "environment_unreachable", "environment_error", "environment_output"}


def job_in(folder: Path, *, steps: int, seed: int = 0, failing: float = 0.0, kind: str = "factory", **limits):
    environment = {kind: NAMED[kind], "args": {"failing": failing}, "timeout_s": 1.0, "on_error": "drop", **limits}
    return job_from_values({**values_of(folder), "steps": steps, "seed": seed, "environment": [environment]})


def values_of(folder: Path) -> dict[str, Any]:
    return {
        "name": "failing",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "data"), "prompt": "question", "prompt_tokens_max": 12},
        "engine": [{"kind": "builtin", "slots": 32}],
        "sampling": {"group_size": GROUP, "group_min": LEAST, "tokens_max": 20, "stop": [*"0123456789"]},
        "algorithm": {"kind": "grpo"},
        "trainer": {"prompts_per_step": PROMPTS, "lr": 0.01},
        "weights": {"dtype": "float32"},
        "checkpoint": {"every": 0},
        "queue": {"memory_gib": 0.0625},
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    make(folder / "model", kind="builtin", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    write_data(folder / "data", train=256, test=16)
    (folder / "two_turns.py").write_text(ENVIRONMENT)
    return folder


def pids_of(words: str) -> list[int]:
    """The processes of a run of this process whose command line has these words."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [pid] * (words in command)
    return found


def run(place: Path, folder: Path, job, *, kills: dict[int, str] | None = None):
    """Run a job. kills: after which steps, and words of the command line of the processes that are killed."""
    killed: Counter[str] = Counter()

    def observe(label, event):
        if isinstance(event, Figures) and event.kind == STEP and (words := (kills or {}).get(event.values["step"])):
            for pid in pids_of(words):
                os.kill(pid, signal.SIGKILL)
                killed[words] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        outcome = run_job(job, folder=RunFolder(folder), code=place, observe=observe)
    assert set(killed) == set((kills or {}).values())
    outcome.audit.check_finished("rollouts")
    return outcome


def check_failures(folder: Path, outcome, steps: int) -> None:
    """The rows that failed are dropped and named, their groups go on without them, and all is counted by cause."""
    summary, trained = outcome.summary, lines(folder / "steps.jsonl")
    assert [step["step"] for step in trained] == [*range(1, steps + 1)]
    failed = lines(folder / "failed_rows.jsonl")
    dropped = {cause: rows for cause, rows in summary.rows_dropped.items() if cause.startswith("environment_")}
    assert set(dropped) <= CAUSES
    assert 0 < len(failed) <= sum(summary.rows_dropped.values())  # some failed after their group had been dropped
    assert dropped
    assert all("two_turns:T" in row["text"] and "step(" in row["text"] for row in failed)
    assert summary.rows_put == summary.rows_done + sum(summary.rows_dropped.values())
    assert any(PROMPTS * LEAST <= step["rows"] < PROMPTS * GROUP for step in trained)
    assert any(f"dropped/{cause}" in step for step in trained for cause in CAUSES)
    assert sum(summary.retried.values()) > 0
    assert "episodes tried again" in summary.text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["factory", *only_long("agent")])
def test_no_run_ends_if_a_tenth_of_the_calls_fail_and_processes_are_killed(kind, place, tmp_path):
    kills = {2: "environment_process", 4: '"name":"play"'}
    outcome = run(place, tmp_path / "run", job_in(place, steps=6, failing=0.1, kind=kind), kills=kills)
    check_failures(tmp_path / "run", outcome, 6)
    assert [each["label"] for each in lines(tmp_path / "run" / "restarts.jsonl")] == ["play-0"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_host_has_its_share_of_the_trained_rows_while_a_tenth_of_two_ones_calls_fail(place, tmp_path):
    """A process, an agent, a reward function and a server; failed responses are replaced (`sampling.refills`)."""
    shares = {"TwoTurns": 0.4, "Talks": 0.3, "scored": 0.2, "served": 0.1}
    sources = [{"path": str(place / "data"), "environment": name, "weight": share} for name, share in shares.items()]
    failing = {"args": {"failing": 0.1}, "timeout_s": 1.0, "on_error": "drop"}
    values = values_of(place)
    with calculator_server() as (url, _):
        values |= {
            "steps": 15,
            "data": {"sources": sources, "prompt": "question", "prompt_tokens_max": 12},
            "sampling": {**values["sampling"], "group_size": 4, "group_min": 2, "refills": 1},
            "trainer": {"prompts_per_step": 10, "lr": 0.01},
            "environment": [
                *({kind: named, **failing} for kind, named in NAMED.items()),
                {"function": "two_turns:scored"},
                {"name": "served", "url": url, "args": {"observation": "result"}},
            ],
        }
        outcome = run(place, tmp_path / "run", job_from_values(values))
    steps = lines(tmp_path / "run" / "steps.jsonl")
    trained = {name: sum(step["rows"] * step.get(f"reward_share/{name}", 0.0) for step in steps) for name in shares}
    rows = sum(step["rows"] for step in steps)
    print({name: round(count / rows, 4) for name, count in trained.items()}, outcome.summary.rows_dropped, rows)
    assert sum(trained.values()) == pytest.approx(rows)
    assert {name for name, share in shares.items() if abs(trained[name] / rows - share) > 0.02} == set()
    assert any(cause.endswith("/TwoTurns") for cause in outcome.summary.retried)
    assert any(cause.endswith("/Talks") for cause in outcome.summary.retried)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_in_which_more_fails_than_it_says_ends_with_the_last_failure(place, tmp_path):
    job = job_in(place, steps=200, failing=0.8, failed_max=0.3, timeout_s=0.2)
    with pytest.raises(TransferQueueError, match=r"more than environment.0.failed_max=0.3|were all dropped") as ended:
        run(place, tmp_path / "run", job)
    assert "; the last: environment two_turns:TwoTurns: the episode of ordinal " in str(ended.value)
