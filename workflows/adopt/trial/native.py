"""Our side of a trial: the job that adopt wrote, through the queue, with an engine that gives recorded responses.

What differs from the job: the data are the rows that the stack drew, in its order; one engine, which draws nothing; one
rank; float32; ``pacing.mode = "sync"`` whatever the job has, so that each step trains the rows of the stack's step and
no others; rows are recorded; no evaluation, checkpoint or logger, and so not ``reproducible``; nothing of `weights` and
`dispatch`, which serve the engines. The run ends with these rows, so its learning rate is set to that of the first step
of the whole schedule; the second one's changes no loss that is compared.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from transferqueue.adapters.protocols import Completion, Completions, Pause, Prompt, Sampling, WeightSource
from transferqueue.adapters.stages.generation import row_seed
from transferqueue.errors import UsageError
from transferqueue.storage.row_files.reader import open_run
from transferqueue.workflows.adopt.trial.compare import FIGURES, SideStep
from transferqueue.workflows.adopt.trial.side import Send, run_side
from transferqueue.workflows.job import names
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.run_files import STEPS, json_lines
from transferqueue.workflows.job.settings.defaults import columns_of
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import job_from_file, job_from_values
from transferqueue.workflows.job.settings.write import job_as_toml
from transferqueue.workflows.job.training.learner import rate_share

MODULE: Final = __name__
_NATIVE: Final = {"kl": "ref_kl"}
"""Our names of figures that have another one in `compare.FIGURES`."""
_NOT_TRIED: Final = ("evaluation", "on", "ray", "log", "elastic", "dispatch", "weights", "reproducible")
_ROWS: Final = "rows.jsonl"
_RESPONSES: Final = "responses.json"


class RecordedResponses(msgspec.Struct, frozen=True):
    """The responses that `replay_engine` gives. seed: of the job. tokens: of each row, by its ordinal."""

    seed: int
    tokens: list[list[int]]


def scheduled_lr(job: Job, step: int) -> float:
    """Return the learning rate of a step, from 1, of the whole run."""
    share = rate_share(step - 1, steps=job.steps, warmup=job.trainer.warmup, schedule=job.trainer.schedule)
    return job.trainer.lr * share


def trial_job(values: Mapping[str, Any], job: Job, folder: Path, steps: int) -> Job:
    """Return the job of a trial, whose files are in `folder`. values, job: of the job file.

    Raises:
        UsageError: the job reads what recorded rows do not have, or a rule of jobs refuses its trial.
    """
    algorithm = job.algorithm
    given = {f'old="{algorithm.old}"': algorithm.old != "trainer", f"tis_max={algorithm.tis_max}": algorithm.tis_max}
    given['kl_in="reward"'] = "rollout_logprobs" in columns_of(algorithm).get(names.ADVANTAGE, ())
    if read_by := next((key for key, reads in given.items() if reads), ""):
        raise UsageError(
            f"--try: algorithm.{read_by} reads the log-probs of the engine, which recorded rows do not have; a trial "
            'takes old="trainer", tis_max=0 and kl_in="loss"'
        )
    values = {name: value for name, value in copy.deepcopy(dict(values)).items() if name not in _NOT_TRIED}
    for key in ("sources", "subset", "split"):
        values["data"].pop(key, None)
    values["data"] |= {"path": str(folder / _ROWS), "shuffle": False, "epochs": 1}
    values["model"]["dtype"] = "float32"
    first = {"lr": scheduled_lr(job, 1), "schedule": "constant", "warmup": 0}
    values["trainer"] = {**values.get("trainer", {}), "ranks": 1, "parallel": "single", **first}
    values["queue"] = {**values.get("queue", {}), "record": "on", "durability": "memory", "address": ""}
    options = {"responses": str(folder / _RESPONSES)}
    values["engine"] = [{"kind": "factory", "factory": f"{MODULE}:replay_engine", "options": options}]
    values |= {"steps": steps, "pacing": {"mode": "sync"}, "checkpoint": {"every": 0}}
    return job_from_values(values, named="trial")


def write_trial(trial: Job, folder: Path, steps: Sequence[SideStep]) -> Path:
    """Write the job of a trial, its data and its responses to `folder`. Returns the job file. steps: the stack's."""
    rows = [row for step in steps for row in step.data]
    (folder / _ROWS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    responses = RecordedResponses(trial.seed, [ids for step in steps for ids in step.completions])
    (folder / _RESPONSES).write_bytes(msgspec.json.encode(responses))
    file = folder / "job.toml"
    file.write_text(job_as_toml(replace(trial, steps=len(steps))), encoding="utf-8")
    return file


def run(words: list[str], send: Send) -> None:
    """Run the job to the end of its rows, and send its steps. words: the job file, the folder of its run, the one whose
    modules rewards may name, and ``cpu`` to hide GPUs."""
    file, folder, code, devices = words
    if devices == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    job = job_from_file(file)
    run_job(job, folder=RunFolder(Path(folder)), code=Path(code))
    for step in recorded_steps(Path(folder), job):
        send(step)


def recorded_steps(folder: Path, job: Job) -> list[SideStep]:
    """Return the steps of a run that recorded its rows."""
    columns = ["prompt_ids", "response_ids", "advantages", "finish_reason", "_step"]
    rows = open_run(folder).table(names.TABLE).arrow(columns).to_pylist()
    steps = []
    for line in json_lines(folder / STEPS):
        own = [row for row in rows if row["_step"] == line["step"]]
        counted = [row for row in own if not (job.algorithm.mask_truncated and row["finish_reason"] == "length")]
        figures = {name: line.get(_NATIVE.get(name, name)) for name in FIGURES}
        steps.append(
            SideStep(
                step=line["step"],
                figures={name: value for name, value in figures.items() if value is not None},
                prompts=[row["prompt_ids"] for row in own],
                rows=[(row["response_ids"], row["advantages"]) for row in counted],
            )
        )
    return steps


# ---------------------------------------------------------------- the engine


def replay_engine(directory: str, *, slots: int, responses: str) -> ReplayedResponses:
    """Factory of the engine. responses: file with `RecordedResponses`."""
    return ReplayedResponses(msgspec.json.decode(Path(responses).read_bytes(), type=RecordedResponses))


class ReplayedResponses:
    """A generator that gives each row the response that was recorded for its ordinal, which its seed tells.

    The log-probs are 0: `trial_job` refuses what would read them, and no figure of `compare.FIGURES` does.
    """

    def __init__(self, recorded: RecordedResponses) -> None:
        self._tokens = {row_seed(recorded.seed, place): ids for place, ids in enumerate(recorded.tokens)}
        self.version = -1

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = 0.0) -> Completions:
        """See `Generator`."""
        for place, prompt in enumerate(prompts):
            if (ids := self._tokens.get(prompt.seed if prompt.seed is not None else -1)) is None:
                raise UsageError("a row beyond those that the stack trained; its group has another size here")
            yield Completion(
                prompt=place,
                sample=0,
                ids=np.asarray(ids, np.int32),
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason="stop" if ids[-1] in sampling.stop_ids else "length",
                spans=((self.version, len(ids)),),
            )

    def pause(self, mode: Pause, *, timeout_s: float = 0.0) -> None:
        """See `Generator`: nothing runs."""

    def resume(self) -> None:
        """See `Generator`."""

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = 0.0) -> None:
        """Count the version; the responses are those of the stack's weights."""
        self.version = version

    def close(self) -> None:
        """See `Generator`."""


if __name__ == "__main__":
    run_side(run)
