"""Partial rollouts and groups that are replaced: what a generator hands back, and the whole job with either."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
import torch

import transferqueue as tq
from tests.workflows.stream_engine import Countdown
from tests.workflows.test_demo import SMALL
from transferqueue.adapters.protocols import PartialResult, Sampling
from transferqueue.adapters.stages.generation import Generate
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.events import WORK, Event, Failure, TimeSpan
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.flow.loop.runner import run_source, run_stage
from transferqueue.workflows.flow.stage import Context, Stage
from transferqueue.workflows.grpo.job import POLICY, JobSettings, create_table, stages
from transferqueue.workflows.grpo.learning.problems import problem_set
from transferqueue.workflows.grpo.model.prompt_packing import response_logprobs
from transferqueue.workflows.grpo.model.transformer import Transformer
from transferqueue.workflows.grpo.run import RunOutcome, run_demo
from transferqueue.workflows.grpo.stages.advantage_stage import ZERO_ADVANTAGE
from transferqueue.workflows.grpo.stages.model_stages import SURPLUS, Policy, Rollout
from transferqueue.workflows.grpo.stages.problem_stages import ProblemSource

PARTIAL = JobSettings(learning=replace(SMALL, steps=1), partial=2, max_staleness=4, depth=4)


# ---------------------------------------------------------------- settings, parts


def test_a_budget_that_nobody_can_keep_is_refused() -> None:
    with pytest.raises(UsageError, match="partial=-1 is not a number of tokens"):
        JobSettings(partial=-1)
    with pytest.raises(UsageError, match="budget=-1 is not a number of tokens"):
        Generate(Countdown(), Sampling(tokens_max=2), budget=-1)


def test_an_unfinished_part_says_which_rows_and_nothing_else() -> None:
    with pytest.raises(UsageError, match="say which rows"):
        PartialResult(columns={}, unfinished=True)
    with pytest.raises(UsageError, match="nobody would read them"):
        PartialResult(columns={"y": [1]}, drop="flat")


def test_rows_of_parts_are_handed_back_dropped_and_done() -> None:
    task = tq.Task("count", needs=["x"], gives=["y"])
    events: list[Event] = []

    def count(batch: tq.Batch) -> Iterator[PartialResult]:
        x = batch["x"].numpy()
        for at, value in enumerate(x):
            if value == 5:
                yield PartialResult(at=np.array([at]), columns={}, drop="five")
            elif value < 3:
                yield PartialResult(at=np.array([at]), columns={"x": x[[at]] + 1}, unfinished=True)
            else:
                yield PartialResult(at=np.array([at]), columns={"y": 10 * x[[at]]})

    with tq.connect() as queue:
        table = queue.create_table(
            "t", fields=[tq.Field("x", "int64"), tq.Field("y", "int64")], tasks=[task], retention=tq.Manual()
        )
        table.put(x=np.array([0, 3, 5, 2]))
        table.seal()
        run_stage(table, Stage(task=task, rows=2, at_least=1), count, emit=events.append)
        assert table.read(fields=["y"])["y"].list() == [30, 30, 30]
        assert table.audit()["dropped"] == {"five": 1}
    assert not [event for event in events if isinstance(event, Failure)]


def test_a_source_ends_with_a_table_that_somebody_sealed() -> None:
    class Endless:
        def wants(self) -> int:
            return 2

        def __call__(self, rows: int) -> dict[str, Any]:
            if table.audit()["rows_put"] >= 6:
                table.seal()
            return {"x": [1] * rows}

    with tq.connect() as queue:
        table = queue.create_table("t", fields=[tq.Field("x", "int64")])
        assert run_source(table, Endless(), emit=lambda event: None) == 6


# ---------------------------------------------------------------- generation in parts


class NewWeights:
    """A rollout stage before each of whose leases new weights are published."""

    def __init__(self, queue: tq.Queue, table: tq.Table) -> None:
        self.channel = queue.weights(POLICY)
        self.models: list[Transformer] = []
        self.stop = threading.Event()
        self.table = table
        self.publish()
        self.policy = Policy(PARTIAL.learning, self.channel)
        self.context = Context(queue=queue, table=table, emit=lambda event: None)
        self.rollout = Rollout(PARTIAL, self.policy, self.context)

    def publish(self) -> None:
        """Random weights as the next version."""
        model = Transformer(PARTIAL.learning.model_shape())
        model.initialize(torch.Generator().manual_seed(len(self.models)))
        self.channel.publish(len(self.models), model.state_dict())
        self.models.append(model)

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """One lease under the newest weights, and newer ones after it."""
        yield from self.rollout(batch)
        if len(self.models) < 4:
            self.publish()
        if self.table.stats()["tasks"]["rollout"]["done"] == PARTIAL.rows_total:
            self.stop.set()


def generated() -> tuple[dict[str, list[Any]], np.ndarray, list[Transformer]]:
    """A step's rows, generated two tokens at a time, each two under other weights."""
    with tq.connect() as queue:
        table = create_table(queue, PARTIAL)
        problems = problem_set(PARTIAL.learning.dataset)
        run_source(table, ProblemSource(PARTIAL, problems, rows_put=0), emit=lambda event: None)
        stage = next(stage for stage in stages(PARTIAL) if stage.task.name == "rollout")
        work = NewWeights(queue, table)
        run_stage(table, stage, work, emit=lambda event: None, stop=work.stop)
        names = ("prompt_ids", "response_ids", "rollout_logprobs", "token_versions")
        rows = table.read(fields=names)
        columns = {name: [value.copy() for value in rows[name]] for name in names}
        return columns, rows.policy_version, work.models


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, list[Any]], np.ndarray, list[Transformer]]:
    return generated()


def test_spans_agree_with_the_versions_of_the_rows(made: Any) -> None:
    columns, oldest, _ = made
    assert len(oldest) == 64
    for ids, logprobs, versions, version in zip(
        columns["response_ids"], columns["rollout_logprobs"], columns["token_versions"], oldest, strict=True
    ):
        assert len(ids) == len(logprobs) == len(versions)
        assert versions.min() == version
        assert (np.diff(versions) >= 0).all()
    assert max(versions.max() for versions in columns["token_versions"]) >= 2


def test_logprobs_of_each_span_are_those_of_its_weights(made: Any) -> None:
    columns, _, models = made
    prompts, responses = columns["prompt_ids"], columns["response_ids"]
    temperature = PARTIAL.learning.temperature
    by_version = [
        [np.asarray(row) for row in response_logprobs(model, prompts, responses, temperature=temperature)]
        for model in models
    ]
    for row, (logprobs, versions) in enumerate(
        zip(columns["rollout_logprobs"], columns["token_versions"], strict=True)
    ):
        wanted = [by_version[version][row][at] for at, version in enumerate(versions)]
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)


# ---------------------------------------------------------------- the job


def run(settings: JobSettings, directory: Path, **observed: Any) -> RunOutcome:
    outcome = run_demo(settings, directory=directory, **observed)
    assert outcome.summary.steps == settings.learning.steps
    assert outcome.summary.rows_done == settings.rows_total
    return outcome


@pytest.mark.long
@pytest.mark.slow
def test_a_job_in_parts_trains_on_exactly_its_rows(tmp_path: Path) -> None:
    outcome = run(JobSettings(learning=SMALL, partial=2, rollouts=2), tmp_path)
    assert outcome.summary.rows_put == 256
    assert set(outcome.summary.staleness_histogram) <= {"0", "1"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        JobSettings(learning=SMALL, filter_zero_advantage=True),
        JobSettings(
            learning=SMALL, filter_zero_advantage=True, partial=2, mode="sync", max_staleness=0, depth=0, rollouts=2
        ),
    ],
    ids=["async", "sync, in parts"],
)
def test_groups_with_nothing_to_teach_are_replaced_exactly(settings: JobSettings, tmp_path: Path) -> None:
    outcome = run(settings, tmp_path)
    assert outcome.audit.dropped[ZERO_ADVANTAGE] % settings.learning.group_size == 0
    assert set(outcome.audit.dropped) <= {ZERO_ADVANTAGE, SURPLUS}
    assert outcome.audit.dropped.get(SURPLUS, 0) <= 2 * 64


@pytest.mark.long
@pytest.mark.slow
def test_a_rollout_killed_in_the_middle_of_a_response_loses_nothing(tmp_path: Path) -> None:
    flows: list[Flow] = []

    def kill(label: str, event: Event) -> None:
        """After its first lease each response has one token."""
        if label == "rollout-0" and isinstance(event, TimeSpan) and event.name == WORK and len(flows) == 1:
            flows.append(flows[0])
            os.kill(flows[0].pids()[label], signal.SIGKILL)

    outcome = run(JobSettings(learning=SMALL, partial=1), tmp_path, observe=kill, started=flows.append)
    assert len(flows) == 2
    assert (outcome.audit.put, outcome.audit.done) == (256, 256)
