"""What a process wrote before it was killed: tokens drawn, responses finished, steps trained.

Each process has two files of its own. The number of tokens is in shared memory of a file, and lines are written at
once, so a SIGKILL loses neither.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.crash_cost.costs import Response, TrainedStep, response_of

_COUNT_BYTES: Final = 8


class ProcessLog:
    """The files of this process in a folder, which is made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.monotonic_ns():020}-{os.getpid()}"
        with (folder / f"{name}.drawn").open("w+b") as file:
            file.truncate(_COUNT_BYTES)
            self._drawn = mmap.mmap(file.fileno(), _COUNT_BYTES)
        self._lines = (folder / f"{name}.jsonl").open("ab", buffering=0)

    def drew(self, tokens: int = 1) -> None:
        """Count tokens. Call it from one thread."""
        count = int.from_bytes(self._drawn, "little") + tokens
        self._drawn[:] = count.to_bytes(_COUNT_BYTES, "little")

    def responded(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        """Note a finished response."""
        self._write({"response": response_of(prompt_ids, response_ids)})

    def trained(self, step: int, rows: Sequence[Response]) -> None:
        """Note a step with its rows."""
        self._write({"step": step, "at": time.monotonic(), "rows": rows})

    def close(self) -> None:
        """Close the files."""
        self._drawn.close()
        self._lines.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line).encode() + b"\n")


def drawn(folder: Path) -> int:
    """Return how many tokens all processes of a run drew."""
    return sum(int.from_bytes(path.read_bytes(), "little") for path in folder.glob("*.drawn"))


def responses(folder: Path) -> list[Response]:
    """Return the finished responses of all processes."""
    return [Response(*line["response"]) for line in _lines(folder) if "response" in line]


def taken(folder: Path) -> list[TrainedStep]:
    """Return the steps of all trainers, in their order."""
    steps = [line for line in _lines(folder) if "step" in line]
    found = [TrainedStep(line["step"], line["at"], [Response(*row) for row in line["rows"]]) for line in steps]
    return sorted(found, key=lambda each: each.at)


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # a kill cut it off
                continue
