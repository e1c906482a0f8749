"""Fields: the dtype and shape of a column, and the layout of its bytes in a block.

A *field* is a name, a dtype and the shape of one row's value. A dimension of None varies from row to row. Dtype and shape determine one of
these layouts:

=============  ==========================  =====================================================
layout         field                       buffers of a block of n rows, in this order
=============  ==========================  =====================================================
dense          no None in shape            values ``[n, *shape]``
ragged         only shape[0] is None       offsets int64 ``[n + 1]`` (in steps of the first
                                           dimension), values ``[offsets[n], *shape[1:]]``
varied         any other None              shapes int64 ``[n, ndim]``, offsets int64 ``[n + 1]``
                                           (in elements), values ``[offsets[n]]``
text, bytes,   dtype "str", "bytes",       offsets int64 ``[n + 1]`` (in bytes), data
value          "value" (MessagePack)
=============  ==========================  =====================================================

Each buffer begins on a 64-byte boundary. The layout of a block is a pure function of its fields, its number of rows, and one count (the
last offset) for each field that is not dense. So a few integers describe a block, and its receiver can check that they fit the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Final

import msgspec

from transferqueue.errors import SchemaError, UsageError, listing
from transferqueue.limits import ALIGNMENT, check_name

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "str": 1,
    "bytes": 1,
    "value": 1,
}
"""Bytes of one element of each dtype. All are little-endian."""

BLOB_DTYPES: Final = frozenset({"str", "bytes", "value"})
"""Dtypes whose rows are byte strings."""

TORCH_ONLY_DTYPES: Final = frozenset(name for name in ITEM_BYTES if name == "bfloat16" or name.startswith("float8"))
"""Dtypes that numpy lacks: `Column.torch()` gives them, `Column.numpy()` needs ml_dtypes."""

RAGGED_RANK_MAX: Final = 8
"""The most dimensions of one row's value."""


@lru_cache(maxsize=4096)
def _check_field(name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
    """Raise `SchemaError` if this is no valid field. Cached: each reply names its fields again."""
    check_name("field", name)
    if dtype not in ITEM_BYTES:
        raise SchemaError(f'field "{name}": dtype {dtype!r} is unknown; known are {", ".join(ITEM_BYTES)}')
    if dtype in BLOB_DTYPES and shape:
        raise SchemaError(f'field "{name}": dtype {dtype!r} has no shape, but {shape} was given')
    if len(shape) > RAGGED_RANK_MAX:
        raise SchemaError(f'field "{name}": {len(shape)} dimensions; at most {RAGGED_RANK_MAX}')
    if any(size is not None and size < 0 for size in shape):
        raise SchemaError(f'field "{name}": shape {shape} has a negative size')


class Field(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """A column's name, dtype and row shape: ``Field("image", "uint8", (None, None, 3))``.

    shape: the shape of one row's value: ``()`` for a scalar, None for a dimension in which rows differ. For "str", "bytes" and "value" the
    shape is ``()``. `SchemaError` for an invalid field. Properties are computed once and cached: a batch of many fields reads them often.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        try:
            _check_field(self.name, self.dtype, self.shape)
        except TypeError as error:
            raise SchemaError(
                f"field {self.name!r}: dtype {self.dtype!r} or shape {self.shape!r} is not one: {error}"
            ) from error

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def blob(self) -> bool:
        """Whether a row is a byte string (text, bytes, plain value)."""
        return self.dtype in BLOB_DTYPES

    @cached_property
    def dense(self) -> bool:
        """Whether every row has the same number of bytes."""
        return not self.blob and None not in self.shape

    @cached_property
    def ragged(self) -> bool:
        """Whether only the first dimension varies."""
        return not self.blob and len(self.shape) > 0 and self.shape[0] is None and None not in self.shape[1:]

    @cached_property
    def varied(self) -> bool:
        """Whether a dimension other than (only) the first varies."""
        return not (self.blob or self.dense or self.ragged)

    @cached_property
    def inline(self) -> bool:
        """Whether values are stored in the ledger, not in a block: fixed-width scalars of at most 8 bytes."""
        return self.dense and self.shape == () and self.item_bytes <= 8 and self.dtype not in TORCH_ONLY_DTYPES

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        """Sizes of the dimensions that do not vary: the shape of a dense row, and of one step of a ragged one."""
        return tuple(size for size in self.shape if size is not None)

    @cached_property
    def step_elements(self) -> int:
        """Elements of one offset step: of a dense row, of one step of a ragged row, else 1."""
        return math.prod(self.fixed) if self.dense or self.ragged else 1

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one offset step; of a row, if the field is dense."""
        return self.step_elements * self.item_bytes

    def describe(self) -> str:
        """For messages: ``float32[None, 3]``, ``str``, ``int64``."""
        return f"{self.dtype}{list(self.shape)}" if self.shape else self.dtype


@lru_cache(maxsize=4096)
def known(field: Field) -> Field:
    """The first field that equals this one: its cached properties are computed already."""
    return field


def not_taken(table: str, field: str, takes: Iterable[str]) -> str:
    """The text of the error for a field that a table does not accept."""
    return (
        f'field "{field}" is not in table "{table}", which takes only the fields that it was made with or that a task names: '
        f"{listing(takes)}; declare it with add_fields, or make the table with extra_fields=True"
    )


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Where the buffers of one column begin, in bytes from the start of its block; -1: there is no such buffer."""

    values: int
    values_bytes: int
    offsets: int = -1
    shapes: int = -1


def align(size: int, to: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def layout(fields: Sequence[Field], rows: int, counts: Sequence[int]) -> tuple[list[Span], int]:
    """The spans of the columns of a block, and the block's size in bytes.

    counts: for each field the last offset (see the table above), 0 for a dense field. `UsageError` if the numbers do not describe a block.
    """
    if rows < 1 or len(counts) != len(fields):
        raise UsageError(f"a block of {rows} rows with {len(counts)} counts for {len(fields)} fields is not a block")
    spans: list[Span] = []
    at = 0
    for field, count in zip(fields, counts, strict=True):
        dense = field.dense
        if count < 0 or (dense and count):
            raise UsageError(f'field "{field.name}": count {count} is not one of a {field.describe()} column')
        shapes = offsets = -1
        if not dense:
            if field.varied:
                shapes, at = at, align(at + 8 * rows * len(field.shape))
            offsets, at = at, -(-(at + 8 * (rows + 1)) // ALIGNMENT) * ALIGNMENT
        size = (rows if dense else count) * field.row_bytes
        spans.append(Span(at, size, offsets, shapes))
        at = -(-(at + size) // ALIGNMENT) * ALIGNMENT
    return spans, at
