"""Bytes that a training job's table holds from step to step, when rows keep their columns until they end and when
columns end with their last task.

    python -m bench.job_memory

The tables and tasks are those of `transferqueue train`; stand-ins for the engine, the reward and the trainer lease and
give columns of realistic sizes. So the counts are those of a job, and nothing depends on the machine. ``rows``,
``columns``: `Acked` and `AckedColumns`. A result is the bytes of the table after each step, in jobs that drop stale
rows; ``image_requeue`` generates them again.

The job puts the rows of a group together, and says that they share their prompt (`bench.repeats` has other ways).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.run_record import RECORDS, save_record, show
from bench.server import Server
from transferqueue.limits import KIB
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.settings.sizes import batch_rows

PROMPTS: Final = 4
GROUP: Final = 16
PROMPT_TOKENS: Final = 256
RESPONSE_TOKENS: Final = 1024
DATA: Final = {"text": 2 * KIB, "image": 512 * KIB, "image_requeue": 512 * KIB}
"""Bytes of a prompt's row of the data file, by kind of job: a conversation, or one with an image."""
RETENTIONS: Final[Mapping[str, tq.Retention]] = {"rows": tq.Acked(), "columns": tq.AckedColumns()}
STEPS: Final = 24
CHECKPOINT: Final = 8
TASKS: Final = (names.ROLLOUT, names.REWARD, names.ADVANTAGE, names.TRAIN)


def a_job(on_stale: str) -> Job:
    """The job: GRPO, a checkpoint every `CHECKPOINT` steps."""
    return job_from_values(
        {
            "model": {"path": "models/any"},
            "data": {"path": "data/any.jsonl", "prompt_tokens_max": PROMPT_TOKENS},
            "engine": [{"kind": "transformers"}],
            "reward": [{"function": "rewards:any"}],
            "sampling": {"group_size": GROUP, "tokens_max": RESPONSE_TOKENS},
            "trainer": {"prompts_per_step": PROMPTS},
            "algorithm": {"kind": "grpo"},
            "pacing": {"on_stale": on_stale},
            "checkpoint": {"every": CHECKPOINT},
            "steps": STEPS,
        }
    )


def make_table(queue: tq.Queue, job: Job, retention: tq.Retention) -> tq.Table:
    """The job's table, with this retention."""
    return queue.create_table(
        names.TABLE,
        fields=graph.fields(job),
        tasks=graph.tasks(job),
        limits=graph.limits(job),
        pacing=graph.pacing(job),
        retention=retention,
    )


def _results(task: str, rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """What a task gives for rows, with random values of the usual sizes."""
    if task == names.ROLLOUT:
        lengths = rng.integers(RESPONSE_TOKENS // 4, RESPONSE_TOKENS, rows)
        return {
            "response_ids": [rng.integers(0, 150_000, count, np.int32) for count in lengths],
            "token_versions": [np.full(count, 1, np.int32) for count in lengths],
            "rollout_logprobs": [rng.random(count, np.float32) for count in lengths],
            "finish_reason": ["stop"] * rows,
        }
    if task == names.REWARD:
        return {"rewards": rng.random(rows, np.float32), names.REWARD_TERMS: list(rng.random((rows, 1), np.float32))}
    return {"advantages": rng.random(rows, np.float32)}


def walk(queue: tq.Queue, job: Job, retention: tq.Retention, data_bytes: int) -> list[int]:
    """Run the steps; the bytes of the table after each."""
    rng, table, held = np.random.default_rng(0), make_table(queue, job, retention), list[int]()
    channel = queue.weights(names.POLICY)
    for step in range(STEPS):
        channel.publish(step, {"w": np.zeros(4, np.float32)})
        prompts = [
            {"ids": rng.integers(0, 150_000, PROMPT_TOKENS, np.int32), "data": {"prompt": rng.bytes(data_bytes)}}
            for _ in range(PROMPTS)
        ]
        _put(table, prompts, step)
        for task in TASKS:
            _do(table, task, batch_rows(job), rng, step)
        if step % CHECKPOINT == CHECKPOINT - 1:
            table.checkpointed(step, task=names.TRAIN)
        held.append(table.stats().bytes)
    return held


def _put(table: tq.Table, prompts: Sequence[dict[str, Any]], step: int) -> None:
    """Put `GROUP` rows of each prompt."""
    with table.reserve(len(prompts) * GROUP, policy_version=step) as reservation:
        for number, prompt in enumerate(prompts):
            table.put(
                prompt_ids=tq.Repeat([prompt["ids"]], GROUP),
                data=tq.Repeat([prompt["data"]], GROUP),
                group_id=[step * len(prompts) + number] * GROUP,
                group_size=GROUP,
                ordinal=list(range(GROUP)),
                reservation=reservation,
            )


def _do(table: tq.Table, task: str, rows: int, rng: np.random.Generator, step: int) -> None:
    wanted = {"groups": rows // GROUP} if task in (names.ADVANTAGE, names.TRAIN) else {"rows": rows}
    with table.lease(task, timeout_s=30, **wanted) as batch:
        if task == names.TRAIN:
            batch.ack(step=step)
        elif task == names.ROLLOUT:
            batch.ack(policy_version=step, **_results(task, len(batch), rng))
        else:
            batch.ack(**_results(task, len(batch), rng))


def measure() -> list[MeasuredResult]:
    """Each kind of job with each retention, on a server of its own."""
    results: list[MeasuredResult] = []
    for kind, data_bytes in DATA.items():
        for name, retention in RETENTIONS.items():
            server = Server()
            try:
                with tq.connect(server.address) as queue:
                    job = a_job("requeue" if "requeue" in kind else "drop")
                    held = walk(queue, job, retention, data_bytes)
            finally:
                server.stop()
            results += [
                summarize(f"{kind}/{name}/bytes", "count", held),
                single(f"{kind}/{name}/bytes_max", "count", max(held)),
            ]
    return results


def main() -> None:
    """Measure, print, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    measurement = Measurement()
    results = measure()
    show(results)
    details = {"prompts": PROMPTS, "group": GROUP, "steps": STEPS, "checkpoint": CHECKPOINT, "data_bytes": DATA}
    save_record(measurement, options.out, "job-memory", results, details)


if __name__ == "__main__":
    main()
