"""What the processes of a flow tell their supervisor: one line of JSON an event, over a pipe.

A pipe needs no server, keeps order, loses nothing of a process that was killed, and its end says that the
process has gone. Times are ``time.monotonic()`` seconds, which all processes of a machine share; from another machine they come as
those of the supervisor's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec

WAIT: Final = "wait"
"""Name of the spans in which a stage waits for rows, or a source for room."""
WORK: Final = "work"
"""Name of the spans in which it has a batch."""
SWAP: Final = "swap"
"""Name of the spans in which a generating stage stood still to load a version of the weights."""
WEIGHTS: Final = "weights"
"""Name of the spans in which it loaded one while it went on generating."""
PUBLISH: Final = "publish"
"""Name of the spans in which a trainer publishes one."""


class TimeSpan(msgspec.Struct, frozen=True, kw_only=True, tag="span"):
    """A stretch of time of one process. rows and version: of its batch; -1 where it has none."""

    name: str
    start: float
    end: float
    rows: int = -1
    version: int = -1


class Figures(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """Figures that a stage reports under a kind of its own, such as "step"."""

    kind: str
    at: float
    values: dict[str, Any]


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A call of a stage's function raised; its rows were given back. text: the traceback."""

    text: str
    rows: int


Event = TimeSpan | Figures | Failure

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


def shifted(event: Event, by_s: float) -> Event:
    """The event with its times so many seconds later."""
    if isinstance(event, TimeSpan):
        return msgspec.structs.replace(event, start=event.start + by_s, end=event.end + by_s)
    if isinstance(event, Figures):
        return msgspec.structs.replace(event, at=event.at + by_s)
    return event


class Sender:
    """Writes events to a file descriptor. Safe from any thread; raises `BrokenPipeError` when nobody listens.

    shift_s: what the supervisor's monotonic clock is ahead of that of this machine.
    """

    def __init__(self, descriptor: int, shift_s: float = 0.0) -> None:
        self._descriptor = descriptor
        self._shift_s = shift_s
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write ``event``; blocks while the pipe is full."""
        line = memoryview(_encode(shifted(event, self._shift_s) if self._shift_s else event) + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Close the descriptor: its listener hears the end."""
        os.close(self._descriptor)


class Receiver:
    """Turns the bytes of a pipe back into events. A last line without its end belongs to a killed process."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events whose last byte is in ``received``."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            yield _decode(line)
