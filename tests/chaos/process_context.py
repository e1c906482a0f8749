"""The context of one process of a run: its role, its event log, and a wake-up when its parent stops it.

Processes are forked from one that has loaded everything, so a new one works within milliseconds. Each is killed when
its parent ends: nothing of a run outlives the run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import transferqueue as tq
from tests.chaos.log import ProcessLog

CONNECT_S: Final = 60.0
NUMBERS_PER_PROCESS: Final = 1 << 24
"""Rows that one process puts at most."""
_PR_SET_PDEATHSIG: Final = 1
_STOPS: Final = frozenset({signal.SIGTERM})


class ServerEndpoint:
    """The address of the server for a role, and its join token. None: the server has no keys."""

    def __init__(self, address: str, key: str | None = None) -> None:
        self.address, self.key = address, key

    def connect(self) -> tq.Queue:
        """Connect to the queue; `Unreachable` if nothing answers within `CONNECT_S`."""
        data: Any = "auto" if self.key is None else "remote"
        return tq.connect(self.address, timeout_s=CONNECT_S, data=data, key=self.key)


class ProcessContext:
    """The context of one process of a role. `life`: its number, ascending over the run."""

    def __init__(self, directory: Path, endpoint: ServerEndpoint, role: str, life: int, seed: int) -> None:
        self.directory, self.endpoint, self.role, self.life, self.seed = directory, endpoint, role, life, seed
        self.stopping = False
        self.log = ProcessLog(directory / "events", role, life)
        self._next = life * NUMBERS_PER_PROCESS
        self._wakeup, signalled = os.pipe()
        os.set_blocking(signalled, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)

    def numbers(self, count: int) -> range:
        """Numbers for `count` rows, which no other row of the run has."""
        first, self._next = self._next, self._next + count
        return range(first, first + count)

    def pace(self, seconds: float) -> None:
        """Pause between two pieces of work, to bound the load on the machine. Returns at once when the parent stops the
        process."""
        if not self.stopping:
            select.select([self._wakeup], [], [], seconds)

    def _stop(self, *_: object) -> None:
        self.stopping = True


def fork(work: Callable[[], object], log: Path) -> int:
    """Run `work` in a child process; its process number. An exception there goes to the file `log`, and the exit code
    is 1.

    The child has SIGTERM blocked until it makes its `ProcessContext`: Python forgets what arrives before the child of a
    fork first runs.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_with(parent)
        _write_to(log)
        gc.freeze()
        work()
        code = 0
    except BaseException:  # noqa: BLE001  (written to the log, and the exit code says so)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def _write_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
