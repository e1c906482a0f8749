"""Events that the processes of a flow send to their supervisor: one line of JSON each, over a pipe.

A pipe needs no server, keeps the order, keeps the events of a killed process, and its end shows that the process has
exited. Times are ``time.monotonic()`` seconds, which all processes of a machine share; times of another machine are
shifted to the supervisor's clock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec

WAIT: Final = "wait"
"""Span in which a stage waits for rows, or a source for room."""
WORK: Final = "work"
"""Span in which a stage works on a batch."""
SWAP: Final = "swap"
"""Span in which a generating stage pauses generation to load a version of the weights."""
WEIGHTS: Final = "weights"
"""Span in which a stage loads a version while it continues to generate."""
PUBLISH: Final = "publish"
"""Span in which a trainer publishes a version."""

START: Final = "start"
"""Span from the start of a process until it asks for its first batch."""

RESTART: Final = "restart"
"""Kind of the event that reports a process that died and is started again: ``text`` says why, ``next`` what follows."""


class TimeSpan(msgspec.Struct, frozen=True, kw_only=True, tag="span", omit_defaults=True):
    """A time span of one stage. rows, version: of its batch; -1 if it has none. stage: label of the stage; "": of its
    process."""

    name: str
    start: float
    end: float
    rows: int = -1
    version: int = -1
    stage: str = ""


class Figures(msgspec.Struct, frozen=True, kw_only=True, tag="figures", omit_defaults=True):
    """Metrics that a stage reports, with a kind such as "step". stage: as of `TimeSpan`."""

    kind: str
    at: float
    values: dict[str, Any]
    stage: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure", omit_defaults=True):
    """A call of a stage's function raised, and its rows were released as failed. text: the traceback. stage: as of
    `TimeSpan`."""

    text: str
    rows: int
    stage: str = ""


Event = TimeSpan | Figures | Failure

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


def shifted(event: Event, by_s: float) -> Event:
    """Return the event with its times `by_s` seconds later."""
    if isinstance(event, TimeSpan):
        return msgspec.structs.replace(event, start=event.start + by_s, end=event.end + by_s)
    if isinstance(event, Figures):
        return msgspec.structs.replace(event, at=event.at + by_s)
    return event


class Sender:
    """Writes events to a file descriptor. Safe from any thread; raises `BrokenPipeError` when the reader is gone.

    shift_s: how far the supervisor's monotonic clock is ahead of this machine's.
    """

    def __init__(self, descriptor: int, shift_s: float = 0.0) -> None:
        self._descriptor = descriptor
        self._shift_s = shift_s
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write `event`; blocks while the pipe is full."""
        line = memoryview(_encode(shifted(event, self._shift_s) if self._shift_s else event) + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Close the descriptor; the reader sees the end."""
        os.close(self._descriptor)


class Receiver:
    """Parses the bytes of a pipe into events. An incomplete last line comes from a killed process and is ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self.progressed = False
        """Whether the process has worked on a batch or published a version since its last failure."""
        self.is_idle = False
        """Whether the process has started, and has no batch."""

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events whose last byte is in `received`."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            event = _decode(line)
            if isinstance(event, Failure):
                self.progressed = False
            elif isinstance(event, TimeSpan) and event.name in (WORK, PUBLISH):
                self.progressed = True
            if isinstance(event, TimeSpan) and event.name in (START, WAIT, WORK):
                self.is_idle = event.name != WAIT
            yield event
