"""Models as stages, run through a queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Stage

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engines.test_scoring import PAD, SIZE, Qwen3Subject  # noqa: E402
from transferqueue.adapters.scoring import (  # noqa: E402
    LogProbs,
    RewardModel,
    TeacherTopK,
    Values,
    response_logprobs,
    response_values,
    rewards_of,
    teacher_top_k,
)

SUBJECT = Qwen3Subject()


def rows(count: int = 10) -> dict[str, list[Any]]:
    draws = np.random.default_rng(2)
    return {
        "prompt_ids": [draws.integers(0, SIZE, size).astype(np.int32) for size in draws.integers(1, 8, count)],
        "response_ids": [draws.integers(0, SIZE, size).astype(np.int32) for size in draws.integers(1, 12, count)],
    }


def served(function: Any, columns: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    """What the stage gives each row."""
    task = tq.Task("score", needs=tuple(function.needs), gives=tuple(function.gives))
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[task], retention=tq.Manual())
        table.put(**columns)
        table.seal()
        run_stage(table, Stage(task=task, rows=6, at_least=1, failures_max=1), function, emit=lambda event: None)
        given = table.read(fields=tuple(function.gives))
        return list(zip(*([np.asarray(row).copy() for row in given[name]] for name in function.gives), strict=True))


@torch.no_grad()
def test_every_row_gets_its_logprobs_in_batches_of_few_tokens() -> None:
    model, columns = SUBJECT.model("CausalLM"), rows()
    found = served(LogProbs(model, gives="prox_logprobs", temperature=0.6, tokens=20), columns)
    wanted = response_logprobs(model, columns["prompt_ids"], columns["response_ids"], temperature=0.6)
    assert found[0][0].dtype == np.float32
    np.testing.assert_allclose(np.concatenate([row for (row,) in found]), wanted, atol=1e-5)


@torch.no_grad()
def test_every_row_gets_its_values() -> None:
    model, columns = SUBJECT.model("TokenClassification"), rows()
    found = served(Values(model, tokens=1), columns)
    wanted = response_values(model, columns["prompt_ids"], columns["response_ids"])
    np.testing.assert_allclose(np.concatenate([row for (row,) in found]), wanted, atol=1e-5)


@torch.no_grad()
def test_every_row_gets_its_reward() -> None:
    model, columns = SUBJECT.model("SequenceClassification"), rows()
    columns["response_ids"][3][-1] = PAD
    stage = RewardModel(model, tokens=30)
    wanted = rewards_of(model, columns["prompt_ids"], columns["response_ids"])
    np.testing.assert_allclose([row for (row,) in served(stage, columns)], wanted, atol=1e-5)
    np.testing.assert_allclose(stage.rewards(columns["prompt_ids"], columns["response_ids"]), wanted, atol=1e-5)


@pytest.mark.parametrize("k", [0, 3])
def test_every_row_gets_its_teachers_tokens(k: int) -> None:
    model, columns = SUBJECT.model("CausalLM"), rows()
    found = served(TeacherTopK(model, k=k, tokens=30), columns)
    ids, logprobs = teacher_top_k(model, columns["prompt_ids"], columns["response_ids"], k=k)
    assert [row.shape for row, _ in found] == [(len(each), max(1, k)) for each in columns["response_ids"]]
    assert (found[0][0].dtype, found[0][1].dtype) == (np.int32, np.float32)
    assert np.array_equal(np.concatenate([row for row, _ in found]), ids)
    np.testing.assert_allclose(np.concatenate([row for _, row in found]), logprobs, atol=1e-5)
    if not k:
        assert np.array_equal(found[1][0][:, 0], columns["response_ids"][1])


def test_a_pass_of_no_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="tokens=0: a forward pass of no tokens"):
        Values(SUBJECT.model("TokenClassification"), tokens=0)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="a value model gives one number for each token"):
        response_values(SUBJECT.model("CausalLM"), [[1]], [[2]])
    with pytest.raises(UsageError, match="has no layer `score`"):
        rewards_of(SUBJECT.model("CausalLM"), [[1]], [[2]])
