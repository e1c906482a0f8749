"""Devices of two kinds with prices: the plan for the money beside even splits, live: ``python -m bench.prices``.

A device is a share of a core that the kernel holds a process to (a control group with a quota), so this needs root, and
two idle cores. *small* devices cost about a third of *large* ones, generate as fast and train at a seventh of the
speed, as devices with as much memory bandwidth and little arithmetic do (the two kinds of StreamRL's second site).

`transferqueue profile` measures the job alone on a whole core; a kind's seconds are those over its share. The planner
chooses for the money (``objective="money"``). The even split takes half of the devices of a kind for each side. Each
plan runs as a job whose engines and trainer are held to their shares, by turns; the figure is samples for the money.

Expected, written before the first run: at least 1.2 times the samples for the money of the best even split, predicted
within 10 %. About a minute a run.
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
from pathlib import Path
from statistics import median
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import msgspec

from bench.harness import ROOT
from bench.planned import SIZE
from bench.run_record import into_option, save_record, show
from transferqueue.observe.measurement_record import MeasuredResult, Measurement, single, summarize
from transferqueue.workflows.job.profiling.job import profile_job
from transferqueue.workflows.job.settings.plan_file import changes_of
from transferqueue.workflows.job.settings.read import job_from_file
from transferqueue.workflows.planner.job_plan import Planned, bound_s, draw_lengths, plan, plans, predict
from transferqueue.workflows.planner.profile import DeviceKind, Profile
from transferqueue.workflows.planner.simulated_job import GENERATE, TRAIN

GROUPS: Final = Path("/sys/fs/cgroup/cpu")
PERIOD_US: Final = 10_000
RUN_S: Final = 900.0


@dataclass(frozen=True)
class Share:
    """A kind of device: the share of a core that one gives to generation and to training, its price, and their
    number."""

    generates: float
    trains: float
    price: float
    devices: int


KINDS: Final = {"large": Share(0.3, 0.6, 1.0, 2), "small": Share(0.3, 0.09, 0.35, 3)}
JOB: Final = """
name = "prices"
model = { path = "PLACE/model", dtype = "float32" }
data = { path = "PLACE/data", template = "{question}", prompt_tokens_max = 32 }
engine = [{ kind = "transformers", slots = 16 }]
sampling = { group_size = 4, tokens_max = 64 }
reward = [{ function = "bench.elastic:spread" }]
algorithm = { kind = "grpo" }
trainer = { prompts_per_step = 16, lr = 1e-6 }
weights = { dtype = "float32" }
checkpoint = { every = 0 }
log = { samples = 0 }
queue = { memory_gib = 0.25 }
"""


# ---------------------------------------------------------------- profile and plans


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
    """Name a plan."""
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


def measured_s(place: Path, planned: Planned, profile: Profile, name: str, steps: int) -> float:
    """Run the job as planned, its processes held to their shares; return the median seconds of a step."""
    chosen = planned.plan
    changes = changes_of(profile, chosen) | {"steps": steps}
    command = [sys.executable, "-m", "transferqueue.cli", "train", "job.toml", "--out", name, "--no-page"]
    command += [f"--set={key}={value}" for key, value in changes.items()]
    shares = {"rollout": KINDS[chosen.generates_on].generates, "train": KINDS[chosen.trains_on].trains}
    counts = {"rollout": chosen.instances[GENERATE], "train": 1}
    with ExitStack() as groups:
        running = subprocess.Popen(
            command, cwd=place, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
        )
        groups.callback(running.kill)
        for stage, count in counts.items():
            while len(numbers := children(running.pid, stage)) < count:
                if running.poll() is not None:
                    raise SystemExit(f"the job ended before its stage {stage} began")
                time.sleep(0.05)
            for number in numbers:
                group = groups.enter_context(limited(f"{stage}-{number}", shares[stage]))
                (group / "cgroup.procs").write_text(str(number))
        output, _ = running.communicate(timeout=RUN_S)
        if running.returncode:
            raise SystemExit(f"the job ended with {running.returncode}: {output[-1000:]}")
    return float(msgspec.json.decode((place / name / "summary.json").read_bytes())["step_s"])


def results(found: Mapping[str, tuple[Planned, Sequence[float]]], rows: int, best: str) -> Iterator[MeasuredResult]:
    """Give the samples for the money of each plan, and those of the planned one over each even split by turns."""
    worth = {name: [rows / seconds / planned.plan.price for seconds in runs] for name, (planned, runs) in found.items()}
    for name, (planned, runs) in found.items():
        yield summarize(f"{name}: samples a second and price", "1/s", worth[name])
        yield single(f"{name}: predicted over measured seconds", "ratio", round(planned.later_step_s / median(runs), 3))
        if name != best:
            ratios = [ours / theirs for ours, theirs in zip(worth[best], worth[name], strict=True)]
            yield summarize(f"planned over {name}", "ratio", ratios)


def main() -> None:
    """Profile, plan, run by turns."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.prices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each plan (default: 3)")
    parser.add_argument("--steps", type=int, default=16, help="of each run (default: 16)")
    into_option(parser)
    options = parser.parse_args()
    if not os.access(GROUPS / "cgroup.procs", os.W_OK):
        raise SystemExit(f"shares of a core need control groups of version 1 that may be written, at {GROUPS}")
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    measurement = Measurement()
    with tempfile.TemporaryDirectory(prefix="transferqueue-prices-") as folder:
        place = Path(folder)
        make(place / "model", **SIZE)
        write_data(place / "data", train=512, test=16)
        (place / "job.toml").write_text(JOB.replace("PLACE", str(place)))
        alone = profile_job(job_from_file(place / "job.toml"), code=ROOT, say=lambda line: print(line, flush=True))
        profile = with_kinds(alone)
        planned = plan(profile, "money")
        chosen = {f"planned ({words(planned[0])})": planned[0]}
        chosen |= {f"even split ({words(each)})": each for each in even(profile)}
        runs: dict[str, list[float]] = {name: [] for name in chosen}
        for turn in range(options.runs):
            for at, name in enumerate(chosen if turn % 2 == 0 else reversed(chosen)):
                seconds = measured_s(place, chosen[name], profile, f"run-{turn}-{at}", options.steps)
                runs[name].append(seconds)
                print(f"{name}: {seconds:.2f} s a step", flush=True)
        best = next(iter(chosen))
        lines = [*results({name: (chosen[name], runs[name]) for name in chosen}, profile.batch_rows, best)]
    show(lines)
    details: dict[str, Any] = {"kinds": {name: msgspec.to_builtins(share) for name, share in KINDS.items()}}
    save_record(measurement, options.into, "prices", lines, details)


if __name__ == "__main__":
    main()
