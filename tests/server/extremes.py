"""Every request with every integer, number, text, list and map at its extremes, made from the types of the messages
alone.

`variants` takes a request that is in order and yields frames of it in which one value, at any depth, is an extreme one.
What the decoder refuses is among them: the server must survive that too.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from transferqueue.limits import Limits
from transferqueue.policies import Pacing, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m

REQUESTS: tuple[type, ...] = typing.get_args(m.Request)
INTEGERS = (0, 1, -1, 2, 255, 1 << 20, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 32, 1 << 53, (1 << 53) + 1,
(1 << 62) - 1, 1 << 62,
            (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1)  # fmt: skip
FLOATS = (0.0, -0.0, 1e-320, 1e9, 1.1e9, 1e308, -1.0, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "\0", "t", "x", "train", "\n\x1b[31m", "../..", "/", "/dev/zero", "a/b", "é" * 128, "n" * 128, "n" * 129,
"n" * 4096,
         "n" * 4097, "__class__", "-1", "0" * 5000, "tcp://*:0", "tcp://[::1]:99999", "�")  # fmt: skip
BYTES = (b"", b"\0", b"\xff" * 7, b"\xff" * 8, b"\0" * 8, b"\x7f" * 16, bytes(range(24)), b"\xff" * 64)
ITEMS = (0, 2, 65)
"""Lengths of lists and maps beside the usual one."""
NO_TEXT = msgspec.Raw(b"\xa3\xed\xa0\x80")
"""A lone surrogate, which is no UTF-8."""
FOREIGN: tuple[Any, ...] = (None, True, [], {}, [[[]]], "text", 7, 0.5, b"bytes", NO_TEXT)
"""What is of another type."""

SAMPLES: dict[type, Any] = {
    Field: Field("x", "int64"),
    Task: Task("train", needs=["x"]),
    Pacing: Pacing(batch_rows=1, task="train"),
    Limits: Limits(),
}
"""Parts whose plainest values are refused when made."""


def sample(kind: inspect.Type) -> Any:
    """A value of this type as it travels, in order or nearly, with one item in each list and map."""
    match kind:
        case inspect.StructType():
            if kind.cls in SAMPLES:
                return plain(SAMPLES[kind.cls])
            return [*([] if kind.tag is None else [kind.tag]), *(sample(one.type) for one in kind.fields)]
        case inspect.UnionType():
            return sample(next((one for one in kind.types if not isinstance(one, inspect.NoneType)), kind.types[0]))
        case inspect.IntType():
            return max(kind.ge or 0, 1)
        case inspect.FloatType():
            return 1.0
        case inspect.BoolType():
            return False
        case inspect.StrType():
            return "t"
        case inspect.BytesType():
            return b"\0" * (kind.min_length or 8)
        case inspect.ListType():
            return [sample(kind.item_type)]
        case inspect.VarTupleType():
            return [sample(kind.item_type)]
        case inspect.TupleType():
            return [sample(one) for one in kind.item_types]
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case inspect.LiteralType():
            return kind.values[0]
    return None


def extremes(kind: inspect.Type) -> Iterator[Any]:
    """Extreme values for a place of this type that has no parts."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from extremes(one)
        case inspect.IntType():
            yield from INTEGERS
        case inspect.FloatType():
            yield from FLOATS
        case inspect.BoolType():
            yield True
        case inspect.StrType():
            yield from TEXTS
            yield NO_TEXT
        case inspect.BytesType():
            yield from BYTES
        case inspect.LiteralType():
            yield from kind.values


def trees(kind: inspect.Type, tree: Any) -> Iterator[Any]:
    """`tree`, plain values of this type, with one extreme at each of its places in turn."""
    yield from extremes(kind)
    yield from FOREIGN
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            if isinstance(one, inspect.StructType) and _is(one, tree):
                yield from _of_struct(one, tree)
            elif isinstance(one, inspect.ListType | inspect.VarTupleType | inspect.DictType) and tree:
                yield from _of_parts(one, tree)
    elif isinstance(kind, inspect.StructType):
        yield from _of_struct(kind, tree)
    else:
        yield from _of_parts(kind, tree)


def _is(kind: inspect.StructType, tree: Any) -> bool:
    return isinstance(tree, list) and (kind.tag is None or (bool(tree) and tree[0] == kind.tag))


def _of_struct(kind: inspect.StructType, tree: list[Any]) -> Iterator[Any]:
    first = 0 if kind.tag is None else 1
    for at, field in enumerate(kind.fields, first):
        for one in trees(field.type, tree[at]):
            yield [*tree[:at], one, *tree[at + 1 :]]
    yield tree[:first]
    yield [*tree, 1]


def _of_parts(kind: inspect.Type, tree: Any) -> Iterator[Any]:
    match kind:
        case inspect.ListType() | inspect.VarTupleType():
            tree = tree or [sample(kind.item_type)]
            for count in ITEMS:
                yield list(tree) * count
            for one in trees(kind.item_type, tree[0]):
                yield [one, *tree[1:]]
        case inspect.TupleType():
            for at, part in enumerate(kind.item_types):
                for one in trees(part, tree[at]):
                    yield [*tree[:at], one, *tree[at + 1 :]]
        case inspect.DictType():
            ((key, value),) = tree.items() or [(sample(kind.key_type), sample(kind.value_type))]
            yield {f"{key}{number}": value for number in range(130)}
            for one in trees(kind.value_type, value):
                yield {key: one}


def plain(value: Any) -> Any:
    """A message, or a part of one, as the lists and numbers that travel."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def variants(request: type, tree: list[Any] | None = None) -> Iterator[list[Any]]:
    """Plain values of a request, with one extreme in each place in turn. tree: what the others hold; None: a
    `sample`."""
    kind = typing.cast("inspect.StructType", inspect.type_info(request))
    yield from _of_struct(kind, sample(kind) if tree is None else tree)
