"""The shapes of many samples, as metadata and its frames carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

Shape = tuple[int | None, ...]


class SampleShapes(Sequence[tuple[int, ...]]):
    """The shape of each sample, as a list has it, kept in one array: thousands of tuples for each field would cost more
    than the samples.

    array: int64 ``[samples, dimensions]``.
    """

    __slots__ = ("array",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, array: npt.NDArray[np.int64]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> SampleShapes: ...
    def __getitem__(self, at: int | slice) -> tuple[int, ...] | SampleShapes:
        return SampleShapes(self.array[at]) if isinstance(at, slice) else tuple(self.array[at].tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(tuple, self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SampleShapes):
            return np.array_equal(self.array, other.array)
        return list(self) == other

    def __repr__(self) -> str:
        return repr(list(self))

    def of(self, places: Sequence[int]) -> SampleShapes:
        """Return those of some samples."""
        return SampleShapes(self.array[np.asarray(places, np.intp)])

    @property
    def common(self) -> tuple[int, ...] | None:
        """The shape that all samples have; None if they differ, or there are none."""
        return self[0] if len(self) and bool((self.array == self.array[0]).all()) else None
