"""Prepares the columns that a caller puts: parses them and checks them against their fields, before a byte is written.

The queue never pads, renames or re-types. An input has one dtype and one raggedness. If they are not those of its
field, the put is refused:

- one array over all rows (numpy, torch, Arrow of fixed size) is dense, and fits only a dense field;
- a nested tensor is ragged, and fits only a ragged field;
- rows given one by one (lists of arrays, tensors or lists, Arrow lists, `RowsOf`) fit a dense field if all have its
  shape;
- Python numbers have no dtype and take that of the field (see `numbers`);
- a single value for all rows (a number, text, bytes, dict, or an array of no dimensions) is stored once.

An undeclared field is inferred. Rows given one by one have a varying first dimension; another dimension varies if it
differs in this put. Lists that are not rectangles of numbers are plain values.

A column has a value in each row. None among numbers, texts, arrays or lists is refused, and so are Arrow's nulls and
numpy's masks: fill them, and give a mask as a second column. None is a value only inside plain values, and as a row
among dicts. NaN is a number.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import SchemaError
from transferqueue.errors.text import SHOWN_CHARS, counted, shortened, shown
from transferqueue.limits import BY_CONTENT_BYTES_MIN, ROWS_PER_REQUEST_MAX, SIZE_BYTES_MAX
from transferqueue.schema import TORCH_ONLY_DTYPES, Field, Span
from transferqueue.storage.elements.dtypes import I32, I64, NUMPY_DTYPES, STORED_DTYPES, U8
from transferqueue.storage.elements.numbers import kind_of, widen_to_float32
from transferqueue.storage.inputs.arrow import is_arrow, parse_arrow
from transferqueue.storage.inputs.lists import parse_array, parse_list, parse_stored
from transferqueue.storage.inputs.parsed import UNKNOWN, BytesInput, DenseInput, Parsed, RaggedInput
from transferqueue.storage.inputs.sources import Arrays, ValueSource
from transferqueue.storage.inputs.tensors import is_tensor, parse_tensor


class Repeat:
    """A column whose values repeat, and are stored once.

    ``Repeat(prompts, 8)`` is a column for groups of eight rows: the caller knows which rows of this call are equal.
    ``Repeat(images)`` has a value for each row, and says that they come again, in this call or in others: puts,
    updates, acks and releases of any client. The table finds them by their content, the digest of their bytes. It
    stores each value once until the last row that needs it ends, and a client sends it once. That costs a digest of
    each value, and is done for values of at least 4 KiB in the mean, up to 64 different ones a column and call; others
    are stored with their rows, as without `Repeat`. The digest (xxh3-128) is not cryptographic: give counts where a
    producer of the table may forge values.

    Args:
        values: any column input, not copied here; without counts also a single value, which is for all rows.
        counts: ``values[i]`` is for so many consecutive rows: one positive number for all values, or one for each.
            Default None: find equal values by their content.

    Raises:
        SchemaError: other values or counts.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t")
        ...     rows = table.put(prompt=tq.Repeat(["2+2", "3+5"], 2))  # 4 rows, 2 stored values
        ...     table.read(rows)["prompt"].list()
        ['2+2', '2+2', '3+5', '3+5']
    """

    __slots__ = ("counts", "values")

    def __init__(self, values: Any, counts: int | Sequence[int] | NDArray[np.integer[Any]] | None = None) -> None:
        if isinstance(values, Repeat):
            raise SchemaError("Repeat of a Repeat: multiply the counts instead, or give the values without counts")
        if values is None:
            raise SchemaError("Repeat(None) has no values: give a list or an array, or leave the field out")
        self.values = values
        self.counts: I64 | None = None
        if counts is None:
            return
        single = getattr(values, "ndim", 1) == 0 or not (hasattr(values, "__len__") or is_arrow(values))
        if single:
            raise SchemaError(f"Repeat: {type(values).__name__} is no column of values; give a list or an array")
        try:
            numbers = np.asarray(counts)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise SchemaError(
                f"Repeat: counts are not whole numbers: {shortened(str(error), SHOWN_CHARS)}; give one, or one for "
                "each value"
            ) from error
        if numbers.dtype.kind not in "iu" or numbers.ndim > 1:
            raise SchemaError(f"Repeat: counts {shown(counts)} are not whole numbers; give one, or one for each value")
        self.counts = numbers.astype(np.int64)
        if self.counts.size and self.counts.min() < 1:
            raise SchemaError(f"Repeat: count {self.counts.min()} is not positive; leave out values that no row has")

    def __repr__(self) -> str:
        return f"Repeat({type(self.values).__name__}, counts={self.counts!r})"

    def slots(self, stored_rows: int, subject: str) -> I32:
        """Return the index of the value of each row, int32 ``[rows]``; without counts each row has its own.

        Args:
            stored_rows: number of the values.
            subject: name of the column in error texts.

        Raises:
            SchemaError: the counts do not fit the values.
        """
        counts = np.array(1) if self.counts is None else self.counts
        if counts.ndim and len(counts) != stored_rows:
            raise SchemaError(
                f"{subject}: Repeat of {counted(stored_rows, 'value')} with {counted(len(counts), 'count')}; give one "
                "for each"
            )
        # Python integers: a sum of int64 wraps around
        total = sum(counts.tolist()) if counts.ndim else int(counts) * stored_rows
        _check_rows(total, subject)
        return np.repeat(np.arange(stored_rows, dtype=np.int32), counts)


class RowsOf:
    """The rows of an array or tensor ``[rows, ...]``: as ``list(values)``, at the cost of one array. Does not copy
    `values`.

    For a ragged field, if all rows of this put have the same size.
    """

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def parsed(self, subject: str) -> Parsed:
        """The rows. `SchemaError` if the values are no array of at least two dimensions."""
        dense = _parse(self.values, None, subject)
        if not isinstance(dense, DenseInput) or not dense.shape:
            raise SchemaError(f"{subject}: Each of {type(self.values).__name__} has no rows of numbers; give it is")
        shapes = np.broadcast_to(np.array(dense.shape, np.int64), (dense.rows, len(dense.shape)))
        return RaggedInput(dense.dtype, shapes, dense.source)


class PlainValues:
    """One plain value for each row: a column of dtype ``value``, also if all values are text or all are numbers.

    stored: the values are bytes of such a column, as `Column.arrow` gives them, and checked already.
    """

    __slots__ = ("stored", "values")

    def __init__(self, values: Sequence[Any], *, stored: bool = False) -> None:
        self.values, self.stored = values, stored

    def __len__(self) -> int:
        return len(self.values)

    def parsed(self, subject: str) -> Parsed:
        """The values. `SchemaError` if one is not plain."""
        rows = list(self.values)
        _check_rows(len(rows), subject)
        return parse_stored(rows) if self.stored else parse_list(rows, _VALUE, subject)


_VALUE: Final = Field("plain", "value")
_PIECE_BYTES: Final = 1 << 18
"""Values are checked for NaN and infinity in pieces that stay in the cache."""
_EXPONENTS: Final = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
"""These bits are all set only in a NaN or an infinity."""


class Prepared:
    """A column that fits its field, ready to be written. Keeps the caller's buffers, which must not change until they
    are written.

    Args:
        field: declared or inferred.
        rows: of the request.
        stored_rows: of the block; fewer if rows share values.
        slots: the stored row of each row, int32 ``[rows]``, if rows share values; else None.
        count: the field's count for `schema.layout`.
        nbytes: of the values, without offsets and padding.
        by_content: its values are compared by their content (`Repeat`).
        finite: NaN and infinity are refused when the values are written. False here, since a snapshot's columns were
            checked when they were put.
        continued: its values are what the rows have beyond others.
    """

    __slots__ = (
        "by_content",
        "continued",
        "count",
        "field",
        "finite",
        "nbytes",
        "offsets",
        "rows",
        "shapes",
        "slots",
        "source",
        "stored_rows",
    )

    def __init__(
        self, field: Field, stored_rows: int, source: ValueSource, offsets: I64 | None, shapes: I64 | None
    ) -> None:
        self.field, self.stored_rows, self.source = field, stored_rows, source
        self.offsets, self.shapes = offsets, shapes
        self.count = 0 if offsets is None else int(offsets[-1])
        self.nbytes = (stored_rows if offsets is None else self.count) * field.step_elements * field.item_bytes
        self.rows = stored_rows
        self.slots: I32 | None = None
        self.by_content = self.finite = self.continued = False

    def write_lengths(self, block: U8, span: Span) -> None:
        """Write the shapes and offsets of the rows into the block (``uint8``, all of it), where `schema.layout` placed
        them. The source writes the values."""
        for start, numbers in ((span.shapes, self.shapes), (span.offsets, self.offsets)):
            if start >= 0 and numbers is not None:
                block[start : start + numbers.nbytes].view(np.int64)[:] = numbers.reshape(-1)

    def inline(self) -> bytes:
        """Values of an inline field for all rows of the request: little-endian, ``rows x item_bytes``."""
        if not self.field.inline:
            raise SchemaError(f'field "{self.field.name}" is {self.field.describe()}; only small scalars are inline')
        out = np.empty(self.nbytes, np.uint8)
        self.source.write(out)
        self.check_finite(out)
        return out.tobytes() if self.slots is None else out.view(STORED_DTYPES[self.field.dtype])[self.slots].tobytes()

    def check_finite(self, values: U8) -> None:
        """Raise `SchemaError` if the column must be finite and the bytes of its written `values` are not."""
        infinite = _first_infinite(values, self.field.dtype) if self.finite else None
        if infinite is not None:
            at, value = infinite
            raise SchemaError(
                f'field "{self.field.name}": row {self._row_of(at)} has {value}, and values of this field are finite; '
                "mask it or drop the row, or declare the field with finite=False"
            )

    def _row_of(self, element: int) -> int:
        """The first row of the request that has the element `element` of the values."""
        at = element // self.field.step_elements
        stored_row = at if self.offsets is None else int(np.searchsorted(self.offsets, at, "right")) - 1
        return stored_row if self.slots is None else int(np.flatnonzero(self.slots == stored_row)[0])

    def row_lengths(self) -> I64:
        """Elements of the first dimension (bytes of a blob) of each row of the request: tokens, where rows are
        tokens."""
        if self.shapes is not None:
            lengths = self.shapes[:, 0]
        elif self.offsets is not None:
            lengths = np.diff(self.offsets)
        else:
            lengths = np.full(self.stored_rows, self.field.shape[0] if self.field.shape else 1, np.int64)
        return lengths if self.slots is None else lengths[self.slots]


def _first_infinite(values: U8, dtype: str) -> tuple[int, Any] | None:
    """The index and the value of the first element that is not finite; None if all are. `values` are the bytes of a
    column."""
    stored = values.view(STORED_DTYPES[dtype])
    size = _PIECE_BYTES // stored.itemsize
    for first in range(0, len(stored), size):
        piece = stored[first : first + size]
        if not _all_finite(piece, dtype):
            numbers = widen_to_float32(piece, dtype) if dtype in TORCH_ONLY_DTYPES else piece
            at = int(np.flatnonzero(~np.isfinite(numbers))[0])
            return first + at, numbers[at]
    return None


def _all_finite(stored: NDArray[Any], dtype: str) -> bool:
    if dtype in _EXPONENTS:
        exponent = _EXPONENTS[dtype]
        return not ((stored.view(np.uint16) & exponent) == exponent).any()
    if dtype in TORCH_ONLY_DTYPES:
        return bool(np.isfinite(widen_to_float32(stored, dtype)).all())
    numbers = stored.view(f"<f{stored.itemsize // 2}") if stored.dtype.kind == "c" else stored
    with np.errstate(all="ignore"):  # the sum of squares shows a value that is not finite, in half the time
        return bool(np.isfinite(np.dot(numbers, numbers)) or np.isfinite(numbers).all())


def prepare(name: str, value: Any, field: Field | None = None, rows: int | None = None) -> Prepared:
    """Check a column against its field (None: infer one) without copying bulk bytes.

    A single value is given to all `rows` of the request. Raises `SchemaError` if the value is not a column, does not
    fit `field`, or has another number of rows.
    """
    if type(value) is np.ndarray and field is not None and _is_plain(value, field) and len(value) == rows:
        return Prepared(field, len(value), Arrays([value], field.dtype), None, None)
    if isinstance(value, Repeat) and value.counts is None:
        prepared = prepare(name, value.values, field, rows)
        is_large = prepared.nbytes >= prepared.stored_rows * BY_CONTENT_BYTES_MIN
        prepared.by_content = is_large and not prepared.field.inline
        return prepared
    subject = f'field "{name}"'
    if isinstance(value, Repeat):
        repeat: Repeat | None = value
    else:
        repeat = None if type(value) is list else _broadcast(value, field, rows, subject)
    prepared = _fit(name, _parse(repeat.values if repeat else value, field, subject), field, subject)
    if repeat:
        prepared.slots = repeat.slots(prepared.stored_rows, subject)
        prepared.rows = len(prepared.slots)
    if rows is not None and prepared.rows != rows:
        raise SchemaError(
            f"{subject} has {counted(prepared.rows, 'row')}, but this call has {rows}; give one value for each row"
        )
    return prepared


def _is_plain(array: np.ndarray[Any, Any], field: Field) -> bool:
    """Whether the rows of an array are exactly what the field stores: nothing else has to be checked then. The most
    common column."""
    same_rows = array.ndim > 0 and 0 < len(array) <= ROWS_PER_REQUEST_MAX and array.shape[1:] == field.shape
    return same_rows and array.dtype == NUMPY_DTYPES.get(field.dtype)


def _broadcast(value: Any, field: Field | None, rows: int | None, subject: str) -> Repeat | None:
    """A single value for all rows, as a `Repeat`; None if `value` is a column."""
    array = hasattr(value, "__array__") and kind_of(type(value)) is None
    if array:
        single = getattr(value, "ndim", 1) == 0
    else:
        single = isinstance(value, str | bytes | bytearray | Mapping) or kind_of(type(value)) is not None
    if not single and not (value is None and field is not None and field.dtype == "value"):
        return None
    if rows is None:
        raise SchemaError(
            f"{subject}: {type(value).__name__} is a single value; give a list or array with one value for each row"
        )
    return Repeat(value.reshape(1) if array else [value], rows)


def _parse(value: Any, field: Field | None, subject: str) -> Parsed:
    parsed: Parsed | list[Any]
    if isinstance(value, RowsOf | PlainValues):
        return value.parsed(subject)
    if isinstance(value, list | tuple):
        parsed = list(value)
    elif isinstance(value, np.ndarray):
        parsed = parse_array(value, subject)
    elif is_tensor(value):
        parsed = parse_tensor(value, subject)
    elif is_arrow(value):
        parsed = parse_arrow(value, subject)
    else:
        parsed = _parse_other(value, subject)
    if isinstance(parsed, list):
        _check_rows(len(parsed), subject)
        return parse_list(parsed, field, subject)
    return parsed


_REFUSED: Final = (Mapping, str, bytes, bytearray)


def _parse_other(value: Any, subject: str) -> Parsed | list[Any]:
    if isinstance(value, memoryview | array) or hasattr(value, "__array__"):
        return parse_array(np.asarray(value), subject)
    if isinstance(value, Sequence) and not isinstance(value, _REFUSED):
        return list(value)
    raise SchemaError(
        f"{subject}: {type(value).__module__}.{type(value).__qualname__} is not a column; give a list, a numpy array, "
        "a torch tensor or an Arrow array with one value for each row"
    )


def _check_rows(rows: int, subject: str) -> None:
    if rows < 1:
        raise SchemaError(f"{subject} has no rows; a column has at least one")
    if rows > ROWS_PER_REQUEST_MAX:
        raise SchemaError(f"{subject} has {rows} rows; one call carries at most {ROWS_PER_REQUEST_MAX}: split it")


def _fit(name: str, parsed: Parsed, field: Field | None, subject: str) -> Prepared:
    if field is not None and parsed.dtype != field.dtype:
        raise SchemaError(
            f"{subject} is {field.describe()}, but the values are {parsed.dtype}; convert them, the store never "
            "re-types"
        )
    if isinstance(parsed, DenseInput):
        return _fit_dense(name, parsed, field, subject)
    if isinstance(parsed, RaggedInput):
        return _fit_listed(name, parsed, field, subject)
    return _fit_blobs(name, parsed, field, subject)


def _fit_dense(name: str, parsed: DenseInput, field: Field | None, subject: str) -> Prepared:
    _check_rows(parsed.rows, subject)
    field = field or Field(name, parsed.dtype, parsed.shape)
    if not field.dense:
        raise SchemaError(
            f"{subject} is {field.describe()} with rows of different sizes, but the values are one dense array of rows "
            f"{list(parsed.shape)}; give a list of rows or a nested tensor without padding"
        )
    if field.shape != parsed.shape:
        raise SchemaError(
            f"{subject} is {field.describe()}, but rows of the values have shape {list(parsed.shape)}; reshape them"
        )
    return Prepared(field, parsed.rows, parsed.source, None, None)


def _fit_blobs(name: str, parsed: BytesInput, field: Field | None, subject: str) -> Prepared:
    _check_rows(len(parsed.lengths), subject)
    return Prepared(
        field or Field(name, parsed.dtype), len(parsed.lengths), parsed.source, _offsets(parsed.lengths, subject), None
    )


def _fit_listed(name: str, parsed: RaggedInput, field: Field | None, subject: str) -> Prepared:
    rows = len(parsed.shapes)
    _check_rows(rows, subject)
    field = field or _inferred(name, parsed)
    shapes = _known(parsed.shapes, field, subject)
    if field.dense and parsed.jagged:
        raise SchemaError(f"{subject} is {field.describe()}, but the values are a nested tensor; give a dense one")
    _check_shapes(shapes, field, subject)
    if field.dense:
        return Prepared(field, rows, parsed.source, None, None)
    if field.ragged:
        return Prepared(field, rows, parsed.source, _offsets(shapes[:, 0], subject), None)
    _check_sum(shapes.prod(axis=1, dtype=np.float64), subject)
    return Prepared(field, rows, parsed.source, _offsets(shapes.prod(axis=1), subject), np.ascontiguousarray(shapes))


def _inferred(name: str, parsed: RaggedInput) -> Field:
    """Infer a field: the first dimension varies, another one varies if it differs between these rows."""
    shape: list[int | None] = [None]
    for column in parsed.shapes.T[1:]:
        sizes = np.unique(column[column != UNKNOWN])
        shape.append(int(sizes[0]) if len(sizes) == 1 else None)
    return Field(name, parsed.dtype, tuple(shape))


def _known(shapes: I64, field: Field, subject: str) -> I64:
    """The shapes, with dimensions that empty rows did not determine taken from the field."""
    if shapes.shape[1] != len(field.shape):
        raise SchemaError(
            f"{subject} is {field.describe()}, but rows of the values have {shapes.shape[1]} dimensions; give rows of "
            f"{len(field.shape)}"
        )
    if len(field.shape) > 1 and (unknown := shapes == UNKNOWN).any():  # the length of a row is always known
        shapes = np.where(unknown, [size or 0 for size in field.shape], shapes)
    return shapes


def _check_shapes(shapes: I64, field: Field, subject: str) -> None:
    for at, size in enumerate(field.shape):
        wrong = shapes[:, at] != size if size is not None else None
        if wrong is not None and wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise SchemaError(
                f"{subject} is {field.describe()}, but row {row} has shape {shapes[row].tolist()}; rows of different "
                "sizes need a field declared with None in those dimensions"
            )


def _offsets(lengths: I64, subject: str) -> I64:
    if int(np.maximum.reduce(lengths)) > SIZE_BYTES_MAX // ROWS_PER_REQUEST_MAX:
        _check_sum(lengths, subject)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _check_sum(lengths: NDArray[Any], subject: str) -> None:
    """Refuse rows with more elements than a 64-bit offset counts: views may be that long without memory."""
    elements = float(lengths.sum(dtype=np.float64))
    if elements > SIZE_BYTES_MAX:
        raise SchemaError(
            f"{subject} has {elements:.3g} elements, over {SIZE_BYTES_MAX}; give rows that memory could hold"
        )
