"""Streaming steps against whole batches in whole jobs of `transferqueue train`, with a real engine:
``python -m bench.streaming_job``.

The job: GRPO of a Qwen3 of eleven million random weights. transformers generates in a process of its own; it and the
trainer have one thread each, as if each had its device. Responses end at one of some letters, so that their lengths
spread as a geometric distribution does. All four cases run in turns with the same prompts; figures are over the steps
after the first.

Expected, written before the first run: generating and training a batch take about as long, so a synchronous step of a
whole batch takes the sum and a streaming one the longer of the two and a tail: 1.3 to 1.7 times the samples a second
where both processes have a core of their own. In async mode both overlap already: about 1. On a machine with less than
two idle cores nothing can be gained, for then the cores and not the waits are what is short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from bench.run_record import into_option, save_record, show
from transferqueue.observe.measurement_record import Measurement, summarize

Mode = Literal["sync", "async"]
CASES: Final[tuple[tuple[Mode, bool], ...]] = (("sync", False), ("sync", True), ("async", False), ("async", True))
SIZE: Final = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
PROMPTS, GROUP, SLOTS, TOKENS = 16, 4, 16, 192
ROWS: Final = PROMPTS * GROUP
STOP: Final = ("a", "e", "i", "o", "u")

JOB: Final = f"""
name = "streaming"
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = 32 }}
engine = [{{ kind = "transformers", slots = {SLOTS} }}]
sampling = {{ group_size = {GROUP}, tokens_max = {TOKENS}, stop = {json.dumps(STOP)} }}
reward = [{{ function = "length_reward:short" }}]
algorithm = {{ kind = "grpo" }}
trainer = {{ prompts_per_step = {PROMPTS}, lr = 1e-6 }}
weights = {{ dtype = "float32" }}
checkpoint = {{ every = 0 }}
queue = {{ memory_gib = 0.25 }}
"""
REWARD: Final = """
def short(completion_ids):
    return [-len(ids) / 100 for ids in completion_ids]
"""


@dataclass(frozen=True)
class JobRun:
    """What one run showed. seconds and idle_s: of each step after the first."""

    seconds: list[float]
    idle_s: list[float]
    busy: dict[str, float]

    @property
    def idle(self) -> float:
        """The share of the time in which the trainer waited for rows."""
        return sum(self.idle_s) / sum(self.seconds)


def prepare(place: Path) -> None:
    """Write model, data, reward and job file."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    make(place / "model", **SIZE)
    write_data(place / "data", train=1024, test=16)
    (place / "job.toml").write_text(JOB)
    (place / "length_reward.py").write_text(REWARD)


def run(place: Path, name: str, mode: Mode, *, stream: bool, steps: int) -> JobRun:
    """Run the job whole; `SystemExit` with its last lines if it fails."""
    settings = {"pacing.mode": mode, "trainer.stream": "on" if stream else "off", "steps": steps}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "transferqueue.cli", "train", "job.toml", "--out", name, "--no-page", *words],
        cwd=place,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    lines = [json.loads(line) for line in (place / name / "steps.jsonl").read_text().splitlines()]
    seconds = [later["at"] - earlier["at"] for earlier, later in pairwise(lines)]
    summary = json.loads((place / name / "summary.json").read_text())
    return JobRun(seconds, [line["idle_s"] for line in lines[1:]], summary["busy"])


def measured(place: Path, runs: int, steps: int) -> dict[tuple[Mode, bool], list[JobRun]]:
    """Run all cases in turns."""
    found: dict[tuple[Mode, bool], list[JobRun]] = {case: [] for case in CASES}
    for number in range(runs):
        for mode, stream in CASES if number % 2 == 0 else CASES[::-1]:
            name = f"{mode}-{'streaming' if stream else 'whole'}-{number}"
            found[mode, stream].append(run(place, name, mode, stream=stream, steps=steps))
            last = found[mode, stream][-1]
            print(
                f"{name}: {ROWS / median(last.seconds):.1f} samples/s, idle {last.idle:.0%}, busy {last.busy}",
                flush=True,
            )
    return found


def results(found: dict[tuple[Mode, bool], list[JobRun]]) -> Iterator[Any]:
    """Give samples a second and idle share of each case, and the ratio of each mode by pairs of runs."""
    for (mode, stream), runs in found.items():
        name = f"{mode}, {'streaming' if stream else 'whole batch'}"
        yield summarize(f"{name}: samples a second", "1/s", [ROWS / time_s for run in runs for time_s in run.seconds])
        yield summarize(f"{name}: trainer idle", "ratio", [run.idle for run in runs])
    for mode in ("sync", "async"):
        pairs = zip(found[mode, False], found[mode, True], strict=True)  # type: ignore[index]
        ratios = [sum(whole.seconds) / sum(streamed.seconds) for whole, streamed in pairs]
        yield summarize(f"{mode}: streaming against whole batches", "ratio", ratios)


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.streaming_job", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each case (default: 3; one takes about a minute)")
    parser.add_argument("--steps", type=int, default=6, help="of each run (default: 6)")
    into_option(parser)
    chosen = parser.parse_args()
    measurement = Measurement()
    with tempfile.TemporaryDirectory(prefix="transferqueue-streaming-") as folder:
        prepare(Path(folder))
        lines = [*results(measured(Path(folder), chosen.runs, chosen.steps))]
    show(lines)
    details = {
        "size": SIZE,
        "prompts": PROMPTS,
        "group": GROUP,
        "slots": SLOTS,
        "tokens": TOKENS,
        "steps": chosen.steps,
    }
    save_record(measurement, chosen.into, "streaming-job", lines, details)


if __name__ == "__main__":
    main()
