"""A generator that drains gives its rows back with their tokens, and another goes on with them: on the transformers
engine."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import msgspec  # noqa: E402

import transferqueue as tq  # noqa: E402
from tests.workflows.job.policies import job_of, publish, table_of  # noqa: E402
from transferqueue.adapters.stages.generation import BEGUN  # noqa: E402
from transferqueue.errors import Impossible, UsageError  # noqa: E402
from transferqueue.workflows.flow.draining import DrainRequest  # noqa: E402
from transferqueue.workflows.flow.events import WORK, Event, TimeSpan  # noqa: E402
from transferqueue.workflows.flow.loop.runner import run_stage  # noqa: E402
from transferqueue.workflows.flow.stage import Context  # noqa: E402
from transferqueue.workflows.job import names  # noqa: E402
from transferqueue.workflows.job.graph import engine_of, in_parts, stage_jobs, stages  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.settings.rules import check  # noqa: E402
from transferqueue.workflows.job.stages.rollout import rollout  # noqa: E402
from transferqueue.workflows.job.tiny_model.make import make  # noqa: E402

ROWS = 16
TOKENS = 96


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("policy")
    make(place, initializer_range=0.3)
    return place


def elastic_job(directory: Path, **tables: object) -> Job:
    return job_of(
        directory,
        sampling={"group_size": 4, "tokens_max": TOKENS, "temperature": 4.0},
        engine=[{"kind": "transformers", "slots": ROWS}],
        **{"elastic": {"max": 2}, **tables},
    )


def generate(queue: tq.Queue, table: tq.Table, job: Job, drain: DrainRequest, done: int) -> int:
    """Run one process's stage until it drains, or until `done` rows more are generated; return the rows done."""
    finished = 0

    def emit(event: Event) -> None:
        nonlocal finished
        if isinstance(event, TimeSpan) and event.name == WORK:
            finished += event.rows
            if finished >= done:
                drain.request()

    settings = msgspec.json.decode(msgspec.json.encode(job))
    context = Context(queue=queue, table=table, emit=emit, settings=settings, drain=drain)
    (stage,) = (stage for stage in stages(job) if stage.task.name == names.ROLLOUT)
    with rollout(context) as work:
        return run_stage(table, stage, work, emit=emit, stop=drain.requested)


def test_what_one_generator_began_another_finishes(directory: Path) -> None:
    job = elastic_job(directory)
    with tq.connect() as queue:
        table = table_of(queue, job)
        prompts = [np.arange(4, 8 + number, dtype=np.int32) for number in range(4)]
        nothing = {"begun_ids": np.int32, "begun_logprobs": np.float32, "begun_versions": np.int32}
        table.put(
            prompt_ids=tq.Repeat(prompts, [4] * 4),
            data=[{"prompt": ""}] * ROWS,
            group_id=np.repeat(np.arange(4), 4),
            group_size=4,
            ordinal=np.arange(ROWS),
            **{name: [np.empty(0, dtype)] * ROWS for name, dtype in nothing.items()},
        )
        table.seal()
        publish(queue, directory, 0)
        generate(queue, table, job, DrainRequest(), done=1)
        first = table.stats().tasks[names.ROLLOUT].done
        assert 0 < first < ROWS
        begun = table.read(fields=[*BEGUN, "prompt_ids"])
        ids = {row: each.tolist() for row, each in zip(begun.rows.tolist(), begun["begun_ids"], strict=True)}
        handed_back = {row: each for row, each in ids.items() if each}
        assert handed_back, "rows that were not finished came back with their tokens"
        assert all(len(each) < TOKENS for each in handed_back.values())
        generate(queue, table, job, DrainRequest(), done=ROWS - first)
        ended = table.read(fields=["response_ids", "token_versions", "rollout_logprobs"])
        responses = dict(zip(ended.rows.tolist(), ended["response_ids"], strict=True))
        assert len(responses) == ROWS
        for row, tokens in handed_back.items():
            assert responses[row].tolist()[: len(tokens)] == tokens
        for columns in zip(ended["response_ids"], ended["token_versions"], ended["rollout_logprobs"], strict=True):
            assert len({len(column) for column in columns}) == 1
        counts = table.stats().tasks[names.ROLLOUT]
        assert (counts.ready, counts.held) == (0, 0)


def test_a_drain_while_nothing_runs_ends_the_stage(directory: Path) -> None:
    job = elastic_job(directory)
    with tq.connect() as queue:
        table = table_of(queue, job)
        publish(queue, directory, 0)
        drain = DrainRequest()
        timer = threading.Timer(0.2, drain.request)
        timer.start()
        assert generate(queue, table, job, drain, done=1) == 0
        timer.join()


def test_only_generating_processes_are_elastic_and_more_are_like_the_last(directory: Path) -> None:
    job = elastic_job(directory)
    assert {each.name for each in stage_jobs(job) if each.elastic} == {names.ROLLOUT}
    assert engine_of(job, 7) == job.engine[-1]
    assert in_parts(job)
    assert not in_parts(elastic_job(directory, trainer={"prompts_per_step": 4}, reproducible=True))
    fixed = elastic_job(directory, elastic={})
    assert not any(each.elastic for each in stage_jobs(fixed))
    assert not in_parts(fixed)


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        ({"elastic": {"min": 2, "max": 4}}, Impossible, r"elastic.min=2, max=4 with 1 processes of engine"),
        ({"elastic": {"max": -1}}, UsageError, r"elastic.max=-1: give at least 0"),
        ({"engine": [{"kind": "vllm_server", "url": "http://h:1"}]}, UsageError, r"requests to the same server"),
    ],
)
def test_settings_that_could_not_work_are_refused(
    directory: Path, tables: dict[str, object], error: type[Exception], message: str
) -> None:
    file = msgspec.to_builtins(elastic_job(directory)) | {"pacing": {}, **tables}
    with pytest.raises(error, match=message):
        check(msgspec.convert(file, Job))
