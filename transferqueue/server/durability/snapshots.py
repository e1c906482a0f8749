"""Snapshots and restores: a cut in one turn of the loop, the files in a thread beside it.

The law:

- The cut is one moment: the ledger copies its columns (see `Ledger.take_snapshot`) between two requests. Nobody waits for the files.
- The extents of the cut are held: what is freed meanwhile is lent to nobody until the files are written. The ledger knows
  nothing of it, so a server that dies here leaves nothing pinned.
- The server writes, not the client: its memory is here, its death is the client's too, and paths stay under `root`, which
  only who starts the server can name. One work at a time.
- A restore goes into memory that is lent to nobody else, and becomes visible in one turn, or not at all: everything is
  checked before memory is taken, and the ledger changes by one assignment. The turn that plants a table also takes its memory off
  the list of what is given back when the work fails, so no memory that a table refers to is ever given back.
- A thread touches neither ledger nor allocator: it posts what the loop is to do (`turn`), and waits for that with a deadline. What
  the loop has not begun by then it never does.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from transferqueue.errors import (
    Corruption,
    Disconnected,
    Full,
    InternalError,
    NotFound,
    OutOfMemory,
    TransferQueueError,
    UsageError,
    listing,
)
from transferqueue.ledger.effects import MustWait
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot
from transferqueue.limits import MIB
from transferqueue.server.durability.snapshot_directory import SnapshotReader, SnapshotWriter
from transferqueue.server.durability.snapshot_files import (
    ValueChunk,
    check_cut,
    pieces,
    read_about,
    read_cut,
    read_tables,
    write_cut,
)
from transferqueue.server.shards.own_memory import SHARD, OwnShardMemory
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.from_snapshot import columns_from_arrow
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex

_log: Final = logging.getLogger("transferqueue.server")
SNAPSHOTS_VARIABLE: Final = "TRANSFERQUEUE_SNAPSHOTS"
"""Names the root for a server that is given none."""
TOLD_BYTES: Final = 8 * MIB
"""Whoever follows a work hears of its progress in steps of about this."""
TURN_S: Final = 60.0
"""The loop answers a thread within milliseconds; one that does not for so long is gone."""
KEPT_WORKS: Final = 16
T = TypeVar("T")


class SnapshotJob:
    """One snapshot or restore. done, total: bytes."""

    def __init__(self, number: int, path: Path, total: int) -> None:
        self.number, self.path, self.total = number, path, total
        self.done = self.told = 0
        self.ended = False
        self.error: TransferQueueError | None = None
        self.cancelled = threading.Event()

    def expect_twice(self, nbytes: int) -> None:
        """All files are read to be compared, and once more."""
        self.total = 2 * nbytes

    def reply(self) -> m.JobProgress:
        """How far it is."""
        return m.JobProgress(self.number, str(self.path), self.done, self.total, self.ended)


class SnapshotJobs:
    """The works of one server. Used by the loop's thread, but for `_post` and `_ask`.

    root: paths that clients name stay under it. wake: makes those who rest under a key due. stir: has the loop call `turn`.
    seat: of the coordinator; a snapshot of what belongs to others is not restored.
    """

    def __init__(
        self,
        root: Path,
        ledger: Ledger,
        memory: OwnShardMemory,
        *,
        wake: Callable[[tuple[str, ...]], None],
        stir: Callable[[], None],
        index: CoordinatorIndex = CoordinatorIndex(),  # noqa: B008  (frozen)
    ) -> None:
        self.root: Final = root
        self._ledger, self._memory = ledger, memory
        self._wake, self._stir = wake, stir
        self._index = index
        self._works: dict[int, SnapshotJob] = {}
        self._asked: dict[tuple[int, int], int] = {}
        """(session, call) -> the work it began: for a request that is sent again."""
        self._posted: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._last = 0

    # ------------------------------------------------------------ requests

    def begin(self, session: int, call: int, request: m.SnapshotRequest | m.Restore, now: float) -> m.JobProgress:
        """Begin a work. The same call again: how far it is."""
        before = self._asked.get((session, call))
        if before is not None:
            return self._works[before].reply()
        path = self.place(request.path)
        if (busy := next((one for one in self._works.values() if not one.ended), None)) is not None:
            raise Full(f"{busy.path} is being written or read; begin another when that has ended")
        work = (
            self._snapshot(path, request.keep, now) if isinstance(request, m.SnapshotRequest) else self._restore(path)
        )
        self._asked[session, call] = work.number
        return work.reply()

    def place(self, path: str) -> Path:
        """The path under the root; `UsageError` if it is not."""
        found = (self.root / path).resolve() if "\0" not in path else Path("/")
        if not found.is_relative_to(self.root.resolve()):
            raise UsageError(
                f"snapshot path {path!r} is outside {self.root}, where this server keeps snapshots; name one under it, or "
                "start the server with another --snapshots"
            )
        return found

    def watch(self, request: m.WatchJob) -> m.JobProgress | MustWait:
        """How far a work is; raises what ended it."""
        work = self._works.get(request.work)
        if work is None:
            raise NotFound(
                f"work {request.work} is not known to this server; it has {listing(self._works)}: begin again"
            )
        if work.error is not None:
            raise work.error
        if work.ended or work.told > request.done or not request.wait_s:
            return work.reply()
        return MustWait((("work", str(work.number)),))

    def explain(self, request: m.WatchJob) -> str:
        """How far a work is, for a wait that ends."""
        work = self._works.get(request.work)
        return f"{work.path}: {work.done:,} of {work.total:,} bytes so far" if work else f"work {request.work} is gone"

    # ------------------------------------------------------------ the loop's side

    def turn(self, now: float) -> None:
        """Do what threads have asked for."""
        with suppress(queue.Empty):
            while True:
                self._posted.get_nowait()(now)

    def stop(self) -> None:
        """End the work there is; blocks until its thread has, which it does at the next piece that it writes or reads."""
        for work in self._works.values():
            work.cancelled.set()
        while any(not work.ended for work in self._works.values()):
            try:
                self._posted.get(timeout=TURN_S)(time.monotonic())
            except queue.Empty:
                _log.error("a snapshot did not end within %g s; left to the end of the process", TURN_S)
                return

    def _begin(
        self, path: Path, total: int, run: Callable[[SnapshotJob], None], after: Callable[[float], None]
    ) -> SnapshotJob:
        self._last += 1
        work = self._works[self._last] = SnapshotJob(self._last, path, total)
        while len(self._works) > KEPT_WORKS:
            gone = next(iter(self._works))
            del self._works[gone]
            self._asked = {key: number for key, number in self._asked.items() if number != gone}

        def whole() -> None:
            error = _failure(run, work)
            self._post(lambda now: self._end(work, error, after, now))

        threading.Thread(target=whole, name=f"transferqueue work {work.number}", daemon=True).start()
        return work

    def _end(
        self, work: SnapshotJob, error: TransferQueueError | None, after: Callable[[float], None], now: float
    ) -> None:
        after(now)
        work.ended, work.error = True, error
        self._wake(("work", str(work.number)))

    # ------------------------------------------------------------ the thread's side

    def _post(self, act: Callable[[float], None]) -> None:
        self._posted.put(act)
        self._stir()

    def _ask(self, work: SnapshotJob, act: Callable[[float], T]) -> T:
        """Have the loop do something; its result."""
        future: Future[T] = Future()

        def answer(now: float) -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has given up
            try:
                future.set_result(act(now))
            except Exception as error:  # noqa: BLE001  (raised again, in the thread that asked)
                future.set_exception(error)

        self._post(answer)
        try:
            return future.result(TURN_S)
        except TimeoutError:
            if future.cancel():
                raise
            return future.result()  # the loop has begun it: it ends

    def _advance(self, work: SnapshotJob, nbytes: int) -> None:
        if work.cancelled.is_set():
            raise Disconnected(f"{work.path} was given up: the server stops")
        work.done += nbytes
        if work.done - work.told >= TOLD_BYTES:
            work.told = work.done
            self._post(lambda now: self._wake(("work", str(work.number))))

    # ------------------------------------------------------------ a snapshot

    def _snapshot(self, path: Path, keep: int, now: float) -> SnapshotJob:
        cut = self._ledger.take_snapshot(now)
        if further := {at.shard for at in cut.blocks.values()} - {SHARD}:
            raise UsageError(
                f"snapshot {path} refused: rows of it lie in further shards ({listing(further)}), and only the server's own "
                "memory is written to snapshots; drain those first (transferqueue shard drain NUMBER)"
            )
        extents = {at.extent for at in cut.blocks.values()}
        self._memory.hold({extent.offset for extent in self._ledger.extents_of(SHARD) if extent.id in extents})
        try:
            return self._begin(path, cut.nbytes, lambda work: self._write(work, cut, keep), self._let_go)
        except BaseException:
            self._memory.release_held(now)
            raise

    def _let_go(self, now: float) -> None:
        self._memory.release_held(now)
        self._wake(("memory",))

    def _write(self, work: SnapshotJob, cut: LedgerSnapshot, keep: int) -> None:
        arena = _mapped(self._memory, mmap.PROT_READ)
        writer = SnapshotWriter(work.path, lambda nbytes: self._advance(work, nbytes))
        try:
            about = write_cut(
                writer,
                cut,
                lambda at: arena[at.offset : at.offset + at.nbytes],
                time.time(),
                metadata.version("asyncflow-transferqueue"),
            )
            work.path = writer.publish(about, keep)
        finally:
            writer.abandon()

    # ------------------------------------------------------------ a restore

    def _restore(self, path: Path) -> SnapshotJob:
        self._ledger.check_empty()
        return self._begin(path, 0, self._read, lambda now: None)

    def _read(self, work: SnapshotJob) -> None:
        snapshot = SnapshotReader.open(work.path, lambda nbytes: self._advance(work, nbytes), work.expect_twice)
        work.path, about = snapshot.path, read_about(snapshot)
        tables, channels = ([one.name for one in kept] for kept in (about.tables, about.channels))
        self._index.check_kept(tables, channels, f"snapshot {work.path}")
        cuts = read_tables(snapshot, about)
        with _named(work.path):
            check_cut(about, cuts)
        arena = _mapped(self._memory, mmap.PROT_READ | mmap.PROT_WRITE)
        taken: list[tuple[int, int]] = []
        try:
            blocks: dict[int, m.BlockLocation] = {}
            for piece in pieces(snapshot, about):
                with _named(snapshot.path / piece.file):
                    blocks[piece.number] = self._settle(work, piece, arena, taken)
            cut = read_cut(snapshot, about, cuts, blocks)
            with _named(work.path):
                self._ask(work, lambda now: self._plant(cut, taken, now))
        except BaseException:
            self._ask(work, lambda now: self._give_back(taken, now))
            raise

    def _plant(self, cut: LedgerSnapshot, taken: list[tuple[int, int]], now: float) -> None:
        """Have the tables refer to the memory that was taken. It is theirs, or stays in the list: never both, never neither."""
        mine = taken.copy()
        try:
            taken.clear()
            self._ledger.restore_snapshot(cut, now)
        except BaseException:
            taken[:] = mine
            raise

    def _give_back(self, taken: list[tuple[int, int]], now: float) -> None:
        """Free memory that was taken for a restore that failed. Of one that did not, nothing is in the list."""
        while taken:
            self._memory.give_back(*taken.pop(), now)
        self._wake(("memory",))

    def _settle(self, work: SnapshotJob, piece: ValueChunk, arena: U8, taken: list[tuple[int, int]]) -> m.BlockLocation:
        """Values of a file become a block in memory."""
        draft = BlockWriter([columns_from_arrow(field, piece.batch.column(field.name)) for field in piece.fields])
        offset = self._ask(work, lambda now: self._take(work, draft.nbytes, taken))
        block = arena[offset : offset + draft.nbytes]
        draft.write(block)
        self._advance(work, draft.nbytes)
        names = [field.name for field in draft.fields]
        return m.BlockLocation(
            piece.number, SHARD, 0, offset, draft.nbytes, draft.stored_rows, names, draft.counts, checksum(block)
        )

    def _take(self, work: SnapshotJob, nbytes: int, taken: list[tuple[int, int]]) -> int:
        found = self._memory.take(max(nbytes, 1))
        if found is None:
            raise OutOfMemory(
                f"snapshot {work.path} does not fit an arena of {self._memory.arena.capacity:,} bytes; start a server with "
                "a larger --arena-bytes"
            )
        taken.append(found)
        return found[0]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """`Corruption` names the file, or the snapshot, that it is of."""
    try:
        yield
    except Corruption as error:
        raise Corruption(f"{path} was not written by a server, or is damaged: {error}; restore another") from error


def _failure(run: Callable[[SnapshotJob], None], work: SnapshotJob) -> TransferQueueError | None:
    try:
        run(work)
    except TransferQueueError as error:
        return error.with_traceback(None)  # its frames hold the arena, and whoever follows holds the error
    except MemoryError:
        return OutOfMemory(f"work on {work.path} needs more memory than this server can get; nothing was changed")
    except Exception as error:  # noqa: BLE001  (logged with its cause, and told to whoever follows)
        _log.exception("work on %s failed", work.path)
        return InternalError(f"work on {work.path} failed: {error!r}; please report it")
    return None


def _mapped(memory: OwnShardMemory, protection: int) -> U8:
    """The arena, mapped for a thread of its own: unmapped with the last view of it."""
    fd = os.open(memory.arena.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(fd, memory.arena.capacity, mmap.MAP_SHARED, protection), np.uint8)
    finally:
        os.close(fd)
