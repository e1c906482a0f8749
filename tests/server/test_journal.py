import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from transferqueue.errors import Corruption, JournalFailed
from transferqueue.server.journal import Level, SqliteJournal

LEVELS = [Level.PROCESS, Level.DISK]

WRITE_AND_HANG = """
import sys
from pathlib import Path
from transferqueue.server.journal import Level, SqliteJournal
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
        JournalFailed, match=r"journal .*journal.sqlite cannot be written: database or disk is full; .*Make room"
    ):
        journal.commit()
    with pytest.raises(JournalFailed, match="cannot be written"):
        journal.checkpoint(bytes(1 << 20))
    journal.close()
    assert loaded(path) == (None, [b"one"])


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
    with pytest.raises(Corruption, match="has format 99, this version reads 1; start the version that wrote it"):
        SqliteJournal(path, Level.PROCESS)


@pytest.mark.parametrize("turn", [b"\xc1", b"text", b"\x93\x01\x02\x03"])
def test_records_that_are_none_are_reported(path, turn):
    SqliteJournal(path, Level.PROCESS).close()
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO tail (records) VALUES (?)", (turn,))
    database.close()
    with pytest.raises(Corruption, match=r"cannot be read: .*restore a snapshot"):
        loaded(path)
