"""The rollout stage of a job on real engines: the delayed update, weights in flight, seeds."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import torch

transformers = pytest.importorskip("transformers", reason="make test-engines installs it")

import transferqueue as tq
from tests.workflows.job.policies import context_of, job_of, publish, put_prompts
from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.adapters.weights import ChannelWeights
from transferqueue.workflows.flow.events import Event, Failure
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Stage
from transferqueue.workflows.job import names
from transferqueue.workflows.job.engines import open_engine
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.stages.rollout import rollout
from transferqueue.workflows.job.tiny_model.make import make

PROMPTS, GROUP, STEPS = 4, 4, 5
GIVES = ("response_ids", "token_versions", "rollout_logprobs", "finish_reason")
WAIT_S = 120
ENGINES = {
    "transformers": {"kind": "transformers", "slots": 8},
    "vllm": {"kind": "vllm", "slots": 8, "options": {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 256}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("policy")
    make(place, initializer_range=0.3)
    return place


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


def table_of(queue: tq.Queue, job: Job) -> tq.Table:
    """The generating part of a job's graph, with a trainer that needs responses alone."""
    return queue.create_table(
        names.TABLE,
        fields=[
            tq.Field("prompt_ids", "int32", (None,)),
            tq.Field(names.DATA, "value"),
            tq.Field("response_ids", "int32", (None,)),
            tq.Field("token_versions", "int32", (None,)),
            tq.Field("rollout_logprobs", "float32", (None,)),
            tq.Field("finish_reason", "str"),
        ],
        tasks=[
            tq.Task(names.ROLLOUT, needs=["prompt_ids"], gives=GIVES),
            tq.Task(names.TRAIN, needs=["prompt_ids", *GIVES], groups=tq.Complete()),
        ],
        pacing=tq.Pacing(
            names.TRAIN,
            batch_rows=PROMPTS * GROUP,
            depth=job.pacing.depth or 0,
            max_staleness=job.pacing.max_staleness,
            on_stale=tq.Requeue(names.ROLLOUT),
            channel=names.POLICY,
        ),
    )


def scale_of(version: int) -> float:
    return 1.0 + 0.2 * version


def trained(queue: tq.Queue, directory: Path, job: Job) -> list[dict[str, Any]]:
    """Generate and "train" five steps; return the rows in the order of training, each with its step, and what
    failed."""
    table, rows, events = table_of(queue, job), list[dict[str, Any]](), list[Event]()

    def source() -> None:
        for number in range(STEPS * PROMPTS):
            with table.reserve(GROUP, timeout_s=WAIT_S) as reservation:
                draws = np.random.default_rng(number)
                table.put(
                    prompt_ids=tq.Repeat([draws.integers(0, 200, size=5).astype(np.int32)], [GROUP]),
                    data=tq.Repeat([{}], [GROUP]),
                    group_id=number,
                    group_size=GROUP,
                    ordinal=np.arange(number * GROUP, (number + 1) * GROUP),
                    reservation=reservation,
                )
        table.seal()

    def generate() -> None:
        stage = Stage(task=table.tasks[names.ROLLOUT], rows=2, at_least=1, slots=8, stall_s=WAIT_S)
        with rollout(context_of(queue, table, job, events)) as work:
            run_stage(table, stage, work, emit=events.append)

    publish(queue, directory, 0, scale=scale_of(0))
    threads = [threading.Thread(target=source), threading.Thread(target=generate)]
    for thread in threads:
        thread.start()
    for step in range(STEPS):
        with table.lease(names.TRAIN, groups=PROMPTS, timeout_s=WAIT_S) as batch:
            columns = zip(*(batch[name].list() for name in ("prompt_ids", *GIVES)), strict=True)
            rows += [
                dict(zip(("prompt_ids", *GIVES), map(np.array, values), strict=True), step=step, ordinal=ordinal)
                for ordinal, values in zip(batch.ordinal.tolist(), columns, strict=True)
            ]
            publish(queue, directory, step + 1, scale=scale_of(step + 1))
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert [event.text for event in events if isinstance(event, Failure)] == []
    assert sorted(row["ordinal"] for row in rows) == list(range(STEPS * PROMPTS * GROUP))
    return rows


@torch.no_grad()
def logprobs(directory: Path, row: dict[str, Any], version: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.mul_(scale_of(version))
    ids_1T = torch.from_numpy(np.concatenate([row["prompt_ids"], row["response_ids"]])).long()[None]
    logprobs_TV = model(input_ids=ids_1T).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
    return logprobs_TV.gather(-1, torch.from_numpy(row["response_ids"]).long()[:, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of the stack under test
@pytest.mark.parametrize("engine", ENGINES)
def test_a_delayed_job_generates_a_step_with_the_version_before(queue: tq.Queue, directory: Path, engine: str) -> None:
    """Rows of step k + 1 have the version before the one that step k makes, from the first token to the last, and its
    log-probabilities."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    job = job_of(
        directory,
        engine=[ENGINES[engine]],
        pacing={"mode": "delayed"},
        sampling={"group_size": GROUP, "tokens_max": 12},
    )
    rows = trained(queue, directory, job)
    versions = defaultdict(set)
    for row in rows:
        step = row["ordinal"] // (PROMPTS * GROUP)
        versions[step] |= set(row["token_versions"].tolist())
        assert row["step"] == step
    assert dict(versions) == {step: {max(0, step - 1)} for step in range(STEPS)}
    for row in rows[:: PROMPTS * GROUP]:
        truth = logprobs(directory, row, int(row["token_versions"][0]))
        np.testing.assert_allclose(row["rollout_logprobs"], truth, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of the stack under test
@pytest.mark.parametrize("in_flight", [True, False])
def test_vllm_follows_the_weights_of_an_asynchronous_job(queue: tq.Queue, directory: Path, in_flight: bool) -> None:
    pytest.importorskip("vllm")
    job = job_of(
        directory,
        engine=[ENGINES["vllm"]],
        pacing={"mode": "async"},
        weights={"in_flight": in_flight},
        sampling={"group_size": GROUP, "tokens_max": 60},
    )
    rows = trained(queue, directory, job)
    for row in rows:
        versions = set(row["token_versions"].tolist())
        assert row["step"] - min(versions) <= 1
        assert in_flight or len(versions) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of the stack under test
@pytest.mark.parametrize("options", [{}, {"enable_chunked_prefill": True}], ids=["bare", "in parts"])
def test_vllm_takes_short_and_long_prompts_with_seeds(directory: Path, options: dict[str, Any]) -> None:
    """More prompt tokens at once than one pass takes, and new weights in between."""
    pytest.importorskip("vllm")
    job, draws = job_of(directory, engine=[{"kind": "vllm", "options": options}]), np.random.default_rng(0)
    prompts = [Prompt(ids=draws.integers(0, 200, size=size).astype(np.int32), seed=size) for size in range(12, 900, 37)]
    with tq.connect() as queue, closing(open_engine(job.engine[0], job)) as engine:
        publish(queue, directory, 1)
        drawn = engine.generate(prompts, Sampling(tokens_max=60))
        ended = [next(drawn)]
        with queue.weights(names.POLICY).pull(version=1) as weights:
            engine.update_weights(ChannelWeights(queue.address, weights), 1)
        assert len([*ended, *drawn]) == len(prompts)


def generated(queue: tq.Queue, directory: Path, **stage: Any) -> dict[int, list[int]]:
    """Generate sixteen rows with these leases, and return the responses by ordinal."""
    job = job_of(directory, engine=[ENGINES["vllm"]], pacing={"mode": "async"})
    table = table_of(queue, job)
    put_prompts(table, 4, GROUP)
    publish(queue, directory, 0)
    left, stop = 16, threading.Event()
    with rollout(context_of(queue, table, job, [])) as work:

        def counted(batch: tq.Batch) -> Iterator[Any]:
            nonlocal left
            for part in work(batch):
                left -= len(part.at)  # type: ignore[union-attr, arg-type]
                if not left:
                    stop.set()
                yield part

        chosen = Stage(task=table.tasks[names.ROLLOUT], stall_s=WAIT_S, **stage)
        run_stage(table, chosen, counted, emit=lambda event: None, stop=stop)
    rows = table.read(fields=["response_ids"])
    return dict(zip(rows.ordinal.tolist(), (ids.tolist() for ids in rows["response_ids"]), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of the stack under test
def test_vllm_draws_a_row_by_its_seed_however_rows_are_leased(directory: Path) -> None:
    pytest.importorskip("vllm")
    with tq.connect() as first, tq.connect() as second:
        whole = generated(first, directory, rows=16)
        assert generated(second, directory, rows=3, at_least=1, slots=5) == whole
