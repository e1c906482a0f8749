"""The file of spilled blocks, and the thread that writes and reads it.

1. The file has no name, so nothing of it outlives the process, however that ends. It is sparse, and takes at most as
   much of the disk as the operator allows.
2. Space is reserved before it is written: a full disk is an error of that write. The space of freed blocks is used
   again. It returns to the disk after the thread has been idle for `RETURN_AFTER_S`, in long pieces: a file system
   takes a millisecond for each. The file is longer than its share of the disk, so that a large block finds a place
   although the free space lies in small pieces: those return first.
3. Only the thread uses the file. It writes from the arena and reads into the arena, at places that the loop chose,
   which no other thread writes meanwhile. It answers each job once, in order.
4. A block is written with its checksum (computed here if the client computed none). It is read back only if its bytes
   still match.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np

from transferqueue.errors import OutOfMemory, UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import KIB, MIB, PAGE_BYTES, SPILL_BYTES_MIN
from transferqueue.schema import align
from transferqueue.server.spill.spill_jobs import (
    BlocksLoaded,
    BlocksWritten,
    BlockToLoad,
    BlockToWrite,
    SpillAnswers,
    SpilledBlock,
)
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.checksum import UNCHECKED, checksum
from transferqueue.storage.memory.room import room
from transferqueue.transport.system.file_system import memory_file_system
from transferqueue.transport.system.private_files import private_directory

_log: Final = logging.getLogger("transferqueue.server")
_CAUSE_CHARS: Final = 200
"""An answer has at most this much of an error's text."""
LENGTHS: Final = 4
"""The file is this many times as long as its share of the disk."""
LENGTH_MORE_MAX: Final = 1 << 40
"""The file is at most this much longer: file systems limit the length of files."""
RETURN_AFTER_S: Final = 1.0
RETURN_BYTES: Final = 64 * MIB
"""Freed space returns to the disk in pieces of this size: a few milliseconds, for which a job may have to wait."""
RETURN_BYTES_MIN: Final = 256 * KIB
"""Shorter free pieces stay with the file until their neighbours are free too."""
STOP_S: Final = 10.0
"""A stop waits this long for the running job."""


_Answer = TypeVar("_Answer")


class SpillPolicy(NamedTuple):
    """The destination of cold blocks when the arena fills: a directory on a disk, and the most bytes there."""

    directory: Path
    nbytes: int


def spill_policy(directory: Path | None, nbytes: int | None) -> SpillPolicy | None:
    """The policy of these options; None if neither is given. `UsageError` if one is missing."""
    if directory is None and nbytes is None:
        return None
    if directory is None or nbytes is None:
        raise UsageError(
            f"spill_dir {directory and str(directory)!r} and spill_bytes {nbytes} do not go together: one is the "
            "directory of cold blocks, the other their most bytes; give both --spill-dir and --spill-bytes, or neither"
        )
    return SpillPolicy(directory.absolute(), nbytes)


class _Job(NamedTuple):
    """A job of the thread, and its answer if it fails."""

    run: Callable[[], object]
    failed: Callable[[str], object]


class SpillFile:
    """The file of one server, of at most `nbytes`, in `directory`.

    Args:
        arena: maps the arena for reading and writing, once.
        stir: the thread calls it after each answer.

    Raises:
        UsageError: the directory cannot be used, or has less free space than `nbytes`.
    """

    def __init__(self, directory: Path, nbytes: int, arena: Callable[[], U8], stir: Callable[[], object]) -> None:
        private_directory(directory, "spill directory")
        _check_space(directory, nbytes)
        if kind := memory_file_system(directory):
            _log.warning(
                "spill directory %s is in memory (%s): spilling there frees no memory; name a directory on a disk",
                directory,
                kind,
            )
        self._directory: Final = directory
        self._nbytes: Final = nbytes // PAGE_BYTES * PAGE_BYTES
        self._allocator: Final = Allocator(nbytes + min((LENGTHS - 1) * nbytes, LENGTH_MORE_MAX))
        self._space: Final = _unnamed(directory, self._allocator.capacity)
        self._fd = os.open(self._space.path, os.O_RDWR | os.O_CLOEXEC)
        Path(self._space.path).unlink()
        self._can_return = True
        """Whether the file system took back freed space at the last try."""
        self._arena: U8 | None = arena()
        self._stir: Final = stir
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[BlocksWritten] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[BlocksLoaded] = queue.SimpleQueue()
        self._thread: Final = threading.Thread(target=self._work, name="transferqueue spill", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the loop's side

    def write(self, job: int, blocks: Sequence[BlockToWrite]) -> None:
        """Have these blocks written. The answer names `job`."""
        put = partial(self._answer, self._written)
        self._jobs.put(_Job(lambda: put(self._write(job, blocks)), lambda why: put(BlocksWritten(job, [], why))))

    def load(self, job: int, blocks: Sequence[BlockToLoad]) -> None:
        """Have these blocks read. The answer names `job`."""
        put, numbers = partial(self._answer, self._loaded), [block.place.block for block in blocks]
        self._jobs.put(
            _Job(
                lambda: put(self._load(job, blocks)),
                lambda why: put(BlocksLoaded(job, [], dict.fromkeys(numbers, why), [])),
            )
        )

    def free(self, places: Iterable[SpilledBlock]) -> None:
        """Have the space of these blocks returned to the disk, after all earlier jobs."""
        kept = list(places)
        self._jobs.put(_Job(lambda: self._free(kept), lambda why: None))

    def answers(self) -> SpillAnswers:
        """The answers since the last call."""
        return SpillAnswers(_taken(self._written), _taken(self._loaded))

    def stop(self) -> None:
        """Close the file after the running job; later jobs are not carried out. The system frees its space. A disk that
        does not answer for `STOP_S` is left to the end of the process."""
        if self._arena is None:
            return
        with suppress(queue.Empty):  # the thread takes jobs at the same time
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            _log.warning("the disk of %s has not answered for %g s; its file is left open", self._directory, STOP_S)
            return
        self._arena = None
        os.close(self._fd)
        self._space.close()

    def read(self, place: SpilledBlock) -> U8:
        """The bytes of a block, for another thread, unchecked. OSError if the disk does not give them."""
        content = np.empty(place.nbytes, np.uint8)
        _read(self._fd, content, place.offset)
        return content

    # ------------------------------------------------------------ the thread's side

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job.run()
            except Exception as error:  # noqa: BLE001  (logged with its cause, and answered)
                _log.exception("a job of the spill thread failed")
                job.failed(f"defect of the server: {error!r}"[:_CAUSE_CHARS])

    def _next_job(self) -> _Job | None:
        """The next job. While there is none, freed space returns to the disk."""
        wait_s = RETURN_AFTER_S
        while self._can_return and self._allocator.largest_warm[1] >= RETURN_BYTES_MIN:
            try:
                return self._jobs.get(timeout=wait_s)
            except queue.Empty:
                self._return_space()
                wait_s = 0.0
        return self._jobs.get()

    def _return_space(self) -> None:
        offset, nbytes = self._allocator.largest_warm
        piece, taken = min(nbytes, RETURN_BYTES), self._space.backed
        try:
            self._space.punch(offset, piece)
        except OSError as error:
            _log.warning("the disk of %s did not take back %d freed bytes: %s", self._directory, piece, error)
        self._can_return = self._space.backed < taken
        if self._can_return:
            self._allocator.chill(offset, piece)

    def _answer(self, answers: queue.SimpleQueue[_Answer], answer: _Answer) -> None:
        answers.put(answer)
        self._stir()

    def _write(self, job: int, blocks: Sequence[BlockToWrite]) -> BlocksWritten:
        places: list[SpilledBlock] = []
        try:
            for block in blocks:
                places.append(self._write_block(block))  # noqa: PERF401  (if one fails, those before it are freed)
        except (OSError, OutOfMemory) as error:
            self._free(places)
            return BlocksWritten(job, [], str(error)[:_CAUSE_CHARS])
        return BlocksWritten(job, places, "")

    def _write_block(self, block: BlockToWrite) -> SpilledBlock:
        nbytes = max(block.nbytes, 1)
        fits = self._allocator.used + align(nbytes, PAGE_BYTES) <= self._nbytes
        offset = self._allocator.allocate(nbytes) if fits else None
        if offset is None:
            raise OutOfMemory(
                f"the spilled blocks take {self._allocator.used:,} of the {self._nbytes:,} bytes that --spill-bytes "
                f"allows, and {nbytes:,} more are wanted; allow more, or consume rows"
            )
        with OnFailure(self._free_unwritten, offset, nbytes):
            self._keep_bound()
            self._reserve(offset, nbytes)
            content = self._bytes(block.offset, block.nbytes)
            known = block.checksum if block.checksum != UNCHECKED else checksum(content)
            _write(self._fd, content, offset)
        return SpilledBlock(block.block, offset, block.nbytes, known)

    def _free_unwritten(self, offset: int, nbytes: int) -> None:
        """Free a place of which perhaps only a part was reserved."""
        self._allocator.free(offset, nbytes)
        end = offset + align(nbytes, PAGE_BYTES)
        for start, after in [*self._space.backed_runs(offset, end), (end, end)]:
            if start > offset:
                self._allocator.chill(offset, start - offset)
            offset = after

    def _keep_bound(self) -> None:
        """Return freed space to the disk, if the file would exceed its share."""
        while self._allocator.warm and self._allocator.used + self._allocator.warm > self._nbytes:
            if not self._can_return:
                raise OutOfMemory(
                    f"the free space of the {self._nbytes:,} bytes that --spill-bytes allows lies in small pieces, and "
                    f"the disk of {self._directory} takes none back"
                )
            self._return_space()

    def _reserve(self, offset: int, nbytes: int) -> None:
        try:
            self._space.ensure(offset, nbytes)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"the disk of {self._directory} has no room for {nbytes:,} bytes ({error.__cause__}): "
                f"{room(self._directory)}; free some space there"
            ) from error

    def _load(self, job: int, blocks: Sequence[BlockToLoad]) -> BlocksLoaded:
        answer = BlocksLoaded(job, [], {}, [])
        for place, offset in blocks:
            content = self._bytes(offset, place.nbytes)
            try:
                _read(self._fd, content, place.offset)
            except OSError as error:
                answer.failed[place.block] = str(error)[:_CAUSE_CHARS]
                continue
            good = checksum(content) == place.checksum
            (answer.loaded if good else answer.damaged).append(place.block)
        return answer

    def _free(self, places: Iterable[SpilledBlock]) -> None:
        for place in places:
            self._allocator.free(place.offset, max(place.nbytes, 1))

    def _bytes(self, offset: int, nbytes: int) -> U8:
        if self._arena is None:
            raise OSError("the file of spilled blocks is closed")
        return self._arena[offset : offset + nbytes]


def _taken(answers: queue.SimpleQueue[_Answer]) -> list[_Answer]:
    ready: list[_Answer] = []
    while not answers.empty():
        ready.append(answers.get_nowait())
    return ready


def mapped(path: str, capacity: int) -> U8:
    """Map an arena for reading and writing. It is unmapped when its last view is collected."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(fd, capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)
    finally:
        os.close(fd)


def _check_space(directory: Path, nbytes: int) -> None:
    if nbytes < SPILL_BYTES_MIN:
        raise UsageError(
            f"--spill-bytes {nbytes:,} is below {SPILL_BYTES_MIN:,} bytes, the size of one write; allow more"
        )
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if nbytes > free:
        raise UsageError(
            f"--spill-bytes {nbytes:,} is more than the {free:,} bytes that are free in {directory}; give fewer, or "
            "another --spill-dir"
        )


def _unnamed(directory: Path, capacity: int) -> Arena:
    """A sparse file in the directory. The caller removes its name."""
    try:
        return Arena.create(directory, capacity)
    except OutOfMemory as error:
        raise UsageError(f"spill directory {directory} cannot be used: {error}; name another") from error


def _write(fd: int, content: U8, offset: int) -> None:
    view = memoryview(content.data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _read(fd: int, content: U8, offset: int) -> None:
    view = memoryview(content.data)
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise OSError(f"the file of spilled blocks ends at byte {offset}")
        view, offset = view[count:], offset + count
