"""Changes to a job file from the command line: ``trainer.lr=2e-6``. No torch here."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from transferqueue.errors import UsageError

_BARE: Final = re.compile(r"[A-Za-z_~./][\w./:@~+-]*")
"""A text that needs no quotes."""


def apply(values: dict[str, Any], change: str) -> None:
    """Apply one change ``key=value`` to plain values, in place.

    >>> values = {"trainer": {"lr": 1e-6, "ranks": 2}}
    >>> apply(values, "trainer.lr=2e-6")
    >>> apply(values, "trainer={warmup=10}")
    >>> values
    {'trainer': {'lr': 2e-06, 'ranks': 2, 'warmup': 10}}
    """
    key, equals, text = change.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise UsageError(f"change {change!r} is not key=value; write it as trainer.lr=2e-6")
    _set(values, names, _value(key.strip(), text.strip()), key.strip())


def _value(key: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if _BARE.fullmatch(text):
            return text
        raise UsageError(
            f'{key}={text}: the value is not TOML ({error}); a text stands in quotes: {key}="..."'
        ) from error
    if set(parsed) != {"value"}:
        raise UsageError(f"{key}={text!r}: more than one value; give one change for each key")
    return parsed["value"]


def _set(into: Any, names: list[str], value: Any, key: str) -> None:
    """Set the value at the path `names` below `into`. Missing tables are made; the array of engines has one by
    default."""
    name, *below = names
    place: Any = name
    if isinstance(into, list):
        place = _place(into, name, key)
    elif not isinstance(into, dict):
        raise UsageError(f"{key}: {name!r} is below a value that is no table: {into!r}")
    if not below:
        both_tables = isinstance(value, dict) and isinstance(into, dict) and isinstance(into.get(name), dict)
        into[place] = _merged(into[place], value) if both_tables else value
        return
    if isinstance(into, dict):
        into.setdefault(name, [{}] if name == "engine" and below[0].isdigit() else {})
    _set(into[place], below, value, key)


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {name for name in old.keys() & new.keys() if isinstance(old[name], dict) and isinstance(new[name], dict)}
    return old | new | {name: _merged(old[name], new[name]) for name in both}


def _place(array: list[Any], name: str, key: str) -> int:
    if not name.isdigit() or int(name) >= len(array):
        raise UsageError(f"{key}: {name!r} is no place in an array of {len(array)}; places count from 0")
    return int(name)
