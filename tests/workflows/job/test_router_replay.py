"""Router replay in the stages of a job: the experts go from the engine through the table to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import transferqueue as tq  # noqa: E402
from tests.workflows.job.policies import context_of, job_of, put_prompts, table_of  # noqa: E402
from transferqueue.adapters.weights import ModuleWeights  # noqa: E402
from transferqueue.errors import UsageError  # noqa: E402
from transferqueue.workflows.flow.events import Event  # noqa: E402
from transferqueue.workflows.flow.stage import Work  # noqa: E402
from transferqueue.workflows.job import names  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.stages.episodes import episodes  # noqa: E402
from transferqueue.workflows.job.stages.rollout import rollout  # noqa: E402
from transferqueue.workflows.job.tiny_model.make import make  # noqa: E402
from transferqueue.workflows.job.training.learner import PolicyLearner  # noqa: E402

LAYERS, CHOSEN = 2, 2
LATER = ("advantages", "rewards", names.REWARD_TERMS)
"""Columns of the trainer that other stages give."""
ENVIRONMENT = {"factory": "tests.workflows.job.episode_environments:Twice"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with the tokenizer of the tiny models."""
    place = tmp_path_factory.mktemp("mixture")
    make(place)
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(place))
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, num_experts=8,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(place)
    return place


def model_of(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def generated(queue: tq.Queue, directory: Path, job: Job, factory: Any) -> tq.Table:
    """Generate two prompts twice with the weights of the model, as version 0."""
    table = table_of(queue, job)
    put_prompts(table, 2, 2)
    weights = {name: tensor.detach().clone() for name, tensor in ModuleWeights(model_of(directory))}
    queue.weights(names.POLICY).publish(0, weights)
    events: list[Event] = []
    task = names.PLAY if job.environment else names.ROLLOUT
    work: Work
    with factory(context_of(queue, table, job, events)) as work, table.lease(task, rows=4, timeout_s=30) as batch:
        for part in work(batch):
            batch.ack(batch.rows[part.at], **part.facts, **part.columns)  # type: ignore[union-attr, index]
    return table


TRANSFORMERS = {"kind": "transformers", "slots": 8}
VLLM = {"kind": "vllm", "slots": 8, "options": {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}}


@pytest.mark.parametrize(
    ("environment", "engine"),
    [
        pytest.param([], TRANSFORMERS, id="responses"),
        pytest.param([ENVIRONMENT], TRANSFORMERS, id="episodes"),
        pytest.param([], VLLM, id="vllm", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
    ],
)
def test_the_trainer_replays_the_experts_of_the_engine(directory: Path, environment: Any, engine: Any) -> None:
    """With the same weights in float32, the trainer's log-probs are the engine's."""
    tables: dict[str, Any] = {"engine": [engine]} | ({"environment": environment, "reward": []} if environment else {})
    sampling = {"group_size": 2, "tokens_max": 40, "stop": [*"0123456789"]}
    job = job_of(directory, algorithm={"kind": "grpo", "router_replay": True}, sampling=sampling, **tables)
    with tq.connect() as queue:
        table = generated(queue, directory, job, episodes if environment else rollout)
        wanted = [name for name in table.tasks[names.TRAIN].needs if name not in LATER]
        rows = {name: list(column) for name, column in read(table, wanted).items()}
    assert "routes" in rows
    for prompt, response, routes in zip(rows["prompt_ids"], rows["response_ids"], rows["routes"], strict=True):
        assert routes.shape == (len(prompt) + len(response) - 1, LAYERS, CHOSEN)
    assert not environment or not all(mask.all() for mask in rows["loss_mask"])
    learner = PolicyLearner(model_of(directory), job.algorithm, job.trainer, steps=1)
    learner.version = 0
    learner.accumulate(rows | {"advantages": [1.0, -1.0, 1.0, -1.0]})
    figures = learner.step()
    assert figures["own_tokens"] > 0
    assert figures["engine_error"] < (1e-5 if engine == TRANSFORMERS else 1e-3)
    assert figures["unreplayed_error"] < 1e-2


def read(table: tq.Table, fields: list[str]) -> dict[str, Any]:
    with table.read(range(4), fields=fields) as rows:
        return {
            name: [np.array(value) if name != "finish_reason" else value for value in rows[name].list()]
            for name in fields
        }


def test_a_model_without_experts_is_refused_when_its_engine_starts(tmp_path: Path) -> None:
    make(tmp_path)
    job = job_of(tmp_path, algorithm={"kind": "grpo", "router_replay": True})
    with tq.connect() as queue:
        table = table_of(queue, job)
        with (
            pytest.raises(UsageError, match="Qwen3ForCausalLM has no router of experts"),
            rollout(context_of(queue, table, job, [])),
        ):
            pass
