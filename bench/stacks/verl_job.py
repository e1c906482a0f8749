"""A small job of verl: a tiny model, its questions, the command line, and what came of it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from bench.harness import ROOT
from bench.stacks import calls
from bench.stacks.calls import Recording
from transferqueue.workflows.adopt.trial.of_verl.job import ENVIRONMENT, on_cpu
from transferqueue.workflows.job.tiny_model.make import make, write_data

Package = Literal["ours", "original"]

HOOK: Final = "transferqueue.adapters.transfer_queue_hook"
PATCH: Final = ROOT / "examples" / "stacks" / "verl.patch"
TASK: Final = "sort"
REWARD: Final = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for a solution that is the answer, otherwise 0."""
    return float(solution_str.strip() == ground_truth)
'''


@dataclass(frozen=True, kw_only=True)
class VerlJob:
    """A training run of verl's V1 trainer.

    It is synchronous GRPO with a KL term to a reference model in the loss. steps: of training. prompts, samples: of one
    step. workers: training processes, each with a part of the model and a rollout server. seeded: a second run draws
    the same completions.
    """

    steps: int = 2
    prompts: int = 16
    samples: int = 4
    workers: int = 2
    seeded: bool = True
    warm_up_steps: int = 120
    limit_s: float = 900.0

    def worker_rows(self) -> int:
        """Rows of one step that one worker computes."""
        return self.prompts * self.samples // self.workers


@dataclass(frozen=True)
class Outcome:
    """What a run did. steps: verl's metrics of each step. log: its output."""

    package: Package
    exit_code: int
    steps: list[Mapping[str, float]]
    recordings: list[Recording]
    log: Path = field(repr=False)


def prepare(folder: Path, warm_up_steps: int) -> None:
    """Make model, questions and reward function in `folder`, unless they are there."""
    if (folder / "reward.py").exists():
        return
    make(folder / "model", task=TASK, steps=warm_up_steps)
    write_data(folder / "data", task=TASK, train=512, test=32)
    for split in ("train", "test"):
        rows = (folder / "data" / f"{split}.jsonl").read_text().splitlines()
        lines = [json.dumps(_prompt(number, json.loads(row))) for number, row in enumerate(rows)]
        (folder / f"{split}.json").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)


def _prompt(number: int, row: Mapping[str, str]) -> dict[str, Any]:
    """A row of data as verl reads it."""
    return {
        "data_source": TASK,
        "prompt": [{"role": "user", "content": row["question"]}],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": number},
    }


def run(job: VerlJob, package: Package, folder: Path, prepared: Path) -> Outcome:
    """Train with `package` as ``transfer_queue``; everything the run writes goes to `folder`.

    With our package it is a patched verl that runs (`PATCH`), and a setting that the patch adds names our package.
    """
    recorded, log, metrics = folder / "calls", folder / "log.txt", folder / "metrics.jsonl"
    recorded.mkdir(parents=True)
    paths, settings = [str(ROOT)], _settings(job, prepared)
    if package == "ours":
        paths.insert(0, str(patched_verl(folder)))
        settings.append(f"transfer_queue.implementation={HOOK}")
    with log.open("wb") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *settings],
            cwd=folder,
            env=_environment(paths, recorded, metrics),
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=job.limit_s,
            check=False,
        )
    return Outcome(package, ended.returncode, list(_steps(metrics)), calls.recordings(recorded), log)


def patched_verl(folder: Path) -> Path:
    """Copy the installed verl to `folder` and patch it; return the directory that it can be imported from."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    place = folder / "patched"
    shutil.copytree(Path(spec.origin).parent, place / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    command = ["git", "apply", "--unidiff-zero", str(PATCH)]
    subprocess.run(command, cwd=place, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder)}, check=True)
    return place


def _steps(metrics: Path) -> Iterator[Mapping[str, float]]:
    if metrics.exists():
        for line in metrics.read_text().splitlines():
            yield json.loads(line)["data"]


def _environment(paths: Sequence[str], recorded: Path, metrics: Path) -> dict[str, str]:
    """The environment of the driver; Ray's processes inherit it."""
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(paths),
        "VERL_USE_EXTERNAL_MODULES": "bench.stacks.verl_plugin",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "BENCH_STACKS_CALLS": str(recorded),
        "RAY_DEDUP_LOGS": "0",
    }


def _settings(job: VerlJob, prepared: Path) -> list[str]:
    """Settings of verl for a CPU and a tiny model."""
    actor, rollout, ref = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
    given: dict[str, Any] = {
        **on_cpu(job.workers),
        "trainer.v1.trainer_mode": "sync",
        "trainer.total_training_steps": job.steps,
        "trainer.total_epochs": 1,
        "trainer.logger": "[console,file]",
        "algorithm.adv_estimator": "grpo",
        "data.train_files": prepared / "train.json",
        "data.val_files": prepared / "test.json",
        "data.train_batch_size": job.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.seed": 1,
        "reward.custom_reward_function.path": prepared / "reward.py",
        "transfer_queue.backend.SimpleStorage.total_storage_size": 4096,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        f"{rollout}.n": job.samples,
        f"{rollout}.full_determinism": job.seeded,
        f"{rollout}.agent.num_workers": 2,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": job.worker_rows(),
        f"{actor}.ppo_mini_batch_size": job.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": job.worker_rows(),
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.use_kl_loss": True,
        f"{ref}.log_prob_micro_batch_size_per_gpu": job.worker_rows(),
        "actor_rollout_ref.model.path": prepared / "model",
    }
    return [f"++{name}={value}" for name, value in given.items()]
