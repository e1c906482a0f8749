"""Batches of tensors copied to a device while the device computes with earlier ones.

For columns of a lease, ``lease(device=)`` copies once less: straight from the queue's memory. This is for batches that
were changed on the way, such as packed or joined ones. Each is copied to page-locked memory of this process, and from
there on a stream of its own. The stream that computes waits on the device; this thread does not block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transferqueue.errors import UsageError
from transferqueue.storage.devices.accelerator import Accelerator, CopyEvent, HostDevice
from transferqueue.storage.devices.device_copy import accelerator
from transferqueue.storage.devices.in_flight import in_flight

Columns = dict[str, Any]


def on_device(
    batches: Iterable[Mapping[str, Any]], device: torch.device | str | int | Accelerator, *, ahead: int = 1
) -> Iterator[Columns]:
    """Yield batches in order, with their tensors (dense or jagged) on a device. Other columns are unchanged.

    On a device a batch is read completely before the next one is taken from `batches`, so its lease may end then; use
    the yielded tensors on the stream that is current at that time. On the CPU tensors are yielded without a copy.

    Args:
        batches: columns by name, such as `torch_data.tensors` makes of a leased batch.
        device: torch's name or device.
        ahead: batches that are copied beyond the one that was yielded, 0 or more; default 1.

    Raises:
        UsageError: at once for a device that does not exist or `ahead` below 0, and during iteration for an item that
            is no mapping.

    Example:
        >>> for batch in on_device(map(tensors, table.leases("train", rows=64)), "cuda"):  # doctest: +SKIP
        ...     train(batch)
    """
    if ahead < 0:
        raise UsageError(f"ahead={ahead} is negative; 0 copies each batch when it is asked for")
    place = accelerator(device)
    if type(place) is HostDevice:
        return _ahead(batches, _on_host, ahead)
    return _ahead(batches, _Copies(place).begin, ahead)


Ready = Callable[[], Columns]
"""Returns a batch whose copy was started."""


def _ahead(batches: Iterable[Mapping[str, Any]], begin: Callable[[Columns], Ready], ahead: int) -> Iterator[Columns]:
    copying: deque[Ready] = deque()
    for batch in batches:
        copying.append(begin(_columns(batch)))
        del batch  # its memory is not held while the next is waited for
        if len(copying) > ahead:
            yield copying.popleft()()
    while copying:
        yield copying.popleft()()


def _columns(batch: Any) -> Columns:
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"a batch is {type(batch).__name__}, not columns by name; map `data.tensors` over batches of a task"
        )
    return dict(batch)


def _on_host(columns: Columns) -> Ready:
    return lambda: columns


class _Copies:
    """Copies to one device."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device

    def begin(self, columns: Columns) -> Ready:
        memory: list[object] = []
        try:
            copies = {name: self._copied(value, memory) for name, value in columns.items()}
        finally:
            event = self._device.record()
            in_flight(self._device).hold(event, memory)
        return lambda: self._given(copies, event)

    def _copied(self, value: Any, memory: list[object]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_nested:
            return self._sent(value, memory)
        jagged: Any = value  # the same rows: values are sent as they lie, with where each row begins
        lengths = jagged.offsets().diff()
        ends: dict[str, Any] = (
            {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
        )
        return torch.nested.nested_tensor_from_jagged(
            self._sent(jagged.values(), memory), self._sent(jagged.offsets(), memory), **ends
        )

    def _sent(self, value: Tensor, memory: list[object]) -> Tensor:
        if not value.is_cpu:
            return value
        flat = value.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
        staging = self._device.staging(len(flat))
        source = flat if staging is None else staging
        if staging is not None:
            np.copyto(staging, flat)
        memory.append(source)
        into = self._device.empty(len(flat))
        self._device.load(into, source)
        sent: Tensor = into.view(value.dtype).reshape(value.shape)
        return sent

    def _given(self, copies: Columns, event: CopyEvent) -> Columns:
        parts = [part for value in copies.values() for part in _parts(value)]
        self._device.hand_over(parts, event)
        return copies


def _parts(value: Any) -> tuple[Tensor, ...]:
    if not isinstance(value, Tensor):
        return ()
    jagged: Any = value
    return (jagged.values(), jagged.offsets()) if value.is_nested else (value,)
