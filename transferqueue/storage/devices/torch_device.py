"""The devices that torch knows: any of its accelerators through ``torch.Stream`` and ``torch.Event``, CUDA with
registered memory.

CUDA devices were written for without one: the page `transferqueue docs devices` lists the parts that never ran.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from transferqueue.errors import Forked, OutOfMemory, UsageError
from transferqueue.errors.text import SHOWN_CHARS, shortened, shown
from transferqueue.storage.devices.accelerator import Accelerator, CopyEvent, HostDevice
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.elements.torch_interop import require_torch

if TYPE_CHECKING:
    import torch


_log: Final = logging.getLogger("transferqueue.client")


def device_of(device: Any) -> Accelerator:
    """The device that torch calls ``"cuda:0"``, an index, or a ``torch.device``. `UsageError` if there is none, or it
    holds no values."""
    torch = require_torch("torch")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"device={shown(device)} is no device of torch ({_reason(error)}); give {_choices()}"
        ) from None
    if place.type == "cpu":
        return _opened("cpu", 0, os.getpid())
    if place.type == "meta":
        raise UsageError(f"device={shown(device)} holds no values; give {_choices()}")
    count = _count(place.type)
    index = _current(place.type) if place.index is None and count else place.index or 0
    if index >= count:
        raise UsageError(
            f"device={shown(device)} is not here: there are {count} {place.type} devices; give {_choices()}"
        )
    return _opened(place.type, index, os.getpid())


def _reason(error: Exception) -> str:
    return shortened((str(error).splitlines() or [type(error).__name__])[0], SHOWN_CHARS)


def _count(kind: str) -> int:
    module = getattr(require_torch("torch"), kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def _current(kind: str) -> int:
    return int(getattr(require_torch("torch"), kind).current_device())


def _choices() -> str:
    """The devices of this machine, for an error text."""
    kinds = [kind for kind in ("cuda", "xpu", "mps", "mtia", "npu") if _count(kind)]
    named = [f"{kind}:{index}" for kind in kinds for index in range(_count(kind))]
    return (
        " or ".join(["'cpu' (a copy in this process's memory)", *map(repr, named)])
        + ", or no device for views of shared memory"
    )


@lru_cache(maxsize=64)
def _opened(kind: str, index: int, pid: int) -> Accelerator:
    """One object for each device of a process. With `pid`, a forked child makes its own."""
    del pid
    if kind == "cpu":
        return HostDevice()
    try:
        return (CudaDevice if kind == "cuda" else TorchDevice)(require_torch("torch").device(kind, index))
    except RuntimeError as error:
        if "fork" in str(error):
            raise Forked(f"device {kind}:{index} was used before os.fork; start processes with spawn") from error
        raise


class TorchDevice:
    """A device of torch, with its own stream for copies. Pageable memory is copied through page-locked memory of
    torch."""

    registers = False

    def __init__(self, place: torch.device) -> None:
        self._torch: Final = require_torch("torch")
        self.place: Final = place
        self.name = str(place)
        self._stream: Any = self._new_stream()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _new_stream(self) -> Any:
        return self._torch.Stream(self.place)

    def _in_stream(self) -> Any:
        """A context in which torch works in the stream of copies."""
        return self._stream

    def _current_stream(self) -> Any:
        return self._torch.accelerator.current_stream(self.place)

    def _new_event(self) -> Any:
        return self._torch.Event(self.place)

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Accelerator.empty`."""
        try:
            with self._in_stream():
                memory: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.place)
        except self._torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"device {self.name} has no room for a column of {nbytes:,} bytes; lease fewer rows, or name fewer "
                "fields"
            ) from error
        return memory

    def staging(self, nbytes: int) -> U8 | None:
        """Page-locked memory of torch, which torch does not lend again before the copies out of it are done. If there
        is none left, other memory, from which a copy takes several times as long."""
        try:
            locked: U8 = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            _log.warning(
                "no %s bytes can be page-locked for %s, so a copy is slower: %s", nbytes, self.name, _reason(error)
            )
            return np.empty(nbytes, np.uint8)
        return locked

    def load(self, into: torch.Tensor, source: U8) -> None:
        """See `Accelerator.load`."""
        with self._in_stream():
            into.copy_(self._torch.from_numpy(source), non_blocking=True)

    def store(self, into: U8, source: torch.Tensor) -> None:
        """See `Accelerator.store`."""
        computed = self._new_event()
        computed.record(self._current_stream())
        self._stream.wait_event(computed)
        with self._in_stream():
            self._torch.from_numpy(into).copy_(source, non_blocking=True)

    def record(self) -> CopyEvent:
        """See `Accelerator.record`."""
        event = self._new_event()
        event.record(self._stream)
        return _TorchEvent(event)

    def hand_over(self, tensors: Sequence[torch.Tensor], event: CopyEvent) -> None:
        """See `Accelerator.hand_over`."""
        current = self._current_stream()
        if not isinstance(event, _TorchEvent):
            event.wait()
            return
        current.wait_event(event.event)
        for tensor in tensors:
            tensor.record_stream(current)

    def register(self, address: int, nbytes: int) -> bool:
        """False: torch has no call for it."""
        del address, nbytes
        return False

    def unregister(self, address: int, nbytes: int) -> None:
        """Does nothing."""


class CudaDevice(TorchDevice):
    """A CUDA device, which copies from the queue's shared memory at the speed of its bus once the pages are
    registered."""

    registers = True

    def _new_stream(self) -> Any:
        return self._torch.cuda.Stream(self.place)

    def _in_stream(self) -> Any:
        return self._torch.cuda.stream(self._stream)

    def _current_stream(self) -> Any:
        return self._torch.cuda.current_stream(self.place)

    def _new_event(self) -> Any:
        return self._torch.cuda.Event(blocking=True)

    def register(self, address: int, nbytes: int) -> bool:
        """Page-lock for all devices of the process (``cudaHostRegisterPortable``)."""
        with self._torch.cuda.device(self.place):
            status = int(self._torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if status:
            self._absorb_error()
        return status == 0

    def unregister(self, address: int, nbytes: int) -> None:
        """See `Accelerator.unregister`."""
        del nbytes
        with self._torch.cuda.device(self.place):
            if int(self._torch.cuda.cudart().cudaHostUnregister(address)):
                self._absorb_error()

    def _absorb_error(self) -> None:
        """A refused call leaves an error that the next kernel of this thread would report as its own. Let a small
        kernel take it."""
        with suppress(RuntimeError):
            self._torch.zeros(1, device=self.place).add_(1)


_PORTABLE: Final = 1


class _TorchEvent:
    """An event of torch. One of CUDA is made to block without spinning."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()
