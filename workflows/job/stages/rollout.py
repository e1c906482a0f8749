"""The rollout stage of a job: a response for each row, by the engine that the job names, under the job's weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import transferqueue as tq
from transferqueue.adapters.protocols import Generator, PartialResult, Sampling
from transferqueue.adapters.stages.generation import PART_ROWS, Generate
from transferqueue.errors import UsageError
from transferqueue.workflows.dispatch.channels import dispatched
from transferqueue.workflows.flow.loop.full_batches import nothing_due
from transferqueue.workflows.flow.loop.preference import PreferringWork
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.job.engines import model_directory, open_engine
from transferqueue.workflows.job.graph import (
    by_length,
    engine_of,
    hands_back,
    in_parts,
    stops_oversampling,
    takes_whole_steps,
)
from transferqueue.workflows.job.names import IMAGES
from transferqueue.workflows.job.settings.job import EngineSettings, Job
from transferqueue.workflows.job.settings.sizes import staleness_when_new
from transferqueue.workflows.job.stages.drain import drainable
from transferqueue.workflows.job.stages.oversampling import Oversampling
from transferqueue.workflows.job.stages.policy_weights import PolicyWeights, policy_weights

_PARTS: Final = 16
"""Finished rows are committed in parts of at most this share of the slots, so that few slots stand empty."""


@contextmanager
def rollout(context: Context) -> Iterator[Work]:
    """Factory of ``rollout``: starts the engine, waits for the first weights, and generates.

    Its function gives `response_ids`, `token_versions` (int32 ``[T]``), `rollout_logprobs` (float32 ``[T]``, of the
    distribution that was drawn from) and `finish_reason`, with the end token as the response's last. It may be called
    from several threads at once (`Stage.slots`). A row draws with a seed that is a hash of the job's seed and its
    ordinal.
    """
    job = context.settings(Job)
    oversampling = Oversampling(context) if stops_oversampling(job) else None
    with generating(context, job, oversampling) as (engine, weights, sampling, chosen):
        work = EngineRollout(
            engine, weights, sampling, job, slots=engine_of(job, context.instance).slots, oversampling=oversampling
        )
        with drainable(work, engine, context.drain) if hands_back(job) else nullcontext(work) as handed:
            yield chosen(handed)


@contextmanager
def generating(
    context: Context, job: Job, oversampling: Oversampling | None = None
) -> Iterator[tuple[Generator, PolicyWeights, Sampling, Callable[[Work], Work]]]:
    """Open the engine of this process with the first weights; yield it, its weights, the job's sampling, and what makes
    the stage's function lease rows by length, if the job dispatches so.

    oversampling: stops the engine when a batch is full.
    """
    settings = engine_of(job, context.instance)
    sampling = sampling_of(job)
    with ExitStack() as stack:
        with context.span("engine start"):
            engine = stack.enter_context(closing(open_engine(settings, job, place=list(job.engine).index(settings))))
        chosen: Callable[[Work], Work] = _unchanged
        if by_length(job):
            name, slots = f"{context.instance}", settings.slots
            engine, follower = stack.enter_context(
                dispatched(context.queue, context.table.name, engine, name=name, slots=slots)
            )
            chosen = partial(PreferringWork, choice=follower.choice)
        due = nothing_due if oversampling is None else stack.enter_context(oversampling.stopping(engine))
        yield engine, stack.enter_context(policy_weights(context, engine, job, due)), sampling, chosen


def _unchanged(work: Work) -> Work:
    return work


class EngineRollout:
    """The function of ``rollout``: `Generate` under the weights of the job."""

    def __init__(
        self,
        engine: Generator,
        weights: PolicyWeights,
        sampling: Sampling,
        job: Job,
        *,
        slots: int,
        oversampling: Oversampling | None = None,
    ) -> None:
        budget = job.sampling.budget
        self._weights, self._oversampling = weights, oversampling
        self._generate = Generate(
            engine,
            sampling,
            part_rows=PART_ROWS if takes_whole_steps(job) else max(1, min(PART_ROWS, slots // _PARTS)),
            token_versions=True,
            budget=budget,
            parts=in_parts(job),
            max_staleness=staleness_when_new(job),
            staleness_of=job.pacing.staleness_of,
            seed=job.seed,
            whole_groups=job.sampling.group_size if job.reproducible and not in_parts(job) else 0,
            routes=job.algorithm.router_replay,
            images=IMAGES if job.data.images else "",
        )

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield rows as they are finished; rows that wait for newer weights come last."""
        for version, rows in self._weights.turns(batch):
            with self._weights.at(version):
                parts = self._generate.of(batch, rows)
                yield from parts if self._oversampling is None else self._oversampling.until_full(version, rows, parts)


# ---------------------------------------------------------------- sampling


def sampling_of(job: Job) -> Sampling:
    """Return how the job draws. Stop tokens: the end tokens of the tokenizer and of the model's generation settings,
    and `sampling.stop`.

    Raises `UsageError` for a stop text that is not one token.
    """
    from transferqueue.workflows.job.data.tokenizer import load_tokenizer

    return Sampling(
        tokens_max=job.sampling.tokens_max,
        temperature=job.sampling.temperature,
        stop_ids=stop_ids(load_tokenizer(job.model), job, model_directory(EngineSettings(), job)),
    )


def stop_ids(tokenizer: Any, job: Job, directory: str) -> tuple[int, ...]:
    """Return the ids that end a response, ascending."""
    ends = {tokenizer.eos_token_id, *_generation_ends(directory)} - {None}
    return tuple(sorted({int(end) for end in ends} | {stop_id(tokenizer, text) for text in job.sampling.stop}))


def _generation_ends(directory: str) -> list[int | None]:
    """The end tokens of ``generation_config.json``: chat models often have several. A model may lack that file."""
    path = Path(directory) / "generation_config.json"
    ends = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    return list(ends) if isinstance(ends, list | tuple) else [ends]


def stop_id(tokenizer: Any, text: str) -> int:
    """Return the id of a stop text. Raises `UsageError` for one that is not a single token."""
    ids: list[int] = tokenizer([text], add_special_tokens=False)["input_ids"][0]
    if len(ids) != 1:
        raise UsageError(
            f"sampling.stop={text!r} is {len(ids)} tokens ({ids[:8]}); engines stop at one token id: give a text that "
            "is a single token of the model"
        )
    return int(ids[0])
