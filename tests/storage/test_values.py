"""Plain values are read back as they were given, whatever stacks put; hostile bytes are `Corruption`, no more."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.storage.shards import opened_shard
from tests.storage.values_of_stacks import kinds, same
from transferqueue.errors import Corruption, SchemaError, UsageError
from transferqueue.limits import VALUE_DEPTH_MAX
from transferqueue.schema import Field
from transferqueue.storage.elements.values import check, decode, encode

KINDS = kinds()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_value_of_every_kind_comes_back_as_it_was(make: Callable[[], Any]) -> None:
    given = make()
    stored = encode(given, "a value")
    check(stored, "a value")
    assert same(given, decode(stored, "a value"))
    assert same([given, given], decode(encode([given, given], "a value"), "a value"))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_value_that_was_cut_off_or_prolonged_is_damaged(make: Callable[[], Any]) -> None:
    stored = encode([make(), make()], "a value")
    for end in range(len(stored)):
        with pytest.raises(Corruption, match=r"^a value: a stored value is"):
            decode(stored[:end], "a value")
    with pytest.raises(Corruption):
        decode(stored + b"\x00", "a value")


def test_changed_bytes_are_another_value_or_damaged() -> None:
    course = random.Random(7)
    stored = [encode(make(), "a value") for make in KINDS.values()]
    for _ in range(4000):
        changed = bytearray(course.choice(stored))
        for _ in range(course.randint(1, 4)):
            changed[course.randrange(len(changed))] = course.randrange(256)
        for read in (decode, check):
            with contextlib.suppress(Corruption, UsageError):
                read(changed, "a value")


def extension(code: int, data: bytes) -> bytes:
    return struct.pack(">BIb", 0xC9, len(data), code) + data


def nested(code: int, times: int) -> bytes:
    stored = b"\x90"
    for _ in range(times):
        stored = extension(code, b"\x91" + stored)
    return stored


@pytest.mark.parametrize(
    "stored",
    [
        extension(99, b"\x90"),
        extension(5, b"\xdd\xff\xff\xff\xff"),
        extension(5, b"\x01"),
        nested(5, VALUE_DEPTH_MAX + 2),
        nested(5, 20_000),
        extension(1, struct.pack(">HQ", 0, 1 << 60)),
        extension(1, struct.pack(">HQ", 0, 9) + extension(2, (1 << 62).to_bytes(8, "little"))),
        extension(18, b"\x93\xa2O8\x91\x01\xc4\x00"),
        extension(18, b"\x93\xa3<f8\x91\xce\xff\xff\xff\xff\xc4\x00"),
        extension(6, b"\x91\x90"),
        extension(24, b"\x91\xa4save"),
        extension(12, b"\x91\x01"),
    ],
    ids=str,
)
def test_hostile_bytes_cost_no_more_than_they_are(stored: bytes) -> None:
    with pytest.raises(Corruption, match=r"^a value: "):
        decode(stored, "a value")


def test_bytes_of_earlier_versions_are_unchanged() -> None:
    plain = {"a": [1, -1, 1.5, None, True, "x", b"y"], 3: {"b": []}}
    assert encode(plain, "a value").hex() == (
        "82a161970 1ffcb3ff8000000000000c0c3a178c4017903 81a16290".replace(" ", "")
    )


def test_arrays_in_values_are_views_of_shared_memory() -> None:
    rows = [{"pixel_values": torch.full((3, at + 1), at), "grid": np.arange(at)} for at in range(4)]
    with opened_shard() as shard:
        column = shard.column("x", shard.put({"x": rows}, [Field("x", "value")]), [(0, at) for at in range(4)])
        found = column.list()
        assert all(map(same, rows, found))
        whole = column.arrow().buffers()[2]
        inside = [item["pixel_values"].data_ptr() - whole.address for item in found]
        assert all(0 <= at < whole.size and at % 16 == 0 for at in inside)


def test_views_of_values_keep_their_memory_after_their_rows() -> None:
    with tq.connect("embedded", arena_bytes="16MiB") as queue:
        table = queue.create_table("t", retention=tq.Manual())
        rows = table.put(x=[{"a": torch.full((1 << 18,), 7.0)}, {}, {"a": np.ones(3)}])
        with table.read(rows) as read:
            kept, _, copied = read["x"].list()
        table.delete(rows)
        for number in range(40):  # more than the arena holds
            table.delete(table.put(x=[{"a": torch.full((1 << 18,), float(number))}], timeout_s=60))
        assert bool((kept["a"] == 7).all())
        assert copied["a"].tolist() == [1.0, 1.0, 1.0]


def test_dicts_with_tensors_are_a_column_by_themselves() -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["inputs"])])
        given = [{"pixel_values": torch.ones(2, 3), "grid": (1, 2)}, {}]
        table.put(inputs=given)
        with table.lease("train", rows=2, timeout_s=10) as batch:
            kept = batch["inputs"].list()
        assert same(given, kept)


@dataclasses.dataclass
class Unknown:
    value: int


def test_an_object_of_a_class_that_is_not_registered_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"a value holds .*Unknown, .*register the class by transferqueue.register_"):
        encode({"a": [Unknown(1)]}, "a value")
    stored = extension(29, b"\x92\xa5other\x90")
    with pytest.raises(UsageError, match="object of 'other', which is not registered in this process: import its"):
        decode(stored, "a value")
    check(stored, "a value")  # a server checks it, and needs no class of its clients


def test_a_class_is_registered_by_functions_or_by_its_kind() -> None:
    class Money:
        def __init__(self, cents: int) -> None:
            self.cents = cents

    with pytest.raises(UsageError, match=r"Money.* is no dataclass, enum, named tuple or mapping; give to_plain"):
        tq.register_value(Money)
    with pytest.raises(UsageError, match="give both functions"):
        tq.register_value(Money, to_plain=vars)
    with pytest.raises(UsageError, match="give a class"):
        tq.register_value(3)  # type: ignore[type-var]
    tq.register_value(Money, name="money", to_plain=lambda money: money.cents, from_plain=Money)
    with pytest.raises(UsageError, match="Money has the name 'money'; give another by name="):
        tq.register_value(Unknown, name="money")
    assert decode(encode(Money(7), "a value"), "a value").cents == 7
