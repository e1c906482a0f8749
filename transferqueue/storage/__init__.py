"""The data plane: the memory of rows, writing columns into it, and reading columns from it.

The server uses `Allocator`, `Arena` and `available_bytes`. A client writes with `prepare`, `Repeat`, `RowsOf`,
`PlainValues` and `block_writers`, maps an arena with `Mapping`, and reads with `MappedBlocks`, `RowPlacement` and
`Column`.
"""

from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.inputs.block_writer import BlockWriter, block_writers
from transferqueue.storage.inputs.prepare import PlainValues, Prepared, Repeat, RowsOf, prepare
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena, available_bytes
from transferqueue.storage.memory.checksum import checksum, verify
from transferqueue.storage.memory.mapping import Mapping

__all__ = [
    "Allocator",
    "Arena",
    "BlockWriter",
    "Column",
    "MappedBlocks",
    "Mapping",
    "PlainValues",
    "Prepared",
    "Repeat",
    "RowPlacement",
    "RowsOf",
    "available_bytes",
    "block_writers",
    "checksum",
    "prepare",
    "verify",
]
