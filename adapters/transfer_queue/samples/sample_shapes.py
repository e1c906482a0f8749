"""The shapes of many samples, as metadata and its frames carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Shape = tuple[int | None, ...]


class SampleShapes:
    """The shape of each sample, kept in one array until somebody asks for the list: thousands of tuples for each field
    would cost more than the samples.

    array: int64 ``[samples, dimensions]``.
    """

    __slots__ = ("array",)

    def __init__(self, array: npt.NDArray[np.int64]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(tuple, self.array.tolist())

    def of(self, places: Sequence[int]) -> SampleShapes:
        """Return those of some samples."""
        return SampleShapes(self.array[np.asarray(places, np.intp)])

    @property
    def common(self) -> tuple[int, ...] | None:
        """The shape that all samples have; None if they differ, or there are none."""
        if not len(self) or (self.array != self.array[0]).any():
            return None
        return tuple(self.array[0].tolist())
