"""The lazy column of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import BatchEnded, InternalError, UsageError
from transferqueue.schema import TORCH_ONLY_DTYPES, Field, align
from transferqueue.storage.columns.export import arrow_array, row_value, shown_row, to_python
from transferqueue.storage.columns.gather import LoadedColumn, dense_run, load, offsets_of
from transferqueue.storage.columns.placement import RowPlacement
from transferqueue.storage.elements.dtypes import I64, ml_dtype, stored, viewed
from transferqueue.storage.elements.numbers import store_numbers
from transferqueue.storage.elements.process_bound import Staying
from transferqueue.storage.elements.torch_interop import as_torch, require_torch

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


SHOWN_ROWS: Final = 4
"""Rows of a column that its repr shows."""


class Column(Staying):
    """One field's values for the rows of a batch, loaded at first use.

    If the rows lie together in one block, what is given is a view of shared memory and no byte is copied; otherwise
    they are gathered once, and all later calls show the same copy. Either way it is this process's own: it may be changed in place and
    nobody else sees that. Arrays, tensors and Arrow arrays keep the memory alive for as long as they live, also after the batch.

    =============  ==========================================================================================
    field          what fits
    =============  ==========================================================================================
    dense          `numpy()` and `torch()` ``[rows, *shape]``
    ragged         `ragged()`, `nested()`, `padded()`; rows ``[length, *shape[1:]]`` by index or iteration
    varied         `padded()`; rows ``[*shape]`` by index or iteration
    str, bytes,    `list()`; rows by index or iteration
    value
    any            `list()`, `arrow()`, `load()`, ``column[i]``, ``column[2:5]``, ``len(column)``, ``for row in column``
    =============  ==========================================================================================

    Methods that do not fit raise `UsageError` and name those that do; after the batch ended and let its memory go, what was not
    taken before raises `BatchEnded`. Safe from several threads.
    """

    elsewhere: ClassVar[str] = "pass its values: .numpy(), .list() or .arrow()"

    __slots__ = ("__weakref__", "_cell", "_placement", "_rows", "field")

    def __init__(self, field: Field, placement: RowPlacement) -> None:
        self.field = field
        self._placement: RowPlacement | None = placement
        self._rows = placement.rows
        self._cell: dict[str, LoadedColumn] = {}

    @classmethod
    def of_inline(cls, field: Field, data: bytes | NDArray[Any]) -> Column:
        """A column of an inline field, from its little-endian bytes or an array of its values (taken over, not copied)."""
        values = np.frombuffer(data, stored(field.dtype)).copy() if isinstance(data, bytes) else data
        column = cls.__new__(cls)
        column.field, column._placement, column._rows = field, None, len(values)
        column._cell = {"rows": LoadedColumn(len(values), values, None, None)}
        return column

    @property
    def placement(self) -> RowPlacement:
        """Where its rows are, of one that nothing was taken of yet."""
        if self._placement is None:
            raise InternalError(f'column "{self.field.name}" lies in no blocks (any more)')
        return self._placement

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        """Name, dtype, shape and the first values. Only these few rows are looked at, in memory that this process has."""
        shape = ", ".join("None" if size is None else str(size) for size in self.shape)
        return f"Column({self.field.name!r}, {self.dtype}, shape=({shape}{',' * (len(self.shape) == 1)}), {self._first_values()})"

    @property
    def dtype(self) -> str:
        """Name of the field's dtype, such as ``"float32"``, ``"bfloat16"`` or ``"str"``."""
        return self.field.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``(rows, *shape of one row)``; None where rows differ."""
        return (self._rows, *self.field.shape)

    def _first_values(self) -> str:
        if self.dtype in TORCH_ONLY_DTYPES and ml_dtype(self.dtype) is None:
            return "..."  # only torch could say them, and to import it takes seconds
        count = min(self._rows, SHOWN_ROWS)
        try:
            cell = self._cell.get("rows")
            if cell is None and self._placement is not None:
                self._placement.blocks.living()
                cell = load(self.field, self._placement.select(slice(count)))
        except BatchEnded:
            return "ended"
        if cell is None:
            return "..."
        shown = [shown_row(self.field, cell, at) for at in range(count)]
        return f"[{', '.join(shown + ['...'] * (self._rows > count))}]"

    def __iter__(self) -> Iterator[Any]:
        """Rows, each as ``column[i]`` gives it."""
        loaded = self._load()
        return (row_value(self.field, loaded, at) for at in range(self._rows))

    @overload
    def __getitem__(self, rows: int) -> Any: ...
    @overload
    def __getitem__(self, rows: slice | Sequence[int] | NDArray[Any]) -> Column: ...
    def __getitem__(self, rows: Any) -> Any:
        """The value of one row, or the column of some rows (by slice, indices or mask).

        One row is a Python number, str, bytes or plain value, a numpy array that views the row (a torch tensor for bf16 and fp8 where
        ml_dtypes is not installed).
        """
        if isinstance(rows, int | np.integer):
            at = int(rows) + (self._rows if rows < 0 else 0)
            if not 0 <= at < self._rows:
                raise IndexError(f'row {rows} of column "{self.field.name}", which has {self._rows}')
            return row_value(self.field, self._load(), at)
        chosen = rows if isinstance(rows, slice) else np.asarray(rows) if len(rows) else slice(0)
        if self._placement is None:
            return Column.of_inline(self.field, self._load().values[chosen])
        return Column(self.field, self._placement.select(chosen))

    @property
    def lengths(self) -> I64:
        """Size of the first dimension (bytes of text, bytes and values) of each row: int64 ``[rows]``."""
        loaded = self._load()
        if loaded.shapes is not None:
            return loaded.shapes[:, 0].copy()
        if loaded.offsets is not None:
            return np.diff(loaded.offsets)
        return np.full(self._rows, self.field.shape[0] if self.field.shape else 1, np.int64)

    def load(self) -> None:
        """Bring the rows together now, rather than at first use: for a thread that has time before they are needed."""
        self._load()

    def numpy(self) -> NDArray[Any]:
        """Dense rows ``[rows, *shape]`` of the field's dtype, writable. bf16 and fp8 need ml_dtypes."""
        if not self.field.dense:
            raise self._unfit("numpy")
        dense, shown = self._dense(), viewed(self.field.dtype)
        return dense if dense.dtype == shown else dense.view(shown)

    def torch(self) -> Tensor:
        """Dense rows ``[rows, *shape]`` of the field's dtype, on the CPU, over the same memory as `numpy()`."""
        if not self.field.dense:
            raise self._unfit("torch")
        return as_torch(self._dense(), self.field.dtype)  # type: ignore[no-any-return]

    def ragged(self) -> tuple[NDArray[Any], I64]:
        """Values ``[steps, *shape[1:]]`` of all rows one after the other, and offsets int64 ``[rows + 1]``; row i has ``values[offsets[i]:offsets[i + 1]]``."""
        if not self.field.ragged:
            raise self._unfit("ragged")
        loaded = self._load()
        return self._steps(loaded).view(viewed(self.field.dtype)), offsets_of(loaded)

    def nested(self) -> Tensor:
        """A jagged nested tensor ``[rows, None, *shape[1:]]`` over the same memory, on the CPU."""
        if not self.field.ragged:
            raise self._unfit("nested")
        torch = require_torch("torch")
        loaded = self._load()
        steps = as_torch(self._steps(loaded), self.field.dtype)
        jagged = torch.nested.nested_tensor_from_jagged(steps, torch.from_numpy(offsets_of(loaded)))
        return cast("Tensor", jagged)

    def padded(self, value: float = 0, multiple_of: int = 1, side: Literal["left", "right"] = "right") -> NDArray[Any]:
        """Rows in one new array ``[rows, *longest]``, with `value` where a row has nothing.

        multiple_of: the size of each varying dimension is rounded up to a multiple of it. side: where the padding of the first
        dimension goes. ``torch.from_numpy`` takes the result without a copy.
        """
        if self.field.blob:
            raise self._unfit("padded")
        if multiple_of < 1 or side not in ("left", "right"):
            raise UsageError(
                f"padded(multiple_of={multiple_of}, side={side!r}): give a positive multiple, and left or right"
            )
        if self.field.dense:
            return self.numpy()
        shapes = self._shapes()
        longest = [
            size if size is not None else align(int(shapes[:, at].max(initial=0)), multiple_of)
            for at, size in enumerate(self.field.shape)
        ]
        out = np.full((self._rows, *longest), self._filling(value)[0], stored(self.field.dtype))
        self._fill(out, shapes, side)
        return out.view(viewed(self.field.dtype))

    def arrow(self) -> pa.Array:
        """The rows as an Arrow array, over the same memory where Arrow has the layout.

        Scalars: their type (bool is packed, a copy). Dense: fixed-size lists. Ragged: large_list. Varied: a struct of `shape` and
        `values`. str: large_string; bytes and MessagePack values: large_binary. bf16 and fp8, which Arrow does not have, as
        their bits in uint16 and uint8; complex numbers as fixed-size lists of two floats.
        """
        return arrow_array(self.field, self._load())

    def list(self) -> list[Any]:
        """Plain Python values, one for each row: numbers, str, bytes, nested lists of numbers, decoded values.

        Costs a Python object for each element: for arrays of the rows, iterate over the column instead.
        """
        return to_python(self.field, self._load())

    def _load(self) -> LoadedColumn:
        placement, loaded = self._placement, self._cell.get("rows")
        if placement is None:
            if loaded is None:
                raise InternalError(f"{self!r} has neither rows nor a place")
            return loaded
        placement.blocks.living()
        if loaded is None:  # of two threads that come here at once, both show what the first one kept
            loaded = self._cell.setdefault("rows", load(self.field, placement))
            placement.blocks.columns.add(self)
        return loaded

    def forget(self) -> None:
        """Drop what was loaded, so that its memory can go when no view of it is left. Called when the batch ends."""
        if self._placement is not None:
            self._cell.clear()

    def _dense(self) -> NDArray[Any]:
        placement = self._placement
        if (
            placement is not None and placement.run is not None
        ):  # nothing is loaded, so nothing need be kept or forgotten
            return dense_run(self.field, placement, *placement.run)
        return self._load().values.reshape(self._rows, *self.field.fixed)

    def _steps(self, loaded: LoadedColumn) -> NDArray[Any]:
        return loaded.values.reshape(int(offsets_of(loaded)[-1]), *self.field.fixed)

    def _shapes(self) -> I64:
        """The shape of each row, int64 ``[rows, dimensions]``."""
        shapes = self._load().shapes
        if shapes is not None:
            return shapes
        return np.column_stack([self.lengths, *(np.full(self._rows, size, np.int64) for size in self.field.fixed)])

    def _filling(self, value: float) -> NDArray[Any]:
        if self.field.dtype == "bool" and value in (0, 1):
            value = bool(value)
        _, stored_value = store_numbers(
            [value], {type(value)}, self.field.dtype, f'padding of field "{self.field.name}"'
        )
        return stored_value

    def _fill(self, out: NDArray[Any], shapes: I64, side: str) -> None:
        values, at = self._load().values, 0
        if len(self.field.shape) == 1 and side == "right":  # the common case, five times as fast
            edges = offsets_of(self._load()).tolist()
            for into, start, end in zip(out, edges, edges[1:], strict=False):
                into[: end - start] = values[start:end]
            return
        for into, shape in zip(out, shapes.tolist(), strict=True):
            size = math.prod(shape)
            first = slice(into.shape[0] - shape[0], None) if side == "left" else slice(shape[0])
            into[(first, *(slice(extent) for extent in shape[1:]))] = values[at : at + size].reshape(shape)
            at += size

    def _unfit(self, method: str) -> UsageError:
        field, remedy = self.field, ".numpy(), .torch()"
        if field.blob:
            remedy = ".list() or .arrow()"
        elif field.ragged:
            remedy = ".nested(), .padded(value), .ragged() or .list()"
        elif field.varied:
            remedy = ".padded(value), .list(), or iterate over its rows"
        return UsageError(f'.{method}() does not fit field "{field.name}", which is {field.describe()}; use {remedy}')
