"""The processes ``train`` and ``train_critic``: one each, or one for each rank of the policy's trainer.

Each loads its model, goes on from the newest checkpoint of its run, and runs the loop of
`transferqueue.workflows.job.training.trainer`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import transferqueue as tq
from transferqueue.adapters.lora_weights import LORA_SCALE
from transferqueue.adapters.protocols import WeightSource
from transferqueue.adapters.scoring import load_adapter, load_value_model
from transferqueue.adapters.scoring.load import checkpoint_gradients, torch_dtype
from transferqueue.adapters.scoring.lora import AdapterWeights
from transferqueue.adapters.weights import TensorWeights, copy_weights
from transferqueue.errors import DeadlineExceeded, NotFound, UsageError
from transferqueue.errors.text import counted
from transferqueue.workflows.flow.loop.full_batches import tell_full
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.data.tokenizer import load_tokenizer
from transferqueue.workflows.job.devices.repeat import repeat_bits
from transferqueue.workflows.job.reward_terms.term_names import term_names
from transferqueue.workflows.job.run_files import CHECKPOINTS, MODEL, checkpoint_path, first_prompt
from transferqueue.workflows.job.settings.defaults import defaults_of
from transferqueue.workflows.job.settings.job import IN_TURN, Job
from transferqueue.workflows.job.settings.resolve import resolve
from transferqueue.workflows.job.settings.sizes import (
    batch_rows,
    depth,
    group_rows,
    has_step_versions,
    publishes_adapters,
    versions_kept,
)
from transferqueue.workflows.job.stages.device_turns import DeviceTurns
from transferqueue.workflows.job.stages.evaluate import end_evaluations, request_evaluation
from transferqueue.workflows.job.stages.step_versions import begin_versions
from transferqueue.workflows.job.training.best_checkpoint import has_stalled, judged_steps
from transferqueue.workflows.job.training.checkpoint import Checkpoints, CheckpointState, load_checkpoint
from transferqueue.workflows.job.training.gather import StepShape, StreamPosition
from transferqueue.workflows.job.training.learner import PolicyLearner, StepLearner, ValueLearner
from transferqueue.workflows.job.training.model_files import export_checkpoint, load_policy, write_model_files
from transferqueue.workflows.job.training.passes import Passes, PassesInTurn, RankFollower
from transferqueue.workflows.job.training.policy_critic_pair import PolicyCriticPair, latest_version
from transferqueue.workflows.job.training.publication import Publisher
from transferqueue.workflows.job.training.ranks import ALONE, Ranks, meeting
from transferqueue.workflows.job.training.stream import RowStream, StreamTerms
from transferqueue.workflows.job.training.trainer import Evaluations, NoEvaluations, Partner, Trainer, TrainerTerms

FIRST_S: Final = 3600.0
"""Longest wait for the other trainer of a pair, which loads its model."""


@contextmanager
def train(context: Context) -> Iterator[Callable[[], None]]:
    """Factory of ``train``: yields the loop that trains the policy. ``context.instance`` is the rank."""
    job = resolve(context.settings(Job))
    settings = job.trainer
    with meeting(
        context.queue, context.instance, settings.ranks, settings.parallel, patience_s=settings.patience_s
    ) as ranks:
        learner = policy_learner(job, ranks)
        yield _loop(context, job, learner, names.TRAIN)


@contextmanager
def train_critic(context: Context) -> Iterator[Callable[[], None]]:
    """Factory of ``train_critic``: yields the loop that trains the value model."""
    job = resolve(context.settings(Job))
    yield _loop(context, job, value_learner(job), names.TRAIN_CRITIC)


def policy_learner(job: Job, ranks: Ranks = ALONE) -> PolicyLearner:
    """Load the policy of a resolved job, or this rank's part of it, and return its learner."""
    repeat_bits(job)
    settings = job.trainer
    if settings.lora_rank:
        torch.manual_seed(job.seed)  # the same adapters on every rank, and in every life without a checkpoint
    model = load_policy(job, ranks=ranks)
    if settings.lora_adapter:
        load_adapter(model, settings.lora_adapter)
    _prepare(model, job)
    return PolicyLearner(
        model,
        job.algorithm,
        settings,
        steps=job.steps,
        temperature=1.0 if job.algorithm.kind == "sft" else job.sampling.temperature,
        tokens_max=job.sampling.tokens_max,
        rows_near=batch_rows(job),
        compute=job.model.dtype,
        ranks=ranks,
    )


def value_learner(job: Job) -> ValueLearner:
    """Load the critic of a resolved job and return its learner."""
    repeat_bits(job)
    critic = job.critic
    model = load_value_model(
        critic.path,
        dtype=job.trainer.master_dtype,
        trust_remote_code=job.model.trust_remote_code,
    )
    _prepare(model, job)
    return ValueLearner(
        model,
        job.algorithm,
        job.trainer,
        steps=job.steps,
        lr=critic.lr,
        tokens_near=batch_rows(job) * job.sampling.tokens_max,
        compute=job.model.dtype,
    )


def _prepare(model: Any, job: Job) -> None:
    if job.trainer.gradient_checkpointing:
        checkpoint_gradients(model)


def _loop(context: Context, job: Job, learner: StepLearner, task: str) -> Callable[[], None]:
    """Return the loop of this process."""
    checkpoints = _checkpoints(context, job, learner, task)
    is_own = checkpoints is not None and checkpoints.newest() is not None
    state = resumed(job, learner, checkpoints)
    channel = context.queue.weights(names.POLICY if task == names.TRAIN else names.CRITIC, keep=versions_kept(job))
    turns = context.shared if isinstance(context.shared, DeviceTurns) else None
    publisher = _publisher(context, job, channel, learner, turns)
    if not learner.ranks.leads:
        return RankFollower(learner, context.table, _fields(context.table, task), checkpoints, publisher).run
    latest = latest_version(channel)
    version = state.version if state else -1
    position = state.position if state and is_own else StreamPosition()  # of another run it says nothing of this table
    first = first_prompt(context.directory) * (1 if _is_whole(job, task) else group_rows(job))
    if task == names.TRAIN and has_step_versions(job):
        begin_versions(context.queue, learner.steps_taken, first_prompt(context.directory))
    if position.oldest < first:  # a run that goes on with a new table: it begins there
        position = StreamPosition(first)
    if state is None and checkpoints is None and latest > 0 and learner.ranks.world == 1:
        version, position = _taken_up(context, job, learner, channel, task)
    trainer = Trainer(
        table=context.table,
        stream=_stream(context, job, task, position),
        passes=_passes(job, learner, turns),
        publisher=publisher,
        weights=_weights(job, learner, task),
        checkpoints=checkpoints,
        terms=_terms(job, task, checkpoints, tells_rows=isinstance(context.table.retention, tq.Recorded)),
        figures=context.figures,
        evaluations=_evaluations(context, job, task),
        partner=_partner(context, job, task),
        full=_announcing(context, job, task),
        step=learner.steps_taken,
        latest=latest,
        version=version,
    )
    trainer.begin(resumed=state is not None)
    _check_uses(context, job, trainer)
    if turns is not None:
        turns.hand(trainer.version, learner.own_weights())
    return trainer.run if task == names.TRAIN_CRITIC else lambda: _to_the_end(trainer, context, job)


def _check_uses(context: Context, job: Job, trainer: Trainer) -> None:
    """Leave out further uses of rows that the table has not counted the uses before of. `UsageError` if the run is to
    repeat."""

    def is_counted(task: str, row: int) -> bool:
        return _is_counted(context.queue, task, row)

    forgotten = trainer.stream.forget_unknown(is_counted, "" if job.reproducible else names.STALE_USE)
    if forgotten and job.reproducible:
        raise UsageError(
            f"step {trainer.step + 1} is to train {counted(forgotten, 'place')} of the data again "
            f"(pacing.uses={job.pacing.uses}), and the table, of an older snapshot than the checkpoint, has not "
            "counted the uses before, so the run cannot repeat (reproducible=true); go on with --set reproducible=false"
        )


def _is_counted(queue: tq.Queue, task: str, row: int) -> bool:
    """Whether a task is done with a row, or the row is gone."""
    try:
        return queue.inspect(names.TABLE, row).tasks[task].state not in names.OPEN_STATES
    except NotFound:
        return True


def _weights(job: Job, learner: StepLearner, task: str) -> Callable[[], WeightSource]:
    """Return what gives the weights that this process publishes."""
    if task == names.TRAIN and publishes_adapters(job):
        return lambda: AdapterWeights(learner.model)
    return learner.own_weights


def _to_the_end(trainer: Trainer, context: Context, job: Job) -> None:
    """Train, and write the model of the last checkpoint into the folder of the run."""
    trainer.run()
    newest = trainer.checkpoints.newest() if trainer.checkpoints is not None else None
    if newest is None or context.directory is None or (out := context.directory / MODEL).exists():
        return
    for left in context.directory.glob(f".{MODEL}.*"):  # of a process that died
        shutil.rmtree(left)
    try:
        export_checkpoint(newest, job, out, merge=job.trainer.lora_rank > 0)
    except UsageError as error:
        raise StageFailedInProcess(f"the model of the run: {error}; go on with train --resume") from error


def _announcing(context: Context, job: Job, task: str) -> Callable[[int, Sequence[int]], None]:
    """Return what tells the generators of a job that over-samples that a batch is full."""

    def announce(version: int, rows: Sequence[int]) -> None:
        if task == names.TRAIN and graph.stops_oversampling(job):
            tell_full(context.queue, version, np.array(rows, np.int64), channel=names.FULL)

    return announce


def _terms(job: Job, task: str, checkpoints: Checkpoints | None, *, tells_rows: bool) -> TrainerTerms:
    is_policy = task == names.TRAIN
    return TrainerTerms(
        task=task,
        steps=job.steps,
        endless=not is_policy,
        save_every=0 if checkpoints is None else job.checkpoint.every,
        publish_every=job.weights.every,
        kind="step" if is_policy else names.CRITIC_STEP,
        rewards=term_names(job) if is_policy else (),
        seals=is_policy,
        evaluate_every=job.evaluation.every,
        in_turn=not is_policy and job.pacing.mode in IN_TURN and depth(job) == 0,
        by_step=has_step_versions(job),
        tells_rows=is_policy and tells_rows,
        further_uses=names.further_uses(job.pacing.uses) if is_policy else (),
        staleness=None if job.reproducible or job.pacing.uses == 1 else job.pacing.max_staleness,
    )


class _Partner:
    """The other trainer of a pair, seen through its channel and the folder of the run."""

    def __init__(self, context: Context, pair: PolicyCriticPair, task: str) -> None:
        self._queue, self._pair = context.queue, pair
        self._other = names.CRITIC if task == names.TRAIN else names.POLICY

    def newest(self) -> dict[str, int]:
        return self._pair.newest()

    def first_version(self) -> int:
        start = self._pair.start()
        return -1 if start is None else start.version

    def wait(self, version: int) -> None:
        if version < 0:
            return
        try:
            self._queue.weights(self._other).pull(above=version - 1, timeout_s=FIRST_S).release()
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f'no version {version} came on channel "{self._other}" within {FIRST_S:g} s: its trainer publishes it '
                "when its model is loaded; see its log"
            ) from error

    def is_trained(self, row: int) -> bool:
        return _is_counted(self._queue, names.TRAIN, row)


def _partner(context: Context, job: Job, task: str) -> Partner | None:
    pair = _pair(context, job)
    return None if pair is None else _Partner(context, pair, task)


def _pair(context: Context, job: Job) -> PolicyCriticPair | None:
    """Return what both trainers of a job with a critic share; None without critic, or without a folder."""
    if names.TRAIN_CRITIC not in graph.task_names(job) or context.directory is None:
        return None
    return PolicyCriticPair(context.directory, job.steps)


class _HeldOut:
    """Asks the process ``evaluate`` by the queue; its figures are in the folder of the run."""

    def __init__(self, queue: tq.Queue, folder: Path | None, job: Job) -> None:
        self._queue, self._folder, self._job = queue, folder, job

    def request(self, step: int, version: int) -> None:
        request_evaluation(self._queue, step, version)

    def end(self) -> None:
        end_evaluations(self._queue)

    def stalled(self) -> bool:
        return self._folder is not None and has_stalled(self._folder, self._job)


def _evaluations(context: Context, job: Job, task: str) -> Evaluations:
    if task != names.TRAIN or not job.evaluation.path:
        return NoEvaluations()
    return _HeldOut(context.queue, context.directory, job)


def _passes(job: Job, learner: StepLearner, turns: DeviceTurns | None) -> Passes:
    if turns is None:
        return Passes(learner, job.algorithm, seed=job.seed)
    return PassesInTurn(learner, job.algorithm, seed=job.seed, turns=turns)


def _publisher(
    context: Context, job: Job, channel: tq.WeightChannel, learner: StepLearner, turns: DeviceTurns | None
) -> Publisher:
    return Publisher(
        channel,
        dtype=torch_dtype(job.weights.dtype) if job.weights.dtype else None,
        # In sync mode the next rows need these weights. Rows that a killed trainer left may be ready before: none is
        # leased until they are stale.
        background=depth(job) > 0,
        rank=learner.ranks.rank,
        ranks=learner.ranks.world if learner.ranks.parallel == "fsdp2" else 1,
        emit=context.emit,
        figures=context.figures,
        hand=(lambda version, source: None) if turns is None else turns.hand,
    )


def _stream(context: Context, job: Job, task: str, position: StreamPosition) -> RowStream:
    terms = stream_terms(job, task, _fields(context.table, task))
    return RowStream(context.table, terms, emit=context.emit, position=position)


def stream_terms(job: Job, task: str, fields: tuple[str, ...]) -> StreamTerms:
    """Return the lease terms of a resolved job's trainer."""
    whole = _is_whole(job, task)
    settings = job.trainer
    units = settings.prompts_per_step if whole else batch_rows(job)
    ahead = depth(job) > 0
    window = job.pacing.over_sample if ahead else math.inf
    return StreamTerms(
        task=task,
        shape=StepShape(
            units=units,
            at_least=min(settings.at_least, units),
            stream=settings.stream == "on",
            order="ordinal" if job.reproducible else "ready",
            window=window,
        ),
        whole=whole,
        group_rows=group_rows(job),
        fields=fields,
        further_uses=names.further_uses(job.pacing.uses) if task == names.TRAIN else (),
    )


def _is_whole(job: Job, task: str) -> bool:
    """Whether the task takes whole groups."""
    return task == names.TRAIN and defaults_of(job.algorithm.kind).compares


def _fields(table: tq.Table, task: str) -> tuple[str, ...]:
    return tuple(table.tasks[task].needs)


# ---------------------------------------------------------------- resume


def _checkpoints(context: Context, job: Job, learner: StepLearner, task: str) -> Checkpoints | None:
    if context.directory is None or not job.checkpoint.every:
        return None
    folder, pair = context.directory, _pair(context, job)
    tokenizer = cache(lambda: load_tokenizer(job.model))

    def kept(steps: Sequence[int]) -> list[int]:
        needed = [] if pair is None else [step for step in steps if step >= pair.needed_from(task)]
        compared = judged_steps(folder, steps, job) if task == names.TRAIN and job.checkpoint.best else []
        return needed + compared

    return Checkpoints(
        folder / CHECKPOINTS / task,
        keep=job.checkpoint.keep,
        keeps=kept,
        describe=lambda place: write_model_files(place, learner.model, tokenizer(), job.model.path),
    )


def resumed(job: Job, learner: StepLearner, checkpoints: Checkpoints | None) -> CheckpointState | None:
    """Load the checkpoint that the trainer goes on from: the newest of this run, else the one that the job names. None:
    there is none."""
    resume = job.checkpoint.resume
    newest = checkpoints.newest() if checkpoints is not None else None
    if newest is None and resume:
        newest = _named(Path(resume), learner, job)
    return None if newest is None else load_checkpoint(newest, learner)


def _taken_up(
    context: Context, job: Job, learner: StepLearner, channel: tq.WeightChannel, task: str
) -> tuple[int, StreamPosition]:
    """Go on from the newest weights that a trainer without checkpoints published; the optimizer begins anew."""
    with channel.pull(timeout_s=0) as weights:
        tensors = {name: tensor for name, tensor in weights.torch().items() if name != LORA_SCALE}
        copy_weights(TensorWeights(tensors), learner.model)
        learner.steps_taken = min(weights.version, job.steps)
        return weights.version, StreamPosition(
            context.table.cursor() // (group_rows(job) if _is_whole(job, task) else 1)
        )


def _named(path: Path, learner: StepLearner, job: Job) -> Path:
    """Return the checkpoint that `path` names: itself, or the newest of a run's folder; of a run with a critic, the
    newest that belong together."""
    if path.name.startswith("step-"):
        return path
    task = names.TRAIN if isinstance(learner, PolicyLearner) else names.TRAIN_CRITIC
    pair = PolicyCriticPair(path, job.steps)
    if names.TRAIN_CRITIC in graph.task_names(job) and (steps := pair.newest()):
        return checkpoint_path(pair.directory(task), steps[task])
    for folder in (path / CHECKPOINTS / task, path / task, path):
        if (newest := Checkpoints(folder).newest()) is not None:
            return newest
    raise NotFound(
        f'checkpoint.resume="{path}" has no checkpoint of task {task}; give a run\'s folder, or a directory step-N'
    )
