"""The base of all answers of a queue about itself, and how a figure is declared.

A figure is a field of an `Answer`. Its name ends with its unit (``_s``: seconds, ``bytes``), its type says whether it
may be None (unknown), and the text beside the type gives its meaning: ``rows_put: Annotated[Total, "Rows put."]``.
`Total` marks a figure that only grows in one life of the server, so that a rate is a difference.

The declaration is the only one. From it come:

- the message: a MessagePack map, whose keys are the names. Unknown keys are ignored, and a missing one has its
  default, so tools read servers that are a little newer or older;
- the values that `Queue.stats`, `audit`, `doctor`, `sessions`, `inspect` and `events` return and ``--json`` prints;
- the tables of `transferqueue docs figures` (`python -m tests.figures` writes them, a test compares);
- the names, types and help texts of the Prometheus metrics.

To add a figure: declare it here, and fill it in where the ledger or the server makes the answer.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_type_hints

import msgspec
from msgspec import UNSET

GROWS: Final = "only grows"
Total = Annotated[int, GROWS]
"""A count that only grows in one life of the server."""
TotalSeconds = Annotated[float, GROWS]

_WIDTH: Final = 100
_SHOWN_MAX: Final = 8
"""Items of a list or dict that a repr shows."""


class Figure(NamedTuple):
    """The declaration of one figure. `meaning`: sentences. `grows`: it only grows in one life of the server."""

    name: str
    type: Any
    meaning: str
    grows: bool


class Answer(msgspec.Struct, frozen=True):
    """Base of answers. Figures are attributes; the repr leaves out those that have their default.

    `plain` gives dicts and lists, as JSON and loggers take them. ``answer["name"]``, `keys`, `items`, `values`, `get`
    and ``in`` work until the next release, with a `DeprecationWarning`: until 0.1.0 answers were dicts.
    """

    def plain(self) -> dict[str, Any]:
        """All figures as dicts, lists and scalars."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    def __repr__(self) -> str:
        return readable(self)

    if not TYPE_CHECKING:  # old programs still run, while type checkers report each access to change

        def __getitem__(self, name: str) -> Any:
            _warn(self, f"[{name!r}]", f".{name}")
            return _by_name(self)[name]

        def get(self, name: str, default: Any = None) -> Any:
            _warn(self, f".get({name!r})", f".{name}")
            return _by_name(self).get(name, default)

        def __contains__(self, name: str) -> bool:
            _warn(self, f": {name!r} in it", f".{name}")
            return name in _by_name(self)

        def __iter__(self) -> Iterator[str]:
            _warn(self, " is iterated over", ".plain()")
            return iter(_by_name(self))

        def keys(self) -> KeysView[str]:
            _warn(self, ".keys()", ".plain()")
            return _by_name(self).keys()

        def items(self) -> ItemsView[str, Any]:
            _warn(self, ".items()", ".plain()")
            return _by_name(self).items()

        def values(self) -> ValuesView[Any]:
            _warn(self, ".values()", ".plain()")
            return _by_name(self).values()


@cache
def figures(kind: type[msgspec.Struct]) -> dict[str, Figure]:
    """The figures of a kind of answer, or the keys of a table of a job file, by name, in the order of declaration."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _figure(name, hints[name]) for name in kind.__struct_fields__}


def _figure(name: str, hint: Any) -> Figure:
    notes = getattr(hint, "__metadata__", ())
    meanings = [note for note in notes if isinstance(note, str) and note != GROWS]
    return Figure(name, hint.__origin__ if notes else hint, " ".join(meanings), GROWS in notes)


def _by_name(answer: Answer) -> dict[str, Any]:
    values = ((name, getattr(answer, name, UNSET)) for name in answer.__struct_fields__)
    return {name: value for name, value in values if value is not UNSET}


_WARNED: Final[set[str]] = set()


def _warn(answer: Answer, used: str, instead: str) -> None:
    """Warn once of each use."""
    kind = type(answer).__name__
    if f"{kind}{used}" in _WARNED:
        return
    warnings.warn(
        f"{kind}{used}: answers are no dicts any more, and access by key ends with the next release; use {kind}"
        f"{instead}",
        DeprecationWarning,
        stacklevel=3,
    )
    _WARNED.add(f"{kind}{used}")  # a filter that turns warnings into errors gets each


# ---------------------------------------------------------------- repr


def readable(value: object, width: int = _WIDTH) -> str:
    """`value` in lines of at most `width` columns, as far as names and texts allow."""
    if isinstance(value, Answer):
        changed = [field for field in msgspec.structs.fields(value) if _is_changed(value, field)]
        items = [f"{field.name}={readable(getattr(value, field.name), width - 4)}" for field in changed]
        return _joined(f"{type(value).__name__}(", items, ")", width)
    if isinstance(value, dict):
        return _joined(
            "{", _first([f"{key!r}: {readable(item, width - 4)}" for key, item in value.items()]), "}", width
        )
    if isinstance(value, list):
        return _joined("[", _first([readable(item, width - 4) for item in value]), "]", width)
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _is_changed(answer: Answer, field: msgspec.structs.FieldInfo) -> bool:
    value = getattr(answer, field.name, UNSET)
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return value is not UNSET and (default is msgspec.NODEFAULT or value != default)


def _first(items: list[str]) -> list[str]:
    more = len(items) - _SHOWN_MAX
    return items if more <= 0 else [*items[:_SHOWN_MAX], f"… {more} more"]


def _joined(head: str, items: list[str], tail: str, width: int) -> str:
    line = f"{head}{', '.join(items)}{tail}"
    if len(line) <= width and "\n" not in line:
        return line
    lines: list[str] = []
    for item in items:
        if lines and "\n" not in lines[-1] + item and len(lines[-1]) + len(item) + 2 <= width - 4:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")
    body = textwrap.indent("\n".join(lines), "    ")
    return f"{head}\n{body}\n{tail}"
