"""The data plane: arenas, extents, blocks and the gathering of rows.

Server side: `Allocator`, `Arena`, `room`. Client side: `Mapping`, `prepare`, `Repeat`, `Each`, `Plain`, `drafts`, `Blocks`, `Placement`, `Column`.
"""

from transferqueue.storage.allocator import Allocator
from transferqueue.storage.arena import Arena, room
from transferqueue.storage.blocks import Draft, drafts
from transferqueue.storage.checksum import checksum, verify
from transferqueue.storage.column import Column
from transferqueue.storage.mapping import Mapping
from transferqueue.storage.placement import Blocks, Placement
from transferqueue.storage.prepare import Each, Plain, Prepared, Repeat, prepare

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
