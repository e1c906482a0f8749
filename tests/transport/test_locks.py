import os
import subprocess
import sys
from pathlib import Path

import pytest

from transferqueue.errors import UsageError
from transferqueue.transport.system.file_lock import FileLock, is_locked

HOLDER = """
import sys
from transferqueue.transport.system.file_lock import FileLock
assert FileLock(sys.argv[1]).take()
print("held", flush=True)
sys.stdin.read()
"""


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "x.lock"
    first, second = FileLock(path), FileLock(path)
    assert not is_locked(path)
    assert first.take()
    assert first.held
    assert first.take()
    assert not second.take()
    assert is_locked(path)
    assert path.stat().st_mode & 0o777 == 0o600
    first.release()
    first.release()
    assert not path.exists()
    assert second.take()
    second.release(unlink=False)
    assert path.exists()


def test_a_killed_holder_lets_go_at_once(tmp_path):
    path = tmp_path / "x.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(path)
        holder.kill()
        holder.wait()
        assert not is_locked(path)


def test_a_lock_taken_on_a_file_that_was_removed_meanwhile_is_taken_anew(tmp_path):
    path = tmp_path / "x.lock"
    first = FileLock(path)
    assert first.take()
    path.unlink()
    second = FileLock(path)
    assert second.take()
    first.release()  # must not remove the file of the second
    assert is_locked(path)
    second.release()


@pytest.mark.parametrize(("inherited", "locked"), [(True, True), (False, False)])
def test_what_a_forked_child_holds(tmp_path, inherited, locked):
    path = tmp_path / "x.lock"
    lock = FileLock(path, inherited=inherited)
    assert lock.take()
    ask, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        os.read(ask, 1)
        os._exit(0)
    os.close(ask)
    # Fork hooks of the child have run before fork returns there, not here: wait until it has let go.
    lock.release(unlink=False)
    if not locked:
        other = FileLock(path)
        while not other.take():
            os.sched_yield()
        other.release(unlink=False)
    assert is_locked(path) is locked
    os.close(told)
    os.waitpid(child, 0)


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.symlink_to("/etc/passwd"), lambda p: os.mkfifo(p)])
def test_a_path_that_is_no_file_of_ours_is_refused(tmp_path, make):
    path = tmp_path / "x.lock"
    make(path)
    with pytest.raises(UsageError, match=r"lock file .* (is not a regular file|cannot be opened)"):
        is_locked(path)


def test_a_forked_child_that_lets_go_leaves_the_file_to_its_parent(tmp_path):
    lock = FileLock(tmp_path / "x.lock")
    assert lock.take()
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert is_locked(lock.path)
    lock.release()
    assert not lock.path.exists()


def test_a_file_that_is_removed_while_its_lock_is_released_is_gone(tmp_path, monkeypatch):
    """By who clears the directory, just after the holder has looked."""
    lock = FileLock(tmp_path / "lock")
    assert lock.take()
    unlink = Path.unlink

    def late(path, missing_ok=False):
        os.unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", late)
    lock.release()
    assert not lock.held
    assert not lock.path.exists()
