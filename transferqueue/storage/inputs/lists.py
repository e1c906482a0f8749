"""Parses numpy arrays, and Python lists with one element for each row, of any kind that a column can hold."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.errors.text import SHOWN_CHARS, shortened
from transferqueue.schema import RAGGED_RANK_MAX, TORCH_ONLY_DTYPES, Field
from transferqueue.storage.elements.dtypes import I64, STORED_DTYPES, dtype_of_numpy
from transferqueue.storage.elements.numbers import are_numbers, store_integers, store_numbers
from transferqueue.storage.elements.values import pieces
from transferqueue.storage.inputs.parsed import BytesInput, DenseInput, Parsed, RaggedInput, only_rank, rectangles
from transferqueue.storage.inputs.sources import Arrays, ByteStrings
from transferqueue.storage.inputs.tensors import are_tensors, parse_tensors

_BYTE_STRINGS: Final = (bytes, bytearray, memoryview)
_LISTS: Final = (list, tuple)


def parse_list(rows: Sequence[Any], field: Field | None, subject: str) -> Parsed:
    """Parse a list or tuple with one element for each row. `field` is None to infer it."""
    classes = set(map(type, rows))
    if field is not None and field.dtype == "value":
        return parse_values(rows, subject)
    if classes == {np.ndarray} or _all(classes, np.ndarray):
        return parse_arrays(rows, subject)
    if are_tensors(classes):
        return parse_tensors(rows, subject)
    if are_numbers(classes):
        dtype, numbers = store_numbers(rows, classes, field.dtype if field else None, subject)
        return DenseInput(dtype, len(rows), (), Arrays([numbers], dtype))
    if _all(classes, str):
        return _parse_text(rows, subject)
    if _all(classes, *_BYTE_STRINGS):
        return _parse_bytes(rows)
    return _parse_nested(rows, classes, field, subject)


def parse_values(rows: Sequence[Any], subject: str) -> Parsed:
    """Parse a plain value for each row."""
    encoded = [pieces(row, f"{subject}, row {at}") for at, row in enumerate(rows)]
    flat = list(chain.from_iterable(encoded))
    if len(flat) == len(rows):
        return parse_stored(flat)
    lengths = np.fromiter((sum(map(len, row)) for row in encoded), np.int64, len(encoded))
    return BytesInput("value", lengths, ByteStrings(flat, int(lengths.sum())))


def parse_stored(rows: Sequence[bytes | memoryview]) -> Parsed:
    """The stored bytes of a plain value for each row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return BytesInput("value", lengths, ByteStrings(rows, int(lengths.sum())))


def _all(classes: set[type], *bases: type) -> bool:
    return all(issubclass(cls, bases) for cls in classes)


def _parse_text(rows: Sequence[str], subject: str) -> Parsed:
    try:
        encoded = [row.encode() for row in rows]
    except UnicodeEncodeError as error:
        raise SchemaError(f"{subject}: text that is not Unicode ({error}); store such data as bytes") from error
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return BytesInput("str", lengths, ByteStrings(encoded, int(lengths.sum())))


def _parse_bytes(rows: Sequence[Any]) -> Parsed:
    strings = [row if type(row) is bytes else _flat(memoryview(row)) for row in rows]
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    return BytesInput("bytes", lengths, ByteStrings(strings, int(lengths.sum())))


def _flat(memory: memoryview) -> bytes | memoryview:
    """The bytes of a buffer in row-major order; a copy if they are stored otherwise."""
    return memory.cast("B") if memory.nbytes and memory.c_contiguous else memory.tobytes()


def _parse_nested(rows: Sequence[Any], classes: set[type], field: Field | None, subject: str) -> Parsed:
    """Parse rows that are lists: rectangles of numbers, or plain values if the field is not declared otherwise.

    Rows of mixed kinds, and None among rows of another kind, are plain values only if a row is a dict: a single None
    must not turn a column of token ids into plain values.
    """
    undeclared = field is None
    if _all(classes, *_LISTS):
        rectangular = _parse_rectangles(rows, field, subject)
        if rectangular is not None:
            return rectangular
        if undeclared:
            return parse_values(rows, subject)
        raise SchemaError(
            f'{subject}: a row is a list that is not a rectangle of numbers; declare dtype "value" to store plain '
            "values"
        )
    if undeclared and any(issubclass(cls, dict) for cls in classes):
        return parse_values(rows, subject)  # a dict is clearly a plain value, and None may be one beside it
    if type(None) in classes:
        raise _missing(subject, "is None", next(at for at, row in enumerate(rows) if row is None))
    names = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.") for cls in classes))
    raise SchemaError(
        f"{subject}: rows of type {shortened(names, SHOWN_CHARS)} are not a column; give numbers, text, bytes, arrays, "
        "tensors or lists of numbers, all of one kind, or plain values (dicts, or lists of anything; or declare dtype "
        '"value")'
    )


def _missing(subject: str, what: str, row: int) -> SchemaError:
    """The error for a missing value."""
    return SchemaError(
        f"{subject}: row {row} {what}; a column has a value in each row: fill in one of the others' kind, such as 0 or "
        "an empty "
        'list, and say in a second column which rows have one (a mask of True and False), or declare dtype "value" for '
        "plain values"
    )


def _parse_rectangles(rows: Sequence[Any], field: Field | None, subject: str) -> RaggedInput | None:
    fast = _integer_rows(rows) if field is None or not field.blob else None
    if fast is not None:
        dtype, numbers = store_integers(fast[1], field.dtype if field else None, subject)
        return RaggedInput(dtype, fast[0].reshape(-1, 1), Arrays([numbers], dtype))
    levels, leaves, classes = _levels(rows)
    if any(issubclass(cls, np.ndarray) for cls in classes) or (classes and are_tensors(classes)):
        raise SchemaError(f"{subject}: a row is a list of arrays; stack them into one array for each row")
    if not classes and field is None:
        raise SchemaError(f"{subject}: all rows are empty lists, which tell no dtype; declare the field")
    if type(None) in classes and are_numbers(classes - {type(None)}):
        raise _missing(
            subject, "has None among its numbers", next(at for at, row in enumerate(rows) if _holds_none(row))
        )
    if (classes and not are_numbers(classes)) or (field is not None and field.blob):
        return None
    while field is not None and not classes and len(levels) < len(field.shape):
        levels.append(np.empty(0, np.int64))
    shapes = rectangles(levels)
    if shapes is None:
        return None
    dtype, numbers = store_numbers(leaves, classes or {bool}, field.dtype if field else None, subject)
    return RaggedInput(dtype, shapes, Arrays([numbers], dtype))


def _holds_none(row: Any) -> bool:
    return row is None or (isinstance(row, _LISTS) and any(map(_holds_none, row)))


def _integer_rows(rows: Sequence[Any]) -> tuple[I64, np.ndarray[Any, Any]] | None:
    """The lengths and elements of lists of ints (token ids, the most common list), four times as fast as other lists.

    None if an element is not an int of 64 bits; then the slower path reports the error.
    """
    if set(map(type, rows)) != {list} or {type(row[0]) for row in rows if row} != {int}:
        return None
    elements = array("q")
    try:
        for row in rows:
            elements.fromlist(row)
    except (TypeError, OverflowError):
        return None
    return np.fromiter(map(len, rows), np.int64, len(rows)), np.frombuffer(elements, np.int64)


def _levels(rows: Sequence[Any]) -> tuple[list[I64], Sequence[Any], set[type]]:
    """The lengths of the lists at each level, the innermost elements, and their types."""
    levels: list[I64] = []
    flat, classes = rows, set(map(type, rows))
    while classes and _all(classes, *_LISTS) and len(levels) < RAGGED_RANK_MAX:
        levels.append(np.fromiter(map(len, flat), np.int64, len(flat)))
        flat = list(chain.from_iterable(flat))
        classes = set(map(type, flat))
    return levels, flat, classes


Array = np.ndarray[Any, Any]


def parse_array(array: Array, subject: str) -> Parsed | list[Any]:
    """Parse one array over all rows. Numpy's own text and byte strings are returned as a list, which the caller
    parses."""
    _refuse_masked(array, subject)
    if array.dtype.kind in "UST":
        return array.tolist()  # type: ignore[no-any-return]
    dtype = dtype_of_numpy(array.dtype, subject)
    return DenseInput(dtype, array.shape[0], array.shape[1:], Arrays([_bits(array, dtype)], dtype))


def parse_arrays(rows: Sequence[Array], subject: str) -> Parsed:
    """Parse an array for each row, all of one dtype and number of dimensions."""
    if not set(map(type, rows)) <= {np.ndarray}:
        for row in rows:
            _refuse_masked(row, subject)
    dtypes = set(map(attrgetter("dtype"), rows))
    names = {dtype_of_numpy(dtype, subject) for dtype in dtypes}
    if len(names) > 1:
        raise SchemaError(f"{subject}: rows of dtypes {', '.join(sorted(names))}; convert them to one dtype")
    dtype = names.pop()
    if dtype in TORCH_ONLY_DTYPES:
        rows = [_bits(row, dtype) for row in rows]
    ranks = set(map(attrgetter("ndim"), rows))
    ndim = ranks.pop() if len(ranks) == 1 else only_rank(ranks, subject)
    if ndim == 0:
        return DenseInput(dtype, len(rows), (), Arrays([row.reshape(1) for row in rows], dtype))
    return RaggedInput(dtype, _shapes(rows, ndim), Arrays(rows, dtype))


def _shapes(rows: Sequence[Array], ndim: int) -> I64:
    if ndim == 1:
        return np.fromiter(map(len, rows), np.int64, len(rows)).reshape(-1, 1)
    return np.array([row.shape for row in rows], np.int64)


def _bits(array: Array, dtype: str) -> Array:
    return array.view(STORED_DTYPES[dtype]) if dtype in TORCH_ONLY_DTYPES else array


def _refuse_masked(array: Array, subject: str) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise SchemaError(
            f"{subject}: a masked array has no values where it is masked; give .filled(...) and a mask column"
        )
