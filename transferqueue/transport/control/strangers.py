"""Connections to a ZeroMQ socket that have not said who they are: how many there may be, and for how long.

ZeroMQ accepts whoever connects, in a thread of its own, and keeps the connection: it has a deadline for its own greeting and none for what
comes after that, and where no descriptor is left it asks for one again and again. So somebody who only opens connections would
use up the descriptors that the clients of the server need. Here the loop hears of each connection from ZeroMQ's monitor, by the number of its
descriptor; a connection is a *stranger* until the loop admits the sender of a message that came over it. Strangers past
`strangers_max` and those older than `STRANGER_S` are shut down by that number, which ZeroMQ sees as their end.
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
    """How many strangers each door lets wait: `STRANGERS_MAX`, and an eighth of the descriptors that this process may have at most."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return STRANGERS_MAX
    return max(_LEAST, min(STRANGERS_MAX, allowed // _SHARE))


class _Stranger(NamedTuple):
    came_at: float
    where: Any


class Strangers:
    """The strangers of one ROUTER socket. Used by the thread that uses the socket. `source`: readable when connections came or went."""

    def __init__(self, watched: zmq.Socket[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.source: Final = watched.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.turned_away = 0
        self._clock = clock
        self._most = strangers_max()
        self._all: dict[int, _Stranger] = {}  # by descriptor, in the order in which they came

    def __len__(self) -> int:
        return len(self._all)

    def hear(self) -> None:
        """Learn who came and who went, and have the oldest make room."""
        with suppress(zmq.Again):
            while True:
                event, number = _EVENT.unpack(self.source.recv_multipart(zmq.NOBLOCK)[0])
                self._all.pop(number, None)
                if event == zmq.EVENT_ACCEPTED and (where := _where(number)) is not None:
                    self._all[number] = _Stranger(self._clock(), where)
        while len(self._all) > self._most:
            self._turn_away(next(iter(self._all)))

    def admit(self, frame: zmq.Frame) -> None:
        """Whoever sent this frame is no stranger."""
        if self._all:
            with suppress(zmq.ZMQError):
                self._all.pop(int(frame.get(zmq.SRCFD)), None)

    def patience_s(self) -> float | None:
        """How soon `tick` must be called; None: not by itself."""
        if not self._all:
            return None
        return max(0.0, next(iter(self._all.values())).came_at + STRANGER_S - self._clock())

    def tick(self) -> None:
        """Shut down those that have had their time."""
        while self._all and self.patience_s() == 0.0:
            self._turn_away(next(iter(self._all)))

    def _turn_away(self, number: int) -> None:
        stranger = self._all.pop(number)
        self.turned_away += 1
        if self.turned_away == 1:
            _log.warning(
                "a tcp port closed a connection that did not say who it is within %g s, or made room for later ones; clients of this "
                "version greet at once, so another program connects there (this is logged once)",
                STRANGER_S,
            )
        with suppress(OSError):
            connection = socket.socket(fileno=number)
            try:
                if connection.getpeername() == stranger.where:  # the number may be another one's by now
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # it stays ZeroMQ's


def _where(number: int) -> Any:
    """Where the other end of the connection with this descriptor is; None: it is gone already."""
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
