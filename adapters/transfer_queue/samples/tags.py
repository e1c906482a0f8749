"""Converts partition names and tags to names and tags of tables, and back.

A partition's name may contain any character, a table's only some: others are written as ``/XX`` (their bytes in
hexadecimal). A tag may be any plain value, a row's tag only text, a number or a bool: others are written as JSON with a
prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

_TABLE: Final = "p."
_MARK: Final = "\x01json:"


def table_of(partition_id: str) -> str:
    """Return the table of a partition."""
    return _TABLE + name_of(partition_id)


def name_of(text: str) -> str:
    """Encode any text in the characters of a name; callers add a prefix that a name may begin with."""
    return quote(text, safe="").replace("~", "%7E").replace("%", "/")


def partition_of(table: str) -> str | None:
    """Return the partition of a table; None if the table is not one of a partition."""
    return unquote(table.removeprefix(_TABLE).replace("/", "%")) if table.startswith(_TABLE) else None


def stored_tags(tags: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return tags as a row stores them. `TypeError` for values that JSON does not have."""
    return {
        str(name): value if isinstance(value, str | int | float | bool) else _MARK + json.dumps(value)
        for name, value in tags.items()
    }


def given_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Return tags as the caller passed them."""
    return {
        name: json.loads(value[len(_MARK) :]) if isinstance(value, str) and value.startswith(_MARK) else value
        for name, value in tags.items()
    }
