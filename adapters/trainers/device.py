"""Batches copied to a device while the device computes with earlier ones.

A device cannot read the queue's shared memory directly. Each batch is copied to page-locked memory of this process, and
from there on a stream of its own. The stream that computes waits on the device; this thread does not block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from transferqueue.errors import UsageError

Columns = dict[str, Any]


def on_device(
    batches: Iterable[Mapping[str, Any]], device: torch.device | str | int, *, ahead: int = 1
) -> Iterator[Columns]:
    """Yield batches in order, with their tensors (dense or jagged) on `device`; other columns are unchanged.

    batches: columns by name, such as `torch_data.tensors` makes of a leased batch. ahead: number of batches copied beyond the one that was
    yielded. On a CUDA device a batch is read completely before the next one is taken from `batches`, so its lease may end then; use the
    yielded tensors on the stream that is current at that time. On the CPU tensors are yielded without a copy.

    Raises `UsageError` at once for a device that does not exist or `ahead` below 0, and during iteration for an item that is no mapping.

    Example::

        for batch in on_device(map(tensors, table.leases("train", rows=64)), "cuda"):
            train(batch)
    """
    if ahead < 0:
        raise UsageError(f"ahead={ahead} is negative; 0 copies each batch when it is asked for")
    place = torch.device(device)
    if place.type == "cuda":
        return _ahead(batches, _Cuda(place).begin, ahead)
    if place.type == "cpu":
        return _ahead(batches, _on_host, ahead)
    raise UsageError(f"device {str(place)!r} is neither the CPU nor a CUDA device; copy its batches with .to(device)")


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


class _Cuda:
    """Copies on a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"device {str(device)!r} is not here: there are {torch.cuda.device_count()} CUDA devices")
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, columns: Columns) -> Ready:
        with torch.cuda.stream(self._stream):
            copies = {name: self._copied(value) for name, value in columns.items()}
            copied = self._stream.record_event()
        return lambda: self._given(copies, copied)

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_nested:
            return self._sent(value)
        jagged: Any = value  # the same rows: values are sent as they lie, with where each row begins
        lengths = jagged.offsets().diff()
        ends: dict[str, Any] = (
            {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
        )
        return torch.nested.nested_tensor_from_jagged(self._sent(jagged.values()), self._sent(jagged.offsets()), **ends)

    def _sent(self, value: Tensor) -> Tensor:
        # The allocator of page-locked memory lends none anew before the copies out of it are done.
        return value.pin_memory().to(self._device, non_blocking=True)

    def _given(self, copies: Columns, copied: torch.cuda.Event) -> Columns:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for value in copies.values():
            for part in _parts(value):
                part.record_stream(current)
        return copies


def _parts(value: Any) -> tuple[Tensor, ...]:
    if not isinstance(value, Tensor):
        return ()
    jagged: Any = value
    return (jagged.values(), jagged.offsets()) if value.is_nested else (value,)
