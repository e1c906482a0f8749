"""Writes the policy of a run as a model directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.workflows.job import names
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run_files import CHECKPOINTS, checkpoint_path, checkpoint_steps, no_checkpoint
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.training.best_checkpoint import best_step


@dataclass(frozen=True)
class Exported:
    """A model that was written. step: of its checkpoint. nbytes: of its weights."""

    step: int
    nbytes: int


def export_run(
    run: Path, out: Path, *, step: int | None = None, best: bool = False, dtype: str = "", merge: bool = False
) -> Exported:
    """Write the policy of the run in the folder `run` as a model directory `out`.

    step: of one of its checkpoints (None: the newest). best: the one that was evaluated best. dtype, merge: as of
    `transferqueue.workflows.job.training.model_files.export_checkpoint`, which also says what else is raised.

    Raises `NotFound` if `run` is no folder of a run, has no checkpoint, not that of `step`, or none that was evaluated.
    """
    if step is not None and best:
        raise UsageError(f"--step {step} with --best: both choose the checkpoint; leave one of them out")
    folder = RunFolder(run)
    job = _at_its_place(folder, folder.job())
    chosen = _chosen(run, step, job.evaluation.figure, best=best)
    from transferqueue.workflows.job.training.model_files import export_checkpoint  # loads torch

    checkpoint = checkpoint_path(run / CHECKPOINTS / names.TRAIN, chosen)
    return Exported(chosen, export_checkpoint(checkpoint, job, out, dtype=dtype, merge=merge))


def _chosen(run: Path, step: int | None, figure: str, *, best: bool) -> int:
    steps = checkpoint_steps(run / CHECKPOINTS / names.TRAIN)
    if not steps:
        raise no_checkpoint(run)
    if step is not None and step not in steps:
        raise NotFound(f"{run} has no checkpoint of step {step}; it has those of steps {listing(map(str, steps))}")
    if not best:
        return steps[-1] if step is None else step
    if (found := best_step(run, steps, figure)) is None:
        raise NotFound(
            f'{run} has no checkpoint that was evaluated: set checkpoint.best="evaluation" in its job, or give --step, '
            f"one of {listing(map(str, steps))}"
        )
    return found


def _at_its_place(folder: RunFolder, job: Job) -> Job:
    """Return the job with the path of its model as seen from here; the run may have been started elsewhere."""
    starts = folder.starts()
    path = Path(starts[-1].place if starts else "", Path(job.model.path).expanduser())
    return replace(job, model=replace(job.model, path=str(path))) if path.is_dir() else job
