import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from transferqueue.errors import AddressInUse, UsageError
from transferqueue.limits import MIB
from transferqueue.server.runtime_directory import RuntimeDirectory, remove_stale_arenas, served_arena
from transferqueue.transport import FileLock, IpcAddress
from transferqueue.transport.system.private_files import private_directory, write_durably

LIVE_AND_DIE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from transferqueue.server.runtime_directory import RuntimeDirectory, served_arena
from transferqueue.transport import IpcAddress
home = RuntimeDirectory(IpcAddress(Path(sys.argv[1]) / "run" / "control.sock"))
home.address.path.touch()
arena = served_arena(1 << 20, Path(sys.argv[1]))
print(arena.arena.path, flush=True)
sys.stdin.read()
"""


def place(tmp_path, name="control.sock"):
    return IpcAddress(tmp_path / "run" / name)


def everything_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_a_directory_is_made_private(tmp_path):
    found = private_directory(tmp_path / "a" / "b")
    assert found.stat().st_mode & 0o777 == 0o700
    assert private_directory(found) == found


def test_a_directory_open_to_others_is_refused_and_left_as_it_is(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match=r"has mode 755: other users could open the queue; chmod 700"):
        RuntimeDirectory(IpcAddress(tmp_path / "control.sock"))
    assert everything_in(tmp_path) == []
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to user"):
        private_directory(tmp_path)


def test_a_process_that_is_killed_while_it_writes_leaves_one_file_that_the_next_removes(tmp_path):
    file = tmp_path / "run.json"
    write_durably(file, b"old")
    dying = (
        "import os, sys, pathlib\n"
        "from transferqueue.transport.system.private_files import write_durably\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9)\n"
        "write_durably(pathlib.Path(sys.argv[1]), b'new')\n"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", dying, file], check=False).returncode == -9
        assert len(everything_in(tmp_path)) == 2
        assert file.read_bytes() == b"old"
    write_durably(file, b"new")
    assert (everything_in(tmp_path), file.read_bytes()) == (["run.json"], b"new")


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        RuntimeDirectory(place(tmp_path))


def test_a_second_server_on_one_address_is_refused_and_changes_nothing(tmp_path):
    first = RuntimeDirectory(place(tmp_path))
    first.address.path.touch()
    before = everything_in(tmp_path)
    with pytest.raises(AddressInUse, match=r"in use: a live server listens there; connect to it, stop it"):
        RuntimeDirectory(place(tmp_path))
    assert everything_in(tmp_path) == before
    other = RuntimeDirectory(place(tmp_path, "other.sock"))
    other.close()
    assert everything_in(tmp_path)[:2] == ["run", "run/control.sock"]
    first.close()
    first.close()
    assert everything_in(tmp_path) == ["run"]
    RuntimeDirectory(place(tmp_path)).close()


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", LIVE_AND_DIE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        arena_path = Path(server.stdout.readline().strip())
        with pytest.raises(AddressInUse):
            RuntimeDirectory(place(tmp_path))
        remove_stale_arenas(arena_path.parent.parent)
        assert arena_path.exists()
        server.kill()
    assert arena_path.exists()
    assert place(tmp_path).path.exists()
    (tmp_path / "run" / "sessions" / "of-a-dead-client").touch()
    living = FileLock(tmp_path / "run" / "sessions" / "of-a-living-client")
    assert living.take()

    other = RuntimeDirectory(place(tmp_path, "other.sock"))
    assert everything_in(tmp_path / "run") == [
        "other.sock.lock",
        "sessions",
        "sessions/of-a-living-client",
    ]
    other.close()
    living.release()
    arena = served_arena(MIB, tmp_path)
    assert not arena_path.exists()
    arena.close()
    assert everything_in(tmp_path) == ["run", "run/sessions"]


def test_a_served_arena_is_a_private_file_that_goes_with_its_server(tmp_path):
    home = served_arena(MIB, tmp_path)
    path = Path(home.arena.path)
    assert path.is_relative_to(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700
    second = served_arena(MIB, tmp_path)
    home.close()
    assert not path.exists()
    assert Path(second.arena.path).exists()
    second.close()
    assert everything_in(tmp_path) == []


def test_servers_that_start_and_stop_together_each_get_a_file(tmp_path):
    """A server that stops removes the directory that they share, unless it has another's arena."""

    def start_and_stop(_: int) -> None:
        for _ in range(100):
            home = served_arena(MIB, tmp_path)
            assert home.arena.path.startswith(str(tmp_path))
            home.close()

    with ThreadPoolExecutor(2) as servers:
        list(servers.map(start_and_stop, range(2)))


def set_free(monkeypatch, nbytes):
    """Have every file system report so many free bytes."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=nbytes // 4096, f_frsize=4096))


@pytest.mark.parametrize("free", [0, 2 * MIB])
def test_too_little_shared_memory_gives_a_memfd(tmp_path, monkeypatch, free):
    set_free(monkeypatch, free)
    home = served_arena(4 * MIB, tmp_path)
    assert home.arena.path.startswith(f"/proc/{os.getpid()}/fd/")
    assert home.arena.capacity == 4 * MIB
    assert everything_in(tmp_path) == []
    home.close()


def test_no_shared_memory_gives_a_memfd(tmp_path):
    home = served_arena(MIB, tmp_path / "missing")
    assert home.arena.path.startswith("/proc/")
    home.close()


def test_the_default_ceiling_is_clipped_to_what_there_is(tmp_path, monkeypatch):
    set_free(monkeypatch, 3 << 30)
    home = served_arena(None, tmp_path)
    assert home.arena.capacity == 3 << 30
    assert home.arena.path.startswith(str(tmp_path))
    home.close()


def test_directories_on_the_way_are_private_too_whatever_the_umask(tmp_path):
    """``mkdir(parents=True)`` gives its mode to the last one only; who may write above can put another in its place."""
    before = os.umask(0)
    try:
        private_directory(tmp_path / "a/b/c")
    finally:
        os.umask(before)
    assert {(tmp_path / one).stat().st_mode & 0o777 for one in ("a", "a/b", "a/b/c")} == {0o700}
