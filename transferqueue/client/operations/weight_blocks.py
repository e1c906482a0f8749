"""The blocks that a publication of weights writes: tensors, slices of tensors, and differences. Each has its own."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from transferqueue.client.operations.stored_ranges import StoredRange
from transferqueue.errors import SchemaError, TransferQueueError
from transferqueue.errors.text import SHOWN_CHARS, shortened
from transferqueue.limits import NAME_CHARS_MAX
from transferqueue.schema import Field
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.prepare import Prepared, prepare
from transferqueue.storage.memory.delta import Delta
from transferqueue.wire import messages as m

BASE: Final = "_"
"""Names of fields of the base begin with it; those of adapters never do."""


def column_of(name: str, tensor: Any) -> Prepared:
    """The tensor as a column of one row. `SchemaError` if it is none; its class may refuse in its own way, as of nested
    or freed ones."""
    subject = f'tensor "{name.removeprefix(BASE)}"'
    try:
        prepared = prepare(name, tensor[None])
    except SchemaError as error:
        raise SchemaError(str(error).replace(f'field "{name}"', subject, 1)) from error
    except (TransferQueueError, MemoryError):
        raise
    except Exception as error:
        reason = shortened(" ".join(str(error).split()), SHOWN_CHARS)
        raise SchemaError(
            f"{subject} cannot be read as one array: {reason}; give an array or a dense tensor"
        ) from error
    if prepared.field.dtype in ("str", "bytes", "value"):
        raise SchemaError(f"{subject} has no numbers, but {tensor.dtype}; weights are tensors or arrays of numbers")
    return prepared


class NewTensor(BlockWriter):
    """A tensor, the slice `of` one, or the difference `of` one, that is written into a block of its own."""

    __slots__ = ("of",)

    def __init__(self, name: str, tensor: Any, of: m.TensorRange | None = None) -> None:
        super().__init__([column_of(name, tensor)])
        self.of = of

    @property
    def field(self) -> Field:
        """Definition of the tensor's field."""
        return self.fields[0]

    def own_memory(self) -> U8 | None:
        """The caller's memory, if the tensor lies there as in its block; else None."""
        return self.columns[0].source.memory() if self.columns[0].nbytes == self.nbytes else None

    def write(self, out: Any) -> None:
        """As `BlockWriter.write`; then the checksum is known."""
        super().write(out)
        self.take_checksum(out)


class ReusedTensor(NewTensor):
    """The bytes of a tensor of another channel, with their checksum `total`. If they were damaged on the way or in this
    process, a client that pulls them from here refuses them."""

    __slots__ = ("memory",)

    def __init__(
        self, fields: list[Field], block: m.BlockLocation, memory: U8, of: m.TensorRange | None, total: int
    ) -> None:
        self.of = of
        self.columns, self.spans, self.slots = [], [], None
        self.rows = self.stored_rows = block.rows
        self.fields, self.counts, self.nbytes = fields, list(block.counts), block.nbytes
        self.memory, self.sum = memory, total

    def own_memory(self) -> U8:
        """As of `NewTensor`."""
        return self.memory

    def write(self, out: Any) -> None:
        """As `BlockWriter.write`."""
        np.frombuffer(out, np.uint8)[:] = self.memory
        self.take_checksum(out)


def delta_block(of: StoredRange, version: int, after: int, delta: Delta) -> NewTensor | None:
    """The block of a difference to the newest content of a range. None: its field would have too long a name."""
    name = f"{of.field.name}/delta-{version}"
    if len(name) > NAME_CHARS_MAX:
        return None
    return NewTensor(name, delta.data, m.TensorDelta(name, of.field.name, version, of.sum, after, delta.ends))
