"""Tensors of a device become a column: packed there, one copy into the granted memory, and no late write into memory of
others."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.devices.late import LateDevice
from tests.devices.test_registered import Opened
from transferqueue.limits import MIB
from transferqueue.storage.devices import in_flight as in_flight_module
from transferqueue.storage.devices.in_flight import InFlight, in_flight
from transferqueue.storage.devices.packing import pack, store
from transferqueue.storage.devices.registered import give_up_idle
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.inputs.sources import DeviceTensors


@pytest.fixture
def opened():
    made = Opened()
    yield made
    made.pages.close()
    made.arena.close()


class Counting(LateDevice):
    """Counts copies to the host, and those into registered memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(at_once=True, **options)
        self.copies: list[tuple[int, bool]] = []

    def store(self, into: U8, source: Any) -> None:
        self.copies.append((len(into), self._is_registered(into.__array_interface__["data"][0], len(into))))
        super().store(into, source)


def granted(opened: Opened, nbytes: int) -> U8:
    opened.arena.ensure(0, nbytes)
    return np.frombuffer(opened.mapping.writable(0, nbytes), np.uint8)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.arange(12).reshape(3, 4)],
        [torch.arange(n, dtype=torch.int32) for n in (3, 0, 5)],
        [torch.randn(4, 6).T, torch.randn(2, 2).T],
        [torch.ones(3, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.bool)],
        [torch.randn(5).to(torch.bfloat16)],
        [torch.randn(5).to(torch.float8_e4m3fn)],
        [torch.randn(3, dtype=torch.complex64).conj()],
        [torch.randn(4, requires_grad=True)],
        [torch.empty(0, 3)],
    ],
    ids=["dense", "ragged", "strided", "bool", "bf16", "fp8", "conjugated", "grad", "no rows"],
)
def test_packed_bytes_are_those_row_by_row(tensors: list[torch.Tensor]) -> None:
    packed = pack(tensors)
    rows = [tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    assert packed.numpy().tobytes() == torch.cat(rows).numpy().tobytes()
    out = np.empty(len(packed), np.uint8)
    DeviceTensors(tensors, str(tensors[0].dtype).removeprefix("torch.")).write(out)
    assert out.tobytes() == packed.numpy().tobytes()


def test_rows_are_one_copy_into_registered_memory(opened: Opened) -> None:
    rows = [torch.full((n,), float(n)) for n in range(1, 1025)]
    packed, device = pack(rows), Counting()
    out = granted(opened, len(packed))
    store(device, packed, out)
    assert device.copies == [(len(packed), True)]
    assert out.tobytes() == torch.cat(rows).numpy().tobytes()


@pytest.mark.parametrize("where", ["a small column", "memory of no arena", "a device that registers nothing"])
def test_otherwise_it_is_one_copy_too(opened: Opened, where: str) -> None:
    values = torch.arange(16 if where == "a small column" else MIB)
    device = Counting(registers=where != "a device that registers nothing")
    out = np.empty(values.nbytes, np.uint8) if where == "memory of no arena" else granted(opened, values.nbytes)
    store(device, pack([values]), out)
    assert device.copies == [(values.nbytes, False)]
    assert out.tobytes() == values.numpy().tobytes()


def test_tensors_of_several_devices_are_copied_one_by_one() -> None:
    assert pack([torch.zeros(2), torch.zeros(2, device="meta")]) is None


def test_it_returns_only_when_no_copy_can_write_any_more(opened: Opened) -> None:
    device, order = LateDevice(), list[str]()
    record = device.record

    def recorded() -> Any:
        event = record()
        order.append("recorded")
        device.finish()
        return event

    device.record = recorded  # type: ignore[method-assign]
    out = granted(opened, 2 * MIB)
    store(device, pack([torch.ones(2 * MIB, dtype=torch.uint8)]), out)
    assert order == ["recorded"]
    assert (out == 1).all()


def test_an_error_half_way_waits_for_what_has_begun(opened: Opened) -> None:
    device = LateDevice(at_once=False)
    out = granted(opened, 2 * MIB)
    fails, waits = device.store, list[int]()

    def store_then_fail(into: U8, source: Any) -> None:
        fails(into, source)
        raise RuntimeError("CUDA error")

    def recorded() -> Any:
        waits.append(len(device.due))
        event = LateDevice.record(device)
        device.finish()
        return event

    device.store, device.record = store_then_fail, recorded  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error"):
        store(device, pack([torch.ones(2 * MIB, dtype=torch.uint8)]), out)
    assert waits == [1]
    assert not device.due


def raises(*_: object) -> None:
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize("fails", [False, True], ids=["a put", "a put that fails"])
def test_pages_that_only_puts_registered_are_given_up_when_idle(
    opened: Opened, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight_module, "InFlight", lambda name, idle: InFlight(name, lambda: give_up_idle(0), 0.01))
    device = Counting()
    if fails:
        device.store = raises  # type: ignore[method-assign]
    with suppress(RuntimeError):
        store(device, torch.zeros(4 * MIB, dtype=torch.uint8), granted(opened, 4 * MIB))
    assert device.registered_ever == 1
    copies = in_flight(device)
    if (thread := copies._thread) is not None:
        thread.join(60)
    assert device.regions == {}
    opened.arena.punch(0, 4 * MIB)
    assert opened.arena.backed == 0


class Elsewhere(torch.Tensor):
    """A tensor that says that it is not on the host, so that a put takes the way of devices."""

    is_cpu = False  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["dense", "jagged", "rows", "scalars", "one of each row"])
def test_a_put_of_tensors_on_a_device_is_what_a_lease_brings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = DeviceTensors.write
    monkeypatch.setattr(DeviceTensors, "write", lambda self, out: written.append(len(out)) or write(self, out))
    values = torch.arange(600_000, dtype=torch.int32).as_subclass(Elsewhere)
    columns = {
        "dense": values.reshape(6, -1),
        "jagged": torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 1, 5, 9, 10, 600_000])),
        "rows": [*values.reshape(6, -1)],
        "scalars": values[:6],
        "one of each row": list(values[:6]),
    }
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        table.put(x=columns[kind])
        with table.lease("train", rows=6) as batch:
            found = np.concatenate([np.asarray(row).reshape(-1) for row in batch["x"]])
    assert found.tolist() == list(range(600_000 if kind in {"dense", "jagged", "rows"} else 6))
    assert written or kind == "jagged"
