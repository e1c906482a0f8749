"""Checks, encodes and decodes plain nested values, which are stored as MessagePack.

Plain values are None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts (with keys of str or int) of
these, nested at most `VALUE_DEPTH_MAX` deep. A tuple is read back as a list. Everything else is refused, also types
that an encoder would turn into something similar (dates, sets, enums, numpy scalars). Nothing is pickled.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from transferqueue.errors import Corruption, SchemaError
from transferqueue.errors.text import shown
from transferqueue.limits import VALUE_DEPTH_MAX, VALUE_NODES_MAX

_LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})
_KEYS: Final = frozenset({str, int})
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


class _Check:
    """Walks over one value, and refuses it if it is not plain, too deep, too large, or contains itself."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.left = VALUE_NODES_MAX
        self.path: list[int] = []

    def walk(self, value: object) -> None:
        kind = type(value)
        if kind in _LEAVES:
            return
        if kind is not dict and kind is not list and kind is not tuple:
            raise SchemaError(
                f"{self.subject}: a value holds {kind.__module__}.{kind.__qualname__}; plain values are None, bool, "
                "int, float, str, bytes, and lists and dicts of these; give arrays as columns of their own"
            )
        self._enter(value)
        children: Any = value
        if isinstance(value, dict):
            self._check_keys(value)
            children = value.values()
        for child in children:
            if type(child) not in _LEAVES:
                self.walk(child)
        self.path.pop()

    def _enter(self, value: Any) -> None:
        if id(value) in self.path:
            raise SchemaError(f"{self.subject}: a value contains itself; store a tree, and refer to parts by a key")
        if len(self.path) >= VALUE_DEPTH_MAX:
            raise SchemaError(f"{self.subject}: a value is nested deeper than {VALUE_DEPTH_MAX}; flatten it")
        self.left -= len(value) + 1
        if self.left < 0:
            raise SchemaError(f"{self.subject}: a value has more than {VALUE_NODES_MAX} parts; store arrays as columns")
        self.path.append(id(value))

    def _check_keys(self, value: dict[Any, Any]) -> None:
        wrong = next((key for key in value if type(key) not in _KEYS), None)
        if wrong is not None or None in value:
            raise SchemaError(f"{self.subject}: a dict has the key {shown(wrong)}; keys are str or int")


def encode(value: object, subject: str) -> bytes:
    """MessagePack of one plain value; `SchemaError` naming `subject` if it is not plain."""
    _Check(subject).walk(value)
    try:
        return _encode(value)
    except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise SchemaError(
            f"{subject}: a value cannot be stored ({error}); integers have 64 bits, text is Unicode"
        ) from error


def decode(stored: bytes | memoryview, subject: str) -> Any:
    """The value of one row. Raises `Corruption` if the bytes are not MessagePack."""
    try:
        return _decode(stored)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise Corruption(f"{subject}: a stored value is not MessagePack ({error})") from error
