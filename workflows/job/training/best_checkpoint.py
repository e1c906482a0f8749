"""Which checkpoint of a run its evaluation found best. No torch here.

1. An evaluation belongs to a checkpoint if both name the same step and version: with others the weights differ.
2. The mean reward is the measure; where rows have none, the lower divergence or loss is better. Of equals the first.
3. Evaluations come later than checkpoints. Those that were not judged yet stay, the oldest ones, since they are judged
   next: as many as the job keeps anyway, so a slow evaluation does not fill the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from transferqueue.workflows.job import names
from transferqueue.workflows.job.run_files import CHECKPOINTS, EVALUATIONS, STATE, checkpoint_path, json_lines
from transferqueue.workflows.job.settings.job import Job

_SIGNS: Final = {"reward": 1.0, "kl": -1.0, "loss": -1.0}


class _Judged(NamedTuple):
    version: int
    score: float


def best_step(folder: Path, steps: Sequence[int]) -> int | None:
    """Return which checkpoint of the run in `folder`, of these steps, was evaluated best; None if none was."""
    return _best(folder, steps, _evaluations(folder))


def judged_steps(folder: Path, steps: Sequence[int], job: Job) -> list[int]:
    """Return which of these checkpoints stay because of evaluations: the best, and those that are not judged yet."""
    judged = _evaluations(folder)
    best = _best(folder, steps, judged)
    waiting = [step for step in steps if step not in judged and step % job.evaluation.every == 0]
    return [*waiting[: job.checkpoint.keep], *([] if best is None else [best])]


def _best(folder: Path, steps: Sequence[int], judged: dict[int, _Judged]) -> int | None:
    scores = {
        step: judged[step].score for step in steps if step in judged and judged[step].version == _version(folder, step)
    }
    return max(sorted(scores), key=lambda step: scores[step], default=None)


def _version(folder: Path, step: int) -> int:
    """The version of the weights of a checkpoint."""
    state = checkpoint_path(folder / CHECKPOINTS / names.TRAIN, step) / STATE
    return int(json.loads(state.read_bytes())["version"])


def _evaluations(folder: Path) -> dict[int, _Judged]:
    """The last evaluation of each step."""
    judged: dict[int, _Judged] = {}
    for values in json_lines(folder / EVALUATIONS):
        measure = next((name for name in _SIGNS if name in values), "")
        if measure:
            judged[values["step"]] = _Judged(values["version"], _SIGNS[measure] * values[measure])
    return judged
