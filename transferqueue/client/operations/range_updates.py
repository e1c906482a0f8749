"""What a publication does to each range of the newest version: it keeps its blocks, adds a difference, or writes it
whole.

- A range whose content is that of the newest version keeps its blocks. Its checksum says so (xxh3-64 of its bytes,
  whose padding is zeros).
- A range that changed gets a difference, if this session has the content before: that which it published last. So a
  session that publishes holds a copy of its own of what it published, in ordinary memory.
- It is written whole if it is new or small, if nearly all of it changed, or if its differences would be more than the
  channel allows, or have more bytes than the whole range. A changed range then gets both: readers that have the content
  before take the difference, so along links whole ranges cross only for late readers.
- Differences before the whole field are kept for readers that are behind, up to the same bounds.
- Memory is used again by extents, not by blocks. So of an extent in which less than half would be kept, nothing is: its
  ranges are written whole again, and a version never holds more than twice its bytes. Whole ranges and differences lie
  in extents of their own, since whole ranges end together, and differences with those of other versions. What lost: an
  extent a tensor, which asks the server once for each.
- After a reader reported a difference with another result than it promised, this session's copies are not used again,
  and no range keeps differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from transferqueue.client.memory.published_contents import PublishedContent, PublishedContents
from transferqueue.client.operations.stored_ranges import StoredRange
from transferqueue.client.operations.weight_blocks import NewTensor, delta_block
from transferqueue.limits import DELTA_BYTES_MIN, DELTA_TENSORS_MAX, DELTAS_MAX, ITEMS_MAX, PAGE_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import UNCHECKED
from transferqueue.storage.memory.delta import apply_delta, encode_delta
from transferqueue.wire import messages as m


class KeptVersions(NamedTuple):
    """How many versions a channel keeps, and how many differences of a range in each."""

    versions: int = 2
    deltas: int = DELTAS_MAX


@dataclass(slots=True)
class RangeUpdate:
    """Blocks of the version before that a range keeps, and new ones: all of it, and differences. `delta_bytes` is the
    difference that this session made, and `sum` the checksum of its result."""

    name: str
    kept: list[m.BlockLocation] = field(default_factory=list)
    whole: NewTensor | None = None
    deltas: list[NewTensor] = field(default_factory=list)
    delta_bytes: U8 | None = None
    sum: int = UNCHECKED

    @property
    def nbytes(self) -> int:
        """Bytes of the difference that this session made."""
        return 0 if self.delta_bytes is None else self.delta_bytes.nbytes


class Newest(NamedTuple):
    """The newest version, as the ranges of the next one build on it, with the size of each extent (0: more may be
    written there). `deltas`: how many of them a range may have."""

    ranges: Mapping[str, StoredRange]
    extents: Mapping[int, int]
    deltas: int

    @classmethod
    def of(cls, ranges: Mapping[str, StoredRange], extents: Mapping[int, int], deltas: int, new: int) -> Newest:
        """`deltas` as the channel allows it, and messages with so many ranges and `new` ones."""
        fits = ITEMS_MAX // max(len(ranges), new, 1) - 1
        return cls(ranges, extents, max(0, min(deltas, fits)) if new <= DELTA_TENSORS_MAX else 0)

    def kept_chain(self, old: StoredRange, new: Sequence[int]) -> list[m.BlockLocation] | None:
        """The blocks of the range that stay beside new differences of these sizes. None: it has to be written whole."""
        rest = old.after_whole
        room = self.deltas - len(new) - len(rest)
        if room < 0 or sum(new) + _bytes(delta.block for delta in rest) > old.block.nbytes:
            return None
        earlier = [delta.block for delta in old.deltas[: len(old.deltas) - len(rest)]]
        return [old.block, *_last(earlier, room, old.block.nbytes), *(delta.block for delta in rest)]

    def kept_history(self, old: StoredRange, new: int) -> list[m.BlockLocation]:
        """The differences that stay where the range is written whole beside so many new ones."""
        return _last([delta.block for delta in old.deltas], self.deltas - new, old.block.nbytes)


def _bytes(blocks: Iterable[m.BlockLocation]) -> int:
    return sum(block.nbytes for block in blocks)


def _last(blocks: Sequence[m.BlockLocation], count: int, nbytes: int) -> list[m.BlockLocation]:
    """The last `count` blocks or fewer, which have `nbytes` together at most."""
    last = list(blocks[len(blocks) - count :] if 0 < count < len(blocks) else blocks if count > 0 else ())
    while last and _bytes(last) > nbytes:
        del last[0]
    return last


def worth_keeping(updates: Sequence[RangeUpdate], newest: Newest) -> set[str]:
    """The ranges whose kept blocks all lie in extents of which at least half is kept, but for the last page of each,
    which may be empty. Ranges that have no update are kept."""
    kept = {update.name: update.kept for update in updates if update.kept}
    named = {update.name for update in updates}
    others = [block for name, old in newest.ranges.items() if name not in named for block in old.blocks]
    while True:
        sizes: Counter[int] = Counter()
        for block in chain(others, *kept.values()):
            sizes[block.extent] += block.nbytes
        poor = {extent for extent, nbytes in sizes.items() if 2 * nbytes <= newest.extents[extent] - PAGE_BYTES}
        left = {name: blocks for name, blocks in kept.items() if poor.isdisjoint(block.extent for block in blocks)}
        if len(left) == len(kept):
            return set(kept)
        kept = left


def plan_updates(
    contents: PublishedContents, writers: Sequence[NewTensor], newest: Newest, version: int, refused: int
) -> list[RangeUpdate]:
    """What each writer's range becomes. Reads all of their bytes. `refused`: differences that readers refused."""
    distrust, contents.refused = refused > contents.refused, refused
    if distrust:
        contents.held.clear()
    room = _memory(max((writer.nbytes for writer in writers), default=0))
    if room is None:
        return [RangeUpdate(writer.field.name, whole=writer) for writer in writers]
    updates = [_update(contents.held, writer, newest, version, room[: writer.nbytes]) for writer in writers]
    kept = worth_keeping(updates, newest)
    for writer, update in zip(writers, updates, strict=True):
        old = newest.ranges.get(update.name)
        if update.name not in kept or (distrust and old is not None and old.deltas):
            update.kept, update.whole = [], writer
    return updates


def _update(
    held: dict[str, PublishedContent], writer: NewTensor, newest: Newest, version: int, room: U8
) -> RangeUpdate:
    name, old = writer.field.name, newest.ranges.get(writer.field.name)
    if not newest.deltas and (old is None or old.block.nbytes != writer.nbytes or old.field != writer.field):
        return RangeUpdate(name, whole=writer)
    if newest.deltas or writer.sum == UNCHECKED:
        writer.write(room)
    if old is not None and old.is_same(writer.field, writer.sum):
        return RangeUpdate(name, kept=old.blocks)
    before = held.pop(name, None)
    if not newest.deltas or writer.nbytes < DELTA_BYTES_MIN:
        return RangeUpdate(name, whole=writer)
    if before is not None and old is not None and before.field == writer.field:
        update = _difference(before, writer, newest, old, version, room)
        if update is not None:
            held[name] = before
            return update
    memory = before.memory if before is not None and before.memory.nbytes == len(room) else _memory(len(room))
    if memory is not None:
        memory[:] = room
        held[name] = PublishedContent(writer.field, writer.sum, memory)
    return RangeUpdate(name, whole=writer)


def _memory(nbytes: int) -> U8 | None:
    """Memory for a copy of a range. None: this process has none, and its next version has no differences to it."""
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError:
        return None


def _difference(
    before: PublishedContent, writer: NewTensor, newest: Newest, old: StoredRange, version: int, room: U8
) -> RangeUpdate | None:
    """The difference between what this session published and the new content, if that is the newest version's."""
    if not old.is_same(before.field, before.sum):
        return None
    delta = encode_delta(before.memory, room, writer.field.item_bytes)
    block = None if delta is None else delta_block(old, version, writer.sum, delta)
    if block is None or delta is None:
        return None
    kept = newest.kept_chain(old, [block.nbytes])
    whole = writer if kept is None else None
    kept = newest.kept_history(old, 1) if kept is None else kept
    return RangeUpdate(writer.field.name, kept, whole, [block], delta, writer.sum)


def note_published(contents: PublishedContents, updates: Iterable[RangeUpdate]) -> None:
    """The updates are in the newest version: make the copies what it has."""
    for update in updates:
        before = contents.held.pop(update.name, None)
        if before is None:
            continue
        if update.delta_bytes is not None:
            apply_delta(before.memory, update.delta_bytes)
            before = before._replace(sum=update.sum)
        contents.held[update.name] = before
