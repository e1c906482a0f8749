"""Which errors are a disk's own, and the reserve of a server on the disk of its state."""

import errno
import os
import resource
import sqlite3

import msgspec
import pytest

from tests.server.lives import BIG, Life, write
from transferqueue.errors import Corruption, DiskFailed, Full, OutOfMemory, UsageError
from transferqueue.limits import DISK_SLICES, MIB, Limits
from transferqueue.policies import Task
from transferqueue.server.durability import disk, recovery
from transferqueue.server.durability.disk import DiskReserve, disk_error, disk_failures
from transferqueue.server.durability_level import Level
from transferqueue.wire import messages as m

TABLE = m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG], limits=Limits(rows=1))
INLINE = m.Columns(fields=[BIG], blocks=[])


def raised(cause, outer=None):
    """An error as it is raised from `cause`."""
    if outer is None:
        return cause
    outer.__cause__ = cause
    return outer


def of_sqlite(code):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("outer", [None, Corruption("torn"), OutOfMemory("small"), UsageError("name another")])
def test_an_error_of_the_disk_is_found_under_others_and_names_no_loss(tmp_path, number, outer):
    error = raised(OSError(number, os.strerror(number)), outer)
    why = rf"{tmp_path} has [\d,]+ of [\d,]+ bytes free. Nothing is damaged"
    with pytest.raises(DiskFailed, match=why) as told, disk_failures("journal x cannot be read", tmp_path):
        raise error
    assert told.value.is_full is (number in (errno.ENOSPC, errno.EDQUOT))
    assert "accept-loss" not in str(told.value)


@pytest.mark.parametrize(
    ("code", "is_disk"),
    [
        (sqlite3.SQLITE_FULL, True),
        (sqlite3.SQLITE_IOERR, True),
        (sqlite3.SQLITE_IOERR_READ, True),
        (sqlite3.SQLITE_IOERR_FSYNC, True),
        (sqlite3.SQLITE_IOERR_SHMSIZE, True),
        (sqlite3.SQLITE_IOERR_SHORT_READ, False),
        (sqlite3.SQLITE_IOERR_NOMEM, False),
        (sqlite3.SQLITE_CORRUPT, False),
        (sqlite3.SQLITE_NOTADB, False),
        (sqlite3.SQLITE_BUSY, False),
    ],
)
def test_of_the_errors_of_sqlite_some_are_the_disks(code, is_disk):
    assert (disk_error(of_sqlite(code)) is not None) is is_disk


def test_other_errors_pass(tmp_path):
    with pytest.raises(Corruption, match="torn"), disk_failures("x", tmp_path):
        raise Corruption("torn") from OSError(errno.ENOENT, "gone")


def test_a_reserve_is_given_up_in_slices_and_taken_again(tmp_path):
    reserve = DiskReserve(tmp_path, 4 * MIB)
    reserve.begin()
    assert (tmp_path / disk.RESERVE).stat().st_blocks * 512 >= MIB
    assert (reserve.shortage, reserve.due_at) == ("", None)
    for left in range(DISK_SLICES - 1, -1, -1):
        assert reserve.give_up()
        assert (tmp_path / disk.RESERVE).stat().st_size == left * MIB // DISK_SLICES
        assert reserve.due_at is not None
    assert not reserve.give_up()
    assert f"{tmp_path} has " in reserve.shortage
    reserve.look(5.0)
    assert (reserve.shortage, reserve.due_at) == ("", None)
    reserve.close()
    reserve.close()


@pytest.fixture
def shared(tmp_path):
    place = tmp_path / "shm"
    place.mkdir()
    return place


@pytest.fixture
def life(tmp_path, shared):
    found = Life(tmp_path / "state", Level.PROCESS, shared)
    yield found
    found.crash()


def test_a_server_that_is_short_refuses_what_adds_work_and_what_waits_to(life):
    client = life.client()
    client.ask(TABLE)
    put = write(life, client, 1, 7)
    waits = client.post(m.PutRequest("t", 1, INLINE, wait_s=60))
    assert client.take(waits) is None, "the table is full"
    life.state._reserve.give_up()
    life.deliver()
    refused = [
        client.take(waits),
        client.ask(m.Grant(4096, use="rows")),
        client.ask(m.CreateTable("u", tasks=[Task("train", ["x"])], fields=[BIG])),
    ]
    for told in refused:
        assert (told.error, "bytes free, and new rows need" in told.text) == (Full.__name__, True)
    assert isinstance(client.ask(m.Grant(4096, use="results")), m.Granted)
    leased = client.ask(m.LeaseRequest("t", "train", rows=1))
    assert isinstance(client.ask(m.Ack("t", leased.lease, leased.token)), m.DoneReply), put
    life.coordinator.tick(life.now + 2.0)
    life.deliver()
    assert isinstance(client.ask(m.Grant(4096, use="rows")), m.Granted)


def test_a_journal_that_may_not_grow_ends_the_server_and_the_next_one_has_all_that_was_answered(tmp_path, shared):
    """A limit on the size of files needs no privilege. No reserve helps against it."""
    life = Life(tmp_path / "state", Level.DISK, shared)
    client = life.client()
    client.ask(msgspec.structs.replace(TABLE, limits=Limits()))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    answered: list[int] = []

    def put_for_ever():
        while True:
            write(life, client, 1, len(answered))
            answered.append(1)

    log = tmp_path / "state" / (recovery.JOURNAL + "-wal")
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(MIB * 2, log.stat().st_size + (1 << 16)), before[1]))
    try:
        with pytest.raises(DiskFailed, match="cannot be written: its disk is full"):
            put_for_ever()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert life.state.shortage
    life.crash()
    following = Life(tmp_path / "state", Level.DISK, shared)
    assert following.state.ledger.live_rows() == {"t": len(answered)}
    following.crash()
