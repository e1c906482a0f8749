"""A job on a table whose columns are freed with their last task: one task needs the image of a row, another its body.

Whichever task is done with a row first frees its column, once, and the row takes the other column with it. So as many
values are freed as rows were put, whatever crashes. The task that needs images acks with steps and rolls back: an image
stays until a checkpoint covers its row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from tests.simulator import job
from tests.simulator.job import SimJob, Steps
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import (
    AlreadyExists,
    ColumnFreed,
    EndOfTable,
    FlowSignal,
    NotFound,
    OutOfMemory,
    Sealed,
    Unreachable,
)
from transferqueue.limits import Limits
from transferqueue.policies import AckedColumns, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

IMAGE: Final = Field("image", "int64", (8,))
PUTS: Final = 8
ROWS: Final = 3
FIRST_STAMPS: Final = {"body": 5_000_000, "image": 6_000_000}
SAVE_EVERY: Final = 3


class ColumnEndsJob(SimJob):
    """One process puts rows, one looks at images, one uses bodies, and one reads columns without a lease.

    saved: outlives the process that looks: the step of its last save.
    """

    table = "columns"

    def __init__(self) -> None:
        self._put = self._begun = 0
        self._given: set[int] = set()
        """Numbers of rows that a task has been given: they have been put."""
        self._saved = -1
        self._covered: set[int] = set()
        self._used: set[int] = set()
        self._maybe: dict[str, set[int]] = {"image": set(), "body": set()}
        """By column: numbers of rows whose task may be done with them."""
        self._ended: set[str] = set()

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        return {"painter": self._write, "viewer": self._look, "user": self._use, "visitor": self._visit}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`. A repeated put is one put, whoever repeats it: keys see to that while its rows live, `_was_put`
        afterwards."""
        table = state.tables[self.table]
        if (table.rows_put, table.rows_done, table.rows_live) != (PUTS * ROWS, PUTS * ROWS, 0) or table.usage.bytes:
            raise PromiseBroken(
                f"{PUTS * ROWS} rows were put and used; the table counts {table.rows_put} put, {table.rows_done} done, "
                f"{table.rows_live} live, {table.usage.bytes} bytes"
            )
        if table.columns_freed != table.rows_put:
            raise PromiseBroken(
                f"{table.rows_put} rows had one column each that ended before them; {table.columns_freed} were freed"
            )

    def _open(self) -> Steps:
        tasks = [
            Task("look", needs=["image"], lease_s=2.5),
            Task("use", needs=["body"], lease_s=2.0),
        ]
        limits = Limits(rows=3 * ROWS)
        yield m.CreateTable(
            self.table, [job.BODY, IMAGE, job.NUMBER], tasks, limits, retention=AckedColumns(), exist_ok=True
        )

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
        numbers = _numbers(self._put)
        again, self._begun = self._begun > self._put, self._put + 1
        if again and (yield from self._was_put(numbers)):
            self._put += 1
            return
        blocks: list[m.WrittenBlock] = []
        try:
            for name, first in FIRST_STAMPS.items():
                block = yield from job.write(process, [first + number for number in numbers])
                blocks.append(msgspec.structs.replace(block, fields=[name]))
            facts = m.RowFacts(keys=[str(number) for number in numbers])
            columns = m.Columns([job.BODY, IMAGE, job.NUMBER], blocks, [m.Inline("number", job.pack(numbers))], facts)
            yield m.PutRequest(self.table, ROWS, columns, wait_s=0.0 if again else 3.0)
        except AlreadyExists:
            pass
        finally:
            for block in blocks if process.alive else ():
                process.send_unawaited(m.ReturnGrant(block.extent))
        self._put += 1
        yield process.world.random.uniform(0.0, 0.6)

    def _was_put(self, numbers: list[int]) -> Steps:
        """Whether an earlier try, of this process or the one before it, put the rows. Keys find rows that live; those
        that ended have been given to a task. A real producer gives ordinals, and asks for the table's cursor."""
        live = job.unpack((yield m.Find(self.table, [str(number) for number in numbers])).rows)
        return min(live) >= 0 or bool(self._given.intersection(numbers))

    # ------------------------------------------------------------ tasks

    def _look(self, process: Process) -> Steps:
        """Look at all images. After a death, or now and then, go back to the last save."""
        yield from self._open()
        ended = False
        while not ended:
            yield from job.persistently(process, self._go_back)
            try:
                ended = yield from self._look_on(process)
            except Unreachable:  # the server may have counted that step or not
                yield 0.05
        self._ended.add("image")

    def _go_back(self) -> Steps:
        yield m.Rollback(self.table, self._saved, "look")

    def _look_on(self, process: Process) -> Steps:
        """True when the table has ended, False to roll back to the last save."""
        step, unsaved = self._saved, set[int]()
        while True:
            try:
                unsaved.update((yield from self._look_once(process, step + 1)))
            except EndOfTable:
                break
            except (FlowSignal, OutOfMemory, NotFound):
                yield from self._save(step, unsaved)  # rows that wait for a checkpoint may fill the table
                yield 0.05
                continue
            step += 1
            if step % SAVE_EVERY == 0:
                yield from self._save(step, unsaved)
            if process.world.strikes(0.02, "viewer went back"):
                return False
        yield from self._save(step, unsaved)
        return True

    def _save(self, step: int, unsaved: set[int]) -> Steps:
        self._saved = step
        self._maybe["image"] |= unsaved
        yield m.CommitCheckpoint(self.table, step, "look")
        self._covered |= unsaved

    def _look_once(self, process: Process, step: int) -> Steps:
        lease, numbers = yield from self._lease(process, "look", "image")
        if again := self._covered.intersection(numbers):
            raise PromiseBroken(f"rows {sorted(again)} were given out again, and a checkpoint covers them")
        yield m.Ack(self.table, lease.lease, lease.token, step=step)
        return numbers

    def _use(self, process: Process) -> Steps:
        yield from self._open()
        yield from job.until_end(process, partial(self._use_once, process))
        self._ended.add("body")

    def _use_once(self, process: Process) -> Steps:
        lease, numbers = yield from self._lease(process, "use", "body")
        if again := self._used.intersection(numbers):
            raise PromiseBroken(f"rows {sorted(again)} were given out again after their ack")
        self._maybe["body"].update(numbers)
        yield m.Ack(self.table, lease.lease, lease.token)
        self._used.update(numbers)

    def _lease(self, process: Process, task: str, column: str) -> Steps:
        """A lease, and the numbers of its rows, whose column must have been put with them and stay while it is
        viewed."""
        wait_s = 60.0 if process.world.healed and task == "use" else 2.0
        lease = yield m.LeaseRequest(self.table, task, rows=ROWS, at_least=1, wait_s=wait_s, fields=[column, "number"])
        job.view(process, job.blocks_of(lease.content))
        try:
            numbers = self._seen(process, lease.content, column)
            self._given.update(numbers)
            yield process.world.random.uniform(0.01, 0.3)
            if numbers != self._seen(process, lease.content, column):
                raise PromiseBroken(f"column {column} of rows {numbers} changed under a view")
        finally:
            job.let_go(process, job.blocks_of(lease.content))
        return lease, numbers

    def _seen(self, process: Process, content: m.ReplyRows, column: str) -> list[int]:
        """The numbers of rows, which must be those in the bytes of their column."""
        stamps = job.stamps_of(process, content)
        numbers = [stamps[row] - FIRST_STAMPS[column] for row in job.unpack(content.rows)]
        if numbers != job.inline(content, "number"):
            raise PromiseBroken(f"rows {job.inline(content, 'number')} have the {column} of rows {numbers}")
        return numbers

    # ------------------------------------------------------------ a reader

    def _visit(self, process: Process) -> Steps:
        yield from self._open()
        while len(self._ended) < 2:
            if self._put:
                yield from job.persistently(process, partial(self._visit_once, process))
            yield process.world.random.uniform(0.05, 0.4)

    def _visit_once(self, process: Process) -> Steps:
        """Read a column of a confirmed row. It is there until the task that needs it may be done with the row."""
        number = process.world.random.randrange(self._put * ROWS)
        column = process.world.random.choice(list(FIRST_STAMPS))
        (row,) = job.unpack((yield m.Find(self.table, [str(number)])).rows)
        if row < 0:
            if not all(number in maybe for maybe in self._maybe.values()):
                raise PromiseBroken(f"row {number} is gone, and no task may be done with it yet")
            return
        try:
            content = (yield m.ReadRequest(self.table, job.pack([row]), [column, "number"])).content
        except ColumnFreed as error:
            if number not in self._maybe[column]:
                raise PromiseBroken(f"its task is not done with row {number}: {error}") from error
            return
        job.view(process, job.blocks_of(content))
        try:
            self._seen(process, content, column)
        finally:
            job.let_go(process, job.blocks_of(content))


def _numbers(put: int) -> list[int]:
    return list(range(put * ROWS, put * ROWS + ROWS))
