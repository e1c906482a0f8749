"""Try each kernel feature that the queue needs: a call proves more than a version number.

pidfd reports the death of a local session at once; a free flock proves that its views are gone; a memfd holds the arena
of an embedded queue; MADV_REMOVE gives cold pages back; posix_fallocate turns a full shared memory into an error
instead of SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from transferqueue.observe import units
from transferqueue.observe.machine.result import Check, fail, ok, tried

_PROBE_BYTES: Final = 16 * mmap.PAGESIZE
_DEATH_WAIT_MS: Final = 10_000
_SANDBOX: Final = "a sandbox (gVisor, seccomp) or an old kernel refuses it; allow it or use Linux 5.4 or later"


def kernel_checks(*, memory: Path, runtime: Path) -> list[Check]:
    """Try each feature once. memory: where arenas live; runtime: where sockets and locks live."""
    if platform.system() != "Linux":
        return [_system()]
    return [
        _system(),
        tried("pidfd", try_pidfd, otherwise="fail", remedy=f"deaths of workers would go unseen: {_SANDBOX}"),
        tried("memfd", try_memfd, otherwise="fail", remedy=f"an embedded queue needs it: {_SANDBOX}"),
        tried("eventfd", try_eventfd, otherwise="fail", remedy=f"the server's loop needs it: {_SANDBOX}"),
        tried(
            "MADV_REMOVE",
            lambda: try_remove(memory),
            otherwise="warn",
            remedy="freed shared memory stays taken until the server ends; put arenas on tmpfs",
        ),
        tried(
            "fallocate",
            lambda: try_fallocate(memory),
            otherwise="fail",
            remedy=f"a full {memory} would end processes with SIGBUS; put arenas on tmpfs",
        ),
        tried(
            "flock",
            lambda: try_flock(runtime),
            otherwise="fail",
            remedy="set TRANSFERQUEUE_RUNTIME to a directory on a local file system (not NFS)",
        ),
    ]


def _system() -> Check:
    if platform.system() != "Linux":
        return fail("kernel", f"{platform.system()} {platform.release()}", "run on Linux, in a container or WSL 2")
    return ok("kernel", f"Linux {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs")


def try_pidfd() -> str:
    """Start a process, watch it, and be woken by its end."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""], stdin=subprocess.DEVNULL) as child:
        watch = os.pidfd_open(child.pid)
        try:
            poll = select.poll()
            poll.register(watch, select.POLLIN)
            if not poll.poll(_DEATH_WAIT_MS):
                raise OSError(f"the end of a process was not seen within {_DEATH_WAIT_MS // 1000} s")
        finally:
            os.close(watch)
    return "the end of a process is seen at once"


def try_memfd() -> str:
    """Make one, write, and reach it by its path in /proc as another process would."""
    descriptor = os.memfd_create("transferqueue-doctor")
    try:
        os.write(descriptor, b"arena")
        if Path(f"/proc/{os.getpid()}/fd/{descriptor}").read_bytes() != b"arena":
            raise OSError("a memfd read through /proc holds other bytes")
        removed = _removed_bytes(descriptor)
    finally:
        os.close(descriptor)
    return f"reachable through /proc; a punched hole returned {units.size(removed)}"


def try_eventfd() -> str:
    """Signal one and read it back."""
    descriptor = os.eventfd(0)
    try:
        os.eventfd_write(descriptor, 1)
        if os.eventfd_read(descriptor) != 1:
            raise OSError("an eventfd lost its signal")
    finally:
        os.close(descriptor)
    return "works"


def try_remove(memory: Path) -> str:
    """Write pages of a file in `memory`, punch them out, and see the file shrink."""
    with _probe_file(memory) as descriptor:
        return f"a punched hole in {memory} returned {units.size(_removed_bytes(descriptor))}"


def try_fallocate(memory: Path) -> str:
    """Take pages of a file in `memory` ahead of use."""
    with _probe_file(memory) as descriptor:
        os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
        return f"takes pages ahead of use in {memory}"


def try_flock(runtime: Path) -> str:
    """Lock a file twice: the second must be refused."""
    where = nearest_existing(runtime)
    with tempfile.NamedTemporaryFile(dir=where) as held, open(held.name, "rb") as other:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"exclusive in {where}"
    raise OSError(f"two holders got one lock in {where}")


def nearest_existing(path: Path) -> Path:
    """`path`, or the closest directory above it that exists."""
    return next((place for place in (path, *path.parents) if place.is_dir()), Path("/"))


@contextmanager
def _probe_file(directory: Path) -> Iterator[int]:
    with tempfile.TemporaryFile(dir=directory) as file:
        yield file.fileno()


def _removed_bytes(descriptor: int) -> int:
    """Bytes that punching out the whole file gave back; OSError if none."""
    os.ftruncate(descriptor, _PROBE_BYTES)
    with mmap.mmap(descriptor, _PROBE_BYTES) as pages:
        pages[:] = b"\xff" * _PROBE_BYTES
        before = os.fstat(descriptor).st_blocks
        pages.madvise(mmap.MADV_REMOVE)
        removed = (before - os.fstat(descriptor).st_blocks) * 512
        if removed <= 0 or pages[0]:
            raise OSError("pages stay taken after MADV_REMOVE")
    return removed
