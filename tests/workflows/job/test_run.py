"""Whole runs: a job file to its summary, and on after the death of any process, or of all."""

import json
import os
import signal

import pytest

import transferqueue as tq
from tests.workflows.job import kill_matrix, killed_run, short_run
from tests.workflows.job.short_run import ROWS, STEPS, final_weights, finished, lines, train, wait_for
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.samples import samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
pytest.importorskip("transformers", exc_type=ImportError)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return short_run.make_place(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def whole(place):
    """The summary of an undisturbed run in the folder ``whole``."""
    return short_run.undisturbed(place)


@pytest.fixture(scope="module")
def unstreamed(place):
    """The summary of an undisturbed run in the folder ``unstreamed``, whose steps begin when their batch is whole."""
    return finished(train(place, "job.toml", "--out", "unstreamed", "--json", "--set", "trainer.stream=off"))


def test_a_run_trains_every_row_and_leaves_files_and_no_memory(place, unstreamed):
    folder, whole = place / "unstreamed", unstreamed
    assert (whole["steps"], whole["rows_put"], whole["rows_done"], whole["rows_dropped"]) == (STEPS, ROWS, ROWS, {})
    assert (whole["measure"], whole["starts"], whole["staleness"]) == ("reward", 1, {"0": 32})
    steps = lines(folder / "steps.jsonl")
    assert whole["token_staleness"] == {"0": sum(round(step["length_mean"] * step["rows"]) for step in steps)}
    assert whole["before"] is not None
    assert whole["after"] is not None
    assert [(found["when"], found["step"]) for found in lines(folder / "evaluations.jsonl")] == [
        ("before", 0),
        ("during", 2),
        ("after", 4),
    ]
    assert not (folder / "samples.jsonl").exists()
    found = samples(folder, step=2, rows=9)
    assert len(found) == 8
    assert len({sample.ordinal // 2 for sample in found[:4]}) == 4, "each to another prompt"
    assert all(
        sample.step == 2 and sample.prompt and sample.terms == {"any_rewards:spread": sample.reward} for sample in found
    )
    assert [sample.reward for sample in samples(folder, step=2, order="worst")] == sorted(s.reward for s in found)[:4]
    assert (whole["rows_unrecorded"], tq.open_run(folder).table().check()) == (0, [])
    assert [step["step"] for step in lines(folder / "steps.jsonl")] == [1, 2, 3, 4]
    assert all(step["gradient_norm"] > 0 for step in lines(folder / "steps.jsonl"))
    assert json.loads((folder / "summary.json").read_text()) == whole
    assert (folder / "timeline.json").exists()
    assert not (folder / "state").exists()
    assert RunFolder(folder).finished


def test_a_colocated_job_loses_its_process_and_ends_as_one_with_an_engine_apart(place, unstreamed, tmp_path):
    folder = tmp_path / "colocated"
    words = ("--set", 'evaluation.path=""', "--set", "trainer.stream=off", "--set", "pacing.mode=colocated")
    process = train(place, "job.toml", "--json", *words, "--out", str(folder))
    wait_for(process, folder / "steps.jsonl", 2)
    os.kill(short_run.pid_of(process.pid, "train"), signal.SIGKILL)
    outcome = finished(process)
    assert (outcome["rows_put"], outcome["rows_done"], outcome["rows_dropped"]) == (ROWS, ROWS, {})
    assert outcome["staleness"] == {"0": ROWS}
    assert outcome["busy"].keys() == unstreamed["busy"].keys() - {"evaluate"}
    assert [restart["label"] for restart in lines(folder / "restarts.jsonl")] == ["train-0"]
    assert final_weights(folder) == final_weights(place / "unstreamed")


@pytest.mark.long
def test_an_engine_that_cannot_start_beside_its_trainer_ends_the_run_with_its_text(place, tmp_path):
    changes = ["pacing.mode=colocated", "engine.0.options.no_such_option=1", 'evaluation.path=""']
    words = [word for change in changes for word in ("--set", change)]
    process = train(place, "job.toml", "--out", str(tmp_path / "run"), *words)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode in (2, 3)
    assert "no_such_option" in stderr


@pytest.mark.long
def test_after_the_death_of_every_process_at_once_a_run_ends_bit_equal(place, whole):
    folder = place / "killed"
    process = train(place, "job.toml", "--out", "killed")
    wait_for(process, folder / "steps.jsonl", 3)
    for pid in [*short_run.descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    resumed = finished(train(place, "job.toml", "--resume", "--out", "killed", "--json"))
    assert (resumed["starts"], resumed["rows_put"], resumed["rows_done"], resumed["rows_dropped"]) == (
        2,
        ROWS,
        ROWS,
        {},
    )
    assert final_weights(folder) == final_weights(place / "whole")


@pytest.mark.long
def test_ctrl_c_ends_a_run_that_resume_brings_to_the_same_weights(place, whole):
    folder = place / "interrupted"
    process = train(place, "job.toml", "--out", "interrupted")
    wait_for(process, folder / "steps.jsonl", 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "go on with: transferqueue train --resume --out interrupted" in stderr
    resumed = finished(train(place, "--resume", "--out", "interrupted", "--json"))
    assert (resumed["starts"], resumed["steps"], resumed["rows_done"], resumed["rows_dropped"]) == (2, STEPS, ROWS, {})
    assert final_weights(folder) == final_weights(place / "whole")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["train", "rollout", "reward", "advantage", "prompts", "evaluate", "server", "supervisor"]
)
def test_a_killed_process_is_started_again_and_the_run_ends_bit_equal(place, whole, name, tmp_path):
    folder = tmp_path / "run"
    process = train(place, "job.toml", "--out", str(folder), "--json")
    wait_for(process, folder / "steps.jsonl", 1)
    pid = short_run.pid_of(process.pid, name)
    if pid is not None:  # the source may have ended
        os.kill(pid, signal.SIGKILL)
    outcome = finished(process)
    assert (outcome["starts"], outcome["rows_put"], outcome["rows_done"]) == (1, ROWS, ROWS)
    assert final_weights(folder) == final_weights(place / "whole")


@pytest.mark.long
def test_a_reward_that_raises_ends_the_run_with_the_row_and_its_text(place):
    (place / "bad_rewards.py").write_text("def bad(completions):\n    raise ValueError('no good')\n")
    changes = ['reward=[{function="bad_rewards:bad"}]', 'evaluation.path=""']
    words = [word for change in changes for word in ("--set", change)]
    process = train(place, "job.toml", "--out", "failed", *words)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode in (2, 3)
    assert "bad_rewards:bad" in stderr
    assert "no good" in stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["grpo", "ppo", "ppo-whitened", "colocated", "sampled", "delayed", "async", "async-ppo", "async-agent"],
)
def test_processes_killed_at_random_moments_lose_and_double_nothing(kind):
    assert kill_matrix.main(["--runs", "2", "--sample", "--kind", kind]) == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["async", "async-ppo", "async-agent"])
def test_two_asynchronous_runs_with_several_processes_of_a_kind_end_with_the_same_bits(kind, tmp_path):
    place = short_run.make_place(tmp_path, kind)
    runs = [place / "one", place / "two"]
    for run in runs:
        finished(train(place, "job.toml", "--out", str(run), "--json", "--set", 'evaluation.path=""'))
    assert final_weights(runs[0]) == final_weights(runs[1])
    for run in runs:  # two steps are generated ahead
        assert [[*step["staleness"]] for step in lines(run / "steps.jsonl")] == [["0"], ["1"], ["2"], ["2"]]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["async", "async-ppo", "async-agent"])
def test_a_reproducible_run_loses_one_process_of_each_kind_and_ends_with_the_same_bits(kind, tmp_path):
    place = short_run.make_place(tmp_path / "place", kind)
    words = ("job.toml", "--json", "--set", 'evaluation.path=""')
    finished(train(place, *words, "--out", "whole"))
    process, killed = train(place, *words, "--out", "killed"), []
    for step, names in enumerate((("prompts", "rollout", "play", "reward"), ("train_critic", "advantage"), ("train",))):
        wait_for(process, place / "killed" / "steps.jsonl", step)
        for name in (*names, *(("server",) if step else ())):
            if (pid := short_run.pid_of(process.pid, name)) is not None:  # the source may have ended
                os.kill(pid, signal.SIGKILL)
                killed.append(name)
    outcome = finished(process)
    assert {"train", "server", "play" if kind == "async-agent" else "reward"} <= set(killed)
    assert (outcome["starts"], outcome["rows_done"], outcome["rows_dropped"]) == (1, ROWS, {})
    assert final_weights(place / "killed") == final_weights(place / "whole")


def test_a_matrix_comes_to_each_phase_of_each_process():
    plan = kill_matrix.Plan(["prompts", "train", "server"], kills=2, seed=1)
    late = ("train", killed_run.SAVES)
    for number in range(9):
        kills = plan.next()
        assert [kill.after for kill in kills] == sorted(kill.after for kill in kills)
        for kill in kills:
            kill.step = -1 if (kill.what, kill.phase) == late and number < 8 else kill.after
        plan.count(kills)
    assert plan.unmet() == []
    assert sum(plan.met.values()) >= len(plan.wanted) == 3 + 6 + 2


def test_a_pair_that_was_not_met_comes_before_others():
    plan = kill_matrix.Plan(["prompts"], kills=1, seed=1)
    first, second = plan.next(), plan.next()
    assert first[0].phase != second[0].phase  # two runs at once try different ones
    plan.count(first)
    second[0].step = 0
    plan.count(second)
    assert f"prompts {first[0].phase}" in plan.unmet()
    for _ in range(2):
        assert plan.next()[0].phase != second[0].phase
