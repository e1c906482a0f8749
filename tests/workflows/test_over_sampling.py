"""Over-sampling: what is refused, that nothing is lost or doubled whenever a batch is full, and the whole job with it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", exc_type=ImportError)
import torch

import transferqueue as tq
from tests.scale import examples
from tests.workflows.test_demo import SMALL
from transferqueue.errors import DeadlineExceeded, Full, Impossible, UsageError
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.loop.full_batches import FULL, hearing, tell_full
from transferqueue.workflows.flow.loop.serving import _commit
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.grpo.job import POLICY, JobSettings, create_table, pacing, stages
from transferqueue.workflows.grpo.learning.problems import problem_set
from transferqueue.workflows.grpo.model.transformer import Transformer
from transferqueue.workflows.grpo.run import run_demo
from transferqueue.workflows.grpo.stages.model_stages import Policy, Rollout
from transferqueue.workflows.grpo.stages.problem_stages import ProblemSource

OVER = JobSettings(learning=SMALL, mode="sync", depth=0, max_staleness=1, over_sample=1.5)
STEPS = 3
TINY = replace(OVER, learning=replace(SMALL, steps=STEPS, prompts_per_step=2, group_size=2), over_sample=2.0)


@pytest.mark.parametrize("over_sample", [0.5, float("nan"), float("inf")])
def test_a_factor_that_is_none_is_refused(over_sample: float) -> None:
    with pytest.raises(UsageError, match="is not a finite number from 1 on; 1 begins what a batch needs"):
        JobSettings(over_sample=over_sample)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(Impossible, match=r"over_sample=1.25 with mode async and engine builtin: .* begins more than a"):
        JobSettings(over_sample=1.25)
    with pytest.raises(Impossible, match="would be trained 1 versions later; give at least that as max_staleness"):
        JobSettings(mode="sync", depth=0, max_staleness=0, over_sample=1.25)
    with pytest.raises(Impossible, match="one that over-samples may have staleness"):
        JobSettings(mode="sync", depth=0, max_staleness=1)


@pytest.mark.parametrize(("over_sample", "groups"), [(1.0, 8), (1.01, 9), (1.25, 10), (2.0, 16)])
def test_so_many_groups_are_begun(over_sample: float, groups: int) -> None:
    staleness = int(over_sample > 1)
    job = JobSettings(learning=SMALL, mode="sync", depth=0, max_staleness=staleness, over_sample=over_sample)
    assert pacing(job).rows_ahead_max == groups * SMALL.group_size
    assert groups * SMALL.group_size % job.rows_per_put == 0


def test_a_full_batch_is_told_once_and_heard_at_the_server() -> None:
    with tq.connect() as queue:
        queue.weights(FULL, keep=1)
        with hearing(queue) as due:
            assert due() == 0
            for _ in range(2):  # a trainer that is started anew tells again
                tell_full(queue, 3, np.array([4, 5]))
            with queue.weights(FULL).pull(version=3, timeout_s=30) as told:
                assert told["rows"].tolist() == [4, 5]


class Job:
    """The job of `TINY` in this thread: one rollout, and a trainer that takes no steps. Full batches are told as `stops` say."""

    def __init__(self, queue: tq.Queue, stops: list[int]) -> None:
        self.table = create_table(queue, TINY)
        self.channel = queue.weights(POLICY)
        self.version = -1
        self.publish()
        self.policy = Policy(TINY.learning, self.channel)
        self.policy.refresh(timeout_s=30)
        self.events: list[Event] = []
        self.context = Context(queue=queue, table=self.table, emit=self.events.append)
        self.rollout = Rollout(TINY, self.policy, self.context, self.due)
        self.source = ProblemSource(TINY, problem_set(TINY.learning.dataset), rows_put=0)
        self.stops = iter(stops)
        self.stop, self.asked = next(self.stops, 0), 0
        self.told = 0
        self.trained: Counter[int] = Counter()
        self.batch: tq.Batch | None = None
        self.most = 0

    def publish(self) -> None:
        self.version += 1
        model = Transformer(TINY.learning.model_shape())
        model.initialize(torch.Generator().manual_seed(self.version))
        self.channel.publish(self.version, model.state_dict())

    def due(self) -> int:
        """Asked before a request, before each part of it, and before each token. The trainer's batch is told at one of the latter."""
        self.asked += 1
        if self.batch is None:
            self.take()
        if self.batch is not None and self.told <= self.version and self.asked > 1 + self.stop:
            self.told, self.stop = self.version + 1, next(self.stops, 0)
        return self.told

    def take(self) -> None:
        """The trainer asks for a batch, and waits for nothing."""
        self.score()
        with suppress(DeadlineExceeded, tq.EndOfTable):
            self.batch = self.table.lease("train", groups=TINY.learning.prompts_per_step, timeout_s=0)

    def score(self) -> None:
        """Rewards and advantages of what is there."""
        for name, given_ in (("reward", "rewards"), ("advantage", "advantages")):
            terms: dict[str, Any] = {"rows": 64} if name == "reward" else {"groups": 64}
            with suppress(DeadlineExceeded):
                batch = self.table.lease(name, **terms, at_least=1, timeout_s=0)
                batch.ack(**{given_: np.zeros(len(batch), np.float32)})

    def admit(self) -> None:
        """Whatever there is room for."""
        with suppress(Full, DeadlineExceeded):
            while rows := self.source.wants():
                with self.table.reserve(rows, timeout_s=0) as reservation:
                    self.table.put(reservation=reservation, **self.source(rows))

    def train(self) -> None:
        """Publish, then acknowledge, as the trainer does."""
        batch, self.batch = self.batch, None
        assert batch is not None
        self.told = max(self.told, self.version + 1)
        assert (batch.version - batch.policy_version <= TINY.max_staleness).all()
        for ids, logprobs, versions, oldest in zip(
            batch["response_ids"],
            batch["rollout_logprobs"],
            batch["token_versions"],
            batch.policy_version,
            strict=True,
        ):
            assert len(ids) == len(logprobs) == len(versions)
            assert versions.min() == oldest
        self.trained.update(batch.rows.tolist())
        self.publish()
        batch.ack()

    def step(self) -> None:
        """Generate while there are rows and no full batch is told; else train."""
        self.admit()
        self.most = max(self.most, self.table.stats()["outstanding"])
        if self.told > self.version or not self.generate():
            if self.batch is None:
                self.take()
            self.train()
            self.policy.refresh()

    def generate(self) -> bool:
        """One request, if there are rows."""
        self.asked = 0
        stage = next(stage for stage in stages(TINY) if stage.task.name == "rollout")
        try:
            batch = self.table.lease("rollout", rows=stage.rows, at_least=1, timeout_s=0)
        except (DeadlineExceeded, tq.EndOfTable):
            return False
        for part in self.rollout(batch):
            _commit(batch, part, batch.rows[part.at])
        return True


def run(job: Job) -> None:
    for _ in range(20 * STEPS):
        if sum(job.trained.values()) == TINY.rows_total:
            return
        job.step()


def test_what_stopped_between_two_tokens_is_told_with_its_tokens() -> None:
    with tq.connect() as queue:
        job = Job(queue, [3] * STEPS)
        run(job)
        told = [event.values for event in job.events if isinstance(event, Figures) and event.kind == "aborted"]
        assert 0 < sum(values["rows"] for values in told) < sum(values["tokens"] for values in told)


@pytest.mark.slow
@settings(max_examples=examples(6), deadline=None)
@given(stops=st.lists(st.integers(0, 12), max_size=6))
def test_whenever_a_batch_is_full_nothing_is_lost_and_nothing_doubled(stops: list[int]) -> None:
    with tq.connect() as queue:
        job = Job(queue, stops)
        run(job)
        audit = job.table.audit()
        assert (audit["rows_put"], audit["rows_done"], audit["balanced"]) == (TINY.rows_total, TINY.rows_total, True)
        assert set(job.trained.values()) == {1}
        assert TINY.rows_per_step < job.most <= pacing(TINY).rows_ahead_max


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True], ids=["all groups", "groups replaced"])
def test_a_job_that_over_samples_trains_on_exactly_its_rows(filtered: bool, tmp_path: Path) -> None:
    outcome = run_demo(replace(OVER, rollouts=2, filter_zero_advantage=filtered), directory=tmp_path)
    assert outcome.summary.rows_done == OVER.rows_total
    assert (outcome.summary.rows_dropped > 0) == filtered
    assert set(outcome.summary.staleness_histogram) <= {"0", "1"}
