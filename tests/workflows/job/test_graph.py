"""The graph of a job: every column that a task needs is given by somebody, and rows of each kind reach the end."""

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.scale import only_long
from tests.workflows.job.jobs import KINDS, job
from transferqueue.errors import NotFound
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import STALL_S
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import batch_rows, group_rows, records_rows

PUT = {"prompt_ids", names.DATA, names.EPISODE, *graph.BEGUN}


def values_for(field, rows, tokens=3):
    """Plausible values of a column: `rows` rows of `tokens` tokens."""
    if field.dtype == "value":
        return [{"prompt": "1+1", "answer": "2"}] * rows
    if field.dtype == "str":
        return ["stop"] * rows
    if field.shape:
        return [np.ones([tokens if size is None else size for size in field.shape], dtype=field.dtype)] * rows
    return np.ones(rows, dtype=field.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_needed_column_is_put_or_given_by_an_earlier_task(kind):
    given = set(PUT) | ({"response_ids"} if kind == "sft" else set())
    for task in graph.tasks(job(kind)):
        assert set(task.needs) <= given, f"{task.name} needs {set(task.needs) - given}"
        given |= set(task.gives)


@pytest.mark.parametrize("on_stale", ["requeue", *only_long("drop")])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_each_kind_reach_the_end(kind, on_stale):
    """Puts one batch, lets each stage give plausible columns in its turn, and ends with every row done."""
    settings = job(kind, f"pacing.on_stale={on_stale}")
    types = {field.name: field for field in graph.fields(settings)}
    puts = [name for name in types if name in PUT or (kind == "sft" and name == "response_ids")]
    rows, size = batch_rows(settings), group_rows(settings)
    with tq.connect("embedded") as queue:
        table = graph.create_table(queue, settings)
        with table.reserve(rows) as reservation:
            table.put(
                reservation=reservation,
                group_id=np.repeat(np.arange(rows // size), size),
                group_size=size,
                **{name: values_for(types[name], rows) for name in puts},
            )
        for stage in graph.stages(settings):
            done = 0
            while done < rows:
                with stage.lease(table) as batch:
                    done += len(batch)
                    batch.ack(**{name: values_for(types[name], len(batch)) for name in stage.task.gives})
        assert table.audit().rows_done == rows


@pytest.mark.parametrize("kind", KINDS)
def test_processes_travel_as_json_and_name_factories(kind):
    for process in graph.stage_jobs(job(kind)):
        again = msgspec.json.decode(msgspec.json.encode(process), type=StageJob)
        assert again == process
        assert msgspec.convert(again.settings, Job) == job(kind)
        assert process.factory.startswith("transferqueue.workflows.job.")


def test_the_terms_of_a_record_are_those_of_the_job():
    terms = ("queue.record=best_effort", "queue.record_gib=2", "queue.record_days=0.5")
    assert graph.retention(job("grpo", *terms), records=True) == tq.Recorded(
        ".", bytes=2 << 30, age_s=43_200.0, required=False
    )
    on = graph.retention(job("grpo", "queue.record=on", "queue.record_gib=0"), records=True)
    assert on == tq.Recorded(".", required=True)
    assert not records_rows(job("grpo"))
    assert records_rows(job("grpo", "queue.record=best_effort"))


@pytest.mark.parametrize(("on_stale", "freed"), [("requeue", 0), ("drop", 1)])
def test_what_only_the_reward_reads_ends_with_it_unless_rows_may_be_generated_again(on_stale, freed):
    settings = job("grpo", f"pacing.on_stale={on_stale}", "trainer.prompts_per_step=1")
    types, rows = {field.name: field for field in graph.fields(settings)}, batch_rows(settings)
    with tq.connect("embedded") as queue:
        table = graph.create_table(queue, settings)
        with table.reserve(rows) as reservation:
            data = {name: values_for(types[name], rows) for name in ("prompt_ids", names.DATA)}
            table.put(reservation=reservation, group_id=0, group_size=rows, **data)
        for stage in graph.stages(settings)[:2]:
            with stage.lease(table) as batch:
                batch.ack(**{name: values_for(types[name], len(batch)) for name in stage.task.gives})
        assert table.stats().columns_freed == freed * rows  # data


def test_processes_know_the_folder_of_the_run(tmp_path):
    processes = {process.name: process for process in graph.stage_jobs(job("grpo", 'evaluation.path="held"'), tmp_path)}
    assert {process.directory for process in processes.values()} == {str(tmp_path)}
    assert [name for name, process in processes.items() if process.loop] == ["train", "evaluate"]


def test_tasks_follow_from_the_kind():
    assert graph.task_names(job("grpo")) == ("rollout", "reward", "advantage", "train")
    assert graph.task_names(job("ppo")) == (
        "rollout", "reward", "reference", "value", "advantage", "train", "train_critic",
    )  # fmt: skip
    assert graph.task_names(job("distill")) == ("rollout", "teacher", "train")
    assert graph.task_names(job("sft")) == ("train",)
    assert graph.task_names(job("play")) == ("play", "advantage", "train")


def test_rows_that_are_trained_again_have_a_task_for_each_use_and_no_further_process():
    many = job("grpo", "pacing.uses=3")
    assert graph.task_names(many) == (*graph.task_names(job("grpo")), "train_use_2", "train_use_3")
    found = {task.name: task for task in graph.tasks(many)}
    assert all(
        msgspec.structs.replace(found[use], name="train") == found["train"] for use in ("train_use_2", "train_use_3")
    )
    assert {process.name for process in graph.stage_jobs(many)} == {
        process.name for process in graph.stage_jobs(job("grpo"))
    }


def test_counts_of_processes_follow_from_the_settings():
    settings = job(
        "grpo",
        'engine=[{kind="vllm", count=2}, {kind="transformers"}]',
        "reward.0.processes=3",
        'evaluation.path="held"',
    )
    count: dict = {}
    for process in graph.stage_jobs(settings):
        count[process.name] = count.get(process.name, 0) + 1
    assert count == {"prompts": 1, "rollout": 3, "reward": 3, "advantage": 1, "train": 1, "evaluate": 1}
    assert [graph.engine_of(settings, number).kind for number in range(3)] == ["vllm", "vllm", "transformers"]
    for number in (3, -1):
        with pytest.raises(NotFound, match=rf"no generating process {number}: the job declares 3 engines"):
            graph.engine_of(settings, number)


def test_pacing_follows_the_mode():
    assert graph.pacing(job("grpo", "pacing.mode=sync")).rows_ahead_max == 8
    assert graph.pacing(job("grpo")).rows_ahead_max == 16
    over = graph.pacing(job("grpo", "pacing={mode='sync', over_sample=1.5}"))
    assert (over.rows_ahead_max, over.max_staleness) == (12, 1)
    assert graph.pacing(job("sft")).channel is None
    assert graph.limits(job("grpo", "checkpoint.every=10")).rows == 10 * 8 + 16
    assert graph.limits(job("grpo"), records=True).rows == graph.limits(job("grpo")).rows + graph.ROWS_TO_RECORD


def test_a_colocated_trainer_generates_too():
    processes = {process.name: process for process in graph.stage_jobs(job("grpo", "pacing.mode=colocated"))}
    assert [*processes] == ["prompts", "reward", "advantage", "train"]
    assert processes["train"].factory == "transferqueue.workflows.job.training.colocated:train"
    settings = job("play", "pacing.mode=colocated")
    assert [process.name for process in graph.stage_jobs(settings)] == ["prompts", "advantage", "train"]
    assert graph.pacing(settings).rows_ahead_max == 8
    assert settings.trainer.stream == "off"


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        (("pacing.mode=colocated",), 8),
        (("pacing.mode=sync",), 8),
        (("pacing.mode=sync", "engine.0.slots=6"), 1),  # others wait for its slots
        (("pacing.mode=sync", "engine.0.slots=16", "engine.0.count=2"), 4),  # the other engine gets rows too
        (("pacing.mode=async", "engine.0.slots=16"), 4),
    ],
)
def test_an_engine_without_rows_ahead_leases_a_step_at_once(changes, rows):
    (stage,) = (stage for stage in graph.stages(job("grpo", *changes)) if stage.task.name == "rollout")
    assert (stage.rows, stage.at_least) == (rows, 1)


def test_the_source_waits_for_room_as_long_as_others_for_rows():
    """A step, or the start of an engine, may take longer than the five minutes of other flows."""
    assert {process.stall_s for process in graph.stage_jobs(job("grpo"))} == {STALL_S}


def test_trainers_of_policy_and_critic_belong_together():
    together = {process.name: process.together for process in graph.stage_jobs(job("ppo")) if process.together}
    assert together == {"train": "trainers", "train_critic": "trainers"}
    together = {process.name: process.together for process in graph.stage_jobs(job("grpo")) if process.together}
    assert together == {"train": "train"}
