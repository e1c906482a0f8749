"""The data plane: arenas, extents, blocks and the gathering of rows.

Server side: `Allocator`, `Arena`, `room`. Client side: `Mapping`, `prepare`, `Repeat`, `RowsOf`, `PlainValues`, `drafts`, `MappedBlocks`, `RowPlacement`, `Column`.
"""

from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.inputs.block_writer import BlockWriter, drafts
from transferqueue.storage.inputs.prepare import PlainValues, Prepared, Repeat, RowsOf, prepare
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena, room
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
    "checksum",
    "drafts",
    "prepare",
    "room",
    "verify",
]
