"""Tries an adopted job: the stack trains two steps, the native job trains them again on the same rows."""

from __future__ import annotations

import importlib.util
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from transferqueue.errors import UsageError
from transferqueue.lazy import install_line
from transferqueue.workflows.adopt.apply import Line
from transferqueue.workflows.adopt.mapping import Settings
from transferqueue.workflows.adopt.read import read_job
from transferqueue.workflows.adopt.sources.yaml_files import flatten
from transferqueue.workflows.adopt.trial import native, of_trl
from transferqueue.workflows.adopt.trial.compare import (
    BOUND,
    FirstDifference,
    SideStep,
    Tried,
    figures_of,
    first_difference,
    reasons,
)
from transferqueue.workflows.adopt.trial.side import steps_of
from transferqueue.workflows.job.devices.model_sizes import local_config
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import job_from_values, read_toml
from transferqueue.workflows.job.settings.sizes import batch_rows

STEPS_TRIED: Final = 2


def try_both(
    words: Sequence[str],
    *,
    stack: str,
    written: str,
    lines: Sequence[Line],
    file: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Tried:
    """Run two steps of both jobs, and compare them. Blocks for as long as that takes.

    Args:
        words: of the job, as of `read_job`.
        stack: name of its stack.
        written: the job file as adopt writes it.
        lines: of adopt's report.
        file: the job file to try, which was changed since; rewards may name modules of its folder, beside those of the
            current one. Default None: `written` is tried.
        tell: gets a line for each step of each side.

    Raises:
        UsageError: no trial of this job is possible, before anything is run; or a side could not be run.
        Impossible: a rule of jobs refuses the trial, before anything is run.
        DeadlineExceeded: a side took too long.
    """
    if stack != "trl":
        raise UsageError(f"--try runs jobs of trl; this one is of {stack}: run both, and compare their logs")
    settings = read_job(words, stack=stack).settings
    of_trl.check(settings)
    _check_model(str(settings[of_trl.MODEL]), str(settings["model_revision"] or ""))
    values = tomllib.loads(written) if file is None else read_toml(file)
    job = job_from_values(values, named="trial")
    with tempfile.TemporaryDirectory(prefix="transferqueue-try-") as place:
        folder, steps = Path(place), min(STEPS_TRIED, job.steps)
        trial = native.trial_job(values, job, folder, steps)
        theirs = _theirs(settings, folder, steps, tell)
        ours: list[SideStep] = []
        found = _other_rows(job, theirs[0])
        if found is None:
            ours = _ours(job, trial, folder, theirs, Path() if file is None else file.parent, tell)
            found = first_difference(theirs, ours)
    if found is not None:
        why = reasons(found, (theirs[0].steps, job.steps), _changed(tomllib.loads(written), values), lines)
        found = replace(found, why=why)
    return Tried(stack=stack, bound=BOUND, figures=figures_of(theirs, ours), differs=found, notes=_notes(theirs))


def _theirs(settings: Settings, folder: Path, steps: int, tell: Callable[[str], None]) -> list[SideStep]:
    import yaml

    _check_installed(of_trl.PACKAGE)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(of_trl.options(settings, folder / "output")), encoding="utf-8")
    return steps_of(of_trl.PACKAGE, of_trl.MODULE, [str(config), str(steps)], folder / "stack.log", tell)


def _other_rows(job: Job, theirs: SideStep) -> FirstDifference | None:
    """Return the difference if a step of the native job has another number of rows, or of prompts."""
    prompts, drawn = job.trainer.prompts_per_step, len(theirs.completions)
    if (len(theirs.data), drawn) == (prompts, batch_rows(job)):
        return None
    return FirstDifference(step=1, figure="rows", theirs=str(drawn), ours=str(batch_rows(job)))


def _ours(
    job: Job, trial: Job, folder: Path, theirs: Sequence[SideStep], code: Path, tell: Callable[[str], None]
) -> list[SideStep]:
    words = [str(native.write_trial(trial, folder, theirs)), str(folder / "run"), str(code)]
    steps = steps_of("native", native.MODULE, words, folder / "native.log", tell)
    return [replace(step, figures=step.figures | {"lr": native.scheduled_lr(job, step.step)}) for step in steps]


def _notes(theirs: Sequence[SideStep]) -> list[str]:
    if any(advantage for step in theirs for _, advantage in step.rows):
        return []
    return [
        "every advantage is 0, so the losses say nothing of the algorithm: take a reward that differs within a group"
    ]


def _changed(written: Mapping[str, Any], tried: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys of a job file that were changed, with their values before and after."""
    before, after = flatten(dict(written)), flatten(dict(tried))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: (before.get(key), after.get(key)) for key in keys}


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"--try runs {package} itself, which is not installed here: {install_line(package)}, or run adopt in the "
            f"environment that has {package}"
        )


def _check_model(model: str, revision: str) -> None:
    """Raise `UsageError` unless the model's files are on this machine."""
    if not local_config(model, revision):
        raise UsageError(
            f"--try: the model {model} is not on this machine; load it (hf download {model}), or give a small one of "
            f"the same kind after the file: -- --{of_trl.MODEL} DIR"
        )
