"""Jobs that generate ahead and repeat bit for bit: the step of a row decides its version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.jobs import job
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.data.source import needs_spare_prompts
from transferqueue.workflows.job.settings.sizes import has_step_versions, version_lag, versions_kept
from transferqueue.workflows.job.stages.step_versions import (
    StepVersions,
    begin_versions,
    in_turns,
    pull_exactly,
    step_versions,
)


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


@pytest.mark.parametrize(
    ("pacing", "every", "lag", "kept"),
    [
        ("{mode='delayed'}", 1, 1, 2),
        ("{mode='async'}", 1, 1, 2),
        ("{mode='async', max_staleness=3}", 1, 3, 4),
        ("{mode='async', depth=1, max_staleness=3}", 1, 1, 2),
        ("{mode='async', depth=4, max_staleness=2}", 1, 2, 3),
        ("{mode='async', max_staleness=3}", 2, 2, 2),
    ],
)
def test_the_lag_is_what_depth_and_staleness_allow(pacing: str, every: int, lag: int, kept: int) -> None:
    given = job("grpo", "reproducible=true", f"pacing={pacing}", f"weights.every={every}")
    assert has_step_versions(given)
    assert (version_lag(given), versions_kept(given)) == (lag, kept)


@pytest.mark.parametrize("changes", [("pacing.mode=async",), ("pacing.mode=sync", "reproducible=true")])
def test_other_jobs_keep_the_versions_that_they_say(changes: tuple[str, ...]) -> None:
    given = job("grpo", *changes, "weights.keep=1")
    assert not has_step_versions(given)
    assert versions_kept(given) == 1


def test_no_version_is_older_than_the_staleness_allows_and_none_is_newer_than_those_published() -> None:
    for every, lag in ((1, 1), (1, 3), (2, 1), (3, 2)):
        versions = StepVersions(prompts_per_step=2, lag=lag, every=every, version=5, prompt=10)
        for step in range(20):
            (version,) = {versions.of(prompt) for prompt in (10 + 2 * step, 11 + 2 * step)}
            assert version == 5 or version % every == 0
            assert 0 <= 5 + step - version <= lag + every - 1
            assert version <= max(5, 5 + step - lag)


def test_a_table_says_once_where_it_begins(queue: tq.Queue) -> None:
    given = job("grpo", "reproducible=true", "pacing={mode='async', max_staleness=2}")
    assert step_versions(queue, given).of(12) == 1
    begin_versions(queue, 6, 24)
    begin_versions(queue, 9, 36)  # a trainer that starts again
    versions = step_versions(queue, given)
    assert [versions.of(prompt) for prompt in (24, 28, 32, 36, 40)] == [6, 6, 6, 7, 8]
    assert versions.steps([24, 31, 40]).tolist() == [0, 1, 4]
    assert versions.first_prompt(2) == 32


def test_a_version_that_is_gone_ends_the_run_and_is_never_replaced(queue: tq.Queue) -> None:
    channel = queue.weights(names.POLICY, keep=2)
    for version in range(4):
        channel.publish(version, {"w": np.full(1, version, np.float32)})
    with pull_exactly(channel, 2, 0) as weights:
        assert weights.numpy()["w"].tolist() == [2.0]
    with pytest.raises(StageFailedInProcess, match=r'version 1 of channel "rollouts/policy" is gone.* weights\.keep'):
        pull_exactly(channel, 1, 0)
    with pytest.raises(tq.DeadlineExceeded):
        pull_exactly(channel, 4, 0)


def test_rows_come_in_turns_of_one_version() -> None:
    turns: list[Any] = [*in_turns(np.array([4, 2, 4, 3]))]
    assert turns == [(2, [1]), (3, [3]), (4, [0, 2])]


def test_its_table_leaves_the_staleness_to_the_steps_and_needs_no_spare_prompts() -> None:
    ahead = job("ppo", "reproducible=true", "pacing.mode=async")
    assert graph.pacing(ahead).max_staleness is None
    assert not needs_spare_prompts(ahead)
    assert graph.pacing(job("ppo", "pacing.mode=async")).max_staleness == 1
    assert needs_spare_prompts(job("ppo", "pacing.mode=async"))
