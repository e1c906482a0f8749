"""The other processes of a job, in one thread: prompts, responses that depend on the weights, rewards, advantages. And
lives of a trainer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

import transferqueue as tq
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.errors import DeadlineExceeded, FlowSignal, PeerError, Sealed
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import in_parts
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import group_rows, has_step_versions
from transferqueue.workflows.job.stages.step_versions import step_versions

TOKENS = 6
WAIT_S = 0.02
_BEGUN = dict(zip(BEGUN, (np.int32, np.float32, np.int32), strict=True))
POINTS = ("update", "publish", "ack", "checkpoint", "checkpointed")
"""After which call of the trainer a life ends."""


def values(model: Path, **tables: Any) -> dict[str, Any]:
    """A small job as a file has it."""
    default: dict[str, Any] = {
        "seed": 3,
        "reproducible": True,
        "steps": 4,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": "none.parquet"},
        "engine": [{"kind": "transformers"}],
        "reward": [{"function": "builtins:len"}],
        "sampling": {"group_size": 2, "tokens_max": TOKENS},
        "algorithm": {"kind": "grpo"},
        "trainer": {"prompts_per_step": 3, "lr": 1e-3, "micro_tokens": 64},
        "pacing": {"mode": "sync"},
        "weights": {"dtype": "float32"},
        "checkpoint": {"every": 2},
    }
    for name, value in tables.items():
        old = default.get(name)
        default[name] = {**old, **value} if isinstance(old, dict) else value
    return default


def job_of(given: Mapping[str, Any]) -> Job:
    return msgspec.convert(given, Job)


class StandIns:
    """Serves every task but the trainers', until the table ends. Responses follow from (seed, ordinal, weights)."""

    def __init__(self, address: str, job: Job, *, follows: bool = True) -> None:
        self._job, self._address = job, address
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._digests: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._follows = follows

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with tq.connect(self._address, label="stand-ins") as queue:
                table = queue.table(names.TABLE, timeout_s=30)
                try:
                    self._serve(queue, table)
                except PeerError:
                    raise
                except BaseException as error:  # noqa: BLE001  (raised by the test)
                    self._error = error
                    queue.drop_table(names.TABLE)  # ends the trainer's wait
        except PeerError:
            return  # the server is gone

    def _serve(self, queue: tq.Queue, table: tq.Table) -> None:
        job, next_prompt = self._job, 0
        size, batch = group_rows(job), job.trainer.prompts_per_step
        while not self._stop.is_set():
            if next_prompt < job.steps * batch:
                with suppress(FlowSignal, Sealed), table.reserve(size, timeout_s=WAIT_S) as reservation:
                    self._put(table, next_prompt, size, reservation)
                    next_prompt += 1
            for task in (names.ROLLOUT, names.REWARD, names.ADVANTAGE):
                with suppress(FlowSignal):
                    self._work(queue, table, task)

    def _put(self, table: tq.Table, prompt: int, size: int, reservation: tq.Reservation) -> None:
        draws = np.random.default_rng(prompt)
        table.put(
            prompt_ids=[draws.integers(5, 60, 4).astype(np.int32)] * size,
            data=[{"prompt": "?"}] * size,
            group_id=prompt,
            group_size=size,
            ordinal=[prompt * size + sample for sample in range(size)],
            reservation=reservation,
            **({name: [np.empty(0, dtype)] * size for name, dtype in _BEGUN.items()} if in_parts(self._job) else {}),
        )

    def _work(self, queue: tq.Queue, table: tq.Table, task: str) -> None:
        if task == names.ADVANTAGE:
            with table.lease(task, groups=1, timeout_s=WAIT_S) as batch:
                rewards = batch["rewards"].numpy()
                batch.ack(advantages=(rewards - rewards.mean()).astype(np.float32))
        elif task == names.REWARD:
            with table.lease(task, rows=8, at_least=1, timeout_s=WAIT_S) as batch:
                rewards = [float(np.sum(ids) % 7) for ids in batch["response_ids"]]
                batch.ack(rewards=rewards, reward_terms=[np.array([reward], np.float32) for reward in rewards])
        else:
            with table.lease(task, rows=2, at_least=1, timeout_s=WAIT_S) as batch:
                batch.ack(**self._responses(queue, batch))

    def _responses(self, queue: tq.Queue, batch: tq.Batch) -> dict[str, Any]:
        wanted = {step_versions(queue, self._job).of(int(group)) for group in batch.group_id}
        version, digest = self._weights(queue, *(wanted if has_step_versions(self._job) else ()))
        drawn = [self._drawn(int(ordinal), digest) for ordinal in batch.ordinal]
        return {
            "response_ids": [ids for ids, _ in drawn],
            "rollout_logprobs": [logprobs for _, logprobs in drawn],
            "token_versions": [np.full(len(ids), version, np.int32) for ids, _ in drawn],
            "finish_reason": ["stop"] * len(drawn),
            "policy_version": version,
            "tokens": [len(ids) for ids, _ in drawn],
        }

    def _weights(self, queue: tq.Queue, wanted: int | None = None) -> tuple[int, int]:
        with self._pulled(queue, wanted) as weights:
            if not self._follows:
                return weights.version, 0
            if weights.version not in self._digests:
                tensors = [tensor.double().sum().item() for tensor in weights.torch().values()]
                self._digests[weights.version] = int(np.array(tensors).view(np.uint64).sum() % (1 << 31))
            return weights.version, self._digests[weights.version]

    def _pulled(self, queue: tq.Queue, wanted: int | None) -> tq.Weights:
        """The weights, once they are there. A run that ends early does not publish all that are wanted."""
        while True:
            try:
                return queue.weights(names.POLICY).pull(version=wanted, timeout_s=10 * WAIT_S)
            except DeadlineExceeded:
                if self._stop.is_set():
                    raise

    def _drawn(self, ordinal: int, digest: int) -> tuple[Any, Any]:
        draws = np.random.default_rng([self._job.seed, ordinal, digest])
        ids = draws.integers(5, 60, int(draws.integers(1, TOKENS + 1))).astype(np.int32)
        return ids, draws.normal(-3, 0.2, len(ids)).astype(np.float32)


@contextmanager
def table_of(queue: tq.Queue, job: Job, *, follows: bool = True) -> Iterator[tq.Table]:
    """The table of the job and its other processes. follows False: responses do not depend on the weights."""
    from transferqueue.workflows.job import graph
    from transferqueue.workflows.job.settings.resolve import resolve

    with StandIns(queue.address, resolve(job), follows=follows):
        yield graph.create_table(queue, resolve(job))


def train(
    address: str, given: Mapping[str, Any], directory: str, figures: list[Any] | None = None, rank: int = 0
) -> None:
    """One life of the trainer, or of one of its ranks, in this process."""
    import torch

    from transferqueue.workflows.flow.stage import Context
    from transferqueue.workflows.job.training import process

    torch.set_num_threads(1)
    with tq.connect(address, label="trainer") as queue:
        context = Context(
            queue=queue,
            table=queue.table(names.TABLE, timeout_s=30),
            emit=lambda event: figures.append(event) if figures is not None else None,
            settings=dict(given),
            directory=Path(directory) if directory else None,
            instance=rank,
        )
        with process.train(context) as loop:
            loop()


def train_and_die(address: str, given: Mapping[str, Any], directory: str, point: str, count: int) -> None:
    """A life of the trainer that ends by SIGKILL after the `count`-th call of `point`."""
    from transferqueue.client import Table, WeightChannel
    from transferqueue.workflows.job.training.checkpoint import Checkpoints
    from transferqueue.workflows.job.training.passes import Passes

    owner, name = {
        "update": (Passes, "update"),
        "publish": (WeightChannel, "publish"),
        "ack": (Table, "ack"),
        "checkpoint": (Checkpoints, "save"),
        "checkpointed": (Table, "checkpointed"),
    }[point]
    calls = [0]
    whole = getattr(owner, name)

    def deadly(*arguments: Any, **options: Any) -> Any:
        result = whole(*arguments, **options)
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)
    train(address, given, directory)


def final_weights(queue: tq.Queue) -> tuple[int, dict[str, Any]]:
    """The newest version of the policy, and its tensors."""
    with queue.weights(names.POLICY).pull(timeout_s=0) as weights:
        return weights.version, {name: tensor.clone() for name, tensor in weights.torch().items()}
