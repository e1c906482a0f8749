"""Processor seconds before a job trains: refusals, a dry run, and a job of three steps.

    python -m bench.job_start --into bench/records
    python -m bench.job_start --engines builtin transformers vllm --runs 1

Each case is a command `transferqueue train` of its own. Counted is the processor time, user and system, of all its
processes, so the figures say little about the load of the machine. The model is the tiny one (140,000 parameters),
whose three steps of 16 rows take a part of a second to train: what is left is the start of the processes, their
imports, and the end of the run. One thread a process.

Wanted: 2 s for any refusal that needs no model, and 15 s for the three steps beside their training. Both bounds were
set when a wrong name of a reward took 12 s, and three steps 40 s beside 1.6 of training.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.harness import ROOT
from bench.measurement_record import MeasuredResult, Measurement, summarize
from bench.run_record import into_option, save_record, show

RUN_S: Final = 900.0
TASKS: Final = "transferqueue.workflows.job.tiny_model.tasks"
JOB: Final = f"""
name = "start"
steps = 3
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = 32 }}
engine = [{{ kind = "builtin" }}]
sampling = {{ group_size = 4, tokens_max = 8 }}
reward = [{{ function = "{TASKS}:exact" }}]
algorithm = {{ kind = "grpo" }}
trainer = {{ prompts_per_step = 4 }}
pacing = {{ mode = "sync" }}
queue = {{ memory_gib = 0.125 }}
"""
REFUSED: Final = {
    "a key that is not": ("trainer.lrr=1", "no such key"),
    "a value out of range": ("sampling.group_size=1", "all advantages are 0"),
    "no such model": ("model.path=./none", "no such directory"),
    "no such data": ("data.path=none.jsonl", "no such file"),
    "no such reward": (f"reward=[{{function='{TASKS}:exat'}}]", "has no exat"),
    "no such module": ("reward=[{function='no_rewards:exact'}]", "no module no_rewards"),
    "no such GPU": ("trainer.devices=[7]", "no GPU 7"),
    "longer than the model's positions": ("sampling.tokens_max=100", "has 64 positions"),
    "no such column": ("data.template='{none}'", "none"),
    "more than the queue's memory": ("queue.memory_gib=0.0001", "memory_gib"),
}
"""A change of the job that is refused, and words of the refusal. The last two need the data and the tokenizer."""


def prepare(place: Path) -> None:
    """Write model, data and job file."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    make(place / "model", kind="builtin", max_position_embeddings=64)
    write_data(place / "data", train=64, test=16)
    (place / "job.toml").write_text(JOB)


def processor_s(place: Path, words: list[str], *, refusal: str = "") -> float:
    """Run `transferqueue train` and return the processor seconds of its processes. `SystemExit` with its last lines if
    it fails, or is not refused with these words."""
    command = [sys.executable, "-m", "transferqueue.cli", "train", "job.toml", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = _of_children()
    done = subprocess.run(
        command, cwd=place, env=environment, check=False, capture_output=True, text=True, timeout=RUN_S
    )
    if done.returncode != (2 if refusal else 0) or refusal not in done.stderr:
        raise SystemExit(f"{words} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return _of_children() - before


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def results(place: Path, engines: list[str], runs: int) -> Iterator[MeasuredResult]:
    """Measure each case."""
    for name, (change, words) in REFUSED.items():
        seconds = [processor_s(place, ["--set", change], refusal=words) for _ in range(runs)]
        yield _measured(f"refused, {name}", seconds)
    yield _measured("dry run", [processor_s(place, ["--dry-run"]) for _ in range(runs)])
    for engine in engines:
        taken, trained = [], []
        for run in range(runs):
            out = f"{engine}-{run}"
            taken.append(processor_s(place, ["--set", f"engine.0.kind={engine}", "--out", out, "--no-page"]))
            steps = [json.loads(line) for line in (place / out / "steps.jsonl").read_text().splitlines()]
            trained.append(sum(step["passes_s"] + step["update_s"] for step in steps))
        yield _measured(f"three steps, {engine}", taken)
        yield _measured(f"three steps, {engine}: passes and updates, by the clock", trained)


def _measured(name: str, seconds: list[float]) -> MeasuredResult:
    print(f"{name}: {', '.join(f'{each:.2f}' for each in seconds)} s", flush=True)
    return summarize(name, "s", seconds)


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.job_start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="*", default=["builtin", "transformers"], help="of the three steps")
    parser.add_argument("--runs", type=int, default=3, help="of each case (default: 3)")
    into_option(parser)
    chosen = parser.parse_args()
    measurement = Measurement()
    with tempfile.TemporaryDirectory(prefix="transferqueue-start-") as folder:
        prepare(Path(folder))
        lines = list(results(Path(folder), chosen.engines, chosen.runs))
    show(lines)
    save_record(measurement, chosen.into, "job-start", lines, {"engines": chosen.engines})


if __name__ == "__main__":
    main()
