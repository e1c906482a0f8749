"""The rollout stage on the transformers engine: its columns, its versions, and numbers that do not depend on the
leases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import transferqueue as tq  # noqa: E402
from tests.workflows.job.policies import context_of, job_of, publish, put_prompts, table_of  # noqa: E402
from transferqueue.adapters.protocols import PartialResult  # noqa: E402
from transferqueue.adapters.stages.generation import BEGUN  # noqa: E402
from transferqueue.errors import UsageError  # noqa: E402
from transferqueue.workflows.dispatch.channels import live_engines  # noqa: E402
from transferqueue.workflows.flow.events import Event, TimeSpan  # noqa: E402
from transferqueue.workflows.flow.loop.preference import PreferringWork  # noqa: E402
from transferqueue.workflows.flow.loop.runner import run_stage  # noqa: E402
from transferqueue.workflows.flow.stage import Stage  # noqa: E402
from transferqueue.workflows.job import graph, names  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.stages.rank import rank  # noqa: E402
from transferqueue.workflows.job.stages.rollout import rollout, sampling_of  # noqa: E402
from transferqueue.workflows.job.tiny_model.make import make  # noqa: E402

COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "token_versions", "finish_reason")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("policy")
    make(place, initializer_range=0.3)
    return place


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


def task_of(table: tq.Table) -> tq.Task:
    return table.tasks[names.ROLLOUT]


def run(queue: tq.Queue, job: Job, table: tq.Table, **stage: Any) -> list[Event]:
    """Serve the stage until every row is generated; rows may come again until they are trained, so the table has no
    end."""
    events: list[Event] = []
    left, stop = table.audit().rows_put, threading.Event()
    with rollout(context_of(queue, table, job, events)) as work:

        def counted(batch: tq.Batch) -> Iterator[PartialResult]:
            nonlocal left
            for part in work(batch):
                assert isinstance(part, PartialResult)
                left -= len(batch) if part.at is None else len(part.at)
                if not left:
                    stop.set()
                yield part

        run_stage(table, Stage(task=task_of(table), stall_s=60, **stage), counted, emit=events.append, stop=stop)
    return events


def rows_of(table: tq.Table) -> dict[int, tuple[Any, ...]]:
    rows = table.read(fields=list(COLUMNS))
    columns = [rows[name].list() if name == "finish_reason" else list(rows[name]) for name in COLUMNS]
    return {ordinal: values for ordinal, *values in zip(rows.ordinal.tolist(), *columns, strict=True)}  # type: ignore[misc]


@torch.no_grad()
def logprobs(directory: Path, prompt: Any, response: Any, temperature: float) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids_1T = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    logprobs_TV = (model(input_ids=ids_1T).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, torch.from_numpy(np.array(response)).long()[:, None])[:, 0].numpy()


def test_each_row_gets_a_response_with_its_logprobs_and_versions(queue: tq.Queue, directory: Path) -> None:
    job = job_of(directory, sampling={"group_size": 4, "tokens_max": 12, "temperature": 0.6})
    table = table_of(queue, job)
    put_prompts(table, 4, 4)
    table.seal()
    publish(queue, directory, 0)
    events = run(queue, job, table, rows=8, slots=8)
    rows = rows_of(table)
    assert len(rows) == 16
    end = transformers.AutoTokenizer.from_pretrained(directory).eos_token_id
    for _, response, _, versions, reason in rows.values():
        assert (response[-1] == end) == (reason == "stop")
        assert end not in response[:-1].tolist()
        assert reason == "stop" or len(response) == 12
        assert versions.tolist() == [0] * len(response)
    prompt, response, found, *_ = rows[0]
    np.testing.assert_allclose(found, logprobs(directory, prompt, response, 0.6), atol=1e-4)
    assert [event.name for event in events if isinstance(event, TimeSpan)][:2] == ["engine start", "swap"]


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_row_draws_the_same_however_rows_are_leased(queue: tq.Queue, directory: Path, reproducible: bool) -> None:
    """In a reproducible job the same to the last bit; otherwise the same tokens."""
    found = []
    for stage in ({"rows": 16}, {"rows": 3, "at_least": 1}, {"rows": 5, "at_least": 1, "slots": 7}):
        with tq.connect() as fresh:
            job = job_of(directory, trainer={"prompts_per_step": 4}, reproducible=reproducible)
            table = table_of(fresh, job)
            put_prompts(table, 4, 4)
            table.seal()
            publish(fresh, directory, 0)
            run(fresh, job, table, **stage)
            found.append({at: (ids.tolist(), np.array(lp)) for at, (_, ids, lp, *_) in rows_of(table).items()})
    for other in found[1:]:
        for ordinal, (ids, values) in found[0].items():
            assert other[ordinal][0] == ids
            if reproducible:
                assert other[ordinal][1].tobytes() == values.tobytes()
    assert len({tuple(ids) for ids, _ in found[0].values()}) > 12  # rows of a group draw differently


def generated_together(directory: Path, generators: int) -> dict[int, tuple[Any, ...]]:
    """Rows of four steps by as many generators, in mode async, while the weights of the steps are published."""
    job = job_of(
        directory,
        trainer={"prompts_per_step": 1},
        reproducible=True,
        pacing={"mode": "async", "depth": 3, "max_staleness": 1},
    )
    with tq.connect() as queue, ExitStack() as stack:
        table = table_of(queue, job)
        put_prompts(table, 4, 4)
        publish(queue, directory, 0)
        left, stop, lock = [table.audit().rows_put], threading.Event(), threading.Lock()

        def counted(work: Any, batch: tq.Batch) -> Iterator[PartialResult]:
            for part in work(batch):
                yield part
                with lock:  # after its commit
                    left[0] -= len(part.at)
                    if not left[0]:
                        stop.set()

        stage = Stage(task=task_of(table), stall_s=60, rows=4, slots=4)
        works = [stack.enter_context(rollout(context_of(queue, table, job, []))) for _ in range(generators)]
        threads = stack.enter_context(ThreadPoolExecutor(generators))
        served = [
            threads.submit(run_stage, table, stage, partial(counted, work), emit=lambda event: None, stop=stop)
            for work in works
        ]
        for version in (1, 2):
            publish(queue, directory, version, scale=1 - version / 10)
        for each in served:
            each.result(60)
        return rows_of(table)


def test_several_generators_ahead_of_the_trainer_give_each_row_the_bits_that_one_gives(directory: Path) -> None:
    """In the order of the data. Which of them takes a row, and when, depends on the time; its weights do not."""
    one, *others = [generated_together(directory, generators) for generators in (1, 2, 2)]
    assert {ordinal: {*row[3].tolist()} for ordinal, row in one.items()} == {
        ordinal: {max(0, ordinal // 4 - 1)} for ordinal in range(16)
    }
    for other in others:
        for ordinal, row in one.items():
            assert [np.array(value).tobytes() for value in other[ordinal]] == [
                np.array(value).tobytes() for value in row
            ]


def test_another_seed_draws_others(queue: tq.Queue, directory: Path) -> None:
    drawn = []
    for seed in (0, 1):
        with tq.connect() as fresh:
            job = job_of(directory, seed=seed)
            table = table_of(fresh, job)
            put_prompts(table, 1, 4)
            table.seal()
            publish(fresh, directory, 0)
            run(fresh, job, table, rows=4)
            drawn.append([row[1].tolist() for row in rows_of(table).values()])
    assert drawn[0] != drawn[1]


def test_a_response_is_generated_in_parts_and_one_too_old_begins_anew(queue: tq.Queue, directory: Path) -> None:
    job = job_of(directory, sampling={"group_size": 1, "tokens_max": 12, "budget": 5})
    table = table_of(queue, job)
    empty = {name: [np.empty(0, np.float32 if name == "begun_logprobs" else np.int32)] for name in BEGUN}
    table.put(prompt_ids=[np.arange(3, 9, dtype=np.int32)], data=[{}], ordinal=0, group_id=0, group_size=1, **empty)
    publish(queue, directory, 0)
    with rollout(context_of(queue, table, job, [])) as work:
        for version in (1, 2):
            with table.lease(names.ROLLOUT, rows=1, timeout_s=20) as batch:
                (part,) = work(batch)
                assert part.unfinished
                batch.release(batch.rows, **part.columns)
            publish(queue, directory, version)
        with table.lease(names.ROLLOUT, rows=1, timeout_s=20) as batch:
            assert (batch.version, len(batch["begun_ids"].list()[0])) == (2, 10)
            (part,) = work(batch)
            batch.release()
    assert part.unfinished  # the tokens of version 0 are 2 versions old: the response began again
    assert len(part.columns["begun_ids"][0]) == 5


def test_a_stop_text_must_be_one_token(directory: Path) -> None:
    job = job_of(directory, sampling={"group_size": 4, "tokens_max": 12, "stop": ["assistant"]})
    sampling = sampling_of(job)
    assert len(sampling.stop_ids) == 2
    job = job_of(directory, sampling={"group_size": 4, "tokens_max": 12, "stop": ["the end"]})
    with pytest.raises(UsageError, match=r"sampling\.stop='the end' is 7 tokens .* a text that is a single token"):
        sampling_of(job)


@pytest.mark.slow
def test_rows_are_ranked_before_an_engine_takes_them_and_it_measures_itself(queue: tq.Queue, directory: Path) -> None:
    """Dispatch by length with the real engine and the real ranker, which has learned nothing yet: the order stays as
    given."""
    job = job_of(directory, dispatch={"kind": "length"})
    table = table_of(queue, job)
    put_prompts(table, 12, 4)
    table.seal()
    publish(queue, directory, 0)
    ranking = threading.Thread(target=_rank, args=(queue, job, table), daemon=True)
    ranking.start()
    left, stop = 48, threading.Event()
    with rollout(context_of(queue, table, job, [])) as work:
        assert isinstance(work, PreferringWork)

        def counted(batch: tq.Batch) -> Iterator[PartialResult]:
            nonlocal left
            for part in work(batch):
                assert isinstance(part, PartialResult)
                assert part.at is not None
                left -= len(part.at)
                if not left:
                    stop.set()
                yield part

        stage = next(each for each in graph.stages(job) if each.task.name == names.ROLLOUT)
        run_stage(table, stage, PreferringWork(counted, work.choice), emit=lambda event: None, stop=stop)
        assert work.choice().where == ()
        (engine,) = live_engines(queue, names.TABLE)
    assert engine.curve.rows
    rows = table.read(fields=[names.RANKER_VERSION, names.EXPECTED_TOKENS, "response_ids"])
    assert set(rows[names.RANKER_VERSION].numpy().tolist()) == {0}
    assert rows.tokens.tolist() == [len(ids) for ids in rows["response_ids"]]
    table.drop(rows.rows, "test")
    ranking.join(60)
    assert not ranking.is_alive()


def _rank(queue: tq.Queue, job: Job, table: tq.Table) -> None:
    with rank(context_of(queue, table, job, [])) as loop:
        loop()
