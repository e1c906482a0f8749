"""What one process did, in a file that outlives it: a line of JSON each, ``[kind, monotonic time, ...]``.

A line is one `write` to a file opened for appending, so SIGKILL leaves whole lines and at most one torn one at the end, which
says nothing that can be relied on and is left out. The clock is the machine's: lines of different processes compare.
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
    """The diary of one life of a role, to be written."""

    def __init__(self, directory: Path, role: str, life: int) -> None:
        path = directory / f"{role}.{life:06d}{_SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, *values: Any) -> None:
        """Add a line. It is in the file when this returns."""
        os.write(self._file, msgspec.json.encode([kind, time.monotonic(), *values]) + b"\n")


class ReadLog:
    """A diary that was written. role: the slot, as ``reward-1``; life: which process of it, ascending over the run."""

    def __init__(self, path: Path) -> None:
        self.role, life, _ = path.name.split(".")
        self.life: Final = int(life)
        self.lines: Final = list(_lines(path.read_bytes()))

    def of(self, kind: str) -> Iterator[Line]:
        """Its lines of one kind."""
        return (line for line in self.lines if line[0] == kind)


def _lines(content: bytes) -> Iterator[Line]:
    whole = content[: content.rfind(b"\n") + 1]
    for line in whole.splitlines():
        yield msgspec.json.decode(line, type=Line)


def read(directory: Path) -> list[ReadLog]:
    """All diaries of a run, in the order in which their processes began."""
    return sorted((ReadLog(path) for path in directory.glob(f"*{_SUFFIX}")), key=lambda told: told.life)
