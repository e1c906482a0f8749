"""The tables and keys of a job file in words: meaning, type, default and range of each. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from transferqueue.wire.answers.answer import Figure, figures
from transferqueue.workflows.job.settings.defaults import KINDS, filled
from transferqueue.workflows.job.settings.job import AlgorithmSettings, For, Job
from transferqueue.workflows.job.settings.keys import OTHER_NAMES
from transferqueue.workflows.job.settings.ranges import RANGES
from transferqueue.workflows.job.settings.write import value_as_toml

REQUIRED: Final = "required"
OPEN: Final = "open"
"""Default of a key that the job fills in from others."""
_TYPES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", Any: "value"}


class KeyTable(NamedTuple):
    """A table of a job file. name: "" for the keys outside tables."""

    name: str
    struct: type[msgspec.Struct]
    meaning: str


class Key(NamedTuple):
    """A key of a job file. name: ``trainer.lr``. type: with its range. default: TOML, or `REQUIRED` or `OPEN`. by_kind:
    the default of each kind of algorithm, where they differ. needed_by: the jobs that set it."""

    name: str
    type: str
    default: str
    by_kind: str
    meaning: str
    needed_by: str

    def __str__(self) -> str:
        lines = [f"type: {self.type}", f"default: {self.by_kind or self.default}", f"needed by: {self.needed_by}"]
        return "\n    ".join([f"{self.name}: {self.meaning}", *lines]) + "\n"


def describe(name: str) -> str | None:
    """Meaning, type and default of the keys of this name; None if there are none.

    Args:
        name: a key (``trainer.lr``, ``engine.0.count``), its last part (``lr``), a table (``trainer``), or the name
            that another trainer gives a key (``num_generations``).

    Example:
        >>> print(describe("num_generations"))
        sampling.group_size: Responses to each prompt. `sft` has one, and does not read it.
            type: integer, at least 1
            default: 8
            needed by: GRPO and its kin: cost against the noise of advantages
        <BLANKLINE>
    """
    wanted = ".".join(part for part in name.split(".") if not part.isdigit())
    wanted = OTHER_NAMES.get(wanted, wanted)
    for table in tables():
        if table.name and table.name == wanted:
            return "\n".join([f"[{table.name}] {table.meaning}\n", *map(str, keys(table))])
    every = _every_key()
    exact = [key for key in every if key.name == wanted]
    return "\n".join(map(str, exact or [key for key in every if key.name.endswith(f".{wanted}")])) or None


def type_of(name: str) -> str:
    """The type and range of the value of a key (``engine.0.count``) in words; empty if there is no such key."""
    wanted = ".".join(part for part in name.split(".") if not part.isdigit())
    return next((key.type for key in _every_key() if key.name == wanted), "")


def key_names() -> list[str]:
    """Every name that `describe` knows, each once."""
    every = [key.name for key in _every_key()]
    parts = [part for name in every for part in (name.partition(".")[0], name.rpartition(".")[2])]
    return list(dict.fromkeys([*every, *parts, *OTHER_NAMES]))


@cache
def tables() -> tuple[KeyTable, ...]:
    """Return the tables of a job file; the keys outside tables first, and those in a table after it."""
    return (KeyTable("", Job, _summary(Job)), *_below(Job, ""))


@cache
def _every_key() -> tuple[Key, ...]:
    return tuple(key for table in tables() for key in keys(table))


def _below(table: type[msgspec.Struct], at: str) -> Iterator[KeyTable]:
    for field in figures(table).values():
        if (struct := _struct(field)) is not None:
            yield KeyTable(f"{at}{field.name}", struct, field.meaning or _summary(struct))
            yield from _below(struct, f"{at}{field.name}.")


def keys(table: KeyTable) -> list[Key]:
    """Return the keys of a table, without the tables in it."""
    infos = {info.name: info for info in msgspec.structs.fields(table.struct)}
    return [_key(table, field, infos[field.name]) for field in figures(table.struct).values() if not _struct(field)]


def _struct(field: Figure) -> type[msgspec.Struct] | None:
    kind = get_args(field.type)[0] if get_origin(field.type) is tuple else field.type
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _summary(struct: type) -> str:
    return " ".join((struct.__doc__ or "").split())


def _key(table: KeyTable, field: Figure, info: msgspec.structs.FieldInfo) -> Key:
    name = f"{table.name}.{field.name}".lstrip(".")
    bounds = f", {RANGES[name]}" if name in RANGES else ""
    by_kind = _by_kind(field.name) if table.struct is AlgorithmSettings and not info.required else ""
    default = OPEN if by_kind else _default(info)
    return Key(name, _type(field.type) + bounds, default, by_kind, field.meaning, _needed_by(table.struct, field.name))


def _needed_by(struct: type[msgspec.Struct], name: str) -> str:
    notes = getattr(get_type_hints(struct, include_extras=True)[name], "__metadata__", ())
    return next((note.jobs for note in notes if isinstance(note, For)), "")


def _default(info: msgspec.structs.FieldInfo) -> str:
    if info.required:
        return REQUIRED
    value = info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
    return OPEN if value is None else value_as_toml(value)


def _by_kind(name: str) -> str:
    """The values that `filled` gives an open key of ``algorithm``; "" for a key that it leaves as it is."""
    kinds: dict[str, list[str]] = {}
    is_open = False
    for kind in KINDS:
        settings = AlgorithmSettings(kind=kind)
        if (value := getattr(filled(settings), name)) is None:
            return ""  # other keys fill it in
        is_open |= value != getattr(settings, name)
        kinds.setdefault(value_as_toml(value), []).append(kind)
    *few, (common, _) = sorted(kinds.items(), key=lambda each: len(each[1]))
    said = [*(f"{value} for {', '.join(names)}" for value, names in few), f"{common} for other kinds"]
    return "; ".join(said) if is_open else ""


def _type(kind: Any) -> str:
    """A type in the words of TOML. An empty text is left out: it is the default of an open key."""
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not NoneType]
    if origin is Literal:
        return ", ".join(value_as_toml(value) for value in parts if value)
    if origin in (Union, UnionType):
        return ", or ".join(map(_type, parts))
    if origin is tuple:
        return f"array of {_type(parts[0])}" if parts[-1] is ... else f"array of {len(parts)}: {_type(parts[0])}"
    return "table" if origin is dict else _TYPES[kind]
