"""Values that the members of a group bring in puts of their own: the drop-in stores them twice, not once a member."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("tensordict", "omegaconf")):
    pytest.skip("the drop-in needs tensordict and omegaconf: make test-shim", allow_module_level=True)

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples import recurring
from transferqueue.adapters.transfer_queue.samples.columns import columns_of, values_of
from transferqueue.adapters.transfer_queue.samples.partitions import Partitions
from transferqueue.adapters.transfer_queue.samples.recurring import RecurringValues, fingerprint, probed_values
from transferqueue.storage import Interned

GROUP = 16
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (3, 3, 96, 96), np.uint8))
SLACK = 1024
Make = Callable[[int], Any]


def dense(number: int) -> Any:
    return IMAGES[number : number + 1].clone()


def jagged(number: int) -> Any:
    return torch.nested.as_nested_tensor([IMAGES[number].reshape(-1).clone()], layout=torch.jagged)


def strided(number: int) -> Any:
    return torch.nested.as_nested_tensor([IMAGES[number].transpose(0, 1).contiguous()])


def text(number: int) -> Any:
    return NonTensorStack(f"prompt {number} " * 3000)


def content(number: int) -> Any:
    return NonTensorStack(bytes(IMAGES[number].numpy()))


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded") as queue:
        yield queue


def of(column: Any) -> TensorDict:
    return TensorDict({"image": column, "reward": torch.ones(1)}, batch_size=[1])


def put_group(partitions: Partitions, queue: tq.Queue, make: Make, number: int) -> int:
    """Put the members of a group one by one. Returns the bytes that the table has more than before."""
    before = partitions.find("p")
    stored = before.stats()["bytes"] if before else 0
    for member in range(GROUP):
        partitions.put_keyed("p", [f"{number}-{member}"], of(make(number)), None)
    return int(queue.table("p.p").stats()["bytes"]) - stored


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("make", [dense, jagged, strided, text, content])
def test_a_group_that_is_put_one_by_one_is_stored_twice(queue: tq.Queue, make: Make) -> None:
    partitions = Partitions(queue, rows_max=100)
    (first,) = values_of(TensorDict({"image": make(0)}, batch_size=[1]).get("image"))
    size = first.nbytes if isinstance(first, torch.Tensor) else len(first)
    for number in range(2):
        assert 2 * size <= put_group(partitions, queue, make, number) < 2 * size + GROUP * SLACK
    for number in range(2):
        read = partitions.get("p", [f"{number}-{member}" for member in range(GROUP)], ["image"])
        (expected,) = values_of(TensorDict({"image": make(number)}, batch_size=[1]).get("image"))
        assert [plain(value) for value in values_of(read.get("image"))] == [plain(expected)] * GROUP


def test_samples_that_are_there_already_share_too(queue: tq.Queue) -> None:
    """Upstream's way by index: metadata first, and columns for it later."""
    partitions = Partitions(queue, rows_max=100)
    table, rows = partitions.keyed("p", [str(member) for member in range(GROUP)])
    for row in rows.tolist():
        partitions.update("p", [row], of(dense(1)), None)
    assert table.stats()["bytes"] < 2 * IMAGES[0].nbytes + GROUP * SLACK
    read = partitions.get_rows("p", rows.tolist(), ["image"])
    assert all(torch.equal(value, IMAGES[1]) for value in values_of(read.get("image")))


def test_one_word_turns_it_off(queue: tq.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_FIND_REPEATS", "0")
    assert put_group(Partitions(queue, rows_max=100), queue, dense, 0) >= GROUP * IMAGES[0].nbytes


def test_values_that_only_look_alike_stay_different_and_cost_little(queue: tq.Queue) -> None:
    """They differ in one byte, which no sample has: the field is not looked at for a while."""
    partitions = Partitions(queue, rows_max=100)
    values = [IMAGES[:1].clone() for _ in range(40)]
    for number, value in enumerate(values):
        value.view(-1)[70] = number
    for number, value in enumerate(values):
        partitions.put_keyed("p", [str(number)], of(value), None)
    read = partitions.get("p", [str(number) for number in range(40)], ["image"])
    assert all(torch.equal(one, value[0]) for one, value in zip(values_of(read.get("image")), values, strict=True))
    assert partitions._recurring._mistakes["image"] < 0


def given(values: RecurringValues, column: torch.Tensor) -> bool:
    """Whether the column was given as interned."""
    _, columns = columns_of(TensorDict({"x": column}, batch_size=[len(column)]), {})
    return isinstance(values.interned("p", columns)["x"], Interned)


def test_a_column_is_interned_if_half_of_its_values_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    values = RecurringValues()
    rows = torch.arange(20 * 4096).reshape(20, 4096)
    assert [given(values, rows[:2]), given(values, rows[:2]), given(values, rows[1:3])] == [False, True, True]
    assert not given(values, rows[2:6])  # one of four
    assert not given(values, rows)  # more samples than `Interned` finds one by one
    assert not given(values, rows)
    assert [given(values, rows[4:]), given(values, rows[4:])] == [False, True]  # four of them are looked at
    monkeypatch.setattr(recurring, "FINGERPRINTS_MAX", 3)
    assert not given(values, rows[6:9])
    assert len(values._seen) == 3
    assert not given(values, rows[:1])


def test_a_field_that_misleads_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurring, "REST_PUTS", 3)
    values, row = RecurringValues(), torch.zeros(1, 4096, dtype=torch.int64)
    taken = []
    for number in range(16):
        row[0, 20] = number  # between the samples
        taken.append(given(values, row))
    assert taken == [False, True] + [False] * 14  # the second one looked like the first
    row[0, 20] = 15
    assert [given(values, row) for _ in range(2)] == [True, True]  # it rested meanwhile, and was looked at again


@pytest.mark.parametrize(
    "column",
    [
        torch.zeros(3, 100),
        torch.zeros(3),
        torch.zeros(3, 0),
        torch.zeros(1, 1 << 16, device="meta"),
        torch.zeros(2, 1 << 16)[:, ::2].expand(2, -1),
        NonTensorStack({"a": 1}, {"b": 2}),
        NonTensorStack("short", "x" * 99_999),
    ],
)
def test_other_columns_are_left_alone(column: Any) -> None:
    values = RecurringValues()
    _, columns = columns_of(TensorDict({"x": column}, batch_size=[len(column)]), {})
    assert not probed_values(columns["x"])
    assert [values.interned("p", columns) is columns for _ in range(2)] == [True, True]


def test_a_fingerprint_sees_both_ends_and_the_size() -> None:
    value = bytes(40_000)
    others = [value + b"\0", b"\1" + value[1:], value[:-1] + b"\1"]
    assert len({fingerprint(memoryview(each)) for each in (value, *others)}) == 4
