"""The graph of a job: its table, its tasks, its pace and its processes, all from the settings. Runs nothing and needs
no torch.

::

    prompts --put--> [rollouts] --rollout---> response_ids, rollout_logprobs, token_versions, finish_reason
                                  --rank------> expected_tokens              before rollout, if dispatched by length
                                  --lengths---> nothing: teaches the ranker  after it
                                  --reward----> rewards                      (play: responses and rewards of episodes)
                                  --reference-> ref_logprobs                 with a KL term
                                  --proximal--> prox_logprobs                old="trainer" and several updates a step
                                  --value-----> values                       ppo
                                  --teacher---> teacher_ids, teacher_logprobs  distill
                                  --advantage-> advantages                   whole groups; ppo: token_advantages
                                  --train-----> new weights                  paces the table
                                  --train_use_2, … -> new weights            rows that are trained in several steps
                                  --train_critic-> new values                ppo

Which of them a job has, and their columns: `transferqueue.workflows.job.settings.defaults`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

import transferqueue as tq
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.errors import NotFound
from transferqueue.errors.text import counted
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Stage
from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.defaults import advantage_columns, columns_of, defaults_of, tasks_of
from transferqueue.workflows.job.settings.job import IN_TURN, EngineSettings, Job
from transferqueue.workflows.job.settings.sizes import (
    GIB,
    batch_rows,
    depth,
    has_loss_mask,
    has_step_versions,
    rows_ahead,
    rows_kept,
    staleness_when_new,
    teacher_tokens,
)

_HERE: Final = "transferqueue.workflows.job"
FACTORIES: Final[Mapping[str, str]] = {
    names.PROMPTS: f"{_HERE}.data.source:prompts",
    names.RANK: f"{_HERE}.stages.rank:rank",
    names.ROLLOUT: f"{_HERE}.stages.rollout:rollout",
    names.PLAY: f"{_HERE}.stages.episodes:episodes",
    names.REWARD: f"{_HERE}.stages.reward:reward",
    names.REFERENCE: f"{_HERE}.stages.score:reference",
    names.PROXIMAL: f"{_HERE}.stages.score:proximal",
    names.VALUE: f"{_HERE}.stages.score:value",
    names.TEACHER: f"{_HERE}.stages.score:teacher",
    names.ADVANTAGE: f"{_HERE}.stages.advantage:advantage",
    names.TRAIN: f"{_HERE}.training.process:train",
    names.TRAIN_CRITIC: f"{_HERE}.training.process:train_critic",
    names.EVALUATE: f"{_HERE}.stages.evaluate:evaluate",
}
_COLOCATED: Final = f"{_HERE}.training.colocated:train"
"""Factory of ``train`` in mode ``colocated``, whose process generates too."""
"""Factory of each process. A process imports that module only, so that only processes with a model load torch."""

TRAINERS: Final = "trainers"
"""Name of the processes that die and start together: the trainers of policy and critic
(`transferqueue.workflows.job.training.policy_critic_pair`)."""

LOOPS: Final = frozenset({names.RANK, names.TRAIN, names.TRAIN_CRITIC, names.EVALUATE})
"""Processes whose factory gives a whole loop: they lease rows themselves, or none."""

HELD_S_MAX: Final = 6 * 3600.0
"""Longest time that the trainer or a generator holds rows: a streaming step holds its first rows until its last ones
are generated."""
DAY_S: Final = 86_400.0
ROWS_TO_RECORD: Final = 1 << 14
"""Room for rows that have ended and wait for their file: small steps share one, and generation waits for none."""
_LONG: Final = (names.ROLLOUT, names.PLAY, names.TRAIN, names.TRAIN_CRITIC)
_LEASES: Final = 4
"""Leases that fill the slots of an idle engine; each is committed in parts of its own."""
_LESSONS: Final = 4
"""Leases in which the ranker gets the finished rows of a batch."""
_REWARD_ROWS: Final = 64
_SCORED_ROWS: Final = 64
"""Rows of one lease of a scoring process, which packs them into passes itself. Fewer rows reach the trainer sooner."""

RAGGED: Final = (None,)
_FIELDS: Final[dict[str, tq.Field]] = {
    field.name: field
    for field in (
        tq.Field("prompt_ids", "int32", RAGGED),
        tq.Field(names.DATA, "value"),
        tq.Field(names.IMAGES, "value"),
        tq.Field(names.ENVIRONMENT, "str"),
        tq.Field(names.EPISODE, "value"),
        tq.Field(names.EXPECTED_TOKENS, "int32"),
        tq.Field(names.RANKER_VERSION, "int32"),
        tq.Field("response_ids", "int32", RAGGED),
        tq.Field("token_versions", "int32", RAGGED),
        tq.Field("rollout_logprobs", "float32", RAGGED),
        tq.Field("finish_reason", "str"),
        tq.Field("routes", "int16", (None, None, None)),
        tq.Field("loss_mask", "bool", RAGGED),
        tq.Field("rewards", "float32"),
        tq.Field("turn_rewards", "float32", RAGGED),
        tq.Field(names.REWARD_TERMS, "float32", RAGGED),
        tq.Field("ref_logprobs", "float32", RAGGED),
        tq.Field("prox_logprobs", "float32", RAGGED),
        tq.Field("values", "float32", RAGGED),
        tq.Field("advantages", "float32"),
        tq.Field("token_advantages", "float32", RAGGED),
        tq.Field("returns", "float32", RAGGED),
        tq.Field(BEGUN[0], "int32", RAGGED),
        tq.Field(BEGUN[1], "float32", RAGGED),
        tq.Field(BEGUN[2], "int32", RAGGED),
    )
}
"""Every column that a job may have, but the teacher's, whose shape depends on the job."""
_GENERATED: Final = ("response_ids", "token_versions", "rollout_logprobs", "finish_reason")
_TEXT: Final = ("prompt_ids", "response_ids")


def has_episodes(job: Job) -> bool:
    """Whether rows are episodes of an environment, which bring their own rewards."""
    return bool(job.environment)


def has_several_environments(job: Job) -> bool:
    """Whether a row says which environment plays it."""
    return len(job.environment) > 1


def by_length(job: Job) -> bool:
    """Whether rows go to engines by their expected length."""
    return job.dispatch.kind == "length"


def in_parts(job: Job) -> bool:
    """Whether a response may be generated in several leases, under several versions."""
    return bool(job.sampling.budget) or job.pacing.over_sample > 1 or hands_back(job)


def hands_back(job: Job) -> bool:
    """Whether a generator that is removed gives its rows back with their tokens. Episodes, and rows in the order of the
    data, are finished instead."""
    return bool(job.elastic.max) and not has_episodes(job) and not job.reproducible


def stops_oversampling(job: Job) -> bool:
    """Whether generators stop when a batch is full. Episodes are finished instead."""
    return job.pacing.over_sample > 1 and not has_episodes(job)


def is_colocated(job: Job) -> bool:
    """Whether the trainer's process generates too."""
    return job.pacing.mode == "colocated"


def takes_whole_steps(job: Job) -> bool:
    """Whether the only engine has room for all rows that may be ahead: no others come while they are in work, so few
    leases and acks cost it no slot."""
    engines = job.engine
    alone = sum(engine.count for engine in engines) == 1 and not job.elastic.max
    return alone and job.pacing.mode in IN_TURN and engines[0].slots >= rows_ahead(job) and not by_length(job)


def task_names(job: Job) -> tuple[str, ...]:
    """Return the names of the table's tasks, in the order of a row's life."""
    tasks = tasks_of(job.algorithm)
    if has_episodes(job):
        tasks = tuple(names.PLAY if task == names.ROLLOUT else task for task in tasks if task != names.REWARD)
    tasks = (names.RANK, tasks[0], names.LENGTHS, *tasks[1:]) if by_length(job) else tasks
    return (*tasks, *names.further_uses(job.pacing.uses))


def generating_task(job: Job) -> str:
    """Return the name of the task that generates."""
    return names.PLAY if has_episodes(job) else names.ROLLOUT


def fields(job: Job) -> list[tq.Field]:
    """Return the columns of the table: those that its tasks need or give, and those of the source."""
    named = dict.fromkeys(("prompt_ids", names.DATA))
    for stage in stages(job):
        named |= dict.fromkeys((*stage.task.needs, *stage.task.gives))
    tokens = teacher_tokens(job.algorithm)
    columns = _FIELDS | {
        "teacher_ids": tq.Field("teacher_ids", "int32", (None, tokens)),
        "teacher_logprobs": tq.Field("teacher_logprobs", "float32", (None, tokens)),
    }
    return [columns[name] for name in named]


def tasks(job: Job) -> list[tq.Task]:
    """Return the tasks of the table."""
    return [stage.task for stage in stages(job)]


def stages(job: Job) -> list[Stage]:
    """Return the stages, one for each task of the table, in the order of a row's life."""
    return [_stage(task, job) for task in task_names(job)]


def _stage(task: str, job: Job) -> Stage:
    """Return the stage of a task: its columns, and how many rows one call gets. A further use of rows has all of the
    first."""
    if task in names.further_uses(job.pacing.uses):
        first = _stage(names.TRAIN, job)
        return msgspec.structs.replace(first, task=msgspec.structs.replace(first.task, name=task))
    needs, gives = _columns(task, job)
    whole = defaults_of(job.algorithm.kind).compares and task in (names.ADVANTAGE, names.TRAIN)
    declared = tq.Task(
        task,
        needs=needs,
        gives=gives,
        groups=_complete(job) if whole else None,
        selector=_selector(task, job),
        time_limit_s=HELD_S_MAX if task in _LONG else None,
    )
    prompts = job.trainer.prompts_per_step
    if whole:
        return Stage(task=declared, groups=prompts, at_least=_at_least(task, job, prompts))
    if task in (names.ROLLOUT, names.PLAY):
        return _generating(declared, job)
    rows = min(_rows(task, job), rows_ahead(job))
    return Stage(task=declared, rows=rows, at_least=_at_least(task, job, rows))


def _complete(job: Job) -> tq.Complete:
    """Return which groups are trained: whole ones, or those of which enough members are left."""
    least = job.sampling.group_min
    return tq.Complete(min_size=least, incomplete=tq.DeliverPartial()) if least else tq.Complete()


def _selector(task: str, job: Job) -> tq.Selector:
    if task in (names.ROLLOUT, names.PLAY) and by_length(job):
        return tq.Priority()
    return tq.OldestVersionFirst() if task == names.TRAIN else tq.Fifo()


def _generating(task: tq.Task, job: Job) -> Stage:
    """Return a stage that keeps the slots of its engine full. In the order of the data it leases whole groups: the
    source puts them so."""
    slots = max(engine.slots for engine in job.engine)
    if job.reproducible:
        size = job.sampling.group_size
        return Stage(task=task, rows=size, slots=max(slots, size))
    leases = 1 if takes_whole_steps(job) else _LEASES
    rows = max(1, min(slots // leases, rows_ahead(job)))
    return Stage(task=task, rows=rows, at_least=1, slots=slots)


def _rows(task: str, job: Job) -> int:
    """The most rows of one call of a stage."""
    if task in (names.RANK, names.LENGTHS, names.ADVANTAGE, names.TRAIN, names.TRAIN_CRITIC):
        return batch_rows(job)
    return _REWARD_ROWS if task == names.REWARD else _SCORED_ROWS


def _at_least(task: str, job: Job, most: int) -> int:
    """The fewest rows or groups that a stage begins with; 0: all of them."""
    if task == names.ADVANTAGE:
        return 0 if job.algorithm.whiten else 1
    if task == names.LENGTHS:  # no row waits for it, and a lesson costs the cores of engines and trainer
        return max(1, most // _LESSONS)
    if task in (names.TRAIN, names.TRAIN_CRITIC):
        return min(job.trainer.at_least, most) if job.trainer.stream == "on" else 0
    return 1


def _columns(task: str, job: Job) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that a task needs and gives."""
    begun = BEGUN if in_parts(job) else ()
    mask = ("loss_mask",) if has_loss_mask(job) else ()
    ranked = (names.EXPECTED_TOKENS,) if by_length(job) else ()
    routes = ("routes",) if job.algorithm.router_replay else ()
    images = (names.IMAGES,) if job.data.images else ()
    several = has_several_environments(job)
    generates = {
        names.RANK: (("prompt_ids",), (names.EXPECTED_TOKENS, names.RANKER_VERSION)),
        names.LENGTHS: (("prompt_ids", "response_ids", *ranked), ()),
        names.ROLLOUT: (("prompt_ids", *images, *begun, *ranked), (*_GENERATED, *routes)),
        names.PLAY: (
            ("prompt_ids", names.DATA, names.EPISODE, *([names.ENVIRONMENT] if several else []), *ranked),
            (*_GENERATED, *routes, *mask, "rewards", "turn_rewards", *([names.REWARD_TERMS] if several else [])),
        ),
        names.REWARD: ((*_TEXT, names.DATA, "finish_reason"), ("rewards", names.REWARD_TERMS)),
        names.REFERENCE: ((*_TEXT, *images), ("ref_logprobs",)),
        names.PROXIMAL: ((*_TEXT, *images), ("prox_logprobs",)),
        names.VALUE: (_TEXT, ("values",)),
        names.TEACHER: (_TEXT, ("teacher_ids", "teacher_logprobs")),
    }
    if task in generates:
        return generates[task]
    gives = advantage_columns(job.algorithm) if task == names.ADVANTAGE else ()
    read = (*images, *_figure_columns(job)) if task == names.TRAIN else ()
    return tuple(dict.fromkeys((*columns_of(job.algorithm)[task], *mask, *read))), gives


def _figure_columns(job: Job) -> tuple[str, ...]:
    """Return the columns that the trainer reads for the figures of its steps alone."""
    kind = defaults_of(job.algorithm.kind)
    terms = kind.rewarded and (not has_episodes(job) or has_several_environments(job))
    return (
        *(("token_versions", "finish_reason") if kind.rollout else ()),
        *(("rewards",) if kind.rewarded else ()),
        *((names.REWARD_TERMS,) if terms else ()),
    )


def pacing(job: Job) -> tq.Pacing:
    """Return how far generation runs ahead of training. sft generates nothing, so its rows have no version and no
    clock."""
    if job.algorithm.kind == "sft":
        return tq.Pacing(names.TRAIN, batch_rows=batch_rows(job), depth=depth(job))
    if has_step_versions(job):  # which bounds the staleness
        return tq.Pacing(names.TRAIN, batch_rows=batch_rows(job), depth=depth(job), channel=names.POLICY)
    begins = names.PLAY if has_episodes(job) else names.ROLLOUT
    return tq.Pacing(
        names.TRAIN,
        batch_rows=batch_rows(job),
        depth=depth(job),
        max_staleness=staleness_when_new(job),
        on_stale=tq.Requeue(begins) if job.pacing.on_stale == "requeue" else tq.DropStale(),
        channel=names.POLICY,
    )


def retention(job: Job, *, records: bool = False) -> tq.Retention:
    """Return when columns end: with their last task, so that what only rewards or generators read does not wait for the
    checkpoint of its row. Where stale rows are generated again, all that this needs stays until they are trained, and
    nothing would end before its row. Rows that are recorded keep theirs, too. records: the server has a directory of
    the run, and the job wants its rows there."""
    if records:
        queue = job.queue
        return tq.Recorded(
            ".",
            bytes=int(queue.record_gib * GIB) or None,
            age_s=queue.record_days * DAY_S or None,
            required=queue.record == "on",
        )
    requeues = isinstance(pacing(job).on_stale, tq.Requeue)
    return tq.Acked() if requeues else tq.AckedColumns()


def limits(job: Job, *, records: bool = False) -> tq.Limits:
    """Return the most rows of the table: those ahead, those trained since the last checkpoint, and those that wait for
    others to share a file with. The arena bounds the bytes. records: see `retention`."""
    return tq.Limits(rows=rows_kept(job) + (ROWS_TO_RECORD if records else 0))


def create_table(queue: tq.Queue, job: Job, *, records: bool = False) -> tq.Table:
    """Create the table of the job, or return it if it exists with the same terms. `AlreadyExists` if it has others.
    records: see `retention`."""
    return queue.create_table(
        names.TABLE,
        fields=fields(job),
        tasks=tasks(job),
        limits=limits(job, records=records),
        pacing=pacing(job),
        retention=retention(job, records=records),
        replicas=job.ray.replicas,
        exist_ok=True,
    )


def stage_jobs(job: Job, directory: Path | None = None, *, site: str = "", weights: str = "") -> list[StageJob]:
    """Return the processes of the job at `site`: its engines there, and at the job's own site ("") everything else too.

    directory: folder of the run, where the trainer keeps its checkpoints. weights: address of the server that engines
    read weights from ("": that of the queue).
    """
    described = StageJob(
        name=names.PROMPTS,
        table=names.TABLE,
        factory=FACTORIES[names.PROMPTS],
        settings=msgspec.json.decode(msgspec.json.encode(job)),
        directory="" if directory is None else str(directory.absolute()),
        together=TRAINERS if names.TRAIN_CRITIC in task_names(job) else "",
    )
    generating = generating_task(job)
    processes = [_process(described, names.PROMPTS)]
    for stage in stages(job):
        name = stage.task.name
        if name == names.LENGTHS or name in names.further_uses(job.pacing.uses):
            continue  # `rank` serves it; `train` its further uses
        if name == generating and is_colocated(job):
            continue  # `train` serves it
        here = [n for n in range(_count(name, job)) if name != generating or engine_of(job, n).site == site]
        processes += [_process(described, name, stage, number) for number in here]
    if job.evaluation.path:
        processes.append(_process(described, names.EVALUATE))
    if is_colocated(job):
        processes = [
            msgspec.structs.replace(process, factory=_COLOCATED) if process.name == names.TRAIN else process
            for process in processes
        ]
    if site:
        processes = [process for process in processes if process.name == generating]
    return [msgspec.structs.replace(process, weights=weights) for process in processes]


def engine_of(job: Job, instance: int) -> EngineSettings:
    """Return the settings of the generating process with number `instance`. In an elastic job those beyond its counts
    were added while it runs, and are like the last; in others there are none (`NotFound`).
    """
    each = [engine for engine in job.engine for _ in range(engine.count)]
    if not 0 <= instance < (math.inf if job.elastic.max else len(each)):
        raise NotFound(
            f"there is no generating process {instance}: the job declares {counted(len(each), 'engine')} "
            "(engine[].count), numbered from 0; add to a count, or set elastic.max"
        )
    return each[min(instance, len(each) - 1)]


def evaluation_engine(job: Job) -> EngineSettings:
    """Return the engine that evaluates: one of this process, since new weights of a shared server would change the
    training rows.

    It is transformers, with the options of the job's first such engine; the built-in one for its model; vLLM for a
    model that needs several devices.
    """
    slots = max(engine.slots for engine in job.engine)
    here = [engine for engine in job.engine if engine.kind in ("transformers", "vllm")]
    if here and here[0].tensor_parallel > 1:
        return msgspec.structs.replace(here[0], count=1)
    if any(engine.kind == "builtin" for engine in job.engine):
        return EngineSettings(kind="builtin", slots=slots)
    options = next((engine.options for engine in here if engine.kind == "transformers"), {})
    return EngineSettings(kind="transformers", slots=slots, options=options)


def _process(described: StageJob, name: str, stage: Stage | None = None, instance: int = 0) -> StageJob:
    return msgspec.structs.replace(
        described,
        name=name,
        factory=FACTORIES[name],
        stage=stage,
        instance=instance,
        loop=name in LOOPS,
        together=_together(described, name),
        elastic=bool(described.settings["elastic"]["max"]) and name in (names.ROLLOUT, names.PLAY),
    )


def _together(described: StageJob, name: str) -> str:
    """The ranks of the policy's trainer work only together; where there is a critic, it and they."""
    if name == names.TRAIN:
        return described.together or names.TRAIN
    return described.together if name == names.TRAIN_CRITIC else ""


def _count(task: str, job: Job) -> int:
    """The number of processes of a task."""
    counts = {
        names.ROLLOUT: sum(engine.count for engine in job.engine),
        names.PLAY: sum(engine.count for engine in job.engine),
        names.REWARD: max((reward.processes for reward in job.reward), default=1),
        names.REFERENCE: job.reference.processes,
        names.VALUE: job.critic.processes,
        names.TEACHER: job.teacher.processes,
        names.TRAIN: job.trainer.ranks,
    }
    return counts.get(task, 1)
