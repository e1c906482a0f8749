"""The interface of a device that computes with columns.

`HostDevice` is the host itself; `transferqueue.storage.devices.torch_device` has the devices that torch knows. Any
object with these methods may be given as ``device=`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.elements.torch_interop import require_torch


class CopyEvent(Protocol):
    """A moment in the order of copies of one device: it has passed when all copies begun before it have ended."""

    def done(self) -> bool:
        """Whether it has passed. Does not block."""

    def wait(self) -> None:
        """Block until it has passed, and let other threads run. Raises the error of a failed device, on which no copy
        runs any more."""


@runtime_checkable
class Accelerator(Protocol):
    """A device. Safe from any thread; copies are done in the order in which they are begun.

    `name` is such as ``"cuda:0"``. `registers` says whether the device reads registered memory of this process faster,
    and without blocking. Otherwise `register` is never called.
    """

    name: str
    registers: bool

    def empty(self, nbytes: int) -> Any:
        """A tensor ``uint8 [nbytes]`` on the device, aligned for any dtype. `OutOfMemory` if the device has no room."""

    def staging(self, nbytes: int) -> U8 | None:
        """Memory of the host that the device reads without blocking; None: it reads any memory equally well."""

    def load(self, into: Any, source: U8) -> None:
        """Begin to copy `source` into `into`, a tensor ``uint8`` of its size on the device. Neither may change before a
        later `record` has passed."""

    def store(self, into: U8, source: Any) -> None:
        """Begin to copy `source`, a tensor ``uint8``, into memory of the host, after the earlier work of the calling
        thread's stream."""

    def record(self) -> CopyEvent:
        """The event of all copies begun so far."""

    def hand_over(self, tensors: Sequence[Any], event: CopyEvent) -> None:
        """Order the later device work of the calling thread after `event`, and keep the memory of `tensors` until that
        is done."""

    def register(self, address: int, nbytes: int) -> bool:
        """Register these whole pages of the process for copies, for all devices of this class. Returns False on
        failure."""

    def unregister(self, address: int, nbytes: int) -> None:
        """End the registration of exactly these pages. No copy may use them."""


class Passed:
    """An event that has passed."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Does nothing."""


class HostDevice:
    """The host as a device: tensors in memory of this process's own, copied at once."""

    def __init__(self) -> None:
        self.name, self.registers = "cpu", False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def empty(self, nbytes: int) -> Any:
        """A CPU tensor."""
        torch = require_torch("torch")
        return torch.empty(nbytes, dtype=torch.uint8)

    def staging(self, nbytes: int) -> U8 | None:
        """None."""
        del nbytes
        return None

    def load(self, into: Any, source: U8) -> None:
        """Copy now."""
        np.copyto(into.numpy(), source)

    def store(self, into: U8, source: Any) -> None:
        """Copy now."""
        np.copyto(into, source.numpy())

    def record(self) -> CopyEvent:
        """An event that has passed."""
        return Passed()

    def hand_over(self, tensors: Sequence[Any], event: CopyEvent) -> None:
        """Block until the event has passed."""
        del tensors
        event.wait()

    def register(self, address: int, nbytes: int) -> bool:
        """False: it reads any memory."""
        del address, nbytes
        return False

    def unregister(self, address: int, nbytes: int) -> None:
        """Does nothing."""
