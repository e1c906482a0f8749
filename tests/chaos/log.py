"""The event log of a process: a file of JSON lines, ``[kind, monotonic time, ...]``, that outlives the process.

A line is one `write` to a file opened for appending, so SIGKILL leaves whole lines and at most one incomplete line at
the end, which readers skip. The clock is the machine's, so the times of different processes compare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

Line = list[Any]
_SUFFIX: Final = ".jsonl"


class ProcessLog:
    """Writes the event log of one process of a role."""

    def __init__(self, directory: Path, role: str, life: int) -> None:
        path = directory / f"{role}.{life:06d}{_SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, *values: Any) -> None:
        """Append a line. It is in the file when this returns."""
        os.write(self._file, msgspec.json.encode([kind, time.monotonic(), *values]) + b"\n")


class ReadLog:
    """The lines of an event log, its role (``reward-1``), and the number of its process, ascending over the run."""

    def __init__(self, path: Path) -> None:
        self.role, life, _ = path.name.split(".")
        self.life: Final = int(life)
        self.lines: Final = list(_lines(path.read_bytes()))

    def of(self, kind: str) -> Iterator[Line]:
        """The lines of one kind."""
        return (line for line in self.lines if line[0] == kind)


def _lines(content: bytes) -> Iterator[Line]:
    whole = content[: content.rfind(b"\n") + 1]
    for line in whole.splitlines():
        yield msgspec.json.decode(line, type=Line)


def read_logs(directory: Path) -> list[ReadLog]:
    """All event logs of a run, in the order in which their processes began."""
    return sorted((ReadLog(path) for path in directory.glob(f"*{_SUFFIX}")), key=lambda log: log.life)
