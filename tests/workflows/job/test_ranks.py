"""Whole runs of a trainer of two ranks: to the end, and on after the death of a rank in the middle of a step."""

import os
import signal
from pathlib import Path

import pytest

from tests.workflows.job.short_run import (
    ROWS,
    STEPS,
    children,
    final_weights,
    finished,
    lines,
    make_place,
    train,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]
pytest.importorskip("transformers", exc_type=ImportError)

TWO = ("--set", "trainer.ranks=2", "--set", 'evaluation.path=""')


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("job"))


def rank(run: int, number: int) -> int:
    """Process id of a rank of the trainer."""
    for pid in children(run):
        words = Path(f"/proc/{pid}/cmdline").read_text()
        if '"name":"train"' in words and f'"instance":{number},' in words:
            return pid
    raise AssertionError(f"rank {number} does not run")


def two_ranks(place, out: str, parallel: str = "fsdp2", *words: str):
    return train(place, "job.toml", "--out", out, "--json", *TWO, "--set", f'trainer.parallel="{parallel}"', *words)


@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_a_run_goes_on_after_a_rank_is_killed_in_the_middle_of_a_step(place, parallel: str) -> None:
    folder = f"killed-{parallel}"
    process = two_ranks(place, folder, parallel, "--set", "queue.record=off")  # it writes samples.jsonl then
    wait_for(process, place / folder / "steps.jsonl", 3)  # a checkpoint is of step 2: the third is trained again
    second = rank(process.pid, 1)
    os.kill(second, signal.SIGSTOP)  # so that the fourth begins and cannot end
    responses = len(lines(place / folder / "samples.jsonl"))
    wait_for(process, place / folder / "samples.jsonl", responses + 1)
    os.kill(second, signal.SIGKILL)
    outcome = finished(process)
    assert (outcome["starts"], outcome["rows_put"], outcome["rows_done"]) == (1, ROWS, ROWS)
    assert outcome["rows_dropped"] == {}
    assert [step["step"] for step in lines(place / folder / "steps.jsonl")] == [1, 2, 3, 4]
    whole = f"whole-{parallel}"
    finished(two_ranks(place, whole, parallel))
    assert final_weights(place / folder) == final_weights(place / whole)


def test_two_ranks_of_fsdp2_train_to_the_end_and_each_publishes_its_half(place) -> None:
    outcome = finished(two_ranks(place, "halves"))
    assert (outcome["steps"], outcome["rows_put"], outcome["rows_done"]) == (STEPS, ROWS, ROWS)
    first, second = outcome["publications"]["train-0"], outcome["publications"]["train-1"]
    assert first["versions"] == second["versions"] == STEPS + 1
    assert first["bytes"] + second["bytes"] > 10_000
    assert 0.3 < first["bytes"] / (first["bytes"] + second["bytes"]) < 0.7
    assert [step["step"] for step in lines(place / "halves" / "steps.jsonl")] == [1, 2, 3, 4]


def test_a_rank_that_hangs_is_missed_and_all_are_started_again(place) -> None:
    process = two_ranks(place, "hung", "ddp", "--set", "trainer.patience_s=20")
    wait_for(process, place / "hung" / "steps.jsonl", 2)
    os.kill(rank(process.pid, 1), signal.SIGSTOP)  # it lives, and nobody kills it
    outcome = finished(process)
    assert (outcome["starts"], outcome["rows_put"], outcome["rows_done"]) == (1, ROWS, ROWS)
    assert outcome["rows_dropped"] == {}
