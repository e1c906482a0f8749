"""A job on a table whose rows lie in remote shards, with one copy or two. Shards crash, and their bytes are lost. What
lost one copy of two is copied again."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulator import job
from tests.simulator.job import SimJob, Steps
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import (
    DeadlineExceeded,
    EndOfTable,
    FlowSignal,
    Impossible,
    NotFound,
    OutOfMemory,
    Sealed,
    ShardLost,
    Unreachable,
)
from transferqueue.limits import PAGE_BYTES, Limits
from transferqueue.policies import Task
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.wire import codec
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

PUTS: Final = 12
ROWS: Final = 2
FIRST_STAMP: Final = 4_000_000
CAPACITY: Final = 8 * PAGE_BYTES
WAITING: Final = 4 * ROWS
HEAL_S: Final = 20.0
"""After all faults have ended, every row has its copies again within this time."""
POLL_S: Final = 0.3
ASK_S: Final = 0.02
LOST: Final = 0.03
"""Probability that the machine of a shard fails, for each time that it asks what to do."""
LATER: Final = (FlowSignal, OutOfMemory, Unreachable, NotFound, ShardLost, Impossible)
"""Errors after which a process tries again later: a shard is gone, or not there yet."""


class ReplicatedShardsJob(SimJob):
    """One process puts, two use the rows. Each other process is a remote shard, and a new shard after each death."""

    table = "copied"
    puts = PUTS
    rows_max = 6 * ROWS
    waiting = WAITING
    """Users leave so many rows in the table, so that some are there when a shard dies."""
    pause_s = 0.5
    """The longest pause between two puts."""
    body = job.BODY
    row_bytes = job.ROW_BYTES
    """Of one row of `body`. Its first words are its stamp."""
    use: m.GrantPurpose = "results"

    def __init__(self, chance: random.Random) -> None:
        self.replicas, self._further = self._shards(chance)
        self._arenas: dict[str, tuple[Process, int, bytearray]] = {}
        """By path of the memory: the process, its number when it joined with that memory, and the memory."""
        self._confirmed = self._sent = 0
        self._used: set[int] = set()
        self._maybe_used: set[int] = set()
        """Stamps whose ack was confirmed, and stamps whose ack was sent."""
        self.copied = 0
        """Blocks that shards reported as copied again."""
        self._over = False

    def _shards(self, chance: random.Random) -> tuple[int, int]:
        """How many shards have each row, and how many remote ones there are."""
        return chance.choice((1, 2, 2)), chance.choice((1, 2))

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        shards = {f"shard {number}": self._lend for number in range(self._further)}
        return {**shards, "copier": self._write, "user a": self._use, "user b": self._use}

    def offer(self, role: str, number: int) -> m.ShardOffer | None:
        """See `SimJob`."""
        if not role.startswith("shard"):
            return None
        return m.ShardOffer(str(number), CAPACITY, "tcp://simulated:1", "", bytes(32))

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`. Rows with a copy in the server's own memory must not be lost, because that memory is never
        lost."""
        table = state.tables[self.table]
        lost = table.rows_dropped.get("lost", 0)
        if table.rows_live or table.rows_put != table.rows_done + lost:
            raise PromiseBroken(f"{table.rows_put} rows were put; {table.rows_done} are done and {lost} lost")
        if lost and (len(self._arenas) == self._further or (self.replicas, self._further) == (2, 1)):
            raise PromiseBroken(
                f"{lost} rows were lost; {self.replicas} shards had each, {len(self._arenas)} lives of shards ended"
            )
        if not len(self._used) <= table.rows_done <= len(self._maybe_used):
            raise PromiseBroken(
                f"{table.rows_done} rows are done; clients finished {len(self._used)} to {len(self._maybe_used)}"
            )
        if not self._confirmed <= table.rows_put <= self._sent:
            raise PromiseBroken(
                f"{table.rows_put} rows were put; clients were told of {self._confirmed}, and sent {self._sent}"
            )

    # ------------------------------------------------------------ shards

    def _lend(self, process: Process) -> Steps:
        """Memory that exists as long as the process. All its pages exist too, so commands about them are answered at
        once."""
        self._arenas[str(process.number)] = process, process.number, bytearray(CAPACITY)
        epoch = done = 0
        report = m.TakeCopies(wait_s=ASK_S)
        while not self._over:
            if process.world.strikes(LOST, "shard lost"):
                raise Unreachable("the machine of this shard failed")
            try:
                orders = yield m.PollCommands(epoch, done, wait_s=POLL_S)
            except DeadlineExceeded:
                pass
            else:
                epoch, done = orders.epoch, orders.first + len(orders.orders) - 1
            try:
                order = yield report
            except DeadlineExceeded:
                report = m.TakeCopies(wait_s=ASK_S)
            else:
                written = yield from self._copy(process, order)
                report = m.TakeCopies(order.target.extent, written, ASK_S)

    def _copy(self, process: Process, order: m.CopyOrder) -> Steps:
        """Carry out a copy order, row by row. Returns the blocks that are written. Their source may be lost meanwhile,
        or freed and used again: then nobody needs the copy."""
        written: list[int] = []
        if order.target.shard == SHARD:
            process.sights[-order.target.extent] = order.target.offset, order.target.nbytes
        try:
            for at, offset in zip(order.blocks, order.offsets, strict=True):
                source = yield from self._bytes(process, at.shard)
                target = yield from self._bytes(process, order.target.shard)
                for start in range(0, at.nbytes, job.ROW_BYTES):
                    row = source[at.offset + start : at.offset + start + job.ROW_BYTES]
                    target[offset + start : offset + start + job.ROW_BYTES] = row
                    yield process.world.random.uniform(0.001, 0.05)
                written.append(at.block)
        except ShardLost:
            pass
        finally:
            process.sights.pop(-order.target.extent, None)
        self.copied += len(written)
        return written

    def _bytes(self, process: Process, shard: int) -> Steps:
        """The memory of a shard, as a process maps it."""
        if shard == SHARD:
            return process.server.arena.bytes
        there = yield m.ListShards()
        for at in there.shards:
            if at.number == shard and at.path in self._arenas:
                owner, number, memory = self._arenas[at.path]
                if owner.number == number and owner.alive:
                    return memory
        raise ShardLost(f"shard {shard} is gone")

    # ------------------------------------------------------------ in

    def _open(self) -> Steps:
        task = Task("use", needs=["body"], lease_s=2.0)
        limits = Limits(rows=self.rows_max)
        yield m.CreateTable(self.table, [self.body], [task], limits, exist_ok=True, replicas=self.replicas)

    def _insist(self, act: Callable[[], Steps]) -> Steps:
        while True:
            try:
                return (yield from act())
            except EndOfTable:
                raise
            except LATER:
                yield 0.1

    def _write(self, process: Process) -> Steps:
        yield from self._insist(self._open)
        while self._confirmed < self.puts * ROWS:
            yield from self._insist(partial(self._write_once, process))
        try:
            yield m.Seal(self.table)
        except Sealed:
            return

    def _write_once(self, process: Process) -> Steps:
        stamps = list(range(self._sent, self._sent + ROWS))
        grants: list[m.Granted] = []
        try:
            while len(grants) < self.replicas:
                yield from self._write_to(process, grants, stamps)
            first, *others = grants
            copies = [m.WrittenCopy(one.extent, one.offset) for one in others]
            placed = m.WrittenBlock(
                first.extent, first.offset, ROWS * self.row_bytes, ROWS, ["body"], [0], copies=copies
            )
            self._sent += ROWS
            process.sights.clear()  # it writes nothing more there
            yield m.PutRequest(self.table, ROWS, m.Columns([self.body], [placed]), wait_s=3.0)
            self._confirmed += ROWS
        finally:
            process.sights.clear()
            for grant in grants if process.alive else ():
                process.send_unawaited(m.ReturnGrant(grant.extent))
        yield process.world.random.uniform(0.0, self.pause_s)

    def _write_to(self, process: Process, grants: list[m.Granted], stamps: list[int]) -> Steps:
        apart = [one.shard for one in grants]
        grant = yield m.Grant(ROWS * self.row_bytes, wait_s=3.0, apart=apart, use=self.use)
        grants.append(grant)
        if grant.shard == SHARD:
            process.sights[-grant.extent] = grant.offset, grant.nbytes
        memory = yield from self._bytes(process, grant.shard)
        for at, stamp in enumerate(stamps):
            start = grant.offset + at * self.row_bytes
            memory[start : start + job.ROW_BYTES] = job.pack([FIRST_STAMP + stamp] * 8)
            yield process.world.random.uniform(0.001, 0.05)

    # ------------------------------------------------------------ out

    def _use(self, process: Process) -> Steps:
        yield from self._insist(self._open)
        try:
            while True:
                if process.world.healed and self.replicas > 1:
                    yield from self._insist(partial(self._await_copies, process))
                while self._leaves_rows(process):
                    yield 0.1
                yield from self._insist(partial(self._use_once, process))
        except EndOfTable:
            self._over = True

    def _leaves_rows(self, process: Process) -> bool:
        """Whether users wait, because few rows would be left."""
        return not process.world.healed and self._confirmed - len(self._used) <= self.waiting

    def _await_copies(self, process: Process) -> Steps:
        """Wait until each row has all its copies again. All faults have ended, and rows wait."""
        until = process.world.now + HEAL_S
        while True:
            lacking = _blocks_that_lack_copies(process)
            if not lacking:
                return
            if process.world.now > until:
                raise PromiseBroken(f"{lacking} blocks still lack a copy, {HEAL_S:g} s after all faults ended")
            yield 0.2

    def _use_once(self, process: Process) -> Steps:
        wait_s = 60.0 if process.world.healed else 2.0
        lease = yield m.LeaseRequest(self.table, "use", rows=ROWS, at_least=1, wait_s=wait_s)
        job.view(process, [at for at in job.blocks_of(lease.content) if at.shard == SHARD])
        try:
            stamps = yield from self._seen(process, lease.content)
            yield process.world.random.uniform(0.01, 0.3)
            if stamps != (yield from self._seen(process, lease.content)):
                raise PromiseBroken(f"rows {job.unpack(lease.content.rows)} changed under a view")
            self._maybe_used.update(stamps)
            yield m.Ack(self.table, lease.lease, lease.token)
            if again := self._used & set(stamps):
                raise PromiseBroken(f"the acks of rows {sorted(again)} were accepted twice")
            self._used.update(stamps)
        except ShardLost:
            process.send_unawaited(m.ReleaseRequest(self.table, lease.lease, lease.token))
            raise
        finally:
            job.let_go(process, job.blocks_of(lease.content))

    def _seen(self, process: Process, content: m.ReplyRows) -> Steps:
        """The stamps of the rows, in order. Each must have been put, and be the same in each copy."""
        rows, found = len(content.rows) // 8, []
        (part,) = content.parts
        blocks = codec.decode_constant(part.block_of_row, "<i4", rows).tolist()
        slots = codec.decode_ascending(part.slot_of_row, "<i4", rows).tolist()
        for block, slot in zip(blocks, slots, strict=True):
            at = part.blocks[block]
            memory = yield from self._bytes(process, at.shard)
            stamp = job.stamp_at(memory, at.offset + slot * self.row_bytes, f"a row in shard {at.shard}")
            found.append(stamp - FIRST_STAMP)
            yield from self._compare_copies(process, at.copies, slot, stamp)
        if wrong := [stamp for stamp in found if not 0 <= stamp < self._sent]:
            raise PromiseBroken(f"rows {wrong} were given out; {self._sent} were put")
        return found

    def _compare_copies(self, process: Process, copies: list[m.CopyLocation], slot: int, stamp: int) -> Steps:
        """Each copy that still exists must hold this stamp."""
        for copy in copies:
            try:
                memory = yield from self._bytes(process, copy.shard)
            except ShardLost:
                continue
            held = job.stamp_at(memory, copy.offset + slot * self.row_bytes, f"a copy in shard {copy.shard}")
            if held != stamp:
                raise PromiseBroken(f"a copy in shard {copy.shard} holds {held}, and the row {stamp}")


def _blocks_that_lack_copies(process: Process) -> int:
    """Counted without the ledger's own index."""
    ledger = process.server.ledger
    blocks = ledger.state.core.blocks.blocks.values() if ledger is not None else ()
    return sum(block.refs > 0 and len(block.extents) < block.usage.replicas for block in blocks)
