"""The journal: a server writes to it before it answers, so that its next run continues where this one ended.

1. A journal is an *image* (one complete state) and a *tail* (the records after it, in order). Replaying the tail on the
   image gives the state. The journal interprets neither.
2. `append` only buffers. `commit` makes all buffered records durable at once and atomically: after a crash the journal
   has all records of a commit or none, and no commit without those before it.
3. `checkpoint` replaces image and tail by a new image, atomically: after a crash the journal is the old pair or the new
   image.
4. A failed write raises `JournalFailed`. The server must end without answering, since the restart undoes all changes
   after the last commit. After `DiskFailed` of a full disk nothing was written, and the same call may be made again
   once there is room.
5. Each commit is a *turn*, counted from 1. A turn, records or image, is stored with its number, the digest of the turn
   before it, and the digest (xxh3) of all three. The first turn follows the *origin*: the writer of the journal, and a
   random identity. So a reader detects a changed bit, and a turn that is missing, doubled or from another time. The
   head (`Head`, `journal_head`) detects a missing end and an older copy of the whole journal.
6. `read_journal` changes no byte. A server writes only to a journal that it has read and checked completely.

The `Level` says how durable a commit is. ``process`` hands it to the operating system, so it survives the crash of any
process. ``disk`` waits until the disk has it, so it survives a power failure.
"""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
from collections.abc import Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import xxhash

from transferqueue.errors import Corruption, JournalFailed, TransferQueueError, UsageError
from transferqueue.server.durability.disk import disk_error, disk_failed
from transferqueue.server.durability_level import Level
from transferqueue.storage.memory.room import free_bytes
from transferqueue.wire.versions import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT: Final = 2
"""The version of the tables below. A journal of another format is refused. Format 1 had no digests."""
PAGE_BYTES: Final = 8192
"""The records of a turn usually fit one page of the database, so a commit writes one page."""
LOCK_WAIT_S: Final = 5.0
"""A starting server waits this long for another tool that locks the database."""
IDENTITY_BYTES: Final = 16
_IMAGE_SLACK: Final = 8
"""A database grows by at most this part of the image more than the image that is written to it."""
SECRET_BYTES: Final = 32


class Head(Protocol):
    """Notes the latest commit outside of the journal (rule 5)."""

    def begin(self, turn: int, digest: bytes) -> None:
        """Note that a turn is about to be written."""

    def end(self, turn: int, digest: bytes) -> None:
        """Note that a turn was written, as durably as the level requires."""

    def sync(self) -> None:
        """Return when all notes so far are on disk."""


class NoHead:
    """Notes nothing, for a journal without an arena."""

    def begin(self, turn: int, digest: bytes) -> None:
        """Do nothing."""

    def end(self, turn: int, digest: bytes) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""


class Journal(Protocol):
    """The journal of one server, for one thread."""

    def append(self, record: bytes) -> None:
        """Buffer a record for the next `commit`."""

    def commit(self) -> None:
        """Make all appended records durable, as the level requires. Blocks until they are. `JournalFailed` if the write
        fails."""

    def checkpoint(self, image: bytes) -> None:
        """Replace image and tail, and all appended records, by `image`. Atomic and durable. `JournalFailed` if the
        write fails; then a `commit` of the records may follow."""

    def load(self) -> tuple[bytes | None, Iterable[bytes]]:
        """The image (None: there is none yet) and the records after it, in order. `Corruption` if the journal cannot be
        read."""

    def close(self) -> None:
        """Close the journal. Records that were not committed are dropped. Closing twice is allowed."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The writer of a journal.

    Args:
        identity: random; names the journal in the head and in about.json.
        secret: random; the key of tickets.
        version: of this package.
        state: fingerprint of the classes in image and records, which another version may have changed.
    """

    identity: bytes
    secret: bytes
    version: str
    state: bytes


def new_origin(state: bytes = b"") -> Origin:
    """The origin of a new journal."""
    version = VERSION
    return Origin(secrets.token_bytes(IDENTITY_BYTES), secrets.token_bytes(SECRET_BYTES), version, state)


@dataclass(frozen=True)
class JournalContents:
    """The contents of a journal, read and checked. `base` is the turn of its image (0: none), `turn` its last turn."""

    path: Path
    origin: Origin
    base: int
    turn: int
    image: bytes | None
    records: list[bytes]
    digests: dict[int, bytes]

    @property
    def identity(self) -> bytes:
        """See `Origin`."""
        return self.origin.identity

    def load(self) -> tuple[bytes | None, Iterable[bytes]]:
        """See `Journal.load`."""
        return self.image, self.records

    def digest_of(self, turn: int) -> bytes | None:
        """The digest of a turn; None if the journal no longer has that turn, or not yet."""
        return self.digests.get(turn)


class _Blank(Exception):
    """A database without an origin: its server ended before it wrote anything."""


def read_journal(path: Path) -> JournalContents | None:
    """Read and check the journal at `path`, and change nothing. None if it does not exist, or is still empty.

    Raises:
        Corruption: the file is damaged or no journal.
        UsageError: the journal has an earlier format.
    """
    log = path.with_name(path.name + "-wal")
    with _corrupt(path):
        if not path.is_file() or path.stat().st_size == 0:
            if log.is_file() and log.stat().st_size:
                raise Corruption(f"journal {path} is missing or empty, though its log {log.name} is there")
            return None
        with _reading(path, log) as database:
            _check_pages(database, path)
            try:
                return _read(database, path)
            except _Blank:
                return None


@contextmanager
def _reading(path: Path, log: Path) -> Iterator[sqlite3.Connection]:
    """Open the database for reading. "immutable" opens a database without a log, and creates no log. A database with a
    log needs an index of the log, which is removed again."""
    logged = log.is_file() and log.stat().st_size > 0
    index = _index(path)
    made = logged and not index.exists()
    try:
        uri = f"{path.absolute().as_uri()}?{'mode=ro' if logged else 'immutable=1'}"
        with closing(sqlite3.connect(uri, uri=True, timeout=LOCK_WAIT_S, isolation_level=None)) as database:
            yield database
    finally:
        if made:
            index.unlink(missing_ok=True)


def _index(path: Path) -> Path:
    return path.with_name(path.name + "-shm")


def _check_pages(database: sqlite3.Connection, path: Path) -> None:
    """`Corruption` if the database is inconsistent: later writes would damage it more."""
    problems = [text for (text,) in database.execute("PRAGMA integrity_check(3)").fetchall()]
    if problems != ["ok"]:
        raise Corruption(f"journal {path} is damaged: {'; '.join(map(str, problems))}")


def _read(database: sqlite3.Connection, path: Path) -> JournalContents:
    origin, digest = _origin(database, path)
    base, image, digests = 0, None, {0: digest}
    stored = database.execute("SELECT turn, before, state, digest FROM image").fetchone()
    if stored is not None:
        base, before, image, digest = stored
        if _image_digest(base, before, image) != digest:
            raise Corruption(f"journal {path}: its image (turn {base}) is damaged: the digest differs")
        digests = {base - 1: before, base: digest}
    turn, records = base, []
    for number, data, stored_digest in database.execute("SELECT turn, records, digest FROM tail ORDER BY turn"):
        if xxhash.xxh3_64_digest(data) != stored_digest:
            raise Corruption(f"journal {path}: turn {number} is damaged: the digest differs")
        inner_number, before, turn_records = msgspec.msgpack.decode(data, type=_Turn)
        if (inner_number, number, before) != (turn + 1, turn + 1, digest):
            raise Corruption(
                f"journal {path}: turn {number} does not follow turn {turn}: turns are missing or replaced"
            )
        turn, digest = number, stored_digest
        digests[turn] = digest
        records += turn_records
    return JournalContents(path, origin, base, turn, image, records, digests)


def _origin(database: sqlite3.Connection, path: Path) -> tuple[Origin, bytes]:
    """The origin and its digest."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version == 0 and tables == (0,):
        raise _Blank
    if version == 1:
        raise UsageError(
            f"journal {path} has format 1, which earlier builds of asyncflow-transferqueue 0.1.0 wrote and this one "
            "does not read; start that build, drain its tables or take a snapshot there, and begin with an empty "
            "state directory"
        )
    if version != FORMAT:
        raise Corruption(
            f"journal {path} has format {version}, this version reads {FORMAT}: a later version wrote it, or it is "
            "damaged; start the version that wrote it, or name another state directory"
        )
    facts, digest = database.execute("SELECT facts, digest FROM origin").fetchone()
    if xxhash.xxh3_64_digest(facts) != digest:
        raise Corruption(f"journal {path}: its origin is damaged: the digest differs")
    return msgspec.msgpack.decode(facts, type=Origin), digest


_Turn = tuple[int, bytes, list[bytes]]
"""The number of the turn, the digest of the turn before it, and its records."""


def _image_digest(turn: int, before: bytes, image: bytes) -> bytes:
    digest = xxhash.xxh3_64(msgspec.msgpack.encode((turn, before)))
    digest.update(image)
    return digest.digest()


class SqliteJournal:
    """A journal in one SQLite database in WAL mode. See `Journal`. An existing one is not read completely here: see
    `read_journal`.

    Args:
        path: the database, created (0600) if missing.
        level: ``PROCESS`` never waits for the disk, ``DISK`` always.
        origin: for a new journal; None: a random one.

    Raises:
        JournalFailed: it cannot be opened.
        Corruption: it is no journal.
    """

    def __init__(self, path: Path, level: Level, *, origin: Origin | None = None) -> None:
        self.path: Final = path
        self.head: Head = NoHead()
        """Notes each commit."""
        self._disk: Final = level.survives_reboot
        self._pending: list[bytes] = []
        with _failing(path, "cannot be opened"):
            path.touch(0o600)
            self._database = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)
        try:
            with _corrupt(path):
                self._prepare("FULL" if self._disk else "OFF")
                self.origin: Final = self._open_origin(origin)
                self.turn, self.digest = self._last()
                _index(path).unlink(missing_ok=True)  # a killed reader left it; unused, since we hold the lock
        except BaseException:
            self._database.close()
            raise

    def _prepare(self, synchronous: str) -> None:
        self._database.execute(f"PRAGMA page_size={PAGE_BYTES}")
        self._database.execute("PRAGMA locking_mode=EXCLUSIVE")  # commits are faster without a shared index of the log
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(f"PRAGMA synchronous={synchronous}")

    def _open_origin(self, origin: Origin | None) -> Origin:
        """Read the origin, or write it to a new journal. Writes in any case, so that an unwritable file fails now."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                existing, _ = _origin(self._database, self.path)
            except _Blank:
                existing = origin or new_origin()
                facts = msgspec.msgpack.encode(existing)
                for table in _TABLES:
                    self._database.execute(f"CREATE TABLE {table}")
                self._database.execute("INSERT INTO origin VALUES (1, ?, ?)", (facts, xxhash.xxh3_64_digest(facts)))
            self._database.execute(f"PRAGMA user_version={FORMAT}")
        return existing

    def _last(self) -> tuple[int, bytes]:
        for table in ("tail", "image"):
            query = f"SELECT turn, digest FROM {table} ORDER BY turn DESC LIMIT 1"  # noqa: S608
            last = self._database.execute(query).fetchone()
            if last is not None:
                return last[0], last[1]
        return 0, self._database.execute("SELECT digest FROM origin").fetchone()[0]

    def append(self, record: bytes) -> None:
        """See `Journal.append`."""
        self._pending.append(record)

    def commit(self) -> None:
        """See `Journal.commit`. A commit is one row, so its cost hardly depends on the number of records."""
        if not self._pending:
            return
        turn = self.turn + 1
        data = msgspec.msgpack.encode((turn, self.digest, self._pending))
        digest = xxhash.xxh3_64_digest(data)
        self.head.begin(turn, digest)
        with _failing(self.path, "cannot be written"):
            self._database.execute("INSERT INTO tail VALUES (?, ?, ?)", (turn, data, digest))
        self._turn_written(turn, digest)

    def checkpoint(self, image: bytes) -> None:
        """See `Journal.checkpoint`."""
        turn = self.turn + 1
        digest = _image_digest(turn, self.digest, image)
        with _failing(self.path, "cannot be rewritten"):
            if free_bytes(self.path.parent)[0] < len(image) + len(image) // _IMAGE_SLACK + PAGE_BYTES:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {len(image):,} bytes")
        self._note_begun(turn, digest)
        try:
            self._replace(turn, digest, image)
        except BaseException:
            self._note_begun(self.turn, self.digest)  # the latest note may be of another turn
            raise
        self._turn_written(turn, digest)

    def _note_begun(self, turn: int, digest: bytes) -> None:
        self.head.begin(turn, digest)
        if self._disk:
            self.head.sync()

    def _replace(self, turn: int, digest: bytes, image: bytes) -> None:
        with _failing(self.path, "cannot be rewritten"), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(
                "INSERT OR REPLACE INTO image VALUES (1, ?, ?, ?, ?)", (turn, self.digest, image, digest)
            )
            self._database.execute("DELETE FROM tail")

    def _turn_written(self, turn: int, digest: bytes) -> None:
        self.head.end(turn, digest)
        self.turn, self.digest = turn, digest
        self._pending.clear()

    def load(self) -> tuple[bytes | None, Iterable[bytes]]:
        """See `Journal.load`."""
        with _corrupt(self.path):
            return _read(self._database, self.path).load()

    def close(self) -> None:
        """See `Journal.close`."""
        self._pending.clear()
        self._database.close()


_TABLES: Final = (
    "origin (only INTEGER PRIMARY KEY, facts BLOB NOT NULL, digest BLOB NOT NULL)",
    (
        "image (only INTEGER PRIMARY KEY, turn INTEGER NOT NULL, before BLOB NOT NULL, state BLOB NOT NULL, digest "
        "BLOB NOT NULL)"
    ),
    "tail (turn INTEGER PRIMARY KEY, records BLOB NOT NULL, digest BLOB NOT NULL)",
)


@contextmanager
def _failing(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except TransferQueueError:
        raise
    except (sqlite3.Error, OSError) as error:
        if (cause := disk_error(error)) is not None:
            raise disk_failed(f"journal {path} {what}", path.parent, cause) from error
        raise JournalFailed(
            f"journal {path} {what}: {error}; no client was told of a change since the last commit. Make room there, "
            "or name another state directory, and start the server again"
        ) from error


@contextmanager
def _corrupt(path: Path) -> Iterator[None]:
    try:
        yield
    except TransferQueueError:
        raise
    except (sqlite3.Error, msgspec.MsgspecError, TypeError, ValueError, OSError) as error:
        if (cause := disk_error(error)) is not None:
            raise disk_failed(f"journal {path} cannot be read", path.parent, cause) from error
        raise Corruption(
            f"journal {path} cannot be read: {error}; restore a snapshot, or start with an empty state directory"
        ) from error
