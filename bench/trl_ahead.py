"""Samples per second of TRL's GRPOTrainer with generation inside its requests, and ahead of them:
``python -m bench.trl_ahead``.

Needs TRL (`make test-engines`). A random Qwen3 of 3 million parameters, trained here and generated with in a process of
its own; the two are about equally slow. Runs alternate, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import torch
import transformers

import transferqueue as tq
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Sampling
from transferqueue.adapters.stages.generation import Generate
from transferqueue.adapters.trainers.trl import BehaviourRatio, QueueRollouts, rollout_pacing, rollout_tasks
from transferqueue.adapters.weights import WeightUpdater
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Stage

VOCABULARY, TOKENS, GENERATIONS, PROMPTS = 512, 32, 8, 2
ROWS = GENERATIONS * PROMPTS


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tokenizer() -> Any:
    import tokenizers

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))  # noqa: S106
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")  # noqa: S106


def generate(address: str) -> None:
    """A generating process: takes a request's rows at once, under the newest weights."""
    torch.set_num_threads(1)
    with tq.connect(address, label="generator") as queue:
        engine = TransformersGenerator(model().eval())
        follower = WeightUpdater(queue, "policy", engine.update_weights)
        follower.follow(timeout_s=300)
        work = Generate(engine, Sampling(tokens_max=TOKENS))

        def newest(batch: tq.Batch) -> Any:
            follower.follow()
            return work(batch)

        table = queue.table("rollouts")
        run_stage(table, Stage(task=table.tasks["rollout"], rows=ROWS, at_least=1), newest, emit=lambda _: None)


def liked(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < VOCABULARY // 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def samples_per_s(ahead: int, steps: int) -> float:
    """Train `steps` steps and return samples a second from the end of the first step to the end of the last."""
    import datasets
    import trl

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as directory, tq.connect("embedded") as queue:
        table = queue.create_table("rollouts", tasks=rollout_tasks(), pacing=rollout_pacing(ROWS, ahead=ahead))
        rollouts = QueueRollouts(queue, table="rollouts", ahead=ahead)
        prompts = [" ".join(f"w{2 + (7 * number + word) % 500}" for word in range(8)) for number in range(64)]
        trainer = type("Trainer", (BehaviourRatio, trl.GRPOTrainer), {})(
            model=model(),
            reward_funcs=liked,
            args=trl.GRPOConfig(
                output_dir=directory,
                use_cpu=True,
                max_steps=steps,
                per_device_train_batch_size=ROWS,
                num_generations=GENERATIONS,
                max_completion_length=TOKENS,
                report_to=[],
                save_strategy="no",
                bf16=False,
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
            rollout_func=rollouts,
            callbacks=[rollouts, Clock()],
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "bench.trl_ahead", "--generate", queue.address]
        generator = subprocess.Popen(command, env=environment)
        try:
            trainer.train()
        finally:
            table.seal()
            generator.wait(60)
    return ROWS * (steps - 1) / (ends[-1] - ends[0])


def compare(runs: int, steps: int) -> None:
    """Print the rates of alternating runs, and their medians."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(runs):
        for ahead, rates in found.items():
            rates.append(samples_per_s(ahead, steps))
            print(f"ahead={ahead}: {rates[-1]:.1f} samples/s", flush=True)
    within, beside = (median(rates) for rates in found.values())
    print(f"inside the request {within:.1f}, ahead {beside:.1f} samples/s: {beside / within:.2f} x")


def main() -> None:
    """Measure, or be the generating process of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generate", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.generate:
        generate(options.generate)
    else:
        compare(options.runs, options.steps)


if __name__ == "__main__":
    main()
