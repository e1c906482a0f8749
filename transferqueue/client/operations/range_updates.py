"""What a publication does to each range of the newest version: it keeps its blocks, adds a difference, or writes it
whole.

- A range whose content is that of the newest version keeps its blocks. Its checksum says so (xxh3-64 of its bytes,
  whose padding is zeros).
- A range that changed gets a difference, if this session has the content before: that which it published last. So a
  session that publishes holds a copy of its own of what it published, in ordinary memory. The search for changes makes
  that copy what is published now; where that fails, it is taken back.
- A tensor in this process's memory is read where it lies, several at once in several threads. One on a device, or with
  gaps, is written into memory that all of a publication share, and read there.
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
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from transferqueue.client.memory.published_contents import PublishedContent, PublishedContents
from transferqueue.client.operations.stored_ranges import StoredRange
from transferqueue.client.operations.weight_blocks import NewTensor, delta_block
from transferqueue.limits import DELTA_BYTES_MIN, DELTA_TENSORS_MAX, DELTAS_MAX, ITEMS_MAX, PAGE_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import UNCHECKED
from transferqueue.storage.memory.delta import Delta, encode_delta, undo_delta
from transferqueue.storage.memory.parallel_copy import parallel_copy
from transferqueue.wire import messages as m


class KeptVersions(NamedTuple):
    """How many versions a channel keeps, and how many differences of a range in each."""

    versions: int = 2
    deltas: int = DELTAS_MAX


@dataclass(slots=True)
class RangeUpdate:
    """Blocks of the version before that a range keeps, and new ones: all of it, and differences. `made` is the
    difference that this session made, from the content with the checksum `before` to that with `after`."""

    name: str
    kept: list[m.BlockLocation] = field(default_factory=list)
    whole: NewTensor | None = None
    deltas: list[NewTensor] = field(default_factory=list)
    made: Delta | None = None
    before: int = UNCHECKED
    after: int = UNCHECKED


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
    contents: PublishedContents, writers: Sequence[NewTensor], newest: Newest, version: int, distrust: bool
) -> list[RangeUpdate]:
    """What each writer's range becomes. Reads all of their bytes. `distrust`: readers refused differences since these
    ranges were published."""
    if distrust:
        contents.held.clear()
    room, found = _Room(writers), dict[str, RangeUpdate]()

    def find(writer: NewTensor) -> None:
        found[writer.field.name] = _update(contents.held, writer, newest, version, room)

    here, elsewhere = list[NewTensor](), list[NewTensor]()
    for writer in writers:
        (elsewhere if writer.own_memory() is None else here).append(writer)
    for writer in elsewhere:  # one after the other, after what this thread's stream did to them
        find(writer)
    parallel_copy([partial(find, writer) for writer in here], sum(writer.nbytes for writer in here))
    updates = [found[writer.field.name] for writer in writers]
    kept = worth_keeping(updates, newest)
    for writer, update in zip(writers, updates, strict=True):
        old = newest.ranges.get(update.name)
        if update.name not in kept or (distrust and old is not None and old.deltas):
            update.kept, update.whole = [], writer
    return updates


class _Room:
    """Memory for the content of one writer at a time. It is made when the first needs it."""

    def __init__(self, writers: Sequence[NewTensor]) -> None:
        self._nbytes = max((writer.nbytes for writer in writers), default=0)
        self._memory: U8 | None = None

    def content(self, writer: NewTensor) -> U8 | None:
        """The content of its block, whose checksum is then known. None: this process has no memory for it."""
        own = writer.own_memory()
        if own is None:
            if self._memory is None:
                self._memory = _memory(self._nbytes)
            if self._memory is None:
                return None
            own = self._memory[: writer.nbytes]
            writer.write(own)
        writer.take_checksum(own)
        return own


def _update(
    held: dict[str, PublishedContent], writer: NewTensor, newest: Newest, version: int, room: _Room
) -> RangeUpdate:
    name, old = writer.field.name, newest.ranges.get(writer.field.name)
    whole = RangeUpdate(name, whole=writer)
    if not newest.deltas and (old is None or old.block.nbytes != writer.nbytes or old.field != writer.field):
        return whole
    content = room.content(writer) if newest.deltas or writer.sum == UNCHECKED else None
    if old is not None and old.is_same(writer.field, writer.sum):
        return RangeUpdate(name, kept=old.blocks)
    before = held.pop(name, None)
    if content is None or not newest.deltas or writer.nbytes < DELTA_BYTES_MIN:
        return whole
    if before is not None and old is not None and before.field == writer.field:
        update = _difference(before, writer, newest, old, version, content)
        if update is not None:
            held[name] = before._replace(sum=writer.sum)
            return update
    memory = before.memory if before is not None and before.memory.nbytes == writer.nbytes else _memory(writer.nbytes)
    if memory is not None:
        memory[:] = content
        held[name] = PublishedContent(writer.field, writer.sum, memory)
    return whole


def _memory(nbytes: int) -> U8 | None:
    """Memory for a copy of a range. None: this process has none, and its next version has no differences to it."""
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError:
        return None


def _difference(
    before: PublishedContent, writer: NewTensor, newest: Newest, old: StoredRange, version: int, content: U8
) -> RangeUpdate | None:
    """The difference between what this session published and the new content, if that is the newest version's. Then
    the memory of `before` has the new content."""
    if not old.is_same(before.field, before.sum):
        return None
    made = encode_delta(before.memory, content, writer.field.item_bytes)
    block = None if made is None else delta_block(old, version, writer.sum, made)
    if block is None:
        return None
    kept = newest.kept_chain(old, [block.nbytes])
    whole = writer if kept is None else None
    kept = newest.kept_history(old, 1) if kept is None else kept
    return RangeUpdate(writer.field.name, kept, whole, [block], made, before.sum, writer.sum)


def take_back(contents: PublishedContents, updates: Iterable[RangeUpdate]) -> None:
    """The updates were not published: make the copies what they were before the differences."""
    for update in updates:
        copy = contents.held.pop(update.name, None) if update.made is not None else None
        if copy is None or update.made is None:
            continue
        if copy.sum == update.after:
            undo_delta(copy.memory, update.made.data)
            copy = copy._replace(sum=update.before)
        contents.held[update.name] = copy
