"""What of a server outlives it: a state directory, and how the next server goes on from it.

The law:

1. The state directory (0700) belongs to one server at a time, which holds its ``lock``. In it: ``journal.sqlite``,
   the link ``arena`` to the memory that the journal speaks of, and ``about.json``, which says what is told of the arena if
   that is gone. The arena's last page is the head of the journal (`server.head`).
2. The arena lies on shared memory at level ``process`` (in the state directory where that has no room), and in the
   state directory at level ``disk``. The link is made last: what it does not lead to is nobody's.
3. A turn of the server is told only after `commit`: at level ``disk`` the bytes of its blocks are on the device, then
   at both levels its records are in the journal. Blocks in a file of the state directory have checksums, which
   whoever writes a block takes and commits with it: so the server hashes nothing while it serves, and a client that lies has its own
   rows dropped. Each start compares them all. What does not match is reported, and its rows end as dropped.
4. Time stands still while no server runs: the clock goes on from the last time that the journal has.
5. What an earlier life left is read whole and checked before anything is changed, freed or punched (`server.past`). What is
   damaged is `Corruption`. Whoever accepts the loss says so (`accept_loss`): the files are moved to ``lost-N`` in the state
   directory, and a new life begins. An arena on shared memory is none of these files: it is given back.
6. What level ``process`` held is gone with the machine's memory. The next server says so, and does as in rule 5 unasked.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec

from transferqueue.errors import AddressInUse, Corruption, UsageError
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import ARENA_BYTES_DEFAULT
from transferqueue.server.durability import recovery as past
from transferqueue.server.durability.journal import Level, SqliteJournal, new_origin
from transferqueue.server.durability.journal_head import MARGIN_BYTES, ArenaHead, boot_name
from transferqueue.server.durability.recorded_ledger import STATE, RecordedLedger, Tail
from transferqueue.server.durability.recovery import LostAtReboot, Past
from transferqueue.server.files import (
    SHARED_MEMORY,
    ArenaDirectory,
    arena_root,
    claim_directory,
    remove_arena,
    remove_stale_arenas,
)
from transferqueue.server.shards.own_memory import SHARD
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena, room
from transferqueue.storage.memory.checksum import UNCHECKED, checksum
from transferqueue.transport import FileLock
from transferqueue.transport.system.private_files import private_directory, sync_directory, write_private
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.server")
HEAD_SYNC_S: Final = 0.25
"""At level disk, what the head notes is on the device after this long, if commits go on: a flush at each would double them."""


class Durability(Protocol):
    """How what a node does comes to outlive it."""

    @property
    def sessions_stay(self) -> bool:
        """Whether clients go on with the next server."""

    def check_offer(self, hello: m.Hello) -> None:
        """`UsageError` if memory that joins could not keep what this level promises."""

    @property
    def checksums(self) -> bool:
        """Whether each block is committed with the checksum of its bytes."""

    def commit(self) -> None:
        """What happened so far may be told when this returns."""


def without_checksum(request: m.Request) -> UsageError | None:
    """Why a request is refused where blocks are committed with their checksums; None: each of its blocks has one, or it has none."""
    carried = request if isinstance(request, m.Publish) else getattr(request, "columns", None)
    if not isinstance(carried, m.Publish | m.Columns):
        return None
    for block in carried.blocks:
        if block.checksum == UNCHECKED:
            return UsageError(
                f"block of {', '.join(block.fields[:12])} has no checksum: this server keeps rows on a disk, and compares each block "
                "when it starts; commit blocks with the xxh3-64 of their bytes, as Welcome.checksums asks"
            )
    return None


class NoDurability:
    """Level ``memory``: nothing outlives the server."""

    sessions_stay: Final = False
    checksums: Final = False

    def check_offer(self, hello: m.Hello) -> None:
        """Any will do."""

    def commit(self) -> None:
        """Nothing to wait for."""


class StateDirectory:
    """The state directory at `path`, held until `close`; what a server needs to go on from it.

    ledger, allocator, arena: as the last life left them, or new. rebooted: the machine was started anew since. secret: the
    same in all lives, known to nobody else. path is made if missing. accept_loss: what would be `Corruption` is kept aside, and
    a new life begins. `UsageError` for a directory or level that it cannot be, `AddressInUse` if a server that lives
    has it, `Corruption` if what is there cannot be read whole; nothing is changed then.
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
        self.sessions_stay: Final = True
        self.path: Final = private_directory(path.absolute(), "state directory")
        self.level: Final = level
        self._blocks = 0
        self._synced_at = 0.0
        with ExitStack() as made:
            self._lock = _locked(self.path)
            made.callback(self._lock.release, unlink=False)
            found = self._examine(accept_loss)
            self.rebooted: Final = isinstance(found, LostAtReboot) or (found is not None and found.rebooted)
            if isinstance(found, Past):
                journal = self._go_on(found, made)
                ledger, tail = found.ledger, found.tail
            else:
                journal = self._begin(arena_bytes, shared, made)
                ledger, tail = Ledger(epoch=0), Tail()
            self.secret: Final = journal.origin.secret
            self.checksums: Final = Path(self.arena.arena.path).parent == self.path
            self.ledger: Final = RecordedLedger(
                ledger, journal, tail, epoch=ledger.epoch + 1 if ledger.epoch else first_epoch
            )
            self._head: Final = journal.head
            self._behind_s: Final = max(ledger.now, 0.0) - time.monotonic() if ledger.epoch else 0.0
            self._made = made.pop_all()

    def clock(self) -> float:
        """Seconds that only servers of this state have lived (rule 4)."""
        return time.monotonic() + self._behind_s

    # ------------------------------------------------------------ while it serves

    def check_offer(self, hello: m.Hello) -> None:
        """`UsageError` at level ``disk``: what lies in the memory of other processes does not survive a reboot."""
        if hello.shard is not None and self.level is Level.DISK:
            raise UsageError(
                "shard refused: durability disk survives a reboot, and the memory of a further shard does not; serve with "
                "--durability process, or give the server itself a larger --arena-bytes"
            )

    def _checksum(self, offset: int, nbytes: int) -> int:
        if not 0 <= offset <= offset + nbytes <= self.allocator.capacity:
            return UNCHECKED  # the ledger will refuse it
        with self.arena.arena.view(offset, nbytes) as view:
            return checksum(view)

    def commit(self) -> None:
        """What happened so far may be told when this returns (rule 3)."""
        committed = self.ledger.blocks_committed
        if self.level is Level.DISK and committed != self._blocks:
            self.arena.arena.sync()
        self._blocks = committed
        self.ledger.commit()
        if self.level is Level.DISK and (now := time.monotonic()) - self._synced_at > HEAD_SYNC_S:
            self._head.sync()
            self._synced_at = now

    def checkpoint(self) -> None:
        """`commit`, so that the next start is quick."""
        self.commit()
        self.ledger.checkpoint()

    def close(self) -> None:
        """Let go of everything; it stays on disk and in shared memory as it was at the last commit. Again: nothing."""
        self._made.close()

    def damaged(self) -> list[int]:
        """The blocks whose bytes are not what they were, in an arena that is a file of the state directory. Reads them all."""
        if Path(self.arena.arena.path).parent != self.path:
            return []
        return [block.block for block in self.ledger.blocks_of(SHARD) if not self._matches(block)]

    def _matches(self, at: m.BlockLocation) -> bool:
        return at.checksum == UNCHECKED or self._checksum(at.offset, at.nbytes) == at.checksum

    # ------------------------------------------------------------ how it begins

    def _examine(self, accept_loss: bool) -> Past | LostAtReboot | None:
        """What there is to go on from. What there was and cannot be used is kept aside."""
        try:
            found = past.examine(self.path, self.level)
        except Corruption as error:
            if not accept_loss:
                memory = " and gives the shared memory of its rows back" if self.level is Level.PROCESS else ""
                raise Corruption(
                    f"{error}. Nothing was changed. Put the files back as they were; or begin anew without what they held, "
                    f"which keeps the files aside{memory}: transferqueue serve --durability {self.level} --state {self.path} --accept-loss"
                ) from error
            _log.error(
                "state directory %s: %s. The loss is accepted: files kept in %s", self.path, error, self._set_aside()
            )
            return None
        if isinstance(found, LostAtReboot):
            _log.error(
                "state directory %s: its rows were in shared memory, which is gone with a reboot; beginning anew, files kept in "
                "%s. %s",
                self.path,
                self._set_aside(),
                found.lost,
            )
        return found

    def _set_aside(self) -> Path:
        """Move all that an earlier life left to a new directory; which that is. The link and about.json go last: until then
        they tell of it."""
        aside = _new_directory(self.path, "lost")
        arenas = [file.name for file in self.path.glob(past.ARENAS)]
        for name in (past.JOURNAL, *_beside(past.JOURNAL), *arenas, past.LINK, past.ABOUT):
            with suppress(FileNotFoundError):
                (self.path / name).rename(aside / name)
        sync_directory(self.path)
        return aside

    def _begin(self, arena_bytes: int | None, shared: Path, made: ExitStack) -> SqliteJournal:
        """The first life here, or the first after a loss. Files of one that never committed anything are replaced."""
        arenas = [file.name for file in self.path.glob(past.ARENAS)]
        for left in (past.JOURNAL, *_beside(past.JOURNAL), past.ABOUT, *arenas):
            (self.path / left).unlink(missing_ok=True)
        journal = SqliteJournal(self.path / past.JOURNAL, self.level, origin=new_origin(STATE))
        made.callback(journal.close)
        self.arena, self.allocator = self._make(arena_bytes, shared)
        made.callback(self.arena.close)
        self._take_head(journal)
        self.arena.arena.sync()
        file = Path(self.arena.arena.path)
        self._write_about(journal, file.name if file.parent == self.path else str(file))
        return journal

    def _go_on(self, found: Past, made: ExitStack) -> SqliteJournal:
        journal = SqliteJournal(self.path / past.JOURNAL, self.level)
        made.callback(journal.close)
        if (journal.turn, journal.digest) != (found.kept.turn, found.kept.digest_of(found.kept.turn)):
            raise Corruption(f"journal {journal.path} changed while it was read; stop whatever else writes there")
        self.arena, self.allocator = self._attach(found), found.allocator
        made.callback(self.arena.close)
        self._take_head(journal)
        self._write_about(journal, os.readlink(self.path / past.LINK))
        return journal

    def _take_head(self, journal: SqliteJournal) -> None:
        journal.head = ArenaHead(self.arena.arena, journal.origin.identity, self.level)
        journal.head.begin(journal.turn, journal.digest)
        journal.head.end(journal.turn, journal.digest)

    def _make(self, arena_bytes: int | None, shared: Path) -> tuple[ArenaDirectory, Allocator]:
        home = _shared_arena(self.path, arena_bytes, shared) if self.level is Level.PROCESS else None
        if home is None:
            capacity = arena_bytes or min(ARENA_BYTES_DEFAULT, room(self.path))
            home = ArenaDirectory(Arena.create(self.path, capacity, margin=MARGIN_BYTES), stays=True)
        return home, Allocator(home.arena.capacity)

    def _attach(self, found: Past) -> ArenaDirectory:
        file = found.arena
        lock = None if file.parent == self.path else FileLock(file.parent / "lock", inherited=False)
        if lock is not None and not lock.take():
            raise AddressInUse(f"arena {file} is in use by another server; stop that one first")
        arena = Arena.attach(file, found.allocator, margin=MARGIN_BYTES)
        return ArenaDirectory(arena, file.parent, lock, stays=True)

    def _write_about(self, journal: SqliteJournal, arena: str) -> None:
        """Say what the head says, for the case that it is gone; then, if there is none, make the link."""
        about = past.About(self.level, boot_name(), journal.origin.identity.hex(), arena)
        before, _ = past.read_about(self.path)
        if about != before:
            write_private(self.path / past.ABOUT, msgspec.json.encode(about))
        link = self.path / past.LINK
        if not link.is_symlink():
            link.symlink_to(arena)
            sync_directory(self.path)


def _beside(database: str) -> tuple[str, str]:
    """The files that SQLite keeps beside a database."""
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
        raise AddressInUse(
            f"state directory {path} is in use by a server that lives; stop it, or name another directory"
        )
    return lock


def _shared_arena(state: Path, arena_bytes: int | None, shared: Path) -> ArenaDirectory | None:
    """An arena on shared memory that names its state directory; None if there is no room for it."""
    root = arena_root(shared)
    if root is None:
        return None
    remove_stale_arenas(root, own=state)
    wanted = arena_bytes or min(ARENA_BYTES_DEFAULT, room(root))
    if room(root) < wanted:
        return None
    directory, lock = claim_directory(root)
    try:
        write_private(directory / "state", str(state).encode())
        return ArenaDirectory(Arena.create(directory, wanted, margin=MARGIN_BYTES), directory, lock, stays=True)
    except BaseException:
        remove_arena(directory, lock)
        raise
