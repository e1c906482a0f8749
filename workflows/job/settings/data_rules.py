"""The rules of a job that concern its models, data, rewards, environments and sampling (see `rules`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import urlsplit

from transferqueue.errors import Impossible, UsageError, listing
from transferqueue.workflows.job.settings.defaults import KINDS, defaults_of
from transferqueue.workflows.job.settings.environment_factories import environment_name
from transferqueue.workflows.job.settings.job import Job, SamplerSettings
from transferqueue.workflows.job.settings.sizes import LORA_RANKS, merged_for, publishes_adapters

FUNCTION: Final = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")
_DTYPES: Final = ("float32", "bfloat16", "float16")
_OF_THE_CALL: Final = ("tools", "tokenize", "add_generation_prompt", "continue_final_message", "conversation")
"""Arguments of a tokenizer's ``apply_chat_template`` that ``model.template_args`` may not have."""
_ENVIRONMENT: Final = re.compile(r"\w[\w-]{0,63}", re.ASCII)
"""Name of an environment: it may be that of a function, or of a host. Drop reasons end with it."""


# ---------------------------------------------------------------- models and data


def _paths(job: Job) -> None:
    if not job.model.path.strip():
        raise UsageError('model.path="": required')
    paths = {f"data.sources.{place}.path": source.path for place, source in enumerate(job.data.sources)}
    paths |= {f"evaluation.sets.{place}.path": each.path for place, each in enumerate(job.evaluation.sets)}
    if not job.data.sources:
        paths["data.path"] = job.data.path
    for key, path in paths.items():
        if not path.strip():
            raise UsageError(f'{key}="": required; a file or directory of prompts: {key} = "prompts.jsonl"')


def _template_arguments(job: Job) -> None:
    for name in job.model.template_args:
        if name in _OF_THE_CALL:
            raise UsageError(
                f"model.template_args.{name}: the job sets it itself; leave it out"
                + ("; a file with tools is model.tools" if name == "tools" else "")
            )


def _dtypes(job: Job) -> None:
    dtypes = {
        "model.dtype": job.model.dtype,
        "trainer.master_dtype": job.trainer.master_dtype,
        "weights.dtype": job.weights.dtype,
    }
    for key, dtype in dtypes.items():
        if dtype and dtype not in _DTYPES:
            raise UsageError(f"{key}={dtype!r}: give {', '.join(_DTYPES)}")


def _data(job: Job) -> None:
    responses = {"data.response": job.data.response}
    responses |= {f"data.sources.{place}.response": source.response for place, source in enumerate(job.data.sources)}
    responses["evaluation.response"] = job.evaluation.response
    responses |= {f"evaluation.sets.{place}.response": each.response for place, each in enumerate(job.evaluation.sets)}
    for key, response in responses.items():
        if response and job.algorithm.kind != "sft":
            raise UsageError(
                f"{key}={response!r} is read by sft alone, and kind={job.algorithm.kind!r}; a reward gets the column "
                "by its name, or by data.columns"
            )
    if job.data.turns == "all" and (job.algorithm.kind != "sft" or any(responses.values())):
        raise UsageError(
            f'data.turns="all" with kind={job.algorithm.kind!r} and data.response={job.data.response!r}: it is for '
            'messages whose turns of the assistant sft learns; set data.turns="last", or leave the response out'
        )


def _images(job: Job) -> None:
    """What takes no images is refused, and not run without them."""
    if not job.data.images:
        return
    engines = {
        f'engine.{place}.kind="{engine.kind}"': engine.kind != "transformers" for place, engine in enumerate(job.engine)
    }
    others = engines | {
        f'algorithm.kind="{job.algorithm.kind}"': job.algorithm.kind in ("ppo", "distill", "sft"),
        "environment": bool(job.environment),
        "reward.model": any(reward.model for reward in job.reward),
        f"trainer.lora_rank={job.trainer.lora_rank}": job.trainer.lora_rank > 0,
        "trainer.lora_adapter": bool(job.trainer.lora_adapter),
        f'trainer.parallel="{job.trainer.parallel}"': job.trainer.parallel != "single",
        "algorithm.router_replay=true": job.algorithm.router_replay,
    }
    for key, is_without in others.items():
        if is_without:
            raise UsageError(
                f"data.images={job.data.images!r} with {key}, which takes no images in a job; leave one of both out"
            )


def _mixture(job: Job) -> None:
    data = job.data
    if not data.sources:
        return
    if data.path or data.subset:
        raise UsageError(
            f"data.path={data.path!r} with data.sources: both name the data; make it one of data.sources, or leave "
            "these out"
        )
    if data.epochs:
        raise UsageError(
            f"data.epochs={data.epochs} with data.sources: each source is passed over as often as its weight needs; "
            "leave it out, and set steps"
        )


def _sampler(job: Job) -> None:
    sampler = job.data.sampler
    if not sampler.by:
        if sampler != SamplerSettings():
            raise UsageError('data.sampler without by: the prompts follow the order of the data; set by="pass_rate"')
        return
    if sampler.by != "pass_rate" and not FUNCTION.fullmatch(sampler.by):
        raise UsageError(
            f'data.sampler.by={sampler.by!r}: give "pass_rate", or a function as "module:function" or '
            '"file.py:function"'
        )
    if not defaults_of(job.algorithm.kind).compares:
        raise UsageError(
            f"data.sampler.by={sampler.by!r} with kind={job.algorithm.kind!r}, which compares no responses to a "
            "prompt: there is no pass rate; leave it out"
        )
    if sampler.low > sampler.high:
        raise UsageError(f"data.sampler.low={sampler.low:g} is above high={sampler.high:g}: no prompt is between")
    if job.data.epochs:
        raise UsageError(
            f"data.epochs={job.data.epochs} with data.sampler: prompts come again by their pass rates; leave it out, "
            "and set steps"
        )


def _models_of_the_kind(job: Job) -> None:
    kind = job.algorithm.kind
    if kind == "ppo" and not job.critic.path:
        raise UsageError(
            'kind="ppo" needs critic.path: a model whose values the advantages are over; for one without a critic see '
            'kind="reinforce_pp"'
        )
    if kind != "ppo" and job.critic.path:
        raise UsageError(f"critic.path={job.critic.path!r} is read by ppo alone, and kind={kind!r}; leave it out")
    if kind == "distill" and not job.teacher.path:
        raise UsageError('kind="distill" needs teacher.path: the model to learn from')
    if kind != "distill" and job.teacher.path:
        raise UsageError(f"teacher.path={job.teacher.path!r} is read by distill alone, and kind={kind!r}; leave it out")
    if job.reference.path and not job.algorithm.kl:
        raise UsageError(
            f"reference.path={job.reference.path!r} with algorithm.kl=0: nothing reads its log-probs; set algorithm.kl"
        )

    if job.reference.sync_every and not job.algorithm.kl:
        raise UsageError(
            f"reference.sync_every={job.reference.sync_every} with algorithm.kl=0: there is no reference; set "
            "algorithm.kl"
        )
    if job.reference.sync_every and job.reference.path not in ("", job.model.path):
        raise UsageError(
            f"reference.sync_every={job.reference.sync_every} with reference.path={job.reference.path!r}: a reference "
            "that takes the policy's weights begins as the policy; leave the path out"
        )


def _adapters(job: Job) -> None:
    trainer = job.trainer
    if trainer.lora_targets and not trainer.lora_rank and not trainer.lora_adapter:
        raise UsageError(
            f"trainer.lora_targets={list(trainer.lora_targets)} with lora_rank=0: there are no adapters; set "
            "trainer.lora_rank"
        )
    for target in trainer.lora_targets:
        if not target or "." in target:
            raise UsageError(
                f'trainer.lora_targets has {target!r}; give the last part of a layer\'s name, such as "q_proj"'
            )
    if trainer.lora_adapter and job.algorithm.kl and not job.reference.path:
        raise UsageError(
            f"trainer.lora_adapter={trainer.lora_adapter!r} with algorithm.kl={job.algorithm.kl:g}: the policy at its "
            "start has no directory of its own; set reference.path, to model.path for the model without adapters"
        )


# ---------------------------------------------------------------- rewards and sampling


def _published_adapters(job: Job) -> None:
    if not job.weights.lora:
        return
    if not job.trainer.lora_rank and not job.trainer.lora_adapter:
        raise UsageError(f'weights.lora="{job.weights.lora}" with lora_rank=0: there are no adapters; leave it out')
    if job.weights.lora == "adapter" and (what := merged_for(job)):
        raise UsageError(f'weights.lora="adapter" with {what}, which takes merged weights alone; leave it out')


def _lora_requests(job: Job) -> None:
    rank = job.trainer.lora_rank
    for place, engine in enumerate(job.engine):
        if engine.kind != "vllm" or not engine.options.get("enable_lora"):
            continue
        key = f"engine.{place}.options"
        if not rank and job.trainer.lora_adapter:
            continue  # its rank is read when the job is resolved
        if not publishes_adapters(job):
            raise UsageError(
                f"{key}.enable_lora with a job that publishes no adapters apart (trainer.lora_rank={rank}, "
                f'weights.lora="{job.weights.lora}"): vLLM would compute their products for nothing; leave it out'
            )
        if rank > LORA_RANKS[-1]:
            raise UsageError(
                f"{key}.enable_lora with trainer.lora_rank={rank}: vLLM takes adapters up to rank {LORA_RANKS[-1]}; "
                "leave it out"
            )
        given = engine.options.get("max_lora_rank", rank)
        if isinstance(given, int) and given < rank:
            raise UsageError(
                f"{key}.max_lora_rank={given} is less than trainer.lora_rank={rank}; leave it out, and vLLM gets "
                "a rank that holds them"
            )


def _rewards(job: Job) -> None:
    kind = job.algorithm.kind
    if defaults_of(kind).rewarded and not job.reward and not job.environment:
        raise UsageError(f'kind={kind!r} needs a reward: reward = [{{ function = "module:function" }}]')
    for key in ("reward", "environment"):
        if kind == "sft" and getattr(job, key):
            raise UsageError(
                f'{key} with kind="sft": it learns from data.response, and nothing is generated that could be scored; '
                "leave it out"
            )
    if job.reward and job.environment:
        raise UsageError(
            "reward with environment: episodes bring their own rewards; leave reward out, or make a function an "
            'environment of one turn: [[environment]] function = "module:function"'
        )
    for place, reward in enumerate(job.reward):
        _one_of(f"reward.{place}", reward, ("function", "model"))
        if not math.isfinite(reward.weight):
            raise UsageError(
                f"reward.{place}.weight={reward.weight}: give a finite number; 0 measures without rewarding"
            )
        if reward.model:
            _model_arguments(f"reward.{place}.args", reward.args)
    if job.reward and not any(reward.weight for reward in job.reward):
        raise UsageError(f"reward.0.weight={job.reward[0].weight}: every weight is 0, so nothing is rewarded; set one")


def _one_of(key: str, table: object, names: tuple[str, ...]) -> None:
    """Raise unless exactly one of these keys is given, and functions are named so that they can be found."""
    given = [name for name in names if getattr(table, name)]
    if len(given) != 1:
        raise UsageError(f"{key} has {' and '.join(given) or 'none'} of {listing(names)}; give exactly one")
    named = getattr(table, given[0])
    if given[0] in ("function", "factory", "agent") and not FUNCTION.fullmatch(named):
        raise UsageError(f'{key}.{given[0]}={named!r} is not named as "module:function" or "file.py:function"')


def _environments(job: Job) -> None:
    for place, environment in enumerate(job.environment):
        key = f"environment.{place}"
        _one_of(key, environment, ("factory", "function", "url", "agent"))
        if environment.url and not _is_address(environment.url):
            raise UsageError(f'{key}.url={environment.url!r}: give an address such as "http://127.0.0.1:8000"')
        if environment.url and (unknown := environment.args.keys() - {"action", "observation"}):
            raise UsageError(f"{key}.args.{min(unknown)}: with a url, args has action and observation alone")
        if not math.isfinite(environment.weight) or not environment.weight:
            raise UsageError(f"{key}.weight={environment.weight}: give a finite number that is not 0")
        if not _ENVIRONMENT.fullmatch(name := environment_name(environment)):
            raise UsageError(f"{key}.name={name!r}: give up to 64 ASCII letters, digits, _ and -, but no - at first")
    known = [environment_name(environment) for environment in job.environment]
    if len(set(known)) < len(known):
        raise UsageError(f"environment has the names {listing(known)}; give each another one (environment.name)")
    _environments_of_data(job, known)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https", "ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _environments_of_data(job: Job, known: list[str]) -> None:
    named = {f"data.sources.{at}": source.environment for at, source in enumerate(job.data.sources)}
    if len(known) > 1 and not named:
        raise UsageError(
            f"{len(known)} environments, and data.path for all: give each its data and its share of the prompts, "
            f'data.sources = [{{ path = "...", environment = "{known[0]}", weight = 1.0 }}, ...]'
        )
    played = set(named.values())
    if job.evaluation.path:
        named["evaluation"] = job.evaluation.environment
    named |= {f"evaluation.sets.{at}": each.environment for at, each in enumerate(job.evaluation.sets)}
    for key, name in named.items():
        if name and name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{key}.environment={name!r}: the job has {listing(known)}{meant}")
    if missing := [name for name in known if len(known) > 1 and name not in played]:
        raise UsageError(f"no data source names environment {missing[0]}: it would play no row; leave it out")
    for key, name in named.items():
        if not name and len(known) > 1:
            raise UsageError(f"{key}.environment: required with several environments; give one of {listing(known)}")


def _model_arguments(key: str, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name != "output":
            raise UsageError(f"{key}.{name}: a reward model takes output alone; leave it out")
        if value not in ("score", "probability"):
            raise UsageError(f'{key}.output={value!r}: give "score" or "probability"')


def _groups(job: Job) -> None:
    kind, size = job.algorithm.kind, job.sampling.group_size
    if defaults_of(kind).compares and size == 1:
        others = ", ".join(f'"{name}"' for name, other in KINDS.items() if other.rewarded and not other.compares)
        raise Impossible(
            f"group_size=1 with {kind}: all advantages are 0; set sampling.group_size=8, or a kind without groups: "
            f"{others}"
        )
    least = job.sampling.group_min
    if least > size:
        raise Impossible(
            f"group_min={least} with group_size={size}: no group has so many responses; give at most {size}"
        )
    if least and not defaults_of(kind).compares:
        raise UsageError(f"group_min={least} with kind={kind!r}, whose rows are trained one by one; leave it out")
    if job.sampling.refills and not job.environment:
        raise UsageError(
            f"sampling.refills={job.sampling.refills} without an environment: only a response whose environment failed "
            "is replaced; leave it out"
        )
    if job.algorithm.filter_equal and size == 1:
        raise Impossible("filter_equal with group_size=1: the rewards of every group are equal, and all are dropped")
    if job.algorithm.filter_equal and not defaults_of(kind).compares:
        raise UsageError(
            f"filter_equal with kind={kind!r}, whose rows are trained one by one and not in whole groups: a group that "
            'is not whole yet would be dropped; leave it out, or set kind="rloo"'
        )


def _sampling(job: Job) -> None:
    if job.algorithm.overlong_buffer > job.sampling.tokens_max:
        raise UsageError(
            f"overlong_buffer={job.algorithm.overlong_buffer} is more than tokens_max={job.sampling.tokens_max}: it is "
            "the last part of a response"
        )


DATA_RULES: Final[tuple[Callable[[Job], None], ...]] = (
    _paths,
    _template_arguments,
    _dtypes,
    _data,
    _images,
    _mixture,
    _sampler,
    _models_of_the_kind,
    _adapters,
    _published_adapters,
    _lora_requests,
    _rewards,
    _environments,
    _groups,
    _sampling,
)
