"""The rules of a job that concern its algorithm (see `rules`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from transferqueue.errors import Impossible, UsageError
from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.defaults import defaults_of, filled, tasks_of, updates
from transferqueue.workflows.job.settings.job import AlgorithmSettings, Job
from transferqueue.workflows.job.settings.sizes import (
    depth,
    has_step_versions,
    staleness_when_new,
    versions_of_uses,
)


def _corrections(job: Job) -> None:
    algorithm = job.algorithm
    if algorithm.tis_max and algorithm.old == "rollout":
        raise UsageError(
            f'tis_max={algorithm.tis_max:g} with old="rollout": the mismatch would count twice, in the ratio and in '
            'its weight; set algorithm.old="trainer"'
        )
    if algorithm.kind in ("sft", "distill") and (algorithm.tis_max or algorithm.dual_clip):
        raise UsageError(
            f"tis_max={algorithm.tis_max or 0:g}, dual_clip={algorithm.dual_clip:g} with kind={algorithm.kind!r}: its "
            "loss has no ratio; leave them out"
        )
    if algorithm.clip_high and algorithm.clip_low and algorithm.clip_high < algorithm.clip_low:
        raise UsageError(
            f"clip_high={algorithm.clip_high:g} is below clip_low={algorithm.clip_low:g}: a better action could grow "
            "less than a worse one shrinks"
        )


def _std_eps(job: Job) -> None:
    algorithm, kind = filled(job.algorithm), job.algorithm.kind
    is_divided = defaults_of(kind).compares and kind != "rloo" and algorithm.std != "none"
    if not is_divided and algorithm.std_eps != AlgorithmSettings(kind=kind).std_eps:
        raise UsageError(
            f'std_eps={algorithm.std_eps:g} with kind="{kind}", std="{algorithm.std}": no reward is divided by a '
            "deviation; leave it out"
        )


def _token_staleness(job: Job) -> None:
    mask, kind, pacing = job.algorithm.token_staleness.mask, job.algorithm.kind, job.pacing
    if mask and kind == "sft":
        raise UsageError(f'token_staleness.mask={mask} with kind="sft": no version drew its tokens; leave it out')
    if mask and has_step_versions(job):
        raise UsageError(
            f"token_staleness.mask={mask} with reproducible=true: all tokens of a step have the same version, so it "
            "would leave out none or all of them; leave it out, or set reproducible=false"
        )
    oldest = oldest_version(job) + versions_of_uses(job)
    if mask and mask >= oldest:
        raise UsageError(
            f"token_staleness.mask={mask} with mode={pacing.mode!r} and max_staleness={oldest}: no token of a step is "
            f"older than {oldest}, so none would be left out; give less, or leave it out"
        )


def _staleness_of(job: Job) -> None:
    pacing = job.pacing
    if pacing.staleness_of == "oldest":
        return
    given = f'staleness_of="{pacing.staleness_of}"'
    if job.algorithm.kind == "sft":
        raise UsageError(f'{given} with kind="sft": its rows have no column of token versions; leave it out')
    if has_step_versions(job):
        raise UsageError(
            f"{given} with reproducible=true: all tokens of a step have the same version; leave it out, or set "
            "reproducible=false"
        )
    goes_on = job.sampling.budget or pacing.over_sample > 1 or job.elastic.max
    in_flight = pacing.mode == "async" and job.weights.in_flight
    if not in_flight and not (goes_on and oldest_version(job)):
        raise UsageError(
            f"{given} with mode={pacing.mode!r} and weights.in_flight={str(job.weights.in_flight).lower()}: all tokens "
            'of a row have the same version; leave it out, or set mode="async" and in_flight=true'
        )


def _router_replay(job: Job) -> None:
    if not job.algorithm.router_replay:
        return
    if not defaults_of(job.algorithm.kind).rollout:
        raise UsageError(f'router_replay=true with kind="{job.algorithm.kind}": no engine draws its tokens')
    for place, engine in enumerate(job.engine):
        if engine.kind not in ("transformers", "vllm"):
            raise UsageError(
                f'router_replay=true with engine.{place}.kind="{engine.kind}": it gives no routes; set '
                'kind="transformers" or "vllm", or leave it out'
            )
    if names.PROXIMAL in tasks_of(filled(job.algorithm)):
        raise UsageError(
            'router_replay=true with old="trainer": those log-probs are computed without routes; set '
            'algorithm.old="rollout", or leave it out'
        )
    trainer = job.trainer
    if trainer.gradient_checkpointing or trainer.parallel == "fsdp2":
        raise UsageError(
            f"router_replay=true with gradient_checkpointing={trainer.gradient_checkpointing}, "
            f'parallel="{trainer.parallel}": layers that are computed again, or sharded, choose experts anew; set '
            'gradient_checkpointing=false and parallel="single" or "ddp", or leave it out'
        )


def oldest_version(job: Job) -> int:
    """The most versions between the weights of a row and the step that trains it first."""
    staleness = staleness_when_new(job)
    return math.ceil(depth(job)) if staleness is None else staleness


def _entropy(job: Job) -> None:
    if job.algorithm.entropy and not defaults_of(job.algorithm.kind).rewarded:
        raise UsageError(
            f"entropy={job.algorithm.entropy:g} with kind={job.algorithm.kind!r}, which explores nothing; leave it out"
        )


def _kl(job: Job) -> None:
    algorithm = job.algorithm
    if algorithm.kl and algorithm.kind == "sft":
        raise UsageError(
            f'kl={algorithm.kl:g} with kind="sft": nothing is drawn, so there is no divergence to estimate; leave it '
            "out"
        )
    if algorithm.kl and algorithm.kl_in == "reward" and not defaults_of(algorithm.kind).rewarded:
        raise UsageError(f'kl_in="reward" with kind={algorithm.kind!r}, which has no reward; set kl_in="loss"')


def _distillation(job: Job) -> None:
    algorithm = job.algorithm
    if algorithm.kind != "distill" and algorithm.top_k:
        raise UsageError(f"top_k={algorithm.top_k} is read by distill alone, and kind={algorithm.kind!r}; leave it out")


def _updates(job: Job) -> None:
    algorithm, trainer = job.algorithm, job.trainer
    if algorithm.minibatches > trainer.prompts_per_step:
        raise Impossible(
            f"minibatches={algorithm.minibatches} of prompts_per_step={trainer.prompts_per_step}: some would have no "
            f"prompt; give at most {trainer.prompts_per_step}"
        )
    if (
        trainer.stream == "on"
        and algorithm.whiten is not False
        and (algorithm.whiten or defaults_of(algorithm.kind).whiten)
    ):
        raise UsageError(
            'whiten with stream="on": whitening needs the batch; use stream="auto", or set algorithm.whiten=false'
        )
    if trainer.stream == "on" and updates(algorithm) > 1:
        raise UsageError(
            f'epochs={algorithm.epochs}, minibatches={algorithm.minibatches} with stream="on": several updates need '
            'the batch; use stream="auto"'
        )


ALGORITHM_RULES: Final[tuple[Callable[[Job], None], ...]] = (
    _corrections,
    _std_eps,
    _token_staleness,
    _staleness_of,
    _router_replay,
    _entropy,
    _kl,
    _distillation,
    _updates,
)
