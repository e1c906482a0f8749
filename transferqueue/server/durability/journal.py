"""What a server writes down before it answers, so that its next life goes on where this one ended.

The law:

1. A journal is an *image* (a state, whole) and a *tail*: the records that came after it, in order. The state is
   the image with the tail carried out on it. What image and records hold is nobody's business here.
2. `append` only remembers. `commit` makes everything appended so far durable, at once and atomically: of one
   commit the next life finds all records or none, and never a later commit without the earlier ones.
3. `checkpoint` replaces image and tail by a new image, atomically: the next life finds the old pair or the new.
4. What cannot be written is a typed error. After one the journal takes nothing more: whatever the server did
   since the last commit never happened, and it must end without telling anybody of it.
5. Commits are *turns*, counted from 1. What a turn wrote, records or image, is stored with its number, the digest of the
   turn before it, and the digest (xxh3) of all three. The first turn follows the *origin*: who wrote the journal, and a
   random identity. So a changed bit, and a turn that is missing, doubled or of another time, is found by reading.
   What reading cannot find, a missing end and an older copy of all, is found by the head (`Head`, `server.head`).
6. `read_journal` changes no byte of the journal. What was not read whole, and checked, is not written to.

How durable a commit is, is the level (`Level`): ``process`` hands it to the operating system, which outlives
any process; ``disk`` waits until the device has it, which outlives the power.
"""

from __future__ import annotations

import enum
import secrets
import sqlite3
from collections.abc import Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import xxhash

from transferqueue.errors import Corruption, JournalFailed, TransferQueueError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT: Final = 2
"""Of the tables below. A journal of another format is refused. Format 1 had no digests."""
PAGE_BYTES: Final = 8192
"""A turn's records mostly fit one page of the database, which is what a commit writes."""
LOCK_WAIT_S: Final = 5.0
"""Whoever looks at the database with other tools may hold it this long when a server starts."""
IDENTITY_BYTES: Final = 16
SECRET_BYTES: Final = 32


class Level(enum.StrEnum):
    """What survives: nothing; the crash of any process; a reboot."""

    MEMORY = "memory"
    PROCESS = "process"
    DISK = "disk"


class Head(Protocol):
    """Where the latest commit is noted, outside of the journal (rule 5)."""

    def begin(self, turn: int, digest: bytes) -> None:
        """This turn is about to be written."""

    def end(self, turn: int, digest: bytes) -> None:
        """This turn was written, as durably as the level says."""

    def sync(self) -> None:
        """What was noted so far is on the device when this returns."""


class NoHead:
    """Notes nothing: for a journal whose end nobody could take away."""

    def begin(self, turn: int, digest: bytes) -> None:
        """Nothing."""

    def end(self, turn: int, digest: bytes) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""


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


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Who began a journal. identity: random, told to whoever may see the journal's name. secret: random, told to nobody.

    version: of this package. state: what classes the image and the records have; another version may have others.
    """

    identity: bytes
    secret: bytes
    version: str
    state: bytes


def new_origin(state: bytes = b"") -> Origin:
    """Of a journal that begins now."""
    version = metadata.version("asyncflow-transferqueue")
    return Origin(secrets.token_bytes(IDENTITY_BYTES), secrets.token_bytes(SECRET_BYTES), version, state)


@dataclass(frozen=True)
class JournalContents:
    """The contents of a journal, read and checked. base: the turn of its image (0: it has none); turn: its last one."""

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
        """The digest of a turn. None: the journal does not have that turn any more, or not yet."""
        return self.digests.get(turn)


class _Blank(Exception):
    """A database that never became a journal: its server died, or was refused, before the first word."""


def read_journal(path: Path) -> JournalContents | None:
    """What is in the journal at `path`; None: there is none, or one in which nothing was ever written.

    Reads all of it, checks all of it, and changes nothing. `Corruption` for what is damaged, or is no journal; `UsageError` for
    one that an earlier version wrote.
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
    """The database, not to be changed. "immutable" opens it without a log and makes none; one with a log needs an index of it,
    which is removed again."""
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
    """Pages that are free, or that an index of pages lists twice, would damage what is written later."""
    found = [text for (text,) in database.execute("PRAGMA integrity_check(3)").fetchall()]
    if found != ["ok"]:
        raise Corruption(f"journal {path} is damaged: {'; '.join(map(str, found))}")


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
    for number, data, its in database.execute("SELECT turn, records, digest FROM tail ORDER BY turn"):
        if xxhash.xxh3_64_digest(data) != its:
            raise Corruption(f"journal {path}: turn {number} is damaged: the digest differs")
        told, before, found = msgspec.msgpack.decode(data, type=_Turn)
        if (told, number, before) != (turn + 1, turn + 1, digest):
            raise Corruption(
                f"journal {path}: turn {number} does not follow turn {turn}: turns are missing or replaced"
            )
        turn, digest = number, its
        digests[turn] = digest
        records += found
    return JournalContents(path, origin, base, turn, image, records, digests)


def _origin(database: sqlite3.Connection, path: Path) -> tuple[Origin, bytes]:
    """The origin and its digest."""
    (found,) = database.execute("PRAGMA user_version").fetchone()
    tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if found == 0 and tables == (0,):
        raise _Blank
    if found == 1:
        raise UsageError(
            f"journal {path} has format 1, which earlier builds of asyncflow-transferqueue 0.1.0 wrote and this one does not read; "
            "start that build, drain its tables or take a snapshot there, and begin with an empty state directory"
        )
    if found != FORMAT:
        raise Corruption(
            f"journal {path} has format {found}, this version reads {FORMAT}: a later version wrote it, or it is damaged; "
            "start the version that wrote it, or name another state directory"
        )
    facts, digest = database.execute("SELECT facts, digest FROM origin").fetchone()
    if xxhash.xxh3_64_digest(facts) != digest:
        raise Corruption(f"journal {path}: its origin is damaged: the digest differs")
    return msgspec.msgpack.decode(facts, type=Origin), digest


_Turn = tuple[int, bytes, list[bytes]]
"""Its number, the digest of the turn before, its records."""


def _image_digest(turn: int, before: bytes, image: bytes) -> bytes:
    digest = xxhash.xxh3_64(msgspec.msgpack.encode((turn, before)))
    digest.update(image)
    return digest.digest()


class SqliteJournal:
    """A journal in one SQLite database in WAL mode. See `Journal`.

    path: the database, made (0600) if missing. level: ``PROCESS`` never waits for the device, ``DISK`` always. origin: of a
    journal that begins here; None: a new one. head: where each commit is noted.
    `JournalFailed` if it cannot be opened, `Corruption` if it is no journal. One that is there is not read whole, see
    `read_journal`.
    """

    def __init__(self, path: Path, level: Level, *, origin: Origin | None = None, head: Head | None = None) -> None:
        self.path: Final = path
        self.head: Head = head or NoHead()
        self._disk: Final = level is Level.DISK
        self._pending: list[bytes] = []
        with _failing(path, "cannot be opened"):
            path.touch(0o600)
            self._database = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)
        try:
            with _corrupt(path):
                self._prepare("FULL" if self._disk else "OFF")
                self.origin: Final = self._begun(origin)
                self.turn, self.digest = self._last()
                _index(path).unlink(missing_ok=True)  # of a reader that was killed; with the lock, nobody uses it
        except BaseException:
            self._database.close()
            raise

    def _prepare(self, synchronous: str) -> None:
        self._database.execute(f"PRAGMA page_size={PAGE_BYTES}")
        self._database.execute(
            "PRAGMA locking_mode=EXCLUSIVE"
        )  # no index of the log that others share: a commit costs less
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(f"PRAGMA synchronous={synchronous}")

    def _begun(self, origin: Origin | None) -> Origin:
        """Write the origin, or find the one there is. Writes in any case: what cannot be written is found now."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                found, _ = _origin(self._database, self.path)
            except _Blank:
                found = origin or new_origin()
                facts = msgspec.msgpack.encode(found)
                for table in _TABLES:
                    self._database.execute(f"CREATE TABLE {table}")
                self._database.execute("INSERT INTO origin VALUES (1, ?, ?)", (facts, xxhash.xxh3_64_digest(facts)))
            self._database.execute(f"PRAGMA user_version={FORMAT}")
        return found

    def _last(self) -> tuple[int, bytes]:
        for table in ("tail", "image"):
            last = self._database.execute(f"SELECT turn, digest FROM {table} ORDER BY turn DESC LIMIT 1").fetchone()  # noqa: S608
            if last is not None:
                return last[0], last[1]
        return 0, self._database.execute("SELECT digest FROM origin").fetchone()[0]

    def append(self, record: bytes) -> None:
        """See `Journal.append`."""
        self._pending.append(record)

    def commit(self) -> None:
        """See `Journal.commit`. One row a commit, so its cost hardly depends on how many records there are."""
        if not self._pending:
            return
        turn = self.turn + 1
        data = msgspec.msgpack.encode((turn, self.digest, self._pending))
        digest = xxhash.xxh3_64_digest(data)
        self.head.begin(turn, digest)
        with _failing(self.path, "cannot be written"):
            self._database.execute("INSERT INTO tail VALUES (?, ?, ?)", (turn, data, digest))
        self._ended(turn, digest)

    def checkpoint(self, image: bytes) -> None:
        """See `Journal.checkpoint`."""
        turn = self.turn + 1
        digest = _image_digest(turn, self.digest, image)
        self.head.begin(turn, digest)
        if self._disk:
            self.head.sync()
        with _failing(self.path, "cannot be written"), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(
                "INSERT OR REPLACE INTO image VALUES (1, ?, ?, ?, ?)", (turn, self.digest, image, digest)
            )
            self._database.execute("DELETE FROM tail")
        self._ended(turn, digest)

    def _ended(self, turn: int, digest: bytes) -> None:
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
    "image (only INTEGER PRIMARY KEY, turn INTEGER NOT NULL, before BLOB NOT NULL, state BLOB NOT NULL, digest BLOB NOT NULL)",
    "tail (turn INTEGER PRIMARY KEY, records BLOB NOT NULL, digest BLOB NOT NULL)",
)


@contextmanager
def _failing(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except TransferQueueError:
        raise
    except (sqlite3.Error, OSError) as error:
        raise JournalFailed(
            f"journal {path} {what}: {error}; nothing since the last commit was told to anybody. Make room "
            "there, or name another state directory, and start the server again"
        ) from error


@contextmanager
def _corrupt(path: Path) -> Iterator[None]:
    try:
        yield
    except TransferQueueError:
        raise
    except (sqlite3.Error, msgspec.MsgspecError, TypeError, ValueError, OSError) as error:
        raise Corruption(
            f"journal {path} cannot be read: {error}; restore a snapshot, or start with an empty state directory"
        ) from error
