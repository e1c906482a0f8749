"""The source of prompts of a job: puts the rows of each prompt's group, and goes on where an earlier process ended.

1. Prompts are put in the order of their numbers, whole groups at a time, each group in one commit. So the count of rows
   that the table ever received says which prompt is next, whenever the process was killed: none is lost or doubled. The
   queue refuses a second source that puts a group which is live: the group would have too many rows.
2. A job that never drops a row puts exactly the prompts of its steps. One that may drop groups (equal rewards, too old,
   a reward that fails) puts more in their place, until the trainer seals the table.
3. A sampler chooses the prompts of a step by pass rates (`data.sampler`), and notes them before they are put.
4. Data that ends before the steps do (`data.epochs`) ends the table: the source seals it, and the trainer's last step
   takes the remaining rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import numpy as np

import transferqueue as tq
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.errors import InternalError, Sealed, UsageError
from transferqueue.workflows.dispatch.channels import since
from transferqueue.workflows.flow.reports.audit import audit
from transferqueue.workflows.flow.stage import Context, Produce
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.prompt_data import open_prompts
from transferqueue.workflows.job.data.sampler import GroupRates, SampledSequence
from transferqueue.workflows.job.data.sequence import NumberedPrompt, PromptSequence
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.graph import has_episodes, has_several_environments, in_parts
from transferqueue.workflows.job.run_files import SAMPLER, first_prompt
from transferqueue.workflows.job.settings.defaults import filled
from transferqueue.workflows.job.settings.job import IN_TURN, Job
from transferqueue.workflows.job.settings.sizes import group_rows, has_step_versions, rows_ahead

PUT_ROWS: Final = 64
"""About the most rows of one put: rollout starts with the first while the next are tokenized."""


def replaces_dropped(job: Job) -> bool:
    """Whether groups may be dropped while the job runs, so that more prompts than steps · prompts_per_step are
    needed."""
    return bool(
        filled(job.algorithm).filter_equal
        or job.on == "ray"  # groups whose bytes are lost with a node
        or job.pacing.on_stale == "drop"
        or any(reward.on_error == "drop" for reward in job.reward)
        or any(environment.on_error == "drop" for environment in job.environment)
    )


def needs_spare_prompts(job: Job) -> bool:
    """Whether the last steps may wait for prompts beyond steps · prompts_per_step.

    Advantages that are whitened are computed a whole batch at a time. A stale row comes back after that, alone, and at
    the end of a run there must be other rows that fill its batch.
    """
    comes_back = job.pacing.mode not in IN_TURN and bool(filled(job.algorithm).whiten) and not has_step_versions(job)
    return comes_back or replaces_dropped(job)


def groups_per_put(job: Job) -> int:
    """Return how many groups one put has.

    Room comes in whole batches, so the groups of a put divide both a batch and all that may be ahead; else the last
    groups of a batch might wait for room that only that batch would make. Where single groups may be dropped, room
    comes by groups.
    """
    if replaces_dropped(job):
        return 1
    groups = math.gcd(job.trainer.prompts_per_step, rows_ahead(job) // group_rows(job))
    most = max(1, PUT_ROWS // group_rows(job))
    return max(divisor for divisor in range(1, min(most, groups) + 1) if groups % divisor == 0)


class JobPrompts:
    """The producer (`adapters.protocols.Producer`) of a job's prompts. rows_put: rows that the run's
    tables received before."""

    def __init__(self, job: Job, sequence: PromptSequence | SampledSequence, *, rows_put: int) -> None:
        self._size, self._in_parts = group_rows(job), in_parts(job)
        self._names_environments, self._has_episodes = has_several_environments(job), has_episodes(job)
        self._has_images = bool(job.data.images)
        self._groups_per_put = groups_per_put(job)
        self._chooses_late = bool(job.data.sampler.by)
        self._end = None if needs_spare_prompts(job) else job.steps * job.trainer.prompts_per_step
        self._sequence = sequence
        self._next: list[NumberedPrompt] = []
        if rows_put % self._size:
            raise InternalError(
                f'table "{names.TABLE}" received {rows_put} rows, which are no whole groups of {self._size}: something '
                "else than the source of this job puts rows into it"
            )
        self.data_ended = sequence.skip(rows_put // self._size) < rows_put // self._size

    def wants(self) -> int:
        """Return the rows of the next put; 0 after the last. It is made ready, unless its prompts are chosen by what
        the rows before it teach."""
        if not self._next:
            left = self._groups_per_put if self._end is None else self._end - self._sequence.number
            count = min(self._groups_per_put, left)
            if self._chooses_late:
                return count * self._size
            self._next = self._sequence.take(count)
            self.data_ended |= len(self._next) < count
        return len(self._next) * self._size

    def __call__(self, rows: int) -> Mapping[str, Any]:
        """Return the next groups: what belongs to the prompt is stored once a group."""
        prompts = self._sequence.take(rows // self._size) if self._chooses_late else self._next
        self._next = []
        if len(prompts) * self._size != rows:
            raise InternalError(f"{rows} rows asked for, {len(prompts)} groups of {self._size} ready")
        number = np.repeat([prompt.number for prompt in prompts], self._size)
        ordinal = number * self._size + np.tile(np.arange(self._size), len(prompts))
        return {
            **{name: tq.Repeat(values, self._size) for name, values in self._columns(prompts).items()},
            "group_id": number,
            "group_size": self._size,
            "ordinal": ordinal,
        }

    def _columns(self, prompts: list[NumberedPrompt]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            "prompt_ids": [prompt.ids for prompt in prompts],
            names.DATA: [prompt.data for prompt in prompts],
        }
        if self._has_images:
            columns[names.IMAGES] = [list(prompt.images) for prompt in prompts]
        if self._names_environments:
            columns[names.ENVIRONMENT] = [prompt.environment for prompt in prompts]
        if self._has_episodes:
            columns[names.EPISODE] = [None] * len(prompts)
        if prompts[0].response_ids is not None:
            columns["response_ids"] = [prompt.response_ids for prompt in prompts]
        if prompts[0].learned is not None:
            columns["loss_mask"] = [prompt.learned for prompt in prompts]
        if self._in_parts:
            columns |= {name: [_nothing(name)] * len(prompts) for name in BEGUN}
        return columns


def _nothing(name: str) -> np.ndarray[Any, Any]:
    return np.empty(0, np.float32 if name == "begun_logprobs" else np.int32)


def sampled(sequence: PromptSequence, job: Job, context: Context) -> PromptSequence | SampledSequence:
    """Return the prompts of a job, by its sampler if it has one."""
    if not job.data.sampler.by:
        return sequence
    if context.directory is None:
        raise UsageError(
            "data.sampler notes its prompts in the folder of the run, and this flow has none; leave it out"
        )
    return SampledSequence(
        sequence,
        job.data.sampler,
        prompts=job.trainer.prompts_per_step,
        seed=job.seed,
        path=context.directory / SAMPLER,
        news=partial(since, context.queue, names.PASS_RATES, GroupRates),
    )


@contextmanager
def prompts(context: Context) -> Iterator[Produce]:
    """Factory of the source."""
    with source_with(context, load_tokenizer(context.settings(Job).model)) as produce:
        yield produce


@contextmanager
def source_with(context: Context, tokenizer: TextTokenizer) -> Iterator[Produce]:
    """Open the data, and go on after the rows that the table has received.

    At the end, reports how many rows of the data were dropped as too long, and seals the table if the data ended.
    """
    job = context.settings(Job)
    data = open_prompts(job, tokenizer)
    sequence = sampled(PromptSequence(data, job.data, seed=job.seed, tokens_max=job.sampling.tokens_max), job, context)
    before = first_prompt(context.directory) * group_rows(job)
    produce = JobPrompts(job, sequence, rows_put=before + audit(context.table).put)
    yield produce
    context.figures("prompts", put=sequence.number, data_rows=len(data), overlong=sequence.dropped)
    if produce.data_ended:
        with suppress(Sealed):
            context.table.seal()
