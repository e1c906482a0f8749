"""Writes the blocks of one commit into granted memory.

Memory returns by extents, so columns that are freed at different times are written into different ones:

1. Columns of a table with `Acked` or `Manual` are freed with their rows: one region has them all.
2. `AckedColumns`: a region for each set of tasks that need a column, and one for the columns that no task needs. Small
   regions of many puts share extents, in two lanes: columns that only tasks with results need end early; what a task
   without results needs (mostly the trainer) ends about when its row does.
3. `ManualColumns`: a region for each column of `COLUMN_APART_BYTES` or more, and one for the others.
4. The block of a value by content has a region of its own, since rows of other puts may need it longer. One that the
   table has already is not written: the commit refers to it (`call_contents`).
5. Only the first region waits for memory. If there is no room for another one at once, all are given back, and
   everything is written into one. So producers that hold memory never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from transferqueue.client.client import ClientSession
from transferqueue.client.memory.grants import COLUMNS, CONTENTS, ROWS, CommitOutcome, WriteRegion
from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.operation_runner import UNINTERRUPTED, Operation
from transferqueue.errors import DeadlineExceeded, Full
from transferqueue.limits import COLUMN_APART_BYTES
from transferqueue.policies import AckedColumns, ManualColumns
from transferqueue.schema import align
from transferqueue.storage.elements.dtypes import I32
from transferqueue.storage.inputs.block_writer import BlockWriter, block_writers
from transferqueue.storage.inputs.content_blocks import ContentBlock
from transferqueue.storage.inputs.prepare import Prepared
from transferqueue.wire import messages as m


class WrittenBlocks:
    """The regions of one commit, each with the blocks that were written into it one after the other."""

    __slots__ = ("regions",)

    def __init__(self, *regions: tuple[WriteRegion, Sequence[BlockWriter]]) -> None:
        self.regions = [*regions]

    def blocks(self) -> list[m.WrittenBlock]:
        """The blocks as a commit names them."""
        placed: list[m.WrittenBlock] = []
        for region, blocks in self.regions:
            _place(region, blocks, placed)
        return placed

    def done(self, outcome: CommitOutcome) -> None:
        """The commit has ended with this outcome."""
        for region, _ in self.regions:
            region.done(outcome)


class BlockGroup(NamedTuple):
    """Blocks of columns that are freed together. `lane` is where small ones lie."""

    lane: str
    blocks: list[BlockWriter]


def write_columns(
    client: ClientSession,
    terms: m.TableTerms,
    columns: Sequence[Prepared],
    values: Sequence[ContentBlock],
    deadline: Deadline,
    use: m.GrantPurpose,
) -> Operation[WrittenBlocks]:
    """Write the columns of a commit, which are not inline, and blocks of values, with as many copies as the table
    has."""
    yield UNINTERRUPTED  # regions of open extents are taken
    groups = groups_of(terms, columns) if columns else []
    groups += [BlockGroup(CONTENTS, [block]) for block in values]
    if len(groups) > 1:
        written = yield from write_apart(client, groups, deadline, use, terms.replicas)
        if written is not None:
            return written
    if len(groups) == 1:
        lane, blocks = groups[0]
        if len(blocks) == 1 and terms.replicas == 1 and not client.checksums:
            region = client.grants.take(blocks[0].nbytes, lane)
            if region is not None:  # mostly: a small put into an open extent
                yield from client.shards.write(region, region.nbytes, blocks[0].write)
                return WrittenBlocks((region, blocks))
    else:
        lane, blocks = ROWS, [block for group in groups for block in group.blocks]
    return WrittenBlocks(((yield from write(client, blocks, deadline, use, terms.replicas, lane)), blocks))


def groups_of(terms: m.TableTerms, columns: Sequence[Prepared]) -> list[BlockGroup]:
    """The columns of a commit by the time at which they are freed."""
    if not isinstance(terms.retention, AckedColumns | ManualColumns):
        return [BlockGroup(ROWS, block_writers(columns))]
    columns_by_end: dict[tuple[str, ...], list[Prepared]] = {}
    for column in columns:
        columns_by_end.setdefault(_end(terms, column), []).append(column)
    last = {task.name for task in terms.tasks if not task.gives}
    return [
        BlockGroup(COLUMNS if end and last.isdisjoint(end) else ROWS, block_writers(those))
        for end, those in columns_by_end.items()
    ]


def _end(terms: m.TableTerms, column: Prepared) -> tuple[str, ...]:
    """The event that frees a column before its row: names of the tasks that need it, or its own name; empty if there is
    none."""
    name = column.field.name
    if isinstance(terms.retention, AckedColumns):
        return tuple(task.name for task in terms.tasks if name in task.needs)
    return (name,) if column.nbytes >= COLUMN_APART_BYTES else ()


def write_apart(
    client: ClientSession, groups: Sequence[BlockGroup], deadline: Deadline, use: m.GrantPurpose, replicas: int
) -> Operation[WrittenBlocks | None]:
    """Write each group into a region of its own. None if there is no room for all of them now."""
    written = WrittenBlocks()
    try:
        for lane, blocks in groups:
            until = Deadline(client.clock, 0.0) if written.regions else deadline
            written.regions.append(((yield from write(client, blocks, until, use, replicas, lane)), blocks))
    except (Full, DeadlineExceeded):
        written.done(CommitOutcome.REFUSED)
        if not written.regions:
            raise
        return None
    except BaseException:
        written.done(CommitOutcome.REFUSED)
        raise
    return written


def write(
    client: ClientSession,
    blocks: Sequence[BlockWriter],
    deadline: Deadline,
    use: m.GrantPurpose,
    replicas: int = 1,
    lane: str = ROWS,
) -> Operation[WriteRegion]:
    """Write the blocks into one region, and copies of it into remote shards, `replicas` in all."""
    region = yield from _written(client, blocks, deadline, [], use, lane)
    try:
        while len(region.copies) + 1 < replicas:
            apart = [one.shard for one in (region, *region.copies)]
            region.copies.append((yield from _written(client, blocks, deadline, apart, use, lane)))
    except BaseException:
        region.done(CommitOutcome.REFUSED)
        raise
    return region


def _written(
    client: ClientSession,
    blocks: Sequence[BlockWriter],
    deadline: Deadline,
    apart: list[int],
    use: m.GrantPurpose,
    lane: str,
) -> Operation[WriteRegion]:
    """Write one copy into a shard that is not in `apart`."""
    nbytes = sum([align(block.nbytes) for block in blocks])
    region = yield from client.grants.region(nbytes, deadline, apart, use, lane)
    yield from client.shards.write(region, nbytes, partial(fill, blocks=blocks, checksums=client.checksums))
    return region


def fill(memory: memoryview, blocks: Sequence[BlockWriter], *, checksums: bool) -> None:
    """Write blocks one after the other. With `checksums`, take the checksum of each."""
    at = 0
    for block in blocks:
        written = memory[at : at + block.nbytes]
        block.write(written)
        if checksums:
            block.take_checksum(written)
        at += align(block.nbytes)


def _place(region: WriteRegion, blocks: Sequence[BlockWriter], placed: list[m.WrittenBlock]) -> None:
    """Add to `placed` how a commit names blocks that were written one after the other into a region."""
    at = region.offset
    for block in blocks:
        placed.append(
            m.WrittenBlock(
                extent=region.extent,
                offset=at,
                nbytes=block.nbytes,
                rows=block.stored_rows,
                fields=[field.name for field in block.fields],
                counts=block.counts,
                slots=_bytes(block.slots),
                checksum=block.sum,
                copies=[m.WrittenCopy(one.extent, one.offset + at - region.offset) for one in region.copies]
                if region.copies
                else [],
                content=block.content,
                members=_bytes(block.members),
            )
        )
        at += block.nbytes  # aligned: see `schema.layout`


def reference(block: ContentBlock) -> m.WrittenBlock:
    """How a commit names a block that the table has already."""
    return m.WrittenBlock(
        extent=0,
        offset=0,
        nbytes=block.nbytes,
        rows=block.stored_rows,
        fields=[block.fields[0].name],
        counts=block.counts,
        slots=_bytes(block.slots),
        checksum=block.sum,
        content=block.content,
        members=_bytes(block.members),
    )


def _bytes(numbers: I32 | None) -> bytes | None:
    return None if numbers is None else numbers.astype("<i4").tobytes()
