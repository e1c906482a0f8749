"""Sets of global indexes, in pages of bits, so that a question about a few of them costs a few steps however many there
are.

A page is an integer of `PAGE` bits; empty pages do not exist. To look for the lowest members, a reader goes through the
pages in order: each page costs one operation on 512 bytes, or nothing more than a look if it has no member of interest.
200,000 indexes are 49 pages.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

Indexes = npt.NDArray[np.int64]

SHIFT: Final = 12
PAGE: Final = 1 << SHIFT
_NONE: Final[Indexes] = np.empty(0, np.int64)


class IndexSet:
    """A set of indexes that are not negative."""

    def __init__(self, members: Iterable[int] | Indexes = ()) -> None:
        self._pages: dict[int, int] = {}
        self._numbers: list[int] = []
        """Numbers of the pages, ascending."""
        self.add(members)

    def add(self, members: Iterable[int] | Indexes) -> None:
        """Add indexes."""
        for number, bits in _bits_by_page(members):
            if number not in self._pages:
                insort(self._numbers, number)
            self._pages[number] = self._pages.get(number, 0) | bits

    def discard(self, members: Iterable[int] | Indexes) -> None:
        """Remove indexes; those that are not in the set are ignored."""
        for number, bits in _bits_by_page(members):
            left = self._pages.get(number, 0) & ~bits
            if left:
                self._pages[number] = left
            elif self._pages.pop(number, 0):
                self._numbers.remove(number)

    def __len__(self) -> int:
        return sum(map(int.bit_count, self._pages.values()))

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and bool(self._pages.get(index >> SHIFT, 0) >> (index & PAGE - 1) & 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.to_array().tolist())

    def contains(self, members: Iterable[int] | Indexes) -> npt.NDArray[np.bool_]:
        """Which of these indexes are in the set."""
        asked = _as_array(members)
        numbers, inside = asked >> SHIFT, np.zeros(asked.size, np.bool_)
        for number in np.unique(numbers).tolist():
            if number in self._pages:
                here = numbers == number
                inside[here] = _flags(self._pages[number])[asked[here] & PAGE - 1]
        return inside

    def to_array(self) -> Indexes:
        """All indexes, ascending."""
        return _joined([_members(number, self._pages[number]) for number in self._numbers])

    def pages_without(self, others: IndexSet) -> Iterator[tuple[int, int]]:
        """Yield number and bits of each page that has members which are not in `others`, ascending."""
        for number in self._numbers:
            bits = self._pages[number] & ~others._pages.get(number, 0)
            if bits:
                yield number, bits


class WaitingSamples(Sequence[int]):
    """The members of one set, up to `bound` (None: all), that are not in another, ascending: samples that are ready,
    and that a task has not consumed.

    A view: it changes with both sets. Built-in samplers read parts of it; as a sequence it makes a list.
    """

    def __init__(self, ready: IndexSet, consumed: IndexSet, bound: int | None = None) -> None:
        self._ready, self._consumed, self._bound = ready, consumed, bound

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._pages())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice) and not at.start and at.step is None and at.stop is not None and at.stop >= 0:
            return self.first(at.stop)
        return self.to_list()[at]

    def first(self, count: int) -> list[int]:
        """Return the lowest `count` members; fewer if there are fewer."""
        chosen: list[int] = []
        for number, bits in self._pages():
            if len(chosen) >= count:
                break
            chosen += _members(number, bits)[: count - len(chosen)].tolist()
        return chosen

    def runs(self, size: int, count: int) -> list[list[int]]:
        """Return the lowest `count` runs of `size` consecutive members, or nothing if there are fewer.

        A longer run is cut from its start. Members that belong to no run of `size` are passed over, a page at a time.
        """
        runs: list[list[int]] = []
        start, carried = 0, 0  # where the run that ended the last page began, and how many members it has
        for number, bits in self._pages() if count else ():
            first = number << SHIFT
            if carried and start + carried != first:
                carried = 0
            start, bits = first - carried, bits << carried | (1 << carried) - 1
            while begins := _starts_of_runs(bits, size):
                lowest = (begins & -begins).bit_length() - 1
                runs.append(list(range(start + lowest, start + lowest + size)))
                if len(runs) == count:
                    return runs
                bits &= ~((1 << size) - 1 << lowest)
            width = first + PAGE - start
            carried = width - (~bits & (1 << width) - 1).bit_length()
            start = first + PAGE - carried
        return []

    def to_list(self) -> list[int]:
        """Return all members."""
        every: list[int] = _joined([_members(number, bits) for number, bits in self._pages()]).tolist()
        return every

    def _pages(self) -> Iterator[tuple[int, int]]:
        bound = self._bound
        for number, bits in self._ready.pages_without(self._consumed):
            if bound is None or number < bound >> SHIFT:
                yield number, bits
                continue
            if number == bound >> SHIFT and (known := bits & (2 << (bound & PAGE - 1)) - 1):
                yield number, known
            return


def _starts_of_runs(bits: int, size: int) -> int:
    """Return the bits at which `size` ones in a row begin, in log2(size) steps."""
    length = 1
    while length < size and bits:
        step = min(length, size - length)
        bits &= bits >> step
        length += step
    return bits


def _as_array(members: Iterable[int] | Indexes) -> Indexes:
    return members if isinstance(members, np.ndarray) else np.array(list(members), np.int64)


def _bits_by_page(members: Iterable[int] | Indexes) -> Iterator[tuple[int, int]]:
    """Yield the number of each page that has members, and a bit for each."""
    indexes = np.sort(_as_array(members))
    if not indexes.size:
        return
    ends = np.flatnonzero(np.diff(indexes >> SHIFT)) + 1
    for here in np.split(indexes, ends):
        flags = np.zeros(PAGE, np.bool_)
        flags[here & PAGE - 1] = True
        packed = np.packbits(flags, bitorder="little").tobytes()
        yield int(here[0]) >> SHIFT, int.from_bytes(packed, "little")


def _flags(bits: int) -> npt.NDArray[np.bool_]:
    packed = np.frombuffer(bits.to_bytes(PAGE // 8, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little").view(np.bool_)


def _members(number: int, bits: int) -> Indexes:
    members: Indexes = np.flatnonzero(_flags(bits)) + (number << SHIFT)
    return members


def _joined(parts: list[Any]) -> Indexes:
    return np.concatenate(parts) if parts else _NONE
