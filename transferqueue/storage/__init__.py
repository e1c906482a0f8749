"""The data plane: arenas, extents, blocks and the gathering of rows.

Server side: `Allocator`, `Arena`, `room`. Client side: `Mapping`, `prepare`, `Repeat`, `Each`, `Plain`, `drafts`, `Blocks`, `Placement`, `Column`.
"""

from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import Blocks, Placement
from transferqueue.storage.inputs.block_writer import Draft, drafts
from transferqueue.storage.inputs.prepare import Each, Plain, Prepared, Repeat, prepare
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena, room
from transferqueue.storage.memory.checksum import checksum, verify
from transferqueue.storage.memory.mapping import Mapping

__all__ = [
    "Allocator",
    "Arena",
    "Blocks",
    "Column",
    "Draft",
    "Each",
    "Mapping",
    "Placement",
    "Plain",
    "Prepared",
    "Repeat",
    "checksum",
    "drafts",
    "prepare",
    "room",
    "verify",
]
