"""Limits the connections to a ZeroMQ socket that have not identified themselves, in number and in time.

ZeroMQ accepts every connection in a thread of its own and keeps it. It has a deadline for its own greeting, but none
for what follows, and when no descriptor is left it retries without end. So a peer that only opens connections could use
up the descriptors that clients need. ZeroMQ's monitor tells the server's loop the descriptor number of each connection.
A connection is a *stranger* until the loop admits the sender of one of its messages. The loop shuts down strangers
beyond `strangers_max`, and those older than `STRANGER_S`, by descriptor number; ZeroMQ then sees the connection's end.
"""

from __future__ import annotations

import logging
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import zmq

from transferqueue.limits import STRANGER_S, STRANGERS_MAX

_log: Final = logging.getLogger("transferqueue.server")
_EVENT: Final = struct.Struct("=HI")
_SHARE: Final = 8
_LEAST: Final = 8


def strangers_max() -> int:
    """How many strangers each listening socket allows: `STRANGERS_MAX`, but at most an eighth of this process's
    descriptor limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return STRANGERS_MAX
    return max(_LEAST, min(STRANGERS_MAX, allowed // _SHARE))


class _Stranger(NamedTuple):
    came_at: float
    where: Any


class Strangers:
    """The strangers of one ROUTER socket. Used by the thread of the socket. source: readable when connections were made
    or ended."""

    def __init__(self, watched: zmq.Socket[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.source: Final = watched.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.turned_away = 0
        self._clock = clock
        self._most = strangers_max()
        self._all: dict[int, _Stranger] = {}  # by descriptor, oldest first

    def __len__(self) -> int:
        return len(self._all)

    def hear(self) -> None:
        """Process the monitor's events. Close the oldest strangers if there are too many."""
        with suppress(zmq.Again):
            while True:
                event, number = _EVENT.unpack(self.source.recv_multipart(zmq.NOBLOCK)[0])
                self._all.pop(number, None)
                if event == zmq.EVENT_ACCEPTED and (where := _where(number)) is not None:
                    self._all[number] = _Stranger(self._clock(), where)
        while len(self._all) > self._most:
            self._turn_away(next(iter(self._all)))

    def admit(self, frame: zmq.Frame) -> None:
        """The connection that sent this frame is no stranger any more."""
        if self._all:
            with suppress(zmq.ZMQError):
                self._all.pop(int(frame.get(zmq.SRCFD)), None)

    def patience_s(self) -> float | None:
        """Seconds until `tick` must be called; None: no stranger waits."""
        if not self._all:
            return None
        return max(0.0, next(iter(self._all.values())).came_at + STRANGER_S - self._clock())

    def tick(self) -> None:
        """Close strangers older than `STRANGER_S`."""
        while self._all and self.patience_s() == 0.0:
            self._turn_away(next(iter(self._all)))

    def _turn_away(self, number: int) -> None:
        stranger = self._all.pop(number)
        self.turned_away += 1
        if self.turned_away == 1:
            _log.warning(
                "a tcp port closed a connection that did not say who it is within %g s, or made room for later ones; "
                "clients of this version greet at once, so another program connects there (this is logged once)",
                STRANGER_S,
            )
        with suppress(OSError):
            connection = socket.socket(fileno=number)
            try:
                if connection.getpeername() == stranger.where:  # the descriptor number may have been reused
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # ZeroMQ owns the descriptor


def _where(number: int) -> Any:
    """The address of the peer of the connection with this descriptor; None if it is closed already."""
    try:
        connection = socket.socket(fileno=number)
    except OSError:
        return None
    try:
        return connection.getpeername()
    except OSError:
        return None
    finally:
        connection.detach()
