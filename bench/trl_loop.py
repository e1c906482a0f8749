"""The same GRPO by TRL's GRPOTrainer: ``python -m bench.trl_loop PLACE --steps 12``.

PLACE and the printed lines are those of `bench.plain_loop`, with which `bench.ladder` compares it. TRL generates in its
own process with transformers: its vLLM mode failed on vLLM's CPU build when the first weights were loaded (TRL 1.16.0).
With ``--ahead 1`` a process of its own generates the rows of the next request while the trainer computes
(`adapters.trainers.trl.QueueRollouts`); the two divide the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transferqueue as tq


def generate(chosen: argparse.Namespace) -> None:
    """Generate for the trainer at an address, under the newest weights, until its table is sealed."""
    import transformers

    from transferqueue.adapters.engines.transformers import TransformersGenerator
    from transferqueue.adapters.protocols import Sampling
    from transferqueue.adapters.stages.generation import Generate
    from transferqueue.adapters.weights import WeightUpdater
    from transferqueue.workflows.flow.loop.runner import run_stage
    from transferqueue.workflows.flow.stage import Stage

    model = transformers.AutoModelForCausalLM.from_pretrained(chosen.place / "model", dtype="float32")
    end = transformers.AutoTokenizer.from_pretrained(chosen.place / "model").eos_token_id
    with tq.connect(chosen.generate, label="generator") as queue:
        engine = TransformersGenerator(model.eval())
        follower = WeightUpdater(queue, "policy", engine.update_weights)
        follower.follow(timeout_s=300)
        work = Generate(engine, Sampling(tokens_max=chosen.tokens, stop_ids=(end,)))

        def newest(batch: tq.Batch) -> Any:
            follower.follow()
            return work(batch)

        table, rows = queue.table("rollouts"), chosen.prompts * chosen.group
        run_stage(table, Stage(task=table.tasks["rollout"], rows=rows, at_least=1), newest, emit=lambda _: None)


@contextmanager
def rollouts(chosen: argparse.Namespace) -> Iterator[Any]:
    """Start the generating process of a trainer, and give what asks it for rows."""
    from transferqueue.adapters.trainers.trl import QueueRollouts, rollout_pacing, rollout_tasks

    with tq.connect("embedded") as queue:
        pacing = rollout_pacing(chosen.prompts * chosen.group, ahead=chosen.ahead)
        table = queue.create_table("rollouts", tasks=rollout_tasks(), pacing=pacing)
        command = [sys.executable, "-W", "ignore", "-m", "bench.trl_loop", *sys.argv[1:], "--generate", queue.address]
        generator = subprocess.Popen(command)
        try:
            yield QueueRollouts(queue, table="rollouts", ahead=chosen.ahead)
        finally:
            table.seal()
            generator.wait(60)


def train(chosen: argparse.Namespace, ahead: Any) -> None:
    """Train for some steps, on rows that the trainer generates or takes from a queue."""
    sys.path.insert(0, str(chosen.place))

    import datasets
    import transformers
    import trl
    from even_reward import even

    from transferqueue.adapters.trainers.trl import BehaviourRatio

    class Clock(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            if "reward" in logs:
                line = {"at": time.monotonic(), "reward": float(logs["reward"])}
                print(json.dumps(line), flush=True)

    questions = [json.loads(line)["question"] for line in (chosen.place / "data/train.jsonl").open()]
    with tempfile.TemporaryDirectory() as directory:
        arguments = trl.GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            max_steps=chosen.steps,
            learning_rate=chosen.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            per_device_train_batch_size=chosen.prompts * chosen.group,
            num_generations=chosen.group,
            max_completion_length=chosen.tokens,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            seed=chosen.seed,
            disable_tqdm=True,
        )
        trainer_class = trl.GRPOTrainer
        if ahead is not None:
            trainer_class = type("Trainer", (BehaviourRatio, trl.GRPOTrainer), {})
        trainer_class(
            model=transformers.AutoModelForCausalLM.from_pretrained(chosen.place / "model", dtype="float32"),
            reward_funcs=even,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": questions}),
            processing_class=transformers.AutoTokenizer.from_pretrained(chosen.place / "model"),
            rollout_func=ahead,
            callbacks=[Clock()] if ahead is None else [ahead, Clock()],
        ).train()


def main() -> None:
    """Train, or be the generating process of a trainer."""
    parser = argparse.ArgumentParser(prog="python -m bench.trl_loop", description=__doc__)
    parser.add_argument("place", type=Path)
    for name, default in (("steps", 12), ("prompts", 8), ("group", 8), ("tokens", 24), ("seed", 0), ("lr", 1e-4)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--ahead", type=int, default=0, help="requests that are generated ahead (default: 0)")
    parser.add_argument("--generate", metavar="ADDRESS", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.ahead and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    if chosen.generate:
        generate(chosen)
    elif chosen.ahead:
        with rollouts(chosen) as ahead:
            train(chosen, ahead)
    else:
        train(chosen, None)


if __name__ == "__main__":
    main()
