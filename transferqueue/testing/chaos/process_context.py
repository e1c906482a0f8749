"""What one process of a run is given: who it is, its diary, and a bell that its parent rings to have it stop.

A member is forked from a process that has loaded everything, so a new one works within milliseconds. It dies with its
parent: nothing of a run outlives the run.
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
from transferqueue.testing.chaos.log import ProcessLog

CONNECT_S: Final = 60.0
NUMBERS_OF_LIFE: Final = 1 << 24
"""Rows that one producer puts at most."""
_PR_SET_PDEATHSIG: Final = 1


class ServerEndpoint:
    """How a role reaches the server. key: its join token; None: none is asked for."""

    def __init__(self, address: str, key: str | None = None) -> None:
        self.address, self.key = address, key

    def connect(self) -> tq.Queue:
        """A queue; `Unreachable` if nothing answers within `CONNECT_S`."""
        data: Any = "auto" if self.key is None else "remote"
        return tq.connect(self.address, timeout_s=CONNECT_S, data=data, key=self.key)


class ProcessContext:
    """Of one life of one role. directory: that of the run."""

    def __init__(self, directory: Path, way: ServerEndpoint, role: str, life: int, seed: int) -> None:
        self.directory, self.way, self.role, self.life, self.seed = directory, way, role, life, seed
        self.stopping = False
        self.diary = ProcessLog(directory / "diaries", role, life)
        self._next = life * NUMBERS_OF_LIFE
        self._bell, ring = os.pipe()
        os.set_blocking(ring, False)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)

    def numbers(self, count: int) -> range:
        """Numbers that no row of the run has."""
        first, self._next = self._next, self._next + count
        return range(first, first + count)

    def pace(self, seconds: float) -> None:
        """Let time pass, so that the load is this and no more; not when told to stop."""
        if not self.stopping:
            select.select([self._bell], [], [], seconds)

    def _stop(self, *_: object) -> None:
        self.stopping = True


def fork(work: Callable[[], object], log: Path) -> int:
    """Run `work` in a child; its process number. What goes wrong there is told in `log`, and is exit code 1."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with(parent)
        _write_to(log)
        gc.freeze()
        work()
        code = 0
    except BaseException:  # noqa: BLE001  (told, and an exit code)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def _write_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
