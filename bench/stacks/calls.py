"""Records what a process calls of ``transfer_queue``, whichever package that is: one line a call, in a file of the
process.

The first line names the package. A line has the function, its seconds and the length of the list of keys or samples.
Calls that a recorded call makes itself are not recorded.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TextIO

FUNCTIONS: Final = (
    "kv_put",
    "kv_batch_put",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_list",
    "kv_clear",
    "save_checkpoint",
    "load_checkpoint",
)
METHODS: Final = ("get_meta", "get_data", "put", "kv_retrieve_meta", "kv_retrieve_keys")
"""Of its client; each has a twin ``async_NAME``."""

_inside: ContextVar[bool] = ContextVar("inside a recorded call", default=False)


class Call(NamedTuple):
    """One call: its function without ``async_``, its seconds, the rows that it named (0: none)."""

    function: str
    seconds: float
    rows: int


class Recording(NamedTuple):
    """What one process did. package: the module that it imported as ``transfer_queue``."""

    package: str
    calls: list[Call]


def record(module: ModuleType, folder: Path) -> None:
    """Record the calls of `module` that this process makes from now on, in a new file of `folder`."""
    out = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
    out.write(json.dumps(module.__name__) + "\n")
    for name in FUNCTIONS:
        for each in (name, f"async_{name}"):
            if hasattr(module, each):
                setattr(module, each, _recorded(getattr(module, each), name, out))
    for name in METHODS:
        for each in (name, f"async_{name}"):
            if hasattr(module.TransferQueueClient, each):
                method = getattr(module.TransferQueueClient, each)
                setattr(module.TransferQueueClient, each, _recorded(method, name, out))


def recordings(folder: Path) -> list[Recording]:
    """Read what the processes wrote."""
    return [_recording(path.read_text().splitlines()) for path in sorted(folder.glob("*.jsonl"))]


def _recording(lines: list[str]) -> Recording:
    return Recording(json.loads(lines[0]), [Call(*json.loads(line)) for line in lines[1:]])


def _recorded(function: Callable[..., Any], name: str, out: TextIO) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **named: Any) -> Any:
            with _timed(name, args, named, out):
                return await function(*args, **named)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        with _timed(name, args, named, out):
            return function(*args, **named)

    return called


@contextmanager
def _timed(name: str, args: tuple[Any, ...], named: dict[str, Any], out: TextIO) -> Iterator[None]:
    if _inside.get():
        yield
        return
    token, began = _inside.set(True), time.perf_counter()
    try:
        yield
    finally:
        _inside.reset(token)
        out.write(json.dumps([name, round(time.perf_counter() - began, 6), _rows(args, named)]) + "\n")


def _rows(args: tuple[Any, ...], named: dict[str, Any]) -> int:
    """The length of the keys, or of the metadata, of a call."""
    for value in (*named.values(), *args):
        if isinstance(value, list):
            return len(value)
        if hasattr(value, "partition_ids"):
            return len(value)
    return 0
