"""What all commits of the same columns have in common: which fields they give, in which blocks, and which of them inline.

Stages commit the same columns again and again. Whether the names and definitions of a request fit the table depends on nothing else, and
a table never changes or removes a field. So the first request of a shape is checked field by field, and later ones are recognised. The
first request that adds a field is not remembered: the table has the field only once it is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from transferqueue.errors import SchemaError, UsageError
from transferqueue.ledger.rows.arrays import AnyArray, decode
from transferqueue.ledger.rows.row_state import RowStore
from transferqueue.limits import FIELDS_MAX, ROWS_PER_REQUEST_MAX
from transferqueue.schema import Field, layout
from transferqueue.wire.messages import Columns, WrittenBlock

SHAPES_KEPT = 256
"""Shapes that a table remembers. The stages of one table commit a dozen."""


class BlockShape:
    """The fields of one block of a commit, and the size that was found right last: stages write blocks of few sizes."""

    __slots__ = ("_counts", "_nbytes", "_rows", "fields")

    def __init__(self, fields: list[Field]) -> None:
        self.fields = fields
        self._rows = self._nbytes = -1
        self._counts: list[int] = []

    def check(self, placed: WrittenBlock, count: int) -> AnyArray | None:
        """Raise unless the block has the size of its fields and a row for each of `count` rows. Returns the row of the block of each;
        None if they are the same.
        """
        if placed.rows != self._rows or placed.nbytes != self._nbytes or placed.counts != self._counts:
            check_layout(placed, self.fields)
            self._rows, self._nbytes, self._counts = placed.rows, placed.nbytes, placed.counts
        if placed.slots is None and placed.rows == count:
            return None
        return _check_slots(placed, count)


class CommitShape:
    """The checked names and definitions of a request. names: of all columns. inline, blocks: in the order of the request."""

    __slots__ = ("blocks", "inline", "names", "new_fields")

    def __init__(
        self, names: list[str], new_fields: list[Field], inline: list[Field], blocks: list[BlockShape]
    ) -> None:
        self.names, self.new_fields, self.inline, self.blocks = names, new_fields, inline, blocks


class CommitShapes:
    """The shapes that were committed to one table. No image contains them."""

    def __init__(self, rows: RowStore) -> None:
        self.rows = rows
        self._checked: dict[object, CommitShape] = {}

    def of(self, columns: Columns) -> CommitShape:
        """The shape of these columns; raises unless their names and definitions fit the table."""
        names = [name for placed in columns.blocks for name in placed.fields]
        inline = [value.field for value in columns.inline] if columns.inline else []
        if len(names) + len(inline) > FIELDS_MAX or len(columns.blocks) > FIELDS_MAX:  # before any of them is looked up
            raise UsageError(
                f"a request gives {len(names) + len(inline)} columns in {len(columns.blocks)} blocks; a table has at most {FIELDS_MAX} fields"
            )
        if len(columns.fields) > FIELDS_MAX:
            self.rows.check_fields(columns.fields)  # raises
        divided = tuple([len(placed.fields) for placed in columns.blocks])  # a block without fields is no missing block
        key = tuple(names), tuple(inline), tuple(columns.fields), divided
        shape = self._checked.get(key)
        if shape is None:
            shape = _check(self.rows, columns, names + inline)
            if not shape.new_fields:
                if len(self._checked) >= SHAPES_KEPT:
                    self._checked.clear()
                self._checked[key] = shape
        return shape


def _check(rows: RowStore, columns: Columns, names: list[str]) -> CommitShape:
    known = rows.check_fields(columns.fields)
    inline = [_inline_field(rows, known, value.field) for value in columns.inline]
    blocks = [BlockShape([_placed_field(rows, known, name) for name in placed.fields]) for placed in columns.blocks]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f'field "{twice}" is given twice in one request; give each field once')
    new = [] if known is rows.fields else [known[name] for name in known if name not in rows.fields]
    return CommitShape(names, new, inline, blocks)


def _inline_field(rows: RowStore, known: dict[str, Field], name: str) -> Field:
    field = known.get(name)
    if field is None:
        raise rows.unknown_field(name)
    if not field.inline:
        raise SchemaError(f'field "{name}" is {field.describe()}, which does not travel inline; place it in a block')
    return field


def _placed_field(rows: RowStore, known: dict[str, Field], name: str) -> Field:
    field = known.get(name)
    if field is None:
        raise rows.unknown_field(name)
    if field.inline:
        raise SchemaError(f'field "{name}" is {field.describe()}, which travels inline, not in a block')
    return field


def check_layout(placed: WrittenBlock, fields: Sequence[Field]) -> None:
    """Raise unless the size of the block is exactly that of its fields, rows and counts."""
    if not fields:
        raise UsageError("a block without fields holds nothing; name its fields")
    if not 1 <= placed.rows <= ROWS_PER_REQUEST_MAX:
        raise UsageError(f"a block has {placed.rows} rows; it has 1 to {ROWS_PER_REQUEST_MAX}")
    _, nbytes = layout(fields, placed.rows, placed.counts)
    if nbytes != placed.nbytes:
        raise UsageError(
            f"block of {', '.join(placed.fields)} has {placed.nbytes} bytes; {placed.rows} rows with counts "
            f"{placed.counts} take {nbytes}"
        )


def _check_slots(placed: WrittenBlock, count: int) -> AnyArray | None:
    if placed.slots is None:
        if placed.rows != count:
            raise SchemaError(f"block of {', '.join(placed.fields)} has {placed.rows} rows; the request has {count}")
        return None
    slots = decode("slots", placed.slots, "<i4", count)
    if count and (int(slots.min()) < 0 or int(slots.max()) >= placed.rows):
        raise UsageError(f"slots reach from {slots.min()} to {slots.max()}; the block has rows 0 to {placed.rows - 1}")
    return slots
