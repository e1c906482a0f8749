"""Frames for fuzzing: one valid seed or more of every message type, and what becomes of them.

A seed is built from the type itself (`msgspec.inspect`), so a new message is fuzzed as soon as it is declared.
Mutations know the structure: they change the tree of values before it is encoded, or the bytes of it after.
"""

from __future__ import annotations

import random
import struct
import typing
from typing import Any, Final

import msgspec
from msgspec import inspect

from transferqueue.errors import ProtocolError
from transferqueue.transport.bulk import protocol as bulk
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.versions import PROTOCOL

WORDS: Final = ["t", "x", "train", "int64", "float32", "uint8", "", "trained", "<", "stats", "a" * 40]
NUMBERS: Final = [0, 1, 2, 7, -1, 255, 256, 4096, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 62) - 1, 1 << 62,
(1 << 63) - 1,
                  1 << 63, (1 << 64) - 1, -(1 << 63)]  # fmt: skip
ODD: Final[list[Any]] = [None, True, False, 0.0, -0.0, float("nan"), float("inf"), 1e308, "", "\x00", "é" * 9,
"a" * 5000,
                         b"", b"\xff" * 9, b"\x00" * 5000, [], {}, [[]], {"a": {"b": []}}, {1: 2},
                         [0] * 1000]  # fmt: skip
HEADERS: Final = [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
                  b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc1", b"\xd4\x00\x00", b"\xd9\xff",
                  b"\x91" * 3000,
                  b"\x81\xa0" * 3000, b"\xdd\x00\x10\x00\x00"]  # fmt: skip
"""Lengths that no frame has, nesting that no type has, a byte that means nothing, an extension."""
TRIES: Final = 400


def sample(kind: inspect.Type, rng: random.Random, depth: int = 0) -> Any:
    """Plain values that a message of this type could hold."""
    match kind:
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else 0, kind.lt or 1 << 40
            return rng.choice([number for number in NUMBERS if low <= number < high] or [low])
        case inspect.FloatType():
            return rng.choice([0.0, 0.5, 1.0, 3])
        case inspect.StrType():
            return rng.choice(WORDS)[: kind.max_length]
        case inspect.BytesType():
            return rng.randbytes(rng.choice([0, 4, 8, 16, 24]))[: kind.max_length]
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.ListType() | inspect.VarTupleType():
            return [sample(kind.item_type, rng, depth + 1) for _ in range(rng.randint(0, 2 if depth < 4 else 0))]
        case inspect.TupleType():
            return [sample(one, rng, depth + 1) for one in kind.item_types]
        case inspect.DictType():
            return {sample(kind.key_type, rng): sample(kind.value_type, rng) for _ in range(rng.randint(0, 2))}
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.UnionType():
            return sample(rng.choice(kind.types), rng, depth)
        case inspect.StructType():
            return _struct(kind, rng, depth)
        case _:  # Raw and Any: whatever MessagePack holds
            return rng.choice([{"a": 1}, [1, "b"], 7])


def _struct(kind: inspect.StructType, rng: random.Random, depth: int) -> Any:
    values = {field.encode_name: sample(field.type, rng, depth + 1) for field in kind.fields}
    if kind.array_like:
        return ([kind.tag] if kind.tag is not None else []) + list(values.values())
    return ({kind.tag_field: kind.tag} if kind.tag is not None else {}) | values


def _valid(envelope: list[int], kind: type, rng: random.Random, decode: Any) -> list[Any]:
    """A tree whose frame is a message of this type."""
    found = inspect.type_info(kind)
    for _ in range(TRIES):
        tree = [*envelope, sample(found, rng)]
        try:
            decode(msgspec.msgpack.encode(tree if envelope else tree[0]))
        except ProtocolError:
            continue
        return tree
    raise AssertionError(f"no valid {kind.__name__} in {TRIES} tries: teach `sample` its words")


def seeds(rng: random.Random, session: int = 5, each: int = 8) -> list[Any]:
    """Valid trees of every request (in a call of `session`) and of every reply, `each` of a type."""
    calls = [
        _valid([PROTOCOL, session, 9, 3], kind, rng, codec.decode_call) for kind in typing.get_args(m.Request) * each
    ]
    answers = [_valid([PROTOCOL, 7, 9], kind, rng, codec.decode_answer) for kind in typing.get_args(m.Reply) * each]
    return calls + answers


def bulk_seeds(rng: random.Random, each: int = 8) -> list[Any]:
    """Valid trees of every head of the bulk protocol."""
    ends = [(bulk.ToShard, bulk.to_shard), (bulk.ToClient, bulk.to_client)]
    kinds = [(kind, with_digest(decode)) for union, decode in ends for kind in typing.get_args(union)]
    return [_valid([], kind, rng, decode)[0] for kind, decode in kinds * each]


def with_digest(decode: Any) -> Any:
    """A decoder of bulk heads whose frames need no checksum: what is fuzzed lies behind it."""

    def decode_head(frame: bytes) -> Any:
        return decode(bulk.framed(frame))

    return decode_head


class Fuzzer:
    """Frames without end, the same for the same seed: a few from raw noise, most from mutated messages."""

    def __init__(self, seed: int, session: int = 5) -> None:
        self._rng = random.Random(seed)
        self._trees = seeds(self._rng, session) + bulk_seeds(self._rng)

    def frame(self) -> bytes:
        """The next one."""
        rng = self._rng
        if rng.random() < 0.05:
            return rng.randbytes(rng.choice([0, 1, 3, 17, 200, 2000]))
        tree = rng.choice(self._trees)
        if rng.random() < 0.6:
            tree = self._change(tree)
        frame = self._encoded(tree)
        return self._corrupt(frame) if rng.random() < 0.6 else frame

    def _encoded(self, tree: Any) -> bytes:
        try:
            return msgspec.msgpack.encode(tree)
        except (OverflowError, UnicodeEncodeError, RecursionError):
            return b"\xc1"

    def _change(self, tree: Any, depth: int = 0) -> Any:
        """A copy with one node, somewhere below, replaced, removed, repeated or swapped."""
        rng = self._rng
        if not isinstance(tree, list) or not tree or (depth and rng.random() < 0.3):
            return rng.choice([*ODD, *NUMBERS, *WORDS])
        copy, at = list(tree), rng.randrange(len(tree))
        match rng.randrange(7):
            case 0:
                del copy[at]
            case 1:
                copy.insert(at, copy[at])
            case 2:
                other = rng.randrange(len(copy))
                copy[at], copy[other] = copy[other], copy[at]
            case _:
                copy[at] = self._change(copy[at], depth + 1)
        return copy

    def _corrupt(self, frame: bytes) -> bytes:
        rng, changed = self._rng, bytearray(frame)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            at = rng.randrange(len(changed) + 1)
            match rng.randrange(6):
                case 0:
                    changed[at : at + 1] = rng.randbytes(1)
                case 1 if changed:
                    changed[at % len(changed)] ^= 1 << rng.randrange(8)
                case 2:
                    del changed[at:]
                case 3:
                    changed[at:at] = rng.choice(HEADERS)
                case 4:
                    changed[at : at + 1] = rng.choice(HEADERS)
                case _:
                    changed[at:at] = struct.pack(rng.choice(["<Q", "<I", "<d", ">Q"]), rng.choice([0, 1, 0xFFFFFFFF]))
        return bytes(changed)
