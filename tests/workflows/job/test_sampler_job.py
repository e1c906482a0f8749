"""Prompts by pass rate in a whole job: it repeats whatever dies after prompts were chosen, and goes on by --resume."""

import os
import shutil
import signal

import pytest

from tests.workflows.job import short_run
from tests.workflows.job.short_run import ROWS, STEPS, final_weights, finished, lines, train, wait_for
from transferqueue.workflows.job.run_files import SAMPLER, checkpoint_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
pytest.importorskip("torch", exc_type=ImportError)

WORDS = ("job.toml", "--json", "--set", 'evaluation.path=""')
PROMPTS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A job whose steps repeat prompts, and its undisturbed run in ``whole``."""
    place = short_run.make_place(tmp_path_factory.mktemp("job"), "sampled", builtin=True)
    finished(train(place, *WORDS, "--out", "whole"))
    steps = lines(place / "whole" / SAMPLER)
    assert [step["first"] for step in steps] == [PROMPTS * number for number in range(STEPS)]
    in_order = sum(steps[-1]["places"])
    assert STEPS * PROMPTS - in_order >= STEPS, "so many were chosen"
    assert {rate for step in steps for _, rate in step["rates"]} > {0.5}, "a wrong rate would choose another"
    return place


def test_a_run_takes_the_same_prompts_though_its_source_and_its_queue_die(place, tmp_path):
    folder = tmp_path / "run"
    process = train(place, *WORDS, "--out", str(folder))
    wait_for(process, folder / SAMPLER, 2)
    for name in ("server", "prompts", "advantage"):
        os.kill(short_run.pid_of(process.pid, name), signal.SIGKILL)
    outcome = finished(process)
    assert (outcome["starts"], outcome["rows_put"], outcome["rows_done"]) == (1, ROWS, ROWS)
    assert "prompts-0" in [restart["label"] for restart in lines(folder / "restarts.jsonl")]
    assert lines(folder / SAMPLER) == lines(place / "whole" / SAMPLER)
    assert final_weights(folder) == final_weights(place / "whole")


def test_a_finished_run_is_lengthened(place, tmp_path):
    folder = shutil.copytree(place / "whole", tmp_path / "run")
    steps = STEPS + 2
    found = finished(train(place, *WORDS, "--resume", "--out", str(folder), "--set", f"steps={steps}"))
    assert (found["starts"], found["steps"]) == (2, steps)
    assert found["rows_put"] == found["rows_done"] == ROWS // STEPS * 2
    assert [line["step"] for line in lines(folder / "steps.jsonl")] == [*range(1, steps + 1)]
    assert [step["first"] for step in lines(folder / SAMPLER)] == [PROMPTS * number for number in range(steps)]
    assert checkpoint_steps(folder / "checkpoints" / "train")[-1] == steps


@pytest.mark.long
def test_choices_after_a_step_was_taken_back_are_those_of_an_undisturbed_run(place, tmp_path):
    """The groups of such a step are told twice, in any order."""
    folder = tmp_path / "run"
    process = train(place, *WORDS, "--set", f"checkpoint.every={STEPS}", "--out", str(folder))
    wait_for(process, folder / SAMPLER, 3)
    os.kill(short_run.pid_of(process.pid, "train"), signal.SIGKILL)
    wait_for(process, folder / "restarts.jsonl", 1)
    assert len(lines(folder / SAMPLER)) == 3, "there is a choice to come"
    os.kill(short_run.pid_of(process.pid, "prompts"), signal.SIGKILL)
    outcome = finished(process)
    assert (outcome["starts"], outcome["rows_put"], outcome["rows_done"]) == (1, ROWS, ROWS)
    assert {"prompts-0", "train-0"} <= {restart["label"] for restart in lines(folder / "restarts.jsonl")}
    assert lines(folder / SAMPLER) == lines(place / "whole" / SAMPLER)
    assert final_weights(folder) == final_weights(place / "whole")


@pytest.mark.long
@pytest.mark.parametrize("queue", ["kept", "lost"])
def test_resume_goes_on_with_the_same_prompts(place, tmp_path, queue):
    folder = tmp_path / "run"
    process = train(place, *WORDS, "--out", str(folder))
    wait_for(process, folder / SAMPLER, 2)
    for pid in [*short_run.descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(lines(folder / SAMPLER)) < STEPS, "there is a choice to come"
    if queue == "lost":  # the table begins anew at the newest checkpoint
        for name in ("state", "snapshots"):
            shutil.rmtree(folder / name, ignore_errors=True)
    resumed = finished(train(place, *WORDS, "--resume", "--out", str(folder)))
    assert (resumed["starts"], resumed["steps"], resumed["rows_dropped"]) == (2, STEPS, {})
    assert lines(folder / SAMPLER) == lines(place / "whole" / SAMPLER)
    assert final_weights(folder) == final_weights(place / "whole")


@pytest.mark.long
def test_a_resume_whose_file_of_prompts_is_lost_ends_with_its_name(place, tmp_path):
    folder = tmp_path / "run"
    process = train(place, *WORDS, "--out", str(folder))
    wait_for(process, folder / SAMPLER, 2)
    for pid in [*short_run.descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (folder / SAMPLER).unlink()
    resumed = train(place, *WORDS, "--resume", "--out", str(folder))
    _, stderr = resumed.communicate(timeout=200)
    assert resumed.returncode in (2, 3)
    assert f"{SAMPLER} has the first 0 prompts of the run, and" in stderr
