"""A job on a table whose rows stay until they are deleted, in bounded bytes: found by key, leased by predicate, read by
id."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulator import job
from tests.simulator.job import SimJob, Steps
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import AlreadyExists, Full, Sealed, UsageError
from transferqueue.limits import Limits
from transferqueue.policies import Compare, Manual, Predicate, TagIs, Task
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

PUTS: Final = 8
ROWS: Final = 3
FIRST_STAMP: Final = 2_000_000
LIMITS: Final = Limits(rows=4 * ROWS, bytes=3 * ROWS * 64)


class ManualRetentionJob(SimJob):
    """One process puts, one uses the rows of even puts, one those of odd puts, and one reads all rows again and deletes
    them."""

    table = "kept"

    def __init__(self) -> None:
        self._put = 0
        self._used: set[int] = set()
        self._maybe_used: set[int] = set()
        """Numbers whose ack was confirmed, and numbers whose ack was sent."""
        self._deleting: set[int] = set()
        self._deleted = 0

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        users = {f"user {odd}": partial(self._use, odd=odd) for odd in (0, 1)}
        return {"author": self._write, **users, "reader": self._read}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`. Keys make a repeated put one put, whoever repeats it."""
        table = state.tables[self.table]
        if (table.rows_put, table.rows_live, table.rows.pages.resident) != (PUTS * ROWS, 0, 0) or table.usage.bytes:
            raise PromiseBroken(
                f"{PUTS * ROWS} rows were put and deleted; the table counts {table.rows_put} put, {table.rows_live} "
                f"live, {table.rows.pages.resident} there, {table.usage.bytes} bytes"
            )

    def _open(self) -> Steps:
        task = Task("use", needs=["body"], lease_s=2.0)
        yield m.CreateTable(self.table, [job.BODY, job.NUMBER], [task], LIMITS, retention=Manual(), exist_ok=True)

    # ------------------------------------------------------------ in

    def _write(self, process: Process) -> Steps:
        yield from self._open()
        while self._put < PUTS:
            yield from job.persistently(process, partial(self._write_once, process))
        try:
            yield m.Seal(self.table)
        except Sealed:
            return

    def _write_once(self, process: Process) -> Steps:
        """Put rows. A reader waits for confirmed puts only, so it must find the key of each of their rows."""
        at = self._put
        numbers = _numbers(at)
        block = yield from job.write(process, [FIRST_STAMP + number for number in numbers])
        facts = m.RowFacts(keys=[str(number) for number in numbers], tags=[{"odd": bool(at % 2)}] * ROWS)
        columns = m.Columns([job.BODY, job.NUMBER], [block], [m.Inline("number", job.pack(numbers))], facts)
        try:
            yield m.PutRequest(self.table, ROWS, columns, wait_s=3.0)
        except AlreadyExists:
            pass
        finally:
            if process.alive:
                process.send_unawaited(m.ReturnGrant(block.extent))
        self._put = at + 1
        yield process.world.random.uniform(0.0, 0.6)

    # ------------------------------------------------------------ use

    def _use(self, process: Process, odd: int) -> Steps:
        yield from self._open()
        yield from job.until_end(process, partial(self._use_once, process, odd))

    def _use_once(self, process: Process, odd: int) -> Steps:
        wait_s = 60.0 if process.world.healed else 2.0
        where: list[Predicate] = [TagIs("odd", bool(odd)), Compare("number", ">=", 0)]
        lease = yield m.LeaseRequest(self.table, "use", rows=ROWS, at_least=1, wait_s=wait_s, where=where)
        job.view(process, job.blocks_of(lease.content))
        try:
            numbers = self._seen(process, lease.content, job.unpack(lease.content.rows))
            if wrong := [number for number in numbers if number // ROWS % 2 != odd]:
                raise PromiseBroken(f"rows {wrong} were given to who asked for those with odd={bool(odd)}")
            if again := self._used & set(numbers):
                raise PromiseBroken(f"rows {sorted(again)} were given out again after their ack")
            yield process.world.random.uniform(0.01, 0.3)
            self._maybe_used.update(numbers)
            yield m.Ack(self.table, lease.lease, lease.token)
            self._used.update(numbers)
        finally:
            job.let_go(process, job.blocks_of(lease.content))

    def _seen(self, process: Process, content: m.ReplyRows, rows: list[int]) -> list[int]:
        """The numbers in the bytes of rows, which must equal the numbers in their keys."""
        stamps = job.stamps_of(process, content)
        numbers = [stamps[row] - FIRST_STAMP for row in rows]
        if [str(number) for number in numbers] != content.keys:
            raise PromiseBroken(f"rows {rows} with keys {content.keys} hold {numbers}")
        return numbers

    # ------------------------------------------------------------ out

    def _read(self, process: Process) -> Steps:
        yield from self._open()
        while self._deleted < PUTS:
            if self._deleted < self._put:
                yield from job.persistently(process, partial(self._read_once, process))
            else:
                yield 0.1

    def _read_once(self, process: Process) -> Steps:
        """Read the rows of the oldest put and, once they were used, delete them."""
        numbers = _numbers(self._deleted)
        rows = job.unpack((yield m.Find(self.table, [str(number) for number in numbers])).rows)
        if -1 in rows and not self._deleting.issuperset(numbers):
            raise PromiseBroken(f"rows {numbers} have keys that lead to {rows}, and nobody has deleted them")
        if -1 not in rows:
            yield from self._read_rows(process, rows, numbers)
            if not self._maybe_used.issuperset(numbers):
                yield 0.1
                return
            yield from self._delete(rows, numbers)
        self._deleted += 1

    def _delete(self, rows: list[int], numbers: list[int]) -> Steps:
        self._deleting.update(numbers)
        try:
            yield m.Delete(self.table, job.pack(rows))
        except UsageError as error:  # an ack was refused, and another process has the rows on lease
            raise Full(str(error)) from error

    def _read_rows(self, process: Process, rows: list[int], numbers: list[int]) -> Steps:
        found = yield m.ReadRequest(self.table, job.pack(rows))
        job.view(process, job.blocks_of(found.content))
        try:
            if self._seen(process, found.content, rows) != numbers or job.inline(found.content, "number") != numbers:
                raise PromiseBroken(f"rows {rows} were put as {numbers} and are read as others")
        finally:
            job.let_go(process, job.blocks_of(found.content))


def _numbers(put: int) -> list[int]:
    return list(range(put * ROWS, put * ROWS + ROWS))
