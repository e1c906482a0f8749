"""Tensors on a device become the values of a column: packed on the device, one copy into shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from transferqueue.limits import MIB
from transferqueue.storage.devices.accelerator import Accelerator
from transferqueue.storage.devices.device_copy import accelerator
from transferqueue.storage.devices.in_flight import in_flight
from transferqueue.storage.devices.registered import RegisteredRange, registered_range
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.elements.torch_interop import require_torch
from transferqueue.storage.memory.mapping import granted_place
from transferqueue.storage.memory.private_pages import array_at

REGISTERED_FROM: Final = MIB
"""Registered pages pay off for copies from this size on. A smaller put goes to pages that many puts share, some of them
fresh each time."""


def pack(tensors: Sequence[Any]) -> Any:
    """The values of the tensors (at least one), row after row, as one tensor ``uint8`` on their device. None if they
    are on several, or the device has no room for it."""
    torch = require_torch("torch")
    if len({tensor.device for tensor in tensors}) > 1:
        return None
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    with suppress(torch.OutOfMemoryError):
        packed = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)
        return packed.resolve_conj().resolve_neg().view(torch.uint8)
    return None


def fill(out: U8, tensors: Sequence[Any]) -> bool:
    """Copy the values of the tensors into `out`, which has their size, as `store` does. Returns False, and copies
    nothing, if they cannot be packed: then copy them one by one."""
    packed = pack(tensors) if len(tensors) else None
    if packed is not None:
        store(accelerator(packed.device), packed, out)
    return packed is not None


def store(device: Accelerator, packed: Any, out: U8) -> None:
    """Copy packed values into `out`, which has their size. Blocks until the device has copied.

    If `out` is granted memory of a mapped arena, its pages are registered, and the copy goes there at the speed of the
    bus. Returns or raises only when no copy can write there any more.
    """
    registered = _registered(device, out)
    pieces = [out] if registered is None else [array_at(*piece) for piece in registered.pieces]
    try:
        at = 0
        for piece in pieces:
            device.store(piece, packed[at : at + len(piece)])
            at += len(piece)
    finally:
        try:
            event = device.record()
            event.wait()
        finally:
            if registered is not None:
                registered.end()
        if registered is not None:
            in_flight(device).hold(event, [])  # it has passed: this starts the thread that gives idle pages up


def _registered(device: Accelerator, out: U8) -> RegisteredRange | None:
    place = granted_place(out) if device.registers and out.nbytes >= REGISTERED_FROM else None
    return registered_range(place, device, out.nbytes)
