"""The stage `Generate`: which completions go back for another lease, and which version its rows are judged by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.adapters.protocols import ABORT, LENGTH, Completion, Prompt, Sampling
from transferqueue.adapters.stages.generation import BEGUN, Generate, StalenessOf


class Ends:
    """An engine that ends every completion after so many tokens, for this reason."""

    def __init__(self, tokens: int, reason: str) -> None:
        self._tokens, self._reason = tokens, reason

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, **terms: Any) -> Iterator[Completion]:
        for at in range(len(prompts)):
            ids = np.zeros(min(self._tokens, sampling.tokens_max), np.int32)
            yield Completion(
                prompt=at,
                sample=0,
                ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason=self._reason,
                spans=((0, len(ids)),),
            )


@pytest.mark.parametrize(
    ("tokens", "reason", "budget", "goes_on"),
    [
        (8, LENGTH, 4, True),
        (3, LENGTH, 4, False),  # at a limit of its own, where it would end again
        (3, LENGTH, 0, False),
        (3, ABORT, 0, True),
        (16, LENGTH, 0, False),
    ],
)
def test_a_completion_goes_on_if_its_lease_or_a_pause_ended_it(
    tokens: int, reason: str, budget: int, goes_on: bool
) -> None:
    stage = Generate(Ends(tokens, reason), Sampling(tokens_max=16), budget=budget, parts=True)  # type: ignore[arg-type]
    nothing: dict[str, Any] = {name: [np.empty(0, np.float32 if "log" in name else np.int32)] for name in BEGUN}
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("generate", needs=["prompt_ids", *BEGUN])])
        table.put(prompt_ids=[[1, 2]], **nothing)
        with table.lease("generate", rows=1) as batch:
            (part,) = stage(batch)
    assert part.unfinished == goes_on


class Drew:
    """An engine whose completions have these versions, token by token."""

    def __init__(self, versions: Sequence[Sequence[int]]) -> None:
        self._versions, self.begun = versions, list[int]()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, **terms: Any) -> Iterator[Completion]:
        self.begun = [0 if prompt.begun is None else len(prompt.begun.ids) for prompt in prompts]
        for at, versions in enumerate(self._versions):
            ids, logprobs = np.zeros(len(versions), np.int32), np.zeros(len(versions), np.float32)
            spans = tuple((version, 1) for version in versions)
            yield Completion(prompt=at, sample=0, ids=ids, logprobs=logprobs, finish_reason="stop", spans=spans)


def plain(versions: Sequence[int], of: StalenessOf) -> Fraction:
    """What a row's staleness is measured from, exactly."""
    if of == "mean":
        return Fraction(sum(versions), len(versions))
    return Fraction(min(versions) if of == "oldest" else max(versions))


OF: list[StalenessOf] = ["oldest", "newest", "mean"]
DRAWS = np.random.default_rng(0)
VERSIONS = [sorted(DRAWS.integers(0, 7, size).tolist()) for size in DRAWS.integers(1, 9, 60)]


@pytest.mark.parametrize("of", OF)
def test_rows_are_dropped_where_the_chosen_version_is_over_the_bound(of: StalenessOf) -> None:
    """With the mean too, which is no whole number: 60 rows of up to 8 tokens and 7 versions, with bounds of 1 to 4."""
    for bound in range(1, 5):
        stage = Generate(Drew(VERSIONS), Sampling(tokens_max=16), staleness_of=of)  # type: ignore[arg-type]
        with tq.connect("embedded") as queue:
            tasks = [tq.Task("generate", needs=["prompt_ids"]), tq.Task("train", needs=["response_ids"])]
            pacing = tq.Pacing("train", batch_rows=len(VERSIONS), depth=1, max_staleness=bound)
            table = queue.create_table("t", tasks=tasks, pacing=pacing)
            table.put(prompt_ids=[[1, 2]] * len(VERSIONS))
            with table.lease("generate", rows=len(VERSIONS)) as batch:
                for part in stage(batch):
                    batch.ack(batch.rows[part.at], **part.columns, **part.facts)
            table.advance(6)
            stale = [6 - plain(versions, of) > bound for versions in VERSIONS]
            assert table.audit().dropped.get("stale", 0) == sum(stale)
            assert 0 < sum(stale) < len(VERSIONS)
            with table.lease("train", rows=len(VERSIONS) - sum(stale)) as batch:
                assert batch.policy_version_max.tolist() == [
                    versions[-1] for versions, is_stale in zip(VERSIONS, stale, strict=True) if not is_stale
                ]


@pytest.mark.parametrize("of", OF)
def test_a_begun_completion_starts_again_by_the_same_version(of: StalenessOf) -> None:
    engine = Drew([])
    stage = Generate(engine, Sampling(tokens_max=16), parts=True, max_staleness=2, staleness_of=of)  # type: ignore[arg-type]
    begun: dict[str, Any] = {
        BEGUN[0]: [np.zeros(len(versions), np.int32) for versions in VERSIONS],
        BEGUN[1]: [np.zeros(len(versions), np.float32) for versions in VERSIONS],
        BEGUN[2]: [np.array(versions, np.int32) for versions in VERSIONS],
    }
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("generate", needs=["prompt_ids", *BEGUN])])
        table.put(prompt_ids=[[1, 2]] * len(VERSIONS), **begun)
        table.advance(6)
        with table.lease("generate", rows=len(VERSIONS)) as batch:
            assert [*stage(batch)] == []
    assert engine.begun == [0 if 6 - plain(versions, of) > 2 else len(versions) for versions in VERSIONS]
    assert 0 < engine.begun.count(0) < len(VERSIONS)
