"""The dry run: the steps of a job, without a server or a process. Two prompts as text and tokens, each reward on a
dummy row, tasks, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.workflows.flow.stage import Stage
from transferqueue.workflows.job.data.sequence import PromptSequence
from transferqueue.workflows.job.devices.placement import FoundDevice
from transferqueue.workflows.job.graph import pacing, stage_jobs, stages
from transferqueue.workflows.job.reward_terms.trials import RewardTrial, try_rewards
from transferqueue.workflows.job.run.machine import thread_line
from transferqueue.workflows.job.run.on_ray import node_lines
from transferqueue.workflows.job.run.preflight import JobBytes, bytes_of, counted_models, placement_of, preflight
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import batch_rows, gib, rows_kept
from transferqueue.workflows.job.settings.write import job_as_toml

PROMPTS: Final = 2
_IDS_SHOWN: Final = 24


class ShownPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt: its text after the chat template, its ids, and those of the response that is learned (sft; else
    empty)."""

    text: str
    ids: list[int]
    response_ids: list[int]


class ShownTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the table: its columns, the rows of one call, and the number of its processes."""

    name: str
    needs: list[str]
    gives: list[str]
    amount: str
    processes: int


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The dry run's result. job: the resolved file. rows_ahead, rows_kept: most live rows, before the trainer and in
    all. Bytes are upper bounds. devices: the processes with a model on each GPU, and their bytes, a line for each; a
    line for each model whose parameters are an estimate; on Ray a line for each node, elsewhere one with the threads of
    the processes."""

    job: str
    prompts: list[ShownPrompt]
    rewards: list[RewardTrial]
    tasks: list[ShownTask]
    processes: dict[str, int]
    batch_rows: int
    rows_ahead: int
    rows_kept: int
    row_bytes: int
    row_bytes_total: int
    weight_bytes: int
    memory_bytes: int
    devices: list[str]

    def text(self) -> str:
        """Return it for people."""
        lines = [self.job.rstrip()]
        for number, prompt in enumerate(self.prompts):
            lines += ["", f"# prompt {number}: {len(prompt.ids)} tokens: {_shown(prompt.ids)}", prompt.text.rstrip()]
            if prompt.response_ids:
                lines.append(f"# response: {len(prompt.response_ids)} tokens: {_shown(prompt.response_ids)}")
        lines += [f"# reward {trial.name}: {trial.text()}" for trial in self.rewards]
        lines += ["", "# tasks"]
        for task in self.tasks:
            lines.append(
                f"{task.name}: {', '.join(task.needs)} -> {', '.join(task.gives) or 'weights'}; {task.amount} a call"
            )
        processes = ", ".join(f"{name} × {count}" if count > 1 else name for name, count in self.processes.items())
        lines += ["", f"# processes ({sum(self.processes.values())}, and the server): {processes}"]
        lines.append(
            f"# rows: {self.batch_rows:,} a step, up to {self.rows_ahead:,} ahead, up to {self.rows_kept:,} kept for a "
            "checkpoint"
        )
        lines.append(
            f"# bytes: up to {self.row_bytes:,} a row, {gib(self.row_bytes_total)} of rows, {gib(self.weight_bytes)} "
            f"of weights; memory {gib(self.memory_bytes)}"
        )
        lines += [f"# {line}" for line in self.devices]
        return "\n".join(lines) + "\n"


def dry_run(job: Job, *, code: Path | None = None, devices: Sequence[FoundDevice] | None = None) -> DryRun:
    """Check `job` with its files, call its rewards and environments with dummy responses, and return its tasks and
    bytes.

    devices: as of `placement_of`. Raises as `placement_of`, `preflight` and `try_rewards` do. Starts nothing that
    goes on, and writes nothing.
    """
    placement = placement_of(job, devices=devices)
    data = preflight(job, code=code)
    sequence = PromptSequence(data, job.data, seed=job.seed, tokens_max=job.sampling.tokens_max)
    prompts = sequence.take(PROMPTS)
    others = sequence.take_one_of_each(besides={prompt.environment for prompt in prompts})
    held: JobBytes = bytes_of(job, data)
    processes = Counter(process.name for process in stage_jobs(job))
    return DryRun(
        job=job_as_toml(job),
        prompts=[
            ShownPrompt(
                text=prompt.text,
                ids=prompt.ids.tolist(),
                response_ids=[] if prompt.response_ids is None else prompt.response_ids.tolist(),
            )
            for prompt in prompts
        ],
        rewards=try_rewards(job, prompts + others, data.renderer.tokenizer),
        tasks=[_task(stage, processes[stage.task.name]) for stage in stages(job)],
        processes=dict(processes),
        batch_rows=batch_rows(job),
        rows_ahead=pacing(job).rows_ahead_max,
        rows_kept=rows_kept(job),
        row_bytes=held.row,
        row_bytes_total=held.rows,
        weight_bytes=held.weights,
        memory_bytes=held.memory,
        devices=[
            *placement.lines(),
            *counted_models(job),
            *(node_lines(job) if job.on == "ray" else [thread_line(job, placement, processes.total())]),
        ],
    )


def _task(stage: Stage, processes: int) -> ShownTask:
    amount = f"{stage.groups} groups" if stage.groups else f"{stage.rows} rows"
    least = f"{stage.at_least} to " if stage.at_least else ""
    return ShownTask(
        name=stage.task.name,
        needs=list(stage.task.needs),
        gives=list(stage.task.gives),
        amount=least + amount,
        processes=processes,
    )


def _shown(ids: list[int]) -> str:
    return " ".join(map(str, ids[:_IDS_SHOWN])) + (" …" if len(ids) > _IDS_SHOWN else "")
