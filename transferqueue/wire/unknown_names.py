"""Explains the decoder's error for a message of a newer package: which request, policy or option this package does not
know, which it has, and the package that has it. Pure.

Requests, policies and options are open: a newer package may have more of them under the same protocol. The decoder's
own error gives only the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal

import msgspec
from msgspec import inspect

from transferqueue.errors import listing
from transferqueue.errors.text import visible
from transferqueue.wire.versions import VERSION

_UNKNOWN: Final = re.compile(r"Invalid (?:enum )?value '(.*)' - at `\$((?:\[\d+\])+)`", re.DOTALL)
_LONGER: Final = "Expected `array` of at most length "
_DEPTH_MAX: Final = 64
_CHARS_MAX: Final = 40

_items: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_text: Final = msgspec.msgpack.Decoder(str)

End = Literal["server", "client"]


def explain(
    frame: bytes, kinds: Mapping[str, type[msgspec.Struct]], error: str, *, reader: End, sender_package: str
) -> str:
    """The meaning of the decoder's `error` for people; "" if a newer package is not its cause.

    Args:
        frame: should end with a message of one of `kinds`.
        kinds: messages, by tag.
        error: of the decoder.
        reader: the end that this process is.
        sender_package: version of the package at the other end; "": not known.
    """
    sender: End = "client" if reader == "server" else "server"
    version = f" {visible(sender_package[:_CHARS_MAX])}" if sender_package else ""
    remedy = f"install the {sender}'s package{version}, or a later one, for the {reader}"
    if _LONGER in error:
        return f"it has more items than the {reader}'s package {VERSION} knows: {remedy}"
    match = _UNKNOWN.search(error)
    if match is None:
        return ""
    places = [int(place) for place in re.findall(r"\d+", match[2])[:_DEPTH_MAX]]
    try:
        message = _items.decode(frame)[places[0]]
        tag = _text.decode(_items.decode(message)[0])
        names = list(kinds) if places[1:] == [0] else _names(_types(kinds[tag]), message, places[1:])
    except (  # the decoder does not check the parts that it skips
        msgspec.MsgspecError,
        LookupError,
        UnicodeDecodeError,
        RecursionError,
    ):
        return ""
    name = visible(match[1][:_CHARS_MAX])
    use = "use one of these, or " if reader == "server" else ""
    return f"the {reader}'s package {VERSION} does not know {name!r}; it has {listing(names)}: {use}{remedy}"


_types: Final = lru_cache(inspect.type_info)
"""Of one message at a time: those of all take longer than a request may (`TURN_S_MAX`)."""


def _names(kind: inspect.Type, tree: msgspec.Raw, places: list[int]) -> list[str]:
    """The names that may stand at a place: tags of structs, or the values of an option."""
    if not places or isinstance(kind, inspect.LiteralType):
        return [str(value) for value in kind.values] if isinstance(kind, inspect.LiteralType) else []
    at, *inner = places
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    structs = [member for member in members if isinstance(member, inspect.StructType)]
    tags = [str(member.tag) for member in structs if member.tag is not None]
    if not inner and not at and tags:
        return tags
    items = _items.decode(tree)
    for struct in structs:
        if struct.tag is None or struct.tag == _text.decode(items[0]):
            return _names(struct.fields[at - (struct.tag is not None)].type, items[at], inner or [0])
    for member in members:
        if isinstance(member, inspect.ListType | inspect.VarTupleType):
            return _names(member.item_type, items[at], inner)
    return []
