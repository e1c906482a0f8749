"""Finds rows of an input that repeat a value, so that the value is stored once.

`find_repeats` looks at the caller's object, before it is parsed:

1. An expanded array has a stride of zero over its rows: all of them are the same memory.
2. A list may have an object more than once, in any order.
3. A row of an array may equal the row before it (`repeat_interleave`, ``values[[0, 0, 1, 1]]``), compared from
   `COMPARED_BYTES` a row.

`share_rows` looks at the parsed rows: views of the same memory, and neighbours with the same bytes: from
`COMPARED_BYTES` in flat memory and among byte strings, from `COMPARED_APART_BYTES` where each row is an array of its
own, which costs more to look at.

Rows are shared only if that spares at least half of the column and, where they are not one array, `SAVED_BYTES`, since
a column whose rows share values lies in a block of its own, and readers gather its rows. So a few rows spread over the
column are looked at first; then three short samples of all neighbours; and the search ends when too few rows can
repeat, or when it was mistaken too often: more than `MISTAKES_MAX` rows had the samples of their neighbours and other
bytes, besides one for each row that was equal. Of the first look, one mistake is enough if more than `_LARGE_BYTES` had
to be compared for it. A column that repeats nothing costs little more than the first look, which touches no other row.

Equal means: the same bytes. So 0.0 and -0.0 differ, and NaNs of the same bits do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from operator import eq
from typing import Any, Final, NamedTuple

import numpy as np

from transferqueue.limits import KIB, ROWS_PER_REQUEST_MAX
from transferqueue.storage.elements.dtypes import I32, I64, U8, imported_torch
from transferqueue.storage.inputs.parsed import BytesInput, DenseInput, Parsed, RaggedInput
from transferqueue.storage.inputs.sources import Arrays, ByteStrings, TensorMemory, ValueSource
from transferqueue.storage.memory.private_pages import array_at

COMPARED_BYTES: Final = 4 * KIB
COMPARED_APART_BYTES: Final = 32 * KIB
SAVED_BYTES: Final = 16 * KIB
MISTAKES_MAX: Final = 1
_SAMPLE: Final = 16
"""Bytes of a sample. There is one at the start, in the middle and at the end of a value."""
_LARGE_BYTES: Final = 64 * KIB
_PROBED_PAIRS: Final = 8
"""Places at which neighbours are compared before all are."""
_PROBED_OBJECTS: Final = 128
"""Objects among which one must occur twice before all are looked at."""
_LISTED_MAX: Final = 4096
"""Elements of a list that are looked at to estimate its size."""
_PIECE: Final = 8 * KIB
"""Values are compared in pieces of so many words of 8 bytes: a difference ends the comparison."""


class Repeats(NamedTuple):
    """values: an input with each value once. slots: for each row, which of them it has, int32 ``[rows]``."""

    values: Any
    slots: I32


class SharedRows(NamedTuple):
    """As `Repeats`, of parsed values."""

    parsed: Parsed
    slots: I32


# ---------------------------------------------------------------- the caller's object


def find_repeats(value: Any) -> Repeats | None:
    """The repeated rows of an input; None if there are too few, or if its kind is not searched."""
    if isinstance(value, np.ndarray):
        return _of_array(value) if type(value) is np.ndarray else None
    if isinstance(value, list | tuple):
        return _of_list(value)
    torch = imported_torch()
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        return _of_tensor(value, torch)
    return None


def _of_array(array: np.ndarray[Any, Any]) -> Repeats | None:
    if array.ndim < 2 or not 1 < len(array) <= ROWS_PER_REQUEST_MAX or array.dtype.hasobject:
        return None
    if not array.strides[0]:
        return _expanded(array, array.nbytes)
    if array.nbytes < max(SAVED_BYTES, len(array) * COMPARED_BYTES) or not array.flags.c_contiguous:
        return None
    return _of_matrix(array, array.reshape(len(array), -1).view(np.uint8))


def _of_tensor(tensor: Any, torch: Any) -> Repeats | None:
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.is_meta:
        return None
    if not 1 < len(tensor) <= ROWS_PER_REQUEST_MAX:
        return None
    nbytes = tensor.numel() * tensor.element_size()
    if not tensor.stride(0):
        return _expanded(tensor, nbytes)
    large = nbytes >= max(SAVED_BYTES, len(tensor) * COMPARED_BYTES)
    if not large or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_quantized:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own, which its parser says
        return None
    return _of_matrix(tensor, array_at(address, nbytes, owner=tensor).reshape(len(tensor), -1))


def _expanded(array: Any, nbytes: int) -> Repeats | None:
    saved = nbytes - nbytes // len(array)
    return Repeats(array[:1], np.zeros(len(array), np.int32)) if saved >= SAVED_BYTES else None


def _of_matrix(array: Any, rows: U8) -> Repeats | None:
    """Repeats of an array whose rows have these bytes, ``uint8 [rows, bytes]``."""
    middle = rows[:, rows.shape[1] // 2 :][:, :_SAMPLE]
    likely = [row for row in _probed_pairs(len(rows)) if middle[row].tobytes() == middle[row + 1].tobytes()]
    if not likely or not _is_promising(likely, rows.__getitem__):
        return None
    alike = np.ones(len(rows) - 1, np.bool_)
    for at in _sample_starts(rows.shape[1]):
        sample = rows[:, at : at + _SAMPLE]
        alike &= (sample[1:] == sample[:-1]).all(axis=1)
    firsts = _firsts(alike, rows.__getitem__)
    if firsts is None:
        return None
    steps = np.diff(firsts, append=len(rows))
    equal_groups = bool((steps == steps[0]).all())  # then the values are a view
    return Repeats(array[:: int(steps[0])] if equal_groups else array[firsts], _slots(firsts, len(rows)))


def _of_list(rows: Sequence[Any]) -> Repeats | None:
    """Objects that occur more than once. The first row tells whether a look is worth its time."""
    if not 1 < len(rows) <= ROWS_PER_REQUEST_MAX or len(rows) * _nbytes(rows[0]) < SAVED_BYTES:
        return None
    step = max(1, 2 * len(rows) // _PROBED_OBJECTS)
    probed = list(map(id, (*rows[::step], *rows[1::step]))) if step > 1 else list(map(id, rows))
    if len(set(probed)) == len(probed):
        return None
    ids = list(map(id, rows))
    slot_of_object = {number: slot for slot, number in enumerate(dict.fromkeys(ids))}
    if 2 * len(slot_of_object) > len(rows):
        return None
    slots = np.fromiter(map(slot_of_object.__getitem__, ids), np.int32, len(ids))
    _, at = np.unique(slots, return_index=True)
    values = [rows[first] for first in at.tolist()]
    return Repeats(values, slots) if _saves(np.array(list(map(_nbytes, values)), np.int64), slots) else None


def _nbytes(row: Any) -> int:
    """Bytes of a row, or about so many; 0 of a kind of which that is not seen at once."""
    if isinstance(row, str | bytes):
        return len(row)
    if isinstance(row, list | tuple):
        if row and isinstance(row[0], int):
            return 8 * len(row)
        return 8 * sum(len(each) if isinstance(each, list | tuple) else 1 for each in row[:_LISTED_MAX])
    if isinstance(row, dict):
        return sum(_nbytes(each) for each in islice(row.values(), _LISTED_MAX) if not isinstance(each, dict))
    torch = imported_torch()
    known = isinstance(row, np.ndarray) or (torch is not None and type(row) in (torch.Tensor, torch.nn.Parameter))
    return int(row.nbytes) if known and not getattr(row, "is_nested", False) else 0


# ---------------------------------------------------------------- parsed rows


def share_rows(parsed: Parsed) -> SharedRows | None:
    """The repeated rows of a parsed input; None if there are too few, or if its kind is not searched."""
    if isinstance(parsed, DenseInput):
        return None  # an array, of which `find_repeats` has seen the rows, or scalars
    if isinstance(parsed, BytesInput):
        return _of_strings(parsed)
    source = parsed.source
    if len(parsed.shapes) < 2 or isinstance(source, ByteStrings):
        return None
    if isinstance(source, TensorMemory):
        return _of_tensors(parsed, source)
    if not isinstance(source, Arrays):
        return None
    return _of_flat(parsed, source.arrays[0]) if len(source.arrays) == 1 else _of_arrays(parsed, source)


def _of_strings(parsed: BytesInput) -> SharedRows | None:
    source, rows = parsed.source, len(parsed.lengths)
    if not isinstance(source, ByteStrings) or source.nbytes < max(SAVED_BYTES, rows * COMPARED_BYTES) or rows < 2:
        return None
    strings = source.strings
    if not _is_promising(_probed_pairs(rows), strings.__getitem__, eq):
        return None
    firsts = _firsts(parsed.lengths[1:] == parsed.lengths[:-1], strings.__getitem__, eq)
    if firsts is None or not _saves(parsed.lengths[firsts], slots := _slots(firsts, rows)):
        return None
    lengths = parsed.lengths[firsts]
    kept = ByteStrings([strings[first] for first in firsts.tolist()], int(lengths.sum()))
    return SharedRows(replace(parsed, lengths=lengths, source=kept), slots)


def _of_tensors(parsed: RaggedInput, source: TensorMemory) -> SharedRows | None:
    """One-dimensional tensors: views of the same memory in any order, or neighbours with the same bytes."""
    starts, sizes, rows = source.starts, source.ends - source.starts, len(parsed.shapes)
    whole = int(sizes.sum())
    if len(starts) != rows or whole < SAVED_BYTES:  # a row is empty
        return None
    step = max(1, 2 * rows // _PROBED_OBJECTS)
    probed = [*starts[::step].tolist(), *starts[1::step].tolist()] if step > 1 else starts.tolist()
    if len(set(probed)) < len(probed):
        views, at, slots = np.unique(starts, return_index=True, return_inverse=True)
        if 2 * len(views) <= rows and (sizes == sizes[at][slots]).all():
            return _subset(parsed, at, slots.reshape(-1).astype(np.int32), sizes[at], _of_memory(source, at))
    if whole < rows * COMPARED_BYTES:
        return None
    low = int(starts.min())
    memory = array_at(low, int(source.ends.max()) - low, owner=source)
    firsts = _alike_in(memory, starts - low, sizes)
    return None if firsts is None else _grouped(parsed, firsts, sizes, _of_memory(source, firsts))


def _of_memory(source: TensorMemory, at: I64) -> TensorMemory:
    return TensorMemory([source.tensors[row] for row in at.tolist()], source.starts[at], source.ends[at])


def _of_flat(parsed: RaggedInput, array: np.ndarray[Any, Any]) -> SharedRows | None:
    """Rows one after the other in one array: its elements if it has one dimension, else its steps."""
    rows = len(parsed.shapes)
    if array.nbytes < max(SAVED_BYTES, rows * COMPARED_BYTES) or not array.flags.c_contiguous:
        return None
    counts = parsed.shapes.prod(axis=1) if array.ndim == 1 else parsed.shapes[:, 0]
    if (counts < 0).any() or int(counts.sum()) != len(array):
        return None
    ends = np.cumsum(counts)
    step = array.nbytes // len(array)
    firsts = _alike_in(array.reshape(-1).view(np.uint8), (ends - counts) * step, counts * step)
    if firsts is None:
        return None
    kept = [array[ends[row] - counts[row] : ends[row]] for row in firsts.tolist()]
    return _grouped(parsed, firsts, counts * step, Arrays(kept, parsed.dtype))


def _of_arrays(parsed: RaggedInput, source: Arrays) -> SharedRows | None:
    """Rows that are arrays of their own."""
    if source.arrays[0].nbytes < COMPARED_APART_BYTES or len(source.arrays) != len(parsed.shapes):
        return None
    first = source.arrays[0].dtype
    if any(array.dtype != first or not array.flags.c_contiguous for array in source.arrays):
        return None

    def row_bytes(row: int) -> U8:
        return source.arrays[row].reshape(-1).view(np.uint8)

    if not _is_promising(_probed_pairs(len(source.arrays)), row_bytes):
        return None
    flat = list(map(row_bytes, range(len(source.arrays))))
    alike = (parsed.shapes[1:] == parsed.shapes[:-1]).all(axis=1)
    for row in np.flatnonzero(alike).tolist():
        alike[row] = _may_be_equal(flat[row], flat[row + 1])
    firsts = _firsts(alike, flat.__getitem__)
    if firsts is None:
        return None
    sizes = np.fromiter(map(len, flat), np.int64, len(flat))
    return _grouped(parsed, firsts, sizes, Arrays([source.arrays[row] for row in firsts.tolist()], source.dtype))


def _grouped(parsed: RaggedInput, firsts: I64, sizes: I64, source: ValueSource) -> SharedRows | None:
    return _subset(parsed, firsts, _slots(firsts, len(parsed.shapes)), sizes[firsts], source)


def _subset(parsed: RaggedInput, at: I64, slots: I32, sizes: I64, source: ValueSource) -> SharedRows | None:
    if not _saves(sizes, slots) or (parsed.shapes != parsed.shapes[at][slots]).any():
        return None
    return SharedRows(replace(parsed, shapes=parsed.shapes[at], source=source), slots)


# ---------------------------------------------------------------- neighbours


def _alike_in(memory: U8, starts: I64, sizes: I64) -> I64 | None:
    """`_firsts` of rows that lie in one memory. starts, sizes: in bytes, ``[rows]``."""

    def row_bytes(row: int) -> U8:
        return memory[starts[row] : starts[row] + sizes[row]]

    likely = _pairs_that_end_alike(memory.data, starts, sizes)
    if not likely or not _is_promising(likely, row_bytes):
        return None
    alike = (sizes[1:] == sizes[:-1]) & (sizes[1:] >= _SAMPLE)
    sampled = np.where(sizes >= _SAMPLE, np.arange(len(sizes)), int(np.argmax(sizes)))  # no byte beside a row is read
    begins, ends = starts[sampled], starts[sampled] + sizes[sampled]
    for at in (begins, (begins + ends) // 2 - _SAMPLE // 2, ends - _SAMPLE):
        sample = memory[at[:, np.newaxis] + np.arange(_SAMPLE)].view(np.int64)
        alike &= (sample[1:] == sample[:-1]).all(axis=1)
    return _firsts(alike, row_bytes)


def _pairs_that_end_alike(memory: memoryview, starts: I64, sizes: I64) -> list[int]:
    """Those of `_probed_pairs` that have the same size and the same last bytes."""
    likely = []
    for row in _probed_pairs(len(sizes)):
        size = sizes.item(row)
        if size == sizes.item(row + 1):
            one, other = starts.item(row) + size, starts.item(row + 1) + size
            sample = min(size, _SAMPLE)
            if memory[one - sample : one] == memory[other - sample : other]:
                likely.append(row)
    return likely


def _same_bytes(one: U8, other: U8) -> bool:
    if one.size != other.size:
        return False
    words = one.size // 8 * 8
    if one[words:].tobytes() != other[words:].tobytes():
        return False
    mine, its = one[:words].view(np.int64), other[:words].view(np.int64)
    return all(np.array_equal(mine[at : at + _PIECE], its[at : at + _PIECE]) for at in range(0, len(mine), _PIECE))


def _may_be_equal(one: Any, other: Any) -> bool:
    """Whether the samples of two values are equal. The end comes first: values of one origin often begin alike."""
    size = len(one)
    if size != len(other) or bytes(one[-_SAMPLE:]) != bytes(other[-_SAMPLE:]):
        return False
    half = size // 2
    middle = slice(half, half + _SAMPLE)
    return bytes(one[middle]) == bytes(other[middle]) and bytes(one[:_SAMPLE]) == bytes(other[:_SAMPLE])


def _probed_pairs(rows: int) -> Iterable[int]:
    """A few rows, spread over all but the last, two neighbours at each place."""
    places = range(0, rows - 1, max(1, (rows - 1) // _PROBED_PAIRS))
    return dict.fromkeys([at for place in places for at in (place, min(place + 1, rows - 2))])


def _is_promising(
    pairs: Iterable[int],
    row_bytes: Callable[[int], Any],
    equal: Callable[[Any, Any], bool] = _same_bytes,
) -> bool:
    """Whether one of a few rows equals the row after it. If every row had a neighbour like it, one of `_probed_pairs`
    would."""
    mistakes = 0
    for row in pairs:
        one, other = row_bytes(row), row_bytes(row + 1)
        if _may_be_equal(one, other):
            if equal(one[:_LARGE_BYTES], other[:_LARGE_BYTES]):
                return len(one) <= _LARGE_BYTES or equal(one, other)
            mistakes += 1
            if mistakes > MISTAKES_MAX:
                return False
    return False


def _firsts(
    alike: np.ndarray[Any, np.dtype[np.bool_]],
    row_bytes: Callable[[int], Any],
    equal: Callable[[Any, Any], bool] = _same_bytes,
) -> I64 | None:
    """The rows that do not repeat the row before them; None if too few repeat it. alike: whether row i + 1 may be equal
    to row i."""
    rows = len(alike) + 1
    if 2 * (rows - int(alike.sum())) > rows:
        return None
    mistakes = 0
    for compared, row in enumerate(np.flatnonzero(alike).tolist()):
        if not equal(row_bytes(row), row_bytes(row + 1)):
            alike[row] = False
            mistakes += 1
            if mistakes > MISTAKES_MAX + (compared + 1 - mistakes):
                return None
    firsts: I64 = np.concatenate([[0], np.flatnonzero(~alike) + 1])
    return firsts if 2 * len(firsts) <= rows else None


def _sample_starts(size: int) -> tuple[int, int, int]:
    return 0, size // 2, max(0, size - _SAMPLE)


def _slots(firsts: I64, rows: int) -> I32:
    return np.repeat(np.arange(len(firsts), dtype=np.int32), np.diff(firsts, append=rows))


def _saves(sizes: I64, slots: I32) -> bool:
    """Whether values of these sizes, stored once, spare enough."""
    stored, whole = int(sizes.sum()), int(sizes[slots].sum())
    return whole - stored >= SAVED_BYTES and 2 * stored <= whole
