"""What the kernel says about clients, with real processes."""

import os
import select
import subprocess
import sys

import pytest

from transferqueue.errors import UsageError
from transferqueue.server.sessions.liveness import open_process
from transferqueue.transport import FileLock, this_host
from transferqueue.wire import messages as m

HOLDER = """
import os, sys
from transferqueue.transport import FileLock
assert FileLock(sys.argv[1]).take()
child = os.fork() if len(sys.argv) > 2 else 0
sys.stdout.write(f'{child}\\n')  # in one piece: both processes write into one pipe
sys.stdout.flush()
sys.stdin.read(1)
"""


def hello(**terms):
    return m.Hello(b"x" * 16, **{"pid": os.getpid(), "host": this_host(), **terms})


@pytest.fixture
def lock(tmp_path):
    found = FileLock(tmp_path / "mine")
    assert found.take()
    yield found
    found.release()


def start(path, *fork):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, str(path), *fork],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_process_is_seen_at_once_and_its_lock_is_free_by_then(tmp_path):
    with start(tmp_path / "lock") as holder:
        assert holder.stdout.readline() == "0\n"
        evidence = open_process(hello(pid=holder.pid, lock=str(tmp_path / "lock")))
        assert evidence.is_local
        assert not select.select([evidence.pidfd], [], [], 0)[0]
        assert evidence.may_see_memory()
        holder.kill()
        assert select.select([evidence.pidfd], [], [], 10)[0]
        assert not evidence.may_see_memory()
    evidence.close(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_a_forked_child_still_sees_the_memory_of_its_dead_parent(tmp_path):
    with start(tmp_path / "lock", "fork") as holder:
        child = int(max(holder.stdout.readline(), holder.stdout.readline(), key=int))
        evidence = open_process(hello(pid=holder.pid, lock=str(tmp_path / "lock")))
        holder.kill()
        assert select.select([evidence.pidfd], [], [], 10)[0]
        assert evidence.may_see_memory()
        child_gone = os.pidfd_open(child)
        os.kill(child, 9)
        assert select.select([child_gone], [], [], 10)[0]
        os.close(child_gone)
    assert not evidence.may_see_memory()
    evidence.close()


def test_a_lock_whose_name_was_removed_still_counts(lock):
    evidence = open_process(hello(lock=str(lock.path)))
    lock.path.unlink()
    assert evidence.may_see_memory()
    evidence.close(lock.path.parent)


def test_closing_removes_only_files_of_the_swept_directory(tmp_path, lock):
    evidence = open_process(hello(lock=str(lock.path)))
    lock.release(unlink=False)
    evidence.close(tmp_path / "elsewhere")
    assert lock.path.exists()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "does not exist; make it and lock it"),
        ("free", "is not locked by any process"),
        (".", "not a regular"),
    ],
)
def test_a_lock_that_is_none_is_refused(tmp_path, path, said):
    (tmp_path / "free").touch()
    with pytest.raises(UsageError, match=said):
        open_process(hello(lock=str(tmp_path / path)))


def test_a_process_that_does_not_exist_is_refused(lock):
    with pytest.raises(UsageError, match=r"process \d+ does not exist"):
        open_process(hello(pid=2**22 + 1, lock=str(lock.path)))


def test_a_client_of_another_machine_is_judged_by_silence(tmp_path):
    evidence = open_process(hello(host="far away", lock=str(tmp_path / "not here")))
    assert not evidence.is_local
    assert evidence.pidfd == -1
    assert not evidence.may_see_memory()


def test_a_client_in_another_container_is_judged_by_the_lock_that_both_see(lock):
    evidence = open_process(hello(host="same kernel, other process numbers", lock=str(lock.path)))
    assert evidence.is_local
    assert evidence.pidfd == -1
    assert evidence.may_see_memory()
    evidence.close()
