"""Converts partition names and tags to names and tags of tables, and back.

A partition's name may contain any character, a table's only some: others are written as ``/XX`` (their bytes in
hexadecimal). A tag may be any value that a column may hold, a row's tag only text, a number or a bool: others are
written as the queue stores values, in base64 with a prefix.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from transferqueue.errors import Corruption, UsageError
from transferqueue.storage.elements.values import decode, encode

_TABLE: Final = "p."
_MARK: Final = "\x01value:"
_INTEGERS: Final = range(-(1 << 63), 1 << 63)


def table_of(partition_id: str) -> str:
    """Return the table of a partition."""
    return _TABLE + name_of(partition_id)


def name_of(text: str) -> str:
    """Encode any text in the characters of a name; callers add a prefix that a name may begin with."""
    return quote(text, safe="").replace("~", "%7E").replace("%", "/")


def partition_of(table: str) -> str | None:
    """Return the partition of a table; None if the table is not one of a partition."""
    return unquote(table.removeprefix(_TABLE).replace("/", "%")) if table.startswith(_TABLE) else None


def text_of(value: Any, subject: str) -> str:
    """A value as text. `UsageError` naming `subject` if the queue does not store it."""
    return b64encode(encode(value, subject)).decode()


def value_of(text: str, subject: str) -> Any:
    """The value that `text_of` converted. `Corruption` if the text is none."""
    try:
        return decode(b64decode(text, validate=True), subject)
    except ValueError as error:
        raise Corruption(f"{subject} is no value that was written so: {error}; take another checkpoint") from error


def stored_tags(tags: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return tags as a row stores them. `UsageError` for values that the queue does not store."""
    wrong = next((name for name in tags if not isinstance(name, str)), None)
    if wrong is not None:
        raise UsageError(f"a tag has the name {wrong!r}; names of tags are text")
    return {name: value if _is_tag(value) else _MARK + text_of(value, f"tag {name!r}") for name, value in tags.items()}


def _is_tag(value: Any) -> bool:
    """Whether a row's tag may be this value."""
    if type(value) is str:
        return not value.startswith(_MARK)
    return type(value) in (float, bool) or (type(value) is int and value in _INTEGERS)


def given_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Return tags as the caller passed them."""
    return {
        name: value_of(value.removeprefix(_MARK), f"tag {name!r}")
        if isinstance(value, str) and value.startswith(_MARK)
        else value
        for name, value in tags.items()
    }
