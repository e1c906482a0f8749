"""Applies a stack's table to the settings of a job: one `Line` for each key, and the values of our job file.

1. Every key that is given has a line: kept, mapped, no effect, refused, or unknown. Nothing is dropped in silence.
2. A key that is left out, and whose default in the stack is not ours, has a line ``assumed``: the native job takes the
   stack's default.
3. What follows from the stack itself, whatever its keys say, has a line ``assumed`` with the key ``(always)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from transferqueue.errors.text import shown
from transferqueue.workflows.adopt.mapping import (
    ABSENT,
    Inactive,
    KeyRule,
    OurValues,
    Plain,
    Refuse,
    Settings,
    Stack,
    is_same,
)
from transferqueue.workflows.adopt.sources.shell import is_open
from transferqueue.workflows.job.settings.job import Job

Verdict = Literal["kept", "mapped", "assumed", "added", "no effect", "unknown", "refused"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
ALWAYS: Final = "(always)"
"""The key of a line for what follows from the stack itself."""
_VALUE_CHARS: Final = 60
_OPEN: Final = "not known here: set its variable where adopt runs, or give the value after the file"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one key.

    key, value: the stack's. to: our keys with their values, empty where there are none. why: the reason, or what was
    computed.
    """

    verdict: Verdict
    key: str
    value: str
    to: dict[str, Any] = {}
    why: str = ""


def apply(stack: Stack, settings: Settings) -> list[Line]:
    """Return a line for each key of `settings`, and for each default of `stack` that matters."""
    lines = [_line(stack, key, value, settings) for key, value in settings.given.items()]
    lines += list(_assumed(stack, settings))
    return lines


def values_of(lines: list[Line]) -> dict[str, Plain]:
    """Return the values of our job file, by key: what is added goes before what a job gives, and that before a default;
    of several the first line counts."""
    values: dict[str, Plain] = {}
    for verdict in ("added", "kept", "mapped", "assumed"):
        for line in lines:
            if line.verdict == verdict:
                for key, value in line.to.items():
                    values.setdefault(key, value)
    return values


def typed(key: str, value: Plain) -> Plain:
    """Return a value as the type of our key has it; `Refuse` if it cannot be.

    >>> typed("trainer.lr", "1e-6"), typed("steps", 20.0), typed("engine.0.count", "2")
    (1e-06, 20, 2)
    """
    kind = kind_of(key)
    if kind is None:
        raise Refuse(f"a job of this release has no {key}")
    if isinstance(value, float) and value.is_integer() and kind is int:
        value = int(value)
    try:
        found = msgspec.convert(value, kind, strict=not isinstance(value, str) or kind is str)
        return msgspec.json.decode(msgspec.json.encode(found))  # lists for tuples, as a file has them
    except msgspec.ValidationError as error:
        raise Refuse(
            f"{key} does not take {shown(value)}: {str(error).partition(' - at')[0].replace('`', '')}"
        ) from error


def rule_of(stack: Stack, key: str) -> KeyRule | None:
    """The rule of this name, else the one with the longest part of it beside a star, at the end or the beginning."""
    rules = stack.rule_by_name
    if key in rules:
        return rules[key]
    parts = [name for name in rules if name.endswith("*") and key.startswith(name[:-1])]
    parts = [name for name in rules if name.startswith("*") and key.endswith(name[1:])] or parts
    return rules[max(parts, key=len)] if parts else None


def _line(stack: Stack, key: str, value: Plain, settings: Settings) -> Line:
    text = _text(value) if not _is_secret(key) else "…"
    rule = rule_of(stack, key)
    if rule is None:
        return Line(verdict="unknown", key=key, value=text, why="the table of this stack has no such key")
    if isinstance(value, str) and is_open(value) and (rule.refused or rule.convert):
        return Line(verdict="refused", key=key, value=text, why=_OPEN)
    try:
        return _verdict(rule, key, value, settings)
    except Refuse as refusal:
        return Line(verdict="refused", key=key, value=text, why=str(refusal))


def _verdict(rule: KeyRule, key: str, value: Plain, settings: Settings) -> Line:
    text = _text(value) if not _is_secret(key) else "…"
    if rule.refused:
        harmless = value is None or value in rule.harmless or str(value).lower() in map(str, rule.harmless)
        why = "off" if harmless else rule.why
        return Line(verdict="no effect" if harmless else "refused", key=key, value=text, why=why)
    if rule.convert is None:
        return Line(verdict="no effect", key=key, value=text, why=rule.why)
    if value is None:
        if rule.default is not ABSENT and rule.default is not None:
            raise Refuse(f"the stack's default is {_text(rule.default)}, which null turns off; give a value")
        return Line(verdict="no effect", key=key, value=text, why="not set")
    found = rule.convert(value, settings)
    if isinstance(found, Inactive):
        return Line(verdict="no effect", key=key, value=text, why=found.why)
    if isinstance(found, OurValues):
        to = {name: typed(name, each) for name, each in found.by_key.items()}
        return Line(verdict="mapped", key=key, value=text, to=to, why=found.why or rule.why)
    name = rule.to[:-1] + key[len(rule.name) - 1 :] if rule.to.endswith("*") else rule.to
    ours = typed(name, found)
    same = is_same(ours, value)
    return Line(verdict="kept" if same else "mapped", key=key, value=text, to={name: ours}, why=rule.why)


def _assumed(stack: Stack, settings: Settings) -> Iterator[Line]:
    verdict: Verdict
    for rule in stack.rules:
        if rule.default is ABSENT or rule.default is None or rule.name in settings.given:
            continue
        try:
            line = _verdict(rule, rule.name, rule.default, settings)
        except Refuse as refusal:
            yield Line(verdict="refused", key=f"{rule.name} (its default)", value=_text(rule.default), why=str(refusal))
            continue
        to = {key: value for key, value in line.to.items() if value != _default(key)}
        if to or line.verdict == "refused":
            verdict = "assumed" if to else "refused"
            yield Line(verdict=verdict, key=f"{rule.name} (its default)", value=line.value, to=to, why=line.why)
    for key, text, why in stack.of_model(settings):
        verdict = "refused" if text else "assumed"
        yield Line(verdict=verdict, key=f"{key} (its default)", value=text or "of the model", why=why)
    for key, (value, why) in stack.always.items():
        yield Line(verdict="assumed", key=ALWAYS, value="", to={key: typed(key, value)}, why=why)


def _is_secret(key: str) -> bool:
    return key.endswith(("wandb.key", "wandb-key", "token"))


def _text(value: Plain) -> str:
    return shown(value, _VALUE_CHARS) if not isinstance(value, str) else value[:_VALUE_CHARS]


def _fields(key: str) -> Iterator[tuple[Any, str]]:
    """Yield the struct and the field of each part of a key; of an array, of its tables."""
    kind: Any = Job
    for name in key.split("."):
        if name.isdigit():
            continue
        kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return
        yield kind, name
        kind = get_type_hints(kind).get(name)


def kind_of(key: str) -> Any:
    """The type of one of our keys; None if there is none. Below ``engine.0.options`` any key is one."""
    kind: Any = Job
    for name in key.split("."):
        kind = get_args(kind)[0] if get_origin(kind) is tuple and name != "" else kind
        if name.isdigit():
            continue
        if get_origin(kind) is dict:
            return get_args(kind)[1]
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return None
        kind = get_type_hints(kind).get(name)
        if kind is None:
            return None
    return kind


def _default(key: str) -> Plain:
    """The value that a job has where it leaves the key out; ABSENT where that depends."""
    found: Any = ABSENT
    for struct, name in _fields(key):
        found = next((each.default for each in msgspec.structs.fields(struct) if each.name == name), ABSENT)
    if found is msgspec.NODEFAULT or isinstance(found, msgspec.Struct):
        return ABSENT
    return msgspec.to_builtins(found) if found is not ABSENT else ABSENT
