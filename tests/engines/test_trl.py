"""TRL's GRPO trainer takes real steps on rollouts that another thread generates, by the queue."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.tiny import VOCABULARY, model, tokenizer

trl = pytest.importorskip("trl", reason="make test-engines installs it")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

import transferqueue as tq
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Sampling
from transferqueue.adapters.stages.generation import Generate
from transferqueue.adapters.trainers.trl import (
    BehaviourRatio,
    QueueRollouts,
    queued_reward,
    rollout_pacing,
    rollout_tasks,
)
from transferqueue.adapters.weights import WeightUpdater
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Stage

STEPS, GENERATIONS, PROMPTS = 6, 4, 2
ROWS = GENERATIONS * PROMPTS


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
        return {"rewards": np.array([np.mean(ids < VOCABULARY // 2) for ids in batch["response_ids"]], np.float32)}

    try:
        with tq.connect(address, label="reward") as queue:
            table = queue.table("rollouts")
            run_stage(table, Stage(task=table.tasks["reward"], rows=64, at_least=1), score, emit=lambda _: None)
    except BaseException as error:
        failures.append(error)


def trainer_of(
    rollouts: QueueRollouts,
    learning: Any,
    directory: Path,
    *,
    mixins: tuple[type, ...] = (BehaviourRatio,),
    **settings: Any,
) -> Any:
    return type("Trainer", (*mixins, trl.GRPOTrainer), {})(
        model=learning,
        reward_funcs=queued_reward,
        args=trl.GRPOConfig(
            output_dir=str(directory),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            num_generations=GENERATIONS,
            max_completion_length=8,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            bf16=False,
            **settings,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [f"w{5 + n} w{9 + n} w{20 + n}" for n in range(16)]}),
        processing_class=tokenizer(),
        rollout_func=rollouts,
        callbacks=[rollouts],
    )


class Live(transformers.TrainerCallback):
    """Counts the rows of the table at the end of each step: those of the step, and those ahead."""

    def __init__(self, table: tq.Table, counts: list[int]) -> None:
        self.table, self.counts = table, counts

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        with self.table.read(fields=[]) as read:
            self.counts.append(len(read.rows))


def table_of(queue: tq.Queue, **pacing: Any) -> tq.Table:
    return queue.create_table(
        "rollouts",
        tasks=rollout_tasks(tq.Task("reward", needs=("response_ids",)), needs=("rewards",)),
        pacing=rollout_pacing(ROWS, **pacing) if pacing else None,
    )


def trained(queue: tq.Queue, table: tq.Table, trainer: Any) -> None:
    """Train while two threads generate and score; whatever they raise is raised."""
    failures: list[BaseException] = []
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the stack under test
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_trainer_trains_from_the_queue(ahead: int, tmp_path: Path) -> None:
    learning = model(0).train()
    before = {name: value.clone() for name, value in learning.state_dict().items()}
    with tq.connect() as queue:
        table = table_of(queue, ahead=ahead)
        rollouts = QueueRollouts(queue, table="rollouts", timeout_s=60, ahead=ahead)
        trainer = trainer_of(rollouts, learning, tmp_path)
        live: list[int] = []
        trainer.add_callback(Live(table, live))
        trained(queue, table, trainer)
        audit = table.audit()
        assert (audit.rows_put, audit.rows_done) == (STEPS * ROWS,) * 2
        assert live == [ROWS * (1 + min(ahead, STEPS - step)) for step in range(1, STEPS + 1)]
        assert max(map(int, table.stats().staleness)) <= ahead
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_prompts_ahead_follow_the_sampler_over_epochs_and_iterations(tmp_path: Path) -> None:
    """Rows used for two steps each, over an epoch's end: nothing is put that is not trained."""
    with tq.connect() as queue:
        table = table_of(queue, ahead=1, max_staleness=2)
        rollouts = QueueRollouts(queue, table="rollouts", timeout_s=60, ahead=1)
        trainer = trainer_of(rollouts, model(0).train(), tmp_path, num_iterations=2)
        trainer.train_dataset = trainer.train_dataset.select(range(5))  # two requests an epoch
        trained(queue, table, trainer)
        audit = table.audit()
        assert (audit.rows_put, audit.rows_done) == (STEPS // 2 * ROWS,) * 2
        assert max(map(int, table.stats().staleness)) <= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rows_ahead_that_nobody_asks_for_are_dropped(tmp_path: Path) -> None:
    """A trainer that stops early, and the one after it on the same table."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = state.global_step == 2

    with tq.connect() as queue:
        table = table_of(queue, ahead=1)
        table.put(
            prompt_ids=[np.arange(3, dtype=np.int32)] * 4, group_id=[9] * 4, group_size=4, ordinal=range(4)
        )  # of an earlier trainer
        rollouts = QueueRollouts(queue, table="rollouts", timeout_s=60, ahead=1)
        trainer = trainer_of(rollouts, model(0).train(), tmp_path)
        trainer.add_callback(Stop())
        trained(queue, table, trainer)
        assert table.stats().dropped == {"restarted": 4, "not_requested": ROWS}
        assert table.audit().rows_done == 2 * ROWS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_goes_on_from_a_checkpoint_that_is_older_than_the_newest_weights(tmp_path: Path) -> None:
    """As after a crash: versions of a channel only rise, so its steps are published above those of the first."""

    class Crash(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == STEPS - 1:
                raise RuntimeError("the trainer dies here")

    with tq.connect() as queue:
        table = table_of(queue, ahead=1)

        def trainer() -> Any:
            rollouts = QueueRollouts(queue, table="rollouts", timeout_s=60, ahead=1)
            made = trainer_of(rollouts, model(0).train(), tmp_path)
            made.args.save_strategy, made.args.save_steps = "steps", 2
            return made

        first, second = trainer(), trainer()
        first.add_callback(Crash())

        class Both:
            def train(self) -> None:
                with pytest.raises(RuntimeError, match="dies here"):
                    first.train()
                second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

        trained(queue, table, Both())
        assert second.state.global_step == STEPS
        with queue.weights("policy").pull() as weights:
            assert weights.version == STEPS - 1 + 1 + 2, "the first's five steps, the checkpoint, and two steps"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_ratio_is_to_the_policy_that_drew(tmp_path: Path) -> None:
    """TRL's own trainer takes any rows for the current policy's, so its ratio is 1; with `BehaviourRatio` it is not."""
    old: dict[int, list[Any]] = {0: [], 1: []}

    class Seen:
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            assert inputs["sampling_per_token_logps"].shape == inputs["completion_mask"].shape
            old[self.ratio].append(inputs.get("old_per_token_logps"))
            return super()._compute_loss(model, inputs)

    for ratio, mixins in enumerate([(Seen,), (BehaviourRatio, Seen)]):
        with tq.connect() as queue:
            table = table_of(queue, ahead=1)
            rollouts = QueueRollouts(queue, table="rollouts", timeout_s=60, ahead=1)
            trainer = trainer_of(rollouts, model(0).train(), tmp_path, mixins=mixins)
            trainer.ratio = ratio
            trained(queue, table, trainer)
    assert [each is None for each in old[0]] == [True] * STEPS
    assert [each is None for each in old[1]] == [False] * STEPS


def test_bounds_that_a_request_would_wait_behind_are_refused() -> None:
    with tq.connect() as queue:
        dropping = tq.Pacing("train", batch_rows=8, max_staleness=1, channel="policy")
        queue.create_table("dropping", tasks=rollout_tasks(), pacing=dropping)
        with pytest.raises(UsageError, match="drops stale rows, and the trainer waits"):
            QueueRollouts(queue, table="dropping")
        queue.create_table("rollouts", tasks=rollout_tasks(), pacing=rollout_pacing(8, ahead=1))
        with pytest.raises(UsageError, match="ahead=-1: give the number of requests"):
            QueueRollouts(queue, table="rollouts", ahead=-1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_more_ahead_than_the_bound_on_staleness_is_refused(tmp_path: Path) -> None:
    with tq.connect() as queue:
        table_of(queue, ahead=1)
        rollouts = QueueRollouts(queue, table="rollouts", timeout_s=60, ahead=1)
        trainer = trainer_of(rollouts, model(0).train(), tmp_path, num_iterations=2)
        with pytest.raises(
            UsageError, match="ahead=1 requests of 2 steps each makes rows 2 versions old, and max_staleness is 1"
        ):
            trainer.train()
