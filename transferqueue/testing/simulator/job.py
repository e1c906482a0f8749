"""What a simulated deployment is used for: some tables or a channel, who works on them, and what must hold at the end.

A `SimJob` keeps its books from what clients were told alone and raises `PromiseBroken` at the first contradiction. Its roles may
be killed between any two requests and are begun again from the top: what outlives them is in the books.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from transferqueue.errors import EndOfTable, FlowSignal, NotFound, OutOfMemory, Sealed, Unreachable
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table import TableState
from transferqueue.limits import Limits
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.testing.simulator.machine import PromiseBroken
from transferqueue.wire import messages as m
from transferqueue.wire import run_length as short

if TYPE_CHECKING:
    from transferqueue.testing.simulator.process import Process

NUMBER: Final = Field("number", "int64")
BODY: Final = Field("body", "int64", (8,))
ROW_BYTES: Final = 64
Steps = Generator[m.Request | float, Any, Any]
"""Requests of a role; it is sent their replies. A number passes that many seconds."""


class SimJob:
    """One use of a deployment. table: what it works on."""

    table = ""

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """Its workers, by name."""
        raise NotImplementedError

    def offer(self, role: str, number: int) -> m.ShardOffer | None:
        """The memory that process `number` of a role joins with, if it is a shard."""
        return None

    def judge(self, state: LedgerState) -> None:
        """Raise `PromiseBroken` unless everything has come to the end that clients were told of. All roles have ended."""
        raise NotImplementedError


def pack(values: Sequence[int]) -> bytes:
    """As int64 on the wire."""
    return struct.pack(f"<{len(values)}q", *values)


def unpack(data: bytes) -> list[int]:
    """The int64 in `data`."""
    return list(struct.unpack(f"<{len(data) // 8}q", data))


def fact(content: m.ReplyRows, name: str) -> list[int]:
    """A fact of each row, such as its group."""
    return [int(value) for value in short.encode_rows(getattr(content, name), "<i8", len(content.rows) // 8)]


def persistently(process: Process, act: Callable[[], Steps]) -> Steps:
    """`act` until it succeeds; what it returns. Between two tries a while passes, and nothing is seen any more."""
    while True:
        try:
            return (yield from act())
        except (FlowSignal, OutOfMemory, Unreachable, NotFound):
            process.sights.clear()
            yield process.world.random.uniform(0.05, 0.3)


def until_end(process: Process, act: Callable[[], Steps]) -> Steps:
    """`act` again and again, until the table has ended."""
    while True:
        try:
            yield from act()
        except EndOfTable:
            return
        except (FlowSignal, OutOfMemory, Unreachable, NotFound):
            process.sights.clear()
            yield 0.05


def write(process: Process, stamps: Sequence[int]) -> Steps:
    """One row of bytes a stamp, into an extent of its own; the block. Return the grant when it is committed."""
    grant = yield m.Grant(len(stamps) * ROW_BYTES, wait_s=3.0)
    process.sights[-grant.extent] = grant.offset, grant.nbytes
    arena = process.server.arena.bytes
    for at, stamp in enumerate(stamps):
        start = grant.offset + at * ROW_BYTES
        arena[start : start + ROW_BYTES] = pack([stamp] * 8)
        if at == len(stamps) // 2:
            yield process.world.random.uniform(0.001, 0.1)
    process.sights.clear()
    return m.WrittenBlock(grant.extent, grant.offset, len(stamps) * ROW_BYTES, len(stamps), ["body"], [0])


def look(process: Process, at: m.BlockLocation, slot: int, what: str) -> int:
    """The stamp in one row of a block: all of its bytes must agree."""
    return stamp_at(process.server.arena.bytes, at.offset + slot * ROW_BYTES, what)


def stamp_at(memory: bytearray, start: int, what: str) -> int:
    """The stamp in the row that begins there."""
    values = set(unpack(bytes(memory[start : start + ROW_BYTES])))
    if len(values) != 1:
        raise PromiseBroken(f"{what} is torn: it holds {sorted(values)}")
    return values.pop()


def stamps_of(process: Process, content: m.ReplyRows) -> dict[int, int]:
    """Row -> the stamp in its bytes."""
    rows, found = unpack(content.rows), {}
    for part in content.parts:
        blocks = short.encode_rows(part.block_of_row, "<i4", len(rows)).tolist()
        slots = short.each_ascending(part.slot_of_row, "<i4", len(rows)).tolist()
        for row, block, slot in zip(rows, blocks, slots, strict=True):
            found[row] = look(process, part.blocks[block], slot, f"row {row}")
    return found


def blocks_of(content: m.ReplyRows) -> list[m.BlockLocation]:
    """Every block that a reply pins."""
    return [at for part in content.parts for at in part.blocks]


def view(process: Process, blocks: Iterable[m.BlockLocation]) -> None:
    """These are in sight until `let_go`."""
    process.sights.update({at.block: (at.offset, at.nbytes) for at in blocks})


def let_go(process: Process, blocks: Sequence[m.BlockLocation]) -> None:
    """What a reply named is not viewed any more."""
    if not process.alive or not blocks:
        return
    numbers = sorted({at.block for at in blocks})
    for number in numbers:
        process.sights.pop(number, None)
    process.post(m.Unpin(pack(numbers), pack([1] * len(numbers))))


def inline(content: m.ReplyRows, name: str) -> list[int]:
    """Values of an inline int64 field, a row each."""
    return next((unpack(one.data) for one in content.inline if one.field == name), [])


class Feed:
    """Puts of inline rows with numbers of their own, then the seal. A put that nobody was told of may be there or not."""

    def __init__(self, job: str, *, puts: int, rows: int, limits: Limits, tasks: Sequence[Task]) -> None:
        self._terms: Final = m.CreateTable(job, [NUMBER], list(tasks), limits, exist_ok=True)
        self._puts: Final = puts
        self.rows: Final = rows
        self.told = 0
        self.sent = 0

    def open(self) -> Steps:
        """Make the table, or find it there."""
        yield self._terms

    def feed(self, process: Process) -> Steps:
        """The role."""
        yield from self.open()
        while self.told < self._puts * self.rows:
            yield from persistently(process, partial(self._put, process))
        try:
            yield m.Seal(self._terms.name)
        except Sealed:
            return

    def _put(self, process: Process) -> Steps:
        chance = process.world.random
        numbers = list(range(self.sent, self.sent + self.rows))
        self.sent += self.rows
        facts = m.RowFacts(ordinal=pack(numbers), tokens=pack([chance.randint(1, 50) for _ in numbers]))
        columns = m.Columns([NUMBER], inline=[m.Inline("number", pack(numbers))], facts=facts)
        yield m.PutRequest(self._terms.name, self.rows, columns, wait_s=3.0)
        self.told += self.rows
        yield chance.uniform(0.0, 1.0)

    def judge(self, table: TableState, done: int) -> None:
        """Raise unless all rows that were put are done, and `done` of them are known to be."""
        if table.rows_done != table.rows_put or table.rows_live or table.rows_done != done:
            raise PromiseBroken(
                f'table "{table.name}": {table.rows_put} rows were put and {table.rows_done} are done; clients finished {done}'
            )
        if not self.told <= table.rows_put <= self.sent:
            raise PromiseBroken(
                f"{table.rows_put} rows were put; clients were told of {self.told}, and sent {self.sent}"
            )
