"""A tiny policy in a directory, a queue with its weights as versions, and a context for a factory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import transferqueue as tq
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.workflows.flow.events import Event
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import create_table
from transferqueue.workflows.job.names import POLICY
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.resolve import resolve


def job_of(directory: Path, **tables: Any) -> Job:
    """A GRPO job of a tiny policy on the transformers engine; tables: other tables of the job, as in a file."""
    file = {
        "model": {"path": str(directory), "dtype": "float32"},
        "data": {"path": str(directory / "train.jsonl"), "template": "{question}"},
        "algorithm": {"kind": "grpo"},
        "reward": [{"function": "tests.workflows.job.policies:nothing"}],
        "engine": [{"kind": "transformers", "slots": 8}],
        "sampling": {"group_size": 4, "tokens_max": 12},
        "trainer": {"prompts_per_step": 4},
        "pacing": {"mode": "async"},
    }
    return resolve(msgspec.convert({**file, **tables}, Job))


def nothing(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward."""
    return [0.0 for _ in completions]


def context_of(queue: tq.Queue, table: tq.Table, job: Job, events: list[Event]) -> Context:
    settings = msgspec.json.decode(msgspec.json.encode(job))
    return Context(queue=queue, table=table, emit=events.append, settings=settings)


def publish(queue: tq.Queue, directory: Path, version: int, *, scale: float = 1.0, keep: int = 8) -> Mapping[str, Any]:
    """Publish the policy's weights, times `scale`, and return them."""
    import torch
    from safetensors.torch import load_file

    tensors = {
        name: tensor * torch.tensor(scale) for name, tensor in load_file(directory / "model.safetensors").items()
    }
    queue.weights(POLICY, keep=keep).publish(version, tensors)
    return tensors


def put_prompts(table: tq.Table, prompts: int, group_size: int, *, first: int = 0, in_parts: bool = False) -> None:
    """Rows of `prompts` prompts of different lengths, as the source puts them. in_parts: of a job whose responses may
    take several leases."""
    empty = {name: np.empty(0, np.float32 if name == "begun_logprobs" else np.int32) for name in BEGUN * in_parts}
    draws = np.random.default_rng(first)
    ids = [draws.integers(0, 200, size=4 + number % 5).astype(np.int32) for number in range(prompts)]
    groups = np.repeat(np.arange(first, first + prompts), group_size)
    begun = {names.EPISODE: [None] * len(groups)} if names.EPISODE in table.fields else {}
    table.put(
        prompt_ids=tq.Repeat(ids, [group_size] * prompts),
        data=tq.Repeat([{"prompt": str(number)} for number in range(prompts)], [group_size] * prompts),
        group_id=groups,
        group_size=group_size,
        ordinal=np.arange(first * group_size, (first + prompts) * group_size),
        **{name: tq.Repeat([value], [prompts * group_size]) for name, value in empty.items()},
        **begun,
    )


def table_of(queue: tq.Queue, job: Job) -> tq.Table:
    return create_table(queue, job)
