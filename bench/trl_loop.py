"""The same GRPO by TRL's GRPOTrainer: ``python -m bench.trl_loop PLACE --steps 12``.

PLACE and the printed lines are those of `bench.plain_loop`, with which `bench.ladder` compares it. TRL generates in its
own process with transformers: its vLLM mode failed on vLLM's CPU build when the first weights were loaded (TRL 1.16.0).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(prog="python -m bench.trl_loop", description=__doc__)
    parser.add_argument("place", type=Path)
    for name, default in (("steps", 12), ("prompts", 8), ("group", 8), ("tokens", 24), ("seed", 0), ("lr", 1e-4)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(chosen.place))

    import datasets
    import transformers
    import trl
    from even_reward import even

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
        trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(chosen.place / "model", dtype="float32"),
            reward_funcs=even,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": questions}),
            processing_class=transformers.AutoTokenizer.from_pretrained(chosen.place / "model"),
            callbacks=[Clock()],
        ).train()


if __name__ == "__main__":
    main()
