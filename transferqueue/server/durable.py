"""What of a server outlives it: a state directory, and how the next server goes on from it.

The law:

1. The state directory (0700) belongs to one server at a time, which holds its ``lock``. In it: ``journal.sqlite``,
   the link ``arena`` to the memory that the journal speaks of, and ``about.json``, which says under which level and in
   which boot of the machine this was written.
2. The arena lies on shared memory at level ``process`` (in the state directory where that has no room), and in the
   state directory at level ``disk``. The link is made last and removed first: what it does not lead to is nobody's.
3. A turn of the server is told only after `commit`: at level ``disk`` the bytes of its blocks are on the device, then
   at both levels its records are in the journal. At ``disk`` the server gives each block its checksum before that, and
   after a reboot, when nothing but the device had them, all blocks are checked: what does not match is reported and
   its rows end as dropped.
4. Time stands still while no server runs: the clock goes on from the last time that the journal has.
5. What level ``process`` held is gone with the machine's memory. The next server says so, keeps the old journal as
   ``lost-journal.sqlite`` for whoever wants to look, and begins anew.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec

from transferqueue.errors import AddressInUse, Corruption, TransferQueueError, UsageError
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import ARENA_BYTES_DEFAULT
from transferqueue.server.journal import Level, SqliteJournal
from transferqueue.server.memory import SHARD
from transferqueue.server.recording import RecordedLedger, Tail, recover
from transferqueue.server.runtime import (
    SHARED_MEMORY,
    ArenaHome,
    arena_root,
    claim,
    remove_arena,
    sweep_arenas,
)
from transferqueue.storage.allocator import Allocator
from transferqueue.storage.arena import Arena, room
from transferqueue.storage.checksum import UNCHECKED, checksum
from transferqueue.transport import FileLock, this_boot
from transferqueue.transport.private import private_directory, write_private
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.server")


class Durability(Protocol):
    """How what a node does comes to outlive it."""

    @property
    def sessions_stay(self) -> bool:
        """Whether clients go on with the next server."""

    def check_offer(self, hello: m.Hello) -> None:
        """`UsageError` if memory that joins could not keep what this level promises."""

    def stamp(self, request: m.Request) -> m.Request:
        """The request as it is carried out and written down: with checksums where those will be needed."""

    def commit(self) -> None:
        """What happened so far may be told when this returns."""


class Volatile:
    """Level ``memory``: nothing outlives the server."""

    sessions_stay: Final = False

    def check_offer(self, hello: m.Hello) -> None:
        """Any will do."""

    def stamp(self, request: m.Request) -> m.Request:
        """The request as it is."""
        return request

    def commit(self) -> None:
        """Nothing to wait for."""


class _About(msgspec.Struct, forbid_unknown_fields=True):
    level: Level
    boot: str


class Durable:
    """The state directory at `path`, held until `close`; what a server needs to go on from it.

    ledger, allocator, arena: as the last life left them, or new. rebooted: the machine was started anew since. path
    is made if missing. `UsageError` for a directory or level that it cannot be, `AddressInUse` if a server that lives
    has it, `Corruption` if what is there cannot be read; nothing is changed then.
    """

    def __init__(
        self,
        path: Path,
        level: Level,
        *,
        first_epoch: int,
        arena_bytes: int | None = None,
        shared: Path = SHARED_MEMORY,
    ) -> None:
        self.sessions_stay: Final = True
        self.path: Final = private_directory(path.absolute(), "state directory")
        self.level: Final = level
        self._blocks = 0
        with ExitStack() as made:
            self._lock = _locked(self.path)
            made.callback(self._lock.release, unlink=False)
            about = _read_about(self.path, level)
            self.rebooted: Final = about is not None and about.boot != this_boot()
            if about is not None and level is not Level.DISK and not self._arena_file.exists():
                self._give_up_lost()
                about = None
            journal = SqliteJournal(self.path / "journal.sqlite", level)
            made.callback(journal.close)
            ledger, tail = recover(journal)
            if about is None:
                self._refuse_stray(ledger, tail)
                self.arena, self.allocator = self._make(arena_bytes, shared)
            else:
                self.arena, self.allocator = self._attach(ledger)
            made.callback(self.arena.close)
            self.ledger: Final = RecordedLedger(
                ledger, journal, tail, epoch=ledger.epoch + 1 if ledger.epoch else first_epoch
            )
            self._write_about()
            self._journal: Final = journal
            self._behind_s: Final = max(ledger.state.now, 0.0) - time.monotonic() if ledger.epoch else 0.0
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

    def stamp(self, request: m.Request) -> m.Request:
        """At level ``disk``: the request with the checksum of each of its blocks. Reads them once, at memory speed."""
        if self.level is not Level.DISK:
            return request
        if isinstance(request, m.Publish):
            return msgspec.structs.replace(request, blocks=self._stamped(request.blocks))
        columns = getattr(request, "columns", None)
        if not isinstance(columns, m.Columns) or not columns.blocks:
            return request
        return msgspec.structs.replace(
            request, columns=msgspec.structs.replace(columns, blocks=self._stamped(columns.blocks))
        )

    def _stamped(self, blocks: Iterable[m.Placed]) -> list[m.Placed]:
        return [msgspec.structs.replace(one, checksum=self._checksum(one.offset, one.nbytes)) for one in blocks]

    def _checksum(self, offset: int, nbytes: int) -> int:
        if not 0 <= offset <= offset + nbytes <= self.allocator.capacity:
            return UNCHECKED  # the ledger will refuse it
        with self.arena.arena.view(offset, nbytes) as view:
            return checksum(view)

    def commit(self) -> None:
        """What happened so far may be told when this returns (rule 3)."""
        committed = self.ledger.state.core.blocks.committed
        if self.level is Level.DISK and committed != self._blocks:
            self.arena.arena.sync()
        self._blocks = committed
        self.ledger.commit()

    def checkpoint(self) -> None:
        """`commit`, so that the next start is quick."""
        self.commit()
        self.ledger.checkpoint()

    def close(self) -> None:
        """Let go of everything; it stays on disk and in shared memory as it was at the last commit. Again: nothing."""
        self._made.close()

    def damaged(self) -> list[int]:
        """After a reboot: the blocks whose bytes are not what they were. Reads them all."""
        if not self.rebooted:
            return []
        blocks = self.ledger.state.core.blocks.blocks
        return [number for number, one in blocks.items() if not self._matches(one.at)]

    def _matches(self, at: m.BlockAt) -> bool:
        return at.checksum == UNCHECKED or self._checksum(at.offset, at.nbytes) == at.checksum

    # ------------------------------------------------------------ how it begins

    @property
    def _link(self) -> Path:
        return self.path / "arena"

    @property
    def _arena_file(self) -> Path:
        return self._link.readlink()

    def _give_up_lost(self) -> None:
        journal = self.path / "journal.sqlite"
        _log.error("state directory %s: %s", self.path, _what_was_lost(journal))
        _remove_files(self.path, "journal.sqlite-wal", "journal.sqlite-shm")
        with suppress(FileNotFoundError):
            journal.replace(self.path / "lost-journal.sqlite")
        self._link.unlink()

    def _refuse_stray(self, ledger: Ledger, tail: Tail) -> None:
        if ledger.epoch or tail.records:
            raise Corruption(
                f"state directory {self.path} has a journal, but nothing says which memory it speaks of; restore a snapshot, "
                "or start with an empty state directory"
            )

    def _make(self, arena_bytes: int | None, shared: Path) -> tuple[ArenaHome, Allocator]:
        for left in self.path.glob("arena-*"):
            left.unlink()
        home = _shared_arena(self.path, arena_bytes, shared) if self.level is Level.PROCESS else None
        if home is None:
            capacity = arena_bytes or min(ARENA_BYTES_DEFAULT, room(self.path))
            home = ArenaHome(Arena.create(self.path, capacity), stays=True)
        return home, Allocator(home.arena.capacity)

    def _attach(self, ledger: Ledger) -> tuple[ArenaHome, Allocator]:
        file = self._arena_file
        extents = ledger.state.core.blocks.extents.values()
        lent = [(one.offset, one.nbytes) for one in extents if one.shard == SHARD]
        allocator = Allocator.holding(_size(file), lent)
        lock = None if file.parent == self.path else FileLock(file.parent / "lock", inherited=False)
        if lock is not None and not lock.take():
            raise AddressInUse(f"arena {file} is in use by another server; stop that one first")
        return ArenaHome(Arena.attach(file, allocator), file.parent, lock, stays=True), allocator

    def _write_about(self) -> None:
        write_private(self.path / "about.json", msgspec.json.encode(_About(self.level, this_boot())))
        if not self._link.is_symlink():
            self._link.symlink_to(self.arena.arena.path)


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / "lock", inherited=False)
    if not lock.take():
        raise AddressInUse(
            f"state directory {path} is in use by a server that lives; stop it, or name another directory"
        )
    return lock


def _read_about(path: Path, level: Level) -> _About | None:
    """What the last life wrote; None if there was none, or it ended before it had begun."""
    if not (path / "arena").is_symlink():
        return None
    try:
        about = msgspec.json.decode((path / "about.json").read_bytes(), type=_About)
    except (OSError, msgspec.MsgspecError) as error:
        raise Corruption(
            f"state directory {path}: about.json cannot be read ({error}); restore a snapshot, or start with an empty one"
        ) from error
    if about.level is not level:
        raise UsageError(
            f"state directory {path} was made with durability {about.level}, not {level}; start with that, or name another"
        )
    return about


def _what_was_lost(journal: Path) -> str:
    why = "its rows were in shared memory, which is gone (was the machine rebooted?); beginning anew"
    try:
        lost = SqliteJournal(journal, Level.PROCESS)
        try:
            ledger, _ = recover(lost)
        finally:
            lost.close()
    except TransferQueueError as error:
        return f"{why}. What it held cannot be told: {error}"
    rows = {name: table.rows_live for name, table in ledger.state.tables.items()}
    return f"{why}. Rows that are lost: {json.dumps(rows)}"


def _shared_arena(state: Path, arena_bytes: int | None, shared: Path) -> ArenaHome | None:
    """An arena on shared memory that names its state directory; None if there is no room for it."""
    root = arena_root(shared)
    if root is None:
        return None
    sweep_arenas(root)
    wanted = arena_bytes or min(ARENA_BYTES_DEFAULT, room(root))
    if room(root) < wanted:
        return None
    directory, lock = claim(root)
    try:
        write_private(directory / "state", str(state).encode())
        return ArenaHome(Arena.create(directory, wanted), directory, lock, stays=True)
    except BaseException:
        remove_arena(directory, lock)
        raise


def _size(file: Path) -> int:
    try:
        return os.stat(file, follow_symlinks=False).st_size
    except OSError as error:
        raise Corruption(f"arena {file} cannot be opened: {error.strerror}; its rows are lost with it") from error


def _remove_files(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)
