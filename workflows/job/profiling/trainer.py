"""Measures a trainer: seconds of a row and of a call by rows at once, of the optimizer, and of a publication until an
engine has it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Completion, Generator, Ids, Unsupported
from transferqueue.adapters.scoring.load import torch_dtype
from transferqueue.adapters.weights import WeightUpdater
from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.defaults import columns_of, defaults_of
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import GIB, batch_rows, group_rows
from transferqueue.workflows.job.training.columns import RowColumns
from transferqueue.workflows.job.training.learner import StepLearner
from transferqueue.workflows.job.training.publication import Publisher
from transferqueue.workflows.planner.profile import StageProfile

PARTS: Final = (1, 4, 16)
"""Micro-batches that are measured, as fractions of a batch; the planner chooses among these."""
REPEATS: Final = 3
FOLLOW_S: Final = 60.0
"""Longest wait of the engine for a version that was published."""


def measure_trainer(
    job: Job,
    learner: StepLearner,
    prompts: Sequence[Ids],
    drawn: Sequence[Completion],
    engine: Generator,
) -> StageProfile:
    """Train on drawn rows with made-up advantages, then publish to `engine`. Blocks; nothing else should run. The
    learner's weights change.
    """
    rows, size = batch_rows(job), group_rows(job)
    sizes = sorted({max(1, min(rows, -(-rows // part // size) * size)) for part in PARTS})
    points = [(count, _call_s(learner, training_rows(job, prompts, drawn, count))) for count in sizes]
    row_s, call_s = fitted(points)
    step_s = _step_s(learner, training_rows(job, prompts, drawn, size))
    publish_s = publication_s(learner, engine, job)
    return StageProfile(
        row_s=row_s,
        call_s=call_s,
        devices=1,
        step_s=step_s,
        update_s=publish_s,
        instances_max=job.trainer.ranks,
    )


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return seconds of a row and of a call: a line through the points by least squares of the relative error, neither
    below 0.

    >>> row_s, call_s = fitted([(1, 0.3), (4, 0.6), (16, 1.8)])
    >>> round(row_s, 9), round(call_s, 9)
    (0.1, 0.2)
    """
    rows, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    if len(points) == 1:
        return float(seconds[0] / rows[0]), 0.0
    weighted = np.stack([rows, np.ones_like(rows)], axis=1) / seconds[:, None]
    row_s, call_s = np.linalg.lstsq(weighted, np.ones_like(rows), rcond=None)[0]
    if call_s < 0 or row_s <= 0:
        return float(np.mean(seconds / rows)), 0.0
    return float(row_s), float(call_s)


def training_rows(job: Job, prompts: Sequence[Ids], drawn: Sequence[Completion], count: int) -> RowColumns:
    """Return `count` rows with every column that the loss of `job` reads: drawn tokens and log-probs, and made-up
    advantages of both signs.
    """
    rows = [drawn[at % len(drawn)] for at in range(count)]
    signs = [1.0 if at % 2 else -1.0 for at in range(count)]
    tokens = [len(row.ids) for row in rows]
    known: dict[str, list[Any]] = {
        "prompt_ids": [np.asarray(prompts[row.prompt]) for row in rows],
        "response_ids": [row.ids for row in rows],
        "finish_reason": [row.finish_reason for row in rows],
        "advantages": signs,
        "token_advantages": [np.full(count, sign, np.float32) for count, sign in zip(tokens, signs, strict=True)],
        "values": [np.zeros(count, np.float32) for count in tokens],
        "returns": [np.ones(count, np.float32) for count in tokens],
        "teacher_ids": [np.asarray(row.ids)[:, None] for row in rows],
        "teacher_logprobs": [np.asarray(row.logprobs)[:, None] for row in rows],
    }
    known |= {name: [row.logprobs for row in rows] for name in ("rollout_logprobs", "prox_logprobs", "ref_logprobs")}
    return {name: known[name] for name in columns_of(job.algorithm)[names.TRAIN]}


def can_stream(job: Job) -> bool:
    """Whether a step may begin with a part of its rows."""
    return job.trainer.stream == "on" and not defaults_of(job.algorithm.kind).whiten


def _call_s(learner: StepLearner, rows: RowColumns) -> float:
    """Seconds of the passes over these rows."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.monotonic()
        learner.accumulate(rows)
        seconds.append(time.monotonic() - started)
        learner.discard()
    return min(seconds[1:])


def _step_s(learner: StepLearner, rows: RowColumns) -> float:
    """Seconds of the optimizer. The first update allocates its state and does not count."""
    seconds = []
    for _ in range(REPEATS + 1):
        learner.accumulate(rows)
        started = time.monotonic()
        learner.step()
        seconds.append(time.monotonic() - started)
    return min(seconds[1:])


def publication_s(learner: StepLearner, engine: Generator, job: Job) -> float:
    """Seconds from the beginning of a publication until `engine` has the weights. 0 for one that takes none."""
    seconds = []
    with tq.connect(arena_bytes=int(job.queue.memory_gib * GIB)) as queue:
        updater = WeightUpdater(
            queue, names.POLICY, engine.update_weights, reads_channel=getattr(engine, "reads_channel", False)
        )
        channel = queue.weights(names.POLICY, keep=job.weights.keep)
        publisher = Publisher(channel, dtype=torch_dtype(job.weights.dtype), background=False)
        try:
            for version in range(REPEATS + 1):
                started = time.monotonic()
                publisher.publish(version, learner.weights(), lambda: None)
                updater.follow(FOLLOW_S)
                seconds.append(time.monotonic() - started)
        except Unsupported:
            return 0.0
        finally:
            publisher.close()
    return min(seconds[1:])
