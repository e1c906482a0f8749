"""Frames over ZeroMQ, ipc and tcp: DEALER at the client, ROUTER at the server.

Every socket has marks that bound what it keeps, closes at once (LINGER 0) and drops a frame over
`MESSAGE_BYTES_MAX` together with the connection that sent it. Each channel owns its context, so that
closing it gives back its descriptors and its thread and nobody else's.
"""

from __future__ import annotations

import enum
import math
from typing import Final

import zmq

from transferqueue.errors import AddressInUse, Disconnected, Unreachable, UsageError
from transferqueue.limits import FRAMES_QUEUED_MAX, MESSAGE_BYTES_MAX
from transferqueue.transport.address import IpcAddress, TcpAddress
from transferqueue.transport.wakeup import Wakeup

RECONNECT_MS: Final = 10
"""First pause before a lost connection is tried again; doubles up to `RECONNECT_MS_MAX`."""
RECONNECT_MS_MAX: Final = 500
PING_MS: Final = 5_000
"""A tcp connection that is silent this long is asked; without an answer it is opened anew."""


class ZmqChannel:
    """The client's end. See `transferqueue.transport.ClientChannel`."""

    def __init__(self, place: IpcAddress | TcpAddress) -> None:
        self.address = str(place)
        self._context, self._socket = _open(zmq.DEALER, place)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._watched: Wakeup | None = None
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"address {self.address!r} cannot be connected to: {error.strerror}") from error

    def send(self, frame: bytes) -> None:
        """Queue a frame; ZeroMQ's own thread sends it."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise Unreachable(
                f"{self.address} has taken none of the last {FRAMES_QUEUED_MAX} messages; nothing reads there"
            ) from None
        except zmq.ZMQError as error:
            raise Disconnected(f"the channel to {self.address} is closed") from error

    def recv_nowait(self) -> bytes | None:
        """The next frame, or None."""
        try:
            parts = _receive(self._socket, parts_max=1)
        except zmq.ZMQError as error:
            raise Disconnected(f"the channel to {self.address} is closed") from error
        return parts[0] if parts else None

    def wait(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """Sleep until a frame, the wake-up or the time."""
        if self._watched is not wakeup:
            if self._watched is not None:
                self._poller.unregister(self._watched)
            self._poller.register(wakeup, zmq.POLLIN)
            self._watched = wakeup
        self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        wakeup.clear()

    def close(self) -> None:
        """Close the connection; frames not yet sent are lost."""
        self._context.destroy(linger=0)


class Sent(enum.Enum):
    """What became of a frame: with ZeroMQ for the peer; the peer is gone; or it does not read."""

    ON_ITS_WAY = enum.auto()
    GONE = enum.auto()
    UNREAD = enum.auto()


class Port:
    """The server's end of all connections, of every address it listens at. Used by one thread."""

    def __init__(self) -> None:
        self._context, self.socket = _open(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a frame to a full or lost peer vanishes unseen

    def listen(self, place: IpcAddress | TcpAddress) -> str:
        """Listen at `place` too; returns the address with the port in it. `AddressInUse`, or `UsageError`.

        A socket file that exists is replaced: whoever calls holds the lock of the address.
        """
        _adapt(self.socket, place)
        try:
            self.socket.bind(str(place))
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(f"address {place} is in use by another server; stop it or take another") from error
            raise UsageError(f"address {place} cannot be listened at: {error.strerror}") from error
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def recv_nowait(self) -> tuple[bytes, bytes] | None:
        """The next frame and who sent it, or None. A message of several parts, which no client of ours
        sends, comes as the empty frame, which is no message."""
        parts = _receive(self.socket, parts_max=2)
        if parts is None:
            return None
        return (parts[0], parts[1]) if len(parts) == 2 else (parts[0], b"")

    def send(self, peer: bytes, frame: bytes) -> Sent:
        """Queue a frame for `peer` without waiting."""
        try:
            self.socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return Sent.UNREAD
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.GONE
            raise
        return Sent.ON_ITS_WAY

    def close(self, farewell_s: float = 0.0) -> None:
        """Stop listening; frames already queued get up to `farewell_s` to leave. Removes socket files."""
        self._context.destroy(linger=int(farewell_s * 1000))


def _open(
    kind: int, place: IpcAddress | TcpAddress | None = None
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, FRAMES_QUEUED_MAX)
    socket.setsockopt(zmq.RCVHWM, FRAMES_QUEUED_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    if place is not None:
        _adapt(socket, place)
    return context, socket


def _adapt(socket: zmq.Socket[bytes], place: IpcAddress | TcpAddress) -> None:
    if isinstance(place, TcpAddress):
        socket.setsockopt(zmq.IPV6, int(place.host.startswith("[")))
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)


def _receive(socket: zmq.Socket[bytes], parts_max: int) -> list[bytes] | None:
    """The parts of one message, None if there is none. Of a longer one only the first part, so that a
    peer cannot make many parts pile up."""
    try:
        parts = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        if len(parts) <= parts_max:
            parts.append(part)
    return parts if len(parts) <= parts_max else parts[:1]
