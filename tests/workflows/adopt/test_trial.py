"""A trial of an adopted job: what it compares, the reasons it gives, and what it refuses before anything runs."""

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("yaml")
pytest.importorskip("transformers")

from msgspec.structs import replace

from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.adapters.stages.generation import row_seed
from transferqueue.adapters.transfer_queue_hook import ALIAS, REAL
from transferqueue.errors import UsageError
from transferqueue.workflows.adopt.read import read_job
from transferqueue.workflows.adopt.report import adopt
from transferqueue.workflows.adopt.trial.both import try_both
from transferqueue.workflows.adopt.trial.compare import (
    ON_QUEUE,
    FirstDifference,
    SideStep,
    Tried,
    first_difference,
    reasons,
)
from transferqueue.workflows.adopt.trial.native import (
    RecordedResponses,
    ReplayedResponses,
    scheduled_lr,
    trial_job,
    write_trial,
)
from transferqueue.workflows.adopt.trial.of_trl import first_visible
from transferqueue.workflows.adopt.trial.of_verl.job import compared, trial_settings, unmapped
from transferqueue.workflows.adopt.trial.of_verl.process import check_queue, steps_in
from transferqueue.workflows.adopt.trial.of_verl.rows import recorded
from transferqueue.workflows.adopt.trial.side import carried, steps_of
from transferqueue.workflows.job.reward_terms.piped_process import write_message
from transferqueue.workflows.job.settings.read import job_from_file, job_from_values
from transferqueue.workflows.job.settings.sizes import batch_rows, rows_ahead

STEP = SideStep(
    step=1,
    figures={"reward": 0.5, "loss": 0.25, "gradient_norm": 2.0, "lr": 1e-6},
    prompts=[[5, 6], [5, 6], [7], [7]],
    rows=[([1, 2], 1.0), ([3], -1.0), ([4], 0.0), ([4], 0.5)],
    steps=20,
)


def with_figure(name, value):
    return replace(STEP, figures={**STEP.figures, name: value})


@pytest.mark.parametrize(
    ("ours", "figure", "values"),
    [
        (replace(STEP, prompts=STEP.prompts[:2]), "rows", ("4", "2")),
        (replace(STEP, prompts=[[5, 6], [5, 6], [7], [8]]), "prompt tokens", ("[7]", "[8]")),
        (with_figure("reward", 0.75), "reward", ("0.5", "0.75")),
        (replace(STEP, rows=[*STEP.rows[:3], ([4], 0.25)]), "advantage", ("0.5", "0.25")),
        (replace(STEP, rows=STEP.rows[:3]), "rows in the loss", ("4", "3")),
        (with_figure("loss", 0.25003), "loss", ("0.25", "0.25003")),
        (with_figure("kl", 0.0), "kl", ("none", "0")),
        (with_figure("gradient_norm", 2.1), "gradient_norm", ("2", "2.1")),
        (with_figure("lr", 0.999e-6), "lr", ("1e-06", "9.99e-07")),
    ],
)
def test_the_first_figure_that_differs_is_named(ours, figure, values):
    found = first_difference([STEP, replace(STEP, step=2)], [STEP, replace(ours, step=2)])
    assert (found.step, found.figure, found.theirs, found.ours) == (2, figure, *values)


def test_equal_steps_in_another_order_of_rows_do_not_differ():
    other = replace(with_figure("loss", 0.250004), prompts=STEP.prompts[::-1], rows=STEP.rows[::-1])
    assert first_difference([STEP], [other]) is None


def test_a_step_that_only_the_stack_took_differs():
    found = first_difference([STEP, replace(STEP, step=2)], [STEP])
    assert (found.step, found.figure, found.ours) == (2, "rows", "0")


def test_reasons_name_the_key_that_was_changed_then_what_adopt_refused():
    words = ["trl", "grpo", "--model_name_or_path", "m", "--top_p", "0.9", "--knob", "3"]
    lines = adopt(words).lines
    found = FirstDifference(step=2, figure="loss", theirs="1", ours="2")
    why = reasons(found, (20, 20), {"queue.memory_gib": (8.0, 9.0), "algorithm.kl": (0.04, 0.4)}, lines)
    assert why[0] == "algorithm.kl is 0.4, where adopt writes 0.04"
    assert [text.partition(" is ")[0] for text in why[1:4]] == ["queue.memory_gib", "top_p=0.9", "knob=3"]
    of_lr = reasons(FirstDifference(step=2, figure="lr", theirs="1", ours="2"), (20, 1_000_000), {}, lines)
    assert of_lr[0].endswith("set steps = 20")
    assert reasons(found, (20, 20), {}, [])[0].startswith("no key is refused, unknown or changed; it depends on algo")


def test_the_text_shows_both_figures_and_what_differs():
    why = ["algorithm.kl is 0.4, where adopt writes 0.04"]
    differs = FirstDifference(step=2, figure="loss", theirs="0.25", ours="0.5", why=why)
    tried = Tried(stack="trl", bound=1e-5, figures=[{"loss": (0.25, 0.25)}], differs=differs, notes=["careful"])
    assert tried.text().splitlines()[1:] == [
        "  step 1: loss 0.25 and 0.25",
        "  step 2 differs at loss: 0.25 in trl, 0.5 here",
        "    algorithm.kl is 0.4, where adopt writes 0.04",
        "  note: careful",
    ]


def test_the_engine_gives_each_row_the_response_of_its_ordinal():
    engine = ReplayedResponses(RecordedResponses(seed=42, tokens=[[3, 1], [4, 5]]))
    engine.update_weights(None, 7)
    prompts = [Prompt(ids=np.array([9]), seed=row_seed(42, place)) for place in (1, 0)]
    found = list(engine.generate(prompts, Sampling(tokens_max=2, stop_ids=(1,))))
    assert [(each.ids.tolist(), each.finish_reason) for each in found] == [([4, 5], "length"), ([3, 1], "stop")]
    assert {each.policy_version for each in found} == {7}
    with pytest.raises(UsageError, match="beyond those that the stack trained"):
        list(engine.generate([Prompt(ids=np.array([9]), seed=row_seed(42, 2))], Sampling(tokens_max=2)))


PLAIN = {
    "model": {"path": "m"},
    "data": {"path": "d"},
    "algorithm": {"kind": "grpo", "old": "trainer"},
    "steps": 4,
    "reward": [{"function": "a:b"}],
    "engine": [{"kind": "transformers"}],
}


def test_learning_rates_are_those_of_the_whole_schedule():
    job = job_from_values({**PLAIN, "trainer": {"lr": 1e-3, "schedule": "linear"}})
    assert [scheduled_lr(job, step) for step in (1, 2)] == [1e-3, 0.75e-3]


@pytest.mark.parametrize(
    "values",
    [
        {"pacing": {"mode": "colocated"}},
        {"pacing": {"mode": "async", "depth": 2}, "weights": {"every": 2}},
        {"pacing": {"mode": "sync", "over_sample": 1.5}},
        {"reproducible": True, "pacing": {"mode": "sync"}, "checkpoint": {"every": 2}, "evaluation": {"every": 2}},
    ],
    ids=["colocated", "ahead", "over-sampled", "reproducible"],
)
def test_a_step_of_the_trial_has_the_rows_of_one_step_whatever_the_job_has(tmp_path, values):
    job = job_from_values({**PLAIN, **values})
    trial = trial_job({**PLAIN, **values}, job, tmp_path, 2)
    written = job_from_file(write_trial(trial, tmp_path, [STEP]))
    assert (written.pacing.mode, written.steps, written.reproducible) == ("sync", 1, False)
    assert rows_ahead(written) == batch_rows(written)


@pytest.mark.parametrize(
    ("algorithm", "error"),
    [
        ({"old": "rollout"}, 'algorithm.old="rollout" reads the log-probs of the engine'),
        ({"tis_max": 2.0}, "algorithm.tis_max=2.0 reads the log-probs"),
        ({"kl": 0.1, "kl_in": "reward"}, 'algorithm.kl_in="reward" reads the log-probs'),
    ],
)
def test_a_job_that_reads_log_probs_of_the_engine_is_refused(tmp_path, algorithm, error):
    values = {**PLAIN, "algorithm": {**PLAIN["algorithm"], **algorithm}}
    with pytest.raises(UsageError, match=error):
        trial_job(values, job_from_values(values), tmp_path, 2)


def test_the_trial_of_the_native_job_is_checked_before_trl_is_started(tmp_path):
    words = ["trl", "grpo", "--model_name_or_path", str(tmp_path), "--dataset_name", "d", "--reward_funcs", "a.b"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    written = adopt(words).job
    file = tmp_path / "job.toml"
    assert 'old = "trainer"' in written
    file.write_text(written.replace('old = "trainer"', 'old = "rollout"'))
    told = []
    with pytest.raises(UsageError, match='a trial takes old="trainer"'):
        try_both(words, stack="trl", written=written, lines=[], file=file, tell=told.append)
    assert told == []


@pytest.mark.parametrize(("devices", "first"), [(None, "0"), ("", ""), ("3", "3"), ("GPU-8f,1", "GPU-8f")])
def test_trl_sees_the_first_visible_gpu_alone(devices, first):
    assert first_visible(devices) == first


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (
            ["--use_vllm", "true"],
            "the loss would depend on vLLM's log-probs; give --use_vllm false after the file and --",
        ),
        (["--use_peft", "true"], "adapters begin with random numbers of each side's own; give --use_peft false"),
        (["--num_processes", "2"], "a trial has one process of each side; give --num_processes 1"),
        (["--steps_per_generation", "4"], "by a draw of its own; give --steps_per_generation 1 after the file"),
        (
            [],
            "the model nowhere/none is not on this machine; load it .*, or give a small one .*: -- --model",
        ),
    ],
)
def test_a_job_that_cannot_be_compared_is_refused_before_anything_runs(more, error):
    words = ["trl", "grpo", "--model_name_or_path", "nowhere/none", *more]
    with pytest.raises(UsageError, match=error):
        try_both(words, stack="trl", written="", lines=[])


@pytest.mark.parametrize("stack", ["nemo-rl", "slime", "openrlhf"])
def test_a_stack_that_does_not_start_on_a_cpu_is_not_tried_and_the_error_says_why(stack):
    with pytest.raises(UsageError, match=f"of trl and verl on a CPU; {stack} does not start on one: .* GPU.* generate"):
        try_both([], stack=stack, written="", lines=[])


VERL = [
    *("verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", "data.train_batch_size=8"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.model.path=nowhere/none"),
]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("trainer.v1.trainer_mode=separate_async", "which rows a step of separate_async trains depends on time; give"),
        ("actor_rollout_ref.actor.strategy=megatron", "megatron does not run on a CPU; give actor_rollout_ref.actor."),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "order that differs .*; give .*.ppo_mini_batch_size=8 after"),
        ("actor_rollout_ref.model.lora_rank=8", "adapters begin with random numbers .*; give .*.lora_rank=0 after"),
        ("actor_rollout_ref.rollout.top_k=20", "has no top_k; give actor_rollout_ref.rollout.top_k=-1 after the file"),
        ("algorithm.adv_estimator=gae", "critic has not been run on a CPU; give algorithm.adv_estimator=grpo"),
        ("data.seed=3", "the model nowhere/none is not on this machine; .* after the file: actor_rollout_ref.model.p"),
    ],
)
def test_a_job_that_verl_cannot_run_twice_on_a_cpu_is_refused_before_anything_runs(more, error):
    with pytest.raises(UsageError, match=error):
        try_both([*VERL, more], stack="verl", written="", lines=[])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("data.seed=3", ""),
        ("algorithm.adv_estimator=reinforce_plus_plus", "gives each token an advantage"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "give actor_rollout_ref.actor.ppo_epochs=1"),
        ("algorithm.use_kl_in_reward=True", "reads the log-probs of the engine"),
        ("algorithm.filter_groups.enable=True", "are replaced by ones that the other side does not draw"),
    ],
)
def test_the_native_job_is_left_out_where_it_cannot_train_the_rows_of_verl(more, why):
    found = unmapped(read_job([*VERL, more]).settings)
    assert why in found
    assert bool(why) == bool(found)


def test_settings_of_the_trial_go_before_those_of_the_job_and_figures_are_those_that_both_define_alike():
    settings = read_job([*VERL, "trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.use_kl_loss=True"]).settings
    given = trial_settings(settings, Path("trial"))
    assert (given["trainer.n_gpus_per_node"], given["data.train_batch_size"], given["data.seed"]) == (1, 8, 1)
    assert compared(settings) == {"reward", "loss", "kl", "gradient_norm", "lr"}
    other = read_job([*VERL, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]).settings
    assert compared(other) == {"reward", "loss", "gradient_norm", "lr"}


def test_a_trial_of_verl_writes_nothing_where_the_users_run_does_and_has_a_ray_of_its_own(tmp_path):
    words = [
        *("trainer.rollout_data_dir=kept", "trainer.validation_data_dir=kept", "trainer.default_local_dir=kept"),
        *("ray_kwargs.timeline_json_file=kept", "global_profiler.steps=[1]", "skip.rollout.enable=True"),
        *("actor_rollout_ref.rollout.trace.backend=mlflow", "ray_kwargs.ray_init.address=auto"),
        *("trainer.experiment_name=of-$(date)", "trainer.project_name=kept"),
    ]
    given = trial_settings(read_job([*VERL, *words]).settings, tmp_path)
    assert not [value for value in given.values() if value in ("kept", "mlflow", [1], "[1]")]
    assert (given["trainer.rollout_data_dir"], given["skip.rollout.enable"]) == (None, False)
    assert given["ray_kwargs.ray_init.address"] == "local"
    assert Path(given["trainer.default_local_dir"]).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("words", "stack", "keys"),
    [
        ([*VERL, "data.train_files=$(pwd)/train", "data.val_files=`pwd`"], "verl", "data.train_files, data.val_files"),
        (["trl", "grpo", "--model_name_or_path", "m", "--dataset_name", "$(pwd)/d"], "trl", "dataset_name"),
    ],
)
def test_words_that_a_shell_would_compute_are_refused_before_anything_runs(words, stack, keys):
    with pytest.raises(UsageError, match=f"--try: {keys} is what a shell would compute"):
        try_both(words, stack=stack, written="", lines=[])


def test_what_verl_itself_computes_is_no_word_of_a_shell():
    with pytest.raises(UsageError, match="is not on this machine"):
        try_both([*VERL, "data.val_batch_size='${data.train_batch_size}'"], stack="verl", written="", lines=[])


def test_steps_with_a_nan_come_back_from_the_file_and_the_queue_that_verl_imported_is_checked(tmp_path):
    steps = [replace(STEP, figures={"loss": math.nan}, data=[{"x": math.inf}], queue=name) for name in (REAL, ALIAS)]
    with (tmp_path / "steps").open("ab") as file:
        for step in steps:
            write_message(file.write, step)
    found = list(steps_in(tmp_path / "steps"))
    assert math.isnan(found[0].figures["loss"])
    assert (found[1].data, found[1].rows) == ([{"x": math.inf}], STEP.rows)
    for step, is_this in zip(found, (True, False), strict=True):
        check_queue(step, is_this=is_this)
        with pytest.raises(UsageError, match=f"its transfer_queue is {step.queue}, not the one to try"):
            check_queue(step, is_this=not is_this)


def test_values_of_numpy_are_carried_and_the_column_of_others_is_named():
    value = carried("x", {"a": np.float32(0.5), "b": np.array([1, 2]), "c": [np.array(["d"], object)]})
    assert value == {"a": 0.5, "b": [1, 2], "c": [["d"]]}
    for other in (object(), 1 << 70):
        with pytest.raises(UsageError, match="column 'picture' of the data cannot be carried"):
            carried("picture", [other])


def test_advantages_of_every_token_are_compared_where_both_sides_have_them():
    one = replace(STEP, completions=[[1, 2], [3]], advantages=[[1.0, 0.5], [-1.0]])
    assert first_difference([one], [replace(one, completions=[[3], [1, 2]], advantages=[[-1.0], [1.0, 0.5]])]) is None
    assert first_difference([one], [STEP]) is None
    found = first_difference([one], [replace(one, advantages=[[1.0, 0.25], [-1.0]])])
    assert (found.figure, found.theirs, found.ours) == ("advantage", "0.5", "0.25")
    found = first_difference([one], [replace(one, advantages=[[1.0], [-1.0]])])
    assert (found.figure, found.ours) == ("advantage", "[1.0]")


def test_a_step_that_only_the_other_side_took_differs():
    found = first_difference([STEP], [STEP, replace(STEP, step=2)])
    assert (found.step, found.figure, found.theirs, found.ours) == (2, "rows", "0", "4")


def test_a_step_without_rows_is_compared_with_nothing(tmp_path, monkeypatch):
    (tmp_path / "empty_side.py").write_text(
        "from transferqueue.workflows.adopt.trial.compare import SideStep\n"
        "from transferqueue.workflows.adopt.trial.side import run_side\n"
        "run_side(lambda words, send: send(SideStep(step=1, figures={'loss': 0.0}, prompts=[], rows=[])))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="the side cannot be compared: its step 1 has no rows"):
        steps_of("the side", "empty_side", [], tmp_path / "log", lambda text: None)
    with pytest.raises(UsageError, match="verl's step 3 has no rows"):
        recorded(3, 20, [], {"rm_scores": []}, {}, "question")


def test_rows_of_verl_are_recorded_prompt_by_prompt():
    keys = ["b_1_0", "a_10_0", "b_0_0", "a_2_0"]
    rows = {
        "prompts": [[7], [5, 6], [7], [5, 6]],
        "responses": [[1], [2, 2], [3], []],
        "rm_scores": [[1.0], [0.0, 0.5], [0.0], [0.0]],
        "advantages": [[0.5], [1.0, 1.0], [-0.5], []],
        "raw_prompt": ["seven", "five", "seven", "five"],
        "answer": ["B", "A", "B", "A"],
    }
    step = recorded(2, 20, keys, rows, {"loss": 0.25}, "question")
    assert step.completions == [[], [2, 2], [3], [1]]
    assert step.advantages == [[], [1.0, 1.0], [-0.5], [0.5]]
    assert step.data == [{"question": "five", "answer": "A"}, {"question": "seven", "answer": "B"}]
    assert step.prompts == [[5, 6], [5, 6], [7], [7]]
    assert step.rows == [([2, 2], 1.0), ([3], -0.5), ([1], 0.5)]
    assert (step.figures, step.steps) == ({"reward": 0.375, "loss": 0.25}, 20)


def test_the_text_of_a_trial_on_two_queues_names_both_and_the_figures_that_were_compared():
    tried = Tried(
        stack="verl", other=ON_QUEUE, bound=1e-5, figures=[{"loss": (0.25, 0.25)}], differs=None, notes=["so"]
    )
    assert tried.text().splitlines() == [
        "tried: verl and itself on this queue, on the rows that each generated",
        "  step 1: loss 0.25 and 0.25",
        "  equal within 1e-05: prompt tokens, advantages, loss",
        "  note: so",
    ]
