"""Rows that a stage got, by AsyncFlow's conventions (arXiv 2507.01663, sections 3.5 and 5): a stream of batches, and results keyed by index.

Rules:

- A stream gives ``(batch, index)``. The rows are leased until `put_experience_data` gives their results with that index, in any order and
  any number of batches later: a trainer may hold several and end them after its optimizer step.
- A stream that is left (``with``, an exception, `close`) gives back what was not taken and every batch whose results were not given.
- It ends when the table is sealed and drained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq

BatchT = TypeVar("BatchT", tq.Batch, tq.AsyncBatch)


class ExperienceIndex(Generic[BatchT]):
    """Which rows a batch has: the key by which its results return. An array of row ids, int64 ``[rows]``, to numpy and in a loop.

    It holds the lease: a batch whose index is forgotten goes back to others.
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
    """Return the arguments of `Table.lease` for these names: columns (None: what the stage needs) and the number of rows."""
    named = {"fields": experience_columns, "rows": experience_count}
    return {**terms, **{name: value for name, value in named.items() if value is not None}}


class _Outstanding(Generic[BatchT]):
    """Batches that a stream gave and that have not ended, without holding those whose index nobody has."""

    def __init__(self) -> None:
        self._given: weakref.WeakSet[ExperienceIndex[BatchT]] = weakref.WeakSet()

    def add(self, batch: BatchT) -> tuple[BatchT, ExperienceIndex[BatchT]]:
        index = ExperienceIndex(batch)
        self._given.add(index)
        return batch, index

    def left(self) -> list[BatchT]:
        return [index.batch for index in self._given if not index.batch.ended]


class ExperienceStream:
    """What `AsyncFlowService.create_stream_data_loader` gives: an iterator of ``(batch, index)`` and a context manager."""

    def __init__(self, loader: tq.Loader) -> None:
        self._loader = loader
        self._outstanding = _Outstanding[tq.Batch]()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[tq.Batch, ExperienceIndex[tq.Batch]]:
        """The next rows; waits up to ``timeout_s``."""
        return self._outstanding.add(next(self._loader))

    def close(self) -> None:
        """Give back what was not taken and every batch without results. Again: nothing."""
        self._loader.close()
        for batch in self._outstanding.left():
            batch.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncExperienceStream:
    """`ExperienceStream` for an event loop."""

    def __init__(self, loader: tq.AsyncLoader) -> None:
        self._loader = loader
        self._outstanding = _Outstanding[tq.AsyncBatch]()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[tq.AsyncBatch, ExperienceIndex[tq.AsyncBatch]]:
        """The next rows; waits up to ``timeout_s``."""
        return self._outstanding.add(await anext(self._loader))

    async def aclose(self) -> None:
        """As `ExperienceStream.close`."""
        await self._loader.aclose()
        for batch in self._outstanding.left():
            await batch.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
