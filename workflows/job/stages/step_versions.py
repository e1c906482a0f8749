"""Which version of the weights a row is generated and scored with, in a job that generates ahead and repeats bit for
bit (``reproducible = true`` in the modes ``delayed`` and ``async``).

1. Version k is the weights after k steps. Prompts are trained in their order, so the number of a prompt says which step
   trains its rows, and with it their version: `sizes.version_lag` steps before. Timing decides when a row is generated,
   and not with which weights.
2. A step that is trained again after a rollback makes the same bits, so its version is not published again, and rows
   that were generated stay as they are. The bound on staleness holds by rule 1; the table has none.
3. The rows of the first steps have the version that the table began with. The trainer says which that is, and which
   prompt is the first, on the channel `names.FIRST`, before it publishes the first version.
4. The queue keeps the versions that a row may still need (`sizes.versions_kept`). A row whose version is gone ends the
   run: it gets no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, NotFound
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job.names import FIRST
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import version_lag

_NUMBERS: Final = "numbers"


@dataclass(frozen=True, kw_only=True)
class StepVersions:
    """The version of each row. version, prompt: that the table began with. lag, every: see `version_lag`, and
    `weights.every`.

    >>> versions = StepVersions(prompts_per_step=4, lag=1)
    >>> [versions.of(prompt) for prompt in (0, 4, 8, 11, 12)]
    [0, 0, 1, 1, 2]
    """

    prompts_per_step: int
    lag: int
    every: int = 1
    version: int = 0
    prompt: int = 0

    def steps(self, prompts: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return how many steps are trained before that of each prompt, in the life of the table."""
        return (np.asarray(prompts, np.int64) - self.prompt) // self.prompts_per_step

    def first_prompt(self, step: int) -> int:
        """Return the number of the first prompt of a step."""
        return self.prompt + step * self.prompts_per_step

    def of(self, prompt: int) -> int:
        """Return the version of the rows of a prompt."""
        step = self.version + int(self.steps(prompt))
        return max(self.version, (step - self.lag) // self.every * self.every)


def begin_versions(queue: tq.Queue, version: int, prompt: int) -> None:
    """Say with which version and prompt the table begins. A trainer that starts again changes nothing."""
    channel = queue.weights(FIRST, keep=1)
    if _begun(channel) is None:
        channel.publish(0, {_NUMBERS: np.array([version, prompt], np.int64)})


def step_versions(queue: tq.Queue, job: Job) -> StepVersions:
    """Return the versions of the rows of a job whose first version is published. A trainer that the caller plays need
    not say where the table begins: at 0."""
    version, prompt = _begun(queue.weights(FIRST)) or (0, 0)
    return StepVersions(
        prompts_per_step=job.trainer.prompts_per_step,
        lag=version_lag(job),
        every=job.weights.every,
        version=version,
        prompt=prompt,
    )


def _begun(channel: tq.WeightChannel) -> tuple[int, int] | None:
    try:
        with channel.pull(timeout_s=0) as numbers:
            version, prompt = numbers.numpy()[_NUMBERS].tolist()
            return version, prompt
    except DeadlineExceeded:
        return None


def pull_exactly(channel: tq.WeightChannel, version: int, timeout_s: float) -> tq.Weights:
    """Return this version of a channel, once it is published. Raises `StageFailedInProcess` if it is gone, and
    `DeadlineExceeded`."""
    try:
        return channel.pull(version=version, timeout_s=timeout_s)
    except NotFound as error:
        raise StageFailedInProcess(
            f'version {version} of channel "{channel.name}" is gone, and with reproducible=true its rows get no '
            f"other: {error}; begin a new run with a larger weights.keep"
        ) from error


def in_turns(versions: npt.ArrayLike) -> Iterator[tuple[int, list[int]]]:
    """Yield each version with the positions of its rows, the oldest first.

    >>> [*in_turns([3, 2, 3])]
    [(2, [1]), (3, [0, 2])]
    """
    of_rows: npt.NDArray[Any] = np.asarray(versions)
    for version in np.unique(of_rows).tolist():
        yield version, np.flatnonzero(of_rows == version).tolist()
