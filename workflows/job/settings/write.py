"""Writes a job as the text of a TOML file, one line a table. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from transferqueue.errors import UsageError
from transferqueue.workflows.job.settings.job import Job


def job_as_toml(job: Job) -> str:
    """Return `job` as TOML that `job_from_values` reads back to an equal job. Values that are None are left out."""
    return as_toml(job)


def as_toml(struct: msgspec.Struct) -> str:
    """Return a struct as TOML, its tables after its values. Values that are None are left out."""
    values = msgspec.to_builtins(struct)
    lines = [
        f"{_key(name)} = {value_as_toml(value)}"
        for name, value in values.items()
        if not _is_table(value) and value is not None
    ]
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(name)}]", *_lines(value)]
    for name, value in values.items():
        if _is_array_of_tables(value):
            for table in value:
                lines += ["", f"[[{_key(name)}]]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {value_as_toml(value)}" for name, value in table.items() if value is not None]


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) or _is_array_of_tables(value)


def _is_array_of_tables(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(inner, Mapping) for inner in value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _quoted(name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def value_as_toml(value: object) -> str:
    """Return a value as TOML. `UsageError` for one that TOML does not have, such as None."""
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(value_as_toml(inner) for inner in value)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {value_as_toml(inner)}" for name, inner in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise UsageError(f"{value!r} is {type(value).__name__}, which TOML does not have")
