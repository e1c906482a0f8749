"""Copies columns to a device: a column whose rows lie together is one asynchronous copy.

1. Rows in up to `RUNS_MAX` runs of pinned blocks: a copy of each run, straight from the registered pages of the arena.
2. Rows in more runs, or in memory that is not registered: the host gathers them once into memory that the device reads
   without blocking, and the device copies from there. So it is with a part of each dense row, such as the columns of a
   matrix.
3. A device that reads any memory equally well (`HostDevice`) copies the views of rule 1 directly, and rows of rule 2
   gathered once.

The memory of each copy is held until the device reports its end (`in_flight`). Values are as they were put: changes
that a caller made in a view are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from transferqueue.errors import InternalError
from transferqueue.schema import align
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.gather import row_edges
from transferqueue.storage.columns.placement import RowPlacement
from transferqueue.storage.columns.ranges import copy_ranges
from transferqueue.storage.devices.accelerator import Accelerator, CopyEvent
from transferqueue.storage.devices.in_flight import in_flight
from transferqueue.storage.devices.registered import RegisteredRange, registered_range
from transferqueue.storage.elements.dtypes import I64, U8, torch_dtype
from transferqueue.storage.elements.torch_interop import require_torch
from transferqueue.storage.memory.mapping import pinned_place
from transferqueue.storage.memory.private_pages import array_at

if TYPE_CHECKING:
    from torch import Tensor

RUNS_MAX: Final = 64
"""Up to this many runs are copied one by one. More are gathered by the host first."""


def accelerator(device: Any) -> Accelerator:
    """The device that a caller names: ``"cuda:0"``, an index, a ``torch.device``, or an `Accelerator`. Imports torch.
    `UsageError` if it is not here."""
    if isinstance(device, Accelerator):
        return device
    require_torch("torch")
    from transferqueue.storage.devices.torch_device import device_of

    return device_of(device)


def lands(column: Column) -> bool:
    """Whether a column is a tensor, and so can be on a device. Texts, bytes, plain values and rows of varied shapes
    stay on the host."""
    return column.field.dense or column.field.ragged


def land(columns: Mapping[str, Column], device: Accelerator) -> dict[str, Column]:
    """Begin to copy these columns to the device. Returns them by name: `DeviceColumn`, or the column itself where that
    stays on the host.

    Does not wait for the device. Blocks while rows are gathered and while pages are registered, once each.
    `OutOfMemory` if the device has no room.
    """
    copy = _DeviceCopy(device)
    try:
        landed = {name: copy.take(column) for name, column in columns.items() if lands(column)}
    finally:
        event = copy.end()  # what has begun before an error holds its memory, too
    return {
        name: DeviceColumn(column, landed[name], device, event) if name in landed else column
        for name, column in columns.items()
    }


class LandedColumn(NamedTuple):
    """A column on a device. `memory` is ``uint8``; the other tensors are views of it. `offsets` and `ends` are of a
    ragged column."""

    memory: Any
    values: Any
    offsets: Any = None
    ends: dict[str, int] = {}  # noqa: RUF012


class _DeviceCopy:
    """Copies of one batch to one device, and the memory that they read."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._memory: list[object] = []
        self._used: list[RegisteredRange] = []

    def take(self, column: Column) -> LandedColumn:
        """Begin the copies of a column."""
        if column.field.dense:
            nbytes = len(column) * column.field.row_bytes
            memory = self._device.empty(nbytes)
            self._values(memory, column)
            return LandedColumn(memory, _typed(memory, column, len(column)))
        return self._ragged(column)

    def end(self) -> CopyEvent:
        """All copies have begun. The memory is held until they have ended."""
        with ExitStack() as undo:  # if the device has failed, it copies nothing any more
            for used in self._used:
                undo.callback(used.end)
            event = self._device.record()
            undo.pop_all()
        in_flight(self._device).hold(event, self._memory, [used.end for used in self._used])
        return event

    def _ragged(self, column: Column) -> LandedColumn:
        torch = require_torch("torch")
        lengths = column.lengths
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        start = align(int(offsets[-1]) * column.field.row_bytes)
        memory = self._device.empty(start + offsets.nbytes)
        self._values(memory[: int(offsets[-1]) * column.field.row_bytes], column)
        self._staged(memory[start:], offsets.view(np.uint8))
        values = _typed(memory[: int(offsets[-1]) * column.field.row_bytes], column, int(offsets[-1]))
        ends = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
        return LandedColumn(memory, values, memory[start:].view(torch.int64), ends)

    def _values(self, into: Any, column: Column) -> None:
        if not len(into):
            return
        if column._slice is not None and column.field.dense:
            self._strided(into, column._dense())
            return
        placement = column._placement if column._slice is None else None
        if placement is None:  # values of the reply itself, or a part of each ragged row
            self._whole(into, np.ascontiguousarray(column._load().values).view(np.uint8))
            return
        runs = _Runs(column, placement)
        if len(runs.starts) > RUNS_MAX:
            self._gathered(into, runs)
            return
        at = 0
        for memory in runs.views():
            self._whole(into[at : at + len(memory)], memory)
            at += len(memory)

    def _strided(self, into: Any, values: np.ndarray[Any, Any]) -> None:
        """Copy values that may lie in several runs of memory."""
        depth = next(at for at in range(values.ndim + 1) if values[(0,) * at + (...,)].flags.c_contiguous)
        if math.prod(values.shape[:depth]) > RUNS_MAX:
            staging = self._device.staging(len(into))
            gathered = np.empty(len(into), np.uint8) if staging is None else staging
            np.copyto(gathered.view(values.dtype).reshape(values.shape), values)
            self._memory.append(gathered)
            self._device.load(into, gathered)
            return
        at = 0
        for index in np.ndindex(values.shape[:depth]):
            run = values[(*index, ...)].reshape(-1).view(np.uint8)
            self._whole(into[at : at + len(run)], run)
            at += len(run)

    def _whole(self, into: Any, memory: U8) -> None:
        """Copy one run."""
        registered = self._registered(memory)
        if registered is None:
            self._staged(into, memory)
            return
        at = 0
        for address, nbytes in registered.pieces:
            self._device.load(into[at : at + nbytes], array_at(address, nbytes))
            at += nbytes

    def _registered(self, memory: U8) -> RegisteredRange | None:
        place = pinned_place(memory) if self._device.registers else None
        registered = registered_range(place, self._device, len(memory))
        if registered is not None:
            self._memory.append(memory)
            self._used.append(registered)
        return registered

    def _staged(self, into: Any, memory: U8) -> None:
        staging = self._device.staging(len(memory))
        if staging is not None:
            np.copyto(staging, memory)
            memory = staging
        self._memory.append(memory)
        self._device.load(into, memory)

    def _gathered(self, into: Any, runs: _Runs) -> None:
        staging = self._device.staging(len(into))
        gathered = runs.gather(np.empty(len(into), np.uint8) if staging is None else staging)
        self._memory.append(gathered)
        self._device.load(into, gathered)


class _Runs:
    """The runs of consecutive bytes in which the rows of a column lie, in order, none across two blocks.

    `starts` and `ends` are addresses in this process, int64 ``[runs]``. `blocks` is the index of the block of each.
    """

    def __init__(self, column: Column, placement: RowPlacement) -> None:
        self._memory = placement.blocks.live_memory()
        self._addresses = placement.blocks.addresses
        first, last = _edges(column, placement)
        blocks, step = placement.block_of_row, column.field.row_bytes
        base = (self._addresses + placement.blocks.spans(column.field).values)[blocks]
        filled = last > first
        starts, ends, blocks = (base + first * step)[filled], (base + last * step)[filled], blocks[filled]
        apart = (starts[1:] != ends[:-1]) | (blocks[1:] != blocks[:-1])
        self.starts, self.ends = starts[np.append(True, apart)], ends[np.append(apart, True)]
        self.blocks = blocks[np.append(True, apart)]

    def views(self) -> Iterator[U8]:
        """The runs, as views of their blocks."""
        for start, end, block in zip(self.starts.tolist(), self.ends.tolist(), self.blocks.tolist(), strict=True):
            address = int(self._addresses[block])
            yield self._memory[block][start - address : end - address]

    def gather(self, out: U8) -> U8:
        """The bytes of all runs in `out`."""
        low, high = int(self.starts.min()), int(self.ends.max())
        return copy_ranges(array_at(low, high - low), self.starts - low, self.ends - low, out)


def _edges(column: Column, placement: RowPlacement) -> tuple[I64, I64]:
    """First and last offset of each row in its block, in steps of ``Field.row_bytes``."""
    if not column.field.dense:
        return row_edges(column.field, placement)
    slots = placement.slot_of_row.astype(np.int64)
    return slots, slots + 1


def _typed(memory: Any, column: Column, steps: int) -> Any:
    """The bytes as a tensor ``[steps, *fixed]`` of the field's dtype."""
    kind = torch_dtype(column.field.dtype, require_torch("torch"))
    return memory.view(kind).reshape(steps, *column.field.fixed)


class DeviceColumn(Column):
    """A column whose tensors are on a device. Its other values (`numpy`, `list`, `arrow`, rows by index) are on the
    host, as of any column; so are all values of selected rows (``column[2:5]``)."""

    __slots__ = ("_device", "_event", "_landed")

    def __init__(self, column: Column, landed: LandedColumn, device: Accelerator, event: CopyEvent) -> None:
        self.field, self._whole, self._slice = column.field, column._whole, column._slice
        self._placement, self._rows, self._cell = column._placement, column._rows, column._cell
        self._device, self._event = device, event
        self._landed: LandedColumn | None = landed
        if self._placement is not None:
            self._placement.blocks.columns.add(self)

    @property
    def device(self) -> str:
        """Name of the device, such as ``"cuda:0"``."""
        return self._device.name

    def torch(self) -> Tensor:
        """Dense rows: a tensor ``[rows, *shape]`` of the field's dtype on the device. Later work of the calling
        thread's stream is ordered after the copy."""
        if not self.field.dense:
            raise self._unfit("torch")
        return cast("Tensor", self._taken().values)

    def nested(self) -> Tensor:
        """Ragged rows: a jagged nested tensor ``[rows, None, *shape[1:]]`` on the device, as `torch`."""
        if not self.field.ragged:
            raise self._unfit("nested")
        taken = self._taken()
        torch = require_torch("torch")
        return cast("Tensor", torch.nested.nested_tensor_from_jagged(taken.values, taken.offsets, **taken.ends))

    def load(self) -> None:
        """Does nothing: the copy to the device has begun."""

    def forget(self) -> None:
        """See `Column.forget`: the device's memory is freed with the last tensor of it."""
        super().forget()
        self._landed = None

    def _taken(self) -> LandedColumn:
        landed = self._landed
        if landed is None:
            self.placement.blocks.live_memory()
            raise InternalError(f"{self!r} is not on its device, and its batch has not ended")
        self._device.hand_over([landed.memory], self._event)
        return landed
