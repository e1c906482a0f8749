"""A backing that keeps bytes as objects of a store: of another program's memory on many hosts, of a directory, of whatever has keys.

The law, beside that of `storage.backing`:

1. Objects never change. What was settled of a write is one, or several of about `OBJECT_BYTES`, under keys that are used once:
   a prefix that no other shard has, and a number. What lies where is known here alone, and so is each object's checksum.
2. The same bytes into the same place again are not stored again. Bytes of a place that were settled otherwise are replaced once
   the new ones are stored. A write that crosses the edge of an earlier one is refused: bytes are written once.
3. An object that the store does not have any more, or that is not what was stored, is lost, and so is the shard: whoever owns
   the backing is told once (`on_lost`), and nothing is given from then on. Where the store only does not answer, nothing is
   lost yet.
4. A write that is under way holds `OBJECT_BYTES` and one frame. Who reads holds the blocks that it named, and shares them with all
   who read the same: together no more than is lent, however slowly they read. Of what was read last `OBJECTS_KEPT_BYTES` stay.
5. What the store does not remove is removed with what is forgotten next, at `close`, or by a sweep for shards that died
   (`cluster.stores`).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

from transferqueue.errors import (
    Corruption,
    Disconnected,
    NotFound,
    OutOfMemory,
    PeerError,
    ShardLost,
    Unreachable,
    UsageError,
)
from transferqueue.limits import FRAME_BYTES, KIB, OBJECT_BYTES, OBJECTS_KEPT_BYTES, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import IncomingWrite, Range, Reader
from transferqueue.storage.memory.buffer_pool import Buffers
from transferqueue.storage.memory.checksum import checksum

_log: Final = logging.getLogger("transferqueue.shard")


class ObjectStore(Protocol):
    """What is asked of a store: `testing.conformance.stores` checks it. Called from any thread, one call at a time.

    Each call ends by a deadline of the store's own, and is `Unreachable` if that passes or the store fails otherwise.
    """

    def put(self, key: str, content: memoryview) -> None:
        """Keep these bytes (at least one) until they are removed. The memory is the caller's again. `OutOfMemory`: no room."""

    def get(self, wanted: Sequence[tuple[str, memoryview]]) -> None:
        """Fill each memory with the object of exactly its size. `NotFound` if one is not there any more, or has another size."""

    def remove(self, keys: Sequence[str]) -> None:
        """These are not needed any more, and their room is free. One that is not there: nothing."""

    def sweep(self, prefix: str) -> None:
        """Remove all whose keys begin so."""

    def close(self) -> None:
        """Let go of the store. What is in it stays. Again: nothing."""


class _Object(NamedTuple):
    place: Range
    key: str
    digest: int


class ObjectBacking:
    """A backing of at most `capacity` bytes in a store, which remains its owner's to close. prefix: of keys that nobody else uses."""

    path: str = ""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        capacity: int,
        *,
        object_bytes: int = OBJECT_BYTES,
        kept_bytes: int = OBJECTS_KEPT_BYTES,
    ) -> None:
        if capacity < 1:
            raise UsageError(f"a shard of {capacity} bytes is none; give a positive size such as '8GiB'")
        self.capacity = align(capacity, PAGE_BYTES)
        self.on_lost: Callable[[], object] = lambda: None
        """Called once when bytes turn out to be gone, by the thread that finds it."""
        self.lost: ShardLost | None = None
        """What was found to be gone."""
        self._store: Final = store
        self._prefix: Final = prefix
        self._object_bytes: Final = object_bytes
        self._lock: Final = threading.Lock()
        self._extents: dict[int, list[_Object]] = {}
        self._number = 0
        self.unremoved: list[str] = []
        """Keys that nobody needs, and the store did not remove yet."""
        self.buffers: Final = Buffers()
        self._read: Final = _Read(kept_bytes)
        self._closed = False

    def ensure(self, offset: int, nbytes: int) -> None:
        """A store promises no room ahead: where it has none a write is told."""
        if offset < 0 or nbytes < 1 or offset + nbytes > self.capacity:
            raise OutOfMemory(
                f"bytes {offset} to {offset + nbytes} are beyond the shard's {self.capacity}; ask for less"
            )

    def punch(self, offset: int, nbytes: int) -> None:
        """What was forgotten was removed then."""

    # ------------------------------------------------------------ writing

    def landing(self, place: Range) -> IncomingWrite:
        """Into memory of its own, and from there into the store."""
        with self._lock:
            for one in self._crossed(place):
                if one.place.offset < place.offset or one.place.end > place.end:
                    raise UsageError(
                        f"a write of bytes {place.offset} to {place.end} of extent {place.extent} refused: it crosses the edge of "
                        f"bytes {one.place.offset} to {one.place.end}, which were written before; write into a piece of its own"
                    )
        return _Gathering(self, place, self._object_bytes)

    def store(self, place: Range, content: U8) -> None:
        """Keep what belongs there. Errors as of `IncomingWrite.settle`."""
        digest = checksum(content)
        with self._lock:
            self._check()
            before = self._crossed(place)
            if [(one.place, one.digest) for one in before] == [(place, digest)]:
                return
            self._number += 1
            made = _Object(place, f"{self._prefix}{self._number}", digest)
            try:
                self._store.put(made.key, content.data)
            except PeerError:
                self.unremoved.append(made.key)  # who knows
                raise
            known = self._extents.setdefault(place.extent, [])
            for one in before:
                known.remove(one)
            insort(known, made)
            if before:
                self._read.forget(place.extent)
                self._remove([one.key for one in before])

    def _crossed(self, place: Range) -> list[_Object]:
        """Objects of which some byte is in this range, ascending."""
        known = self._extents.get(place.extent, []) if place.nbytes else []
        first = bisect_right(known, place.offset, key=lambda one: one.place.end)
        return known[first : bisect_left(known, place.end, key=lambda one: one.place.offset)]

    # ------------------------------------------------------------ reading

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        """Copies, shared by all who read the same at the same time."""
        with self._lock:
            self._check()
            found = {one: self._read.find(one) for one in ranges}
            missing = {one: self.buffers.take(one.nbytes) for one, memory in found.items() if memory is None}
            self._fetch(missing)
            for one, memory in missing.items():
                memory.flags.writeable = False
                self._read.add(one, memory)
        return [missing[one] if (shared := found[one]) is None else shared for one in ranges]

    def _fetch(self, missing: dict[Range, U8]) -> None:
        parts = [part for one, memory in missing.items() for part in self._parts(one, memory)]
        wanted = [
            (one, into if into.nbytes == one.place.nbytes else self.buffers.take(one.place.nbytes), at, into)
            for one, at, into in parts
        ]
        if not wanted:
            return
        try:
            self._store.get([(one.key, memory.data) for one, memory, _, _ in wanted])
        except NotFound as error:
            raise self._lose(str(error)) from error
        for one, memory, at, into in wanted:
            if checksum(memory) != one.digest:
                raise self._lose(f"object {one.key} came with other bytes than were stored")
            if memory is not into:
                into[:] = memory[at : at + into.nbytes]

    def _parts(self, wanted: Range, memory: U8) -> Iterator[tuple[_Object, int, U8]]:
        """Which objects the range is made of: each with where in it the part begins, and where that belongs."""
        if wanted.extent not in self._extents and wanted.nbytes:
            raise Disconnected(f"extent {wanted.extent} has nothing, or was freed since; ask for the rows again")
        reached = wanted.offset
        for one in self._crossed(wanted):
            if one.place.offset > reached:
                break
            end = min(one.place.end, wanted.end)
            yield one, reached - one.place.offset, memory[reached - wanted.offset : end - wanted.offset]
            reached = end
        if reached < wanted.end:
            raise Corruption(
                f"bytes {reached} to {wanted.end} of extent {wanted.extent} were never written; nobody has them"
            )

    # ------------------------------------------------------------ what is over

    def forget(self, extent: int) -> None:
        """Its objects are removed, or, while the store does not answer, later."""
        with self._lock:
            self._forget([extent])

    def keep(self, extents_to: int, extents: Collection[int]) -> None:
        """As `forget` of all others below."""
        with self._lock:
            self._forget([one for one in self._extents if one < extents_to and one not in extents])

    def close(self) -> None:
        """Remove all that was stored, if the store answers."""
        with self._lock:
            if not self._closed:
                self._forget(list(self._extents))
                self._closed = True

    def _forget(self, extents: Collection[int]) -> None:
        if self._closed:
            return
        for extent in extents:
            self._read.forget(extent)
        self._remove([one.key for extent in extents for one in self._extents.pop(extent, [])])

    def _remove(self, keys: list[str]) -> None:
        self.unremoved += keys
        if not self.unremoved:
            return
        try:
            self._store.remove(self.unremoved)
        except PeerError as error:
            _log.warning("%d objects that nobody needs are still in the store: %s", len(self.unremoved), error)
        else:
            self.unremoved = []

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost
        if self._closed:
            raise Unreachable("the shard's store was closed; ask for the rows again")

    def _lose(self, what: str) -> ShardLost:
        self.lost = ShardLost(f"{what}: the shard ends, and what lies in it is lost; ask for the rows again")
        self.on_lost()
        return self.lost


class _Gathering:
    """A write under way: bytes wait here until they match, and are stored an object at a time."""

    def __init__(self, objects: ObjectBacking, place: Range, object_bytes: int) -> None:
        self._objects, self._place = objects, place
        self._object_bytes = object_bytes
        self._memory = objects.buffers.take(min(place.nbytes, object_bytes + FRAME_BYTES))
        self._filled = self._stored = 0

    def fill(self, read: Reader) -> int:
        size = read(self._memory[self._filled :].data)
        self._filled += size
        return size

    def settle(self, *, last: bool) -> None:
        if self._filled < self._object_bytes and not last:
            return
        if self._filled:
            at = self._place.offset + self._stored
            self._objects.store(Range(self._place.extent, at, self._filled), self._memory[: self._filled])
        self._stored, self._filled = self._stored + self._filled, 0


class _Read:
    """Blocks that were read: those that somebody holds, and the last ones, which are held here."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._held: dict[int, WeakValueDictionary[Range, U8]] = {}
        self._kept: OrderedDict[Range, U8] = OrderedDict()
        self._bytes = 0

    def find(self, wanted: Range) -> U8 | None:
        held = self._held.get(wanted.extent)
        if wanted in self._kept:
            self._kept.move_to_end(wanted)
        return held.get(wanted) if held is not None else None

    def add(self, read: Range, memory: U8) -> None:
        self._held.setdefault(read.extent, WeakValueDictionary())[read] = self._kept[read] = memory
        self._bytes += _weight(read)
        while self._bytes > self._kept_bytes:
            self._bytes -= _weight(self._kept.popitem(last=False)[0])

    def forget(self, extent: int) -> None:
        for one in list(self._held.pop(extent, ())):
            if self._kept.pop(one, None) is not None:
                self._bytes -= _weight(one)


def _weight(read: Range) -> int:
    """What it takes to keep it: what stands around a small one is more than that."""
    return read.nbytes + KIB
