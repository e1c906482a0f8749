"""Makes a job file out of the values of a table: what our own rules need beside them, and the text with its origins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from transferqueue.workflows.adopt.apply import ALWAYS, Line, values_of
from transferqueue.workflows.adopt.mapping import Gpus, Plain, Settings, Stack
from transferqueue.workflows.job.settings.defaults import KINDS
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import GIB, play_bytes, row_bytes, rows_kept
from transferqueue.workflows.job.settings.write import value_as_toml

_ENDLESS: Final = 1_000_000
"""Steps of a job that ends with its data."""


def added(stack: Stack, settings: Settings, lines: Sequence[Line]) -> list[Line]:
    """Return lines for what the rules of our job file need, and what the stack says otherwise."""
    values = values_of(list(lines))
    more: list[Line] = []

    def add(to: Mapping[str, Plain], why: str) -> None:
        new = {key: value for key, value in to.items() if values.get(key) != value}
        if new:
            values.update(new)
            more.append(Line(verdict="added", key="", value="", to=new, why=why))

    add(*_placed(stack.gpus(settings), values))
    if stack.rewards(settings) and not any(key.startswith("reward.") for key in values):
        add({"reward.0.function": "adopted_rewards:reward"}, "adopted_rewards.py calls the stack's own reward")
    if "steps" not in values and any(key.startswith("data.sources.") for key in values):
        add({"steps": _DEFAULTS.steps}, "how long a mixture is drawn from is yours to say")
    elif "steps" not in values:
        ends = {"steps": _ENDLESS, "data.epochs": values.get("data.epochs") or 1}
        add(ends, "the run ends with its data; a schedule that falls needs the real number")
    if values.get("evaluation.path") is None:
        for key in [key for key in values if key.startswith("evaluation.")]:
            del values[key]
    if values.get("trainer.warmup", 0) >= values["steps"] > 1:
        add({"trainer.warmup": values["steps"] - 1}, "a warmup ends before the steps do")
    add(_tokens(values), "one row must fit into a pass")
    add(_memory(values), "rows that wait for a checkpoint, and the weights")
    return more


def job_values(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the values of a job file as its tables. Settings of an evaluation without a data set are left out."""
    flat = values_of([*lines])
    if not flat.get("evaluation.path"):
        flat = {key: value for key, value in flat.items() if not key.startswith("evaluation.")}
    kind = flat.get("algorithm.kind")
    if kind != "ppo":
        flat = {key: value for key, value in flat.items() if not key.startswith("critic.")}
    if not flat.get("algorithm.kl"):
        flat = {key: value for key, value in flat.items() if not key.startswith("reference.")}
    if kind not in [name for name, each in KINDS.items() if each.compares]:
        flat = {key: value for key, value in flat.items() if not key.startswith("algorithm.std")}
    return _nested(flat)


def as_text(values: Mapping[str, Any], lines: Sequence[Line], title: str) -> str:
    """Return the text of the job file; each value has the stack's key beside it."""
    origins = _origins(lines)
    plain = [
        f"{name} = {value_as_toml(value)}{_beside(origins, name)}"
        for name, value in values.items()
        if not _is_table(value)
    ]
    text = [f"# {title}", *plain]
    for name, value in values.items():
        if isinstance(value, dict):
            text += _table(name, f"[{name}]", value, origins)
        elif _is_table(value):
            for place, each in enumerate(value):
                text += _table(f"{name}.{place}", f"[[{name}]]", each, origins)
    return "\n".join(text) + "\n"


# ---------------------------------------------------------------- what our rules need


def _placed(gpus: Gpus, values: Mapping[str, Plain]) -> tuple[dict[str, Plain], str]:
    """Return the keys that place engines and trainer, and the reason. Of GPUs that both use in turn, each gets a part:
    there is one process for both here only where it is one GPU."""
    engines = max(1, gpus.per_engine)
    if gpus.shared and max(gpus.train, gpus.generate) <= 1:
        in_turn = {"pacing.mode": "colocated", "engine.0.count": 1, "trainer.ranks": 1}
        return in_turn if values.get("pacing.mode", "sync") == "sync" else {}, "engine and trainer use one GPU in turn"
    train, generate = gpus.train, gpus.generate
    why = f"{gpus.train} GPUs train, {gpus.generate} generate"
    if gpus.shared:
        engines = min(engines, gpus.train // 2)
        generate = gpus.train // 2 // engines * engines
        train = gpus.train - generate
        why = f"{gpus.train} GPUs, which the stack uses in turn: here {train} train and {generate} generate"
    ranks = min(train, values.get("trainer.prompts_per_step") or train)
    to: dict[str, Plain] = {
        "engine.0.count": max(1, generate // engines),
        "engine.0.tensor_parallel": engines if values.get("engine.0.kind", "vllm") == "vllm" else 1,
        "trainer.ranks": ranks,
        "trainer.parallel": "fsdp2" if ranks > 1 else "single",
    }
    if gpus.nodes > 1:
        to["on"] = "ray"
        why += f", on {gpus.nodes} machines"
    if values.get("pacing.mode") is None:
        to["pacing.mode"] = "sync"
    return to, why


def _tokens(values: Mapping[str, Plain]) -> dict[str, Plain]:
    longest = _of(values, "data.prompt_tokens_max") + _of(values, "sampling.tokens_max")
    passes = {"trainer.micro_tokens"}
    passes |= {"reference.tokens"} if values.get("algorithm.kl") else set()
    passes |= {"critic.tokens"} if values.get("algorithm.kind") == "ppo" else set()
    return {key: longest for key in sorted(passes) if _of(values, key) < longest}


def _memory(values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the memory of the queue: rows until the next checkpoint, in whole GiB, and room for weights."""
    try:
        job = msgspec.convert(_nested(dict(values)), Job)
    except msgspec.ValidationError:
        return {}
    rows = math.ceil((rows_kept(job) * row_bytes(job) + play_bytes(job)) / GIB)
    return {"queue.memory_gib": float(rows + 8)} if rows > job.queue.memory_gib / 2 else {}


def _of(values: Mapping[str, Plain], key: str) -> int:
    """A number of the job, or its default."""
    table, name = key.split(".")
    default = getattr(getattr(_DEFAULTS, table), name)
    return int(values.get(key) or default)


_DEFAULTS: Final = msgspec.convert(
    {"model": {"path": "-"}, "data": {"path": "-"}, "algorithm": {"kind": "grpo"}},
    Job,
)


# ---------------------------------------------------------------- text


def _nested(flat: Mapping[str, Plain]) -> dict[str, Any]:
    """Return tables and arrays of tables out of keys such as ``engine.0.count``."""
    root: dict[str, Any] = {}
    for key, value in sorted(flat.items(), key=lambda item: _order(item[0])):
        if value is None:
            continue
        *folders, last = key.split(".")
        table: Any = root
        for folder in folders:
            table = table.setdefault(folder, {})
        table[last] = value
    return {name: _arrays(value) for name, value in root.items()}


def _order(key: str) -> tuple[bool, int, str]:
    names = list(Job.__struct_fields__)
    table = key.partition(".")[0]
    return "." in key, names.index(table) if table in names else len(names), ""


def _arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(name.isdigit() for name in value):
        return [_arrays(value[name]) for name in sorted(value, key=int)]
    return {name: _arrays(each) for name, each in value.items()}


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _origins(lines: Sequence[Line]) -> dict[str, str]:
    origins: dict[str, str] = {}
    for verdict in ("assumed", "mapped", "kept", "added"):
        for line in reversed(lines):
            if line.verdict == verdict:
                origins |= dict.fromkeys(line.to, line.why if line.key in ("", ALWAYS) else line.key)
    return origins


def _beside(origins: Mapping[str, str], key: str) -> str:
    return f"  # {origins[key]}" if key in origins else ""


def _table(key: str, head: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    text = ["", head]
    later: list[str] = []
    for name, value in values.items():
        inner = f"{key}.{name}"
        if isinstance(value, list) and _is_table(value):
            for place, each in enumerate(value):
                later += _table(f"{inner}.{place}", f"[[{inner}]]", each, origins)
        else:
            beside = _beside(origins, inner) or next(
                (_beside(origins, each) for each in origins if each.startswith(f"{inner}.")), ""
            )
            text.append(f"{name} = {value_as_toml(value)}{beside}")
    return text + later
