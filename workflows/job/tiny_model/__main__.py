"""The command ``python -m transferqueue.workflows.job.tiny_model``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from transferqueue.errors import TransferQueueError
from transferqueue.lazy import install_line

try:
    from transferqueue.workflows.job.tiny_model.make import KINDS, make, write_data
    from transferqueue.workflows.job.tiny_model.tasks import TASKS
    from transferqueue.workflows.job.tiny_model.vision import make_vision, write_colours
except ImportError as missing:
    sys.stderr.write(f"a tiny model needs {missing.name}: {install_line('train')}\n")
    sys.exit(2)

_EXAMPLES: Final = """examples:
  random weights, to try a job's plumbing:
    python -m transferqueue.workflows.job.tiny_model models/tiny
  a policy that answers a third of the questions right, and the questions to train it on:
    python -m transferqueue.workflows.job.tiny_model models/tiny --warm-up 200 --task sort --data data/sort
  a reward model and a critic for the same task, which know the mistakes of that policy:
    python -m transferqueue.workflows.job.tiny_model models/reward --kind classifier --warm-up 1500 \\
        --until 0.98 --policy models/tiny
    python -m transferqueue.workflows.job.tiny_model models/critic --kind value --warm-up 400 --policy models/tiny
  a policy that reads images, which answers with a colour whatever it sees, and images to train it on:
    python -m transferqueue.workflows.job.tiny_model models/vision --kind llava --warm-up 40 --data data/colours

The reward function of every task: transferqueue.workflows.job.tiny_model.tasks:exact (it reads the column answer).
"""


_VISION: Final = "llava"
"""A policy that reads images; its task is their colour."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m transferqueue.workflows.job.tiny_model",
        description=(
            "Make a tiny Qwen3 directory offline: about 140,000 parameters, byte-level tokenizer, chat template."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="where the model goes; made if it is missing")
    parser.add_argument(
        "--kind", choices=[*KINDS, _VISION], default="qwen3", help="policy, reward model or critic (default: qwen3)"
    )
    parser.add_argument("--task", choices=TASKS, default="sort", help="the task to train on (default: sort)")
    parser.add_argument(
        "--warm-up", type=int, default=0, metavar="STEPS", help="train at most this many steps of 64 rows (default: 0)"
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="FIGURE",
        help="end the warm-up at this held-out figure (a policy's reward: 0.35)",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="DIR",
        help="a reward model or critic learns from answers that this policy draws",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="write train.jsonl and test.jsonl of the task there")
    parser.add_argument("--seed", type=int, default=0, help="of weights, warm-up and questions (default: 0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model, and the data if asked; return the exit code (2: an argument was refused)."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.kind == _VISION:
        if given.task != parser.get_default("task") or given.until is not None or given.policy:
            sys.stderr.write("--kind llava has a task of its own, and takes no --task, --until or --policy\n")
            return 2
        make_vision(given.directory, steps=given.warm_up, seed=given.seed)
        if given.data:
            write_colours(given.data, seed=given.seed)
        sys.stdout.write(f"{given.directory}: {given.kind}\n")
        return 0
    try:
        figure = make(
            given.directory,
            kind=given.kind,
            task=given.task,
            steps=given.warm_up,
            until=given.until,
            seed=given.seed,
            policy=given.policy,
        )
        if given.data:
            write_data(given.data, task=given.task, seed=given.seed)
    except TransferQueueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    measured = f", {KINDS[given.kind].figure} {figure:.2f} on held-out questions" if given.warm_up else ""
    sys.stdout.write(f"{given.directory}: {given.kind}{measured}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
