"""An input column before it is compared with its field. Every kind of input is reduced to one of three forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.storage.elements.dtypes import I64
from transferqueue.storage.inputs.sources import ValueSource

UNKNOWN = -1
"""A dimension that an empty row does not determine, such as the second one of ``[]`` among lists of pairs."""


@dataclass(frozen=True, slots=True)
class DenseInput:
    """One array over all rows: every row has `shape`."""

    dtype: str
    rows: int
    shape: tuple[int, ...]
    source: ValueSource


@dataclass(frozen=True, slots=True)
class RaggedInput:
    """Rows given one by one, or as values and offsets. `shapes` is int64 ``[rows, dimensions]``, with at least one
    dimension. `jagged`: the input is ragged by its type, so it does not fit a dense field."""

    dtype: str
    shapes: I64
    source: ValueSource
    jagged: bool = False


@dataclass(frozen=True, slots=True)
class BytesInput:
    """Byte strings: text, bytes or plain values. `lengths` is int64 ``[rows]``, in bytes."""

    dtype: str
    lengths: I64
    source: ValueSource


Parsed = DenseInput | RaggedInput | BytesInput


def only_rank(ranks: set[int], subject: str) -> int:
    """The number of dimensions of all rows; `SchemaError` if they differ."""
    if len(ranks) > 1:
        raise SchemaError(f"{subject}: rows of {', '.join(map(str, sorted(ranks)))} dimensions; all must have the same")
    return ranks.pop()


def rectangles(levels: Sequence[I64]) -> I64 | None:
    """The shapes, int64 ``[rows, dimensions]``, of rows that are lists nested ``len(levels)`` deep. None if a row is
    not a rectangle.

    ``levels[0]`` has the length of each row, ``levels[1]`` that of each element of the rows, and so on. A dimension
    that no element determines is `UNKNOWN`.
    """
    rows = len(levels[0])
    shapes = np.full((rows, len(levels)), UNKNOWN, np.int64)
    shapes[:, 0] = levels[0]
    owners = np.arange(rows)
    for depth in range(1, len(levels)):
        owners = np.repeat(owners, levels[depth - 1])
        shapes[owners, depth] = levels[depth]
        if not np.array_equal(shapes[owners, depth], levels[depth]):
            return None
    return shapes
