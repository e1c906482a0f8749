"""A job on a table whose rows lie in remote shards that have disks. More rows wait than the memory of all shards has room for."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from transferqueue.limits import MIB, PAGE_BYTES, SPILL_BYTES_MIN
from transferqueue.schema import Field
from transferqueue.server.spill.spill_file import carry_out
from transferqueue.testing.simulator.copied import ROWS, ReplicatedShardsJob
from transferqueue.testing.simulator.spill import SimSpill
from transferqueue.testing.simulator.world import Rates
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from transferqueue.testing.simulator.process import Process

PUTS: Final = 40
SPILL_BYTES: Final = 64 * MIB
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


class SpillingShardsJob(ReplicatedShardsJob):
    """The same processes, only that each shard has a disk, and its rows no copies."""

    puts = PUTS
    rows_max = 30 * ROWS
    waiting = 8 * ROWS
    pause_s = 0.1
    lost = 0.01
    capacity = 4 * PAGE_BYTES
    spill_bytes = SPILL_BYTES

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance, replicas=1)

    def _disk_of(self, process: Process, memory: bytearray) -> Callable[[list[m.Order]], object]:
        number = process.number

        def report() -> None:
            process.send_unawaited(m.ReportSpill(*disk.answers()))

        def carry_all_out(orders: list[m.Order]) -> None:
            for order in orders:
                carry_out(order, disk)

        stir = partial(process.when_running, report, number)
        disk = SimSpill(process.world, memory, stir, self.spill_bytes, hangs=True)
        return carry_all_out


class LargeBlocksJob(SpillingShardsJob):
    """The same, only that each block is a quarter of the memory of a shard, and that producers go on until memory and disks are full, or nearly so."""

    puts = 70
    rows_max = 70 * ROWS
    row_bytes = MIB // ROWS
    body = Field("body", "int64", (row_bytes // 8,))
    use: m.GrantPurpose = "rows"
    capacity = 4 * MIB
    spill_bytes = SPILL_BYTES_MIN

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.waiting = chance.choice((8, 16, 30, 60)) * ROWS
        self.pause_s = chance.choice((0.02, 0.1))
