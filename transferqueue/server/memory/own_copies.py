"""Which copy of a block is read: the one in the server's own memory, if it has one."""

from __future__ import annotations

from msgspec.structs import replace

from transferqueue.ledger.rows.cold_arena import ON_DISK
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.wire import messages as m


def refer_to_own_copies(blocks: dict[int, m.BlockLocation]) -> list[m.BlockLocation]:
    """Let each block refer to its copy in the server's own memory, if it has one there. Returns those that lie in
    remote shards alone."""
    for number, at in blocks.items():
        if own := [copy for copy in at.copies if copy.shard == SHARD]:
            others = [
                m.CopyLocation(at.shard, at.extent, at.offset),
                *(copy for copy in at.copies if copy is not own[0]),
            ]
            blocks[number] = replace(at, shard=SHARD, extent=own[0].extent, offset=own[0].offset, copies=others)
    return [at for at in blocks.values() if at.shard not in (SHARD, ON_DISK)]
