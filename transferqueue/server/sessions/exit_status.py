"""How a session ended: from the client's goodbye, the server's observation and the kernel's exit status, without
guessing.

With a pidfd the server can read the exit status of a process. Before the process is reaped, only its parent can
(`waitid`). Afterwards any process can, on kernels that have ``PIDFD_GET_INFO`` with ``PIDFD_INFO_EXIT`` (Linux 6.15).
So the status is read when a report needs it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from typing import Final

_GET_INFO: Final = 0xC040FF0B
"""``_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)`` of the first version of the struct, 64 bytes."""
_INFO_BYTES: Final = 64
_INFO_EXIT: Final = 1 << 3
_CODE_AT: Final = 60


GOODBYE: Final = "said goodbye"
DIED: Final = "its process ended"
CUT: Final = "its connection ended"


class SessionEnding:
    """How one session ended.

    Args:
        reason: the server's observation.
        pidfd: of the process (-1: none). A duplicate is kept until the exit status is known, or until `close`.
    """

    def __init__(self, reason: str, pidfd: int = -1) -> None:
        self._reason = reason
        self._status: int | None = None
        try:
            self._pidfd = os.dup(pidfd) if pidfd >= 0 else -1
        except OSError:  # no descriptor is left: reports give the reason alone
            self._pidfd = -1

    @property
    def was_announced(self) -> bool:
        """Whether the client said goodbye."""
        return self._reason == GOODBYE

    @property
    def text(self) -> str:
        """The ending in words, such as ``killed by SIGKILL``."""
        if self.was_announced:
            return self._reason
        status = self._exit_code()
        if status is None:
            return self._reason
        return f"killed by {_signal_name(-status)}" if status < 0 else f"exited with code {status}"

    def close(self) -> None:
        """Close the descriptor. Closing twice is allowed."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _exit_code(self) -> int | None:
        """The exit code of the process (negative: the signal that killed it), once it is known."""
        if self._status is None and self._pidfd >= 0 and _is_gone(self._pidfd):
            self._status = _reaped(self._pidfd)
            if self._status is None:
                self._status = _of_child(self._pidfd)
            if self._status is not None:
                self.close()
        return self._status


def _is_gone(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _reaped(pidfd: int) -> int | None:
    info = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info, True)
    except OSError:  # an older kernel, or one that forbids it
        return None
    (mask,) = struct.unpack_from("=Q", info, 0)
    if not mask & _INFO_EXIT:
        return None
    (status,) = struct.unpack_from("=i", info, _CODE_AT)
    return os.waitstatus_to_exitcode(status)


def _of_child(pidfd: int) -> int | None:
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # not a child of this process
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
