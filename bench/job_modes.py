"""The modes of a job beside a plain loop without a queue, by turns: ``python -m bench.job_modes --engine vllm``.

GRPO of a Qwen3 with random weights. All cases have the same engine, model,
data, optimizer and rows a step, and run one after the other, in the other direction each second time; figures are over
the steps after the first. Threads are those that each case has by itself: the loop all cores, a job as its mode divides
them. On a machine that does other work too, set ``OMP_NUM_THREADS=1``: threads that wait for each other say nothing. A
plain loop knows nothing of checkpoints, deaths or other machines, so its speed is what a job is to keep.

Expected, written before the first run: colocated at least 0.95 of the plain loop, sync at least 1.0, async more where
generation and training take about as long. On a machine with less than two idle cores async and streaming gain nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.harness import ROOT
from bench.run_record import into_option, save_record, show
from transferqueue.observe.measurement_record import MeasuredResult, Measurement, summarize

PLAIN: Final = "plain loop"
CASES: Final[Mapping[str, Mapping[str, str]]] = {
    PLAIN: {},
    "colocated": {"pacing.mode": "colocated"},
    "sync, whole batches": {"pacing.mode": "sync", "trainer.stream": "off"},
    "sync": {"pacing.mode": "sync"},
    "delayed": {"pacing.mode": "delayed"},
    "async": {"pacing.mode": "async"},
}
PROMPTS, GROUP = 8, 8
ROWS: Final = PROMPTS * GROUP
RUN_S: Final = 900.0


@dataclass(frozen=True)
class Size:
    """A model, and the longest response of its task."""

    tokens: int
    model: Mapping[str, int]


SIZES: Final = {
    "tiny": Size(24, {}),
    "small": Size(64, {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 5}),
}
"""About 140,000 and 9 million parameters."""

JOB: Final = """
name = "modes"
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = 40 }}
engine = [{{ kind = "{engine}", slots = {rows}, options = {options} }}]
sampling = {{ group_size = {group}, tokens_max = {tokens} }}
reward = [{{ function = "length_reward:short" }}]
algorithm = {{ kind = "grpo" }}
trainer = {{ prompts_per_step = {prompts}, lr = 1e-4 }}
weights = {{ dtype = "float32" }}
checkpoint = {{ every = 0 }}
log = {{ samples = 0 }}
queue = {{ memory_gib = 0.25 }}
"""
REWARD: Final = """
def short(completion_ids, **columns):
    return [-len(set(ids)) / 100 for ids in completion_ids]
"""


@dataclass(frozen=True)
class CaseRun:
    """One run. seconds: of each step after the first. whole_s: from the start of its command to its end."""

    seconds: Sequence[float]
    whole_s: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return ROWS / median(self.seconds)


def prepare(place: Path, engine: str, size: Size) -> None:
    """Write model, data, reward and job file."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    make(place / "model", tie_word_embeddings=False, **size.model)
    write_data(place / "data", train=2048, test=16)
    options = f"{{ max_model_len = {size.tokens + 64} }}" if engine == "vllm" else "{}"
    terms = {"engine": engine, "rows": ROWS, "options": options, "prompts": PROMPTS, "group": GROUP}
    (place / "job.toml").write_text(JOB.format(tokens=size.tokens, **terms))
    (place / "length_reward.py").write_text(REWARD)


def run(place: Path, case: str, name: str, chosen: argparse.Namespace) -> CaseRun:
    """Run one case whole. `SystemExit` with its last lines if it fails."""
    if case == PLAIN:
        shape = {"engine": chosen.engine, "steps": chosen.steps, "prompts": PROMPTS, "group": GROUP}
        words = ["bench.plain_loop", "."]
        words += [f"--{key}={value}" for key, value in (shape | {"tokens": SIZES[chosen.size].tokens}).items()]
    else:
        words = ["transferqueue.cli", "train", "job.toml", "--out", name, "--no-page", f"--set=steps={chosen.steps}"]
        words += [f"--set={key}={value}" for key, value in CASES[case].items()]
    began = time.monotonic()
    done = _command(place, words)
    steps = done.stdout if case == PLAIN else (place / name / "steps.jsonl").read_text()
    at = [json.loads(line)["at"] for line in steps.splitlines() if line.startswith('{"')]
    return CaseRun([later - earlier for earlier, later in pairwise(at)], time.monotonic() - began)


def _command(place: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # as a job's engine has them
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=place,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return done


def measured(place: Path, chosen: argparse.Namespace) -> dict[str, list[CaseRun]]:
    """Run all cases in turns."""
    found: dict[str, list[CaseRun]] = {case: [] for case in chosen.cases}
    for number in range(chosen.runs):
        for case in chosen.cases if number % 2 == 0 else chosen.cases[::-1]:
            last = run(place, case, f"{case.replace(', ', '-').replace(' ', '-')}-{number}", chosen)
            found[case].append(last)
            print(f"{case} {number}: {last.rate:.1f} samples/s, {last.whole_s:.0f} s in all", flush=True)
    return found


def results(found: Mapping[str, Sequence[CaseRun]]) -> Iterator[MeasuredResult]:
    """Give samples a second of each case, and their ratios to the plain loop's by turns."""
    for case, runs in found.items():
        yield summarize(f"{case}: samples a second", "1/s", [run.rate for run in runs])
        yield summarize(f"{case}: whole run", "s", [run.whole_s for run in runs])
    for case, runs in found.items():
        if case != PLAIN and PLAIN in found:
            ratios = [run.rate / plain.rate for run, plain in zip(runs, found[PLAIN], strict=True)]
            yield summarize(f"{case}: over the plain loop", "ratio", ratios)


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.job_modes", description=__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--runs", type=int, default=3, help="of each case (default: 3; one takes about a minute)")
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all")
    into_option(parser)
    chosen = parser.parse_args()
    measurement = Measurement()
    with tempfile.TemporaryDirectory(prefix="transferqueue-modes-") as folder:
        prepare(Path(folder), chosen.engine, SIZES[chosen.size])
        lines = [*results(measured(Path(folder), chosen))]
    show(lines)
    details: dict[str, Any] = {"engine": chosen.engine, "size": chosen.size, "rows": ROWS, "steps": chosen.steps}
    details["threads"] = os.environ.get("OMP_NUM_THREADS", "by the mode")
    name = f"job-modes-{chosen.engine}-{chosen.size}"
    save_record(measurement, chosen.into, "job-modes", lines, details, name=name)


if __name__ == "__main__":
    main()
