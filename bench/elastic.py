"""A live job whose responses become longer for its middle part: ``python -m bench.elastic [--on ray]``.

The job is real: its source, the transformers engine with a tiny model, rewards, advantages, the trainer, weights, and
the controller of `workflows.elastic`. Two things are paced, since two cores cannot stand for accelerators: a response
comes no sooner than its tokens times `TOKEN_S`, and a trained row takes `ROW_S` more. Limits are `SHORT` tokens, and
`LONG` in the middle part. Expected: δ passes the bound a few steps into the middle part, a generator is added, the step
time falls to that of training or nearly, and after the part the generator is removed.

Needs transformers; with ``--on ray`` Ray too. About two minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import msgspec

import transferqueue as tq
from bench.harness import ROOT
from bench.run_record import RECORDS, save_record
from transferqueue.adapters.protocols import Completions, Generator, Prompt, Sampling
from transferqueue.observe.measurement_record import Measurement
from transferqueue.wire.answers.stats import TableAudit
from transferqueue.workflows.elastic.scaler import ELASTIC
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import create_table, stage_jobs
from transferqueue.workflows.job.run.elastic import scaler_of
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.settings.sizes import batch_rows

SHORT: Final = 8
LONG: Final = 32
TOKEN_S: Final = 0.02
ROW_S: Final = 0.03
STEPS: Final = 60
PROMPTS, GROUP, SLOTS = 8, 4, 8


def is_long(step: int, steps: int) -> bool:
    """Whether the rows of a step (from 0) may be long."""
    return steps // 4 <= step < steps * 2 // 3


def job_in(folder: Path, steps: int) -> Job:
    """Write model and data into `folder` and return the job."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    make(folder / "model")
    write_data(folder / "data", train=512, test=16)
    return job_from_values(
        {
            "steps": steps,
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "data": {"path": str(folder / "data"), "template": "{question}", "prompt_tokens_max": 32},
            "engine": [{"kind": "transformers", "slots": SLOTS}],
            "reward": [{"function": "bench.elastic:spread"}],
            "sampling": {"group_size": GROUP, "tokens_max": LONG},
            "algorithm": {"kind": "grpo"},
            "trainer": {"prompts_per_step": PROMPTS, "lr": 1e-5},
            "elastic": {"max": 2, "threshold": 0.5},
            "weights": {"dtype": "float32"},
            "checkpoint": {"every": 0},
            "log": {"samples": 0},
        }
    )


def spread(completion_ids: list[Any]) -> list[float]:
    """A reward that differs between responses of an untrained model."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


class PacedGenerator:
    """An engine whose responses come no sooner than `TOKEN_S` a token after they were asked for."""

    def __init__(self, engine: Generator) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompts: list[Prompt], sampling: Sampling, *, timeout_s: float = 600.0) -> Completions:
        """Yield each completion when its time has come."""
        started = time.monotonic()
        for completion in self._engine.generate(prompts, sampling, timeout_s=timeout_s):
            time.sleep(max(0.0, started + len(completion.ids) * TOKEN_S - time.monotonic()))
            yield completion


@contextmanager
def rollout(context: Context) -> Iterator[Work]:
    """The factory ``rollout`` of a job, paced, with limits that change."""
    from transferqueue.workflows.job.stages.drain import drainable
    from transferqueue.workflows.job.stages.rollout import EngineRollout, generating

    job = context.settings(Job)
    with generating(context, job) as (engine, weights, sampling, _):
        paced: Any = PacedGenerator(engine)
        works = {
            limit: EngineRollout(paced, weights, replace(sampling, tokens_max=limit, stop_ids=()), job, slots=SLOTS)
            for limit in (SHORT, LONG)
        }

        def work(batch: tq.Batch) -> Any:
            step = int(batch.ordinal.min()) // batch_rows(job)
            return works[LONG if is_long(step, job.steps) else SHORT](batch)

        with drainable(work, engine, context.drain) as handed:
            yield handed


@contextmanager
def train(context: Context) -> Iterator[Callable[[], None]]:
    """The factory ``train`` of a job, whose rows take longer."""
    from transferqueue.workflows.job.training import passes, process

    compute = passes.Passes.compute

    def paced(self: Any, columns: Any, ids: list[int]) -> None:
        compute(self, columns, ids)
        time.sleep(ROW_S * len(ids))

    passes.Passes.compute = paced  # type: ignore[method-assign]
    with process.train(context) as loop:
        yield loop


def paced_jobs(job: Job, folder: Path) -> list[StageJob]:
    """The processes of the job, two of their factories replaced."""
    here = {names.ROLLOUT: "bench.elastic:rollout", names.TRAIN: "bench.elastic:train"}
    return [
        msgspec.structs.replace(each, factory=here.get(each.name, each.factory)) for each in stage_jobs(job, folder)
    ]


def run_on(where: str, job: Job, folder: Path, hear: Callable[[str, Event], None]) -> TableAudit:
    """Run the job and return the audit of its table."""
    with ExitStack() as stack:
        address = "embedded"
        if where == "ray":
            address = stack.enter_context(_on_ray())
        queue = stack.enter_context(tq.connect(address, label="supervisor"))
        table, processes = create_table(queue, job), paced_jobs(job, folder)
        scaler = scaler_of(job, processes, hear)
        if scaler is None:
            raise SystemExit("the job is not elastic")
        flow: Any
        if where == "ray":
            from transferqueue.workflows.flow.on_ray import RayFlow

            anywhere = {
                "num_cpus": 0.1,
                "runtime_env": {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}},
            }
            options = {each.name: anywhere for each in processes}
            flow = stack.enter_context(RayFlow(address, processes, observe=scaler, options=options))
        else:
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}
            flow = stack.enter_context(
                Flow(queue, processes, directory=folder / "logs", observe=scaler, environment=environment)
            )
        with scaler.running(flow, table, names.ROLLOUT):
            flow.run()
        return table.audit()


@contextmanager
def _on_ray() -> Iterator[str]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with tq.deploy_ray() as deployment:
            yield deployment.address
    finally:
        ray.shutdown()


def main() -> None:
    """Run the job, and say what the controller did and what it gained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=["processes", "ray"], default="processes")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RECORDS)
    chosen = parser.parse_args()
    events: list[dict[str, Any]] = []
    steps: list[float] = []
    failures: list[str] = []

    def hear(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == "step":
            steps.append(event.at)
        elif isinstance(event, Figures) and event.kind == ELASTIC:
            events.append(event.values)
            print(json.dumps(event.values), flush=True)
        elif isinstance(event, Figures) and event.kind in ("added", "removed"):
            print(label, event.kind, event.values.get("how", ""), event.values.get("seconds", ""), flush=True)
        elif not isinstance(event, Figures) and hasattr(event, "text"):
            failures.append(event.text)

    measurement = Measurement()
    with tempfile.TemporaryDirectory() as folder:
        audit = run_on(chosen.on, job_in(Path(folder), chosen.steps), Path(folder), hear)
    found = phases(events, chosen.steps)
    for name, seconds in found.items():
        print(f"{name}: {seconds:.2f} s a step")
    print(f"rows put {audit.rows_put}, done {audit.rows_done}, dropped {audit.dropped}; failures {len(failures)}")
    details = {
        "on": chosen.on,
        "changes": [each for each in events if each["by"]],
        "deltas": deltas(events),
        "median_step_s": found,
        "failures": len(failures),
    }
    save_record(measurement, chosen.out, "elastic", [], details, name=f"elastic-{chosen.on}")


def deltas(events: list[dict[str, Any]]) -> list[list[float]]:
    """Step, generators and δ of each measured step."""
    return [[each["step"], each["generators"], round(each["delta_s"], 2)] for each in events if not each["by"]]


def phases(events: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Median seconds of a measured step, by limits and number of generators."""
    by_phase: dict[str, list[float]] = {}
    for event in events:
        if not event["by"]:
            limits = "long" if is_long(event["step"] - 1, steps) else "short"
            name = f"{limits} limits, {event['generators']} generator(s)"
            by_phase.setdefault(name, []).append(event["seconds"])
    return {name: round(median(seconds), 3) for name, seconds in by_phase.items()}


if __name__ == "__main__":
    main()
