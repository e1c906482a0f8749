"""A plan as a file: changes of a job file, and the prediction of the run. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.errors import Impossible, NotFound, UsageError
from transferqueue.workflows.job.settings.write import as_toml
from transferqueue.workflows.planner.job_plan import DevicePlan, bound_s, draw_lengths, predict
from transferqueue.workflows.planner.profile import Profile
from transferqueue.workflows.planner.simulated_job import GENERATE, TRAIN

STEPS: Final = 8
"""Simulated steps of a prediction."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of the simulation. step_s: median seconds from a step to the next. trainer_idle, generators_idle:
    shares of time without rows."""

    step_s: float
    samples_per_s: float
    trainer_idle: float = 0.0
    generators_idle: float = 0.0


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan of a job. changes: values by key, as ``--set`` takes them.

    >>> predicted = Predicted(step_s=1.5, samples_per_s=20.0)
    >>> plan = PlanFile(changes={"pacing.mode": "sync", "engine.0.count": 2}, predicted=predicted)
    >>> plan.sets()
    ['pacing.mode="sync"', 'engine.0.count=2']
    """

    changes: dict[str, int | str]
    predicted: Predicted
    about: str = ""

    def sets(self) -> list[str]:
        """Return the changes as ``--set`` takes them."""
        return [
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in self.changes.items()
        ]

    def write(self, path: Path) -> None:
        """Write the plan to `path`."""
        path.write_text(as_toml(self), encoding="utf-8")


def read_plan(path: Path) -> PlanFile:
    """Read a plan. Raises `NotFound` if the file does not exist, `UsageError` if it is no plan."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=PlanFile)
    except FileNotFoundError as error:
        raise NotFound(
            f"plan {path} does not exist; transferqueue plan PROFILE.toml --out {path} writes one"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"plan {path} is not one: {error}; transferqueue plan PROFILE.toml --out FILE writes one"
        ) from error


def plan_file(profile: Profile, plan: DevicePlan) -> PlanFile:
    """Return a plan of `profile` as a file, with the prediction of a longer simulation. `Impossible` for a profile
    whose rows are no whole groups, or of several kinds of devices."""
    _check(profile)
    lengths = draw_lengths(profile, STEPS)
    planned = predict(profile, plan, bound_s(profile, plan, lengths), lengths)
    step_s = planned.later_step_s
    predicted = Predicted(
        step_s=round(step_s, 4),
        samples_per_s=round(profile.batch_rows / step_s, 3),
        trainer_idle=round(planned.idle[TRAIN], 4),
        generators_idle=round(planned.idle[GENERATE], 4),
    )
    return PlanFile(changes=changes_of(profile, plan), predicted=predicted, about=plan.mode)


def changes_of(profile: Profile, plan: DevicePlan) -> dict[str, Any]:
    """Return the changes of a job file that make it run as planned."""
    groups = profile.batch_rows // profile.group_rows
    streams = plan.micro_rows < profile.batch_rows
    instances = plan.instances
    changes = {
        "engine.0.count": instances[GENERATE],
        "engine.0.slots": plan.slots,
        **pacing_changes(plan.depth),
        "trainer.at_least": max(1, plan.micro_rows // profile.group_rows) if streams else groups,
    }
    ranks = {"trainer.ranks": instances[TRAIN]} if instances[TRAIN] > 1 else {}
    rewards = {"reward.0.processes": instances["reward"]} if instances.get("reward", 1) > 1 else {}
    return {**changes, **ranks, **rewards}


def pacing_changes(depth: int) -> dict[str, Any]:
    """Return those that give a job a depth."""
    return {
        "pacing.mode": "async" if depth else "sync",
        "pacing.depth": depth,
        "pacing.max_staleness": depth,
    }


def _check(profile: Profile) -> None:
    if profile.batch_rows % profile.group_rows:
        raise Impossible(
            f"batch_rows={profile.batch_rows} is no whole number of groups of {profile.group_rows} rows; profile the "
            "job again"
        )
    if profile.kinds:
        raise Impossible(
            f"a plan for {len(profile.kinds)} kinds of devices is no change of a job file, whose processes run on one "
            "machine; place its engines and its trainer yourself, as the table says"
        )
