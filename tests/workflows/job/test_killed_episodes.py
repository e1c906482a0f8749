"""Episodes whose process, or whose environment's process, is killed in each of their turns: the turns that are done
twice are counted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from tests.workflows.job.short_run import STEPS, final_weights, lines
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.tiny_model.make import make, write_data

TURNS, ROWS = 3, STEPS * 4
SIZE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
COUNTED = """
import json
import os
import signal
import time
import uuid
from pathlib import Path

KILLED = {"environment": os.getpid, "play": os.getppid}


class Forgets:
    \"\"\"Three turns, each a line of a log, with what a tool with effects would see.\"\"\"

    def __init__(self, folder):
        self.folder = Path(folder)

    def reset(self, *, seed, options):
        self.name, self.turn = uuid.uuid4().hex, 0
        return None, {}

    def step(self, action, key):
        self.turn += 1
        self.die("during")
        with (self.folder / "turns.jsonl").open("a") as log:
            log.write(json.dumps({"name": self.name, "turn": self.turn, "key": key, "action": action}) + "\\n")
        self.die("after")
        return "again", sum(map(ord, action)) % 7 / 7, self.turn == 3, False, {}

    def die(self, when):
        \"\"\"As a file says, once.\"\"\"
        for who, process in KILLED.items():
            try:
                (self.folder / f"{who}-{when}-{self.turn}").unlink()
            except FileNotFoundError:
                continue
            os.kill(process(), signal.SIGKILL)
            time.sleep(600)

    def close(self):
        pass


class Goes(Forgets):
    \"\"\"Gives its state.\"\"\"

    def state(self):
        return {"name": self.name, "turn": self.turn}

    def restore(self, state):
        self.name, self.turn = state["name"], state["turn"]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    make(folder / "model", kind="builtin", max_position_embeddings=64, **SIZE)
    write_data(folder / "data", train=64, test=16)
    (folder / "counted.py").write_text(COUNTED)
    return folder


def run(place: Path, folder: Path, kind: str = "Goes", *kills: str) -> tuple[list[dict[str, Any]], Any]:
    """Run the job, one episode at a time, and return the turns that were done, and the summary. kills: file names."""
    folder.mkdir()
    for kill in kills:
        (folder / kill).touch()
    values = {
        "name": "killed",
        "reproducible": True,
        "steps": STEPS,
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "data": {"path": str(place / "data"), "prompt": "question", "prompt_tokens_max": 12},
        "engine": [{"kind": "builtin", "slots": 2}],
        "sampling": {"group_size": 2, "tokens_max": 40, "stop": [*"0123456789"]},
        "environment": [{"factory": f"counted:{kind}", "args": {"folder": str(folder)}, "slots": 1}],
        "algorithm": {"kind": "grpo"},
        "pacing": {"mode": "sync"},
        "trainer": {"prompts_per_step": 2, "lr": 0.01},
        "weights": {"dtype": "float32"},
        "checkpoint": {"every": STEPS},
        "queue": {"memory_gib": 0.0625},
    }
    outcome = run_job(job_from_values(values), folder=RunFolder(folder / "run"), code=place)
    outcome.audit.check_finished("rollouts")
    assert outcome.summary.rows_done == ROWS
    assert not [kill for kill in kills if (folder / kill).exists()]
    return [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()], outcome.summary


def twice(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns that were done before, in their episode."""
    counts = Counter((turn["name"], turn["turn"]) for turn in turns)
    return [turn for turn in turns if counts[turn["name"], turn["turn"]] > 1]


@pytest.fixture(scope="module")
def undisturbed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    turns, _ = run(place, folder)
    return turns, final_weights(folder / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["environment", "play"])
def test_no_turn_is_done_twice_whichever_process_is_killed_in_it(
    who: str, place: Path, undisturbed: tuple[list[dict[str, Any]], dict[str, bytes]], tmp_path: Path
) -> None:
    """Killed in each turn, one after the other: the same turns with the same tokens, each once, and the same
    weights."""
    turns, summary = run(place, tmp_path / "run", "Goes", *(f"{who}-during-{turn}" for turn in range(1, TURNS + 1)))
    assert twice(turns) == []
    assert Counter((turn["turn"], turn["action"]) for turn in turns) == Counter(
        (turn["turn"], turn["action"]) for turn in undisturbed[0]
    )
    assert len({turn["key"] for turn in turns}) == len(turns)
    assert final_weights(tmp_path / "run" / "run") == undisturbed[1]
    if who == "environment":
        assert sum(summary.retried.values()) == TURNS
    else:
        assert len(lines(tmp_path / "run" / "run" / "restarts.jsonl")) == TURNS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["environment", "play"])
def test_a_turn_that_was_done_and_not_answered_is_made_again_with_its_key(
    who: str, place: Path, undisturbed: tuple[list[dict[str, Any]], dict[str, bytes]], tmp_path: Path
) -> None:
    """The last moment: its tool has done its work. One call each is repeated, and no other turn."""
    turns, _ = run(place, tmp_path / "run", "Goes", *(f"{who}-after-{turn}" for turn in range(1, TURNS + 1)))
    assert len(turns) == len(undisturbed[0]) + TURNS
    again = twice(turns)
    assert len(again) == 2 * TURNS
    assert len({turn["key"] for turn in again}) == len({(turn["key"], turn["action"]) for turn in again}) == TURNS
    assert len({turn["key"] for turn in turns}) == len(undisturbed[0])
    assert final_weights(tmp_path / "run" / "run") == undisturbed[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_episode_of_an_environment_without_state_starts_again(
    place: Path, undisturbed: tuple[list[dict[str, Any]], dict[str, bytes]], tmp_path: Path
) -> None:
    """Then the turns before are done twice, with other keys: they are of another game."""
    turns, _ = run(place, tmp_path / "run", "Forgets", *(f"environment-during-{turn}" for turn in (2, 3)))
    assert len(turns) == len(undisturbed[0]) + 1 + 2
    assert len({turn["key"] for turn in turns}) == len(turns)
    assert final_weights(tmp_path / "run" / "run") == undisturbed[1]
