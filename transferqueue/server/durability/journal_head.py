"""The head of a journal: a note of its latest commit, stored outside of the journal.

A journal proves that its contents were written, in that order. It cannot prove that its end is not missing, or that it
is not an older copy of itself. So each commit is also noted in the *head*: two slots in the margin of the arena's file,
which the server maps, so a note costs no system call.

1. The slot *begun* is written before a commit, the slot *done* after it. A note contains the journal's identity, the
   turn and its digest, the level, the boot of the machine and the size of the arena's file, and has a checksum.
2. A process may die between any two of these steps, so the last turn of the journal is that of *begun* or that of
   *done*. While the machine runs, `check` accepts no other. It so detects a journal or an arena that was replaced by an
   older one, and a journal whose end is missing.
3. After a reboot at level ``disk`` the head may be older than the journal, since the system writes mapped pages at any
   time. It is never newer than the last commit, and never older than the last image (`SqliteJournal.checkpoint`).
4. An unreadable slot is ignored; the other one is enough.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import xxhash

from transferqueue.errors import Corruption
from transferqueue.limits import PAGE_BYTES
from transferqueue.server.durability.journal import IDENTITY_BYTES
from transferqueue.server.durability_level import Level
from transferqueue.transport import this_boot

if TYPE_CHECKING:
    from transferqueue.server.durability.journal import JournalContents
    from transferqueue.storage.memory.arena import Arena

MARGIN_BYTES: Final = PAGE_BYTES
_MAGIC: Final = b"tq head1"
_LEVELS: Final = list(Level)
_NOTE: Final = struct.Struct(f"<8s{IDENTITY_BYTES}s16sBQQ8s")
_CHECKED: Final = _NOTE.size + 8
_BEGUN: Final = 0
_DONE: Final = PAGE_BYTES // 2
"""In another sector than the first slot: a power failure damages at most one of them."""


@dataclass(frozen=True)
class Note:
    """The contents of a slot. `boot` is the digest of the boot's name, `nbytes` the size of the arena's file."""

    identity: bytes
    boot: bytes
    level: Level
    nbytes: int
    turn: int
    digest: bytes

    def packed(self) -> bytes:
        """The bytes of the slot."""
        level = _LEVELS.index(self.level)
        return _checked(_NOTE.pack(_MAGIC, self.identity, self.boot, level, self.nbytes, self.turn, self.digest))


@dataclass(frozen=True)
class Notes:
    """Both slots; None for an unreadable one."""

    begun: Note | None
    done: Note | None

    @property
    def any(self) -> Note | None:
        """Either note, for the facts that both share; None if neither can be read."""
        return self.done or self.begun


class ArenaHead:
    """The head of the journal `identity`, in the margin of `arena`. See `journal.Head`."""

    def __init__(self, arena: Arena, identity: bytes, level: Level) -> None:
        self._arena = arena
        self._before = Note(identity, boot_digest(), level, arena.capacity + arena.margin, 0, bytes(8)).packed()[:-24]
        self._write = arena.write_margin

    def begin(self, turn: int, digest: bytes) -> None:
        """See `journal.Head.begin`."""
        self._write(_BEGUN, _checked(self._before + turn.to_bytes(8, "little") + digest))

    def end(self, turn: int, digest: bytes) -> None:
        """See `journal.Head.end`."""
        self._write(_DONE, _checked(self._before + turn.to_bytes(8, "little") + digest))

    def sync(self) -> None:
        """See `journal.Head.sync`."""
        self._arena.sync_margin()


def read_notes(margin: bytes) -> Notes:
    """Read the head from the bytes of a margin."""
    return Notes(_note(margin[_BEGUN:]), _note(margin[_DONE:]))


def check(notes: Notes, journal: JournalContents, *, rebooted: bool) -> None:
    """`Corruption` unless this is the complete journal of the head (rules 2 and 3)."""
    begun, done = notes.begun, notes.done
    for note in (begun, done):
        if note is not None and note.identity != journal.identity:
            raise Corruption(
                f"journal {journal.path} does not belong to its arena: it is journal {journal.identity.hex()}, and the "
                f"arena belongs to journal {note.identity.hex()}"
            )
        if note is not None and journal.digest_of(note.turn) not in (None, note.digest):
            raise Corruption(
                f"journal {journal.path} differs at turn {note.turn} from the arena's note of it: one of the two was "
                "replaced"
            )
    known = done.turn if done is not None else begun.turn - 1 if begun is not None else None
    if known is None:
        raise Corruption(
            f"journal {journal.path}: the arena's last page, which notes the latest commit, cannot be read"
        )
    latest = begun.turn if begun is not None else known + 1
    if journal.turn < known:
        raise Corruption(
            f"journal {journal.path} ends at turn {journal.turn}, but turn {known} was committed: its end is missing, "
            "or it is an older copy"
        )
    oldest = journal.base - 1 if rebooted else journal.turn
    if max(known, latest) < oldest:
        raise Corruption(
            f"journal {journal.path} ends at turn {journal.turn}, but its arena is of turn {latest}: the arena is an "
            "older copy"
        )


def boot_name() -> str:
    """The name of the machine's current boot."""
    return this_boot()


def boot_digest() -> bytes:
    """The digest of `boot_name`."""
    return blake2b(boot_name().encode(), digest_size=16).digest()


def _note(data: bytes) -> Note | None:
    packed = data[: _NOTE.size]
    if len(data) < _CHECKED or _checked(packed) != data[:_CHECKED]:
        return None
    magic, identity, boot, level, nbytes, turn, digest = _NOTE.unpack(packed)
    if magic != _MAGIC or level >= len(_LEVELS):
        return None
    return Note(identity, boot, _LEVELS[level], nbytes, turn, digest)


def _checked(packed: bytes) -> bytes:
    return packed + xxhash.xxh3_64_digest(packed)
