"""What the simulated workers do, and what each outcome is held against: books of its own, from clients' sight only."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from transferqueue.errors import EndOfTable, FlowSignal, NotFound, OutOfMemory, Sealed, Unreachable
from transferqueue.limits import Limits
from transferqueue.policies import Complete, Pacing, Task
from transferqueue.schema import Field
from transferqueue.testing.simulator.machine import Broken
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from transferqueue.testing.simulator.process import Process, Role

BODY: Final = Field("body", "int64", (8,))
SCORE: Final = Field("score", "int64")
ROW_BYTES: Final = 64
TASKS: Final = ("score", "train")


def pack(values: Sequence[int]) -> bytes:
    """As int64 on the wire."""
    return struct.pack(f"<{len(values)}q", *values)


def unpack(data: bytes) -> list[int]:
    """The int64 in `data`."""
    return list(struct.unpack(f"<{len(data) // 8}q", data))


class Books:
    """What clients were told. Knows nothing of the ledger; raises `Broken` at the first contradiction."""

    def __init__(self, size: int, staleness: int, attempts: int) -> None:
        self.size, self.staleness, self.attempts = size, staleness, attempts
        self.stamps = 0
        self.version_of: dict[int, int] = {}
        self.stamp_of: dict[int, int] = {}
        self.row_of: dict[int, int] = {}
        self.put = 0
        self.maybe_put = 0
        self.token: dict[tuple[str, int], int] = {}
        self.leases: dict[tuple[str, int], int] = {}
        self.acked: dict[tuple[str, int], int] = {}
        self.maybe_acked: set[tuple[str, int]] = set()
        self.clock = 0

    def new(self, rows: int, version: int) -> list[int]:
        """Stamps of rows that are about to be put."""
        made = list(range(self.stamps + 1, self.stamps + rows + 1))
        self.stamps += rows
        self.version_of.update(dict.fromkeys(made, version))
        return made

    def same(self, row: int, stamp: int) -> None:
        """A row was seen with this stamp: always this one, and no other row has it."""
        if stamp not in self.version_of:
            raise Broken(f"torn or strange bytes: row {row} holds {stamp}, which nobody wrote")
        if self.stamp_of.setdefault(row, stamp) != stamp or self.row_of.setdefault(stamp, row) != row:
            raise Broken(f"row {row} holds {stamp}; before, row {self.row_of.get(stamp)} did, or it held another")

    def lent(self, task: str, rows: list[int], lease: m.Leased, groups: list[int], clock: int) -> None:
        """A worker was given rows; clock: confirmed before it asked."""
        for row in rows:
            key = task, row
            if lease.token > self.acked.get(key, lease.token):  # a lower one was given before, and told late
                raise Broken(f'row {row} is given to task "{task}" again though its ack was confirmed')
            if lease.token > self.token.get(key, 0):
                self.token[key] = lease.token
                self.leases[key] = self.leases.get(key, 0) + 1
                if self.leases[key] > self.attempts:
                    raise Broken(
                        f'row {row} was given to task "{task}" {self.leases[key]} times, above {self.attempts}'
                    )
        if task == "train":
            for group in set(groups):
                if groups.count(group) != self.size:
                    raise Broken(f"group {group} was given in part: {groups.count(group)} of {self.size}")
            for row in rows:
                lag = clock - self.version_of.get(self.stamp_of.get(row, 0), clock)
                if lag > self.staleness:
                    raise Broken(f"row {row} was given {lag} versions late; the bound is {self.staleness}")

    def done(self, task: str, rows: list[int], token: int) -> None:
        """An ack was confirmed."""
        for row in rows:
            if self.token[task, row] != token:
                raise Broken(
                    f"row {row}: the ack of lease {token} was taken after {self.token[task, row]} was given out"
                )
            if self.acked.setdefault((task, row), token) != token:
                raise Broken(f'row {row} was acked twice in task "{task}"')


def create(books: Books, rows: int) -> m.CreateTable:
    """The table of a run."""
    score = Task("score", needs=["body"], gives=["score"], lease_s=2.0, attempts_max=books.attempts)
    train = Task(
        "train", needs=["body", "score"], lease_s=2.5, attempts_max=books.attempts, groups=Complete(deadline_s=20.0)
    )
    pacing = Pacing("train", batch_rows=2 * books.size, depth=2, max_staleness=books.staleness)
    return m.CreateTable("t", [BODY, SCORE], [score, train], Limits(rows=rows), pacing, exist_ok=True)


def producer(process: Process, books: Books, left: list[int]) -> Role:
    """Puts groups until `left` says that there are enough."""
    while left[0] > 0:
        try:
            yield from _produce(process, books, left)
        except (FlowSignal, OutOfMemory, Unreachable, NotFound):
            process.sights.clear()
            yield process.world.random.uniform(0.05, 0.3)


def _produce(process: Process, books: Books, left: list[int]) -> Role:
    size, chance = books.size, process.world.random
    reserved = yield m.Reserve("t", size, wait_s=3.0)
    grant = yield m.Grant(size * ROW_BYTES, wait_s=3.0)
    process.sights[-grant.extent] = grant.offset, grant.nbytes
    left[0] -= 1
    stamps = books.new(size, reserved.version)
    arena = process.server.arena.bytes
    for at, stamp in enumerate(stamps):
        start = grant.offset + at * ROW_BYTES
        arena[start : start + ROW_BYTES] = pack([stamp] * 8)
        if at == size // 2:
            yield chance.uniform(0.001, 0.1)
    facts = m.RowFacts(
        group_id=pack([stamps[0]] * size), group_size=struct.pack(f"<{size}i", *[size] * size),
        policy_version=pack([reserved.version] * size),
    )  # fmt: skip
    placed = m.Placed(grant.extent, grant.offset, size * ROW_BYTES, size, ["body"], [0])
    books.maybe_put += size
    process.sights.clear()
    reply = yield m.Put("t", size, m.Columns([BODY], [placed], facts=facts), reserved.reservation)
    books.put += size
    for row, stamp in zip(range(reply.first, reply.first + size), stamps, strict=True):
        books.same(row, stamp)
    yield m.ReturnGrant(grant.extent)


def consumer(process: Process, books: Books, task: str) -> Role:
    """Leases, reads, reads again, acks with results; the trainer moves the clock too."""
    while True:
        try:
            yield from _consume(process, books, task)
        except EndOfTable:
            return
        except (FlowSignal, Unreachable):
            yield 0.05


def _consume(process: Process, books: Books, task: str) -> Role:
    clock, chance = books.clock, process.world.random
    wait_s = 60.0 if process.world.healed else 2.0
    whole = task == "train"
    lease = yield m.Lease(
        "t", task, rows=0 if whole else books.size, groups=int(whole), at_least=0 if whole else 1, wait_s=wait_s
    )
    rows, groups = unpack(lease.content.rows), unpack(lease.content.group_id)
    views = {at.block: (at.offset, at.nbytes) for part in lease.content.parts for at in part.blocks}
    process.sights.update(views)
    _read(process, books, lease)
    if whole and rows and "score" not in {one.field for one in lease.content.inline}:
        raise Broken(f"rows {rows} were given to task train without the score that it needs")
    books.lent(task, rows, lease, groups, clock)
    yield chance.uniform(0.01, 0.4)
    _read(process, books, lease)
    columns = None
    if task == "score":
        scores = pack([books.stamp_of[row] * 7 for row in rows])
        columns = m.Columns([SCORE], inline=[m.Inline("score", scores)])
    books.maybe_acked.update((task, row) for row in rows)
    try:
        if rows:
            yield m.Ack("t", lease.lease, lease.token, columns=columns)
            books.done(task, rows, lease.token)
    finally:
        if process.alive:
            for block in views:
                process.sights.pop(block, None)
            if views:
                process.post(m.Unpin(pack(list(views)), pack([1] * len(views))))
    if task == "train":
        version = lease.version + 1
        yield m.Advance("t", version)
        books.clock = max(books.clock, version)


def _read(process: Process, books: Books, lease: m.Leased) -> None:
    content = lease.content
    rows = unpack(content.rows)
    for part in content.parts:
        blocks = struct.unpack(f"<{len(rows)}i", part.block_of_row)
        slots = struct.unpack(f"<{len(rows)}i", part.slot_of_row)
        for row, block, slot in zip(rows, blocks, slots, strict=True):
            start = part.blocks[block].offset + slot * ROW_BYTES
            values = set(unpack(bytes(process.server.arena.bytes[start : start + ROW_BYTES])))
            if len(values) != 1:
                raise Broken(f"row {row} is torn: it holds {sorted(values)}")
            books.same(row, values.pop())
    for inline in content.inline:
        for row, value in zip(rows, unpack(inline.data), strict=True):
            if inline.field == "score" and value != books.stamp_of[row] * 7:
                raise Broken(f"row {row} has the result of another: {value}")


def closer(process: Process, books: Books) -> Role:
    """Seals the table."""
    try:
        yield m.Seal("t")
    except Sealed:
        return
