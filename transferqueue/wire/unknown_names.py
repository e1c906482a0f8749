"""Says what is wrong with a message of a newer package: which request, policy or option this package does not know, and
which it has. Pure.

Policies and options are open: a newer package may have more of them under the same protocol. The decoder's own error
has only the place.
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
    """What the decoder's `error` means for people; "" if it is not about what a newer package has.

    frame: should end with a message of one of `kinds`, by tag.
    """
    if _LONGER in error:
        return (
            f"it has more than package {VERSION} knows, which runs here: upgrade it, or install its version at the "
            "other end"
        )
    found = _UNKNOWN.search(error)
    if found is None:
        return ""
    places = [int(place) for place in re.findall(r"\d+", found[2])[:_DEPTH_MAX]]
    try:
        message = msgspec.msgpack.decode(frame)[places[0]]
        names = list(kinds) if places[1:] == [0] else _names(_types(kinds[message[0]]), message, places[1:])
    except (
        msgspec.MsgspecError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ):  # what is not read by the decoder may be anything
        return ""
    name = visible(found[1][:40])
    return (
        f"package {VERSION}, which runs here, does not know {name!r}; it has {listing(names)}: use one of these, or "
        "upgrade it"
    )


_types: Final = lru_cache(inspect.type_info)
"""Of one message at a time: all of them take longer than a request may (`TURN_S_MAX`)."""


def _names(kind: inspect.Type, tree: Any, places: list[int]) -> list[str]:
    """The names that may stand at a place: tags of structs, or the values of an option."""
    if not places or isinstance(kind, inspect.LiteralType):
        return [str(value) for value in kind.values] if isinstance(kind, inspect.LiteralType) else []
    at, *inner = places
    structs = [each for each in _members(kind) if isinstance(each, inspect.StructType) and each.tag is not None]
    if not inner and not at and structs:
        return [str(each.tag) for each in structs]
    for each in _members(kind):
        match each:
            case inspect.StructType() if isinstance(tree, list) and each.tag in (None, tree[0]):
                return _names(each.fields[at - int(each.tag is not None)].type, tree[at], inner or [0])
            case inspect.ListType() | inspect.VarTupleType() if isinstance(tree, list):
                return _names(each.item_type, tree[at], inner)
    return []


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)
