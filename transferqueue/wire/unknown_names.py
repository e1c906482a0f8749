"""Explains the decoder's error for a message of a newer package: which request, policy or option this package does not
know, and which it has. Pure.

Policies and options are open: a newer package may have more of them under the same protocol. The decoder's own error
gives only the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from transferqueue.errors import listing
from transferqueue.errors.text import visible
from transferqueue.wire.versions import VERSION

_UNKNOWN: Final = re.compile(r"Invalid (?:enum )?value '(.*)' - at `\$((?:\[\d+\])+)`", re.DOTALL)
_LONGER: Final = "Expected `array` of at most length "
_DEPTH_MAX: Final = 64


def explain(frame: bytes, kinds: Mapping[str, type[msgspec.Struct]], error: str) -> str:
    """The meaning of the decoder's `error` for people; "" if a newer package is not its cause.

    Args:
        frame: should end with a message of one of `kinds`.
        kinds: messages, by tag.
        error: of the decoder.
    """
    if _LONGER in error:
        return (
            f"it has more items than package {VERSION}, which runs here, knows: upgrade it, or install its version at "
            "the other end"
        )
    match = _UNKNOWN.search(error)
    if match is None:
        return ""
    places = [int(place) for place in re.findall(r"\d+", match[2])[:_DEPTH_MAX]]
    try:
        message = msgspec.msgpack.decode(frame)[places[0]]
        names = list(kinds) if places[1:] == [0] else _names(_types(kinds[message[0]]), message, places[1:])
    except (
        msgspec.MsgspecError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ):  # the decoder does not check the parts that it skips
        return ""
    name = visible(match[1][:40])
    return (
        f"package {VERSION}, which runs here, does not know {name!r}; it has {listing(names)}: use one of these, or "
        "upgrade it"
    )


_types: Final = lru_cache(inspect.type_info)
"""Of one message at a time: those of all take longer than a request may (`TURN_S_MAX`)."""


def _names(kind: inspect.Type, tree: Any, places: list[int]) -> list[str]:
    """The names that may stand at a place: tags of structs, or the values of an option."""
    if not places or isinstance(kind, inspect.LiteralType):
        return [str(value) for value in kind.values] if isinstance(kind, inspect.LiteralType) else []
    at, *inner = places
    structs = [member for member in _members(kind) if isinstance(member, inspect.StructType) and member.tag is not None]
    if not inner and not at and structs:
        return [str(member.tag) for member in structs]
    for member in _members(kind):
        match member:
            case inspect.StructType() if isinstance(tree, list) and member.tag in (None, tree[0]):
                return _names(member.fields[at - int(member.tag is not None)].type, tree[at], inner or [0])
            case inspect.ListType() | inspect.VarTupleType() if isinstance(tree, list):
                return _names(member.item_type, tree[at], inner)
    return []


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)
