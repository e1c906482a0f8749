"""What the planner predicts for the rungs of a ladder: `bench.ladder` calls ``python -m bench.predicted FOLDER``.

The job of the ladder is profiled as `transferqueue profile --trial-steps 12` would, its engine on the core that it has
alone. Each rung is then the plan that a job with these settings runs.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.workflows.job.settings.plan_file import STEPS
from transferqueue.workflows.job.settings.write import as_toml
from transferqueue.workflows.planner.job_plan import DevicePlan, draw_lengths, predict
from transferqueue.workflows.planner.profile import Profile, load
from transferqueue.workflows.planner.simulated_job import GENERATE, TRAIN

PROFILE: Final = "profile.toml"
TRIAL_STEPS: Final = 12


@dataclass(frozen=True)
class Prediction:
    """The planner's seconds of a step, from a profile of the job with this many engines."""

    profile: Profile
    engines: int

    @classmethod
    def read(cls, path: Path, engines: int) -> Prediction:
        """Return the prediction from a profile."""
        return cls(load(path), engines)

    def step_s(self, settings: Mapping[str, str]) -> float:
        """Return the predicted seconds of a step of a rung; NaN in mode colocated, which the planner does not have.

        Args:
            settings: that the rung changes.
        """
        mode, profile = settings["pacing.mode"], self.profile
        if mode == "colocated":
            return math.nan
        streams = settings.get("trainer.stream") != "off"
        stages = {stage.name: 1 for stage in profile.stages}
        candidate = DevicePlan(
            instances={GENERATE: self.engines, TRAIN: 1} | stages,
            micro_rows=profile.group_rows if streams else profile.batch_rows,
            depth=int(mode == "async"),
            devices=self.engines + 1,
            slots=profile.generation.slots,
        )
        sorted_rows = settings.get("dispatch.kind") == "length"
        ordered = msgspec.structs.replace(profile, by_length=sorted_rows)
        return predict(ordered, candidate, 0.0, draw_lengths(ordered, STEPS)).later_step_s


def main() -> None:
    """Profile the job of a folder, with the changes ``key=value`` that follow it."""
    place, cores, threads = Path(sys.argv[1]).absolute(), os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the engine's core; read when torch is imported
    from transferqueue.workflows.job.profiling.job import profile_job
    from transferqueue.workflows.job.profiling.trial import run_trials
    from transferqueue.workflows.job.settings.read import job_from_file

    job = job_from_file(place / "job.toml", set=sys.argv[2:])
    alone = profile_job(job, code=place)
    os.sched_setaffinity(0, cores)  # the engine has taken this process to its core
    del os.environ["OMP_NUM_THREADS"]
    os.environ |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    trials = run_trials(job, alone, steps=TRIAL_STEPS, code=place, say=lambda line: print(line, flush=True))
    profile = msgspec.structs.replace(alone, trials=trials)
    (place / PROFILE).write_text(as_toml(profile), encoding="utf-8")


if __name__ == "__main__":
    main()
