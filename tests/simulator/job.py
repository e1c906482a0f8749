"""A job of a simulated deployment: its tables or channel, its workers, and the conditions at its end.

A `SimJob` keeps accounts from the replies to its clients alone, and raises `PromiseBroken` at the first contradiction.
Its roles may be killed between any two requests and are started again from the top; only the accounts outlive them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tests.simulator.machine import PromiseBroken
from transferqueue.errors import EndOfTable, FlowSignal, NotFound, OutOfMemory, Sealed, Unreachable
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import Limits
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.wire import codec
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process

NUMBER: Final = Field("number", "int64")
BODY: Final = Field("body", "int64", (8,))
ROW_BYTES: Final = 64
Steps = Generator[m.Request | float, Any, Any]
"""The requests of a role, which receives their replies. A number waits that many seconds."""


class SimJob:
    """One job of a deployment. table: the table that it works on."""

    table = ""

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """The workers by name."""
        raise NotImplementedError

    def offer(self, role: str, number: int) -> m.ShardOffer | None:
        """The memory with which process `number` of a role joins, if it is a shard."""
        return None

    def check_books(self, state: LedgerState, *, whole: bool) -> None:
        """Raise `PromiseBroken` if the books name a row as done that no worker acked. whole: look at all of them, since
        the server is a new one."""

    def judge(self, state: LedgerState) -> None:
        """Raise `PromiseBroken` unless the final state agrees with the replies to clients. All roles have ended."""
        raise NotImplementedError


def pack(values: Sequence[int]) -> bytes:
    """Encode as int64, as on the wire."""
    return struct.pack(f"<{len(values)}q", *values)


def unpack(data: bytes) -> list[int]:
    """The int64 in `data`."""
    return list(struct.unpack(f"<{len(data) // 8}q", data))


def fact(content: m.ReplyRows, name: str) -> list[int]:
    """A fact of each row, such as its group."""
    return [int(value) for value in codec.decode_constant(getattr(content, name), "<i8", len(content.rows) // 8)]


def persistently(process: Process, act: Callable[[], Steps]) -> Steps:
    """Repeat `act` until it succeeds; its result. Between two tries the process waits and views no memory."""
    while True:
        try:
            return (yield from act())
        except (FlowSignal, OutOfMemory, Unreachable, NotFound):
            process.sights.clear()
            yield process.world.random.uniform(0.05, 0.3)


def until_end(process: Process, act: Callable[[], Steps]) -> Steps:
    """Repeat `act` until the end of the table."""
    while True:
        try:
            yield from act()
        except EndOfTable:
            return
        except (FlowSignal, OutOfMemory, Unreachable, NotFound):
            process.sights.clear()
            yield 0.05


def write(process: Process, stamps: Sequence[int]) -> Steps:
    """Write one row of bytes for each stamp into an extent of its own; the block. The caller returns the grant after
    the commit."""
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
    """Read the stamp in one row of a block. All words of the row must hold it."""
    return stamp_at(process.server.arena.bytes, at.offset + slot * ROW_BYTES, what)


def stamp_at(memory: bytearray, start: int, what: str) -> int:
    """Read the stamp in the row that begins at `start`."""
    values = set(unpack(bytes(memory[start : start + ROW_BYTES])))
    if len(values) != 1:
        raise PromiseBroken(f"{what} is torn: it holds {sorted(values)}")
    return values.pop()


def stamps_of(process: Process, content: m.ReplyRows) -> dict[int, int]:
    """The stamp in the bytes of each row."""
    rows, found = unpack(content.rows), {}
    for part in content.parts:
        blocks = codec.decode_constant(part.block_of_row, "<i4", len(rows)).tolist()
        slots = codec.decode_ascending(part.slot_of_row, "<i4", len(rows)).tolist()
        for row, block, slot in zip(rows, blocks, slots, strict=True):
            found[row] = look(process, part.blocks[block], slot, f"row {row}")
    return found


def blocks_of(content: m.ReplyRows) -> list[m.BlockLocation]:
    """Every block that a reply pins."""
    return [at for part in content.parts for at in part.blocks]


def view(process: Process, blocks: Iterable[m.BlockLocation]) -> None:
    """Mark blocks as viewed until `let_go`."""
    process.sights.update({at.block: (at.offset, at.nbytes) for at in blocks})


def let_go(process: Process, blocks: Sequence[m.BlockLocation]) -> None:
    """End the view of blocks, and unpin them."""
    if not process.alive or not blocks:
        return
    numbers = sorted({at.block for at in blocks})
    for number in numbers:
        process.sights.pop(number, None)
    process.send_unawaited(m.Unpin(pack(numbers), pack([1] * len(numbers))))


def inline(content: m.ReplyRows, name: str) -> list[int]:
    """Values of an inline int64 field, a row each."""
    return next((unpack(one.data) for one in content.inline if one.field == name), [])


class Feed:
    """A role that puts numbered inline rows and then seals the table. Rows of an unconfirmed put may be in the table or
    not."""

    def __init__(self, job: str, *, puts: int, rows: int, limits: Limits, tasks: Sequence[Task]) -> None:
        self._terms: Final = m.CreateTable(job, [NUMBER], list(tasks), limits, exist_ok=True)
        self._puts: Final = puts
        self.rows: Final = rows
        self.confirmed = 0
        self.sent = 0

    def open(self) -> Steps:
        """Make the table unless it exists."""
        yield self._terms

    def feed(self, process: Process) -> Steps:
        """Run the role."""
        yield from self.open()
        while self.confirmed < self._puts * self.rows:
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
        self.confirmed += self.rows
        yield chance.uniform(0.0, 1.0)

    def judge(self, table: TableState, done: int) -> None:
        """Raise unless all rows that were put are done, and clients know of `done` acks."""
        if table.rows_done != table.rows_put or table.rows_live or table.rows_done != done:
            raise PromiseBroken(
                f'table "{table.name}": {table.rows_put} rows were put and {table.rows_done} are done; clients '
                f"finished {done}"
            )
        if not self.confirmed <= table.rows_put <= self.sent:
            raise PromiseBroken(
                f"{table.rows_put} rows were put; clients were told of {self.confirmed}, and sent {self.sent}"
            )
