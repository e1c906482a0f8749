"""Runs a job for some steps, to measure how its processes slow each other: shared cores and memory, the queue between
them, waits.

1. One trial for each depth of the profile: one engine and one trainer, with the slots of the job and the smallest
   micro-batch that plans try.
2. The busy time of generation and of training over those that the parts alone predict for the same plan are the
   factors.
3. The time of a synchronous step beyond its prediction with these factors is its wait. An asynchronous one hides it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.errors import UsageError
from transferqueue.workflows.job import names
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.run.summary import RunSummary
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.plan_file import changes_of, pacing_changes
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.planner.job_plan import DevicePlan, Planned, draw_lengths, plans, predict
from transferqueue.workflows.planner.profile import Profile, TrialFactors
from transferqueue.workflows.planner.simulated_job import GENERATE, TRAIN

STEPS_MIN: Final = 3
"""Fewer have no two whole steps between which to measure."""
_SIMULATED: Final = 8
_LEAN: Final = {
    "evaluation": {"path": "", "sets": [], "patience": 0, "figure": "", "pass_at": []},
    "checkpoint": {"every": 0, "best": "", "resume": ""},
    "log": {"samples": 0, "to": []},
    "elastic": {"max": 0},
    "queue": {"address": "", "record": "off"},
    "weights": {"every": 1, "kv": "recompute"},
    "algorithm": {"token_staleness": {"mask": 0}},
    "pacing": {"over_sample": 1.0, "staleness_of": "oldest"},
    "trainer": {"warmup": 0},
}
"""A trial writes nothing that outlives it, runs on a server of its own, and has settings that every depth allows."""


def run_trials(
    job: Job, profile: Profile, *, steps: int, code: Path | None, say: Callable[[str], None]
) -> list[TrialFactors]:
    """Run `job` for `steps` steps at each depth of `profile`, which was measured without trials; return the factors.
    Blocks for these runs and their starts.

    Raises what `run_job` does. The folders of the runs are deleted.
    """
    with tempfile.TemporaryDirectory(prefix="transferqueue-trial-") as place:
        found = []
        for plan in trial_plans(profile):
            say(f"a trial of {steps} steps: {plan.mode}, {plan.slots} slots, from {plan.micro_rows} rows")
            trial = trial_job(job, changes_of(profile, plan), steps)
            outcome = run_job(trial, folder=RunFolder(Path(place) / f"depth-{plan.depth}"), code=code)
            found.append(factors(profile, plan, outcome.summary))
    return found


def check_trials(job: Job, depths: Sequence[int], steps: int) -> None:
    """Raise as the rules of jobs do if a trial at one of these depths could not run, before anything is measured."""
    if steps < STEPS_MIN:
        raise UsageError(f"trial_steps={steps}: a trial needs at least {STEPS_MIN} steps; 0 runs none")
    for depth in depths:
        trial_job(job, pacing_changes(depth), steps)


def trial_plans(profile: Profile) -> Iterator[DevicePlan]:
    """Yield the plan of the trial at each depth (rule 1)."""
    for depth in profile.depths:
        single = [
            plan
            for plan in plans(profile)
            if plan.depth == depth and plan.instances[GENERATE] == 1 and plan.instances[TRAIN] == 1
        ]
        most = max(plan.slots for plan in single)
        yield min((plan for plan in single if plan.slots == most), key=lambda plan: plan.micro_rows)


def trial_job(job: Job, changes: dict[str, Any], steps: int) -> Job:
    """Return the job of a trial: `job` with the changes of a plan, `steps` steps, and nothing that outlives it."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(job))
    values |= {"steps": steps, "reproducible": False}
    for name, lean in _LEAN.items():
        values[name] |= lean
    for key, value in {"engine.0.site": "", **changes}.items():
        apply(values, f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}")
    return job_from_values(values)


def factors(profile: Profile, plan: DevicePlan, summary: RunSummary) -> TrialFactors:
    """Return the factors of a trial of `plan` over the prediction of `profile`, measured part by part (rules 2, 3)."""
    step_s = summary.trained_s / summary.steps
    alone = _predicted(profile, plan)
    idle = 0.0 if summary.trainer_idle is None else summary.trainer_idle
    measured = TrialFactors(
        depth=plan.depth,
        generation=_ratio(summary.busy.get(names.ROLLOUT, 0.0) * step_s, (1 - alone.idle[GENERATE]) * alone.step_s),
        train=_ratio((1 - idle) * step_s, (1 - alone.idle[TRAIN]) * alone.step_s),
    )
    if plan.depth or summary.step_s is None:
        return measured
    beside = _predicted(msgspec.structs.replace(profile, trials=[measured]), plan)
    return msgspec.structs.replace(measured, wait_s=round(max(0.0, summary.step_s - beside.later_step_s), 4))


def _predicted(profile: Profile, plan: DevicePlan) -> Planned:
    return predict(profile, plan, 0.0, draw_lengths(profile, _SIMULATED))


def _ratio(measured_s: float, predicted_s: float) -> float:
    """1 where either is not known.

    >>> _ratio(3.0, 2.0), _ratio(0.0, 2.0)
    (1.5, 1.0)
    """
    return round(measured_s / predicted_s, 4) if measured_s > 0 and predicted_s > 0 else 1.0
