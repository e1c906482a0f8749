"""Checks, encodes and decodes plain nested values, which are stored as MessagePack.

None, bool, int, float, str, bytes, lists, and dicts with keys of str or int are MessagePack's own. Everything else that
can be kept is an extension type: tuples, sets, dates, dicts with other keys, arrays, tensors, images, objects of
registered classes and more (`value_kinds`). A value is read back as it was given, or refused when it is given. Nothing
is pickled, and no code is chosen by what is read.

A row with arrays, tensors or images is one extension: the tree, then the buffers in the order in which the tree names
them, each at a multiple of `ALIGNED` bytes of the row. The write copies them once, into shared memory. The read makes
views of them where the row lies aligned, which it does if all rows of the column have buffers.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec
from msgspec.msgpack import Ext

from transferqueue.errors import Corruption, SchemaError, TransferQueueError
from transferqueue.limits import VALUE_DEPTH_MAX, VALUE_NODES_MAX
from transferqueue.storage.elements.value_kinds import (
    BUFFER,
    FRAME,
    INTEGER,
    KINDS,
    PAIRS,
    Buffer,
    Memory,
    ValueKind,
    kind_of,
)

_LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})
_KEYS: Final = frozenset({str, int})
_encode: Final = msgspec.msgpack.Encoder().encode

ALIGNED: Final = 16
"""Enough for every dtype of numpy and torch."""
_HEAD: Final = struct.Struct(">BIbHQ")
"""The first bytes of a row with buffers: an extension's mark, length and number; two unused bytes; the tree's bytes."""
_LONG_EXTENSION: Final = 0xC9
_HEADED: Final = 6
"""Bytes of the mark, length and number."""
_ROW_BYTES_MAX: Final = (1 << 32) - 1


class _Writer:
    """Walks over one value, and returns it as MessagePack has it. Refuses it if it cannot be kept, is too deep, too
    large, or contains itself."""

    def __init__(self, subject: str, *, wide: bool = False) -> None:
        self.subject = subject
        self.left = VALUE_NODES_MAX
        self.path: list[int] = []
        self.buffers: list[Memory] = []
        self.wide = wide
        """Whether integers may have more than 64 bits, so that each is looked at."""

    def walk(self, value: Any) -> Any:
        cls = type(value)
        if cls in _LEAVES:
            return _integer(value) if self.wide and cls is int else value
        if cls is Buffer:
            self.buffers.append(value.memory)
            return Ext(BUFFER, len(value.memory).to_bytes(8, "little"))
        if cls is list:
            return self._children(value, value)
        if cls is dict:
            return self._dict(value)
        kind = kind_of(value)
        if kind is None:
            raise SchemaError(
                f"{self.subject}: a value holds {cls.__module__}.{cls.__qualname__}, which is not stored: give its "
                "parts (numbers, text, bytes, dates, arrays, tensors, images; lists, tuples, sets and dicts of them), "
                "or register the class by transferqueue.register_value"
            )
        return Ext(kind.code, _encode(self._children(value, kind.parts(value, self.subject))))

    def is_plain(self, value: Any) -> bool:
        """Whether MessagePack has a value that is no leaf as it is. Most values are so, and this costs half of
        `walk`."""
        cls = type(value)
        if cls is dict:
            if not _KEYS.issuperset(map(type, value)):
                return False
            children = value.values()
        elif cls is list:
            children = value
        else:
            return False
        self._enter(value, len(children))
        for child in children:
            if type(child) not in _LEAVES and not self.is_plain(child):
                return False
        self.path.pop()
        return True

    def _children(self, value: Any, children: Any) -> list[Any]:
        self._enter(value, len(children))
        if self.wide:
            walked = [self.walk(child) for child in children]
        else:
            walked = [child if type(child) in _LEAVES else self.walk(child) for child in children]
        self.path.pop()
        return walked

    def _dict(self, value: dict[Any, Any]) -> Any:
        if _KEYS.issuperset(map(type, value)) and not (self.wide and any(map(_is_wide, value))):
            return dict(zip(value, self._children(value, value.values()), strict=True))
        pairs = [part for pair in value.items() for part in pair]
        return Ext(PAIRS, _encode(self._children(value, pairs)))

    def _enter(self, value: Any, children: int) -> None:
        if id(value) in self.path:
            raise SchemaError(f"{self.subject}: a value contains itself; store a tree, and refer to parts by a key")
        if len(self.path) >= VALUE_DEPTH_MAX:
            raise SchemaError(f"{self.subject}: a value is nested deeper than {VALUE_DEPTH_MAX}; flatten it")
        self.left -= children + 1
        if self.left < 0:
            raise SchemaError(f"{self.subject}: a value has more than {VALUE_NODES_MAX} parts; store arrays as columns")
        self.path.append(id(value))


def _is_wide(key: Any) -> bool:
    return type(key) is int and not -(1 << 63) <= key < 1 << 64


def _integer(value: int) -> Any:
    return (
        Ext(INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)) if _is_wide(value) else value
    )


def pieces(value: object, subject: str) -> list[Memory]:
    """The stored bytes of one value, in pieces that lie one after the other: MessagePack, and the memory of arrays,
    which must not change before it is written. `SchemaError` naming `subject` if the value cannot be kept."""
    try:
        try:
            if type(value) in _LEAVES or _Writer(subject).is_plain(value):
                return [_encode(value)]
            writer = _Writer(subject)
            tree = _encode(writer.walk(value))
        except OverflowError:
            writer = _Writer(subject, wide=True)
            tree = _encode(writer.walk(value))
    except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise SchemaError(f"{subject}: a value cannot be stored ({error}); text is Unicode") from error
    return _framed(tree, writer.buffers, subject) if writer.buffers else [tree]


def encode(value: object, subject: str) -> bytes:
    """The stored bytes of one value; `SchemaError` as in `pieces`."""
    return b"".join(pieces(value, subject))


def _framed(tree: bytes, buffers: list[Memory], subject: str) -> list[Memory]:
    framed: list[Memory] = []
    nbytes = _HEAD.size
    for piece in (tree, *buffers):
        framed += (piece, bytes(-(nbytes + len(piece)) % ALIGNED))
        nbytes = _aligned(nbytes + len(piece))
    if nbytes - _HEADED > _ROW_BYTES_MAX:
        raise SchemaError(f"{subject}: a value has {nbytes:,} bytes, over {_ROW_BYTES_MAX:,}; store arrays as columns")
    return [_HEAD.pack(_LONG_EXTENSION, nbytes - _HEADED, FRAME, 0, len(tree)), *framed]


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNED


class _Extended(Exception):
    """A value has an extension."""


def _raise_extended(code: int, data: memoryview) -> Any:
    raise _Extended


_decode_plain: Final = msgspec.msgpack.Decoder(ext_hook=_raise_extended).decode


class _Reader:
    """Decodes one row that has extensions. Bytes are taken once and in order, so a short row makes no large value.

    `build`: make objects of the extensions' kinds; otherwise only check their frames.
    """

    def __init__(self, row: memoryview, *, build: bool) -> None:
        self.row, self.at, self.depth, self.build = row, len(row), 0, build
        self.decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode

    def read(self) -> Any:
        tree = self.row
        if len(tree) >= _HEAD.size and tree[0] == _LONG_EXTENSION and tree[_HEADED - 1] == FRAME:
            size = _HEAD.unpack_from(tree)[-1]
            tree, self.at = tree[_HEAD.size : _HEAD.size + size], _aligned(_HEAD.size + size)
        value = self.decode(tree)
        if self.at != len(self.row):
            raise ValueError(f"its buffers end at byte {self.at} of {len(self.row)}")
        return value

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == BUFFER:
            return self._take(int.from_bytes(data, "little"))
        if code == INTEGER:
            return int.from_bytes(data, "little", signed=True)
        if self.depth > VALUE_DEPTH_MAX:
            raise ValueError(f"it is nested deeper than {VALUE_DEPTH_MAX}")
        kind = KINDS.get(code)
        if kind is None and code != PAIRS:
            raise ValueError(f"extension {code} is unknown to this version")
        self.depth += 1
        parts = self.decode(data)
        self.depth -= 1
        if type(parts) is not list:
            raise ValueError(f"extension {code} has no parts")
        if not self.build:
            return None
        return kind.value(parts) if isinstance(kind, ValueKind) else dict(zip(parts[::2], parts[1::2], strict=True))

    def _take(self, size: int) -> memoryview:
        start, end = self.at, self.at + size
        if end > len(self.row):
            raise ValueError(f"a buffer ends at byte {end} of {len(self.row)}")
        self.at = _aligned(end)
        return self.row[start:end]


def decode(stored: bytes | memoryview, subject: str) -> Any:
    """The value of one row. Arrays and tensors may be views of `stored`.

    Raises `Corruption` if the bytes are no value, `UsageError` if this process lacks the class or library of a part.
    """
    return _read(stored, subject, build=True)


def check(stored: bytes | memoryview, subject: str) -> None:
    """Raise `Corruption` if the bytes are no value. Needs neither the classes nor the libraries of its parts, and makes
    no objects of them."""
    _read(stored, subject, build=False)


def _read(stored: bytes | memoryview, subject: str, *, build: bool) -> Any:
    try:
        return _decode_plain(stored)
    except _Extended:
        pass
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise Corruption(f"{subject}: a stored value is not MessagePack ({error})") from error
    try:
        return _Reader(memoryview(stored), build=build).read()
    except (TransferQueueError, MemoryError):
        raise
    except Exception as error:
        raise Corruption(f"{subject}: a stored value is damaged, or of a newer version ({error!r})") from error
