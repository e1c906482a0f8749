"""Limits the connections to a ZeroMQ socket that have not identified themselves, in number and in time.

ZeroMQ accepts every connection in its own thread and keeps it. It has a deadline for its greeting, but none for later
steps, and when no descriptor is left it retries without end. So a peer that only opens connections could use up the
descriptors that clients need. ZeroMQ's monitor tells the server's loop the descriptor number of each connection. A peer
is *unauthenticated* until the loop admits the sender of one of its messages. The loop shuts down unauthenticated
connections beyond `unauthenticated_peers_max`, and those older than `UNAUTHENTICATED_S`, by descriptor number; ZeroMQ
then sees their end.
"""

from __future__ import annotations

import logging
import resource
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

import zmq

from transferqueue.limits import UNAUTHENTICATED_PEERS_MAX, UNAUTHENTICATED_S

_log: Final = logging.getLogger("transferqueue.server")
_EVENT: Final = struct.Struct("=HI")
_SHARE: Final = 8
_LEAST: Final = 8


def unauthenticated_peers_max() -> int:
    """The number of unauthenticated peers that each listening socket allows: `UNAUTHENTICATED_PEERS_MAX`, but at most
    an eighth of this process's descriptor limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return UNAUTHENTICATED_PEERS_MAX
    return max(_LEAST, min(UNAUTHENTICATED_PEERS_MAX, allowed // _SHARE))


class _UnauthenticatedPeer(NamedTuple):
    came_at: float
    where: Any


class UnauthenticatedPeers:
    """The unauthenticated peers of one ROUTER socket. Used by the thread of the socket. `source` becomes readable when
    a connection is made or ends."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self.source: Final = watched.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.turned_away = 0
        self._most = unauthenticated_peers_max()
        self._all: dict[int, _UnauthenticatedPeer] = {}  # by descriptor, oldest first

    def __len__(self) -> int:
        return len(self._all)

    def hear(self) -> None:
        """Process the monitor's events. Disconnect the oldest peers if there are too many."""
        with suppress(zmq.Again):
            while True:
                event, number = _EVENT.unpack(self.source.recv_multipart(zmq.NOBLOCK)[0])
                self._all.pop(number, None)
                if event == zmq.EVENT_ACCEPTED and (where := _where(number)) is not None:
                    self._all[number] = _UnauthenticatedPeer(time.monotonic(), where)
        while len(self._all) > self._most:
            self._turn_away(next(iter(self._all)))

    def admit(self, frame: zmq.Frame) -> None:
        """Admit the peer that sent this frame."""
        if self._all:
            with suppress(zmq.ZMQError):
                self._all.pop(int(frame.get(zmq.SRCFD)), None)

    def patience_s(self) -> float | None:
        """Seconds until `tick` must be called; None: no peer is unauthenticated."""
        if not self._all:
            return None
        return max(0.0, next(iter(self._all.values())).came_at + UNAUTHENTICATED_S - time.monotonic())

    def tick(self) -> None:
        """Disconnect peers older than `UNAUTHENTICATED_S`."""
        while self._all and self.patience_s() == 0.0:
            self._turn_away(next(iter(self._all)))

    def _turn_away(self, number: int) -> None:
        peer = self._all.pop(number)
        self.turned_away += 1
        if self.turned_away == 1:
            _log.warning(
                "the server closed a tcp connection that did not identify itself within %g s, or made room for later "
                "ones; clients of this version greet at once, so another program connects there (this is logged once)",
                UNAUTHENTICATED_S,
            )
        with suppress(OSError):
            connection = socket.socket(fileno=number)
            try:
                if connection.getpeername() == peer.where:  # the descriptor number may have been reused
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # ZeroMQ owns the descriptor


def _where(number: int) -> Any:
    """The address of the peer of the connection with this descriptor; None if it is closed."""
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
