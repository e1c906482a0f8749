"""Finds values that come again in later puts, so that they are interned: the image that each member of a group brings
in a put of its own.

1. The first time that a value comes, it is stored as any other, and its *fingerprint* is kept: a hash of 8 short
   samples spread over it. If the field of a partition gets a value of the same fingerprint, its column is given as
   `Interned`: that value is stored once more, and from then on once.
2. Only fields of tensors, texts and bytes are looked at, with at least `RECURRING_BYTES` in each of at most
   `CONTENTS_MAX` samples: `Interned` finds each of so many alone. Of a column, `PROBED_MAX` values are looked at,
   spread over it, and it is interned if at least half of them have come before.
3. Two values may differ in bytes that no sample has. Nothing is wrong then, since `Interned` compares all bytes; but it
   cost a digest, and a refused request. So the hash of the whole value is kept from the second time on. A third value
   with the same fingerprint and another hash is a *mistake*. A field with `MISTAKES_MAX` more mistakes than values that
   did come again is not looked at for its next `REST_PUTS` puts.
4. The latest `FINGERPRINTS_MAX` are kept, some 200 bytes each.

``TRANSFERQUEUE_FIND_REPEATS=0`` turns it off, as it does the search for values that the samples of one put share.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from transferqueue.client.client import finds_repeats
from transferqueue.limits import CONTENTS_MAX, KIB
from transferqueue.storage import Interned, PlainValues, RowsOf, checksum
from transferqueue.storage.memory.private_pages import array_at

RECURRING_BYTES: Final = 16 * KIB
FINGERPRINTS_MAX: Final = 1 << 13
PROBED_MAX: Final = 4
MISTAKES_MAX: Final = 8
REST_PUTS: Final = 256
_SAMPLES: Final = 8
_SAMPLE: Final = 64
"""Bytes of a sample."""
_UNHASHED: Final = 0
"""Stands for the whole hash of a value that came once."""
Key = tuple[str, str, int]
"""Partition, field, fingerprint."""
Values = Sequence[memoryview]


class RecurringValues:
    """The values that this process put last. Safe from any thread."""

    def __init__(self) -> None:
        self._is_on: Final = finds_repeats()
        self._guard = threading.Lock()
        self._seen: dict[Key, int] = {}
        """The hash of each whole value that came twice, by its fingerprint; the latest ones last."""
        self._mistakes: dict[str, int] = {}
        """By field: mistakes, less values that did come again since; below zero: for how many puts it is not looked
        at."""

    def interned(self, partition: str, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns of a put into a partition, those as `Interned` whose values have come before."""
        if not self._is_on:
            return columns
        again = [name for name, column in columns.items() if self._comes_again(partition, name, column)]
        return columns | {name: Interned(columns[name]) for name in again} if again else columns

    def _comes_again(self, partition: str, name: str, column: Any) -> bool:
        if self._mistakes.get(name, 0) < 0:
            self._mistakes[name] += 1
            return False
        values = probed_values(column)
        if not values:
            return False
        value_of = {(partition, name, fingerprint(value)): value for value in values}
        with self._guard:
            seen = {key: self._seen[key] for key in value_of if key in self._seen}
        again = 0
        for key, known in seen.items():
            whole = checksum(value_of[key])
            again += self._count(name, known in (_UNHASHED, whole), sure=known != _UNHASHED)
            seen[key] = whole
        with self._guard:
            for key in value_of:
                self._seen.pop(key, None)
                self._seen[key] = seen.get(key, _UNHASHED)
            while len(self._seen) > FINGERPRINTS_MAX:
                del self._seen[next(iter(self._seen))]
        return 2 * again >= len(value_of)

    def _count(self, name: str, is_again: bool, *, sure: bool) -> bool:
        """Count a value that came again, or a mistake. sure: its bytes were compared. Returns `is_again`."""
        if sure:
            mistakes = max(0, self._mistakes.get(name, 0) + (-1 if is_again else 1))
            self._mistakes[name] = mistakes if mistakes < MISTAKES_MAX else -REST_PUTS
        return is_again


def fingerprint(value: memoryview) -> int:
    """A hash of samples of the bytes, among them the first and the last ones, and of their number."""
    size = len(value)
    step = (size - _SAMPLE) // (_SAMPLES - 1)
    starts = (*range(0, (_SAMPLES - 1) * step, step), size - _SAMPLE)
    return checksum(size.to_bytes(8, "little") + b"".join([value[at : at + _SAMPLE] for at in starts]))


def probed_values(column: Any) -> Values:
    """The bytes of a few values of a column; nothing if they are of another kind, on a device, of many samples, or
    small."""
    try:
        values = _probed(column)
    except RuntimeError:  # a tensor has no memory of its own
        return []
    return values if all(len(value) >= RECURRING_BYTES for value in values) else []


def _probed(column: Any) -> Values:
    if isinstance(column, PlainValues):
        plain = [column.values[at] for at in _places(len(column))]
        return [_memory(value) for value in plain] if all(isinstance(each, str | bytes) for each in plain) else []
    if isinstance(column, RowsOf):
        return _of_rows(column.values)
    if isinstance(column, list):
        return _of_tensors([column[at] for at in _places(len(column))])
    return _of_jagged(column) if isinstance(column, torch.Tensor) and column.is_nested else []


def _places(count: int) -> range:
    """Places of `PROBED_MAX` samples at most, spread over a column; none of one that has more than `Interned` finds
    alone."""
    return range(0, count if count <= CONTENTS_MAX else 0, max(1, -(-count // PROBED_MAX)))


def _of_tensors(tensors: Sequence[torch.Tensor]) -> Values:
    return [_bytes_of(each) for each in tensors] if all(map(_is_plain, tensors)) else []


def _of_rows(rows: torch.Tensor) -> Values:
    count, nbytes = len(rows), rows.nbytes
    if count > CONTENTS_MAX or nbytes < count * RECURRING_BYTES:
        return []
    if not _is_plain(rows):
        return _of_tensors([rows[at] for at in _places(count)])
    memory, size = _bytes_of(rows), nbytes // count
    return [memory[at * size : (at + 1) * size] for at in _places(count)]


def _of_jagged(column: Any) -> Values:
    """Of a nested tensor that `columns_of` gave as it was: its rows lie one after the other."""
    rows, edges = column._values, column._offsets
    if not _is_plain(rows) or rows.nbytes < RECURRING_BYTES:
        return []
    memory, step = _bytes_of(rows), rows.nbytes // len(rows)
    spans = [edges[at : at + 2].tolist() for at in _places(len(edges) - 1)]
    return [memory[low * step : high * step] for low, high in spans]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return array_at(tensor.data_ptr(), tensor.nbytes, owner=tensor).data


def _memory(value: str | bytes) -> memoryview:
    return memoryview(value if isinstance(value, bytes) else value.encode(errors="surrogatepass"))
