"""Other stores behind a shard: the kits against an arena and a directory, addresses, and rows that lie in files."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.stored import Backed, RowsInAStore
from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.stores.directory import DirectoryStore
from transferqueue.cluster.stores import kept_in, open_store
from transferqueue.errors import Corruption, Disconnected, ShardLost, Unreachable, UsageError
from transferqueue.limits import FRAME_BYTES, KIB, MIB
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.backing import ArenaBacking, Backing, Range
from transferqueue.storage.memory.object_store import ObjectBacking
from transferqueue.testing.conformance.backings import BACKING_CHECKS, content, write
from transferqueue.testing.conformance.report import Verdict, judge
from transferqueue.testing.conformance.stores import STORE_CHECKS


def passes(check: Any, subject: Any) -> None:
    outcome = judge(check, subject)
    if outcome.verdict is Verdict.UNSUPPORTED:
        pytest.skip(outcome.text)
    if outcome.verdict is Verdict.FAILED:
        pytest.fail(outcome.text, pytrace=False)


class InAnArena:
    """The default."""

    @contextmanager
    def open(self) -> Iterator[Backing]:
        self.arena = Arena.create(None, 64 * MIB)
        backing = ArenaBacking(self.arena)
        try:
            yield backing
        finally:
            backing.close()
            self.arena.close()

    def used_bytes(self, backing: Backing) -> int:
        return self.arena.backed

    def lose(self, backing: Backing) -> None:
        raise Unsupported("memory of one process is lost with the process")


class Files:
    """A directory as a store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> DirectoryStore:
        return DirectoryStore(f"file://{self.path}")

    def used_bytes(self) -> int:
        found = 0
        for file in self.path.glob("*"):
            with suppress(FileNotFoundError):  # removed meanwhile
                found += file.stat().st_size
        return found

    def remove(self) -> None:
        for file in self.path.glob("*"):
            file.unlink()

    def shorten(self) -> None:
        for file in self.path.glob("*"):
            file.write_bytes(file.read_bytes()[:-1])

    def spoil(self) -> None:
        for file in self.path.glob("*"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)

    def end(self) -> None:
        shutil.rmtree(self.path)

    def fill(self) -> None:
        """As a quota would: no file may grow beyond this."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (512 * KIB, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield Files(tmp_path / "objects")
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_a_directory_is_a_store(files: Files, check: Any) -> None:
    passes(check, files)


@pytest.mark.parametrize("check", BACKING_CHECKS, ids=lambda check: check.__name__)
def test_an_arena_is_a_backing(check: Any) -> None:
    passes(check, InAnArena())


@pytest.mark.parametrize("check", BACKING_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("sizes", [{}, {"object_bytes": 1, "kept_bytes": 0}, {"object_bytes": 3 * MIB}], ids=str)
def test_objects_in_a_directory_are_a_backing(files: Files, sizes: dict[str, int], check: Any) -> None:
    passes(check, Backed(files.open, files.used_bytes, files.remove, **sizes))


def written(files: Files) -> ObjectBacking:
    objects = ObjectBacking(files.open(), "tq-test-", 64 * MIB, kept_bytes=0)
    write(objects, Range(1, 4096, 2 * MIB), content(2 * MIB))
    return objects


@pytest.mark.parametrize("how", ["remove", "shorten", "spoil", "end"])
def test_what_is_not_what_was_stored_is_never_given_and_ends_the_shard(files: Files, how: str) -> None:
    objects = written(files)
    told: list[int] = []
    objects.on_lost = lambda: told.append(1)
    getattr(files, how)()
    for _ in range(2):
        with pytest.raises(ShardLost, match=r"tq-test-1 .*its rows are lost; ask for the rows again"):
            objects.read([Range(1, 4096, 64)])
    with pytest.raises(ShardLost):
        write(objects, Range(2, 0, 64), content(64))
    assert told == [1]


def test_what_was_never_written_and_what_was_freed_is_refused(files: Files) -> None:
    objects = written(files)
    for offset, nbytes in ((0, 8192), (4096, 2 * MIB + 1), (0, 64), (3 * MIB, 64)):
        with pytest.raises(Corruption, match="were never written"):
            objects.read([Range(1, offset, nbytes)])
    with pytest.raises(Disconnected, match="freed since"):
        objects.read([Range(2, 4096, 64)])
    objects.forget(1)
    with pytest.raises(Disconnected, match="freed since"):
        objects.read([Range(1, 4096, 64)])
    objects.close()
    with pytest.raises(Unreachable, match="was closed"):
        objects.read([Range(1, 4096, 64)])


def test_a_write_across_the_edge_of_an_earlier_one_is_refused_and_changes_nothing(files: Files) -> None:
    objects = written(files)
    for offset, nbytes in ((0, 8192), (2 * MIB, 4 * MIB), (8192, 100)):
        with pytest.raises(UsageError, match=r"crosses the edge of bytes 4096 to .*write into another piece"):
            objects.begin_write(Range(1, offset, nbytes))
    assert np.array_equal(objects.read([Range(1, 4096, 2 * MIB)])[0], content(2 * MIB))


def test_other_bytes_into_the_same_place_replace_what_was_there(files: Files) -> None:
    objects = written(files)
    write(objects, Range(1, 4096, 2 * MIB), content(2 * MIB, 1))
    assert np.array_equal(objects.read([Range(1, 4096, 2 * MIB)])[0], content(2 * MIB, 1))
    assert files.used_bytes() == 2 * MIB


def test_readers_of_the_same_share_it_and_the_last_ones_stay(files: Files) -> None:
    objects = ObjectBacking(files.open(), "tq-test-", 64 * MIB, kept_bytes=3 * MIB)
    places = [Range(number, number * 4 * MIB, 2 * MIB) for number in range(3)]
    for place in places:
        write(objects, place, content(2 * MIB, place.extent))
    first = objects.read([places[0]])[0]
    objects.read([places[1]])
    assert objects.read([places[0]])[0] is first, "somebody holds it"
    objects.read([places[2]])
    files.remove()
    assert np.array_equal(objects.read([places[2]])[0], content(2 * MIB, 2)), "it was read last"
    with pytest.raises(ShardLost):
        objects.read([places[1]])


def test_a_writer_holds_an_object_and_a_frame(files: Files) -> None:
    objects = ObjectBacking(files.open(), "tq-test-", 64 * MIB, object_bytes=2 * MIB)
    write = objects.begin_write(Range(1, 0, 48 * MIB))
    sizes: list[int] = []

    def read(into: memoryview) -> int:
        sizes.append(len(into))
        return min(len(into), FRAME_BYTES)

    for _ in range(48):
        write.fill(read)
        write.commit(last=False)
    assert max(sizes) == 2 * MIB + FRAME_BYTES
    assert min(sizes) >= FRAME_BYTES


def test_what_the_store_did_not_remove_is_removed_later(files: Files, tmp_path: Path) -> None:
    objects = written(files)
    write(objects, Range(2, 4 * MIB, 64), content(64))
    aside = tmp_path / "aside"
    files.path.rename(aside)
    files.path.write_text("no directory")
    objects.forget(1)
    assert len(objects.unremoved) == 1
    files.path.unlink()
    aside.rename(files.path)
    objects.forget(2)
    assert (objects.unremoved, files.used_bytes()) == ([], 0)


def test_what_a_dead_shard_left_is_removed_by_the_next_and_that_of_a_living_one_stays(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(runtime))
    address = f"file://{files.path}"
    with kept_in(address, "", MIB) as living:
        write(living, Range(1, 0, 64), content(64))
        (file,) = files.path.glob("*")
        (lock,) = runtime.glob("*.store.lock")
        dead = lock.name.replace(lock.name.split("-")[1], "0" * 16 + ".store.lock")
        (runtime / dead).touch(mode=0o600)
        (files.path / file.name.replace(file.name.split("-")[2], "0" * 16)).write_bytes(b"left")
        assert files.used_bytes() == 68
        with kept_in(address, "", MIB):
            assert files.used_bytes() == 64
            assert len(list(runtime.glob("*.store.lock"))) == 2
    assert files.used_bytes() == 0
    assert list(runtime.glob("*.store.lock")) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("redis://host:1", "the scheme is one of file, mooncake"),
        ("/tmp", "give scheme://"),
        ("", "give scheme://"),
        ("file://host/path", "give file:///absolute/path"),
        ("file:///path?x=1", "give file:///absolute/path"),
        ("mooncake://", "give mooncake://host:port"),
        ("mooncake://host", "give mooncake://host:port"),
        ("mooncake://host:99999", "give mooncake://host:port"),
        ("mooncake://host:1/path", "give mooncake://host:port"),
        ("mooncake://host:1?size=3", "options .'size'., and those are segment and metadata"),
        ("mooncake://host:1?segment", "give mooncake://host:port"),
    ],
)
def test_an_address_that_names_no_store_is_refused(address: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_store(address)


def test_a_package_registers_a_store_under_its_scheme(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "site" / "others-1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    (found / "entry_points.txt").write_text("[transferqueue.stores]\nothers = others_store:opened\n")
    (tmp_path / "site" / "others_store.py").write_text(
        "from transferqueue.adapters.stores.directory import DirectoryStore\n\n\n"
        "def opened(address, host):\n    return DirectoryStore(address.replace('others', 'file'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path / "runtime"))
    with kept_in(f"others://{files.path}", "here", MIB) as objects:
        write(objects, Range(1, 0, 64), content(64))
        assert files.used_bytes() == 64
    with pytest.raises(UsageError, match="one of file, mooncake, others"):
        open_store("other://x")


def test_the_command_says_what_is_wrong_with_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path / "runtime"))
    said = subprocess.run(
        [sys.executable, "-m", "transferqueue.cli", "shard", "--join", "tcp://127.0.0.1:1", "--store", "redis://x"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode != 0
    assert "store 'redis://x' is unknown; give scheme://" in said.stderr
    assert "Traceback" not in said.stderr


def test_keys_that_are_no_names_of_files_and_directories_of_others_are_refused(files: Files, tmp_path: Path) -> None:
    for key in ("../x", "a/b", "", "."):
        with pytest.raises(UsageError, match="is no name of a file"):
            files.open().put(key, memoryview(b"x"))
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="other users could open"):
        open_store(f"file://{tmp_path}")


@pytest.mark.slow
class TestRowsInFiles(RowsInAStore):
    @pytest.fixture
    def store(self, tmp_path: Path) -> str:
        Files(tmp_path / "objects").open()
        return f"file://{tmp_path}/objects"

    def _files(self, store: str) -> Files:
        return Files(Path(store.removeprefix("file://")))

    def used_bytes(self, store: str) -> int:
        return self._files(store).used_bytes()

    def lose(self, store: str) -> None:
        self._files(store).remove()
