"""What an input column is, before it meets its field: the three shapes that every kind of input is reduced to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transferqueue.storage.elements.dtypes import I64
from transferqueue.storage.inputs.sources import ValueSource

UNKNOWN = -1
"""A dimension that an empty row does not tell: the second one of ``[]`` among lists of pairs."""


@dataclass(frozen=True, slots=True)
class DenseInput:
    """One array over all rows: every row has `shape` by construction."""

    dtype: str
    rows: int
    shape: tuple[int, ...]
    source: ValueSource


@dataclass(frozen=True, slots=True)
class RaggedInput:
    """Rows given one by one (or as values and offsets): row i has the shape ``shapes[i]``, of at least one dimension.

    jagged: ragged by construction, so never to be taken as dense.
    """

    dtype: str
    shapes: I64
    source: ValueSource
    jagged: bool = False


@dataclass(frozen=True, slots=True)
class BytesInput:
    """Byte strings: text, bytes or plain values."""

    dtype: str
    lengths: I64
    source: ValueSource


Parsed = DenseInput | RaggedInput | BytesInput


def rectangles(levels: Sequence[I64]) -> I64 | None:
    """Shapes of rows that are lists nested ``len(levels)`` deep; None if a row is not a rectangle.

    ``levels[0]`` has the length of each row, ``levels[1]`` that of each element of these, and so on. What no element
    tells is `UNKNOWN`.
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
