"""A reward function in a process of its own: a call that hangs, crashes or exits ends that process, and fails alone.

Python cannot stop a thread, so a call that must end is made in another process. The function runs in the main thread
there, where its own signals work. `FunctionProcess` starts the process with the first call, and again after it ended.

``python -m transferqueue.workflows.job.reward_terms.function_process FUNCTION ARGS TIMEOUT_S REQUESTS REPLIES`` is that
process. It reads calls from the file descriptor REQUESTS and writes to REPLIES: 4 bytes with a length, and MessagePack.
Its standard input is its lifeline: when that closes, it ends with all that it started.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import msgspec
import numpy as np

from transferqueue.adapters.stages.reward_functions import RewardCall, RewardFailed, load_reward
from transferqueue.errors import DeadlineExceeded, NotFound, UsageError
from transferqueue.workflows.job.reward_terms.reward_rows import Floats

START_S: Final = 300.0
"""Longest start of the process: the import of the function's module, and what a class loads when it is made."""
LATER_S: Final = 2.0
"""A call ends its process itself, with a traceback of where it hangs. After this much more, it is killed."""

Message = TypeVar("Message", bound=msgspec.Struct)


class _Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The parameters of the function, as of `RewardCall`."""

    given: tuple[str, ...]
    wants: tuple[str, ...]
    takes: tuple[str, ...]
    takes_all: bool


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The function cannot be loaded."""

    text: str
    is_missing: bool


class _Call(msgspec.Struct, frozen=True):
    columns: Mapping[str, Sequence[Any]]
    rows: int


class _Scores(msgspec.Struct, frozen=True, tag="scores"):
    """Float64 ``[rows]``, as bytes."""

    scores: bytes


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The call failed, as of `RewardFailed`."""

    text: str
    at: int
    of_call: bool
    may_pass: bool


class FunctionProcess:
    """A reward function that is called in another process. A context manager. Calls must not overlap.

    Args:
        named: ``module:function`` or ``file.py:function``, as of `load_reward`.
        args: of a class or factory.
        timeout_s: longest call in seconds.
        key: of its settings, for messages; default "reward".
    """

    def __init__(self, named: str, args: Mapping[str, Any], *, timeout_s: float, key: str = "reward") -> None:
        self.name: Final = named
        self._args, self._timeout_s, self._key = dict(args), timeout_s, key
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._parameters: _Loaded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and all that it started. A second call does nothing."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # it has ended, and started nothing that lives
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._requests)
        os.close(self._replies)
        self._process = None

    def parameters(self) -> RewardCall:
        """Return the function's parameters; the function itself is called by `scores` alone.

        Starts the process. Raises as `load_reward` does, and `DeadlineExceeded` if it takes longer than `START_S`.
        """
        loaded = self._start() if self._parameters is None else self._parameters
        fields: dict[str, Any] = msgspec.structs.asdict(loaded)
        return RewardCall(name=self.name, function=_not_here, **fields)

    def scores(self, columns: Mapping[str, Sequence[Any]], rows: int) -> Floats:
        """Call the function: float64 ``[rows]``, NaN for None.

        Raises `RewardFailed` as `RewardCall` does, and if the call does not return in time or ends its process.
        """
        if self._process is None:
            self._start()
        self._send(_Call(columns, rows))
        began = time.monotonic()
        try:
            reply = self._receive(_Scores | _Failed, began + self._timeout_s + LATER_S)
        except (EOFError, TimeoutError) as error:
            code = self._end()
            is_late = isinstance(error, TimeoutError) or time.monotonic() - began >= self._timeout_s
            text = self._late() if is_late else f"reward {self.name} {_ended(code)}"
            raise RewardFailed(text, name=self.name) from error
        if isinstance(reply, _Failed):
            raise RewardFailed(reply.text, name=self.name, at=reply.at, of_call=reply.of_call, may_pass=reply.may_pass)
        return np.frombuffer(reply.scores, np.float64)

    def _late(self) -> str:
        return (
            f"reward {self.name} did not return within {self._key}.timeout_s={self._timeout_s:g} s; make it faster, or "
            "set a longer limit"
        )

    # ------------------------------------------------------------ its process

    def _start(self) -> _Loaded:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        args = msgspec.json.encode(self._args).decode()
        limits = [str(self._timeout_s), str(requests), str(replies)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self.name, args, *limits],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                pass_fds=(requests, replies),
                process_group=0,
            )
        except BaseException:
            os.close(self._requests)
            os.close(self._replies)
            raise
        finally:
            os.close(requests)
            os.close(replies)
        try:
            loaded: _Loaded | _Refused = self._receive(_Loaded | _Refused, time.monotonic() + START_S)
        except TimeoutError as error:
            self._end()
            raise DeadlineExceeded(
                f"reward {self.name} was not loaded within {START_S:g} s; see what its module does when it is imported"
            ) from error
        except EOFError as error:
            raise UsageError(f"reward {self.name} {_ended(self._end())} when it was loaded") from error
        if isinstance(loaded, _Refused):
            self._end()
            raise (NotFound if loaded.is_missing else UsageError)(loaded.text)
        self._parameters = loaded
        return loaded

    def _end(self) -> int:
        """End the process; returns its exit code, negative for a signal. One that wrote its last words has ended."""
        process = self._process
        if process is None:
            return 0
        death = os.pidfd_open(process.pid)
        select.select([death], [], [], LATER_S)  # not waited for: until `close`, its number is that of its group
        os.close(death)
        self.close()
        return process.returncode

    def _send(self, call: _Call) -> None:
        with suppress(BrokenPipeError):  # it has ended, which its missing reply says
            _write(self._requests, call)

    def _receive(self, kind: Any, deadline: float) -> Any:
        def read(size: int) -> bytes:
            read_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._replies], [], [], read_s)[0]:
                raise TimeoutError
            return os.read(self._replies, size)

        return _read(read, kind)


def _not_here(**columns: Any) -> Sequence[float | None]:
    raise UsageError("a function of another process is called by FunctionProcess.scores")


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended its process with code {code}"


# ---------------------------------------------------------------- both ends


def _write(descriptor: int, message: msgspec.Struct) -> None:
    encoded = msgspec.msgpack.encode(message)
    left = memoryview(len(encoded).to_bytes(4, "little") + encoded)
    while left:
        left = left[os.write(descriptor, left) :]


def _read(read: Any, kind: Any) -> Any:
    """Read one message. Raises `EOFError` where the other end has closed."""
    size = int.from_bytes(_exactly(read, 4), "little")
    return msgspec.msgpack.decode(_exactly(read, size), type=kind)


def _exactly(read: Any, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = read(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


# ---------------------------------------------------------------- the process


def main(named: str, args: str, timeout_s: str, requests: str, replies: str) -> None:
    """Load the function, and answer calls until the other end closes."""
    threading.Thread(target=_end_with_stdin, name="lifeline", daemon=True).start()
    try:
        call = load_reward(named, msgspec.json.decode(args))
    except UsageError as error:
        _write(int(replies), _Refused(str(error), isinstance(error, NotFound)))
        return
    _write(int(replies), _Loaded(call.given, call.wants, call.takes, call.takes_all))
    while True:
        try:
            asked = _read(lambda size: os.read(int(requests), size), _Call)
        except EOFError:
            return
        _write(int(replies), _answer(call, asked, float(timeout_s)))


def _answer(call: RewardCall, asked: _Call, timeout_s: float) -> _Scores | _Failed:
    # In C, so that it ends code that holds the interpreter's lock too.
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        return _Scores(call(asked.columns, rows=asked.rows).tobytes())
    except RewardFailed as failure:
        return _Failed(str(failure), failure.at, failure.of_call, failure.may_pass)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
