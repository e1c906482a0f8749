"""Checks that every backing of a shard must pass (`storage.memory.backing`), and the subject that they test.

Use them as the checks of generators (`conformance.generators`), with a `BackingSubject`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Protocol

import numpy as np

from transferqueue.errors import OutOfMemory, PeerError, TransferQueueError
from transferqueue.limits import FRAME_BYTES, PAGE_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import Backing, IncomingWrite, Range
from transferqueue.testing.conformance.report import require


class BackingSubject(Protocol):
    """A backing under test. Each check opens one of its own."""

    def open(self) -> AbstractContextManager[Backing]:
        """Open an empty backing of at least 64 MiB for the time of the context."""

    def used_bytes(self, backing: Backing) -> int:
        """The kept bytes, as the file system or the store reports them."""

    def lose(self, backing: Backing) -> None:
        """Destroy the kept bytes. `adapters.protocols.Unsupported` if that cannot be done."""


def content(nbytes: int, seed: int = 0) -> U8:
    """Bytes of which no two ranges are equal."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def write(backing: Backing, place: Range, data: U8) -> None:
    """Write `data`, as long as the place is, frame by frame as the bulk endpoint does."""
    begun = PendingWrite(backing, place, data)
    while not begun.done:
        begun.frame()


class PendingWrite:
    """A write under way."""

    def __init__(self, backing: Backing, place: Range, data: U8) -> None:
        self._write: IncomingWrite = backing.begin_write(place)
        self._left = data

    @property
    def done(self) -> bool:
        """Whether all frames of the write are settled."""
        return not len(self._left)

    def frame(self, *, settle: bool = True) -> None:
        """Write the next frame. Without settling it, the frame counts as damaged on its way."""
        frame, self._left = self._left[:FRAME_BYTES], self._left[FRAME_BYTES:]
        while len(frame):
            frame = frame[self._write.fill(_giving(frame)) :]
        if settle:
            self._write.commit(last=self.done)


def _giving(frame: U8) -> Callable[[memoryview], int]:
    def read(into: memoryview) -> int:
        size = min(len(into), len(frame), 100_000)  # as from a socket
        into[:size] = frame[:size].data
        return size

    return read


def _same(backing: Backing, place: Range, data: U8, rule: str) -> None:
    (data_read,) = backing.read([place])
    require(np.array_equal(data_read, data), rule, place)


# ---------------------------------------------------------------- the checks


def what_was_settled_is_read_to_the_byte(subject: BackingSubject) -> None:
    """Writes of any size, at any place, several in one extent, are read whole or in part, and all at once."""
    with subject.open() as backing:
        backing.ensure(0, 48 << 20)
        at, written = 0, []
        for number, nbytes in enumerate((1, 63, 64, PAGE_BYTES, FRAME_BYTES, FRAME_BYTES + 1, 20 * FRAME_BYTES + 7)):
            place, data = Range(7, at, nbytes), content(nbytes, number)
            write(backing, place, data)
            written.append((place, data))
            at += -(-nbytes // 64) * 64
        for place, data in written:
            _same(backing, place, data, "a read returns the written bytes")
        data_read = backing.read([place for place, _ in reversed(written)])
        alike = [
            np.array_equal(data_of_place, data)
            for data_of_place, (_, data) in zip(data_read, reversed(written), strict=True)
        ]
        require(all(alike), "several ranges are read in the order asked for", alike)
        place, data = written[-1]
        for low, high in ((0, 1), (5, 3 * FRAME_BYTES), (len(data) - 1, len(data)), (17, 17)):
            _same(backing, Range(7, place.offset + low, high - low), data[low:high], "a part of it is read")


def pieces_that_lie_together_are_read_as_one(subject: BackingSubject) -> None:
    """A range may span several writes."""
    with subject.open() as backing:
        backing.ensure(0, 1 << 20)
        data = content(3000)
        for low, high in ((1000, 2000), (0, 1000), (2000, 3000)):
            write(backing, Range(1, low, high - low), data[low:high])
        _same(backing, Range(1, 0, 3000), data, "three pieces are one range")
        _same(backing, Range(1, 900, 1200), data[900:2100], "and any part of them is")


def what_was_not_settled_counts_for_nothing(subject: BackingSubject) -> None:
    """After a write is abandoned at any point, another write into the same place succeeds."""
    with subject.open() as backing:
        backing.ensure(0, 32 << 20)
        place, data = Range(1, 0, 20 * FRAME_BYTES), content(20 * FRAME_BYTES, 1)
        given_up = PendingWrite(backing, place, content(20 * FRAME_BYTES, 2))
        for _ in range(3):
            given_up.frame()
        given_up.frame(settle=False)
        write(backing, place, data)
        _same(backing, place, data, "a read returns the later write")


def a_write_that_comes_twice_changes_nothing(subject: BackingSubject) -> None:
    """Reads of a whole write or a part of it, at once or late, since a frame may be under way for long."""
    with subject.open() as backing:
        backing.ensure(0, 32 << 20)
        place, data = Range(1, 0, 20 * FRAME_BYTES + 5), content(20 * FRAME_BYTES + 5)
        write(backing, place, data)
        used = subject.used_bytes(backing)
        write(backing, place, data)
        late = PendingWrite(backing, place, data)
        for _ in range(18):
            late.frame()
        late.frame(settle=False)
        _same(backing, place, data, "written bytes stay")
        require(subject.used_bytes(backing) <= used, "the same bytes take room once", subject.used_bytes(backing))


def writes_take_turns(subject: BackingSubject) -> None:
    """Several writes are under way at once, in one extent and in several."""
    with subject.open() as backing:
        backing.ensure(0, 48 << 20)
        places = [Range(1, 0, 3 << 20), Range(1, 3 << 20, 5 << 20), Range(2, 16 << 20, 4 << 20)]
        datas = [content(place.nbytes, seed) for seed, place in enumerate(places)]
        begun = [PendingWrite(backing, place, data) for place, data in zip(places, datas, strict=True)]
        while left := [write for write in begun if not write.done]:
            for write in left:
                write.frame()
        for place, data in zip(places, datas, strict=True):
            _same(backing, place, data, "each write is where it belongs")


def what_is_forgotten_shows_in_no_extent_after_it(subject: BackingSubject) -> None:
    """A place that is granted again under another number contains the new bytes, and never the old ones."""
    with subject.open() as backing:
        backing.ensure(0, 8 << 20)
        for extent in range(1, 6):
            data = content(4 << 20, extent)
            write(backing, Range(extent, 0, 4 << 20), data)
            _same(backing, Range(extent, 0, 4 << 20), data, "a read returns the last write")
            backing.forget(extent)
            backing.forget(extent)
        backing.forget(99)


def what_is_forgotten_is_free(subject: BackingSubject) -> None:
    """The backing takes room from the file system or store while bytes are kept, and returns it: with its pages, where
    it has pages."""
    with subject.open() as backing:
        before = subject.used_bytes(backing)
        for extent in range(1, 5):
            backing.ensure(extent << 22, 4 << 20)
            write(backing, Range(extent, extent << 22, 4 << 20), content(4 << 20, extent))
        full = subject.used_bytes(backing)
        require(full - before >= 16 << 20, "kept bytes take room", full - before)
        backing.read([Range(extent, extent << 22, 4 << 20) for extent in range(1, 5)])
        backing.forget(2)
        backing.punch(2 << 22, 4 << 20)
        left = subject.used_bytes(backing)
        require(left <= full - (4 << 20), "forgotten bytes take none", (full, left))
        backing.forget_others(4, [3])
        backing.punch(1 << 22, 4 << 20)
        left = subject.used_bytes(backing)
        require(left <= full - (8 << 20), "nor do bytes outside of those to keep", (full, left))
        for extent in (3, 4):
            _same(backing, Range(extent, extent << 22, 4 << 20), content(4 << 20, extent), "kept bytes stay")


def what_was_read_stays_as_it_is(subject: BackingSubject) -> None:
    """A read view stays unchanged while other places are written, read and forgotten."""
    with subject.open() as backing:
        backing.ensure(0, 48 << 20)
        place, data = Range(1, 0, 8 << 20), content(8 << 20)
        write(backing, place, data)
        (held,) = backing.read([place])
        (again,) = backing.read([place])
        for extent in range(2, 6):
            other = Range(extent, 16 << 20, 16 << 20)
            write(backing, other, content(16 << 20, extent))
            backing.read([other])
            backing.forget(extent)
        require(np.array_equal(held, data) and np.array_equal(again, data), "a held view does not change")


def orders_come_while_bytes_move(subject: BackingSubject) -> None:
    """One thread writes and reads, while another forgets earlier writes."""
    with subject.open() as backing:
        backing.ensure(0, 48 << 20)
        written = threading.Semaphore(0)
        failed: list[TransferQueueError] = []

        def forget() -> None:
            try:
                for extent in range(1, 33):
                    if not written.acquire(timeout=60):
                        return
                    backing.forget(extent)
                    backing.punch((extent % 32) << 20, 1 << 20)
            except TransferQueueError as error:
                failed.append(error)

        other = threading.Thread(target=forget)
        other.start()
        try:
            for extent in range(1, 33):
                place, data = Range(extent, (extent % 32) << 20, 1 << 20), content(1 << 20, extent)
                write(backing, place, data)
                _same(backing, place, data, "a read returns the written bytes")
                written.release()
        finally:
            other.join(timeout=120)
        require(not failed, "orders are carried out", failed)


def what_is_beyond_its_end_is_refused(subject: BackingSubject) -> None:
    """A backing refuses places beyond its end."""
    with subject.open() as backing:
        for offset, nbytes in ((backing.capacity, PAGE_BYTES), (-PAGE_BYTES, PAGE_BYTES), (0, backing.capacity + 1)):
            try:
                backing.ensure(offset, nbytes)
            except OutOfMemory:
                continue
            require(False, "room beyond its end is refused", (offset, nbytes))
        require(backing.capacity % PAGE_BYTES == 0, "it has whole pages", backing.capacity)


def it_is_closed_in_any_state(subject: BackingSubject) -> None:
    """Closing works with a write under way and bytes held, and twice. The kept bytes then take no room, where the
    backing owns it."""
    with subject.open() as backing:
        before = subject.used_bytes(backing)
        backing.ensure(0, 16 << 20)
        write(backing, Range(1, 0, 4 << 20), content(4 << 20))
        (held,) = backing.read([Range(1, 0, 4 << 20)])
        PendingWrite(backing, Range(2, 8 << 20, 4 << 20), content(4 << 20)).frame()
        backing.close()
        backing.close()
        require(bool(backing.path) or subject.used_bytes(backing) <= before, "its room is free")
        require(np.array_equal(held, content(4 << 20)), "a held view stays")


def what_is_lost_is_told(subject: BackingSubject) -> None:
    """Each read of lost bytes is an error of the peer, within a minute, and never returns other bytes."""
    with subject.open() as backing:
        backing.ensure(0, 8 << 20)
        place = Range(1, 0, 4 << 20)
        write(backing, place, content(4 << 20))
        subject.lose(backing)
        for _ in range(2):
            try:
                data_read = backing.read([place])
            except PeerError:
                continue
            require(False, "a read of lost bytes raises", data_read)


BACKING_CHECKS: Final[tuple[Callable[[BackingSubject], None], ...]] = (
    what_was_settled_is_read_to_the_byte,
    pieces_that_lie_together_are_read_as_one,
    what_was_not_settled_counts_for_nothing,
    a_write_that_comes_twice_changes_nothing,
    writes_take_turns,
    what_is_forgotten_shows_in_no_extent_after_it,
    what_is_forgotten_is_free,
    what_was_read_stays_as_it_is,
    orders_come_while_bytes_move,
    what_is_beyond_its_end_is_refused,
    it_is_closed_in_any_state,
    what_is_lost_is_told,
)
