"""Reads the state directory of an earlier run completely, and checks it before the server changes anything there.

1. A server ran here if there is ``about.json``, the link ``arena``, or an arena whose head notes commits. Then there
   must be a readable journal that the head accepts (`journal_head`). Otherwise the result is `Corruption`, which names
   the evidence, and the directory is unchanged.
2. A directory without any commit is new: no client was told anything. A server that dies while it makes its files
   leaves a new directory, since it makes the link last.
3. `about.json` is for a missing arena. At level ``process``, in another boot of the machine, a missing arena is
   expected (`LostAtReboot`) and no damage. If the arena exists, the head contains all facts of `about.json`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import Corruption, DiskFailed, TransferQueueError, UsageError
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.tasks.selectors import SELECTORS
from transferqueue.server.durability import journal_head
from transferqueue.server.durability.disk import disk_error
from transferqueue.server.durability.journal import JournalContents, read_journal
from transferqueue.server.durability.journal_head import MARGIN_BYTES, Notes
from transferqueue.server.durability.recorded_ledger import STATE, Tail, replay_journal
from transferqueue.server.durability_level import Level
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.storage.memory.allocator import Allocator

JOURNAL: Final = "journal.sqlite"
LINK: Final = "arena"
ABOUT: Final = "about.json"
ARENAS: Final = "arena-*"
"""The arenas that are files in the state directory."""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of ``about.json``.

    Args:
        identity: of the journal, in hexadecimal digits; "": a build without digests wrote it.
        arena: the target of the link.
    """

    level: Level
    boot: str
    identity: str = ""
    arena: str = ""


@dataclass(frozen=True)
class PreviousState:
    """The state from which the next run continues. `allocator`: of the arena, with all granted extents."""

    arena: Path
    allocator: Allocator
    journal: JournalContents
    ledger: Ledger
    tail: Tail
    rebooted: bool


@dataclass(frozen=True)
class LostAtReboot:
    """A state directory from before a reboot, of a level that survives none. `lost` describes its lost rows."""

    lost: str


def examine(path: Path, level: Level) -> PreviousState | LostAtReboot | None:
    """Read the state directory at `path`, and change nothing. None if it has no commit.

    Raises:
        Corruption: files are damaged or missing.
        UsageError: the state has another level or version.
    """
    about, problem = read_about(path)
    if about is not None and not about.identity:
        raise UsageError(
            f"state directory {path} was written by an earlier build of asyncflow-transferqueue 0.1.0, whose journals "
            "have no digests; start that build, drain its tables or take a snapshot there, and begin with an empty "
            "state directory"
        )
    link = path / LINK
    if not link.is_symlink():
        return _without_link(path, level, about, problem)
    file = path / link.readlink()
    if not os.path.lexists(file):
        return _without_arena(path, level, about, problem, file)
    return _with_arena(path, level, file)


def read_about(path: Path) -> tuple[About | None, str]:
    """The contents of ``about.json``, and why they cannot be read ("" if they can, or without such a file)."""
    try:
        return msgspec.json.decode((path / ABOUT).read_bytes(), type=About), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        if disk_error(error) is not None:
            raise
        return None, str(error)


def _with_arena(path: Path, level: Level, file: Path) -> PreviousState | LostAtReboot:
    size, notes = _notes_in(file)
    note = notes.any
    if note is None or note.nbytes != size:
        raise Corruption(
            f"state directory {path}: {file} was replaced or cut: its last page does not note the latest commit"
        )
    _check_level(path, note.level, level)
    rebooted = any(note is not None and note.boot != journal_head.boot_digest() for note in (notes.begun, notes.done))
    if rebooted and not level.survives_reboot:
        return LostAtReboot(_what_was_lost(path))
    journal = _journal(path)
    if journal is None:
        raise Corruption(
            f"state directory {path} has no journal ({JOURNAL} is missing or empty), though its arena {file} notes "
            f"turn {note.turn}"
        )
    journal_head.check(notes, journal, rebooted=rebooted)
    ledger, tail = replay_journal(journal, SELECTORS.found())
    granted = [(extent.offset, extent.nbytes) for extent in ledger.extents_of(SHARD)]
    return PreviousState(file, Allocator.holding(size - MARGIN_BYTES, granted), journal, ledger, tail, rebooted)


def _without_link(path: Path, level: Level, about: About | None, problem: str) -> LostAtReboot | None:
    if about is not None:
        _check_level(path, about.level, level)
        if not level.survives_reboot and about.boot != journal_head.boot_name():
            return LostAtReboot(_what_was_lost(path))
    journal = _journal(path)
    strays = [file for file in path.glob(ARENAS) if _commits_in(file)]
    if journal is not None and journal.turn:
        where = f"the arena was at {about.arena}: if it is there, ln -s {about.arena} {path / LINK}" if about else (
            f"{ABOUT} is {'unreadable' if problem else 'missing'} too"
        )  # fmt: skip
        raise Corruption(
            f"state directory {path} has a journal, but the link {LINK}, which says where its arena is, is missing; "
            f"{where}"
        )
    if strays:
        raise Corruption(
            f"state directory {path} has the arena {strays[0].name} of an earlier run, but not its journal ({JOURNAL})"
        )
    if problem or (about is not None and journal is None):
        raise Corruption(
            f"state directory {path} has no journal ({JOURNAL} is missing or empty), though {ABOUT} describes an "
            "earlier run"
        )
    return None


def _without_arena(path: Path, level: Level, about: About | None, problem: str, file: Path) -> LostAtReboot:
    if about is None:
        why = f"cannot be read ({problem})" if problem else "is missing"
        raise Corruption(f"state directory {path}: its arena {file} is missing, and {ABOUT} {why}")
    _check_level(path, about.level, level)
    lost = _what_was_lost(path)
    if not level.survives_reboot and about.boot != journal_head.boot_name():
        return LostAtReboot(lost)
    raise Corruption(
        f"state directory {path}: its arena {file} is missing, though the machine was not rebooted since. {lost}"
    )


def _journal(path: Path) -> JournalContents | None:
    journal = read_journal(path / JOURNAL)
    if journal is not None and journal.origin.state != STATE:
        raise UsageError(
            f"state directory {path} was written by asyncflow-transferqueue {journal.origin.version}, whose format of "
            "the state differs; start that version, drain its tables or take a snapshot there, and begin with an empty "
            "state directory"
        )
    return journal


def _check_level(path: Path, made: Level, level: Level) -> None:
    if made is not level:
        raise UsageError(
            f"state directory {path} has durability {made}, not {level}; start with that, or name another directory"
        )


def _notes_in(file: Path) -> tuple[int, Notes]:
    """The size of an arena's file, and the notes in its head."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Corruption(f"arena {file} cannot be opened: {error.strerror}; its rows are lost with it") from error
    with open(fd, "rb") as arena:
        try:
            size = os.fstat(fd).st_size
            arena.seek(max(size - MARGIN_BYTES, 0))
            return size, journal_head.read_notes(arena.read(MARGIN_BYTES))
        except OSError as error:
            raise Corruption(f"arena {file} cannot be read: {error.strerror}; its rows are lost with it") from error


def _commits_in(file: Path) -> bool:
    note = _notes_in(file)[1].any
    return note is not None and note.turn > 0


def _what_was_lost(path: Path) -> str:
    try:
        journal = _journal(path)
        rows = {} if journal is None else replay_journal(journal, SELECTORS.found())[0].live_rows()
    except DiskFailed:
        raise
    except TransferQueueError as error:
        return f"The lost rows cannot be listed: {error}"
    return f"Lost rows: {json.dumps(rows)}"
