"""A sampler's memory as plain JSON, and back: dicts with any keys, tuples and sets are tagged, the rest is JSON's
own."""

from __future__ import annotations

from typing import Any

from transferqueue.errors import Corruption, UsageError


def plain(value: Any, subject: str) -> Any:
    """Convert a value to JSON. Raises `UsageError` that names a value without such a form."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [plain(item, subject) for item in value]
    if isinstance(value, dict):
        return {"dict": [[plain(key, subject), plain(item, subject)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [plain(item, subject) for item in value]}
    if isinstance(value, set):
        return {"set": [plain(item, subject) for item in value]}
    raise UsageError(
        f"{subject} holds a {type(value).__name__}; a checkpoint keeps numbers, text, lists, tuples, sets and dicts of "
        "them: let the sampler's memory() give those"
    )


def remembered(stored: Any, subject: str) -> Any:
    """Return the value that `plain` converted."""
    if isinstance(stored, list):
        return [remembered(item, subject) for item in stored]
    if not isinstance(stored, dict):
        return stored
    try:
        ((kind, items),) = stored.items()
        if kind == "dict":
            return {remembered(key, subject): remembered(item, subject) for key, item in items}
        return {"tuple": tuple, "set": set}[kind](remembered(item, subject) for item in items)
    except (ValueError, KeyError, TypeError) as error:
        raise Corruption(f"{subject} is no value that was written so: {error!r}; take another checkpoint") from error
