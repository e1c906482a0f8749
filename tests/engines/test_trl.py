"""TRL's GRPO trainer takes real steps on rollouts that another thread generates, by the queue."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.tiny import model, tokenizer

trl = pytest.importorskip("trl", reason="make test-engines installs it")
datasets = pytest.importorskip("datasets")

import transferqueue as tq
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Sampling
from transferqueue.adapters.stages.generation import Generate
from transferqueue.adapters.trainers.trl import QueueRollouts, queued_reward, rollout_tasks
from transferqueue.adapters.weights import WeightUpdater
from transferqueue.workflows.flow.runner import run_stage
from transferqueue.workflows.flow.stage import Stage

STEPS, GENERATIONS, PROMPTS = 6, 4, 2
LIKED = 7


def generate(address: str, failures: list[BaseException]) -> None:
    """A generating process's work: newest weights before each batch."""
    try:
        with tq.connect(address, label="generator") as queue:
            engine = TransformersGenerator(model(0))
            follower = WeightUpdater(queue, "policy", engine.update_weights)
            follower.follow(timeout_s=60)
            work = Generate(engine, Sampling(tokens_max=8, stop_ids=(1,)))

            def newest(batch: tq.Batch) -> Any:
                follower.follow()
                return work(batch)

            table = queue.table("rollouts")
            run_stage(table, Stage(task=table.tasks["rollout"], rows=8, at_least=1), newest, emit=lambda _: None)
    except BaseException as error:
        failures.append(error)


def reward(address: str, failures: list[BaseException]) -> None:
    def score(batch: tq.Batch) -> dict[str, Any]:
        return {"rewards": np.array([np.mean(ids == LIKED) for ids in batch["response_ids"]], np.float32)}

    try:
        with tq.connect(address, label="reward") as queue:
            table = queue.table("rollouts")
            run_stage(table, Stage(task=table.tasks["reward"], rows=64, at_least=1), score, emit=lambda _: None)
    except BaseException as error:
        failures.append(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the stack under test
def test_the_trainer_trains_from_the_queue(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    learning = model(0).train()
    before = {name: value.clone() for name, value in learning.state_dict().items()}
    with tq.connect() as queue:
        table = queue.create_table(
            "rollouts", tasks=rollout_tasks(tq.Task("reward", needs=("response_ids",)), needs=("rewards",))
        )
        rollouts = QueueRollouts(queue, table="rollouts", timeout_s=60)
        trainer = trl.GRPOTrainer(
            model=learning,
            reward_funcs=queued_reward,
            args=trl.GRPOConfig(
                output_dir=str(tmp_path),
                use_cpu=True,
                max_steps=STEPS,
                per_device_train_batch_size=PROMPTS * GENERATIONS,
                num_generations=GENERATIONS,
                max_completion_length=8,
                learning_rate=1e-3,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                bf16=False,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": [f"w{5 + n} w{9 + n} w{20 + n}" for n in range(16)]}),
            processing_class=tokenizer(),
            rollout_func=rollouts,
            callbacks=[rollouts],
        )
        threads = [threading.Thread(target=run, args=(queue.address, failures)) for run in (generate, reward)]
        for thread in threads:
            thread.start()
        try:
            trainer.train()
        finally:
            table.seal()
            for thread in threads:
                thread.join(60)
        assert not failures
        audit = table.audit()
        assert (audit["rows_put"], audit["rows_done"]) == (STEPS * PROMPTS * GENERATIONS,) * 2
        with queue.weights("policy").pull() as weights:
            assert weights.version == STEPS
            after = dict(learning.state_dict())
            for name, value in weights.torch().items():
                torch.testing.assert_close(value, after[name])
    assert trainer.state.global_step == STEPS
    logged = [each for each in trainer.state.log_history if "reward" in each]
    assert len(logged) == STEPS
    assert all(np.isfinite(each["loss"]) for each in logged)
    assert any(not torch.equal(before[name], value) for name, value in learning.state_dict().items())
