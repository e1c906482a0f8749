"""A job on a table of which more rows wait than the server's memory has room for: they go to its disk and come back."""

from __future__ import annotations

import random
from typing import Final

from tests.simulator.copied import ROWS, ReplicatedShardsJob
from tests.simulator.world import Rates
from transferqueue.limits import MIB, PAGE_BYTES, SPILL_BYTES_MIN
from transferqueue.schema import Field
from transferqueue.wire import messages as m

FEWER_FAULTS: Final = Rates(
    lost=0.01,
    late=0.01,
    partition_per_s=0.05,
    crash_per_s=0.03,
    pause_per_s=0.05,
    server_per_s=0.01,
    killed_at_send=0.0005,
)
"""With the usual rates too few rows are put to fill the memory while faults happen."""


class BacklogJob(ReplicatedShardsJob):
    """The same processes without shards. No row may be lost."""

    puts = 40
    rows_max = 30 * ROWS
    waiting = 8 * ROWS
    pause_s = 0.1
    arena_bytes = 4 * PAGE_BYTES
    disk_bytes = 64 * MIB

    def _shards(self, chance: random.Random) -> tuple[int, int]:
        return 1, 0


class LargeBlocksJob(BacklogJob):
    """The same, only that each block is a quarter of the memory, and that producers go on until memory and disk are
    full, or nearly so."""

    puts = 70
    rows_max = 70 * ROWS
    row_bytes = MIB // ROWS
    body = Field("body", "int64", (row_bytes // 8,))
    use: m.GrantPurpose = "rows"
    arena_bytes = 4 * MIB
    disk_bytes = SPILL_BYTES_MIN

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.waiting = chance.choice((8, 16, 30, 60)) * ROWS
        self.pause_s = chance.choice((0.02, 0.1))
