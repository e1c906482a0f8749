"""A backing that stores bytes as objects in a key-value store: the memory of many hosts, a directory, or any other
store with keys.

These rules add to those of `storage.memory.backing`:

1. Objects never change. A committed write is one object, or several of about `OBJECT_BYTES`. Each has a key that is
   used once: a prefix that no other shard has, and a number. Only this process knows which object holds which bytes,
   and each object's checksum.
2. A write that repeats the same bytes at the same place is not stored again. Other bytes at the same place replace the
   old object after the new one is stored. A write that crosses the edge of an earlier write is refused.
3. If the store has lost an object, or returns other bytes, the shard is lost: the backing calls `on_lost` once, and
   raises `ShardLost` from then on. If the store only does not answer, nothing is lost yet.
4. A write in progress holds `OBJECT_BYTES` and one frame. A reader holds the blocks that it asked for, and shares them
   with all readers of the same blocks, so all readers together hold no more than the shard's content.
   `OBJECTS_KEPT_BYTES` of the blocks read last stay cached.
5. Objects that the store fails to remove are removed with the next `forget`, at `close`, or by the sweep for dead
   shards (`cluster.stores`).
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
from transferqueue.storage.memory.buffer_pool import BufferPool
from transferqueue.storage.memory.checksum import checksum

_log: Final = logging.getLogger("transferqueue.shard")


class ObjectStore(Protocol):
    """A key-value store of bytes; `testing.conformance.stores` checks an implementation. Called from any thread, one
    call at a time.

    Each call must end by a deadline of the store's own, and raise `Unreachable` if that passes or the store fails
    otherwise.
    """

    def put(self, key: str, content: memoryview) -> None:
        """Store these bytes (at least one) under the key. The caller may reuse the memory afterwards. `OutOfMemory` if
        there is no room."""

    def get(self, wanted: Sequence[tuple[str, memoryview]]) -> None:
        """Fill each memory with the object of its key. `NotFound` if an object is missing, or does not have the size of
        the memory."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these objects. Missing keys are ignored."""

    def sweep(self, prefix: str) -> None:
        """Remove all objects whose keys begin with `prefix`."""

    def close(self) -> None:
        """Disconnect from the store. Its objects stay. A second call does nothing."""


class _Object(NamedTuple):
    place: Range
    key: str
    digest: int


class ObjectBacking:
    """A backing of at most `capacity` bytes in a store, which the caller closes. No other shard may use the `prefix` of
    its keys."""

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
            raise UsageError(f"a shard of {capacity} bytes is invalid; give a positive size such as '8GiB'")
        self.capacity = align(capacity, PAGE_BYTES)
        self.on_lost: Callable[[], object] = lambda: None
        """Called once when bytes are lost, by the thread that notices it."""
        self.lost: ShardLost | None = None
        """The error of the loss, once bytes are lost."""
        self._store: Final = store
        self._prefix: Final = prefix
        self._object_bytes: Final = object_bytes
        self._lock: Final = threading.Lock()
        self._extents: dict[int, list[_Object]] = {}
        self._number = 0
        self.unremoved: list[str] = []
        """Keys that are no longer needed, but that the store has not removed yet."""
        self.buffers: Final = BufferPool()
        self._read: Final = _ReadCache(kept_bytes)
        self._closed = False

    def ensure(self, offset: int, nbytes: int) -> None:
        """Checks the range only: a store reserves no room in advance. A write fails if there is none."""
        if offset < 0 or nbytes < 1 or offset + nbytes > self.capacity:
            raise OutOfMemory(
                f"bytes {offset} to {offset + nbytes} are beyond the shard's {self.capacity}; ask for less"
            )

    def punch(self, offset: int, nbytes: int) -> None:
        """Does nothing: `forget` has removed the objects."""

    # ------------------------------------------------------------ writing

    def begin_write(self, place: Range) -> IncomingWrite:
        """A write into a buffer, and from there into the store."""
        with self._lock:
            for existing in self._overlapping(place):
                if existing.place.offset < place.offset or existing.place.end > place.end:
                    raise UsageError(
                        f"a write of bytes {place.offset} to {place.end} of extent {place.extent} refused: it crosses "
                        f"the edge of bytes {existing.place.offset} to {existing.place.end}, which were written "
                        "before; write into another piece"
                    )
        return _ObjectWrite(self, place, self._object_bytes)

    def store(self, place: Range, content: U8) -> None:
        """Store the content of this range as an object. Errors as in `IncomingWrite.commit`."""
        digest = checksum(content)
        with self._lock:
            self._check()
            replaced = self._overlapping(place)
            if [(old.place, old.digest) for old in replaced] == [(place, digest)]:
                return
            self._number += 1
            stored = _Object(place, f"{self._prefix}{self._number}", digest)
            try:
                self._store.put(stored.key, content.data)
            except PeerError:
                self.unremoved.append(stored.key)  # the store may have it
                raise
            objects = self._extents.setdefault(place.extent, [])
            for old in replaced:
                objects.remove(old)
            insort(objects, stored)
            if replaced:
                self._read.forget(place.extent)
                self._remove([old.key for old in replaced])

    def _overlapping(self, place: Range) -> list[_Object]:
        """The objects that have a byte in this range, ascending."""
        objects = self._extents.get(place.extent, []) if place.nbytes else []
        first = bisect_right(objects, place.offset, key=lambda each: each.place.end)
        return objects[first : bisect_left(objects, place.end, key=lambda each: each.place.offset)]

    # ------------------------------------------------------------ reading

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        """Copies, which all concurrent readers of a range share."""
        with self._lock:
            self._check()
            cached = {wanted: self._read.find(wanted) for wanted in ranges}
            missing = {wanted: self.buffers.take(wanted.nbytes) for wanted, memory in cached.items() if memory is None}
            self._fetch(missing)
            for wanted, memory in missing.items():
                memory.flags.writeable = False
                self._read.add(wanted, memory)
        return [missing[wanted] if (shared := cached[wanted]) is None else shared for wanted in ranges]

    def _fetch(self, missing: dict[Range, U8]) -> None:
        parts = [part for wanted, memory in missing.items() for part in self._parts(wanted, memory)]
        fetches = [
            (stored, into if into.nbytes == stored.place.nbytes else self.buffers.take(stored.place.nbytes), at, into)
            for stored, at, into in parts
        ]
        if not fetches:
            return
        try:
            self._store.get([(stored.key, memory.data) for stored, memory, _, _ in fetches])
        except NotFound as error:
            raise self._lose(str(error)) from error
        for stored, memory, at, into in fetches:
            if checksum(memory) != stored.digest:
                raise self._lose(f"object {stored.key} came with other bytes than were stored")
            if memory is not into:
                into[:] = memory[at : at + into.nbytes]

    def _parts(self, wanted: Range, memory: U8) -> Iterator[tuple[_Object, int, U8]]:
        """The objects that make up a range: each with the offset of the part inside it, and the memory for that
        part."""
        if wanted.extent not in self._extents and wanted.nbytes:
            raise Disconnected(f"extent {wanted.extent} has no bytes, or was freed since; ask for the rows again")
        reached = wanted.offset
        for stored in self._overlapping(wanted):
            if stored.place.offset > reached:
                break
            end = min(stored.place.end, wanted.end)
            yield stored, reached - stored.place.offset, memory[reached - wanted.offset : end - wanted.offset]
            reached = end
        if reached < wanted.end:
            raise Corruption(
                f"bytes {reached} to {wanted.end} of extent {wanted.extent} were never written; write them first"
            )

    # ------------------------------------------------------------ removal

    def forget(self, extent: int) -> None:
        """Remove the objects of this extent; later, if the store does not answer."""
        with self._lock:
            self._forget([extent])

    def forget_others(self, extents_to: int, extents: Collection[int]) -> None:
        """Forget all extents with ids below `extents_to` except these."""
        with self._lock:
            self._forget([extent for extent in self._extents if extent < extents_to and extent not in extents])

    def close(self) -> None:
        """Remove all objects of this backing, if the store answers."""
        with self._lock:
            if not self._closed:
                self._forget(list(self._extents))
                self._closed = True

    def _forget(self, extents: Collection[int]) -> None:
        if self._closed:
            return
        for extent in extents:
            self._read.forget(extent)
        self._remove([stored.key for extent in extents for stored in self._extents.pop(extent, [])])

    def _remove(self, keys: list[str]) -> None:
        self.unremoved += keys
        if not self.unremoved:
            return
        try:
            self._store.remove(self.unremoved)
        except PeerError as error:
            _log.warning(
                "the store did not remove %d objects that are no longer needed: %s", len(self.unremoved), error
            )
        else:
            self.unremoved = []

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost
        if self._closed:
            raise Unreachable("the shard's store was closed; ask for the rows again")

    def _lose(self, what: str) -> ShardLost:
        self.lost = ShardLost(f"{what}: the shard ends, and its rows are lost; ask for the rows again")
        self.on_lost()
        return self.lost


class _ObjectWrite:
    """A write in progress: bytes are buffered until their checksums match, and stored an object at a time."""

    def __init__(self, objects: ObjectBacking, place: Range, object_bytes: int) -> None:
        self._objects, self._place = objects, place
        self._object_bytes = object_bytes
        self._memory = objects.buffers.take(min(place.nbytes, object_bytes + FRAME_BYTES))
        self._filled = self._stored = 0

    def fill(self, read: Reader) -> int:
        size = read(self._memory[self._filled :].data)
        self._filled += size
        return size

    def commit(self, *, last: bool) -> None:
        if self._filled < self._object_bytes and not last:
            return
        if self._filled:
            at = self._place.offset + self._stored
            self._objects.store(Range(self._place.extent, at, self._filled), self._memory[: self._filled])
        self._stored, self._filled = self._stored + self._filled, 0


class _ReadCache:
    """The blocks that readers hold, and those that were read last."""

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
        for wanted in list(self._held.pop(extent, ())):
            if self._kept.pop(wanted, None) is not None:
                self._bytes -= _weight(wanted)


def _weight(read: Range) -> int:
    """The cost of caching a block: a small one costs more than its bytes."""
    return read.nbytes + KIB
