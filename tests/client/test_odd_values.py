"""Integers of any size, texts of any length and nesting of any depth, given anywhere: a typed error at once, short,
that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.errors.text import TEXT_SHOWN_CHARS

LONG = "A" * 100_000
SHORT_MAX = 600
"""Characters of an error that echoes one odd value."""


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


INTEGERS: dict[str, Callable[[tq.Queue, tq.Table, int], object]] = {
    "column": lambda queue, table, value: table.put(x=[value]),
    "of a list": lambda queue, table, value: table.put(x=[1], z=[[value]]),
    "for all rows": lambda queue, table, value: table.put(x=value, y=[[1]]),
    "tags": lambda queue, table, value: table.put(x=[1], tags={"a": value}),
    "tokens": lambda queue, table, value: table.put(x=[1], tokens=[value]),
    "priority": lambda queue, table, value: table.put(x=[1], priority=value),
    "group_id": lambda queue, table, value: table.put(x=[1], group_id=value, group_size=1),
    "policy_version": lambda queue, table, value: table.put(x=[1], policy_version=value),
    "Repeat": lambda queue, table, value: table.put(x=tq.Repeat([1], value)),
    "rows of a lease": lambda queue, table, value: table.lease("train", rows=value, timeout_s=0),
    "tokens of a lease": lambda queue, table, value: table.lease("train", tokens=value, timeout_s=0),
    "timeout": lambda queue, table, value: table.lease("train", rows=1, timeout_s=value),
    "rows to read": lambda queue, table, value: table.read([value]),
    "limit": lambda queue, table, value: table.read(limit=value),
    "TagIs": lambda queue, table, value: table.read(where=[tq.TagIs("a", value)]),
    "Compare": lambda queue, table, value: table.read(where=[tq.Compare("x", "<", value)]),
    "VersionBetween": lambda queue, table, value: table.read(where=[tq.VersionBetween(value)]),
    "drop": lambda queue, table, value: table.drop([value], "old"),
    "advance": lambda queue, table, value: table.advance(value),
    "reserve": lambda queue, table, value: table.reserve(value, timeout_s=0),
    "Limits": lambda queue, table, value: tq.Limits(rows=value),
    "bytes of Limits": lambda queue, table, value: tq.Limits(bytes=value),
    "lease_s": lambda queue, table, value: queue.create_table("u", tasks=[tq.Task("a", lease_s=value)]),
    "batch_rows": lambda queue, table, value: tq.Pacing("train", value),
    "depth": lambda queue, table, value: tq.Pacing("train", 4, depth=value),
    "min_size": lambda queue, table, value: tq.Complete(min_size=value),
    "shape": lambda queue, table, value: tq.Field("a", "int64", (value,)),
    "version": lambda queue, table, value: queue.weights("w").publish(value, {"a": np.zeros(2)}),
    "pull": lambda queue, table, value: queue.weights("w").pull(version=value, timeout_s=0),
}

TEXTS: dict[str, Callable[[tq.Queue, tq.Table, str], object]] = {
    "key": lambda queue, table, text: table.put(x=[1], key=[text]),
    "table": lambda queue, table, text: queue.create_table(text),
    "task": lambda queue, table, text: table.lease(text, rows=1, timeout_s=0),
    "field": lambda queue, table, text: table.put(**{text: [1]}),
    "tag": lambda queue, table, text: table.put(x=[1], tags={text: 1}),
    "value of a tag": lambda queue, table, text: table.put(x=[1], tags={"a": text}),
    "reason": lambda queue, table, text: table.drop([0], text),
    "Compare": lambda queue, table, text: table.read(where=[tq.Compare(text, "<", 1)]),
    "op": lambda queue, table, text: table.read(where=[tq.Compare("x", text, 1)]),  # type: ignore[arg-type]
    "find": lambda queue, table, text: table.find([text]),
    "rows": lambda queue, table, text: table.lease("train", rows=text, timeout_s=0),  # type: ignore[arg-type]
    "timeout": lambda queue, table, text: table.lease("train", rows=1, timeout_s=text),  # type: ignore[arg-type]
    "dtype": lambda queue, table, text: tq.Field("a", text),
    "needs": lambda queue, table, text: tq.Task("a", needs=[text]),
    "from_": lambda queue, table, text: tq.Task("a", from_=text),  # type: ignore[arg-type]
    "bytes": lambda queue, table, text: tq.Limits(bytes=text),
    "selector": lambda queue, table, text: queue.create_table("u", tasks=[tq.Task("a", selector=text)]),  # type: ignore[arg-type]
    "plugin": lambda queue, table, text: queue.create_table("u", tasks=[tq.Task("a", selector=tq.Plugin(text))]),
    "address": lambda queue, table, text: tq.connect(text),
    "channel": lambda queue, table, text: queue.weights(text),
    "tensor": lambda queue, table, text: queue.weights("w").publish(1, {text: np.zeros(2)}),
}

NESTED: dict[str, Callable[[tq.Queue, tq.Table, Any], object]] = {
    "column": lambda queue, table, value: table.put(x=value),
    "of a value": lambda queue, table, value: table.put(x=[1], z=[{"a": value}]),
    "tags": lambda queue, table, value: table.put(x=[1], tags={"a": value}),
    "needs": lambda queue, table, value: tq.Task("a", needs=value),
}


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        found.create_table("t", tasks=[tq.Task("train", needs=["x"])]).put(x=[1, 2], y=[[1], [2]], key=["a", "b"])
        yield found


def refused(queue: tq.Queue, act: Callable[[tq.Queue, tq.Table, Any], object], value: Any) -> None:
    with pytest.raises(tq.TransferQueueError) as raised:
        act(queue, queue.table("t"), value)
    assert len(str(raised.value)) <= SHORT_MAX
    assert queue.table("t").audit().rows_put == 2


@pytest.mark.parametrize("value", [10**400, 10**5000, -(10**5000)], ids=["10**400", "10**5000", "-10**5000"])
@pytest.mark.parametrize("where", INTEGERS)
def test_an_integer_of_any_size_is_refused_in_words(queue: tq.Queue, where: str, value: int) -> None:
    refused(queue, INTEGERS[where], value)


@pytest.mark.parametrize("where", TEXTS)
def test_a_text_of_any_length_is_refused_in_few_words(queue: tq.Queue, where: str) -> None:
    refused(queue, TEXTS[where], LONG)


@pytest.mark.parametrize("where", NESTED)
def test_nesting_of_any_depth_is_refused_in_words(queue: tq.Queue, where: str) -> None:
    value = nested(100_000)
    refused(queue, NESTED[where], value)
    while value:  # a chain this deep cannot be freed at once
        value = value[0]


def test_the_text_of_any_error_is_short() -> None:
    assert len(str(tq.UsageError("word " * 100_000 + LONG))) < TEXT_SHOWN_CHARS + 100
