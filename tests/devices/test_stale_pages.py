"""A device that pins pages never reads pages that the arena has returned: with the kernel's own long-term pins in place
of a GPU's driver."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.devices.late import LateDevice
from tests.devices.pinning import PinningDevice
from tests.devices.test_fence import Job, trims  # noqa: F401
from tests.devices.test_registered import Opened
from transferqueue import Fifo
from transferqueue.limits import MIB
from transferqueue.storage.devices import registered
from transferqueue.storage.devices.packing import pack, store
from transferqueue.storage.memory.private_pages import array_at


@pytest.fixture
def pinning() -> PinningDevice:
    try:
        return PinningDevice()
    except OSError as error:
        pytest.skip(f"io_uring cannot pin pages here: {error}")


@pytest.fixture
def opened(pinning: PinningDevice):
    made = Opened(64 * MIB)
    made.device = pinning
    yield made
    made.pages.close()
    made.arena.close()


def seen(opened: Opened, offset: int) -> bytes:
    """Eight bytes of the arena as the device reads them."""
    used = opened.range(offset, 8)
    assert used is not None
    into = torch.zeros(8, dtype=torch.uint8)
    opened.device.load(into, array_at(*used.pieces[0]))
    used.end()
    return into.numpy().tobytes()


def test_the_stand_in_pins_as_drivers_do(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: without a hold the owner returns the pages, and the device sees their old bytes for ever."""
    monkeypatch.setattr(registered, "hold", lambda *_: True)
    opened.write(0, b"A" * MIB)
    assert seen(opened, 0) == b"A" * 8
    opened.write(0, b"B" * MIB)
    assert seen(opened, 0) == b"B" * 8
    opened.arena.punch(0, MIB)
    opened.write(0, b"C" * MIB)
    assert seen(opened, 0) == b"B" * 8, "stale"
    opened.pages.give_up()
    assert seen(opened, 0) == b"C" * 8, "registering anew repairs it"


def test_held_pages_are_never_stale(opened: Opened) -> None:
    opened.write(0, b"A" * MIB)
    assert seen(opened, 0) == b"A" * 8
    opened.arena.punch(0, MIB)
    opened.write(0, b"C" * MIB)
    assert seen(opened, 0) == b"C" * 8
    opened.pages.give_up()
    opened.arena.punch(0, MIB)
    assert opened.arena.backed == 0
    opened.write(0, b"D" * MIB)
    assert seen(opened, 0) == b"D" * 8


def test_growth_reuse_and_trimming_under_a_device_that_pins(trims: None, pinning: PinningDevice) -> None:  # noqa: F811
    job = Job(2, Fifo())
    job.device = pinning
    assert job.run(20) == 0
    assert pinning.direct > 10 * MIB
    assert pinning.registered_ever > 2


def test_without_the_hold_of_pages_wrong_bytes_are_found(
    trims: None,  # noqa: F811
    pinning: PinningDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registered, "hold", lambda *_: True)
    job = Job(2, Fifo())
    job.device = pinning
    assert job.run(20) > 3


def test_what_a_device_writes_into_a_grant_is_what_others_read(opened: Opened) -> None:
    opened.arena.ensure(0, 4 * MIB)
    values = torch.arange(MIB // 4, dtype=torch.int32)
    out = np.frombuffer(opened.mapping.writable(MIB, MIB), np.uint8)
    store(opened.device, pack([values]), out)
    assert opened.device.direct == MIB
    with open(opened.arena.path, "rb") as file:
        file.seek(MIB)
        assert file.read(MIB) == values.numpy().tobytes()


def test_only_the_shared_mapping_is_registered(opened: Opened) -> None:
    opened.device = LateDevice()
    opened.write(0, b"A" * MIB)
    assert opened.range(0, MIB) is not None
    kinds = {
        kind
        for low, high, kind in re.findall(r"^(\w+)-(\w+) (....)", Path("/proc/self/maps").read_text(), re.MULTILINE)
        for address in opened.device.regions
        if int(low, 16) <= address < int(high, 16)
    }
    assert kinds == {"rw-s"}
