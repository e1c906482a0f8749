"""Rows that a stage got, by AsyncFlow's conventions (arXiv 2507.01663, sections 3.5 and 5): a stream of batches, and
results keyed by index.

- A stream gives ``(batch, index)``. The rows are leased until `put_experience_data` gives their results with that
  index, in any order and any number of batches later: a trainer may hold several and end them after its optimizer step.
- A stream that is left (``with``, an exception, `close`) releases untaken rows and every batch without results.
- It ends when the table is sealed and drained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq

BatchT = TypeVar("BatchT", tq.Batch, tq.AsyncBatch)


class ExperienceIndex(Generic[BatchT]):
    """The rows of a batch: the key by which its results return. To numpy and in a loop it is int64 ``[rows]``, row ids.

    It holds the lease: a batch whose index is collected goes back to others.

    Args:
        batch: the batch.
    """

    __slots__ = ("__weakref__", "batch")

    def __init__(self, batch: BatchT) -> None:
        self.batch: BatchT = batch

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row ids, int64 ``[rows]``."""
        ids: NDArray[np.int64] = self.batch.rows
        return ids

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.rows, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.batch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows.tolist())

    def __repr__(self) -> str:
        return f"<index of {self.batch!r}>"


def lease_terms(
    experience_columns: Sequence[str] | None, experience_count: int | None, terms: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `Table.lease` for these names: columns (None: the stage's) and the number of rows."""
    named = {"fields": experience_columns, "rows": experience_count}
    return {**terms, **{name: value for name, value in named.items() if value is not None}}


class Outstanding(Generic[BatchT]):
    """Batches of a stream that have not ended; a batch whose index the caller dropped is not kept."""

    def __init__(self) -> None:
        self._given: weakref.WeakSet[ExperienceIndex[BatchT]] = weakref.WeakSet()

    def add(self, batch: BatchT) -> tuple[BatchT, ExperienceIndex[BatchT]]:
        """Return the batch and its index."""
        index = ExperienceIndex(batch)
        self._given.add(index)
        return batch, index

    def left(self) -> list[BatchT]:
        """Return the batches that have not ended."""
        return [index.batch for index in self._given if not index.batch.ended]
