"""Snapshots and restores: the loop copies the state in one turn, and a thread beside it reads or writes the files.

- A snapshot is of one moment: the ledger copies its columns (`Ledger.take_snapshot`) between two requests. No client
  waits for the files.
- The extents of the snapshot are held until its files are written: memory that is freed meanwhile is not granted again.
  The ledger does not know of this, so a server that dies during a snapshot leaves nothing pinned.
- Blocks that lie only in remote shards are fetched first (`shards.block_fetches`), into a file without a name beside
  the snapshot's (`spool`). So the coordinator's memory holds a few orders of them at a time, and each crosses the
  network once.
- The server writes, not the client: it has the memory, and paths stay under `root`, which only the operator can choose.
  One job runs at a time.
- A restore writes into free memory. Its tables become visible in one turn, or not at all: everything is checked before
  memory is taken, and the ledger changes by one assignment. The same turn empties the list of extents to free when the
  job fails, so the job never frees memory to which a table refers.
- A thread touches neither ledger nor allocator. It posts calls for the loop (`turn`), and waits for each result with a
  deadline. The loop never begins a call after its deadline.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

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
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot
from transferqueue.ledger.rows.cold_arena import ON_DISK
from transferqueue.limits import MIB, SNAPSHOT_FETCH_S
from transferqueue.server.durability.snapshot_directory import SnapshotReader, SnapshotWriter, is_number, writing_to
from transferqueue.server.durability.snapshot_files import (
    ValueChunk,
    check_contents,
    chunks,
    read_contents,
    read_manifest,
    read_tables,
    write_contents,
)
from transferqueue.server.durability.snapshot_job import SnapshotJob
from transferqueue.server.memory.block_spool import BlockSpool
from transferqueue.server.memory.lending import Lending
from transferqueue.server.memory.own_copies import refer_to_own_copies
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.server.parts import ColdStore, Handler, Part
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.from_snapshot import columns_from_arrow
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.versions import VERSION

if TYPE_CHECKING:
    from transferqueue.server.shards.block_fetches import ArrivedBlocks, BlockFetches

_log: Final = logging.getLogger("transferqueue.server")
SNAPSHOTS_VARIABLE: Final = "TRANSFERQUEUE_SNAPSHOTS"
"""The environment variable that names the root, for a server without the option."""
PROGRESS_BYTES: Final = 8 * MIB
"""A client that watches a job gets its progress in steps of about this size."""
LOOP_ANSWER_S: Final = 60.0
"""The loop answers a thread within milliseconds. After this time it has ended."""
JOBS_KEPT: Final = 16
T = TypeVar("T")
Arrivals: TypeAlias = "queue.SimpleQueue[ArrivedBlocks | TransferQueueError]"


class SnapshotJobs(Part):
    """The part of a server that writes and reads snapshots. Used by the loop's thread, except for `_post` and
    `_call_loop`.

    Args:
        root: the directory of all snapshots; paths of clients are relative to it.
        lending: the memory of the coordinator.
        fetches: brings blocks of remote shards; None: there are none.
        cold: has the blocks that are not in the arena; None: all are.
        wake: makes the requests due that wait on a key.
        stir: has the loop call `tick` soon.
        index: of this coordinator. A snapshot with tables of another one is not restored.
        check_table: raises `UsageError` for a table that could not be served (`Part.check_table`).
    """

    def __init__(
        self,
        root: Path,
        ledger: Ledger,
        lending: Lending,
        fetches: BlockFetches | None = None,
        cold: ColdStore | None = None,
        *,
        wake: Callable[[tuple[str, ...]], None],
        stir: Callable[[], None],
        index: CoordinatorIndex = CoordinatorIndex(),  # noqa: B008  (frozen)
        check_table: Callable[[m.TableTerms], None] = lambda _: None,
    ) -> None:
        self.root: Final = root
        self._ledger, self._fetches = ledger, fetches
        self._cold: Final = cold
        self._lending, self._memory = lending, lending.own
        self._wake, self._wake_loop = wake, stir
        self._index, self._check_table = index, check_table
        self._jobs: dict[int, SnapshotJob] = {}
        self._begun: dict[tuple[int, int], int] = {}
        """(session, call) -> the job that the call began, for a call that is sent again."""
        self._posted: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._last = 0

    # ------------------------------------------------------------ requests

    def requests(self) -> dict[type[m.Request], Handler]:
        """See `Part`."""
        return {
            m.SnapshotRequest: lambda session, call, request, now: self.snapshot(
                session.number, call, request.path, request.keep, now
            ),
            m.Restore: lambda session, call, request, now: self.restore(session.number, call, request.path),
            m.WatchJob: lambda session, call, request, now: self._shown(request),
        }

    def _shown(self, request: m.WatchJob) -> m.Reply | Blocked:
        """The progress of a job. A defect that ended the job, and was logged then, is no defect of the session that
        asks."""
        try:
            return self.watch(request)
        except InternalError as error:
            return m.Failed(error=type(error).__name__, text=str(error))

    def snapshot(self, session: int, call: int, path: str, keep: int, now: float) -> m.JobProgress:
        """Begin a snapshot and return its progress. The same call again only returns the progress."""
        return self._once(session, call, path, lambda place: self._snapshot(place, keep, now))

    def restore(self, session: int, call: int, path: str) -> m.JobProgress:
        """Begin a restore and return its progress. The same call again only returns the progress."""
        return self._once(session, call, path, self._begin_restore)

    def _once(self, session: int, call: int, path: str, begin: Callable[[Path], SnapshotJob]) -> m.JobProgress:
        before = self._begun.get((session, call))
        if before is not None:
            return self._jobs[before].reply()
        place = self.path_of(path)
        self.check_idle()
        job = begin(place)
        self._begun[session, call] = job.number
        return job.reply()

    def check_idle(self) -> None:
        """`Full` while a job runs."""
        if (busy := self._running()) is not None:
            raise Full(f"{busy.path} is being written or read; wait until that has ended")

    def _running(self) -> SnapshotJob | None:
        return next((job for job in self._jobs.values() if not job.ended), None)

    def path_of(self, path: str) -> Path:
        """The path under the root. `UsageError` if it is outside."""
        resolved = (self.root / path).resolve() if "\0" not in path else Path("/")
        if not resolved.is_relative_to(self.root.resolve()):
            raise UsageError(
                f"snapshot path {path!r} is outside {self.root}, where this server keeps snapshots; name one under it, "
                "or start the server with another --snapshots"
            )
        return resolved

    def watch(self, request: m.WatchJob) -> m.JobProgress | Blocked:
        """The progress of a job; raises the error that ended it."""
        job = self._job(request.work)
        if job.error is not None:
            raise job.error
        if job.ended or job.reported > request.done or not request.wait_s:
            return job.reply()
        return Blocked((("work", str(job.number)),))

    def _job(self, number: int) -> SnapshotJob:
        job = self._jobs.get(number)
        if job is None:
            raise NotFound(f"work {number} is not known to this server; it has {listing(self._jobs)}: begin again")
        return job

    def explain(self, request: Any) -> str:
        """The progress of a job, for the error of a wait that reached its deadline."""
        if type(request) is not m.WatchJob:
            return ""
        job = self._jobs.get(request.work)
        return f"{job.path}: {job.done:,} of {job.total:,} bytes so far" if job else f"work {request.work} is gone"

    # ------------------------------------------------------------ the loop's side

    def tick(self, now: float) -> None:
        """Carry out what threads have posted."""
        with suppress(queue.Empty):
            while True:
                self._posted.get_nowait()(now)

    def stop(self) -> None:
        """Cancel the running job. Blocks until its thread ends, at the next piece that it reads or writes."""
        for job in self._jobs.values():
            job.give_up(Disconnected(f"{job.path} was given up: the server stops"))
        if self._fetches is not None:
            self._fetches.fail(Disconnected("the snapshot was given up: the server stops"))
        while any(not job.ended for job in self._jobs.values()):
            try:
                self._posted.get(timeout=LOOP_ANSWER_S)(time.monotonic())
            except queue.Empty:
                _log.error("a snapshot did not end within %g s; it ends with the process", LOOP_ANSWER_S)
                return

    def _begin(
        self,
        path: Path,
        total: int,
        run: Callable[[SnapshotJob], None],
        after: Callable[[float], None],
    ) -> SnapshotJob:
        self._last += 1
        job = self._jobs[self._last] = SnapshotJob(self._last, path, total)
        while len(self._jobs) > JOBS_KEPT:
            oldest = next(iter(self._jobs))
            del self._jobs[oldest]
            self._begun = {key: number for key, number in self._begun.items() if number != oldest}

        self._start(job, run, after)
        return job

    def _start(self, job: SnapshotJob, run: Callable[[SnapshotJob], None], after: Callable[[float], None]) -> None:
        def run_and_report() -> None:
            error = _failure(run, job)
            self._post(lambda now: self._end(job, error, after, now))

        threading.Thread(target=run_and_report, name=f"transferqueue work {job.number}", daemon=True).start()

    def _end(
        self, job: SnapshotJob, error: TransferQueueError | None, after: Callable[[float], None], now: float
    ) -> None:
        after(now)
        job.ended, job.error = True, error
        self._wake(("work", str(job.number)))

    # ------------------------------------------------------------ the thread's side

    def _post(self, act: Callable[[float], None]) -> None:
        self._posted.put(act)
        self._wake_loop()

    def _call_loop(self, act: Callable[[float], T]) -> T:
        """Have the loop call `act`, and return its result. Raises what `act` raises."""
        future: Future[T] = Future()

        def answer(now: float) -> None:
            if not future.set_running_or_notify_cancel():
                return  # the thread has given up waiting
            try:
                future.set_result(act(now))
            except Exception as error:  # noqa: BLE001  (raised again, in the calling thread)
                future.set_exception(error)

        self._post(answer)
        try:
            return future.result(LOOP_ANSWER_S)
        except TimeoutError:
            if future.cancel():
                raise
            return future.result()  # the loop has begun the call, and will finish it

    def _add_progress(self, job: SnapshotJob, nbytes: int) -> None:
        job.check_wanted()
        job.done += nbytes
        if job.done - job.reported >= PROGRESS_BYTES:
            job.reported = job.done
            self._post(lambda now: self._wake(("work", str(job.number))))

    # ------------------------------------------------------------ a snapshot

    def _snapshot(self, path: Path, keep: int, now: float) -> SnapshotJob:
        if any(map(is_number, path.relative_to(self.root.resolve()).parts)):
            raise UsageError(
                f"snapshot path {path} has a number for a name, and would be a part of the snapshot of that number; "
                "name a directory, in which snapshots get their numbers"
            )
        contents = self._ledger.take_snapshot(now)
        if self._cold is not None:
            self._cold.hold()
        remote = refer_to_own_copies(contents.blocks)
        arrivals: Arrivals = queue.SimpleQueue()
        try:
            if self._fetches is not None:
                self._fetches.begin(remote, arrivals.put, now)
        except BaseException:
            self._release_cold()
            raise
        extents = [
            number for at in contents.blocks.values() for number in (at.extent, *(copy.extent for copy in at.copies))
        ]
        self._lending.hold(extents)

        def end(now: float) -> None:
            self._release_cold()
            if self._fetches is not None:
                self._fetches.end(now)
            self._lending.release(extents, now)
            self._wake(("memory",))

        try:
            nbytes = contents.nbytes + sum(at.nbytes for at in remote)
            return self._begin(
                path,
                nbytes,
                lambda job: self._write(job, contents, keep, remote, arrivals),
                end,
            )
        except BaseException:
            end(now)
            raise

    def _write(
        self,
        job: SnapshotJob,
        contents: LedgerSnapshot,
        keep: int,
        remote: list[m.BlockLocation],
        arrivals: Arrivals,
    ) -> None:
        arena = self._memory.mapped(mmap.PROT_READ)

        def content_of(at: m.BlockLocation, spool: BlockSpool) -> U8:
            if at.shard == ON_DISK:
                return self._cold_block(at.block)
            return spool.read(at.block) if at.block in spool else arena[at.offset : at.offset + at.nbytes]

        writer = SnapshotWriter(job.path, lambda nbytes: self._add_progress(job, nbytes))
        try:
            with closing(BlockSpool(writer.directory, partial(writing_to, writer.directory))) as spool:
                self._fetch(job, arena, spool, len(remote), arrivals)
                manifest = write_contents(
                    writer,
                    contents,
                    lambda at: content_of(at, spool),
                    time.time(),
                    VERSION,
                )
            job.path, job.made_at = writer.publish(manifest, keep), manifest.made_at
        finally:
            writer.abandon()

    def _release_cold(self) -> None:
        if self._cold is not None:
            self._cold.release()

    def _cold_block(self, block: int) -> U8:
        if self._cold is None:
            raise InternalError(f"block {block} should be on a disk, but this server does not spill")
        return self._cold.read(block)

    def _fetch(self, job: SnapshotJob, arena: U8, spool: BlockSpool, count: int, arrivals: Arrivals) -> None:
        """Have the spool take `count` blocks as they arrive from remote shards."""
        fetches = self._fetches
        while fetches is not None and len(spool) < count:
            try:
                arrived = arrivals.get(timeout=SNAPSHOT_FETCH_S)
            except queue.Empty:
                self._call_loop(fetches.expire)
                continue
            if isinstance(arrived, TransferQueueError):
                raise arrived
            damaged = spool.add_checked(arena, arrived.blocks)
            self._add_progress(job, sum(at.nbytes for at, _ in arrived.blocks if at.block not in damaged))
            self._call_loop(partial(fetches.read, arrived, damaged))

    # ------------------------------------------------------------ a restore

    def _begin_restore(self, path: Path) -> SnapshotJob:
        self._ledger.check_empty()
        return self._begin(path, 0, self._read, lambda now: None)

    def _read(self, job: SnapshotJob) -> None:
        snapshot = SnapshotReader.open(job.path, lambda nbytes: self._add_progress(job, nbytes), job.expect_twice)
        job.path, manifest = snapshot.path, read_manifest(snapshot)
        job.made_at = manifest.made_at
        tables, channels = ([entry.name for entry in entries] for entries in (manifest.tables, manifest.channels))
        self._index.check_kept(tables, channels, f"snapshot {job.path}")
        table_snapshots = read_tables(snapshot, manifest)
        for table in table_snapshots:
            self._check_table(table.terms)
        with _named(job.path):
            check_contents(manifest, table_snapshots)
        arena = self._memory.mapped(mmap.PROT_READ | mmap.PROT_WRITE)
        extents: list[tuple[int, int]] = []
        try:
            blocks: dict[int, m.BlockLocation] = {}
            for chunk in chunks(snapshot, manifest):
                with _named(snapshot.path / chunk.file):
                    blocks[chunk.number] = self._write_block(job, chunk, arena, extents)
            contents = read_contents(snapshot, manifest, table_snapshots, blocks)
            with _named(job.path):
                self._call_loop(lambda now: self._restore_tables(contents, extents, now))
        except BaseException:
            self._call_loop(lambda now: self._give_back(extents, now))
            raise

    def _restore_tables(self, contents: LedgerSnapshot, extents: list[tuple[int, int]], now: float) -> None:
        """Restore the tables. Each extent then belongs to a table or, on failure, stays in the list: never both, never
        neither."""
        owned = extents.copy()
        try:
            extents.clear()
            self._ledger.restore_snapshot(contents, now)
        except BaseException:
            extents[:] = owned
            raise

    def _give_back(self, extents: list[tuple[int, int]], now: float) -> None:
        """Free the extents of a restore that failed. After a restore that succeeded the list is empty."""
        while extents:
            self._memory.give_back(*extents.pop(), now)
        self._wake(("memory",))

    def _write_block(
        self, job: SnapshotJob, chunk: ValueChunk, arena: U8, extents: list[tuple[int, int]]
    ) -> m.BlockLocation:
        """Write the values of a chunk into a block in memory."""
        draft = BlockWriter([columns_from_arrow(field, chunk.batch.column(field.name)) for field in chunk.fields])
        offset = self._call_loop(lambda now: self._take(job, draft.nbytes, extents))
        block = arena[offset : offset + draft.nbytes]
        draft.write(block)
        self._add_progress(job, draft.nbytes)
        names = [field.name for field in draft.fields]
        return m.BlockLocation(
            chunk.number, SHARD, 0, offset, draft.nbytes, draft.stored_rows, names, draft.counts, checksum(block)
        )

    def _take(self, job: SnapshotJob, nbytes: int, extents: list[tuple[int, int]]) -> int:
        extent = self._memory.take(max(nbytes, 1))
        if extent is None:
            raise OutOfMemory(
                f"snapshot {job.path} does not fit an arena of {self._memory.arena.capacity:,} bytes: it needs "
                f"{nbytes:,}, and the largest free piece has {self._memory.allocator.largest:,}; start a server "
                "with a larger --arena-bytes"
            )
        extents.append(extent)
        return extent[0]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path of the file or snapshot to a `Corruption` that is raised inside."""
    try:
        yield
    except Corruption as error:
        raise Corruption(f"{path} was not written by a server, or is damaged: {error}; restore another") from error


def _failure(run: Callable[[SnapshotJob], None], job: SnapshotJob) -> TransferQueueError | None:
    try:
        run(job)
    except TransferQueueError as error:
        return error.with_traceback(None)  # the job keeps the error, and its frames would keep the arena
    except MemoryError:
        return OutOfMemory(f"work on {job.path} needs more memory than this server can get; nothing was changed")
    except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the clients that watch the job)
        _log.exception("work on %s failed", job.path)
        return InternalError(f"work on {job.path} failed: {error!r}; please report it")
    return None
