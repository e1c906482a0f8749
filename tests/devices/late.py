"""A device without hardware whose copies come late: nothing moves before `LateDevice.finish`. So a fence that is
missing shows as wrong bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from transferqueue.storage.devices.accelerator import CopyEvent
from transferqueue.storage.elements.dtypes import U8


class LateEvent:
    """Passes when the device has done all that was asked before it."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        assert self.passed.wait(60), "the device never copied"


class LateDevice:
    """Registers memory as a CUDA device does: pages once, never twice, and reads addresses only inside what is
    registered. at_once: it copies when asked."""

    def __init__(
        self, name: str = "late:0", *, at_once: bool = False, registers: bool = True, room: int = 1 << 40
    ) -> None:
        self.name, self.registers, self.at_once, self.room = name, registers, at_once, room
        self.regions: dict[int, int] = {}
        self.registered_ever = 0
        self.direct = self.staged = 0
        """Bytes loaded from registered memory, and from staging."""
        self.due: deque[Callable[[], object]] = deque()
        self._guard = threading.Lock()

    def empty(self, nbytes: int) -> Any:
        from transferqueue.errors import OutOfMemory

        if nbytes > self.room:
            raise OutOfMemory(f"device {self.name} has no room for a column of {nbytes} bytes")
        return torch.empty(nbytes, dtype=torch.uint8)

    def staging(self, nbytes: int) -> U8 | None:
        return np.empty(nbytes, np.uint8)

    def load(self, into: Any, source: U8) -> None:
        address = source.__array_interface__["data"][0]
        if self._is_registered(address, len(source)):
            self.direct += len(source)
        else:
            self.staged += len(source)
        self._do(lambda: np.copyto(into.numpy(), source))

    def store(self, into: U8, source: Any) -> None:
        self._do(lambda: np.copyto(into, source.numpy()))

    def record(self) -> CopyEvent:
        event = LateEvent()
        self._do(event.passed.set)
        return event

    def hand_over(self, tensors: Sequence[Any], event: CopyEvent) -> None:
        """A stream waits on the device, not here: who reads the values calls `finish` before."""

    def register(self, address: int, nbytes: int) -> bool:
        assert address % 4096 == nbytes % 4096 == 0
        for start, size in self.regions.items():
            assert address + nbytes <= start or start + size <= address, "registered twice"
        self.regions[address] = nbytes
        self.registered_ever += 1
        return True

    def unregister(self, address: int, nbytes: int) -> None:
        assert self.regions.pop(address) == nbytes

    def finish(self, count: int = 1 << 30) -> None:
        """Do the oldest of what was asked."""
        while count and self.due:
            self.due.popleft()()
            count -= 1

    def _do(self, work: Callable[[], object]) -> None:
        self.due.append(work)
        if self.at_once:
            self.finish()

    def _is_registered(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self.regions.items())
