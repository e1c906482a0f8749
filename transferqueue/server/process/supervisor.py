"""Starts a server again when it crashes, from a process that does nothing else.

- The server is a forked child. This process has loaded the modules once, so a restart takes milliseconds.
- A crash is a death by a signal, an unexpected error, `EXIT_AGAIN`, or `EXIT_TORN`. A server that was stopped, or that
  printed why it ended, is not started again.
- A server whose disk is full or fails (`EXIT_DISK`) is started again after a pause, for as long as it takes. The pause
  grows up to `DISK_RETRY_S_MAX`, and is the first again after a server that ran for longer than it paused.
- After more than `RESTARTS_MAX` crashes within `RESTARTS_WITHIN_S` the supervisor gives up.
- SIGTERM and SIGINT stop the server, and then this process. The supervisor passes SIGHUP on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

from transferqueue.errors import DiskFailed, JournalFailed, LedgerTorn, TransferQueueError, UsageError
from transferqueue.limits import DISK_RETRY_S, DISK_RETRY_S_MAX, RESTARTS_MAX, RESTARTS_WITHIN_S

EXIT_REPORTED: Final = 1
EXIT_WRONG_CALL: Final = 2
EXIT_DISK: Final = 74
"""The disk of the state is full or gives errors, and nothing is damaged: EX_IOERR of sysexits.h."""
EXIT_AGAIN: Final = 75
"""The cause may be temporary: EX_TEMPFAIL of sysexits.h."""
EXIT_TORN: Final = 71
"""A defect, or missing memory, interrupted an operation between its writes: EX_OSERR of sysexits.h. A durable server
comes back whole."""
EXIT_DEFECT: Final = 70
"""EX_SOFTWARE of sysexits.h."""

_SIGNALS: Final = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def exit_code(run: Callable[[], object]) -> int:
    """Run a server to its end, print an error to stderr, and return the exit code."""
    try:
        run()
    except TransferQueueError as error:
        sys.stderr.write(f"transferqueue: {error}\n")
        if isinstance(error, JournalFailed):
            return EXIT_DISK if isinstance(error, DiskFailed) else EXIT_AGAIN
        return EXIT_WRONG_CALL if isinstance(error, UsageError) else EXIT_REPORTED
    except (LedgerTorn, MemoryError) as error:
        sys.stderr.write(f"transferqueue: {str(error) or 'the memory of the server process is exhausted'}\n")
        return EXIT_TORN
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def supervise(run: Callable[[], object]) -> int:
    """Run a server in a forked child, again after each crash. Call it in the main thread of a process that has no other
    thread and no server.

    Returns the exit code of the last child, or 0 if it is told to stop while it waits for a disk.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    crashes: deque[float] = deque(maxlen=RESTARTS_MAX)
    pause_s = 0.0
    try:
        while True:
            began = time.monotonic()
            code, stopped = _run_child(run, before)
            if stopped or code in (0, EXIT_REPORTED, EXIT_WRONG_CALL):
                return code
            now = time.monotonic()
            if code == EXIT_DISK:
                pause_s = disk_pause_s(now - began, pause_s)
                if _stopped_within(pause_s):
                    return 0
                continue
            if len(crashes) == RESTARTS_MAX and now - crashes[0] < RESTARTS_WITHIN_S:
                sys.stderr.write(
                    f"transferqueue: the server crashed {RESTARTS_MAX + 1} times within {RESTARTS_WITHIN_S:g} s and is "
                    "not started again. Read its errors above, then start it yourself\n"
                )
                return code
            crashes.append(now)
            sys.stderr.write(f"transferqueue: the server crashed (exit code {code}); the supervisor starts it again\n")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def disk_pause_s(ran_s: float, paused_s: float) -> float:
    """The pause after a server whose disk failed, in seconds. ran_s: how long it ran. paused_s: the pause before it."""
    return DISK_RETRY_S if ran_s > paused_s else min(2 * paused_s, DISK_RETRY_S_MAX)


def _stopped_within(pause_s: float) -> bool:
    """Wait for a disk. Returns whether a signal told this process to stop meanwhile."""
    sys.stderr.write(f"transferqueue: the server's disk failed; the supervisor starts it again in {pause_s:g} s\n")
    sys.stderr.flush()
    until = time.monotonic() + pause_s
    while (left_s := until - time.monotonic()) > 0:
        received = signal.sigtimedwait(_SIGNALS, left_s)
        if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
            return True
    return False


def _run_child(run: Callable[[], object], mask: set[int | signal.Signals]) -> tuple[int, bool]:
    """The exit code of a child (minus the signal that killed it), and whether a signal told it to stop."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _child_main(run, mask)
    stopped = False
    while True:
        number = signal.sigwait(_SIGNALS)
        if number is not signal.SIGCHLD:
            stopped = stopped or number is not signal.SIGHUP
            os.kill(child, signal.SIGTERM if number is signal.SIGINT else number)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            return os.waitstatus_to_exitcode(status), stopped


def _child_main(run: Callable[[], object], mask: set[int | signal.Signals]) -> None:
    """Run the server in the child. Never returns, and runs no exit handler of the parent."""
    code = EXIT_DEFECT
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = exit_code(run)
    except BaseException:  # noqa: BLE001  (printed, and an exit code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
