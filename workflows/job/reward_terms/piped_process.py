"""A Python process for code that may hang or crash: messages go to it through one pipe, and come back through another.

A message is 4 bytes with its length, and MessagePack. The standard input of the process is its lifeline: when that
closes, the process ends with all that it started (`end_with_stdin`).
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from transferqueue.errors import DeadlineExceeded, NotFound, UsageError

START_S: Final = 300.0
"""Longest start of such a process: the import of the user's module, and what a class loads when it is made."""
LATER_S: Final = 2.0
"""The process itself ends a call that is too long, and says where it hangs. After this much more, it is killed."""

_POLL_MS_MAX: Final = 2**31 - 1


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """First message of a process that cannot load what it is for."""

    text: str
    is_missing: bool


class PipedProcess:
    """Starts ``python -m MODULE WORDS… REQUESTS REPLIES``; the last two are the file descriptors of its pipes.

    `send` and `receive` may be called from two threads, neither from several at once. `end` and `close` end it.
    """

    def __init__(self, module: str, *words: str) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        try:
            os.set_blocking(self._requests, False)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *words, str(requests), str(replies)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                pass_fds=(requests, replies),
                process_group=0,
            )
            self._death = os.pidfd_open(self._process.pid)
        except BaseException:
            os.close(self._requests)
            os.close(self._replies)
            raise
        finally:
            os.close(requests)
            os.close(replies)
        self._is_closed = self._has_all_requests = False

    def send(self, message: msgspec.Struct, deadline: float) -> None:
        """Send a message. Returns without an error if the process has ended, which the missing reply says. Raises
        `TimeoutError` if it does not read."""

        def write(data: memoryview) -> int:
            if not is_ready(self._requests, select.POLLOUT, deadline - time.monotonic()):
                raise TimeoutError
            return os.write(self._requests, data)

        if not self._has_all_requests:
            with suppress(BrokenPipeError):
                write_message(write, message)

    def receive(self, kind: Any, deadline: float = math.inf) -> Any:
        """Wait for a message of a type. Raises `EOFError` if the process has ended, and `TimeoutError`.

        A child that left the group of the process may outlive it, and keep the pipe open.
        """

        def read(size: int) -> bytes:
            ready = ready_of((self._replies, self._death), select.POLLIN, deadline - time.monotonic())
            if not ready:
                raise TimeoutError
            return os.read(self._replies, size) if self._replies in ready else b""

        return read_message(read, kind)

    def loaded(self, kind: Any, what: str) -> Any:
        """Wait for the first message, of a type, or `Refused`. what: the process loads, for messages.

        If that fails, the process is ended, and this raises `NotFound` or `UsageError` as it says, or
        `DeadlineExceeded`.
        """
        try:
            first = self.receive(kind | Refused, time.monotonic() + START_S)
        except TimeoutError as error:
            self.close()
            raise DeadlineExceeded(
                f"{what} was not loaded within {START_S:g} s; see what its module does when it is imported"
            ) from error
        except EOFError as error:
            raise UsageError(f"{what} {ended(self.end())} when it was loaded") from error
        if isinstance(first, Refused):
            self.close()
            raise (NotFound if first.is_missing else UsageError)(first.text)
        return first

    def finish(self) -> None:
        """Tell the process that no more messages come."""
        if not self._has_all_requests:
            self._has_all_requests = True
            os.close(self._requests)

    def kill(self) -> None:
        """Kill it, with all that it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and started nothing that lives
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """End the process; returns its exit code, negative for a signal. One that wrote its last words has ended."""
        if not self._is_closed:
            is_ready(self._death, select.POLLIN, LATER_S)  # not waited for: until `close`, it has the group's number
            self.close()
        return int(self._process.returncode)

    def close(self) -> None:
        """End the process, and all that it started. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.finish()
        os.close(self._replies)
        os.close(self._death)


def is_ready(descriptor: int, event: int, seconds: float) -> bool:
    """Wait for a file descriptor, whatever its number; an engine's process may have thousands."""
    return bool(ready_of((descriptor,), event, seconds))


def ready_of(descriptors: tuple[int, ...], event: int, seconds: float) -> list[int]:
    """Wait for one of some file descriptors, and return those that are ready; none after so many seconds."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, event)
    wait_ms = None if math.isinf(seconds) else min(max(0.0, seconds * 1000), _POLL_MS_MAX)
    return [descriptor for descriptor, _ in poll.poll(wait_ms)]


def ended(code: int) -> str:
    """Return how a process ended, in words: of `PipedProcess.end`."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended its process with code {code}"


# ---------------------------------------------------------------- messages


def write_message(write: Callable[[memoryview], int], message: msgspec.Struct) -> None:
    """Write one message. write: writes some bytes, and returns how many."""
    encoded = msgspec.msgpack.encode(message)
    left = memoryview(len(encoded).to_bytes(4, "little") + encoded)
    while left:
        left = left[write(left) :]


def read_message(read: Callable[[int], bytes], kind: Any) -> Any:
    """Read one message. Raises `EOFError` where the other end has closed."""
    size = int.from_bytes(_exactly(read, 4), "little")
    return msgspec.msgpack.decode(_exactly(read, size), type=kind)


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = read(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def end_with_stdin() -> None:
    """Wait until standard input closes, and end this process with all that it started."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
