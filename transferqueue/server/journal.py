"""What a server writes down before it answers, so that its next life goes on where this one ended.

The law:

1. A journal is an *image* (a state, whole) and a *tail*: the records that came after it, in order. The state is
   the image with the tail carried out on it. What image and records hold is nobody's business here.
2. `append` only remembers. `commit` makes everything appended so far durable, at once and atomically: of one
   commit the next life finds all records or none, and never a later commit without the earlier ones.
3. `checkpoint` replaces image and tail by a new image, atomically: the next life finds the old pair or the new.
4. What cannot be written is a typed error. After one the journal takes nothing more: whatever the server did
   since the last commit never happened, and it must end without telling anybody of it.

How durable a commit is, is the level (`Level`): ``process`` hands it to the operating system, which outlives
any process; ``disk`` waits until the device has it, which outlives the power.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from transferqueue.errors import Corruption, JournalFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT: Final = 1
"""Of the tables below. A journal of another format is refused."""
PAGE_BYTES: Final = 8192
"""A turn's records mostly fit one page of the database, which is what a commit writes."""
LOCK_WAIT_S: Final = 5.0
"""Somebody who looks at the database with other tools may hold it this long."""


class Level(enum.StrEnum):
    """What survives: nothing; the crash of any process; a reboot."""

    MEMORY = "memory"
    PROCESS = "process"
    DISK = "disk"


class Journal(Protocol):
    """The record of one server. Used by one thread."""

    def append(self, record: bytes) -> None:
        """Remember a record for the next `commit`."""

    def commit(self) -> None:
        """Make durable all that was appended. Blocks as long as the level says. `JournalFailed` if it cannot."""

    def checkpoint(self, image: bytes) -> None:
        """Replace all there is, appended records too, by `image`. Atomic and durable; `JournalFailed` if it cannot."""

    def load(self) -> tuple[bytes | None, Iterable[bytes]]:
        """The image (None: there never was one) and the records after it, in order. `Corruption` if it cannot be read."""

    def close(self) -> None:
        """Let go. What was not committed is forgotten. Closing twice is allowed."""


class SqliteJournal:
    """A journal in one SQLite database in WAL mode. See `Journal`.

    path: the database, made (0600) if missing. level: ``PROCESS`` never waits for the device, ``DISK`` always.
    `JournalFailed` if it cannot be opened, `Corruption` if it is no journal.
    """

    def __init__(self, path: Path, level: Level) -> None:
        self.path: Final = path
        self._pending: list[bytes] = []
        with self._failing("cannot be opened"):
            path.touch(0o600)
            self._database = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)
        try:
            with self._corrupt():
                self._prepare("FULL" if level is Level.DISK else "OFF")
        except BaseException:
            self._database.close()
            raise

    def _prepare(self, synchronous: str) -> None:
        self._database.execute(f"PRAGMA page_size={PAGE_BYTES}")
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(f"PRAGMA synchronous={synchronous}")
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            raise Corruption(
                f"journal {self.path} has format {found}, this version reads {FORMAT}; start the version that wrote it, "
                "or name another state directory"
            )
        self._database.execute("CREATE TABLE IF NOT EXISTS image (only INTEGER PRIMARY KEY, state BLOB NOT NULL)")
        self._database.execute("CREATE TABLE IF NOT EXISTS tail (turn INTEGER PRIMARY KEY, records BLOB NOT NULL)")
        self._database.execute(f"PRAGMA user_version={FORMAT}")

    def append(self, record: bytes) -> None:
        """See `Journal.append`."""
        self._pending.append(record)

    def commit(self) -> None:
        """See `Journal.commit`. One row a commit, so its cost hardly depends on how many records there are."""
        if self._pending:
            with self._failing("cannot be written"):
                self._database.execute(
                    "INSERT INTO tail (records) VALUES (?)", (msgspec.msgpack.encode(self._pending),)
                )
            self._pending.clear()

    def checkpoint(self, image: bytes) -> None:
        """See `Journal.checkpoint`."""
        with self._failing("cannot be written"), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("INSERT OR REPLACE INTO image (only, state) VALUES (1, ?)", (image,))
            self._database.execute("DELETE FROM tail")
        self._pending.clear()

    def load(self) -> tuple[bytes | None, Iterable[bytes]]:
        """See `Journal.load`."""
        with self._corrupt():
            image = self._database.execute("SELECT state FROM image").fetchone()
            turns = self._database.execute("SELECT records FROM tail ORDER BY turn").fetchall()
            records = [record for (turn,) in turns for record in msgspec.msgpack.decode(turn, type=list[bytes])]
        return (None if image is None else image[0]), records

    def close(self) -> None:
        """See `Journal.close`."""
        self._pending.clear()
        self._database.close()

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalFailed(
                f"journal {self.path} {what}: {error}; nothing since the last commit was told to anybody. Make room "
                "there, or name another state directory, and start the server again"
            ) from error

    @contextmanager
    def _corrupt(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, TypeError) as error:
            raise Corruption(
                f"journal {self.path} cannot be read: {error}; restore a snapshot, or start with an empty state directory"
            ) from error
