"""A reward function in a process of its own: a call that hangs, crashes or exits ends that process, and fails alone.

Python cannot stop a thread, so a call that must end is made in another process. The function runs in the main thread
there, where its own signals work. `FunctionProcess` starts the process with the first call, and again after it ended.

``python -m transferqueue.workflows.job.reward_terms.function_process FUNCTION ARGS TIMEOUT_S REQUESTS REPLIES`` is that
process (`piped_process`).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import msgspec
import numpy as np

from transferqueue.adapters.stages.reward_functions import RewardCall, RewardFailed, load_reward
from transferqueue.errors import NotFound, TransferQueueError, UsageError
from transferqueue.workflows.job.reward_terms.piped_process import (
    LATER_S,
    PipedProcess,
    Refused,
    end_with_stdin,
    ended,
    read_message,
    write_message,
)
from transferqueue.workflows.job.reward_terms.reward_rows import Floats

_MODULE: Final = "transferqueue.workflows.job.reward_terms.function_process"


class _Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The parameters of the function, as of `RewardCall`."""

    given: tuple[str, ...]
    wants: tuple[str, ...]
    takes: tuple[str, ...]
    takes_all: bool


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
        self._process: PipedProcess | None = None
        self._parameters: _Loaded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and all that it started. A second call does nothing."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def parameters(self) -> RewardCall:
        """Return the function's parameters; the function itself is called by `scores` alone.

        Starts the process. Raises as `load_reward` does, and `DeadlineExceeded` if it takes longer than
        `piped_process.START_S`.
        """
        loaded = self._start()[0] if self._parameters is None else self._parameters
        fields: dict[str, Any] = msgspec.structs.asdict(loaded)
        return RewardCall(name=self.name, function=_not_here, **fields)

    def scores(self, columns: Mapping[str, Sequence[Any]], rows: int) -> Floats:
        """Call the function: float64 ``[rows]``, NaN for None.

        Raises `RewardFailed` as `RewardCall` does, and if the call does not return in time or ends its process.
        """
        process, began = self._process or self._start()[1], time.monotonic()
        deadline = began + self._timeout_s + LATER_S
        try:
            process.send(_Call(columns, rows), deadline)
            reply = process.receive(_Scores | _Failed, deadline)
        except (EOFError, TimeoutError) as error:
            code = self._end()
            is_late = isinstance(error, TimeoutError) or time.monotonic() - began >= self._timeout_s
            text = self._late() if is_late else f"reward {self.name} {ended(code)}"
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

    def _start(self) -> tuple[_Loaded, PipedProcess]:
        args = msgspec.json.encode(self._args).decode()
        process = self._process = PipedProcess(_MODULE, self.name, args, str(self._timeout_s))
        try:
            loaded: _Loaded = process.loaded(_Loaded, f"reward {self.name}")
        except TransferQueueError:
            self._process = None
            raise
        self._parameters = loaded
        return loaded, process

    def _end(self) -> int:
        """End the process; returns its exit code."""
        process, self._process = self._process, None
        return 0 if process is None else process.end()


def _not_here(**columns: Any) -> Sequence[float | None]:
    raise UsageError("a function of another process is called by FunctionProcess.scores")


# ---------------------------------------------------------------- the process


def main(named: str, args: str, timeout_s: str, requests: str, replies: str) -> None:
    """Load the function, and answer calls until the other end closes."""
    threading.Thread(target=end_with_stdin, name="lifeline", daemon=True).start()
    reply = partial(os.write, int(replies))
    try:
        call = load_reward(named, msgspec.json.decode(args))
    except UsageError as error:
        write_message(reply, Refused(str(error), isinstance(error, NotFound)))
        return
    write_message(reply, _Loaded(call.given, call.wants, call.takes, call.takes_all))
    while True:
        try:
            asked = read_message(partial(os.read, int(requests)), _Call)
        except EOFError:
            return
        write_message(reply, _answer(call, asked, float(timeout_s)))


def _answer(call: RewardCall, asked: _Call, timeout_s: float) -> _Scores | _Failed:
    # In C, so that it ends code that holds the interpreter's lock too.
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        return _Scores(call(asked.columns, rows=asked.rows).tobytes())
    except RewardFailed as failure:
        return _Failed(str(failure), failure.at, failure.of_call, failure.may_pass)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
