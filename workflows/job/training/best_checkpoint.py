"""Which checkpoint of a run its evaluation found best, and whether evaluations still improve. No torch here.

1. An evaluation belongs to a checkpoint if both name the same step and version: with others the weights differ.
2. The figure `evaluation.figure` is compared; if it is empty, the mean reward, and where rows have none, the divergence
   or the loss, which are better lower. Of equals the first is better.
3. Evaluations come later than checkpoints. Those that were not judged yet stay, the oldest ones, since they are judged
   next: as many as the job keeps anyway, so a slow evaluation does not fill the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transferqueue.workflows.job import names
from transferqueue.workflows.job.run_files import CHECKPOINTS, EVALUATIONS, STATE, checkpoint_path, json_lines
from transferqueue.workflows.job.settings.job import Job


class _Judged(NamedTuple):
    version: int
    score: float


def best_step(folder: Path, steps: Sequence[int], figure: str = "") -> int | None:
    """Return which checkpoint of the run in `folder`, of these steps, was evaluated best by `evaluation.figure`; None
    if none was."""
    return _best(folder, steps, _evaluations(folder, figure))


def judged_steps(folder: Path, steps: Sequence[int], job: Job) -> list[int]:
    """Return which of these checkpoints stay because of evaluations: the best, and those that are not judged yet."""
    judged = _evaluations(folder, job.evaluation.figure)
    best = _best(folder, steps, judged)
    waiting = [step for step in steps if step not in judged and step % job.evaluation.every == 0]
    return [*waiting[: job.checkpoint.keep], *([] if best is None else [best])]


def has_stalled(folder: Path, job: Job) -> bool:
    """Whether the last `evaluation.patience` evaluations of the run in `folder` were no better than one before them.

    An evaluation that comes late has the newest weights, as the one after it may: of each version one counts.
    """
    if not job.evaluation.patience:
        return False
    judged = _evaluations(folder, job.evaluation.figure)
    of_version = {each.version: each.score for _, each in sorted(judged.items())}
    scores = [of_version[version] for version in sorted(of_version)]
    return bool(scores) and len(scores) - 1 - scores.index(max(scores)) >= job.evaluation.patience


def _best(folder: Path, steps: Sequence[int], judged: dict[int, _Judged]) -> int | None:
    scores = {
        step: judged[step].score for step in steps if step in judged and judged[step].version == _version(folder, step)
    }
    return max(sorted(scores), key=lambda step: scores[step], default=None)


def _version(folder: Path, step: int) -> int:
    """The version of the weights of a checkpoint."""
    state = checkpoint_path(folder / CHECKPOINTS / names.TRAIN, step) / STATE
    return int(json.loads(state.read_bytes())["version"])


def _evaluations(folder: Path, figure: str) -> dict[int, _Judged]:
    """The last evaluation of each step."""
    judged: dict[int, _Judged] = {}
    for values in json_lines(folder / EVALUATIONS):
        measure = figure or next((name for name in names.MEASURES if name in values), "")
        if measure in values:
            sign = -1.0 if measure.rpartition("/")[2] in names.LOWER_IS_BETTER else 1.0
            judged[values["step"]] = _Judged(values["version"], sign * values[measure])
    return judged
