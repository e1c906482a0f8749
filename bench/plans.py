"""Predicted beside measured steps of a job, by plan: ``python -m bench.plans modes``, ``python -m bench.plans money``.

The job is real and nothing is paced. `transferqueue profile` measures the transformers engine and the trainer with a
tiny model, alone; then the job runs with each of several plans, by turns. A figure is the median of a run's steps.

- *modes*: plans of one engine that differ in mode, slots and micro-batch, whose processes share two cores (generation
  takes one, training the other, rewards and the server a little). Goal: the order of the plans is right, and each step
  within 15 %.
- *money*: devices of two kinds with prices, and the plan for the money beside even splits. A device is a share of a
  core that the kernel holds a process to (a control group with a quota), so this needs root. *small* devices cost about
  a third of *large* ones, generate as fast and train at a seventh of the speed, as devices with as much memory
  bandwidth and little arithmetic do (the two kinds of StreamRL's second site). A kind's seconds are those of a whole
  core over its share. The even split takes half of the devices of a kind for each side. The figure is samples for the
  money. Expected, written before the first run: at least 1.2 times that of the best even split, predicted within 10 %.

The profile has two trial runs of the job, of 12 steps, each with the slots and micro-batch of one of its plans.

Needs transformers, and two idle cores. About a minute a run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import msgspec

from bench.harness import ROOT
from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.run_record import into_option, save_record, show
from transferqueue.workflows.job.profiling.job import profile_job
from transferqueue.workflows.job.settings.plan_file import STEPS, changes_of
from transferqueue.workflows.job.settings.read import job_from_file
from transferqueue.workflows.planner.job_plan import Planned, bound_s, draw_lengths, plan, plans, predict
from transferqueue.workflows.planner.profile import DeviceKind, Profile
from transferqueue.workflows.planner.simulated_job import GENERATE, TRAIN

SLOTS: Final = {"modes": 32, "money": 16}
TRIAL_STEPS: Final = 12
RUN_STEPS: Final = {"modes": 24, "money": 16}
SIZE: Final = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
JOB: Final = """
name = "plans"
model = { path = "PLACE/model", dtype = "float32" }
data = { path = "PLACE/data", template = "{question}", prompt_tokens_max = 32 }
engine = [{ kind = "transformers", slots = SLOTS }]
sampling = { group_size = 4, tokens_max = 64 }
reward = [{ function = "bench.plans:spread" }]
algorithm = { kind = "grpo" }
trainer = { prompts_per_step = 16, lr = 1e-6 }
weights = { dtype = "float32" }
checkpoint = { every = 0 }
log = { samples = 0 }
queue = { memory_gib = 0.5 }
"""
GROUPS: Final = Path("/sys/fs/cgroup/cpu")
PERIOD_US: Final = 20_000
"""A quota is at least 1,000 µs, and the smallest share is 0.09."""
RUN_S: Final = 900.0

Runs = Mapping[str, tuple[Planned, Sequence[float]]]
"""By the name of a plan: the plan, and the seconds of a step of each of its runs."""


@dataclass(frozen=True)
class Share:
    """A kind of device: the share of a core that one gives to generation and to training, its price, and their
    number."""

    generates: float
    trains: float
    price: float
    devices: int


KINDS: Final = {"large": Share(0.3, 0.6, 1.0, 2), "small": Share(0.3, 0.09, 0.35, 3)}


def spread(completion_ids: list[Any]) -> list[float]:
    """A reward that differs between responses of an untrained model."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


# ---------------------------------------------------------------- plans


def modes(profile: Profile) -> dict[str, Planned]:
    """Return plans of one engine that differ in mode, slots and micro-batch."""
    slots, lengths = SLOTS["modes"], draw_lengths(profile, STEPS)
    wanted = [(0, slots, 1), (0, slots, 4), (0, slots // 4, 1), (1, slots, 4), (1, slots // 4, 4)]
    one = [each for each in plans(profile) if each.instances[GENERATE] == 1 and each.instances[TRAIN] == 1]
    return {
        f"{each.mode}, {each.slots} slots, from {each.micro_rows} rows": predict(
            profile, each, bound_s(profile, each, lengths), lengths
        )
        for depth, slots, part in wanted
        for each in one
        if (each.depth, each.slots, each.micro_rows) == (depth, slots, profile.batch_rows // part)
    }


def money(profile: Profile) -> dict[str, Planned]:
    """Return the plan for the money, and the even splits."""
    chosen = plan(profile, "money")[0]
    return {f"planned ({words(chosen)})": chosen} | {f"even split ({words(each)})": each for each in even(profile)}


def kind_of(name: str, alone: Profile) -> DeviceKind:
    """Return a kind whose seconds are those of a whole core over its share."""
    share = KINDS[name]
    generation, train = alone.generation, alone.train
    token_ms = [(rows, ms / share.generates) for rows, ms in generation.token_ms]
    return DeviceKind(
        name=name,
        devices=share.devices,
        price=share.price,
        generation=msgspec.structs.replace(
            generation, devices=1, token_ms=token_ms, prompt_ms=generation.prompt_ms / share.generates
        ),
        train=msgspec.structs.replace(
            train,
            devices=1,
            instances_max=1,
            row_s=train.row_s / share.trains,
            call_s=train.call_s / share.trains,
            step_s=train.step_s / share.trains,
            update_s=train.update_s / share.trains,
        ),
    )


def with_kinds(alone: Profile) -> Profile:
    """Return the profile with both kinds of devices."""
    kinds = [kind_of(name, alone) for name in KINDS]
    return msgspec.structs.replace(alone, devices=0, kinds=kinds, depths=(1,))


def even(profile: Profile) -> list[Planned]:
    """Return the best plan of each even split: one kind, as many devices for generation as for training."""
    lengths, best = draw_lengths(profile), dict[str, Planned]()
    for candidate in plans(profile):
        instances = candidate.instances
        if candidate.generates_on == candidate.trains_on and instances[GENERATE] == instances[TRAIN]:
            found = predict(profile, candidate, bound_s(profile, candidate, lengths), lengths)
            before = best.get(candidate.trains_on)
            if before is None or found.cost < before.cost:
                best[candidate.trains_on] = found
    return [*best.values()]


def words(planned: Planned) -> str:
    """Name a plan of kinds."""
    chosen = planned.plan
    return f"{chosen.instances[GENERATE]} {chosen.generates_on} generate, 1 {chosen.trains_on} trains"


# ---------------------------------------------------------------- runs


@contextmanager
def limited(name: str, share: float) -> Iterator[Path]:
    """Make a control group of a share of a core; remove it with the block."""
    group = GROUPS / f"transferqueue-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
        yield group
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            (GROUPS / "cgroup.procs").write_text(left)
        group.rmdir()


def children(parent: int, stage: str) -> list[int]:
    """Return the process numbers of a job's stage."""
    found = []
    for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        command = Path(f"/proc/{number}/cmdline")
        if command.exists() and f'"name":"{stage}"' in command.read_text():
            found.append(int(number))
    return found


@contextmanager
def held(parent: subprocess.Popen[str], planned: Planned) -> Iterator[None]:
    """Hold the engines and the trainer of a job to the shares of their devices, as they start."""
    chosen = planned.plan
    shares = {"rollout": KINDS[chosen.generates_on].generates, "train": KINDS[chosen.trains_on].trains}
    counts = {"rollout": chosen.instances[GENERATE], "train": 1}
    with ExitStack() as groups:
        for stage, count in counts.items():
            while len(numbers := children(parent.pid, stage)) < count:
                if parent.poll() is not None:
                    raise SystemExit(f"the job ended before its stage {stage} began")
                time.sleep(0.05)
            for number in numbers:
                group = groups.enter_context(limited(f"{stage}-{number}", shares[stage]))
                (group / "cgroup.procs").write_text(str(number))
        yield


def measured_s(place: Path, planned: Planned, profile: Profile, name: str, steps: int) -> float:
    """Run the job as planned, its processes held to their shares if devices are of kinds; return the median seconds of
    a step."""
    command = [sys.executable, "-m", "transferqueue.cli", "train", "job.toml", "--out", name, "--no-page"]
    command += [f"--set={key}={value}" for key, value in (changes_of(profile, planned.plan) | {"steps": steps}).items()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with ExitStack() as opened:
        running = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)
        opened.callback(running.kill)
        if profile.kinds:
            opened.enter_context(held(running, planned))
        output, _ = running.communicate(timeout=RUN_S)
        if running.returncode:
            raise SystemExit(f"the job ended with {running.returncode}: {output[-1000:]}")
    return float(msgspec.json.decode((place / name / "summary.json").read_bytes())["step_s"])


# ---------------------------------------------------------------- results


def results(found: Runs, objective: str, rows: int) -> Iterator[MeasuredResult]:
    """Give predicted beside measured seconds of each plan, and what they are for."""
    for name, (planned, runs) in found.items():
        yield summarize(f"{name}: seconds of a step", "s", runs)
        yield single(f"{name}: predicted seconds", "s", planned.later_step_s)
        yield single(f"{name}: predicted over measured seconds", "ratio", round(planned.later_step_s / median(runs), 3))
    yield from worth(found, rows) if objective == "money" else order(found)


def worth(found: Runs, rows: int) -> Iterator[MeasuredResult]:
    """Give the samples for the money of each plan, and those of the planned one over each even split by turns."""
    worths = {name: [rows / each / planned.plan.price for each in runs] for name, (planned, runs) in found.items()}
    best = next(iter(found))
    for name, values in worths.items():
        yield summarize(f"{name}: samples a second and price", "1/s", values)
        if name != best:
            ratios = [ours / theirs for ours, theirs in zip(worths[best], values, strict=True)]
            yield summarize(f"planned over {name}", "ratio", ratios)


def order(found: Runs) -> Iterator[MeasuredResult]:
    """Give the share of pairs of plans in the predicted order, of those whose measured seconds differ by more than
    5 %."""
    steps = [(planned.later_step_s, median(runs)) for planned, runs in found.values()]
    pairs = [(a, b) for a, b in combinations(steps, 2) if abs(a[1] - b[1]) > 0.05 * max(a[1], b[1])]
    yield single("pairs of plans that differ", "count", len(pairs))
    yield single("pairs in the predicted order", "count", sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs))


def main() -> None:
    """Profile, plan, run by turns."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plans", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", choices=tuple(SLOTS))
    parser.add_argument("--runs", type=int, default=3, help="of each plan (default: 3)")
    parser.add_argument("--steps", type=int, help="of each run (default: 24, for money 16)")
    into_option(parser)
    options = parser.parse_args()
    if options.plans == "money" and not os.access(GROUPS / "cgroup.procs", os.W_OK):
        raise SystemExit(f"shares of a core need control groups of version 1 that may be written, at {GROUPS}")
    measurement, steps = Measurement(), options.steps or RUN_STEPS[options.plans]
    with tempfile.TemporaryDirectory(prefix="transferqueue-plans-") as folder:
        profile = profiled(Path(folder), options.plans)
        chosen = money(profile) if options.plans == "money" else modes(profile)
        runs: dict[str, list[float]] = {name: [] for name in chosen}
        for turn in range(options.runs):
            for at, name in enumerate(chosen if turn % 2 == 0 else reversed(chosen)):
                runs[name].append(measured_s(Path(folder), chosen[name], profile, f"run-{turn}-{at}", steps))
                print(f"{name}: {runs[name][-1]:.2f} s a step", flush=True)
    found = {name: (chosen[name], runs[name]) for name in chosen}
    lines = [*results(found, options.plans, profile.batch_rows)]
    show(lines)
    details = {"profile": without_lengths(profile)}
    save_record(measurement, options.into, "plans", lines, details, name=f"plans-{options.plans}")


def profiled(place: Path, objective: str) -> Profile:
    """Write model, data and job, and measure the job alone."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    make(place / "model", **SIZE)
    write_data(place / "data", train=512, test=16)
    (place / "job.toml").write_text(JOB.replace("PLACE", str(place)).replace("SLOTS", str(SLOTS[objective])))
    job = job_from_file(place / "job.toml")
    alone = profile_job(job, code=ROOT, trial_steps=TRIAL_STEPS, say=lambda line: print(line, flush=True))
    return with_kinds(alone) if objective == "money" else alone


def without_lengths(profile: Profile) -> dict[str, Any]:
    """Return the profile's values without its long list of lengths."""
    values: dict[str, Any] = msgspec.to_builtins(profile)
    for side in (values, *values["kinds"]):
        side["generation"].pop("lengths")
    return values


if __name__ == "__main__":
    main()
