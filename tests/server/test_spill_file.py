"""The file of spilled blocks and its thread: what goes in comes out, within its bound, and nothing of it is left."""

import os
import threading
from types import SimpleNamespace

import pytest

from tests.server.spilling import ARENA, SpillBench
from transferqueue.errors import UsageError
from transferqueue.limits import KIB, MIB, PAGE_BYTES
from transferqueue.server.spill.spill_file import SpillFile, mapped
from transferqueue.server.spill.spill_jobs import BlocksLoaded, BlockToLoad, BlockToWrite


@pytest.fixture
def bench():
    bench = SpillBench()
    yield bench
    bench.close()


class HeardFile(SpillFile):
    """Remembers that it has stirred."""

    def __init__(self, directory, nbytes, arena):
        self.heard = threading.Event()
        super().__init__(directory, nbytes, arena, self.heard.set)


@pytest.fixture
def file(bench, tmp_path):
    tmp_path.chmod(0o700)
    file = HeardFile(tmp_path, 16 * MIB, lambda: mapped(bench.arena.path, ARENA))
    yield file
    file.stop()


def answer_of(file):
    assert file.heard.wait(20.0)
    file.heard.clear()
    answers = file.answers()
    (answer,) = [*answers.written, *answers.loaded]
    return answer


def test_the_file_has_no_name_and_returns_what_it_was_given(bench, file, tmp_path):
    bench.arena._map[: 2 * PAGE_BYTES] = bytes(range(256)) * (2 * PAGE_BYTES // 256)
    file.write(1, [m_block(5, 0, 100), m_block(6, PAGE_BYTES, 0)])
    written = answer_of(file)
    assert [place.block for place in written.places] == [5, 6]
    assert list(tmp_path.iterdir()) == []
    assert file.read(written.places[0]).tobytes() == bytes(range(100))
    file.load(8, [BlockToLoad(place, 8 * PAGE_BYTES) for place in written.places[:1]])
    assert answer_of(file) == BlocksLoaded(8, [5], {}, [])
    assert bytes(bench.arena.view(8 * PAGE_BYTES, 100)) == bytes(range(100))
    changed = written.places[0]._replace(checksum=7)
    file.load(8, [BlockToLoad(changed, 8 * PAGE_BYTES)])
    assert answer_of(file).damaged == [5]
    beyond = written.places[0]._replace(offset=64 * MIB)
    file.load(8, [BlockToLoad(beyond, 8 * PAGE_BYTES)])
    assert "ends at byte" in answer_of(file).failed[5]


def test_a_stop_beside_a_thread_that_takes_the_last_job_closes_the_file(file, monkeypatch):
    jobs = file._jobs
    late = SimpleNamespace(put=jobs.put, get=jobs.get, get_nowait=jobs.get_nowait, empty=lambda: False)
    monkeypatch.setattr(file, "_jobs", late)  # `empty` says what was true a moment before
    file.stop()
    assert not file._thread.is_alive()


def test_a_stop_does_not_wait_for_a_disk_that_never_answers(file, monkeypatch, caplog):
    monkeypatch.setattr("transferqueue.server.spill.spill_file.STOP_S", 0.01)
    answers = threading.Event()

    def hang():
        file.heard.set()
        answers.wait(20.0)

    file._jobs.put(SimpleNamespace(run=hang))
    assert file.heard.wait(20.0)
    file.stop()
    assert "has not answered for" in caplog.text
    answers.set()
    file._thread.join(20.0)
    assert not file._thread.is_alive()


def test_the_bound_is_kept_and_freed_space_is_used_again(bench, file):
    def write():
        file.write(1, [m_block(number, 0, ARENA) for number in range(256)])
        return answer_of(file)

    assert ARENA == 64 * KIB
    full = write()
    assert len(full.places) == 256
    file.write(2, [m_block(999, 0, 1)])
    assert "--spill-bytes allows" in answer_of(file).error
    file.free(full.places)
    assert len(write().places) == 256


def test_a_large_block_finds_a_place_though_all_that_is_free_lies_in_small_pieces(bench, file):
    """And the file takes no more of the disk than it may."""
    file.write(1, [m_block(number, 0, 4 * PAGE_BYTES) for number in range(1024)])
    places = answer_of(file).places
    assert sum(place.nbytes for place in places) == 16 * MIB
    file.free(places[::2])
    file.write(2, [m_block(5000 + number, 0, ARENA) for number in range(128)])
    assert len(answer_of(file).places) == 128
    assert os.fstat(file._fd).st_blocks * 512 <= 16 * MIB + MIB, "the file system's own blocks"
    file.write(3, [m_block(6000, 0, 1)])
    assert "--spill-bytes allows" in answer_of(file).error


def test_a_disk_that_takes_nothing_back_has_its_bound_too(bench, file):
    file._space._can_punch = False
    file.write(1, [m_block(number, 0, 4 * PAGE_BYTES) for number in range(1024)])
    places = answer_of(file).places
    file.free(places[::2])
    for _ in range(2):
        file.write(2, [m_block(5000, 0, ARENA)])
        assert "takes none back" in answer_of(file).error
    assert os.fstat(file._fd).st_blocks * 512 <= 16 * MIB + MIB
    file.write(3, [m_block(6000 + number, 0, 4 * PAGE_BYTES) for number in range(512)])
    assert len(answer_of(file).places) == 512
    assert os.fstat(file._fd).st_blocks * 512 <= 16 * MIB + MIB


def test_freed_space_returns_to_the_disk_in_long_pieces_when_there_is_nothing_else_to_do(bench, file, monkeypatch):
    returned, all_returned = [], threading.Event()

    def punch(offset, nbytes, punch=file._space.punch):
        punch(offset, nbytes)
        returned.append((offset, nbytes))
        if sum(size for _, size in returned) == 100 * ARENA:
            all_returned.set()

    monkeypatch.setattr(file._space, "punch", punch)
    file.write(1, [m_block(number, 0, ARENA) for number in range(101)])
    places = answer_of(file).places
    taken = os.fstat(file._fd).st_blocks
    file.free(places[1:])
    file.load(2, [BlockToLoad(places[0], 0)])
    assert answer_of(file).loaded == [0]
    assert not returned, "a load waited for the file system"
    assert all_returned.wait(20.0)
    assert returned == [(ARENA, 100 * ARENA)]
    assert os.fstat(file._fd).st_blocks < taken
    file.load(3, [BlockToLoad(places[0], 0)])
    assert answer_of(file).loaded == [0]


def test_what_cannot_be_a_spill_directory_is_refused(bench, tmp_path):
    tmp_path.chmod(0o700)

    def make(directory, nbytes):
        SpillFile(directory, nbytes, lambda: mapped(bench.arena.path, ARENA), lambda: None)

    with pytest.raises(UsageError, match=r"--spill-bytes 1,048,576 is below"):
        make(tmp_path, MIB)
    with pytest.raises(UsageError, match="bytes that are free in"):
        make(tmp_path, 1 << 60)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="spill directory"):
        make(tmp_path / "file" / "below", 16 * MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def m_block(number, offset, nbytes):
    return BlockToWrite(number, offset, nbytes, 0)
