import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from transferqueue.errors import Corruption, DiskFailed, JournalFailed, UsageError
from transferqueue.server.durability.journal import Origin, SqliteJournal, read_journal
from transferqueue.server.durability_level import Level

LEVELS = [Level.PROCESS, Level.DISK]

WRITE_AND_HANG = """
import sys
from pathlib import Path
from transferqueue.server.durability.journal import Level, SqliteJournal
journal = SqliteJournal(Path(sys.argv[1]), Level(sys.argv[2]))
for turn in range(50):
    journal.append(b"%d a" % turn)
    journal.append(b"%d b" % turn)
    journal.commit()
journal.append(b"never committed")
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def loaded(path, level=Level.PROCESS):
    journal = SqliteJournal(path, level)
    try:
        image, records = journal.load()
        return image, list(records)
    finally:
        journal.close()


@pytest.mark.parametrize("level", LEVELS)
def test_the_next_life_finds_what_was_committed_in_order(path, level):
    journal = SqliteJournal(path, level)
    assert journal.load() == (None, [])
    for record in (b"one", b"", b"three"):
        journal.append(record)
    journal.commit()
    journal.commit()
    journal.append(b"four")
    journal.commit()
    journal.append(b"lost")
    journal.close()
    journal.close()
    assert loaded(path, level) == (None, [b"one", b"", b"three", b"four"])


def test_a_checkpoint_replaces_all_before_it(path):
    journal = SqliteJournal(path, Level.PROCESS)
    journal.append(b"one")
    journal.commit()
    journal.append(b"in the image too")
    journal.checkpoint(b"image 1")
    journal.commit()
    assert journal.load() == (b"image 1", [])
    journal.append(b"two")
    journal.commit()
    journal.checkpoint(b"image 2")
    journal.append(b"three")
    journal.commit()
    journal.close()
    assert loaded(path) == (b"image 2", [b"three"])


def test_files_are_private(path):
    journal = SqliteJournal(path, Level.PROCESS)
    journal.append(b"secret")
    journal.commit()
    modes = {found.name: found.stat().st_mode & 0o077 for found in path.parent.iterdir()}
    journal.close()
    assert len(modes) > 1
    assert set(modes.values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_process_loses_only_what_was_not_committed(path, level):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_HANG, str(path), level], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with writer:
        assert writer.stdout.readline() == b"written\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert loaded(path) == (None, [b"%d %s" % (turn, which) for turn in range(50) for which in (b"a", b"b")])


def test_a_journal_that_cannot_be_written_says_so(path):
    journal = SqliteJournal(path, Level.PROCESS)
    journal.append(b"one")
    journal.commit()
    journal._database.execute("PRAGMA max_page_count=6")  # as small a disk as SQLite can be given
    journal.append(bytes(1 << 20))
    with pytest.raises(
        DiskFailed, match=r"journal .*journal.sqlite cannot be written: its disk is full .*free some space"
    ):
        journal.commit()
    with pytest.raises(DiskFailed, match="cannot be rewritten"):
        journal.checkpoint(bytes(1 << 20))
    image, records = journal.load()
    assert (image, list(records)) == (None, [b"one"])
    journal._database.execute("PRAGMA max_page_count=1000000")
    journal.commit()  # the same once more: nothing of it was written before
    journal.close()
    assert loaded(path) == (None, [b"one", bytes(1 << 20)])


def test_a_directory_that_is_missing_is_refused(tmp_path):
    with pytest.raises(JournalFailed, match=r"cannot be opened: .*No such file"):
        SqliteJournal(tmp_path / "nowhere" / "journal.sqlite", Level.PROCESS)


def test_what_is_no_journal_is_refused_and_left_as_it_is(path):
    path.write_bytes(b"these are my notes, not a database" * 100)
    before = path.read_bytes()
    with pytest.raises(Corruption, match=r"cannot be read: file is not a database; restore a snapshot"):
        SqliteJournal(path, Level.PROCESS)
    assert path.read_bytes() == before


def test_another_format_is_refused(path):
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(
        Corruption, match=r"has format 99, this version reads 2: a later version wrote it, or it is damaged"
    ):
        SqliteJournal(path, Level.PROCESS)


def test_the_format_without_digests_is_refused(path):
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=1")
    database.close()
    for opened in (lambda: SqliteJournal(path, Level.PROCESS), lambda: read_journal(path)):
        with pytest.raises(UsageError, match=r"has format 1, which earlier builds of .* wrote .*take a snapshot there"):
            opened()


@pytest.fixture
def written(path):
    """Five turns, an image as the second."""
    journal = SqliteJournal(path, Level.PROCESS)
    for turn in range(1, 6):
        journal.append(b"record %d" % turn)
        journal.checkpoint(b"image") if turn == 2 else journal.commit()
    journal.close()
    kept = read_journal(path)
    assert (kept.base, kept.turn, kept.image) == (2, 5, b"image")
    assert kept.records == [b"record 3", b"record 4", b"record 5"]
    assert sorted(kept.digests) == [1, 2, 3, 4, 5]
    return path


def execute(path, *statements):
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("DELETE FROM tail WHERE turn = 4", "turn 5 does not follow turn 3: turns are missing or replaced"),
        ("DELETE FROM tail WHERE turn = 3", "turn 4 does not follow turn 2"),
        ("DELETE FROM image", "turn 3 does not follow turn 0"),
        ("UPDATE tail SET turn = 6 WHERE turn = 5", "turn 6 does not follow turn 4"),
        ("UPDATE tail SET turn = 7 - turn + 100 WHERE turn < 5", "turn 5 does not follow turn 2"),
        ("UPDATE tail SET records = zeroblob(9) WHERE turn = 4", "turn 4 is damaged: the digest differs"),
        ("UPDATE tail SET digest = zeroblob(8) WHERE turn = 4", "turn 4 is damaged"),
        ("UPDATE tail SET records = 'text' WHERE turn = 4", "cannot be read"),
        ("UPDATE tail SET records = 7 WHERE turn = 4", "cannot be read"),
        ("UPDATE image SET state = x'00'", r"its image \(turn 2\) is damaged"),
        ("UPDATE image SET turn = 3", "its image .* is damaged"),
        ("UPDATE image SET turn = 'two'", "its image .* is damaged"),
        ("UPDATE image SET before = zeroblob(8)", "its image .* is damaged"),
        ("UPDATE origin SET facts = x'00'", "its origin is damaged"),
        ("DELETE FROM origin", "cannot be read"),
        ("DROP TABLE tail", "cannot be read: no such table"),
        ("PRAGMA user_version = 0", "has format 0"),
    ],
)  # fmt: skip
def test_a_turn_that_is_changed_missing_or_moved_is_found(written, statement, told):
    execute(written, statement)
    before = written.read_bytes()
    with pytest.raises(Corruption, match=told):
        read_journal(written)
    assert written.read_bytes() == before
    assert [file.name for file in written.parent.iterdir()] == [written.name]


def test_turns_of_another_journal_are_found(written, tmp_path):
    other = tmp_path / "other.sqlite"
    journal = SqliteJournal(other, Level.PROCESS)
    for turn in range(1, 6):
        journal.append(b"record %d" % turn)
        journal.commit()
    journal.close()
    execute(written, f"ATTACH '{other}' AS other", "REPLACE INTO tail SELECT * FROM other.tail WHERE turn = 5")
    with pytest.raises(Corruption, match="turn 5 does not follow turn 4"):
        read_journal(written)


def test_a_journal_of_format_2_is_read():
    """Written by the first version of that format. Never write this file again: what others wrote must be read."""
    golden = Path(__file__).parent / "golden" / "journal-2.sqlite"
    kept = read_journal(golden)
    assert kept.origin == Origin(bytes(range(16)), bytes(32), "0.1.0", b"state of then")
    assert (kept.base, kept.turn, kept.image, kept.records) == (2, 3, b"image", [b"record 3"])


def test_a_log_without_its_journal_is_found(path):
    journal = SqliteJournal(path, Level.PROCESS)
    journal.append(b"one")
    journal.commit()
    log = path.with_name("journal.sqlite-wal").read_bytes()
    journal.close()
    path.with_name("journal.sqlite-wal").write_bytes(log)
    path.write_bytes(b"")
    with pytest.raises(Corruption, match="is missing or empty, though its log"):
        read_journal(path)


def test_what_never_became_a_journal_is_none(path):
    assert read_journal(path) is None
    path.touch()
    assert read_journal(path) is None
    execute(path, "PRAGMA journal_mode=WAL")
    assert read_journal(path) is None
