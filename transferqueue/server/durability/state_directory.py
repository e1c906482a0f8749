"""The state directory: everything that outlives a server, and how the next run continues from it.

1. A state directory (0700) belongs to one server at a time, which holds its ``lock``. It contains ``journal.sqlite``,
   the link ``arena`` to the memory that the journal describes, and ``about.json`` for a missing arena. The arena's last
   page is the head of the journal (`journal_head`).
2. The arena is on shared memory at level ``process`` (in the state directory if that has no room), and in the state
   directory at level ``disk``. The link is made last: no server owns an arena to which no link leads.
3. Clients are told of the changes of a turn only after `commit`. By then the bytes of its blocks are on disk at level
   ``disk``, and its records are in the journal at both levels.
4. Blocks in an arena in the state directory have checksums. The client that writes a block computes its checksum and
   commits both: so the server hashes nothing while it serves, and a client with a wrong checksum loses only its own
   rows. Each start compares all checksums, reports blocks that differ, and drops their rows as lost.
5. Time stands still while no server runs: the clock continues from the last time in the journal.
6. The server reads and checks everything before it changes, frees or gives back anything (`recovery`). Damage is
   `Corruption`. With `accept_loss` it moves the files to ``lost-N`` in the state directory, and starts with an empty
   queue. An arena on shared memory is not moved: its memory is given back.
7. A reboot loses the state of level ``process``, which was in memory. The next server logs that, and starts as with
   `accept_loss`.
8. A disk that is full, or gives errors, is no damage: see `disk`.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.errors import AddressInUse, Corruption, DiskFailed, OutOfMemory, UsageError, listing
from transferqueue.errors.on_failure import OnFailure
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.tasks.selectors import SELECTORS
from transferqueue.limits import ARENA_BYTES_DEFAULT, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.server.durability import recovery
from transferqueue.server.durability.disk import DiskReserve, disk_error, disk_failures
from transferqueue.server.durability.journal import SqliteJournal, new_origin
from transferqueue.server.durability.journal_head import MARGIN_BYTES, ArenaHead, boot_name
from transferqueue.server.durability.recorded_ledger import STATE, RecordedLedger, Tail
from transferqueue.server.durability.recovery import LostAtReboot, PreviousState
from transferqueue.server.durability_level import Level
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.server.parts import Part
from transferqueue.server.runtime_directory import (
    SHARED_MEMORY,
    ArenaDirectory,
    arena_root,
    claim_directory,
    remove_arena,
    remove_stale_arenas,
)
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena, available_bytes
from transferqueue.storage.memory.checksum import UNCHECKED, checksum
from transferqueue.storage.memory.room import room
from transferqueue.transport import FileLock
from transferqueue.transport.system.file_system import memory_file_system
from transferqueue.transport.system.private_files import private_directory, sync_path, write_private
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.server")
HEAD_SYNC_S: Final = 0.25
"""At level disk the server flushes the head to disk this often while commits continue. A flush for each commit would
double the cost."""


def _without_checksum(request: m.Request) -> UsageError | None:
    """The refusal if a block of the request has no checksum, for a server that demands them; else None."""
    columns = request if isinstance(request, m.Publish) else getattr(request, "columns", None)
    if not isinstance(columns, m.Publish | m.Columns):
        return None
    for block in columns.blocks:
        if block.checksum == UNCHECKED:
            return UsageError(
                f"block of {', '.join(block.fields[:12])} has no checksum: this server keeps rows on disk, and "
                "compares each block when it starts; commit blocks with the xxh3-64 of their bytes, as "
                "Welcome.checksums asks"
            )
    return None


def _without_own_copy(request: m.Request, shard_of: Callable[[int], int | None]) -> UsageError | None:
    """The refusal if a block has no copy in the server's own memory, for a server that demands one; else None.

    Args:
        request: may commit blocks.
        shard_of: the shard of an extent; None: there is no such extent (the ledger refuses it), or the block refers to
            another one.
    """
    columns = request if isinstance(request, m.Publish) else getattr(request, "columns", None)
    for block in getattr(columns, "blocks", ()):
        shards = {shard_of(extent) for extent in (block.extent, *(copy.extent for copy in block.copies))}
        if not shards & {SHARD, None}:
            return UsageError(
                f"block of {', '.join(block.fields[:12])} lies only in remote shards ({listing(shards)}): this server "
                "survives a reboot, and they do not; write it into a grant of the server's own memory too, in a table "
                "with replicas"
            )
    return None


class StateDirectory(Part):
    """The state directory at `path`, locked until `close`.

    `ledger`, `allocator` and `arena` are as the last run left them, or new. `rebooted` says whether the machine was
    rebooted since. `secret` is the key of tickets, the same in all runs.

    Args:
        path: created if missing.
        level: of durability.
        accept_loss: instead of raising `Corruption`, move the files aside and start with an empty queue.

    Raises:
        UsageError: the directory or level cannot be used.
        AddressInUse: another server has the directory.
        DiskFailed: its disk is full or fails.
        Corruption: it cannot be read completely; nothing is changed.
    """

    def __init__(
        self,
        path: Path,
        level: Level,
        *,
        first_epoch: int,
        arena_bytes: int | None = None,
        shared: Path = SHARED_MEMORY,
        accept_loss: bool = False,
    ) -> None:
        self.path: Final = path.absolute()
        with disk_failures(f"state directory {path} cannot be made", self.path):
            private_directory(self.path, "state directory")
        self.level: Final = level
        if level.survives_reboot and (kind := memory_file_system(self.path)):
            _log.warning(
                "state directory %s is in memory (%s): nothing in it survives a reboot, as durability %s promises; "
                "name a directory on a disk",
                self.path,
                kind,
                level,
            )
        self._synced_blocks = 0
        self._synced_at = 0.0
        with ExitStack() as made, disk_failures(f"state directory {self.path} cannot be opened", self.path):
            self._lock = _locked(self.path)
            made.callback(self._lock.release, unlink=False)
            self._reserve: Final = DiskReserve(self.path, arena_bytes or ARENA_BYTES_DEFAULT)
            made.callback(self._reserve.close)
            previous, journal = self._open(arena_bytes, shared, accept_loss, made)
            self.rebooted: Final = isinstance(previous, LostAtReboot) or (previous is not None and previous.rebooted)
            ledger, tail = Ledger(epoch=0, selectors=SELECTORS.found()), Tail()
            if isinstance(previous, PreviousState):
                ledger, tail = previous.ledger, previous.tail
            self._reserve.begin()
            self.secret: Final = journal.origin.secret
            self.checksums: Final = Path(self.arena.arena.path).parent == self.path
            self.ledger: Final = RecordedLedger(
                ledger, journal, tail, epoch=ledger.epoch + 1 if ledger.epoch else first_epoch
            )
            self._head: Final = journal.head
            self._behind_s: Final = max(ledger.now, 0.0) - time.monotonic() if ledger.epoch else 0.0
            self._made = made.pop_all()

    def clock(self) -> float:
        """Seconds for which servers of this state have run (rule 5)."""
        return time.monotonic() + self._behind_s

    # ------------------------------------------------------------ while it serves

    @property
    def keeps_own_copy(self) -> bool:
        """Whether each block must have a copy in the coordinator's own memory: at level ``disk``, since the memory of
        another process does not survive a reboot."""
        return self.level.survives_reboot

    def welcome(self) -> Mapping[str, Any]:
        """See `Part`."""
        return {"durable": True, "checksums": self.checksums}

    def refuse(self, request: m.Request) -> UsageError | None:
        """See `Part`."""
        if self.checksums and (refused := _without_checksum(request)) is not None:
            return refused
        return _without_own_copy(request, self.ledger.shard_of_extent) if self.keeps_own_copy else None

    def _checksum(self, offset: int, nbytes: int) -> int:
        if not 0 <= offset <= offset + nbytes <= self.allocator.capacity:
            return UNCHECKED  # the ledger will refuse it
        with self.arena.arena.view(offset, nbytes) as view:
            return checksum(view)

    @property
    def shortage(self) -> str:
        """See `Part`."""
        return self._reserve.shortage

    def next_deadline(self) -> float | None:
        """When to look again whether the disk has room."""
        return self._reserve.due_at

    def tick(self, now: float) -> None:
        """Look whether the disk has room again."""
        due = self._reserve.due_at
        if due is not None and due <= now:
            self._reserve.look(now)

    def commit(self) -> None:
        """See `Part.commit`, and rules 3 and 4."""
        committed = self.ledger.blocks_committed
        if self.level.survives_reboot and committed != self._synced_blocks:
            with self._unwritten():
                self.arena.arena.sync()
        self._synced_blocks = committed
        while True:
            try:
                self.ledger.commit()
                break
            except DiskFailed as error:
                if not self._may_try_again(error):
                    raise
        if self.level.survives_reboot and (now := time.monotonic()) - self._synced_at > HEAD_SYNC_S:
            with self._unwritten():
                self._head.sync()
            self._synced_at = now

    def _may_try_again(self, error: DiskFailed) -> bool:
        """Whether the disk was full and the reserve had a slice to give up."""
        return error.is_full and self._reserve.give_up()

    @contextmanager
    def _unwritten(self) -> Iterator[None]:
        """Around a flush. A failed flush is not tried again: the system may then report data as written that it has
        dropped."""
        try:
            yield
        except OutOfMemory as error:
            raise DiskFailed(f"{error}; {room(self.path)}. Start the server again", is_full=False) from error

    def checkpoint(self) -> None:
        """Commit, and write an image, so that the next start is quick. If the disk has no room for the image, the
        journal keeps the records."""
        self.commit()
        try:
            self.ledger.checkpoint()
        except DiskFailed as error:
            if not error.is_full:
                raise
            _log.warning("the journal got no new image, so the next start takes longer: %s", error)

    def close(self) -> None:
        """Close everything. The state on disk and in shared memory stays as at the last commit. Closing twice is
        allowed."""
        self._made.close()

    def damaged(self) -> list[int]:
        """The numbers of blocks whose bytes do not match their checksum, if the arena is in the state directory. Reads
        all blocks."""
        if Path(self.arena.arena.path).parent != self.path:
            return []
        return [block.block for block in self.ledger.blocks_of(SHARD) if not self._matches(block)]

    def _matches(self, at: m.BlockLocation) -> bool:
        return at.checksum == UNCHECKED or self._checksum(at.offset, at.nbytes) == at.checksum

    # ------------------------------------------------------------ start

    def _open(
        self, arena_bytes: int | None, shared: Path, accept_loss: bool, made: ExitStack
    ) -> tuple[PreviousState | LostAtReboot | None, SqliteJournal]:
        """Read the state of the previous run, and continue it or begin anew. Reading needs room too: it may use slices
        of the reserve."""
        while True:
            with ExitStack() as opened:
                try:
                    with disk_failures(f"state directory {self.path} cannot be opened", self.path):
                        previous = self._examine(accept_loss)
                        if isinstance(previous, PreviousState):
                            journal = self._continue(previous, arena_bytes, opened)
                        else:
                            journal = self._begin(arena_bytes, shared, opened)
                    made.enter_context(opened.pop_all())
                    return previous, journal
                except DiskFailed as error:
                    if not self._may_try_again(error):
                        raise

    def _examine(self, accept_loss: bool) -> PreviousState | LostAtReboot | None:
        """Read the state of the previous run; None to start anew. An unusable state is moved aside, if
        `accept_loss`."""
        try:
            previous = recovery.examine(self.path, self.level)
        except Corruption as error:
            if disk_error(error) is not None:
                raise  # no damage, so nothing is lost or moved aside
            if not accept_loss:
                memory = " and gives the shared memory of its rows back" if self.level.in_shared_memory else ""
                raise Corruption(
                    f"{error}. Nothing was changed. Put the files back as they were; or start with an empty queue, "
                    f"which keeps the files aside{memory}: transferqueue serve --durability {self.level} --state "
                    f"{self.path} --accept-loss"
                ) from error
            _log.error(
                "state directory %s: %s. The server accepts the loss and kept the files in %s",
                self.path,
                error,
                self._set_aside(),
            )
            return None
        if isinstance(previous, LostAtReboot):
            _log.error(
                "state directory %s: its rows were in shared memory, and a reboot cleared that; the server starts "
                "with an empty queue, and kept the files in %s. %s",
                self.path,
                self._set_aside(),
                previous.lost,
            )
        return previous

    def _set_aside(self) -> Path:
        """Move all files of earlier runs to a new directory, and return it. The link and about.json go last: until then
        the next server notices an interruption."""
        aside = _new_directory(self.path, "lost")
        arenas = [file.name for file in self.path.glob(recovery.ARENAS)]
        for name in (recovery.JOURNAL, *_beside(recovery.JOURNAL), *arenas, recovery.LINK, recovery.ABOUT):
            with suppress(FileNotFoundError):
                (self.path / name).rename(aside / name)
        sync_path(self.path)
        return aside

    def _begin(self, arena_bytes: int | None, shared: Path, made: ExitStack) -> SqliteJournal:
        """Start anew. Files of a run that never committed anything are replaced."""
        arenas = [file.name for file in self.path.glob(recovery.ARENAS)]
        for name in (recovery.JOURNAL, *_beside(recovery.JOURNAL), recovery.ABOUT, *arenas):
            (self.path / name).unlink(missing_ok=True)
        journal = SqliteJournal(self.path / recovery.JOURNAL, self.level, origin=new_origin(STATE))
        made.callback(journal.close)
        self.arena, self.allocator = self._make(arena_bytes, shared)
        made.callback(self.arena.close)
        self._take_head(journal)
        self.arena.arena.sync()
        file = Path(self.arena.arena.path)
        self._write_about(journal, file.name if file.parent == self.path else str(file))
        return journal

    def _continue(self, previous: PreviousState, arena_bytes: int | None, made: ExitStack) -> SqliteJournal:
        journal = SqliteJournal(self.path / recovery.JOURNAL, self.level)
        made.callback(journal.close)
        if (journal.turn, journal.digest) != (previous.journal.turn, previous.journal.digest_of(previous.journal.turn)):
            raise Corruption(f"journal {journal.path} changed while it was read; stop the other process that writes it")
        self.arena, self.allocator = self._attach(previous), previous.allocator
        if arena_bytes is not None and align(arena_bytes, PAGE_BYTES) != self.allocator.capacity:
            _log.warning(
                "state directory %s: its arena stays at %d bytes, and arena_bytes=%d changes nothing; for another size "
                "restore a snapshot into a new state directory",
                self.path,
                self.allocator.capacity,
                arena_bytes,
            )
        made.callback(self.arena.close)
        self._take_head(journal)
        self._write_about(journal, os.readlink(self.path / recovery.LINK))
        return journal

    def _take_head(self, journal: SqliteJournal) -> None:
        journal.head = ArenaHead(self.arena.arena, journal.origin.identity, self.level)
        journal.head.begin(journal.turn, journal.digest)
        journal.head.end(journal.turn, journal.digest)

    def _make(self, arena_bytes: int | None, shared: Path) -> tuple[ArenaDirectory, Allocator]:
        arena = _shared_arena(self.path, arena_bytes, shared) if self.level.in_shared_memory else None
        if arena is None:
            capacity = arena_bytes or min(ARENA_BYTES_DEFAULT, available_bytes(self.path))
            arena = ArenaDirectory(Arena.create(self.path, capacity, margin=MARGIN_BYTES), stays=True)
        return arena, Allocator(arena.arena.capacity)

    def _attach(self, previous: PreviousState) -> ArenaDirectory:
        file = previous.arena
        lock = None if file.parent == self.path else FileLock(file.parent / "lock", inherited=False)
        if lock is not None and not lock.take():
            raise AddressInUse(f"arena {file} is in use by another server; stop that one first")
        arena = Arena.attach(file, previous.allocator, margin=MARGIN_BYTES)
        return ArenaDirectory(arena, file.parent, lock, stays=True)

    def _write_about(self, journal: SqliteJournal, arena: str) -> None:
        """Write about.json, which repeats the head for the case that the arena is lost. Then make the link, if it is
        missing."""
        about = recovery.About(self.level, boot_name(), journal.origin.identity.hex(), arena)
        existing, _ = recovery.read_about(self.path)
        if about != existing:
            write_private(self.path / recovery.ABOUT, msgspec.json.encode(about))
        link = self.path / recovery.LINK
        if not link.is_symlink():
            link.symlink_to(arena)
            sync_path(self.path)


def _beside(database: str) -> tuple[str, str]:
    """The files that SQLite writes beside a database."""
    return f"{database}-wal", f"{database}-shm"


def _new_directory(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        with suppress(FileExistsError):
            made = parent / f"{name}-{number}"
            made.mkdir(mode=0o700)
            return made
    raise AssertionError("numbers end")


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / "lock", inherited=False)
    if not lock.take():
        raise AddressInUse(f"state directory {path} is in use by a live server; stop it, or name another directory")
    return lock


def _shared_arena(state: Path, arena_bytes: int | None, shared: Path) -> ArenaDirectory | None:
    """Make an arena on shared memory, with a file that names its state directory. None if there is no room for it."""
    root = arena_root(shared)
    if root is None:
        return None
    remove_stale_arenas(root, own=state)
    free = available_bytes(shared)
    wanted = arena_bytes or min(ARENA_BYTES_DEFAULT, free)
    if free < wanted:
        return None
    directory, lock = claim_directory(root)
    with OnFailure(remove_arena, directory, lock):
        write_private(directory / "state", str(state).encode())
        return ArenaDirectory(Arena.create(directory, wanted, margin=MARGIN_BYTES), directory, lock, stays=True)
