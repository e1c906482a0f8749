"""Tries an adopted job: the stack trains two steps, the native job trains them again on the same rows. verl also trains
them on this queue."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from transferqueue.adapters.transfer_queue_hook import ALIAS, FOLDER
from transferqueue.errors import UsageError
from transferqueue.lazy import install_line
from transferqueue.workflows.adopt.apply import Line
from transferqueue.workflows.adopt.mapping import REWARDS, Settings
from transferqueue.workflows.adopt.read import read_job
from transferqueue.workflows.adopt.sources.shell import is_open
from transferqueue.workflows.adopt.sources.yaml_files import flatten
from transferqueue.workflows.adopt.trial import native, of_trl
from transferqueue.workflows.adopt.trial.compare import (
    BOUND,
    ON_QUEUE,
    FirstDifference,
    SideStep,
    Tried,
    figures_of,
    first_difference,
    reasons,
)
from transferqueue.workflows.adopt.trial.of_verl import job as of_verl
from transferqueue.workflows.adopt.trial.of_verl import process as verl_process
from transferqueue.workflows.adopt.trial.side import steps_of
from transferqueue.workflows.job.devices.model_sizes import local_config
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import job_from_values, read_toml
from transferqueue.workflows.job.settings.sizes import batch_rows

STEPS_TRIED: Final = 2
Tell = Callable[[str], None]
_INTERPOLATION: Final = re.compile(r"\$\{\w+\.[\w.]+(?::[^}]*)?\}")
"""What verl itself computes, as ``${data.seed}`` and ``${oc.env:HOME}``; no variable of a shell has a dot."""
_NO_TRIAL: Final[Mapping[str, str]] = {
    "nemo-rl": "its Ray workers ask for GPUs, and vLLM, SGLang or Megatron generates",
    "slime": "its Ray actors ask for GPUs, Megatron trains and SGLang generates",
    "openrlhf": "its Ray actors ask for GPUs, DeepSpeed trains and vLLM generates",
}
"""Stacks that do not start on a CPU, each with the reason."""


class _Native:
    """The native job of a trial; a rule that refuses it raises before anything is run.

    Args:
        written: the job file as adopt writes it.
        rewards: the module of its rewards; "": it has none.
        file: the job file to try instead.
        lines: of adopt's report.
        folder: for the files of the trial.
    """

    def __init__(self, written: str, rewards: str, file: Path | None, lines: Sequence[Line], folder: Path) -> None:
        self._values = tomllib.loads(written) if file is None else read_toml(file)
        self._written, self._lines, self._folder = written, lines, folder
        self._job = job_from_values(self._values, named="trial")
        self.steps = min(STEPS_TRIED, self._job.steps)
        self._trial = native.trial_job(self._values, self._job, folder, self.steps)
        self._code = Path() if file is None else file.parent
        if rewards and file is None:
            self._code = folder
            (folder / REWARDS).write_text(rewards, encoding="utf-8")

    def beside(
        self, stack: str, theirs: Sequence[SideStep], tell: Tell, *, devices: str = "", rate_ahead: int = 0
    ) -> Tried:
        """Train the rows of a stack, and compare.

        Args:
            stack: its name.
            theirs: its steps.
            tell: gets a line for each step.
            devices: ``cpu``: GPUs are hidden. Default "": those that are visible.
            rate_ahead: 1 where the stack's learning rate of a step is that of the one after. Default 0.
        """
        ours: list[SideStep] = []
        found = _other_rows(self._job, theirs[0])
        if found is None:
            file = native.write_trial(self._trial, self._folder, theirs)
            words = [str(file), str(self._folder / "run"), str(self._code), devices]
            steps = steps_of("native", native.MODULE, words, self._folder / "native.log", tell)
            ours = [self._scheduled(step, rate_ahead) for step in steps]
            found = first_difference(theirs, ours)
        if found is not None:
            changed = _changed(tomllib.loads(self._written), self._values)
            found = replace(found, why=reasons(found, (theirs[0].steps, self._job.steps), changed, self._lines))
        return Tried(stack=stack, bound=BOUND, figures=figures_of(theirs, ours), differs=found, notes=_notes(theirs))

    def _scheduled(self, step: SideStep, rate_ahead: int) -> SideStep:
        return replace(step, figures=step.figures | {"lr": native.scheduled_lr(self._job, step.step + rate_ahead)})


def try_both(
    words: Sequence[str],
    *,
    stack: str,
    written: str,
    lines: Sequence[Line],
    rewards: str = "",
    problem: str = "",
    file: Path | None = None,
    tell: Tell = lambda text: None,
) -> list[Tried]:
    """Run two steps of both jobs, and compare them. Blocks for as long as that takes.

    Args:
        words: of the job, as of `read_job`.
        stack: name of its stack.
        written: the job file as adopt writes it; "" where it writes none.
        lines: of adopt's report.
        rewards: the module of rewards as adopt writes it. Default "": none.
        problem: why `written` is empty.
        file: the job file to try, which was changed since; rewards may name modules of its folder, beside those of the
            current one. Default None: `written` is tried.
        tell: gets a line for each step of each side.

    Returns:
        The stack beside the native job. Of verl first verl on its own queue beside verl on this one; that alone where
        the native job cannot train verl's rows, and then a note says why.

    Raises:
        UsageError: no trial of this job is possible, before anything is run; or a side could not be run.
        Impossible: a rule of jobs refuses the trial, before anything is run.
        DeadlineExceeded: a side took too long.
    """
    if stack in _NO_TRIAL:
        raise UsageError(
            f"--try runs jobs of trl and verl on a CPU; {stack} does not start on one: {_NO_TRIAL[stack]}. Run both "
            "where it runs, and compare their logs"
        )
    settings = read_job(words, stack=stack).settings
    with tempfile.TemporaryDirectory(prefix="transferqueue-try-") as place:
        folder = Path(place)
        if stack == "verl":
            _check_verl(settings, folder)
            why = problem or of_verl.unmapped(settings)
            ours = None if why else _Native(written, rewards, file, lines, folder)
            return _of_verl(settings, ours, why, folder, tell)
        if problem:
            raise UsageError(f"job.toml is not written: {problem}")
        of_trl.check(settings)
        _check_known(flatten(of_trl.options(settings, folder)), "after the file and --")
        _check_model(settings, of_trl.MODEL, f"-- --{of_trl.MODEL} DIR", str(settings["model_revision"] or ""))
        ours = _Native(written, rewards, file, lines, folder)
        return [ours.beside(stack, _of_trl(settings, folder, ours.steps, tell), tell)]


def _of_trl(settings: Settings, folder: Path, steps: int, tell: Tell) -> list[SideStep]:
    import yaml

    _check_installed(of_trl.PACKAGE)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(of_trl.options(settings, folder / "output")), encoding="utf-8")
    return steps_of(of_trl.PACKAGE, of_trl.MODULE, [str(config), str(steps)], folder / "stack.log", tell)


def _of_verl(settings: Settings, ours: _Native | None, why: str, folder: Path, tell: Tell) -> list[Tried]:
    """Return verl on both queues; and beside the native job `ours`, or why that is None as a note."""
    config, sides = folder / "settings.json", list[list[SideStep]]()
    config.write_bytes(msgspec.json.encode(of_verl.trial_settings(settings, folder)))
    for queue, name in verl_process.QUEUES.items():
        words = [str(config), str(folder / f"{queue}.jsonl"), str(STEPS_TRIED), queue]
        sides.append(steps_of(f"verl on {name}", verl_process.MODULE, words, folder / f"{queue}.log", tell))
    own, this = sides
    notes = [*_notes(own), *([f"the native job was not tried: {why}"] if why else [])]
    differs = first_difference(own, this)
    tried = [
        Tried(stack="verl", other=ON_QUEUE, bound=BOUND, figures=figures_of(own, this), differs=differs, notes=notes)
    ]
    if ours is not None:
        names = of_verl.compared(settings)
        theirs = [replace(step, figures={k: v for k, v in step.figures.items() if k in names}) for step in own]
        tried.append(ours.beside("verl", theirs, tell, devices="cpu", rate_ahead=1))
    return tried


def _other_rows(job: Job, theirs: SideStep) -> FirstDifference | None:
    """Return the difference if a step of the native job has another number of rows, or of prompts."""
    prompts, drawn = job.trainer.prompts_per_step, len(theirs.completions)
    if (len(theirs.data), drawn) == (prompts, batch_rows(job)):
        return None
    return FirstDifference(step=1, figure="rows", theirs=str(drawn), ours=str(batch_rows(job)))


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


def _check_known(given: Mapping[str, Any], where: str) -> None:
    """Raise `UsageError` if a stack would get the words of a shell literally. where: values go."""
    unknown = [key for key, value in given.items() if is_open(_INTERPOLATION.sub("", str(value)))]
    if unknown:
        raise UsageError(
            f"--try: {', '.join(unknown)} is what a shell would compute, and adopt runs none; give the value {where}"
        )


def _check_verl(settings: Settings, folder: Path) -> None:
    """Raise `UsageError` unless verl can run this job on both queues here."""
    for setting, why in of_verl.check(settings).items():
        raise UsageError(f"--try: {why}; give {setting} after the file")
    _check_known(of_verl.trial_settings(settings, folder), "after the file")
    _check_model(settings, of_verl.PATH, f"{of_verl.PATH}=DIR")
    _check_installed(of_verl.PACKAGE)
    if FOLDER in sys.path:
        raise UsageError(
            "--try runs verl on its own queue too, which the drop-in covers here: transferqueue drop-in off, and no "
            f"{FOLDER} in PYTHONPATH"
        )
    if PathFinder.find_spec(ALIAS) is None:
        raise UsageError("--try runs verl on its own queue too, which is not installed here: pip install TransferQueue")


def _check_model(settings: Settings, key: str, remedy: str, revision: str = "") -> None:
    """Raise `UsageError` unless the files of the model that `key` names are on this machine."""
    model = str(settings[key])
    if not local_config(model, revision):
        raise UsageError(
            f"--try: the model {model} is not on this machine; load it (hf download {model}), or give a small one of "
            f"the same kind after the file: {remedy}"
        )
