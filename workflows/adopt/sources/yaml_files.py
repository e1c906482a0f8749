"""Reads YAML as plain values: safe tags alone, bounded, floats as YAML 1.2 has them (``1e-6``), no key twice.

A file may name files beside it that it builds on (``defaults: other.yaml``, a text or a list). Interpolation:
``${a.b}``, ``${.b}`` and ``${..b}``, ``${mul:a,b}``, ``${oc.select:a.b,other}``, also inside each other. Other
resolvers, such as ``${oc.env:NAME}``, stay as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transferqueue.errors import NotFound, UsageError
from transferqueue.lazy import naming_extra

FILE_BYTES_MAX: Final = 1 << 18
"""A configuration is some pages of text; a larger file is something else."""
KEYS_MAX: Final = 20_000
"""Keys of a file with everything that its aliases repeat."""
DEPTH_MAX: Final = 32
FILES_MAX: Final = 32
"""Files that one builds on, one after another."""

_FLOAT: Final = re.compile(r"[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)|[-+]?(?:\d[\d_]*\.[\d_]*|\.\d+)")
_INNERMOST: Final = re.compile(r"\$\{([^${}]*)\}")
_ROUNDS_MAX: Final = 16
_WHY_CHARS: Final = 300


def read_file(path: Path) -> str:
    """Return the text of a file of at most 256 KiB.

    Raises:
        NotFound: There is no such file.
        UsageError: It cannot be read, is larger, or is no UTF-8.
    """
    try:
        with path.open("rb") as opened:
            text = opened.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > FILE_BYTES_MAX:
        raise UsageError(f"{path} is over {FILE_BYTES_MAX:,} bytes; a job is some pages of text")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}; give the text of a job") from error


def read_value(text: str) -> Any:
    """Return one value as YAML has it; text that is no YAML is a text.

    >>> read_value("1e-6"), read_value("[console,wandb]"), read_value("True"), read_value("a: b: c")
    (1e-06, ['console', 'wandb'], True, 'a: b: c')
    """
    try:
        return _load(text, "a value")
    except UsageError:
        return text


def read_yaml(path: Path, *, missing: Callable[[str], bool] = lambda name: False) -> dict[str, Any]:
    """Return the tables of a file, with those of the files that its ``defaults`` name beneath them.

    Args:
        path: the file.
        missing: whether a name of ``defaults`` for which there is no file is known, and adds nothing. Default: none is.

    Raises:
        NotFound: The file, or one that it builds on, does not exist.
        UsageError: It is no YAML, too large, too deep, or has a key twice.
    """
    return _with_defaults(path, missing, set())


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by their keys, as ``a.b.c``. Lists and empty tables are leaves.

    >>> flatten({"a": {"b": 1, "c": []}, "d": {}})
    {'a.b': 1, 'a.c': [], 'd': {}}
    """
    return dict(_leaves(values, ""))


def interpolated(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves with their ``${...}`` replaced. What has no value stays as it is written.

    >>> interpolated({"a.b": 4, "a.c": "${.b}", "d": "${mul:${a.b}, 2}", "e": "${oc.env:HOME}", "f": "${a.none}"})
    {'a.b': 4, 'a.c': 4, 'd': 8, 'e': '${oc.env:HOME}', 'f': '${a.none}'}
    """
    values = dict(leaves)
    for _ in range(_ROUNDS_MAX):
        changed = False
        for key, value in values.items():
            if isinstance(value, str) and "${" in value:
                replaced = _replaced(value, key, values)
                changed = changed or replaced != value
                values[key] = replaced
        if not changed:
            break
    return values


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the leaf ``a.b.c`` in nested tables."""
    *folders, last = key.split(".")
    for folder in folders:
        if not isinstance(values.get(folder), dict):
            values[folder] = {}
        values = values[folder]
    values[last] = value


# ---------------------------------------------------------------- files


def _with_defaults(path: Path, missing: Callable[[str], bool], seen: set[Path]) -> dict[str, Any]:
    place = path.resolve()
    if place in seen or len(seen) >= FILES_MAX:
        raise UsageError(f"{path} builds on itself, or on over {FILES_MAX} files, by its defaults")
    values = _load(read_file(path), str(path))
    if not isinstance(values, dict):
        raise UsageError(f"{path} has no tables at its top; give the YAML of a job")
    merged: dict[str, Any] = {}
    for name in _named(values.pop("defaults", [])):
        beside = path.parent / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        if beside.is_file() or not missing(name):
            _merge(merged, _with_defaults(beside, missing, {*seen, place}))
    _merge(merged, values)
    return merged


def _named(defaults: object) -> list[str]:
    """The files that a list of defaults names: ``_self_`` and ``group: name`` of Hydra come as texts."""
    texts: list[str] = []
    for each in defaults if isinstance(defaults, list) else [defaults]:
        texts += [f"{group}/{name}" for group, name in each.items()] if isinstance(each, dict) else [str(each)]
    return [text for text in texts if text != "_self_"]


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        inner = into.get(key)
        if isinstance(value, dict):
            replaces = value.get("_override_", False) or not isinstance(inner, dict)
            into[key] = {} if replaces else inner
            _merge(into[key], {name: each for name, each in value.items() if name != "_override_"})
        else:
            into[key] = value


def _load(text: str, source: str) -> Any:
    with naming_extra("reading YAML"):
        import yaml
    try:
        loader = _loader(yaml.SafeLoader)(text)
        try:
            values = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        why = " ".join(str(error).split())[:_WHY_CHARS]
        raise UsageError(f"{source} is not YAML that can be read safely: {why}") from error
    _check_size(values, source)
    return values


def _check_size(values: Any, source: str) -> None:
    """Refuse what is too large with everything that its aliases repeat, or too deep, as an alias of itself is."""
    left, waiting = KEYS_MAX, [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        left -= len(inner)
        if left < 0 or depth > DEPTH_MAX:
            raise UsageError(
                f"{source} has over {KEYS_MAX:,} keys with what its aliases repeat, or tables more than {DEPTH_MAX} "
                "deep; give the configuration of one job"
            )
        waiting += [(each, depth + 1) for each in inner]


def _loader(safe: Any) -> Any:
    """Return a class of the safe loader that refuses a key twice, has no dates, and reads ``1e-6`` as a number."""

    class StrictYaml(safe):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if twice := {name for name in names if names.count(name) > 1 and name != "<<"}:
                line = node.start_mark.line + 1
                raise ValueError(f"the key {min(twice)} stands twice in the table that begins at line {line}")
            return super().construct_mapping(node, deep)

    StrictYaml.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if not tag.endswith((":timestamp", ":float"))]
        for first, rules in safe.yaml_implicit_resolvers.items()
    }
    StrictYaml.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789.")
    )
    return StrictYaml


# ---------------------------------------------------------------- keys


def _leaves(values: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{at}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _replaced(text: str, key: str, values: Mapping[str, Any]) -> Any:
    """Replace the innermost ``${...}`` of a text; a text that is nothing else gets the value itself."""
    for found in _INNERMOST.finditer(text):
        known, value = _value_of(found[1], key, values)
        if known and found[0] == text:
            return value
        if known and not isinstance(value, dict | list):
            return text[: found.start()] + str(value) + text[found.end() :]
    return text


def _value_of(inner: str, key: str, values: Mapping[str, Any]) -> tuple[bool, Any]:
    name, colon, arguments = inner.partition(":")
    if not colon:
        place = _place(inner.strip(), key)
        value = values.get(place)
        return place in values and not (isinstance(value, str) and "${" in value), value
    parts = [part.strip() for part in arguments.split(",")]
    if name == "mul" and len(parts) == 2:
        numbers = [read_value(part) for part in parts]
        known = all(isinstance(number, int | float) for number in numbers)
        return known, numbers[0] * numbers[1] if known else None
    if name == "oc.select" and 1 <= len(parts) <= 2:
        place = _place(parts[0], key)
        value = values.get(place, read_value(parts[1]) if len(parts) == 2 else None)
        return not (isinstance(value, str) and "${" in value), value
    return False, None


def _place(name: str, key: str) -> str:
    """The absolute key of a name that may begin with dots: one for the table of `key`, one more for each above it."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    folders = key.split(".")[:-dots]
    return ".".join([*folders, name[dots:]])
