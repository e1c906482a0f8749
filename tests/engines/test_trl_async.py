"""TRL's asynchronous GRPO trainer takes real steps on the queue, on a CPU, and loses no row to a crash.

Its attention is a kernel for GPUs: here the same attention in plain torch, segment by segment. It asks CUDA for the
peak of a device, which it has none of here. All else is TRL's.
"""

from __future__ import annotations

import queue as queues
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.tiny import save, tokenizer

trl = pytest.importorskip("trl", reason="make test-engines installs it")
datasets = pytest.importorskip("datasets")

from transformers import TrainerCallback

with warnings.catch_warnings():  # of the stack under test
    warnings.simplefilter("ignore")
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    from transferqueue.adapters.trainers.trl_async import AHEAD_MIN, AHEAD_STEPS, QueueRolloutWorker

import transferqueue as tq
from tests.engines.test_trl import generate, reward
from transferqueue.adapters.trainers.trl import rollout_pacing, rollout_tasks
from transferqueue.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
GENERATIONS, ROWS, STEPS, PROMPTS = 4, 8, 6, 16


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends_q: Any, ends_k: Any, *_: Any, **terms: Any
) -> torch.Tensor:
    """Causal attention of each segment to its path, whose last tokens it is: ``[tokens, heads, width]``."""
    outs = []
    for at in range(len(ends_q) - 1):
        parts = query[ends_q[at] : ends_q[at + 1]], *(x[ends_k[at] : ends_k[at + 1]] for x in (key, value))
        q, k, v = (part.transpose(0, 1) for part in parts)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=terms["softmax_scale"], enable_gqa=True
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=plain_attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def table_of(queue: tq.Queue, ahead: int = AHEAD_MIN) -> tq.Table:
    return queue.create_table(
        "rollouts",
        tasks=rollout_tasks(tq.Task("reward", needs=("response_ids",), gives=("rewards",)), needs=("rewards",)),
        pacing=rollout_pacing(ROWS, ahead=ahead),
    )


def prompts() -> Any:
    return datasets.Dataset.from_dict({"prompt": [f"w{5 + n} w{9 + n} w{20 + n}" for n in range(PROMPTS)]})


def worker_of(queue: tq.Queue) -> QueueRolloutWorker:
    return QueueRolloutWorker(
        queue, table="rollouts", dataset=prompts(), processing_class=tokenizer(), num_generations=GENERATIONS
    )


def trainer_of(worker: QueueRolloutWorker, weights: Path, directory: Path, **settings: Any) -> Any:
    terms = {"max_steps": STEPS, "save_strategy": "no", **settings}
    return async_grpo.AsyncGRPOTrainer(
        model=str(weights),
        args=async_grpo.AsyncGRPOConfig(
            output_dir=str(directory),
            use_cpu=True,
            bf16=False,
            dtype="float32",
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1,
            num_generations=GENERATIONS,
            token_budget=0,
            max_staleness=AHEAD_MIN,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            **terms,
        ),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        rollout_worker=worker,
        weight_transfer=worker.weights,
        callbacks=[worker.rollout_buffer],
    )


@contextmanager
def served(queue: tq.Queue, table: tq.Table) -> Iterator[None]:
    """Two threads generate and score meanwhile; whatever they raise is raised."""
    failures: list[BaseException] = []
    threads = [threading.Thread(target=run, args=(queue.address, failures)) for run in (generate, reward)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        table.seal()
        with table.read(fields=[]) as rest:
            rows = rest.rows
        table.drop(rows, "test_over")  # else stale ones could come back, and the stages would wait for them
        for thread in threads:
            thread.join(60)
    assert not failures


def test_a_table_in_which_a_trainer_would_wait_for_ever_is_refused() -> None:
    with tq.connect("embedded") as queue:
        table_of(queue, ahead=1)
        with pytest.raises(UsageError, match=r"depth=1, .* rollout_pacing\(rows of a step, ahead=4\)"):
            worker_of(queue)


def test_a_worker_says_why_nothing_comes() -> None:
    with tq.connect("embedded") as queue:
        table_of(queue)
        worker = worker_of(queue)
        with pytest.raises(queues.Empty):
            worker.rollout_buffer.get(timeout=0)
        with pytest.raises(RuntimeError, match=r"no group came for .* s: "):
            worker.check_health(-1.0)


def put_groups(table: tq.Table, groups: int) -> None:
    """Groups that are generated and scored."""
    rows, ids = groups * GENERATIONS, np.arange(5, dtype=np.int32)
    table.put(
        prompt_ids=[ids] * rows,
        response_ids=[ids] * rows,
        rollout_logprobs=[np.zeros(5, np.float32)] * rows,
        finish_reason=["stop"] * rows,
        rewards=np.arange(rows, dtype=np.float32),
        group_id=np.repeat(np.arange(groups), GENERATIONS),
        group_size=GENERATIONS,
        ordinal=np.arange(rows),
        policy_version=0,
    )


def test_training_goes_on_after_a_lease_that_is_over_and_its_rows_come_again() -> None:
    with tq.connect("embedded") as queue:
        table = table_of(queue)
        put_groups(table, 2 * (AHEAD_MIN + 1))
        samples, terms = worker_of(queue).rollout_buffer, SimpleNamespace(save_strategy="no")

        def step(number: int) -> None:
            for _ in range(ROWS):
                samples.get(timeout=60)
            samples.on_step_end(terms, SimpleNamespace(global_step=number), None)

        step(1)
        table.rollback(-1, task="train")  # ends the leases, as a step longer than the time limit would
        for number in range(2, AHEAD_MIN + 1):
            step(number)
        assert table.stats().tasks["train"].done == ROWS * (AHEAD_MIN - AHEAD_STEPS - 1)
        samples.release()
        task = table.stats().tasks["train"]
        assert task.ready + task.done == table.audit().rows_put


def test_a_trainer_may_hold_rows_for_longer_than_other_workers() -> None:
    assert {task.name: task.held_s_max for task in rollout_tasks()} == {"rollout": 1800.0, "train": 21600.0}


def test_the_trainer_takes_its_steps_from_the_queue(weights: Path, tmp_path: Path) -> None:
    with tq.connect("embedded") as queue:
        table = table_of(queue)
        worker = worker_of(queue)
        trainer = trainer_of(worker, weights, tmp_path)
        with served(queue, table):
            trainer.train()
            assert table.audit().rows_done >= (STEPS - 2) * ROWS
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert len(logs) == STEPS
        assert all(np.isfinite(log["loss"]) for log in logs)
        assert all(0 <= log["sample/staleness_max"] <= AHEAD_MIN for log in logs)
        assert logs[0]["ratio"] == pytest.approx(1, abs=1e-4), "the first rows are the first weights' own"
        assert table.audit().balanced


class Crash(TrainerCallback):  # type: ignore[misc]
    """Ends the training after so many steps, by an error."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("the trainer's process dies here")


def groups_of(worker: QueueRolloutWorker) -> list[int]:
    """The groups that the trainer takes, as it does so."""
    taken: list[int] = []
    own = worker.rollout_buffer.get

    def get(timeout: float) -> Any:
        sample = own(timeout)
        taken.append(sample.group_id)
        return sample

    worker.rollout_buffer.get = get
    return taken


def test_rows_after_a_checkpoint_come_again_to_the_next_trainer(weights: Path, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 4}
    with tq.connect("embedded") as queue:
        table = table_of(queue)
        with served(queue, table):
            first = worker_of(queue)
            before = groups_of(first)
            trainer = trainer_of(first, weights, tmp_path, max_steps=20, **saves)
            trainer.add_callback(Crash(6))
            with pytest.raises(RuntimeError, match="dies here"):
                trainer.train()
            order = list(dict.fromkeys(before))
            done = table.audit().rows_done // GENERATIONS
            assert 0 < done <= 4 * ROWS // GENERATIONS, "what four steps trained"
            second = worker_of(queue)
            after = groups_of(second)
            resumed = trainer_of(second, weights, tmp_path, max_steps=12, **saves)
            resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
            assert table.audit().dropped == {}
        assert resumed.state.global_step == 12
        assert set(order[done:]) <= set(after), "what was taken and not done comes again"
        assert not set(order[:done]) & set(after), "what is done does not"
        assert table.audit().balanced
