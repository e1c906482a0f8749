"""The runtime directory, where sockets and locks live, and the number of files a server may hold open."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path
from typing import Final

from transferqueue.limits import SESSIONS_MAX
from transferqueue.observe.machine.kernel import nearest_existing
from transferqueue.observe.machine.result import Check, fail, ok, warn

SOCKET_NAME: Final = "control.sock"
SOCKET_PATH_MAX: Final = 107
"""Bytes of a Unix socket's path, its final zero left out (unix(7))."""
FILES_PER_SESSION: Final = 3
"""Descriptors of a server for each session: socket, pidfd, lock."""
FILES_FEW: Final = 256
RUNTIME_VARIABLE: Final = "TRANSFERQUEUE_RUNTIME"


def default_runtime() -> Path:
    """The directory of this user's server, by the rule of `transferqueue.transport`.

    Repeated here because `doctor` must work where a library that transport needs is missing.
    """
    if named := os.environ.get(RUNTIME_VARIABLE):
        return Path(named)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session, "transferqueue")
    return Path(f"/tmp/transferqueue-{os.getuid()}")  # noqa: S108  (made 0700, and checked to be ours)


def runtime_checks(runtime: Path) -> list[Check]:
    """Permissions of the directory, length of its socket's path, open-file limit."""
    return [directory(runtime), socket_path(runtime), open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]


def directory(runtime: Path) -> Check:
    """Check that the directory belongs to this user alone (0700), or can be made."""
    subject = "runtime directory"
    if not runtime.exists():
        return _makeable(subject, runtime)
    status = runtime.stat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        return fail(subject, f"{runtime} is not a directory", "remove it, or set TRANSFERQUEUE_RUNTIME")
    if status.st_uid != os.getuid():
        owner = f"{runtime} belongs to user {status.st_uid}, not {os.getuid()}"
        return fail(subject, owner, "set TRANSFERQUEUE_RUNTIME to a directory of your own")
    if mode & 0o077:
        return fail(subject, f"{runtime} has mode {mode:04o}: others may join the queue", f"chmod 0700 {runtime}")
    if not os.access(runtime, os.W_OK | os.X_OK):
        return fail(subject, f"{runtime} has mode {mode:04o}: it cannot be written", f"chmod 0700 {runtime}")
    return ok(subject, f"{runtime}, mode {mode:04o}")


def _makeable(subject: str, runtime: Path) -> Check:
    above = nearest_existing(runtime)
    if os.access(above, os.W_OK | os.X_OK):
        return ok(subject, f"{runtime} will be made with mode 0700")
    return fail(subject, f"{runtime} cannot be made in {above}", "set TRANSFERQUEUE_RUNTIME to a directory of your own")


def socket_path(runtime: Path) -> Check:
    """Check the length of the socket's path, which the kernel limits."""
    length = len(os.fsencode(runtime / SOCKET_NAME))
    finding = f"{length} of at most {SOCKET_PATH_MAX} bytes"
    if length > SOCKET_PATH_MAX:
        return fail("socket path", finding, "set TRANSFERQUEUE_RUNTIME to a shorter path, such as /tmp/tq")
    return ok("socket path", finding)


def open_files(soft: int) -> Check:
    """Check how many sessions a server may have under this limit of descriptors."""
    subject = "open files"
    if soft == resource.RLIM_INFINITY or soft >= FILES_PER_SESSION * SESSIONS_MAX:
        return ok(subject, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}")
    finding = f"{soft}: about {soft // FILES_PER_SESSION} sessions"
    remedy = f"ulimit -n {FILES_PER_SESSION * SESSIONS_MAX}"
    if soft < FILES_FEW:
        return fail(subject, finding, remedy)
    return warn(subject, finding, remedy) if soft < 4 * FILES_FEW else ok(subject, finding)
