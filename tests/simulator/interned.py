"""A job whose rows share values: bodies that puts intern, answers that acks intern, drafts that updates and releases
intern.

Every writer refers to a value by its content first, or writes it at once, as a pipeline does. Two writers may bring one
value, a value may end between two references, and rows that have a newer draft may not refer to an older block.
Whatever crashes, each row reads its own values.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from tests.simulator import job
from tests.simulator.job import SimJob, Steps
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import AlreadyExists, Full, NotFound, Sealed, UsageError
from transferqueue.limits import Limits
from transferqueue.policies import Manual, Task
from transferqueue.schema import Field
from transferqueue.wire import codec
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

PUTS: Final = 8
ROWS: Final = 3
VALUES: Final = 3
"""Different values of each field."""
FIRST: Final = {"body": 7_000_000, "answer": 8_000_000, "draft": 9_000_000}
FIELDS: Final = [job.NUMBER, *(Field(name, "int64", (8,)) for name in (*FIRST, "note"))]
LIMITS: Final = Limits(rows=4 * ROWS, bytes=20 * job.ROW_BYTES)
INTERNED_PAGES: Final = 24
"""Pages for the blocks of this job: the rows stay until they are deleted, so no put of other jobs may wait for their
memory."""


class InternedJob(SimJob):
    """Two processes put rows, two answer and draft them, one learns from them, and one drafts them again and deletes
    them."""

    table = "interned"

    def __init__(self) -> None:
        self._put = 0
        self._unsure: dict[int, Counter[int]] = {number: Counter() for number in range(PUTS * ROWS)}
        """By number of a row: how often a draft was sent without an answer that says whether it came."""
        self._learned: set[int] = set()
        self._deleting: set[int] = set()
        self._deleted = 0

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        teachers = {f"teacher {number}": self._teach for number in (0, 1)}
        return {"interning author": self._write, **teachers, "pupil": self._learn, "sweeper": self._sweep}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`. Keys make a repeated put one put."""
        table = state.tables[self.table]
        if (table.rows_put, table.rows_live, table.usage.bytes, table.usage.contents) != (PUTS * ROWS, 0, 0, {}):
            raise PromiseBroken(
                f"{PUTS * ROWS} rows were put and deleted; the table counts {table.rows_put} put, {table.rows_live} "
                f"live, {table.usage.bytes} bytes, {len(table.usage.contents)} contents"
            )

    def _open(self) -> Steps:
        tasks = [
            Task("teach", needs=["number"], gives=["answer"], lease_s=2.0),
            Task("learn", needs=["body", "answer"], lease_s=2.0),
        ]
        yield m.CreateTable(self.table, FIELDS, tasks, LIMITS, retention=Manual(), exist_ok=True)

    # ------------------------------------------------------------ writers

    def _commit(
        self, process: Process, name: str, values: Sequence[int], request: Callable[[list[m.WrittenBlock]], m.Request]
    ) -> Steps:
        """Send the request with these values of its rows: by their contents, or else with their bytes."""
        references = [_reference(name, value, values) for value in sorted(set(values))]
        if process.world.random.random() < 0.8:
            try:
                reply = yield request(references)
                process.world.faults["value referred to"] += len(references)
                return reply
            except NotFound:
                yield process.world.random.uniform(0.0, 0.1)
        blocks: list[m.WrittenBlock] = []
        try:
            for reference in references:
                block = yield from job.write(process, [int.from_bytes(reference.content)])
                blocks.append(replace(reference, extent=block.extent, offset=block.offset))
            return (yield request(blocks))
        finally:
            for block in blocks if process.alive else ():
                process.send_unawaited(m.ReturnGrant(block.extent))

    def _write(self, process: Process) -> Steps:
        yield from self._open()
        while self._put < PUTS:
            yield from job.persistently(process, partial(self._write_once, process))
        try:
            yield m.Seal(self.table)
        except Sealed:
            return

    def _write_once(self, process: Process) -> Steps:
        at = self._put
        numbers = _numbers(at)
        facts = m.RowFacts(keys=[str(number) for number in numbers])
        inline = [m.Inline("number", job.pack(numbers))]
        beside = []
        if at % 2:  # a draft that is written beside another column, in a block that references to drafts do not replace
            beside = [(yield from job.write(process, [FIRST["draft"], FIRST["draft"]]))]
            beside = [replace(beside[0], rows=1, fields=["draft", "note"], counts=[0, 0], slots=_slots(ROWS))]

        def request(blocks: list[m.WrittenBlock]) -> m.Request:
            return m.PutRequest(self.table, ROWS, m.Columns([], [*blocks, *beside], inline, facts), wait_s=3.0)

        try:
            yield from self._commit(process, "body", [at % VALUES] * ROWS, request)
        except AlreadyExists:
            pass
        finally:
            for block in beside if process.alive else ():
                process.send_unawaited(m.ReturnGrant(block.extent))
        self._put = at + 1
        yield process.world.random.uniform(0.0, 0.6)

    def _teach(self, process: Process) -> Steps:
        yield from self._open()
        yield from job.until_end(process, partial(self._teach_once, process))

    def _teach_once(self, process: Process) -> Steps:
        """Answer rows, each with its own value; sometimes draft them all instead, and give them back."""
        wait_s = 60.0 if process.world.healed else 2.0
        lease = yield m.LeaseRequest(self.table, "teach", rows=ROWS, at_least=1, wait_s=wait_s)
        rows, numbers = job.unpack(lease.content.rows), job.inline(lease.content, "number")
        yield process.world.random.uniform(0.01, 0.3)
        if process.world.strikes(0.15, "teacher gave rows back"):
            draft = process.world.random.randrange(VALUES)
            for number in numbers:
                self._unsure[number][draft] += 1
            yield from self._commit(process, "draft", [draft] * len(rows), partial(self._release, lease))
            return
        answers = [number % VALUES for number in numbers]
        yield from self._commit(process, "answer", answers, partial(self._ack, lease, rows))

    def _ack(self, lease: m.Leased, rows: list[int], blocks: list[m.WrittenBlock]) -> m.Request:
        return m.Ack(self.table, lease.lease, lease.token, job.pack(rows), m.Columns([], blocks))

    def _release(self, lease: m.Leased, blocks: list[m.WrittenBlock]) -> m.Request:
        return m.ReleaseRequest(self.table, lease.lease, lease.token, reason="a draft", columns=m.Columns([], blocks))

    # ------------------------------------------------------------ readers

    def _learn(self, process: Process) -> Steps:
        yield from self._open()
        yield from job.until_end(process, partial(self._learn_once, process))

    def _learn_once(self, process: Process) -> Steps:
        wait_s = 60.0 if process.world.healed else 2.0
        fields = ["number", "body", "answer"]
        lease = yield m.LeaseRequest(self.table, "learn", rows=ROWS, at_least=1, wait_s=wait_s, fields=fields)
        job.view(process, job.blocks_of(lease.content))
        try:
            numbers = job.inline(lease.content, "number")
            self._check(process, lease.content, numbers)
            yield process.world.random.uniform(0.01, 0.3)
            self._check(process, lease.content, numbers)
            self._learned.update(numbers)
            yield m.Ack(self.table, lease.lease, lease.token)
        finally:
            job.let_go(process, job.blocks_of(lease.content))

    def _check(self, process: Process, content: m.ReplyRows, numbers: list[int]) -> None:
        bodies, answers = _values(process, content, "body"), _values(process, content, "answer")
        if bodies != [number // ROWS % VALUES for number in numbers]:
            raise PromiseBroken(f"rows {numbers} have the bodies {bodies}")
        if answers != [number % VALUES for number in numbers]:
            raise PromiseBroken(f"rows {numbers} have the answers {answers}")

    def _sweep(self, process: Process) -> Steps:
        yield from self._open()
        while self._deleted < PUTS:
            if self._deleted < self._put:
                yield from job.persistently(process, partial(self._sweep_once, process))
            else:
                yield 0.1

    def _sweep_once(self, process: Process) -> Steps:
        """Draft the rows of the oldest put and of a later one, and read them; delete the oldest, once they were
        learned."""
        numbers = _numbers(self._deleted)
        rows = job.unpack((yield m.Find(self.table, [str(number) for number in numbers])).rows)
        if -1 in rows and not self._deleting.issuperset(numbers):
            raise PromiseBroken(f"rows {numbers} have keys that lead to {rows}, and nobody has deleted them")
        if -1 not in rows:
            yield from self._draft(process, rows, numbers)
            later = _numbers(process.world.random.randrange(self._deleted, self._put))
            others = job.unpack((yield m.Find(self.table, [str(number) for number in later])).rows)
            yield from self._draft(process, others, later)
            if not self._learned.issuperset(numbers):
                yield 0.1
                return
            self._deleting.update(numbers)
            try:
                yield m.Delete(self.table, job.pack(rows))
            except UsageError as error:  # an ack was refused, and another process has the rows on lease
                raise Full(str(error)) from error
        self._deleted += 1

    def _draft(self, process: Process, rows: list[int], numbers: list[int]) -> Steps:
        def update(blocks: list[m.WrittenBlock]) -> m.Request:
            return m.Update(self.table, job.pack(rows), m.Columns([], blocks), overwrite=True)

        draft = process.world.random.randrange(VALUES)
        for number in numbers:
            self._unsure[number][draft] += 1
        try:
            yield from self._commit(process, "draft", [draft] * ROWS, update)
        except NotFound:  # they have ended: both tasks are done with them
            return
        for number in numbers:
            self._unsure[number][draft] -= 1
        found = yield m.ReadRequest(self.table, job.pack(rows), ["body", "draft"])
        job.view(process, job.blocks_of(found.content))
        try:
            bodies = _values(process, found.content, "body")
            if bodies != [number // ROWS % VALUES for number in numbers]:
                raise PromiseBroken(f"rows {numbers} have the bodies {bodies}")
            drafts = _values(process, found.content, "draft")
            might = [{draft, *+self._unsure[number]} for number in numbers]
            if not all(read in values for read, values in zip(drafts, might, strict=True)):
                raise PromiseBroken(f"rows {numbers} have the drafts {drafts}, and were given {draft} last")
        finally:
            job.let_go(process, job.blocks_of(found.content))


def _values(process: Process, content: m.ReplyRows, name: str) -> list[int]:
    """The value of the field that each row has, by its bytes. They must be those of the block's content."""
    rows = job.unpack(content.rows)
    (part,) = (part for part in content.parts if name in part.fields)
    blocks = codec.decode_constant(part.block_of_row, "<i4", len(rows)).tolist()
    slots = codec.decode_ascending(part.slot_of_row, "<i4", len(rows)).tolist()
    stamps = [
        job.look(process, part.blocks[block], slot, f"row {row}")
        for row, block, slot in zip(rows, blocks, slots, strict=True)
    ]
    for stamp, block in zip(stamps, blocks, strict=True):
        content_of = part.blocks[block].content
        if content_of and int.from_bytes(content_of) != stamp:
            raise PromiseBroken(f"a block of content {int.from_bytes(content_of)} holds {stamp}")
    return [stamp - FIRST[name] for stamp in stamps]


def _reference(name: str, value: int, values: Sequence[int]) -> m.WrittenBlock:
    """Names the block of a value for those rows of a request that have it."""
    content = (FIRST[name] + value).to_bytes(16)
    reference = m.WrittenBlock(0, 0, job.ROW_BYTES, 1, [name], [0], content=content)
    if set(values) == {value}:
        return replace(reference, slots=_slots(len(values)))
    rows = [row for row, of_row in enumerate(values) if of_row == value]
    return replace(reference, members=struct.pack(f"<{len(rows)}i", *rows))


def _slots(rows: int) -> bytes:
    """Each of so many rows has the first row of a block."""
    return struct.pack(f"<{rows}i", *[0] * rows)


def _numbers(put: int) -> list[int]:
    return list(range(put * ROWS, put * ROWS + ROWS))
