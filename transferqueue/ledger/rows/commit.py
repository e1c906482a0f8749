"""Commits the columns and facts of a request: all of them, or none.

`check_columns` raises for everything that can be wrong and changes nothing. `append_rows` adds new rows with their
columns. For rows that exist, `reserve_blocks` adds the blocks, and `write_columns` makes them visible for some or all
rows. A commit may wait between the two: the results of a lease shared by replicas wait for the last ack. `discard`
gives up the references of rows that are never written.

A column of values that other commits have too may lie in several blocks, a value each, which share out the rows of the
request (`MemberRows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np

from transferqueue.errors import AlreadyExists, Impossible, NotFound, SchemaError, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import AnyArray, BoolArray, Index, IntArray, decode, numbered, repeated
from transferqueue.ledger.rows.blocks import BlockRegistry, OwnerBytes
from transferqueue.ledger.rows.column_places import ColumnGroups, Retired
from transferqueue.ledger.rows.continued import Continued
from transferqueue.ledger.rows.put_dedup import KnownPuts
from transferqueue.ledger.rows.row_metadata import NO_FACTS, NO_FACTS_GIVEN, CheckedFacts, check_facts
from transferqueue.ledger.rows.row_record import RowRecord
from transferqueue.ledger.rows.row_state import RowStore
from transferqueue.limits import BLOCK_ROWS_MAX, CONTENTS_MAX, FIELDS_MAX, Limits
from transferqueue.schema import Field, layout
from transferqueue.wire.messages import Columns, WrittenBlock


class _HasBlocks(Protocol):
    blocks: BlockRegistry
    recorded_block_max: int | None


class CommitTable(Protocol):
    """The part of `table_state.TableState` that a commit needs."""

    name: str
    limits: Limits
    rows: RowStore
    column_groups: ColumnGroups
    usage: OwnerBytes
    known_puts: KnownPuts
    latest_fields: CommitFields | None
    record: RowRecord | None

    @property
    def core(self) -> _HasBlocks:
        """What all tables share."""


@dataclass(slots=True)
class MemberRows:
    """The rows of a request, counted from 0, that have the one value of a block. `written`: the number of their
    references in use."""

    rows: IntArray
    written: int = 0


@dataclass(slots=True)
class StagedCommit:
    """Checked columns of `rows` rows. `slots`: None where row i of the request is row i of the block."""

    rows: int
    new_fields: list[Field]
    placed: list[WrittenBlock]
    slots: list[AnyArray | None]
    inline: list[tuple[str, AnyArray]]
    facts: CheckedFacts
    names: list[str]
    nbytes: int
    blocks: list[int] = field(default_factory=list)
    parts: list[list[tuple[str, ...]]] = field(default_factory=list)
    """Of each block, the fields of the column groups to which it is written."""
    written: int = 0
    """Number of rows whose references are in use."""
    anew: list[int] = field(default_factory=list)
    """Which of `placed` the rows need, also if another block has the same content (`check_contents`)."""
    members: dict[int, MemberRows] = field(default_factory=dict)
    """By place in `placed`: the rows of a block that is of some rows alone."""
    continued: dict[int, Continued] = field(default_factory=dict)
    """By place in `placed`: what the values of a block continue."""

    @property
    def empty(self) -> bool:
        """Whether it has neither columns nor facts."""
        return not self.names and not self.facts


# ---------------------------------------------------------------- checks: nothing is changed


def check_columns(table: CommitTable, columns: Columns, count: int, session: int) -> StagedCommit:
    """Check `columns` for `count` rows: all facts that do not depend on the rows themselves."""
    fields = _checked_fields(table, columns)
    inline: list[tuple[str, AnyArray]] = []
    for definition, column in zip(fields.inline, columns.inline, strict=True):
        inline.append((definition.name, _check_inline(definition, column.data, count)))
    slots: list[AnyArray | None] = []
    nbytes = 0
    members = _check_members(columns.blocks, count) if fields.in_several else {}
    for place, placed in enumerate(columns.blocks):
        if placed.members is not None and not members:
            raise _not_shared_out(", ".join(placed.fields), 1, len(placed.members) // 4, count)
        if fields.sizes[place] != (size := (placed.rows, placed.counts, placed.nbytes)):
            check_layout(placed, fields.blocks[place])
            fields.sizes[place] = size
        slots.append(_check_slots(placed, 1 if len(slots) in members else count))
        nbytes += placed.nbytes if placed.extent else 0
    table.core.blocks.check(session, columns.blocks, table.usage)
    if table.record is not None:
        _check_recordable(table, columns.blocks)
    facts = NO_FACTS if columns.facts == NO_FACTS_GIVEN else check_facts(columns.facts, count)
    if fields.new:
        table.rows.check_added(field.name for field in fields.new)
    nbytes *= table.usage.replicas
    staged = StagedCommit(count, fields.new, columns.blocks, slots, inline, facts, fields.names, nbytes)
    staged.members = members
    return staged


def _check_recordable(table: CommitTable, blocks: Sequence[WrittenBlock]) -> None:
    """`Impossible` if a block of a table that records its rows is larger than the memory from which it is recorded."""
    most = table.core.recorded_block_max
    largest = max((placed.nbytes for placed in blocks), default=0)
    if most is not None and largest > most:
        raise Impossible(
            f'a block of {largest:,} bytes can never be recorded: table "{table.name}" records its rows, and the '
            f"server reads them in its own memory of {most:,} bytes; put fewer rows at a time, or start the server "
            "with a larger --arena-bytes"
        )


def _check_members(blocks: Sequence[WrittenBlock], count: int) -> dict[int, MemberRows]:
    """The rows of the blocks that have a value for some rows alone. Raises unless the blocks of each such field share
    out all rows."""
    members: dict[int, MemberRows] = {}
    places_of_field: dict[str, list[int]] = {}
    for place, placed in enumerate(blocks):
        if placed.members is None:
            continue
        name = ", ".join(placed.fields)
        rows = decode(f'members of field "{name}"', placed.members, "<i4", len(placed.members) // 4)
        if len(placed.fields) != 1 or not placed.content or placed.slots is not None:
            raise UsageError(f"block of {name} has members; such a block has one field, a content and no slots")
        members[place] = MemberRows(rows.astype(np.int64))
        places_of_field.setdefault(placed.fields[0], []).append(place)
    for name, places in places_of_field.items():
        rows = np.sort(np.concatenate([members[place].rows for place in places]))
        sizes = [members[place].rows.size for place in places]
        if not 1 < len(places) <= CONTENTS_MAX or not all(sizes) or not np.array_equal(rows, np.arange(count)):
            raise _not_shared_out(name, len(places), rows.size, count)
    whole = [name for placed in blocks if placed.members is None for name in placed.fields]
    for name in (*repeated(whole), *places_of_field.keys() & whole):
        raise given_twice(name)
    return members


def _not_shared_out(name: str, blocks: int, members: int, rows: int) -> UsageError:
    return UsageError(
        f'field "{name}" lies in {counted(blocks, "block")} with {counted(members, "member")} for '
        f"{counted(rows, 'row')}; 2 to {CONTENTS_MAX} blocks "
        "share out the rows: each row is in one of them, and each block has one"
    )


@cache
def _little_endian(dtype: str) -> str:
    """The dtype of a field as messages carry its values."""
    return np.dtype(dtype).newbyteorder("<").str


def _check_inline(field: Field, data: bytes, count: int) -> AnyArray:
    values = decode(f'field "{field.name}"', data, _little_endian(field.dtype), count)
    if field.dtype == "bool" and count and int(values.view(np.uint8).max()) > 1:
        raise SchemaError(f'field "{field.name}" is bool, but a byte of it is neither 0 nor 1')
    return values


def check_unset(
    table: CommitTable, staged: StagedCommit, ids: IntArray, at: IntArray, *, replaces: Collection[str] = ()
) -> None:
    """Raise if a row already has one of the fields, but for those that the commit `replaces`."""
    rows = table.rows
    names = [name for name in staged.names if name in rows.fields and name not in replaces]
    if not rows.has_any(at, rows.mask(names)).any():
        return
    for name in names:
        has_field: BoolArray = rows.has_any(at, rows.mask((name,)))
        if has_field.any():
            raise AlreadyExists(
                f'field "{name}" of {numbered(ids[has_field])} in table "{rows.table}" is already set; '
                "table.update(rows, overwrite=True, ...) replaces it"
            )


def check_contents(table: CommitTable, staged: StagedCommit, at: IntArray) -> None:
    """Raise if a block is named by its content alone, and the rows, which exist already, would not read it: they have
    the field in a newer block. If its bytes were written, the rows get the written block.
    """
    for place, placed in enumerate(staged.placed):
        newest = table.column_groups.newest_beside(placed.fields[0], at) if placed.content else 0
        if not placed.content or table.core.blocks.may_refer(placed, table.usage, newest):
            continue
        if not placed.extent:
            raise NotFound(
                f'field "{placed.fields[0]}": the block of content {placed.content.hex()} is older than a block in '
                "which these rows have the field beside others; write the bytes into a grant, and commit them"
            )
        staged.anew.append(place)


def check_no_group_facts(staged: StagedCommit) -> None:
    """Raise if an update or ack carries facts that only a put may carry."""
    if "group_id" in staged.facts.numbers:
        raise UsageError("group_id and group_size are set by put and cannot be updated")


def check_size(table: CommitTable, staged: StagedCommit, rows: int) -> None:
    """Raise if `rows` rows of this size can never fit the table."""
    bytes_max = None if table.limits.bytes is None else table.limits.bytes_max
    if bytes_max is not None and staged.nbytes > bytes_max * rows:
        size = f"{rows} rows of {staged.nbytes // rows} bytes each" if rows > 1 else f"{staged.nbytes} bytes"
        raise Impossible(
            f'{size} do not fit table "{table.name}", which holds at most {bytes_max} bytes: {staged.nbytes} > '
            f"{bytes_max}"
        )


def added_columns(table: CommitTable, staged: StagedCommit) -> int:
    """How many columns of row state this commit adds, at most."""
    added = len(staged.new_fields)
    for placed in staged.placed:
        if not table.column_groups.has_group(placed.fields):
            added += len(placed.fields)
    return added


# ---------------------------------------------------------------- changes: nothing raises


def append_rows(table: CommitTable, staged: StagedCommit, tasks: int, now: float) -> tuple[IntArray, Index]:
    """Add new rows, which `tasks` tasks are to see, with their columns. Returns their ids and positions."""
    reserve_blocks(table, staged)
    rows = table.rows
    first, at, finished = rows.pages.append(staged.rows)
    if finished:
        table.known_puts.forget(finished)
    ids = np.arange(first, first + staged.rows)
    rows.put_at.a[at], rows.tasks_left.a[at] = now, tasks
    _write(table, staged, ids, at, None, are_new=True)
    return ids, at


def reserve_blocks(table: CommitTable, staged: StagedCommit) -> None:
    """Declare new fields, and add the blocks of checked columns."""
    for new in staged.new_fields:
        table.rows.add_field(new)
    if not staged.placed:
        return
    refs = []
    for place, placed in enumerate(staged.placed):
        groups = table.column_groups.parts_of(placed.fields)
        staged.parts.append([group.fields for group in groups])
        count = staged.members[place].rows.size if place in staged.members else staged.rows
        refs.append(count * len(groups))
    staged.blocks = table.core.blocks.commit(staged.placed, table.usage, refs, staged.anew, staged.continued)


def write_columns(
    table: CommitTable, staged: StagedCommit, ids: IntArray, at: Index, chosen: IntArray | None = None
) -> None:
    """Write columns and facts of the rows `ids`, which are the rows `chosen` of the request (None: all). Removes the
    references that this replaces. Call it once for each chosen row."""
    retire(table, _write(table, staged, ids, at, chosen, are_new=False))


def _write(
    table: CommitTable, staged: StagedCommit, ids: IntArray, at: Index, chosen: IntArray | None, *, are_new: bool
) -> Retired:
    """The same. Returns the references that this replaces. `are_new`: the rows have no column yet."""
    rows, parts = table.rows, table.column_groups
    retired: Retired = []
    for place, (number, slots, names) in enumerate(zip(staged.blocks, staged.slots, staged.parts, strict=True)):
        into = parts.named(names)
        if place in staged.members:
            where = _places_of(staged.members[place], at, chosen)
            retired += [] if are_new or not where.size else parts.take_out(where, into)
            parts.write(where, where.size, into, number, np.zeros(where.size, np.int32))
            continue
        if not are_new:
            retired += parts.take_out(at, into)
        parts.write(at, ids.size, into, number, slots if chosen is None else _slots(slots, chosen))
    for name, values in staged.inline:
        rows.set_inline(name, at, values if chosen is None else values[chosen])
    if staged.names:
        mark = rows.begin_fields if are_new else rows.set_fields
        mark(at, rows.mask(staged.names))
    if staged.facts is not NO_FACTS:
        rows.set_facts(ids, at, staged.facts if chosen is None else staged.facts.take(chosen))
    staged.written += ids.size
    return retired


def _places_of(members: MemberRows, at: Index, chosen: IntArray | None) -> IntArray:
    """The positions of those members that are among the rows `chosen` of the request (None: all), which are at `at`.
    Counts them as written."""
    mine = members.rows if chosen is None else np.flatnonzero(np.isin(chosen, members.rows))
    members.written += mine.size
    return mine + at.start if isinstance(at, slice) else at[mine]


def _slots(slots: AnyArray | None, chosen: IntArray) -> AnyArray:
    return chosen.astype(np.int32) if slots is None else slots[chosen]


def retire(table: CommitTable, retired: Retired) -> None:
    """Remove references to blocks."""
    for number, count in retired:
        table.core.blocks.retire(number, count)


def discard(table: CommitTable, staged: StagedCommit) -> None:
    """Remove the references of rows that were not written and never will be."""
    retire(table, unused(staged))


def unused(staged: StagedCommit) -> Retired:
    """The references of rows that were not written."""
    left = staged.rows - staged.written
    if not left:
        return []
    staged.written = staged.rows
    retired: Retired = []
    for place, (number, into) in enumerate(zip(staged.blocks, staged.parts, strict=True)):
        members = staged.members.get(place)
        count = left if members is None else members.rows.size - members.written
        if count:
            retired.append((number, count * len(into)))
    return retired


# ---------------------------------------------------------------- the fields of a request


@dataclass(slots=True)
class CommitFields:
    """The checked fields of a request. A table keeps those of its latest commit: mostly the next one has the same.

    Args:
        names: of all columns, each once.
        new: fields that the table does not have yet.
        inline: in the order of the request.
        blocks: in the order of the request.
        in_several: whether a column lies in several blocks, which share out the rows.
        definitions: as the request had them.
    """

    names: list[str]
    new: list[Field]
    inline: list[Field]
    blocks: list[list[Field]]
    in_several: bool
    definitions: list[Field]
    sizes: list[tuple[int, list[int], int]] = field(init=False)
    """Rows, counts and bytes of each block, as they were checked."""

    def __post_init__(self) -> None:
        self.sizes = [(0, [], 0)] * len(self.blocks)

    def are_of(self, columns: Columns) -> bool:
        """Whether these columns, in one block and inline, have the same names and definitions in the same order."""
        return (
            len(columns.blocks) == len(self.blocks) == 1
            and len(columns.inline) == len(self.inline)
            and columns.blocks[0].fields + [value.field for value in columns.inline] == self.names
            and columns.fields == self.definitions
        )


def _checked_fields(table: CommitTable, columns: Columns) -> CommitFields:
    latest = table.latest_fields
    if latest is not None and latest.are_of(columns):
        return latest
    fields = _check_fields(table.rows, columns)
    if not fields.new and not fields.in_several:
        table.latest_fields = fields
    return fields


def _check_fields(rows: RowStore, columns: Columns) -> CommitFields:
    names: list[str] = []
    for placed in columns.blocks:
        names += placed.fields
    for value in columns.inline:
        names.append(value.field)
    if len(names) > FIELDS_MAX or len(columns.blocks) > FIELDS_MAX:  # before any of them is looked up
        raise UsageError(
            f"a request gives {len(names)} columns in {len(columns.blocks)} blocks; a table has at most {FIELDS_MAX} "
            "fields"
        )
    known = rows.check_fields(columns.fields)
    fields: list[Field] = []
    for name in names:
        field = known.get(name)
        if field is None:
            raise rows.unknown_field(name)
        fields.append(field)
    blocks: list[list[Field]] = []
    at = 0
    for placed in columns.blocks:
        before, at = at, at + len(placed.fields)
        blocks.append(fields[before:at])
        for field in blocks[-1]:
            if field.inline:
                raise _misplaced(field)
    inline = fields[at:]
    for field in inline:
        if not field.inline:
            raise _misplaced(field)
    distinct = names if len(names) == 1 else list(dict.fromkeys(names))
    if len(distinct) < len(names):
        shared = [
            placed.fields[0] for placed in columns.blocks if placed.members is not None and len(placed.fields) == 1
        ]
        _check_once(Counter(names), Counter(shared))
    new = [] if known is rows.fields else [known[name] for name in known if name not in rows.fields]
    return CommitFields(distinct, new, inline, blocks, len(distinct) < len(names), columns.fields)


def _check_once(given: Counter[str], shared: Counter[str]) -> None:
    """Raise for a repeated name, unless each of its blocks has members."""
    for name, times in given.items():
        if times > 1 and shared[name] != times:
            raise given_twice(name)


def given_twice(name: str) -> UsageError:
    """The error of a request that gives a field more than once."""
    return UsageError(f'field "{name}" appears twice in one request; pass each field once')


def _misplaced(field: Field) -> SchemaError:
    if field.inline:
        return SchemaError(f'field "{field.name}" is {field.describe()}, which travels inline, not in a block')
    return SchemaError(f'field "{field.name}" is {field.describe()}, which does not travel inline; place it in a block')


def check_layout(placed: WrittenBlock, fields: Sequence[Field]) -> None:
    """Raise unless the size of the block is exactly that of its fields, rows and counts."""
    if not fields:
        raise UsageError("a block without fields holds nothing; name its fields")
    if not 1 <= placed.rows <= BLOCK_ROWS_MAX:
        raise UsageError(f"a block has {placed.rows} rows; it has 1 to {BLOCK_ROWS_MAX}")
    _, nbytes = layout(fields, placed.rows, placed.counts)
    if nbytes != placed.nbytes:
        raise UsageError(
            f"block of {', '.join(placed.fields)} has {placed.nbytes} bytes; {placed.rows} rows with counts "
            f"{placed.counts} take {nbytes}"
        )


def _check_slots(placed: WrittenBlock, count: int) -> AnyArray | None:
    """The row of the block of each of `count` rows; None if they are the same. Raises unless each has one."""
    if placed.slots is None:
        if placed.rows != count:
            raise SchemaError(f"block of {', '.join(placed.fields)} has {placed.rows} rows; the request has {count}")
        return None
    slots = decode("slots", placed.slots, "<i4", count)
    if count and (int(slots.min()) < 0 or int(slots.max()) >= placed.rows):
        raise UsageError(f"slots reach from {slots.min()} to {slots.max()}; the block has rows 0 to {placed.rows - 1}")
    return slots
