"""`Column`: the values of one field for the rows of a batch, loaded at first use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import BatchEnded, InternalError, UsageError
from transferqueue.errors.text import shown
from transferqueue.schema import TORCH_ONLY_DTYPES, Field, Slice, align, sliced_field
from transferqueue.storage.columns.export import arrow_array, arrow_type, row_value, shown_row, to_python
from transferqueue.storage.columns.gather import (
    LoadedColumn,
    dense_run,
    load,
    offsets_of,
    row_edges,
    row_shapes,
    shapes_of,
)
from transferqueue.storage.columns.placement import RowPlacement
from transferqueue.storage.columns.slicing import dense_slices, inner_slices, load_slice
from transferqueue.storage.elements.dtypes import I64, STORED_DTYPES, ml_dtype, shown_dtype
from transferqueue.storage.elements.numbers import store_numbers
from transferqueue.storage.elements.process_bound import ProcessBound
from transferqueue.storage.elements.torch_interop import as_jagged, as_torch

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


SHOWN_ROWS: Final = 4
"""Rows that the repr of a column shows."""


class Column(ProcessBound):
    """The values of one field for the rows of a batch, loaded at first use.

    If the rows lie together in one block, the values are a view of shared memory and no byte is copied. Otherwise the
    first call gathers them, and later calls give the same copy. In both cases changes in place are private to this
    process. Arrays, tensors and Arrow arrays keep the memory alive as long as they live, also after the batch.

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

    A method that does not fit the field raises `UsageError`, which names those that do. After the batch has ended and
    released its memory, values that were not taken before raise `BatchEnded`. Safe from several threads.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t")
        ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
        ...     read = table.read(rows)
        ...     ids = read["ids"]
        ...     print(ids.dtype, ids.shape, ids.device, ids.lengths, ids.shapes.tolist(), ids.placement.rows)
        ...     print(ids.list(), ids[0], ids[1:].list())
        int64 (2, None) cpu [3 1] [[3], [1]] 2
        [[1, 2, 3], [4]] [1 2 3] [[4]]
    """

    _remedy: ClassVar[str] = "pass its values: .numpy(), .list() or .arrow()"

    __slots__ = ("__weakref__", "_cell", "_placement", "_rows", "_slice", "_whole", "field")

    def __init__(self, field: Field, placement: RowPlacement, slice_: Slice | None = None) -> None:
        self.field = field if slice_ is None else sliced_field(field, slice_)
        self._whole, self._slice = field, slice_
        self._placement: RowPlacement | None = placement
        self._rows = placement.rows
        self._cell: dict[str, LoadedColumn] = {}

    @property
    def dtype(self) -> str:
        """The name of the field's dtype, such as ``"float32"``, ``"bfloat16"`` or ``"str"``."""
        return self.field.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``(rows, *shape of one row)``; None for dimensions that differ between rows."""
        return (self._rows, *self.field.shape)

    @property
    def lengths(self) -> I64:
        """The size of each row's first dimension, for text, bytes and values its bytes: int64 ``[rows]``. Reads no
        values."""
        if self.field.dense:
            return np.full(self._rows, self.field.shape[0] if self.field.shape else 1, np.int64)
        if self.field.varied:
            return self.shapes[:, 0].copy()
        placement, loaded = self._placement, self._cell.get("rows")
        if loaded is None and placement is not None and self._slice is None and self._rows:
            edges = row_edges(self._whole, placement)
            return edges.last - edges.first
        return np.diff(offsets_of(self._load()))

    @property
    def shapes(self) -> I64:
        """The shape of each row: int64 ``[rows, dimensions]``. Reads no values. `UsageError` for text, bytes and
        values, which have none."""
        if self.field.blob:
            raise UsageError(
                f'field "{self.field.name}" is {self.field.describe()}, whose rows have no shape; use lengths'
            )
        if self.field.dense:
            return np.tile(np.array(self.field.fixed, np.int64), (self._rows, 1))
        if self.field.ragged:
            shapes = np.empty((self._rows, 1 + len(self.field.fixed)), np.int64)
            shapes[:, 0], shapes[:, 1:] = self.lengths, self.field.fixed
            return shapes
        placement, loaded = self._placement, self._cell.get("rows")
        if loaded is None and placement is not None and self._slice is None and self._rows:
            return row_shapes(self._whole, placement)
        return shapes_of(self._load())

    @property
    def device(self) -> str:
        """Where `torch` and `nested` give their tensors: ``"cpu"``, or the device of the lease."""
        return "cpu"

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        """Name, dtype, shape and the first values. Reads only those rows, in memory that this process has."""
        shape = ", ".join("None" if size is None else str(size) for size in self.shape)
        return (
            f"Column({self.field.name!r}, {self.dtype}, shape=({shape}{',' * (len(self.shape) == 1)}), "
            f"{self._first_values()})"
        )

    def _first_values(self) -> str:
        shown = self.shown(SHOWN_ROWS)
        if isinstance(shown, str):
            return shown
        return f"[{', '.join(shown + ['...'] * (self._rows > SHOWN_ROWS))}]"

    def __iter__(self) -> Iterator[Any]:
        """The rows, each as ``column[i]`` gives it."""
        loaded = self._load()
        return (row_value(self.field, loaded, at) for at in range(self._rows))

    @overload
    def __getitem__(self, rows: int) -> Any: ...
    @overload
    def __getitem__(self, rows: slice | Sequence[int] | NDArray[Any]) -> Column: ...
    def __getitem__(self, rows: Any) -> Any:
        """The value of one row, or the column of some rows (by slice, indices or mask).

        The value of one row is a Python number, str, bytes or plain value, or a numpy array that views the row (for
        bf16 and fp8 a torch tensor, if ml_dtypes is not installed). `IndexError` for a row that the column does not
        have.
        """
        if isinstance(rows, int | np.integer):
            at = int(rows) + (self._rows if rows < 0 else 0)
            if not 0 <= at < self._rows:
                raise IndexError(f'row {rows} of column "{self.field.name}", which has {self._rows}')
            return row_value(self.field, self._load(), at)
        chosen = rows if isinstance(rows, slice) else np.asarray(rows) if len(rows) else slice(0)
        if self._placement is None:
            return Column.of_inline(self.field, self._load().values[chosen])
        return Column(self._whole, self._placement.select(chosen), self._slice)

    def numpy(self) -> NDArray[Any]:
        """Return dense rows as a writable array ``[rows, *shape]`` of the field's dtype. bf16 and fp8 need ml_dtypes.

        Raises:
            BatchEnded: the batch has ended.
            UsageError: the field is not dense.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     read["x"].numpy()
            array([1.5, 2.5])
        """
        if not self.field.dense:
            raise self._unfit("numpy")
        dense, shown = self._dense(), shown_dtype(self.field.dtype)
        return dense if dense.dtype == shown else dense.view(shown)

    def torch(self) -> Tensor:
        """Return dense rows as a tensor ``[rows, *shape]`` of the field's dtype.

        It is on the CPU, over the same memory as `numpy()`, or where a lease with ``device=`` put it.

        Raises:
            BatchEnded: the batch has ended.
            UsageError: the field is not dense.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     read["x"].torch()
            tensor([1.5000, 2.5000], dtype=torch.float64)
        """
        if not self.field.dense:
            raise self._unfit("torch")
        return as_torch(self._dense(), self.field.dtype)  # type: ignore[no-any-return]

    def padded(self, value: float = 0, multiple_of: int = 1, side: Literal["left", "right"] = "right") -> NDArray[Any]:
        """Return the rows in one new array ``[rows, *longest]`` of the field's dtype, padded to the longest row.

        ``torch.from_numpy`` takes the result without a copy. Of a dense field it is `numpy()`.

        Args:
            value: stands beyond the end of shorter rows; default 0.
            multiple_of: the size of each varying dimension is rounded up to a multiple of it; default 1.
            side: the side of the first dimension that is padded, ``"left"`` or ``"right"``; default ``"right"``.

        Raises:
            BatchEnded: the batch has ended.
            UsageError: the field is text, bytes or plain values, or an argument is out of range.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["ids"])])
            ...     rows = table.put(ids=[[1, 2, 3], [4]])
            ...     table.read(rows)["ids"].padded(multiple_of=4).tolist()
            [[1, 2, 3, 0], [4, 0, 0, 0]]
        """
        if self.field.blob:
            raise self._unfit("padded")
        if multiple_of < 1 or side not in ("left", "right"):
            raise UsageError(
                f"padded(multiple_of={multiple_of}, side={shown(side)}): give a positive multiple, and left or right"
            )
        if self.field.dense:
            return self.numpy()
        shapes = self.shapes
        longest = [
            size if size is not None else align(int(shapes[:, at].max(initial=0)), multiple_of)
            for at, size in enumerate(self.field.shape)
        ]
        out = np.full((self._rows, *longest), self._filling(value)[0], STORED_DTYPES[self.field.dtype])
        self._fill(out, shapes, side)
        return out.view(shown_dtype(self.field.dtype))

    def ragged(self) -> tuple[NDArray[Any], I64]:
        """Return ragged rows as the values of all rows in order, and where each row begins.

        Returns:
            The values ``[steps, *shape[1:]]``, and offsets int64 ``[rows + 1]``. Row i is ``values[offsets[i]:offsets[i
            + 1]]``.

        Raises:
            BatchEnded: the batch has ended.
            UsageError: the field is not ragged.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     values, offsets = read["ids"].ragged()
            >>> values, offsets
            (array([1, 2, 3, 4]), array([0, 3, 4]))
        """
        if not self.field.ragged:
            raise self._unfit("ragged")
        placement, slice_ = self._placement, self._slice
        if slice_ is not None and slice_.first is None and placement is not None and placement.run is not None:
            placement.blocks.columns.add(self)
            loaded = load(self._whole, placement)  # a view of the block
            steps = loaded.values.reshape(int(offsets_of(loaded)[-1]), *self._whole.fixed)
            steps = steps[(slice(None), *inner_slices(self._whole, slice_))]
        else:
            loaded = self._load()
            steps = self._steps(loaded)
        return steps.view(shown_dtype(self.field.dtype)), offsets_of(loaded)

    def nested(self) -> Tensor:
        """Return ragged rows as a jagged nested tensor ``[rows, None, *shape[1:]]``.

        It is on the CPU, over the same memory as `ragged()`, or where a lease with ``device=`` put it.

        Raises:
            BatchEnded: the batch has ended.
            UsageError: the field is not ragged.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     nested = read["ids"].nested()
            >>> [row.tolist() for row in nested]
            [[1, 2, 3], [4]]
        """
        if not self.field.ragged:
            raise self._unfit("nested")
        loaded = self._load()
        return cast("Tensor", as_jagged(as_torch(self._steps(loaded), self.field.dtype), offsets_of(loaded)))

    def arrow(self) -> pa.Array:
        """Return the rows as an Arrow array, over the same memory where Arrow has the layout.

        Scalars become their Arrow type (bool is packed, which copies), dense rows fixed-size lists, ragged rows
        large_list, varied rows a struct of `shape` and `values`, str large_string, bytes and MessagePack values
        large_binary. Arrow lacks bf16 and fp8: these become their bits in uint16 and uint8. Complex numbers become
        fixed-size lists of two floats.

        Raises:
            BatchEnded: the batch has ended.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     array = read["text"].arrow()
            >>> array.to_pylist()
            ['a', 'b']
        """
        return arrow_array(self.field, self._load())

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        """`arrow()` by Arrow's C data interface: ``polars.Series("x", column)``, ``pyarrow.array(column)``. Its memory
        lives as long as the other library holds it."""
        return self.arrow().__arrow_c_array__(requested_schema)  # type: ignore[no-any-return]

    def __arrow_c_schema__(self) -> Any:
        """The type of `arrow()` by Arrow's C data interface. Reads no values."""
        return arrow_type(self.field).__arrow_c_schema__()

    def load(self) -> None:
        """Gather the rows now instead of at first use, for example in another thread before they are needed.

        Raises:
            BatchEnded: the batch has ended.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     read["text"].load()  # now, rather than at the first use
            ...     read["text"].list()
            ['a', 'b']
        """
        self._load()

    def shown(self, rows: int) -> list[str] | str:
        """Return the first rows, each shortened, for a person to read.

        Reads only those rows, in memory that this process has.

        Args:
            rows: the most rows.

        Returns:
            A text for each row; or one text for all of them if they cannot be read: ``"ended"``, or ``"..."`` for
            values that only torch can convert.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     read["ids"].shown(1)
            ['[1, 2, 3]']
        """
        if self.dtype in TORCH_ONLY_DTYPES and ml_dtype(self.dtype) is None:
            return "..."  # only torch can convert them, and its import takes seconds
        count = min(self._rows, rows)
        try:
            cell = self._cell.get("rows")
            if cell is None and self._placement is not None:
                self._placement.blocks.live_memory()
                cell = self._gather(self._placement.select(slice(count)))
        except BatchEnded:
            return "ended"
        return "..." if cell is None else [shown_row(self.field, cell, at) for at in range(count)]

    def list(self) -> list[Any]:
        """Return one plain Python value for each row: a number, str, bytes, nested list of numbers, or decoded value.

        Makes a Python object for each element. To get an array for each row, iterate over the column instead.

        Raises:
            BatchEnded: the batch has ended.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     read["ids"].list()
            [[1, 2, 3], [4]]
        """
        return to_python(self.field, self._load())

    @classmethod
    def of_inline(cls, field: Field, data: bytes | NDArray[Any]) -> Column:
        """Make a column of numbers, one a row, of values that this process has.

        Args:
            field: a `Field` of a number's dtype, without a shape.
            data: little-endian bytes of the values, which are copied, or a numpy array ``[rows]``, which is not.

        Raises:
            UsageError: other data, or a field of more than one number a row.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> column = tq.Column.of_inline(tq.Field("reward", "float32"), np.array([1.0, 0.5], np.float32))
            >>> column.list()
            [1.0, 0.5]
        """
        if not isinstance(field, Field) or field.shape or field.dtype in ("str", "bytes", "value"):
            raise UsageError(
                f"field={shown(field)} is no field of one number a row; give a Field of a number's dtype, without a "
                "shape"
            )
        if not isinstance(data, bytes | np.ndarray):
            raise UsageError(f'values of field "{field.name}" are {type(data).__name__}; give a numpy array, or bytes')
        values = np.frombuffer(data, STORED_DTYPES[field.dtype]).copy() if isinstance(data, bytes) else data
        column = cls.__new__(cls)
        column.field, column._placement, column._rows = field, None, len(values)
        column._whole, column._slice = field, None
        column._cell = {"rows": LoadedColumn(len(values), values, None, None)}
        return column

    @property
    def placement(self) -> RowPlacement:
        """Where the rows lie. `InternalError` for a column of an inline field."""
        if self._placement is None:
            raise InternalError(f'column "{self.field.name}" lies in no blocks (any more)')
        return self._placement

    def forget(self) -> None:
        """Drop the loaded rows, so that their memory is freed when no view of it is left. Called when the batch
        ends.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t")
            ...     rows = table.put(x=[1.5, 2.5], ids=[[1, 2, 3], [4]], text=["a", "b"])
            ...     read = table.read(rows)
            ...     column = read["text"]
            ...     column.load()
            ...     column.forget()
            ...     column.list()  # gathered again
            ['a', 'b']
        """
        if self._placement is not None:
            self._cell.clear()

    def _load(self) -> LoadedColumn:
        placement, loaded = self._placement, self._cell.get("rows")
        if placement is None:
            if loaded is None:
                raise InternalError(f"{self!r} has neither rows nor a place")
            return loaded
        placement.blocks.live_memory()
        if loaded is None:  # of two concurrent threads, both use what the first one stored
            loaded = self._cell.setdefault("rows", self._gather(placement))
            placement.blocks.columns.add(self)
        return loaded

    def _gather(self, placement: RowPlacement) -> LoadedColumn:
        return load(self._whole, placement) if self._slice is None else load_slice(self._whole, self._slice, placement)

    def _dense(self) -> NDArray[Any]:
        placement = self._placement
        if placement is not None and placement.run is not None:  # a view of the block: nothing is loaded
            whole = dense_run(self._whole, placement, *placement.run)
            if self._slice is None:
                return whole
            if (slices := dense_slices(self._whole, self._slice)) is not None:
                return whole[(slice(None), *slices)]
        return self._load().values.reshape(self._rows, *self.field.fixed)

    def _steps(self, loaded: LoadedColumn) -> NDArray[Any]:
        return loaded.values.reshape(int(offsets_of(loaded)[-1]), *self.field.fixed)

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
