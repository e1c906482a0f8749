"""A job whose rows continue rows, as the turns of episodes that branch: rows end in any order, and those that continue
them stay whole.

A row is made of the numbers of all rows from its root to itself. Its writer may not learn whether its put was carried
out, and puts it again, then perhaps whole, since the row that it continues has ended. So a reader accepts each form in
which the row was sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from tests.simulator import job
from tests.simulator.job import SimJob, Steps
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import AlreadyExists, NotFound, Sealed
from transferqueue.limits import Limits
from transferqueue.policies import Retry, Task
from transferqueue.schema import Field
from transferqueue.wire import codec
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

PUTS: Final = 12
ROWS: Final = 2
FIRST_STAMP: Final = 11_000_000
BODY: Final = Field("body", "int64", (None,))
ATTEMPTS: Final = 2
"""After which a row is dropped, and kept for a while with all that it continues."""
WORDS: Final = 8
"""Of each stored value; the offsets of so few rows take as many bytes."""
BYTES: Final = (1 << 14, 1 << 17)
"""Of the table: with the first, puts wait for room; with the second, rows that were dropped are kept."""


class ContinuedJob(SimJob):
    """Two processes put turns, each of which continues some earlier one, and two learn from them."""

    table = "continued"

    def __init__(self, chance: Random) -> None:
        self._limits = Limits(rows=6 * ROWS, bytes=chance.choice(BYTES))
        self._put = 0
        self._sent: dict[int, set[tuple[int, ...]]] = {}
        """By number of a row: the chains of numbers with which it was sent."""
        self._rows: dict[int, int] = {}

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        return {"teller": self._write, "reader 0": self._learn, "reader 1": self._learn}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`. A put that is repeated after its rows have ended, whose keys are free then, makes others."""
        table = state.tables[self.table]
        continued = [*table.usage.continued]
        kept = (table.limits.bytes_max or 0) // 8 if len(table.dropped) else 0
        if table.rows_put < PUTS * ROWS or table.rows_live or table.usage.bytes > kept or (continued and not kept):
            raise PromiseBroken(
                f"{PUTS * ROWS} rows were put and learned; the table counts {table.rows_put} put, {table.rows_live} "
                f"live, {len(table.dropped)} kept, {table.usage.bytes} bytes; {continued} continue others"
            )

    def _open(self) -> Steps:
        tasks = [Task("learn", needs=["body"], lease_s=2.0, retry=Retry(first_s=0.1, attempts=ATTEMPTS))]
        yield m.CreateTable(self.table, [job.NUMBER, BODY], tasks, self._limits, exist_ok=True)

    # ------------------------------------------------------------ writers

    def _write(self, process: Process) -> Steps:
        yield from self._open()
        while self._put < PUTS:
            yield from job.persistently(process, partial(self._write_once, process))
        try:
            yield m.Seal(self.table)
        except Sealed:
            return

    def _write_once(self, process: Process) -> Steps:
        """Put rows that continue any earlier ones, or, if these have ended, whole."""
        chance = process.world.random
        numbers = list(range(self._put * ROWS, self._put * ROWS + ROWS))
        parents = [chance.choice([*self._rows][-6:]) if self._rows and chance.random() < 0.8 else -1 for _ in numbers]
        try:
            yield from self._put_rows(process, numbers, parents)
        except NotFound:
            process.world.faults["parent has ended"] += 1
            yield from self._put_rows(process, numbers, [-1] * ROWS)
        if any(parent >= 0 for parent in parents):
            process.world.faults["row put that continues"] += 1
        rows = job.unpack((yield m.Find(self.table, [str(number) for number in numbers])).rows)
        self._rows.update({number: row for number, row in zip(numbers, rows, strict=True) if row >= 0})
        self._put += 1
        yield chance.uniform(0.0, 0.4)

    def _put_rows(self, process: Process, numbers: list[int], parents: list[int]) -> Steps:
        for number, parent in zip(numbers, parents, strict=True):
            chains = self._sent.get(parent, {()})
            self._sent.setdefault(number, set()).update((*chain, number) for chain in chains)
        written = yield from job.write(process, [0, *(FIRST_STAMP + number for number in numbers)])
        block = replace(written, rows=ROWS, fields=["body"], counts=[WORDS * ROWS])
        columns = m.Columns([], [block], [m.Inline("number", job.pack(numbers))], m.RowFacts(keys=[*map(str, numbers)]))
        put = m.PutRequest(self.table, ROWS, columns, wait_s=3.0)
        if any(parent >= 0 for parent in parents):
            rows = [self._rows.get(parent, -1) for parent in parents]
            put = m.ContinueRequest(self.table, ROWS, columns, 0, 3.0, job.pack(rows), ["body"])
        try:
            yield put
        except AlreadyExists:
            pass
        finally:
            if process.alive:
                process.send_unawaited(m.ReturnGrant(block.extent))

    # ------------------------------------------------------------ readers

    def _learn(self, process: Process) -> Steps:
        yield from self._open()
        yield from job.until_end(process, partial(self._learn_once, process))

    def _learn_once(self, process: Process) -> Steps:
        wait_s = 60.0 if process.world.healed else 2.0
        rows = process.world.random.randint(1, 2 * ROWS)
        fields = ["number", "body"]
        lease = yield m.LeaseRequest(self.table, "learn", rows=rows, at_least=1, wait_s=wait_s, fields=fields)
        job.view(process, job.blocks_of(lease.content))
        try:
            self._check(process, lease.content)
            yield process.world.random.uniform(0.01, 0.5)
            self._check(process, lease.content)
            if process.world.random.random() < 0.2:
                yield m.ReleaseRequest(self.table, lease.lease, lease.token, failed=True, reason="a reader failed")
            else:
                yield m.Ack(self.table, lease.lease, lease.token)
        finally:
            job.let_go(process, job.blocks_of(lease.content))

    def _check(self, process: Process, content: m.ReplyRows) -> None:
        numbers = job.inline(content, "number")
        for number, chain in zip(numbers, _chains(process, content, len(numbers)), strict=True):
            if chain not in self._sent.get(number, ()):
                raise PromiseBroken(f"row {number} is made of {chain}; it was sent as {sorted(self._sent[number])}")
            process.world.faults["row continues"] += len(chain) > 1


def _chains(process: Process, content: m.ReplyRows, rows: int) -> list[tuple[int, ...]]:
    """The numbers that each row is made of, by the bytes of all its values."""
    (part,) = (part for part in content.parts if "body" in part.fields)
    count = part.values(rows)
    blocks = codec.decode_constant(part.block_of_row, "<i4", count).tolist()
    slots = codec.decode_ascending(part.slot_of_row, "<i4", count).tolist()
    chains: list[tuple[int, ...]] = [
        (job.look(process, part.blocks[block], slot + 1, f"slot {slot}") - FIRST_STAMP,)
        for block, slot in zip(blocks, slots, strict=True)
    ]
    if not isinstance(part, m.ReplyTree):
        return chains
    for node, (above,) in enumerate(struct.iter_unpack("<i", part.parents)):
        chains[node] = (*chains[above], *chains[node]) if above >= 0 else chains[node]
    return [chains[node] for (node,) in struct.iter_unpack("<i", part.node_of_row)]
