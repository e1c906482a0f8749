"""Fills in the open settings of a job: an empty text, None, "auto". No torch here.

What depends on the machine (`devices`, see `transferqueue.workflows.job.devices.placement`) or on the model's files
stays open. A path that names a run becomes that of the run's model as it is now, so a resumed job has the same one.
"""

from __future__ import annotations

from typing import Final, TypeVar

from msgspec.structs import replace

from transferqueue.errors import UsageError
from transferqueue.workflows.job.run_files import adapter_directory, model_directory
from transferqueue.workflows.job.settings.adapter_config import adapter_config
from transferqueue.workflows.job.settings.defaults import defaults_of, filled, updates
from transferqueue.workflows.job.settings.job import (
    IN_TURN,
    AlgorithmSettings,
    Job,
    ScorerSettings,
    TrainerSettings,
)
from transferqueue.workflows.job.settings.sizes import publishes_adapters, staleness_when_new, versions_of_uses

Scorer = TypeVar("Scorer", bound=ScorerSettings)

_AHEAD: Final = {"sync": 0, "colocated": 0, "delayed": 1, "async": 1}
"""Depth of each mode."""
TIS_MAX: Final = 2.0
"""`algorithm.tis_max` of a job that generates ahead and leaves it open."""


def resolve(job: Job) -> Job:
    """Return `job` with nothing left open that the job itself decides. Resolving twice changes nothing."""
    algorithm = filled(_corrected(job))
    job = replace(job, algorithm=algorithm, name=job.name or f"{algorithm.kind}-{_last(job.model.path)}")
    path = model_directory(job.model.path)
    tokenizer = model_directory(job.model.tokenizer or path)
    job = replace(job, model=replace(job.model, path=path, tokenizer=tokenizer))
    job = replace(job, pacing=replace(job.pacing, depth=_depth(job), max_staleness=_staleness(job)))
    job = replace(job, trainer=_with_adapters(replace(job.trainer, stream=_stream(job))))
    job = replace(job, weights=replace(job.weights, lora=_lora(job)))
    return replace(
        job,
        reference=_scorer(job.reference, job.model.path if algorithm.kl > 0 else ""),
        critic=_scorer(job.critic),
        teacher=_scorer(job.teacher),
    )


def _corrected(job: Job) -> AlgorithmSettings:
    """Choose the old policy. Where rows are generated ahead or trained again it is the trainer's, with importance
    weights: else the clip would stop rows for what the policy has moved since they were drawn. A step of one update
    needs no process for that.
    """
    algorithm = job.algorithm
    rewarded, moves = defaults_of(algorithm.kind).rewarded, job.pacing.mode not in IN_TURN or job.pacing.uses > 1
    corrects = algorithm.old is None and moves and updates(algorithm) == 1 and rewarded
    old = algorithm.old or ("trainer" if corrects or algorithm.tis_max else "rollout")
    usual = TIS_MAX if corrects else 0.0
    return replace(algorithm, old=old, tis_max=usual if algorithm.tis_max is None else algorithm.tis_max)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _depth(job: Job) -> int:
    if job.pacing.depth is not None:
        return job.pacing.depth
    ahead = _AHEAD[job.pacing.mode]
    return max(ahead, staleness_when_new(job) or 0) if job.pacing.mode == "async" else ahead


def _staleness(job: Job) -> int:
    if job.pacing.max_staleness is not None:
        return job.pacing.max_staleness
    ahead = _AHEAD[job.pacing.mode] if job.pacing.depth is None else job.pacing.depth
    begun_early = -int(-job.pacing.over_sample // 1) - 1
    return max(ahead, begun_early) + versions_of_uses(job)


def _stream(job: Job) -> str:
    """Begin with the rows that are ready, unless the step needs the whole batch or the engine's device first."""
    if job.trainer.stream != "auto":
        return job.trainer.stream
    whole = job.algorithm.whiten or updates(job.algorithm) > 1 or job.pacing.mode == "colocated"
    return "off" if whole else "on"


def _lora(job: Job) -> str:
    if job.weights.lora or not job.trainer.lora_rank:
        return job.weights.lora
    return "adapter" if publishes_adapters(job) else "merged"


def _with_adapters(trainer: TrainerSettings) -> TrainerSettings:
    """Take rank, scale and layers from the adapters that training begins with."""
    if not trainer.lora_adapter:
        return trainer
    adapter = adapter_directory(trainer.lora_adapter)
    found = adapter_config(adapter)
    filled_in = replace(
        trainer,
        lora_adapter=adapter,
        lora_rank=found.rank,
        lora_alpha=found.alpha,
        lora_targets=tuple(sorted(found.targets)),
    )
    for key in ("lora_rank", "lora_alpha", "lora_targets"):
        given, own = getattr(trainer, key), getattr(filled_in, key)
        is_open = not trainer.lora_rank if key == "lora_alpha" else not given
        if not is_open and (sorted(given) if key == "lora_targets" else given) != (
            list(own) if key == "lora_targets" else own
        ):
            raise UsageError(
                f"trainer.{key}={given!r} with trainer.lora_adapter={trainer.lora_adapter!r}, which has {own!r}; leave "
                f"{key} out"
            )
    return filled_in


def _scorer(scorer: Scorer, path: str = "") -> Scorer:
    return replace(scorer, path=model_directory(scorer.path or path))
