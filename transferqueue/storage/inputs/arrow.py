"""Parses Arrow arrays: primitives, text, binary, and lists of any kind and depth; whole, sliced or chunked.

Arrow's buffers are used without a copy, except bit-packed booleans, which are unpacked, and encodings (dictionaries,
views of text), which are decoded. Structures, maps, and lists of them or of text become plain values. Nulls are refused
with their row: a column has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.errors.text import SHOWN_CHARS, shortened
from transferqueue.storage.elements.dtypes import I64, dtype_of_numpy
from transferqueue.storage.inputs.parsed import BytesInput, DenseInput, Parsed, RaggedInput, rectangles
from transferqueue.storage.inputs.sources import Arrays

Array = np.ndarray[Any, Any]
_ASCII_MAX = 127


def is_arrow(value: object) -> bool:
    """Whether this is an Arrow array, or offers Arrow's C data interface, as those of polars, duckdb and others do."""
    return hasattr(value, "__arrow_c_array__") or hasattr(value, "__arrow_c_stream__")


def parse_arrow(value: Any, subject: str) -> Parsed | list[Any]:
    """Parse an Arrow column. Structures, maps, and lists of them or of text are returned as a list of plain values,
    which the caller parses."""
    import pyarrow as pa

    array = _checked(chunked(value, subject), subject)
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _parse_fixed_tensors(array, subject)
    if isinstance(kind, pa.BaseExtensionType):
        array = pa.chunked_array([chunk.storage for chunk in array.chunks], type=kind.storage_type)
        kind = array.type
    if pa.types.is_dictionary(kind):
        array = _decoded(array, kind)
        kind = array.type
    if _is_text(kind, pa) or _is_binary(kind, pa):
        return _parse_blobs(array, "str" if _is_text(kind, pa) else "bytes", subject)
    if _is_plain(kind, pa):
        return plain_values(array, subject)
    return (
        _parse_lists(array.chunks, kind, subject) if array.chunks else _parse_lists([pa.array([], kind)], kind, subject)
    )


def _checked(array: Any, subject: str) -> Any:
    """The array, if its offsets and indices stay within their data. Arrow does not check, and a process that follows
    bad ones may read other memory or die. Text and binary are checked when their lengths are taken: Arrow would decode
    all text."""
    import pyarrow as pa

    return array if _is_flat(array.type, pa) else _valid(array, subject)


def _valid(array: Any, subject: str) -> Any:
    """The array, checked completely."""
    import pyarrow as pa

    try:
        array.validate(full=True)
    except (pa.ArrowException, IndexError) as error:
        raise (_not_unicode if "UTF8" in str(error) else _invalid)(subject, error) from error
    return array


def _is_flat(kind: Any, pa: Any) -> bool:
    """Whether values of this type have no offsets into other buffers, or offsets that `_blob_parts` checks."""
    blob = _is_text(kind, pa) or _is_binary(kind, pa)
    return bool(pa.types.is_primitive(kind) or (blob and not _is_view(kind, pa)))


def _is_view(kind: Any, pa: Any) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _invalid(subject: str, error: object) -> SchemaError:
    return SchemaError(
        f"{subject}: the Arrow array is invalid ({shortened(str(error), SHOWN_CHARS)}); make it anew from its source"
    )


def plain_values(value: Any, subject: str) -> list[Any]:
    """The values of an Arrow column as Python objects. `SchemaError` for a null and for text that is not Unicode."""
    array = _valid(chunked(value, subject), subject)
    _refuse_nulls(array.chunks, subject)
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError as error:
        raise _not_unicode(subject, error) from error


def _not_unicode(subject: str, error: object) -> SchemaError:
    why = shortened(str(error), SHOWN_CHARS)
    return SchemaError(f"{subject}: text that is not Unicode ({why}); store such data as bytes")


def chunked(value: Any, subject: str) -> Any:
    """An Arrow column, or one of another library that offers Arrow's interface, as a `pyarrow.ChunkedArray`.

    Copies nothing. `SchemaError` for a table, and if its library cannot give it.
    """
    import pyarrow as pa

    if isinstance(value, pa.ChunkedArray):
        return value
    if isinstance(value, pa.Array):
        return pa.chunked_array([value])
    if isinstance(value, pa.RecordBatchReader) or _is_table(value):
        raise SchemaError(
            f"{subject}: a {type(value).__name__} is many columns; give one of them, or put the whole without a name: "
            "put(table)"
        )
    try:
        return pa.chunked_array(value)
    except Exception as error:
        kind = type(value)
        raise SchemaError(
            f"{subject}: {kind.__module__}.{kind.__qualname__} cannot be read as an Arrow column: "
            f"{shortened(str(error), SHOWN_CHARS)}; convert it to numpy or a list"
        ) from error


def _is_table(value: Any) -> bool:
    """Whether this is a table, data frame or batch: its stream, of structures, could be taken for a column."""
    return any(hasattr(value, name) for name in ("column_names", "columns", "fields"))


def _is_plain(kind: Any, pa: Any) -> bool:
    """Whether rows of this type are plain values: structures, maps, and lists of anything but numbers."""
    lists = 0
    while _is_list(kind):
        kind, lists = kind.value_type, lists + 1
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if lists and (_is_text(kind, pa) or _is_binary(kind, pa)):
        return True
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind))


def _decoded(array: Any, kind: Any) -> Any:
    """The values of a column that is encoded as a dictionary. Arrow cannot take views of text by index."""
    import pyarrow as pa

    if _is_view(kind.value_type, pa):
        plain = pa.large_string() if pa.types.is_string_view(kind.value_type) else pa.large_binary()
        array = pa.chunked_array(
            [pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(plain)) for chunk in array.chunks],
            type=pa.dictionary(kind.index_type, plain),
        )
    return pa.chunked_array([chunk.dictionary_decode() for chunk in array.chunks], type=array.type.value_type)


def _is_text(kind: Any, pa: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: Any, pa: Any) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _parse_fixed_tensors(array: Any, subject: str) -> Parsed:
    _refuse_nulls(array.chunks, subject)
    arrays = [chunk.to_numpy_ndarray() for chunk in array.chunks if len(chunk)]
    dtype, shape = dtype_of_numpy(arrays[0].dtype, subject), arrays[0].shape[1:]
    return DenseInput(dtype, sum(map(len, arrays)), shape, Arrays([part.reshape(-1) for part in arrays], dtype))


def _parse_blobs(array: Any, dtype: str, subject: str) -> Parsed:
    import pyarrow as pa

    _refuse_nulls(array.chunks, subject)
    large = array.cast(pa.large_string() if dtype == "str" else pa.large_binary())
    parts = [_blob_parts(chunk, subject) for chunk in large.chunks if len(chunk)]
    if dtype == "str":
        _check_text(large.chunks, parts, subject)
    lengths = np.concatenate([np.diff(offsets) for offsets, _ in parts]) if parts else np.empty(0, np.int64)
    data = [data[offsets[0] : offsets[-1]] for offsets, data in parts]
    return BytesInput(dtype, lengths, Arrays(data or [np.empty(0, np.uint8)], dtype))


def _check_text(chunks: Sequence[Any], parts: Sequence[tuple[I64, Array]], subject: str) -> None:
    """Refuse text that is not UTF-8: Arrow does not check it. The check costs a tenth of the copy for ASCII, and as
    much as the copy else."""
    chunks, first = [chunk for chunk in chunks if len(chunk)], 0
    for chunk, (offsets, data) in zip(chunks, parts, strict=True):
        if data[offsets[0] : offsets[-1]].max(initial=0) > _ASCII_MAX:
            _check_utf8(chunk, first, subject)
        first += len(chunk)


def _check_utf8(chunk: Any, first: int, subject: str) -> None:
    import pyarrow as pa

    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid as error:
        row = next((at for at, raw in enumerate(chunk.cast(pa.large_binary())) if not _is_utf8(raw.as_py())), 0)
        raise SchemaError(
            f"{subject}: row {first + row} has text that is not Unicode ({error}); store such data as bytes"
        ) from error


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _blob_parts(chunk: Any, subject: str) -> tuple[I64, Array]:
    _, offsets, data = chunk.buffers()
    edges = np.frombuffer(offsets, np.int64, len(chunk) + 1, chunk.offset * 8)
    memory = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    if edges[0] < 0 or edges[-1] > len(memory) or (edges[1:] < edges[:-1]).any():
        raise _invalid(subject, f"its offsets do not ascend within {len(memory):,} bytes")
    return edges, memory


def _parse_lists(chunks: Sequence[Any], kind: Any, subject: str) -> Parsed:
    """Parse nested lists of a primitive: the lengths at each level, then the innermost values."""
    rows, fixed = sum(map(len, chunks)), True
    levels: list[I64] = []
    while _is_list(kind):
        fixed = fixed and hasattr(kind, "list_size")
        _refuse_nulls(chunks, subject, levels)
        levels.append(np.concatenate([_lengths(chunk) for chunk in chunks]))
        chunks, kind = [chunk.flatten() for chunk in chunks], kind.value_type
    _refuse_nulls(chunks, subject, levels)
    leaves = [_leaf(chunk, subject) for chunk in chunks]
    dtype = dtype_of_numpy(leaves[0].dtype, subject)
    source = Arrays([leaf for leaf in leaves if len(leaf)] or leaves[:1], dtype)
    if fixed:
        return DenseInput(dtype, rows, tuple(int(level[0]) if len(level) else 0 for level in levels), source)
    shapes = rectangles(levels)
    if shapes is None:
        raise SchemaError(f"{subject}: a row is a list of lists of different lengths; give rectangles, or plain values")
    return RaggedInput(dtype, shapes, source)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return isinstance(
        kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType | pa.ListViewType | pa.LargeListViewType
    )


def _lengths(chunk: Any) -> I64:
    if hasattr(chunk.type, "list_size"):
        return np.full(len(chunk), chunk.type.list_size, np.int64)
    lengths: I64 = chunk.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _leaf(chunk: Any, subject: str) -> Array:
    import pyarrow as pa

    kind = chunk.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise SchemaError(f"{subject}: Arrow type {kind} cannot be stored; cast it to a number, text or binary type")
    leaf: Array = chunk.to_numpy(zero_copy_only=False)
    return leaf


def _refuse_nulls(chunks: Sequence[Any], subject: str, levels: Sequence[I64] = ()) -> None:
    """Refuse nulls among values in lists nested ``len(levels)`` deep; ``levels[i]`` has the lengths of the lists of
    depth i."""
    nulls = sum(chunk.null_count for chunk in chunks)
    if not nulls:
        return
    at = int(np.flatnonzero(np.concatenate([chunk.is_null().to_numpy(zero_copy_only=False) for chunk in chunks]))[0])
    for lengths in reversed(levels):
        at = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    raise SchemaError(
        f"{subject}: {nulls} nulls, the first in row {at}; a column has none: fill them, and give a mask as a column"
    )
