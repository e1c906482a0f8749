"""The keys of a job file: their names, suggestions for misspelt ones, and their values. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from transferqueue.errors import UsageError
from transferqueue.workflows.job.settings.job import Job

_NEAR: Final = 0.7
OTHER_NAMES: Final = {
    "learning_rate": "trainer.lr",
    "num_generations": "sampling.group_size",
    "n": "sampling.group_size",
    "beta": "algorithm.kl",
    "max_completion_length": "sampling.tokens_max",
    "max_tokens": "sampling.tokens_max",
    "max_prompt_length": "data.prompt_tokens_max",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "loss_type": "algorithm.kind",
    "max_grad_norm": "trainer.gradient_norm_max",
    "max_steps": "steps",
    "warmup_steps": "trainer.warmup",
    "batch_size": "trainer.prompts_per_step",
    "num_processes": "trainer.ranks",
    "scale_rewards": "algorithm.std",
    "norm_adv_by_std_in_grpo": "algorithm.std",
    "num_iterations": "algorithm.epochs",
    "ppo_epochs": "algorithm.epochs",
    "kl_loss_coef": "algorithm.kl",
    "clip_ratio": "algorithm.clip_low",
    "max_response_length": "sampling.tokens_max",
    "lr_scheduler_type": "trainer.schedule",
    "chat_template_kwargs": "model.template_args",
    "dataset_name": "data.path",
    "dataset_config": "data.subset",
    "entropy_coeff": "algorithm.entropy",
    "lora_r": "trainer.lora_rank",
    "target_modules": "trainer.lora_targets",
    "lora_target_modules": "trainer.lora_targets",
    "lora_adapter_path": "trainer.lora_adapter",
    "ref_model_sync_steps": "reference.sync_every",
    "early_stopping_patience": "evaluation.patience",
    "metric_for_best_model": "evaluation.figure",
    "assistant_only_loss": "data.turns",
    "full_determinism": "reproducible",
    "order": "reproducible",
}
"""What other trainers call a key of a job file."""

_NOT_HERE: Final = {
    "top_p": "responses are drawn from the whole distribution, since log-probs of a cut one are not those of the "
    "trained model; leave it out",
}
"""Keys of other trainers that a job has on purpose not, with the reason."""


def check_keys(values: object, kind: Any, at: str) -> None:
    """Refuse keys of `values` that `kind` does not have, here and below."""
    kind = _without_none(kind)
    if get_origin(kind) is tuple and isinstance(values, list):
        for place, value in enumerate(values):
            check_keys(value, get_args(kind)[0], f"{at}.{place}")
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(values, Mapping)):
        return
    fields = get_type_hints(kind)
    for name, value in values.items():
        key = f"{at}.{name}" if at else str(name)
        if name not in fields:
            raise UsageError(f"{key}: {_meant(str(name), value, list(fields), key)}")
        check_keys(value, fields[name], key)


def _meant(name: str, value: object, names: list[str], key: str) -> str:
    """Say which key was meant: one of another table, one with a similar name, or list those that exist."""
    if name in _NOT_HERE:
        return _NOT_HERE[name]
    elsewhere = [found for found in _keys() if found.rpartition(".")[2] == name and found != key]
    if name in OTHER_NAMES:
        elsewhere = [OTHER_NAMES[name], *elsewhere]
    if near := get_close_matches(name, names, n=2, cutoff=_NEAR):
        return f"there is no such key; did you mean {' or '.join(near)}?"
    if elsewhere:
        return "there is no such key; see " + ", ".join(dict.fromkeys(elsewhere))
    if isinstance(value, Mapping):
        inner = {OTHER_NAMES.get(str(one), found) for one in value for found in _keys() if _last(found) == str(one)}
        if inner:
            return f"there is no such table; see {', '.join(sorted(inner))}"
    return f"there is no such key; there are {', '.join(names)}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _keys(kind: Any = Job, at: str = "") -> Iterator[str]:
    """Yield the keys of a job file, as ``trainer.lr``."""
    for name, inner in get_type_hints(kind).items():
        key = f"{at}.{name}" if at else name
        inner = _without_none(inner)
        inner = get_args(inner)[0] if get_origin(inner) is tuple else inner
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from _keys(inner, key)
        else:
            yield key


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next(inner for inner in get_args(kind) if inner is not NoneType)
    return kind


def refusal(text: str, values: Mapping[str, Any], type_of: Callable[[str], str]) -> UsageError:
    """Return the error for what msgspec could not convert: the key, its value, the rule. type_of: the type of a key in
    words, empty for a table."""
    rule, _, place = text.partition(" - at `$")
    key = place.rstrip("`").replace("[...]", "").replace("[", ".").replace("]", "").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", rule):
        missing_key = f"{key}.{missing[1]}" if key else missing[1]
        return UsageError(f"{missing_key}: required; {_example(missing_key)}")
    found, kind = _found(values, key.split("."))
    allowed = _allowed(kind)
    near = get_close_matches(str(found), allowed, n=1, cutoff=_NEAR) if allowed else []
    wanted = f"give {', '.join(allowed)}" if allowed else _wanted(key, type_of(key), rule)
    return UsageError(f"{key}={found!r}: {wanted}" + (f"; did you mean {near[0]}?" if near else ""))


def _wanted(key: str, kind: str, rule: str) -> str:
    """What the value of a key must be. kind: its type in words. rule: msgspec's, about the value or one in it."""
    if kind and (kind != "table" or rule.startswith("Expected `object`")):
        return f"give {'an' if kind[0] in 'aeio' else 'a'} {kind}"
    if kind:
        return "its values: " + rule.replace("`", "").replace("Expected", "give")
    return f"give an array of tables: [[{key}]]" if rule.startswith("Expected `array`") else "give a table"


def _example(key: str) -> str:
    return {
        "model": 'model = { path = "models/Qwen3-0.6B" }',
        "model.path": 'a Hugging Face directory or id: model = { path = "models/Qwen3-0.6B" }',
        "data": 'data = { path = "prompts.jsonl" }',
        "data.path": 'a file or directory of prompts: data = { path = "prompts.jsonl" }',
        "algorithm": 'algorithm = { kind = "grpo" }',
    }.get(key, f'algorithm = {{ kind = "grpo" }}, one of {", ".join(_allowed(_kind_of(["algorithm", "kind"])))}')


def _found(values: Any, names: list[str]) -> tuple[object, Any]:
    """Return the value at the path `names`, and the type that it should have."""
    for name in names:
        if isinstance(values, list):
            values = values[int(name)] if name.isdigit() else values
        elif isinstance(values, Mapping):
            values = values.get(name)
    return values, _kind_of(names)


def _kind_of(names: list[str]) -> Any:
    kind: Any = Job
    for name in names:
        kind = _without_none(kind)
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        if not name.isdigit() and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            kind = get_type_hints(kind)[name]
    return _without_none(kind)


def _allowed(kind: Any) -> list[str]:
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else []
