"""Predicted beside measured: one profile of a job, and a run of each of several plans: ``python -m bench.planned``.

The job is real and nothing is paced: `transferqueue profile` measures the transformers engine and the trainer with a
tiny model, alone, and the job in two trial runs of 12 steps; then the job runs with each plan, whose processes share
two cores (generation takes one, training the other, rewards and the server a little). The trials have the slots and
micro-batch of two of the plans. Plans have one engine and differ in mode, slots and micro-batch. Goal: the order of the
plans is right, and each step within 15 %.

Needs transformers and an idle machine; about five minutes (``--rounds 3``: twelve).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from bench.harness import ROOT
from bench.run_record import RECORDS, save_record
from transferqueue.observe.measurement_record import Measurement
from transferqueue.workflows.job.profiling.job import profile_job
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.plan_file import PlanFile, plan_file
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.planner.job_plan import DevicePlan, plans
from transferqueue.workflows.planner.profile import Profile

SLOTS: Final = 32
SIZE: Final = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def values_in(folder: Path, steps: int) -> dict[str, Any]:
    """Write model and data into `folder`, and return the values of a job file."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    make(folder / "model", **SIZE)
    write_data(folder / "data", train=512, test=16)
    return {
        "steps": steps,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "data"), "template": "{question}", "prompt_tokens_max": 32},
        "engine": [{"kind": "transformers", "slots": SLOTS}],
        "reward": [{"function": "bench.elastic:spread"}],
        "sampling": {"group_size": 4, "tokens_max": 64},
        "algorithm": {"kind": "grpo"},
        "trainer": {"prompts_per_step": 16, "lr": 1e-6},
        "weights": {"dtype": "float32"},
        "checkpoint": {"every": 0},
        "log": {"samples": 0},
        "queue": {"memory_gib": 0.5},
    }


def chosen_plans(profile: Profile) -> list[DevicePlan]:
    """Plans of one engine that differ in mode, slots and micro-batch."""
    wanted = [(0, SLOTS, 1), (0, SLOTS, 4), (0, SLOTS // 4, 1), (1, SLOTS, 4), (1, SLOTS // 4, 4)]
    one = [each for each in plans(profile) if each.instances["generate"] == 1 and each.instances["train"] == 1]
    return [
        each
        for depth, slots, part in wanted
        for each in one
        if (each.depth, each.slots, each.micro_rows) == (depth, slots, profile.batch_rows // part)
    ]


def measured_s(values: dict[str, Any], plan: PlanFile, folder: Path) -> float:
    """Run the job with a plan, and return the median seconds of a step."""
    import copy

    changed = copy.deepcopy(values)
    for change in plan.sets():
        apply(changed, change)
    outcome = run_job(job_from_values(changed), folder=RunFolder(folder), code=ROOT, plan=plan)
    print(outcome.summary.text(), flush=True)
    if outcome.summary.step_s is None:
        raise SystemExit("a run of one step has no time between steps; give more --steps")
    return outcome.summary.step_s


def main() -> None:
    """Profile, predict, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RECORDS)
    chosen = parser.parse_args()
    measurement = Measurement()
    with tempfile.TemporaryDirectory() as place:
        values = values_in(Path(place), chosen.steps)
        profile = profile_job(
            job_from_values(values), code=ROOT, trial_steps=12, say=lambda line: print(line, flush=True)
        )
        candidates = chosen_plans(profile)
        files = [plan_file(profile, each) for each in candidates]
        seconds: list[list[float]] = [[] for _ in files]
        for round_ in range(chosen.rounds):
            for at, file in enumerate(files):
                seconds[at].append(measured_s(values, file, Path(place) / f"run-{round_}-{at}"))
    rows = [compared(plan, file, median(each)) for plan, file, each in zip(candidates, files, seconds, strict=True)]
    for row in rows:
        print(
            f"{row['plan']}: predicted {row['predicted_s']:.3f} s, measured {row['measured_s']:.3f} s, "
            f"{row['error']:+.0%}"
        )
    right, pairs = in_order(rows)
    print(f"{right} of {pairs} pairs of plans that differ by more than 5 % measured are in the predicted order")
    details = {"profile": profile_values(profile), "plans": rows, "pairs": pairs, "pairs_in_order": right}
    save_record(measurement, chosen.out, "planned", [], details)


def compared(plan: DevicePlan, file: PlanFile, measured: float) -> dict[str, Any]:
    """A row of the comparison."""
    predicted = file.predicted.step_s
    return {
        "plan": f"{plan.mode}, {plan.slots} slots, from {plan.micro_rows} rows",
        "predicted_s": predicted,
        "measured_s": round(measured, 4),
        "error": round(predicted / measured - 1, 4),
    }


def in_order(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of plans in the predicted order, of those whose measured times differ by more than 5 %.

    >>> rows = [{"predicted_s": 1.0, "measured_s": 1.2}, {"predicted_s": 2.0, "measured_s": 1.9}]
    >>> rows.append({"predicted_s": 3.0, "measured_s": 1.95})
    >>> in_order(rows)
    (2, 2)
    """
    pairs = [
        (one, other)
        for one, other in combinations(rows, 2)
        if abs(one["measured_s"] - other["measured_s"]) > 0.05 * max(one["measured_s"], other["measured_s"])
    ]
    right = [
        (one["predicted_s"] - other["predicted_s"]) * (one["measured_s"] - other["measured_s"]) > 0
        for one, other in pairs
    ]
    return sum(right), len(pairs)


def profile_values(profile: Profile) -> dict[str, Any]:
    """The profile without its long list of lengths."""
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(profile)
    lengths = values["generation"].pop("lengths")
    return values | {"mean_length": round(sum(lengths) / len(lengths), 2), "observed": len(lengths)}


if __name__ == "__main__":
    main()
