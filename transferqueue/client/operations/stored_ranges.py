"""What a version has of each tensor: one way to describe it, for publishers, ranks, relays and readers. Pure.

A *range* is a tensor, or a slice of one: a field that a version has whole, in one block. Beside it the version may have
differences of that field (`TensorDelta`), which lead from one content to the next, up to that of the version. Contents
are known by their checksums, so it does not matter which version, channel or host they came from:

1. The whole field has one of the contents. The differences after it give the version's.
2. Whoever has one of the contents needs only the differences after that one.
3. A content that is none of these is of no use: the whole field and the differences after it are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from transferqueue.errors import Corruption
from transferqueue.schema import Field
from transferqueue.storage.memory.checksum import UNCHECKED
from transferqueue.wire import messages as m


class StoredDelta(NamedTuple):
    """A difference, and its block."""

    terms: m.TensorDelta
    field: Field
    block: m.BlockLocation

    def bytes_of(self, sections: range) -> tuple[int, int]:
        """Where these successive sections begin and end in the block. `Corruption` if it has fewer."""
        ends = self.terms.ends
        if len(ends) < sections.stop:
            raise Corruption(f"field {self.field.name} has {len(ends)} sections, not {sections.stop}; publish it whole")
        return ends[sections.start - 1] if sections.start else 0, ends[sections.stop - 1]


class StoredRange:
    """A range of a version: its field, the block with all of it, the slice that it is (None: a tensor), and the
    differences in the order of their versions."""

    __slots__ = ("block", "deltas", "field", "slice")

    def __init__(self, field: Field, block: m.BlockLocation, of: m.TensorSlice | None = None) -> None:
        self.field, self.block, self.slice = field, block, of
        self.deltas: list[StoredDelta] = []

    @property
    def tensor(self) -> str:
        """The tensor that it is, or is a slice of."""
        return self.field.name if self.slice is None else self.slice.tensor

    @property
    def sum(self) -> int:
        """The checksum of the version's content."""
        return self.deltas[-1].terms.after if self.deltas else self.block.checksum

    @property
    def blocks(self) -> list[m.BlockLocation]:
        """The block with all of it, and those of the differences."""
        return [self.block, *(delta.block for delta in self.deltas)]

    def after(self, content: int) -> list[StoredDelta] | None:
        """The differences that make the content with this checksum into the version's; None: it is not one of
        those between which they lead."""
        if content == UNCHECKED:
            return None
        if content == self.sum:
            return []
        starts = [at for at, delta in enumerate(self.deltas) if delta.terms.before == content]
        return self.deltas[starts[-1] :] if starts else None

    @property
    def after_whole(self) -> list[StoredDelta]:
        """The differences after the content of the block."""
        if not self.deltas:
            return []
        rest = self.after(self.block.checksum)
        if rest is None:
            raise Corruption(
                f'field "{self.field.name}" has differences of other contents than that of its block; publish it whole'
            )
        return rest

    def is_same(self, field: Field, content: int) -> bool:
        """Whether the version has this content of this field."""
        return content == self.sum != UNCHECKED and field == self.field


def stored_ranges(
    fields: Iterable[Field], blocks: Sequence[m.BlockLocation], ranges: Iterable[m.TensorRange]
) -> dict[str, StoredRange]:
    """The ranges of a version, or of parts of one, by their fields, in the order of `fields`."""
    every = list(ranges)
    slices = {one.field: one for one in m.slices_of(every)}
    terms = {one.field: one for one in m.deltas_of(every)}
    places = {name: block for block in blocks for name in block.fields}
    found: dict[str, StoredRange] = {}
    deltas = list[StoredDelta]()
    for field in fields:
        name = field.name
        if name in terms:
            deltas.append(StoredDelta(terms[name], field, places[name]))
        else:
            found[name] = StoredRange(field, places[name], slices.get(name))
    for delta in sorted(deltas, key=lambda delta: delta.terms.version):
        found[delta.terms.of].deltas.append(delta)
    return found
