"""A side of a trial as a process of its own: what it prints goes to a log, its steps come back as messages.

``python -m MODULE WORDS… LOG REQUESTS REPLIES`` is that process (`piped_process`): its main thread calls `run_side`. It
ends with its parent, and after `TRIAL_S`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.workflows.adopt.trial.compare import SideStep
from transferqueue.workflows.job.reward_terms.piped_process import PipedProcess, end_with_stdin, ended, write_message

TRIAL_S: Final = 1800.0
"""Longest time that one side takes, with its start."""


class SideFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A side cannot go on."""

    text: str


Send = Callable[[SideStep | SideFailed], None]


def steps_of(name: str, module: str, words: list[str], log: Path, tell: Callable[[str], None]) -> list[SideStep]:
    """Start a side, and return its steps. Blocks until it has ended.

    Args:
        name: of the side, for messages.
        module: of its process.
        words: for its `main`.
        log: file that gets what it prints.
        tell: gets a line for each step.

    Raises:
        UsageError: it failed, with its error or the last line of its log; or a step of it has no rows.
        DeadlineExceeded: it took longer than `TRIAL_S`; its processes are killed.
    """
    process, deadline, steps = PipedProcess(module, *words, str(log)), time.monotonic() + TRIAL_S, list[SideStep]()
    try:
        while True:
            message = process.receive(SideStep | SideFailed, deadline)
            if isinstance(message, SideFailed):
                raise UsageError(f"{name} could not be run: {message.text}")
            if not message.prompts:
                raise UsageError(f"{name} cannot be compared: its step {message.step} has no rows")
            steps.append(message)
            tell(f"{name}: step {message.step}, loss {message.figures.get('loss', math.nan):.6g}")
    except EOFError as error:
        code = process.end()
        if code or not steps:
            raise UsageError(f"{name} could not be run: it {ended(code)}: {_last_line(log)}") from error
        return steps
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{name} did not take its steps within {TRIAL_S:g} s; give a smaller model, or fewer or shorter responses, "
            "after the file"
        ) from error
    finally:
        process.close()


def run_side(run: Callable[[list[str], Send], None]) -> None:
    """Run a side in this process, by the words of its command line. run: gets its own words, and sends its steps."""
    *words, log, _, replies = sys.argv[1:]
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    threading.Thread(target=end_with_stdin, name="lifeline", daemon=True).start()
    send: Send = partial(write_message, partial(os.write, int(replies)))
    try:
        run(words, send)
    except Exception as error:  # noqa: BLE001  (raised again, in the parent)
        send(SideFailed(f"{type(error).__name__}: {error}"))


def carried(name: str, value: Any) -> Any:
    """Return a value of a column of the data as a message carries it; those of numpy as numbers and lists. Raises
    `UsageError`, with the column's name.

    >>> carried("answer", {"at": np.int64(3), "of": np.array(["x", "y"])})
    {'at': 3, 'of': ['x', 'y']}
    """
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=_of_numpy))
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise UsageError(f"column {name!r} of the data cannot be carried to the other side: {error}") from error


def _of_numpy(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"it has a {type(value).__name__}; leave the column out of the data that is tried")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")
