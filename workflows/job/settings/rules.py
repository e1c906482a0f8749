"""The rules that a job must satisfy before it starts, between its tables, each refusal with its arithmetic. No torch
here.

A rule is a function that raises. `UsageError` says that two settings contradict each other or that one is unused;
`Impossible` that the job could never progress. Ranges of single numbers: `transferqueue.workflows.job.settings.ranges`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

from transferqueue.errors import Impossible, UsageError
from transferqueue.workflows.job.settings.algorithm_rules import ALGORITHM_RULES, oldest_version
from transferqueue.workflows.job.settings.data_rules import DATA_RULES, FUNCTION
from transferqueue.workflows.job.settings.defaults import defaults_of, filled, updates
from transferqueue.workflows.job.settings.job import IN_TURN, Devices, Job, RaySettings
from transferqueue.workflows.job.settings.ranges import check_ranges
from transferqueue.workflows.job.settings.sizes import (
    GIB,
    batch_rows,
    gib,
    group_rows,
    has_step_versions,
    play_bytes,
    records_rows,
    row_bytes,
    rows_ahead,
    rows_kept,
    staleness_when_new,
    tokens_of_row,
    versions_of_uses,
)

_SERVED: Final = ("vllm_server", "sglang_server", "openai")
_APART: Final = ("builtin", "transformers")
"""Engines of one device, which can compute each request apart from all others."""
_KEEPS_CACHES: Final = ("builtin", "transformers", "vllm", "vllm_server", "factory")
"""Engines that can go on with the caches of running requests under new weights; one of a factory may."""
LOGGERS: Final = ("tensorboard", "wandb", "mlflow")
_SET: Final = re.compile(r"[A-Za-z][\w-]{0,63}")
"""Name of a set of held-out prompts."""


def check(job: Job) -> None:
    """Raise `UsageError` or `Impossible` for the first rule that `job` breaks. Open settings are read as `resolve`
    would fill them."""
    check_ranges(job)
    for rule in _RULES:
        rule(job)


# ---------------------------------------------------------------- trainer and engines


def _tokens(job: Job) -> None:
    longest = tokens_of_row(job)
    passes = {"trainer.micro_tokens": job.trainer.micro_tokens}
    passes |= {
        f"{name}.tokens": getattr(job, name).tokens
        for name in ("reference", "critic", "teacher")
        if getattr(job, name).path
    }
    for key, tokens in passes.items():
        if tokens < longest:
            raise Impossible(
                f"{key}={tokens} is under one row: prompt_tokens_max={job.data.prompt_tokens_max} + "
                f"tokens_max={job.sampling.tokens_max} = {longest} tokens; give at least {longest}"
            )


def _ranks(job: Job) -> None:
    trainer = job.trainer
    if trainer.parallel == "single" and trainer.ranks > 1:
        raise UsageError(
            f'ranks={trainer.ranks} with parallel="single": one process trains; set trainer.parallel="fsdp2" or "ddp"'
        )
    if trainer.ranks > trainer.prompts_per_step:
        raise Impossible(
            f"ranks={trainer.ranks} share prompts_per_step={trainer.prompts_per_step}: some would have no prompt; give "
            "at most as many ranks"
        )
    if trainer.at_least > trainer.prompts_per_step:
        raise Impossible(
            f"at_least={trainer.at_least} is more than the prompts_per_step={trainer.prompts_per_step} of a step"
        )
    if trainer.warmup >= job.steps > 1 and trainer.warmup:
        raise UsageError(
            f"warmup={trainer.warmup} of steps={job.steps}: lr={trainer.lr:g} would never be reached; give fewer"
        )


def _engines(job: Job) -> None:
    if job.algorithm.kind == "sft":
        return
    if not job.engine:
        raise Impossible(
            f"engine=[] with kind={job.algorithm.kind!r}: nothing would generate; give engine = [{{ kind = "
            '"transformers" }]'
        )
    for place, engine in enumerate(job.engine):
        if engine.kind in _SERVED and not engine.url:
            raise UsageError(
                f'engine.{place}.kind={engine.kind!r} needs engine.{place}.url, such as "http://127.0.0.1:8000"'
            )
        if engine.kind not in _SERVED and engine.url:
            raise UsageError(
                f"engine.{place}.url={engine.url!r} with kind={engine.kind!r}, which runs here; kinds with a url are "
                f"{', '.join(_SERVED)}"
            )
        if (engine.kind == "factory") is not bool(engine.factory):
            raise UsageError(
                f"engine.{place}.kind={engine.kind!r} with engine.{place}.factory={engine.factory!r}: an engine of "
                'your own has kind="factory" and names its function as "module:function" or "file.py:function"; '
                "others have neither"
            )
        if engine.factory and not FUNCTION.fullmatch(engine.factory):
            raise UsageError(
                f'engine.{place}.factory={engine.factory!r} is not named as "module:function" or "file.py:function"'
            )
        if engine.kind in _APART and engine.tensor_parallel > 1:
            raise UsageError(
                f'engine.{place}.tensor_parallel={engine.tensor_parallel} with kind="{engine.kind}", which uses one '
                'device; set kind="vllm"'
            )


def _caches(job: Job) -> None:
    kv = job.weights.kv
    if kv == "recompute":
        return
    if job.algorithm.kind == "sft" or job.pacing.mode != "async" or not job.weights.in_flight:
        raise UsageError(
            f'weights.kv="{kv}": no request runs while weights change, unless pacing.mode="async" and '
            "weights.in_flight=true; leave it out"
        )
    for place, engine in enumerate(job.engine):
        if engine.kind not in _KEEPS_CACHES:
            raise UsageError(
                f'weights.kv="{kv}" with engine.{place}.kind="{engine.kind}", which cannot do that; kinds that can: '
                f"{', '.join(_KEEPS_CACHES)}"
            )


def _weights_of_servers(job: Job) -> None:
    """How a server gets new weights, and which serves none."""
    if job.algorithm.kind == "sft":
        return
    for place, engine in enumerate(job.engine):
        if engine.kind == "sglang_server" and not engine.options.get("weights"):
            raise UsageError(
                f'engine.{place}.options has no "weights": give an empty folder that the server sees under the same '
                "path; new weights are written there"
            )
        if engine.kind == "openai" and (oldest := oldest_version(job)) < job.steps - 1:
            raise Impossible(
                f'engine.{place}.kind="openai": an endpoint takes no weights, so all rows are of version 0, and step '
                f"{job.steps} would train rows that are {job.steps - 1} versions old; pacing.max_staleness={oldest} "
                f'allows {oldest + 1} steps: set kind="vllm_server", or '
                f"pacing.max_staleness={job.steps - 1 + versions_of_uses(job)} to train "
                "on the rows of a fixed policy"
            )


def _order(job: Job) -> None:
    """A reproducible run repeats bit for bit, whatever dies: what depends on the time is refused."""
    if not job.reproducible:
        return
    if not job.checkpoint.every:
        raise UsageError(
            "reproducible=true with checkpoint.every=0: a trainer that dies would go on with new moments of the "
            "optimizer; give checkpoint.every, or set reproducible=false"
        )
    if job.evaluation.patience:
        raise UsageError(
            f"reproducible=true with evaluation.patience={job.evaluation.patience}: training goes on while evaluations "
            "are made, so the time would decide the last step; leave it out, or set reproducible=false"
        )
    if job.algorithm.kind == "sft":
        return
    for place, engine in enumerate(job.engine):
        if engine.kind not in _APART:
            raise UsageError(
                f"reproducible=true with engine.{place}.kind={engine.kind!r}, which batches requests as they come, so "
                "that a run does not repeat bit for bit. It would with one sequence at a time, or with kernels whose "
                "sums do not depend on the batch, and a job cannot ask for either; set reproducible=false, or "
                'kind="transformers"'
            )
        first = job.engine[0]
        if (engine.kind, engine.model, engine.options) != (first.kind, first.model, first.options):
            raise UsageError(
                f"reproducible=true with engine.{place}, whose kind, model or options are not those of engine.0: the "
                "time decides which engine generates a row; make them equal, or set reproducible=false"
            )
    if job.reference.sync_every:
        raise UsageError(
            f"reproducible=true with reference.sync_every={job.reference.sync_every}: the time would decide which "
            "version the reference takes; leave it out, or set reproducible=false"
        )
    if job.sampling.refills:
        raise UsageError(
            f"reproducible=true with sampling.refills={job.sampling.refills}: an environment that is late once would "
            "give the row other tokens; leave it out, or set reproducible=false"
        )
    parts = {"sampling.budget": job.sampling.budget, "pacing.over_sample": job.pacing.over_sample}
    for key, value in parts.items():
        if value > (1 if key == "pacing.over_sample" else 0):
            raise UsageError(
                f"reproducible=true with {key}={value:g}: responses would be generated in parts, whose ends depend on "
                "the time; set reproducible=false, or leave it out"
            )


def _order_ahead(job: Job) -> None:
    """Where rows are generated ahead in the order of the data, a prompt's number says which step trains it. So no row
    may be dropped, whose place another takes."""
    drops = {
        "algorithm.filter_equal=true": bool(filled(job.algorithm).filter_equal),
        **{
            f'{table}.{place}.on_error="drop"': term.on_error == "drop"
            for table in ("reward", "environment")
            for place, term in enumerate(getattr(job, table))
        },
        'on="ray" and ray.replicas=1': job.on == "ray" and job.ray.replicas == 1,
    }
    sampler = job.data.sampler.by if job.reproducible else ""
    if sampler and (job.pacing.mode not in IN_TURN or job.on == "ray" or any(drops.values())):
        raise UsageError(
            f"reproducible=true with data.sampler.by={sampler!r}: the time would decide which pass rates are known "
            'when a step is chosen; set pacing.mode="sync" or "colocated", drop no rows (filter_equal, on_error), and '
            'leave on="ray" out; or leave reproducible out'
        )
    for key, may_drop in drops.items():
        if may_drop and has_step_versions(job):
            raise UsageError(
                f"reproducible=true and mode={job.pacing.mode!r} with {key}: later prompts would take the places of "
                'rows that are dropped, with weights that the time decides; set pacing.mode="sync", or leave '
                "reproducible out"
            )


# ---------------------------------------------------------------- dispatch


def _dispatch(job: Job) -> None:
    by_length = job.dispatch.kind == "length"
    if by_length and job.algorithm.kind == "sft":
        raise UsageError('dispatch.kind="length" with kind="sft": nothing is generated; leave it out')
    if by_length and job.reproducible:
        raise UsageError(
            'dispatch.kind="length" with reproducible=true: rows would be generated in an order that depends on the '
            "time; set reproducible=false"
        )


# ---------------------------------------------------------------- elastic


def _elastic(job: Job) -> None:
    elastic, count = job.elastic, sum(engine.count for engine in job.engine)
    if not elastic.max:
        return
    if job.algorithm.kind == "sft":
        raise UsageError(f'elastic.max={elastic.max} with kind="sft", which generates nothing; leave it out')
    if not elastic.min <= count <= elastic.max:
        raise Impossible(
            f"elastic.min={elastic.min}, max={elastic.max} with {count} processes of engine: the job starts with "
            "these; give a min and a max around them"
        )
    if job.dispatch.kind == "length":
        raise UsageError(
            f'elastic.max={elastic.max} with dispatch.kind="length", whose plans divide rows among a fixed number of '
            "engines; leave one of them out"
        )
    last = job.engine[-1]
    if last.kind in _SERVED:
        raise UsageError(
            f"elastic.max={elastic.max} with engine.{len(job.engine) - 1}.kind={last.kind!r}: one more process would "
            "send requests to the same server, and nothing more would generate; start further servers, or leave "
            "elastic out"
        )


def _sites(job: Job) -> None:
    sites = sorted({engine.site for engine in job.engine} - {""})
    if sites and job.elastic.max:
        raise UsageError(
            f"elastic.max={job.elastic.max} with engines at {', '.join(sites)}: processes are added at the job's own "
            "site; leave one of them out"
        )
    if sites and not job.queue.address:
        raise UsageError(
            f'engine.site="{sites[0]}" without queue.address: the server of a run listens on its own machine alone; '
            "start transferqueue serve with a tcp address that "
            "the site can reach, and give queue.address"
        )


def _on_ray(job: Job) -> None:
    if job.on != "ray":
        if job.ray != RaySettings():
            raise UsageError('ray with on="processes": nothing reads it; set on="ray", or leave it out')
        return
    if sites := sorted({engine.site for engine in job.engine} - {""}):
        raise UsageError(
            f'engine.site="{sites[0]}" with on="ray": Ray places engines itself; leave it out, and set '
            "ray.options.rollout"
        )
    if job.queue.durability == "disk":
        raise UsageError(
            'queue.durability="disk" with on="ray": rows lie in the memory of several nodes, and a snapshot beside '
            "each checkpoint keeps them; leave it out"
        )


def _record(job: Job) -> None:
    if not records_rows(job):
        return
    given = f'queue.record="{job.queue.record}"'
    if job.on == "ray":
        raise UsageError(f'{given} with on="ray": the server of a run on Ray has no directory of records; leave it out')
    if job.queue.address:
        raise UsageError(
            f'{given} with queue.address="{job.queue.address}": that server has a directory of records of '
            "its own; leave one of both out"
        )


# ---------------------------------------------------------------- pacing


def _pacing(job: Job) -> None:
    pacing = job.pacing
    _room_for_uses(job)
    at_hand = f"mode={pacing.mode!r} with depth={pacing.depth} and max_staleness={pacing.max_staleness}"
    at_hand += f", {versions_of_uses(job)} of it for uses={pacing.uses}" if pacing.uses > 1 else ""
    surplus, staleness = math.ceil(pacing.over_sample) - 1, staleness_when_new(job)
    if pacing.mode in IN_TURN and (pacing.depth or (staleness and not surplus)):
        raise Impossible(f"{at_hand}: a synchronous job has 0 of both, and one that over-samples may have staleness")
    if pacing.mode == "delayed" and (pacing.depth not in (None, 1) or staleness not in (None, 1)):
        raise Impossible(f'{at_hand}: a one-step delay is 1 of both; mode="async" takes others')
    if pacing.mode == "async" and (pacing.depth == 0 or staleness == 0):
        raise Impossible(f'{at_hand}: nothing could be generated ahead; give at least 1 of both, or mode="sync"')
    if pacing.over_sample > 1 and pacing.mode != "sync":
        why = (
            "rows would be generated while the trainer has the device"
            if pacing.mode == "colocated"
            else "a job with depth begins more than a batch anyway"
        )
        raise Impossible(
            f'over_sample={pacing.over_sample:g} with mode={pacing.mode!r}: {why}; set mode="sync", or leave '
            "over_sample out"
        )
    if staleness is not None and surplus > staleness:
        raise Impossible(
            f"over_sample={pacing.over_sample:g} with max_staleness={pacing.max_staleness}: the last rows begun would "
            f"be trained {surplus} versions later; give at least {surplus + versions_of_uses(job)}"
        )
    if pacing.mode != "async" and job.weights.every > 1:
        raise Impossible(
            f"weights.every={job.weights.every} with mode={pacing.mode!r}: rows would be generated with weights up to "
            f'{job.weights.every - 1} steps older than the mode allows; set 1, or mode="async"'
        )
    if pacing.mode == "async" and staleness is not None and job.weights.every > staleness:
        raise Impossible(
            f"weights.every={job.weights.every} with max_staleness={pacing.max_staleness}: versions are numbered by "
            f"steps, so each publication makes every row that was generated ahead {job.weights.every} versions old, "
            f"too old to be trained; set pacing.max_staleness={job.weights.every + versions_of_uses(job)}, or "
            f"weights.every={max(1, staleness)}"
        )


def _room_for_uses(job: Job) -> None:
    """Further uses come one step later each, so a bound on staleness must have room for them."""
    pacing, ahead = job.pacing, int(job.pacing.mode not in IN_TURN)
    if pacing.uses > 1 and pacing.max_staleness is not None and pacing.max_staleness < ahead + versions_of_uses(job):
        raise Impossible(
            f"uses={pacing.uses} with max_staleness={pacing.max_staleness} and mode={pacing.mode!r}: at its last use a "
            f"row is at least {ahead + versions_of_uses(job)} versions old; give at least that, or fewer uses"
        )


def _uses(job: Job) -> None:
    """Which jobs train rows again: those whose loss corrects for weights that have moved since, once a use."""
    algorithm, given = job.algorithm, f"pacing.uses={job.pacing.uses}"
    if job.pacing.uses == 1:
        return
    if algorithm.kind == "sft":
        raise UsageError(f'{given} with kind="sft": its rows are the data; leave it out, and set data.epochs')
    if algorithm.kind == "distill":
        raise UsageError(
            f'{given} with kind="distill": its loss has no ratio, and so no correction for weights that have moved '
            "since the tokens were drawn; leave it out"
        )
    if defaults_of(algorithm.kind).critic:
        raise UsageError(
            f'{given} with kind="{algorithm.kind}": its critic takes each row once, in the step of the policy; leave '
            "it out, and set algorithm.epochs"
        )
    if (algorithm.old == "trainer" or algorithm.tis_max) and updates(algorithm) > 1:
        raise UsageError(
            f'{given} with old="trainer" and epochs={algorithm.epochs}, minibatches={algorithm.minibatches}: those '
            "log-probs are computed once, by the policy before the first use of a row; set "
            'algorithm.old="rollout", or one update a step'
        )
    is_open = algorithm.old is None and updates(algorithm) == 1  # so it is the trainer's, too
    if (algorithm.old == "trainer" and not algorithm.tis_max) or (is_open and algorithm.tis_max == 0):
        raise UsageError(
            f'{given} with old="trainer" and no tis_max: nothing would correct for weights that have moved since the '
            'tokens were drawn; leave both out, or set algorithm.old="rollout"'
        )
    if not job.checkpoint.every:
        raise UsageError(
            f"{given} with checkpoint.every=0: a trainer that dies would not know which uses of a row its weights "
            "have; give checkpoint.every"
        )
    if job.reproducible and job.on == "ray" and job.ray.replicas == 1:
        raise UsageError(
            f'{given} and reproducible=true with on="ray" and ray.replicas=1: a row that is lost with a node after '
            "its first use has no other; set ray.replicas=2, or leave one of them out"
        )


def _colocated(job: Job) -> None:
    """Mode colocated has one process for engine and trainer, on one device."""
    if job.pacing.mode != "colocated":
        return
    engines, at_hand = job.engine, 'mode="colocated"'
    if job.algorithm.kind == "sft":
        raise UsageError(f'{at_hand} with kind="sft", which generates nothing; leave it out')
    if served := [engine.kind for engine in engines if engine.kind in _SERVED]:
        raise UsageError(
            f"{at_hand} with engine.kind={served[0]!r}: a server has devices of its own and cannot hand them to the "
            'trainer; set engine.kind="vllm", or mode="sync"'
        )
    counts = {
        "engine processes": sum(engine.count for engine in engines),
        "trainer.ranks": job.trainer.ranks,
        "engine.0.tensor_parallel": engines[0].tensor_parallel,
    }
    for key, count in counts.items():
        if count != 1:
            raise UsageError(
                f'{at_hand} with {count} {key}: one process generates and trains, on one device; set 1, or mode="sync"'
            )
    others = {
        'on="ray"': job.on == "ray",
        "elastic.max": bool(job.elastic.max),
        'dispatch.kind="length"': job.dispatch.kind == "length",
        "engine.0.site": bool(engines[0].site),
        'trainer.stream="on"': job.trainer.stream == "on",
    }
    for key, is_set in others.items():
        if is_set:
            raise UsageError(
                f"{at_hand} with {key}: the engine is in the trainer's process, and has the device until the step's "
                'rows have all come; leave it out, or set mode="sync"'
            )
    named = {devices for devices in (engines[0].devices, job.trainer.devices) if devices != "auto"}
    if len(named) > 1 or any(len(devices) != 1 for devices in named if isinstance(devices, tuple)):
        raise UsageError(
            f"{at_hand} with engine.0.devices={_listed(engines[0].devices)} and "
            f"trainer.devices={_listed(job.trainer.devices)}: both use one device in turn; name one GPU in one of them"
        )


def _listed(devices: Devices) -> str:
    return str([*devices]) if isinstance(devices, tuple) else repr(devices)


# ---------------------------------------------------------------- evaluation, figures, checkpoints


def _loggers(job: Job) -> None:
    for place, name in enumerate(job.log.to):
        if name not in LOGGERS and not FUNCTION.fullmatch(name):
            raise UsageError(
                f'log.to.{place}={name!r}: give {", ".join(LOGGERS)}, or a function of your own, "module:function"'
            )


def _evaluation(job: Job) -> None:
    evaluation = job.evaluation
    names = [each.name for each in evaluation.sets]
    if names and not evaluation.path:
        raise UsageError(f"evaluation.sets has {names[0]!r} without evaluation.path, the first set; set it")
    for place, name in enumerate(names):
        if not _SET.fullmatch(name) or name == "reward" or name in names[:place]:
            raise UsageError(
                f"evaluation.sets.{place}.name={name!r}: its figures begin with it; give letters, digits, - and _, "
                'each set another, and none "reward"'
            )
    _pass_at(job)
    needed = {"evaluation.path": evaluation.path, "evaluation.every": evaluation.every}
    if evaluation.patience and (missing := [key for key, value in needed.items() if not value]):
        raise UsageError(f"evaluation.patience={evaluation.patience} without {missing[0]}; set it")
    if evaluation.figure and not (evaluation.patience or job.checkpoint.best):
        raise UsageError(
            f"evaluation.figure={evaluation.figure!r} is compared by evaluation.patience and checkpoint.best; set one"
        )
    if evaluation.figure and not _is_evaluated(evaluation.figure, job):
        raise UsageError(
            f"evaluation.figure={evaluation.figure!r}: evaluations give {', '.join(_measures(job))}"
            + ("".join(f", and each as {name}/…" for name in names))
        )


def _pass_at(job: Job) -> None:
    evaluation = job.evaluation
    if not evaluation.pass_at:
        return
    most = max(evaluation.samples, *(each.samples for each in evaluation.sets), 0)
    if (largest := max(evaluation.pass_at)) > most:
        raise UsageError(
            f"evaluation.pass_at has {largest}, and evaluation.samples={evaluation.samples}: pass@k is estimated from "
            f"at least k responses; set evaluation.samples={largest}"
        )
    if evaluation.temperature == 0 and most > 1:
        raise UsageError(
            f"evaluation.pass_at={list(evaluation.pass_at)} with temperature=0: all responses to a prompt are equal; "
            "set evaluation.temperature=1.0"
        )
    if not defaults_of(job.algorithm.kind).rewarded:
        raise UsageError(f"evaluation.pass_at with kind={job.algorithm.kind!r}, which has no reward; leave it out")


def _measures(job: Job) -> list[str]:
    """Return the figures of an evaluation that can be compared, but those of single rewards."""
    if defaults_of(job.algorithm.kind).rewarded:
        return ["reward", *(f"pass@{k}" for k in job.evaluation.pass_at)]
    return ["loss" if job.algorithm.kind == "sft" else "kl"]


def _is_evaluated(figure: str, job: Job) -> bool:
    name, slash, rest = figure.partition("/")
    own = rest if slash and name in {each.name for each in job.evaluation.sets} else figure
    is_term = own.startswith("reward/") and defaults_of(job.algorithm.kind).rewarded
    return is_term or own in _measures(job)


def _best(job: Job) -> None:
    if not job.checkpoint.best:
        return
    needed = {
        "evaluation.path": job.evaluation.path,
        "evaluation.every": job.evaluation.every,
        "checkpoint.every": job.checkpoint.every,
    }
    if missing := [key for key, value in needed.items() if not value]:
        raise UsageError(
            f'checkpoint.best="evaluation" without {missing[0]}: it compares evaluations of checkpoints; set it'
        )
    every = math.lcm(job.checkpoint.every, job.weights.every)
    if job.evaluation.every % every:
        raise UsageError(
            f'checkpoint.best="evaluation" with evaluation.every={job.evaluation.every}, '
            f"checkpoint.every={job.checkpoint.every} and weights.every={job.weights.every}: some evaluated steps "
            f"would have no checkpoint of their weights; give evaluation.every a multiple of {every}"
        )


# ---------------------------------------------------------------- memory


def _memory(job: Job) -> None:
    memory, row = int(job.queue.memory_gib * GIB), row_bytes(job)
    group = group_rows(job) * row
    if group > memory:
        raise Impossible(
            f"a group of {group_rows(job)} rows has up to {gib(group)} ({row:,} bytes a row: prompt_tokens_max="
            f"{job.data.prompt_tokens_max}, tokens_max={job.sampling.tokens_max}); memory_gib={job.queue.memory_gib:g}"
        )
    ahead = rows_ahead(job)
    if ahead * row > memory:
        raise Impossible(
            f"prompts_per_step={job.trainer.prompts_per_step} × group_size={group_rows(job)}, with the batches ahead, "
            f"are {ahead:,} rows, up to {gib(ahead * row)}; memory_gib={job.queue.memory_gib:g}"
        )
    kept, played = rows_kept(job), play_bytes(job)
    held = kept * row + played
    if held > memory:
        top_k = f", top_k={job.algorithm.top_k}" if job.algorithm.top_k else ""
        steps = max(1, int(((memory - played) / row - ahead) // batch_rows(job)) - job.pacing.uses + 1)
        raise Impossible(
            f"checkpoint.every={job.checkpoint.every}{top_k} keep {kept:,} rows, up to {gib(held)}; "
            f"memory_gib={job.queue.memory_gib:g}; set queue.memory_gib={math.ceil(held / GIB)}, or "
            f"checkpoint.every={steps}"
        )


_RULES: Final[tuple[Callable[[Job], None], ...]] = (
    *DATA_RULES,
    *ALGORITHM_RULES,
    _ranks,
    _engines,
    _caches,
    _order,
    _order_ahead,
    _dispatch,
    _elastic,
    _sites,
    _on_ray,
    _record,
    _uses,
    _pacing,
    _weights_of_servers,
    _colocated,
    _loggers,
    _evaluation,
    _best,
    _tokens,
    _memory,
)
