"""A disk of the state that is full: new rows are refused, work that is begun ends, nothing is lost or called damage,
and it goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue.limits import MIB
from transferqueue.server.process.supervisor import EXIT_DISK

DISK_BYTES = 48 * MIB
LEVELS = ["process", "disk"]


class SmallDisk:
    """A file system of `DISK_BYTES`, and what fills it."""

    def __init__(self, path: Path) -> None:
        self.path, self._hog = path, path / "hog"

    def fill(self) -> None:
        """Take all that is free."""
        with open(self._hog, "ab", buffering=0) as hog, suppress(OSError):
            while True:
                hog.write(bytes(1 << 12))

    def empty(self) -> None:
        """Give it back."""
        self._hog.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no test mount a small file system")
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Server(AbstractContextManager["Server"]):
    """A server whose state is on `disk`. Its words go to a file."""

    def __init__(self, directory: Path, disk: SmallDisk, level: str, *options: str) -> None:
        self.address, self.words = f"ipc://{directory}/run/q.sock", directory / "words"
        self.state = disk.path / "state"
        with open(self.words, "ab") as words:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "transferqueue.server", "--address", self.address, *options),
                    *("--arena-bytes", "16MiB", "--durability", level, "--state", str(self.state)),
                ],
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
            )

    def await_ready(self) -> Server:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().split()[:1] == ["ready"], self.words.read_text()
        return self

    def until_said(self, words: str) -> None:
        """Wait until the server says this."""
        until = time.monotonic() + 60
        while words not in self.words.read_text():
            assert time.monotonic() < until, self.words.read_text()
            assert self.process.poll() is None or words in self.words.read_text(), self.words.read_text()

    def ended(self) -> int:
        """Its exit code, after it has ended by itself."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


def put_until_refused(table: tq.Table, row: bytes = bytes(2000)) -> tuple[int, str]:
    """Put rows until the server takes no more: how many were put, and why not more."""
    for number in range(1 << 20):
        try:
            table.put(x=[row], timeout_s=20)
        except tq.Full as error:
            return number, str(error)
    raise AssertionError("the disk does not fill")


def made(queue: tq.Queue) -> tq.Table:
    limits = tq.Limits(rows=1 << 16)
    return queue.create_table("t", tasks=[tq.Task("work", needs=["x"], gives=["y"])], limits=limits)


def drain(table: tq.Table) -> int:
    """Lease and ack all rows, with results. Returns how many."""
    done = 0
    with suppress(tq.DeadlineExceeded):
        while True:
            with table.lease("work", rows=1, timeout_s=0.5) as batch:
                batch.ack(y=[done])
            done += 1
    return done


def put_again(table: tq.Table) -> None:
    """Put a row as soon as the server takes it."""
    until = time.monotonic() + 30
    while True:
        try:
            table.put(x=[b"again"])
            return
        except tq.Full:
            assert time.monotonic() < until


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_new_rows_are_refused_with_the_name_of_the_disk_and_work_that_is_begun_ends(
    tmp_path: Path, disk: SmallDisk, level: str
) -> None:
    with Server(tmp_path, disk, level).await_ready() as server, tq.connect(server.address) as queue:
        table = made(queue)
        table.put(x=[b"before"] * 50)
        disk.fill()
        number, why = put_until_refused(table)
        assert str(server.state) in why
        assert "bytes free, and new rows need " in why
        assert "accept-loss" not in why
        with pytest.raises(tq.Full, match="the disk of this server's state is full"):
            queue.create_table("u", tasks=[tq.Task("work", needs=["x"])])
        assert drain(table) == 50 + number
        disk.empty()
        put_again(table)
        assert drain(table) == 1
        assert table.audit().balanced
        assert "has room again" in server.words.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_server_without_reserve_ends_and_one_under_a_supervisor_waits(
    tmp_path: Path, disk: SmallDisk, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(tmp_path, disk, level, "--supervise").await_ready() as server, tq.connect(server.address) as queue:
        table = made(queue)
        table.put(x=[b"before"] * 50)
        disk.fill()
        number, _ = put_until_refused(table)
        acked: list[int] = []
        full = threading.Event()

        def work() -> None:
            while len(acked) < 50 + number:
                if not full.is_set():
                    disk.fill()  # so that the reserve is used up
                with table.lease("work", rows=1, timeout_s=60) as batch:
                    batch.ack(y=[len(acked)])
                acked.append(int(batch.rows[0]))

        with ThreadPoolExecutor() as threads:
            working = threads.submit(work)
            server.until_said("the supervisor starts it again in 1 s")
            full.set()
            with pytest.raises(tq.DeadlineExceeded, match=r"it ended, and waits for its disk: .*its disk is full"):
                table.lease("work", rows=1, timeout_s=1.0)
            assert "waits for its disk" in caplog.text
            with pytest.raises(tq.Unreachable, match=r"its server ended, and waits for its disk: .*bytes free"):
                tq.connect(server.address, timeout_s=0.3)
            disk.empty()
            server.await_ready()
            working.result(timeout=60)
        put_again(table)
        assert drain(table) == 1
        assert len(set(acked)) == len(acked)
        audit = table.audit()
        assert audit.balanced
        assert audit.rows_put == audit.rows_done == 50 + number + 1
        assert "accept-loss" not in server.words.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_start_on_a_full_disk_is_no_damage(tmp_path: Path, disk: SmallDisk, level: str) -> None:
    with Server(tmp_path, disk, level).await_ready() as server, tq.connect(server.address) as queue:
        made(queue).put(x=[b"before"] * 50)
        server.kill()
        disk.fill()
        (server.state / "reserve").unlink()
        disk.fill()
        second = Server(tmp_path, disk, level, *["--accept-loss"] * (level == "disk"))
        assert second.ended() == EXIT_DISK
        assert "its disk is full" in second.words.read_text()
        assert "Nothing is damaged" in second.words.read_text()
        assert not list(server.state.glob("lost-*"))
        disk.empty()
        with Server(tmp_path, disk, level).await_ready():
            assert drain(queue.table("t")) == 50


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_start_on_a_full_disk_has_the_reserve(tmp_path: Path, disk: SmallDisk, level: str) -> None:
    with Server(tmp_path, disk, level).await_ready() as server, tq.connect(server.address) as queue:
        made(queue).put(x=[b"before"] * 50)
        server.kill()
        disk.fill()
        with Server(tmp_path, disk, level).await_ready():
            assert drain(queue.table("t")) == 50
            disk.empty()
            put_again(queue.table("t"))


@pytest.mark.slow
def test_a_first_start_on_a_full_disk_says_so(tmp_path: Path, disk: SmallDisk) -> None:
    disk.fill()
    server = Server(tmp_path, disk, "disk")
    assert server.ended() == EXIT_DISK
    assert "its disk is full" in server.words.read_text()
    assert os.fspath(disk.path) in server.words.read_text()
