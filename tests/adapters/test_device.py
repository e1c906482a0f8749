"""Batches copied ahead to the device that computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import transferqueue as tq
from tests.devices.late import LateDevice
from transferqueue.adapters.trainers.device import on_device
from transferqueue.adapters.trainers.torch_data import tensors
from transferqueue.errors import UsageError

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def batches(taken: list[int], count: int = 5) -> Iterator[dict[str, Any]]:
    for number in range(count):
        taken.append(number)
        rows = [torch.arange(number + 1), torch.arange(2)]
        jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        yield {"dense": torch.full((2, 3), number), "jagged": jagged, "text": [str(number)] * 2}


@pytest.mark.parametrize(
    ("device", "ahead", "text"),
    [
        ("cpu", -1, "ahead=-1 is negative"),
        ("cuda:99", 1, "is not here"),
        ("meta", 1, "holds no values"),
    ],
)
def test_what_cannot_be_is_refused_at_once(device: str, ahead: int, text: str) -> None:
    taken: list[int] = []
    with pytest.raises(UsageError, match=text):
        on_device(batches(taken), device, ahead=ahead)
    assert taken == []


def test_a_batch_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch is list, not columns by name"):
        next(on_device([[1]], "cpu"))  # type: ignore[list-item]


@pytest.mark.parametrize("device", ["cpu", "late", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_batches_come_in_order_and_whole(device: str, ahead: int) -> None:
    taken: list[int] = []
    place = LateDevice(at_once=True) if device == "late" else device
    for number, batch in enumerate(on_device(batches(taken), place, ahead=ahead)):
        assert len(taken) == min(5, number + 1 + ahead)
        assert batch["dense"].device.type == batch["jagged"].device.type == device.replace("late", "cpu")
        assert batch["dense"].tolist() == [[number] * 3] * 2
        assert [row.tolist() for row in batch["jagged"].unbind()] == [list(range(number + 1)), [0, 1]]
        assert batch["text"] == [str(number)] * 2
    assert taken == [0, 1, 2, 3, 4]


def test_over_a_task_on_the_cpu_nothing_is_copied() -> None:
    with tq.connect() as queue:
        table = queue.create_table("rollouts", tasks=[tq.Task("train", needs=["ids"])])
        table.put(ids=torch.arange(12).reshape(6, 2), name=["a", "b"] * 3)
        table.seal()

        def leased() -> Iterator[dict[str, Any]]:
            for lease in table.leases("train", rows=2, timeout_s=30):
                with lease:
                    yield tensors(lease)

        found = [batch["ids"].tolist() for batch in on_device(leased(), "cpu")]
        assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
        assert queue.audit().balanced
