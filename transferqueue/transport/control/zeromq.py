"""Frames over ZeroMQ, to other machines: DEALER at the client, ROUTER at the server.

Each socket has high-water marks that bound its queues, and closes at once (LINGER 0). It drops a frame that is too
large, with its connection: over `PUBLISH_BYTES_MAX` at the server, over `MESSAGE_BYTES_MAX` at a client. Each channel
has its own ZeroMQ context, so closing the channel frees its descriptors and its thread, and affects no other.

A client's socket signals a frame only once, by its descriptor (`ZMQ_FD`), and any use of the socket may clear that
signal. So each use ends with receiving until no frame is left (docs/decisions/calls.md).

A server with keys (`keyring`) receives only from clients with known keys, and names each by its public key
(`KeyedPeer`). A server without keys listens only at loopback.
"""

from __future__ import annotations

import ipaddress
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import zmq

from transferqueue.errors import AddressInUse, Unreachable, UsageError
from transferqueue.limits import FRAMES_QUEUED_MAX, MESSAGE_BYTES_MAX, PUBLISH_BYTES_MAX
from transferqueue.transport.address import TcpAddress
from transferqueue.transport.control.polled import PolledChannel
from transferqueue.transport.control.send_result import SendResult
from transferqueue.transport.control.unauthenticated_peers import UnauthenticatedPeers
from transferqueue.transport.security.keyring import Keyring
from transferqueue.transport.security.keys import ClientKeys, secure
from transferqueue.transport.security.zap import KEY_PROPERTY, ZapHandler
from transferqueue.transport.system.descriptors import zeromq_context

RECONNECT_MS: Final = 10
"""First pause before a lost connection is tried again; doubles up to `RECONNECT_MS_MAX`."""
RECONNECT_MS_MAX: Final = 500
REDIAL_S: Final = 0.05
"""After a loss ZeroMQ reports at once that it retries. If it reports nothing for this long it has given up, as after
bytes that are no frames, or a wrong key. Then the channel connects again."""
HANDSHAKE_MS: Final = 10_000
"""A ZeroMQ handshake that takes longer, for example because bytes were damaged, is started again."""
PING_MS: Final = 5_000
"""ZeroMQ pings a tcp connection that is silent this long, and reconnects if no answer comes."""


class ZmqChannel(PolledChannel):
    """The client's end. See `transferqueue.transport.ClientChannel`."""

    def __init__(self, place: TcpAddress, keys: ClientKeys | None = None) -> None:
        super().__init__()
        self.address = str(place)
        self.doubt = _doubt(place, keys)
        self.connections_made, self.is_lost = 0, False
        self._redial_at: float | None = None
        """When to connect again, unless ZeroMQ reports before that it does; None: there is no need."""
        self._was_full = self._takes_more = False
        """Whether the queue had no room for a frame, and whether it has had room since. Only `_hear` sees that."""
        self._context, self._socket = _open(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, int(place.host.startswith("[")))
        secure(self._socket, keys)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self._descriptor = self._socket.fileno()
        self._attach(self._descriptor)
        self._sleeper.register(self._events.fileno(), select.EPOLLIN)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"address {self.address!r} cannot be connected to: {error.strerror}") from error
        self._hear()
        self._hear_events()

    def send(self, frame: bytes) -> None:
        """Queue a frame; ZeroMQ's own thread sends it."""
        self.send_some((frame,))

    def send_some(self, frames: Sequence[bytes]) -> int:
        """Queue frames until the queue is full."""
        self._check_open()
        count = 0
        self._was_full = True
        with suppress(zmq.Again):
            for frame in frames:
                self._socket.send(frame, zmq.NOBLOCK)
                count += 1
            self._was_full = False
        self._hear()
        if not count:
            raise Unreachable(
                f"{self.address} has taken none of the last {FRAMES_QUEUED_MAX} messages; no process reads there"
            )
        return count

    def _hear(self) -> None:
        """Receive all arrived frames. Every other use of the socket ends with this call, since it may have cleared the
        descriptor's signal of a frame, or of room in the queue."""
        events = 0
        while not self._closed and (events := int(self._socket.getsockopt(zmq.EVENTS))) & zmq.POLLIN:
            self._arrived.append(self._socket.recv(zmq.NOBLOCK))
            while self._socket.getsockopt(zmq.RCVMORE):  # keep only the first part of a message
                self._socket.recv(zmq.NOBLOCK)
        self._readable = False
        self._takes_more = self._was_full and bool(events & zmq.POLLOUT)

    @property
    def _connection(self) -> int | None:
        return self._descriptor

    @property
    def is_behind(self) -> bool:
        """See `DrivableChannel`."""
        return self.is_lost or not self.connections_made

    def _due_s(self) -> float | None:
        if self._takes_more:
            return 0.0
        due_at = self._redial_at
        return None if due_at is None else max(0.0, due_at - time.monotonic())

    def _tend(self) -> None:
        """Process the events of the connection, and connect again if ZeroMQ has given up."""
        if self._readable:  # perhaps without a frame: only this call clears the signal
            self._hear()
        self._was_full = self._takes_more = False  # a caller with more to send tries again now
        self._hear_events()
        if self._redial_at is not None and time.monotonic() >= self._redial_at:
            self._dial_again()

    def _hear_events(self) -> None:
        while _has_come(self._events):
            event, _ = self._events.recv_multipart(zmq.NOBLOCK)
            number = int.from_bytes(event[:2], sys.byteorder)
            self._redial_at = time.monotonic() + REDIAL_S if number == zmq.EVENT_DISCONNECTED else None
            if number != zmq.EVENT_CONNECT_RETRIED:
                self.is_lost = number == zmq.EVENT_DISCONNECTED
                self.connections_made += not self.is_lost

    def reset(self) -> None:
        """Disconnect, and connect again at once: a caller was interrupted in the middle of a frame."""
        self._hear_events()
        self.is_lost = True
        self._dial_again()

    def _dial_again(self) -> None:
        self._redial_at = None
        with suppress(zmq.ZMQError):  # ZeroMQ may have dropped the connection before
            self._socket.disconnect(self.address)
        self._socket.connect(self.address)
        self._hear()

    def close(self) -> None:
        """Close the connection; unsent frames are lost."""
        self._context.destroy(linger=0)
        super().close()


class KeyedPeer(NamedTuple):
    """A peer with a key: the ROUTER id for replies to it, and its public key."""

    route: bytes
    key: str


class ZmqServer:
    """The server's end of all connections at all its addresses. Not thread-safe.

    Args:
        keyring: the clients that it accepts; None: it accepts all, and listens only at loopback addresses.
    """

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._context, self.socket = _open(zmq.ROUTER, PUBLISH_BYTES_MAX)
        self.socket.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # otherwise ZeroMQ drops a frame to a full or lost peer silently
        self._gate = ZapHandler(self._context, keyring) if keyring is not None else None
        self._unauthenticated = UnauthenticatedPeers(self.socket)
        self._last: tuple[bytes | KeyedPeer, zmq.Frame] | None = None
        self.sources: Final = [self.socket, self._unauthenticated.source, *([self._gate.socket] if self._gate else [])]
        """Sockets to poll for reading. If one is readable, call `recv_nowait`; for any but the first also `decide`."""

    def decide(self, *, has_news: bool = True) -> bool:
        """Accept or refuse new connections, and close those of old unauthenticated peers. Returns whether the keys
        changed, so that sessions may have to end.

        Args:
            has_news: whether any but the first of `sources` is readable, or `patience_s` is over. A call in vain costs
                a twentieth of a request.
        """
        if has_news:
            self._unauthenticated.hear()
            self._unauthenticated.tick()
        return self._gate is not None and self._gate.decide()

    def patience_s(self) -> float | None:
        """Seconds until `decide` must be called; None: no deadline."""
        return self._unauthenticated.patience_s()

    def admit(self, peer: bytes | KeyedPeer) -> None:
        """`peer` has a session: if it sent the frame received last, its connection counts as authenticated."""
        if self._last is not None and self._last[0] == peer:
            # Process the event of a connection that was made since `decide`: it counts as authenticated from now on.
            self._unauthenticated.hear()
            self._unauthenticated.admit(self._last[1])

    def listen(self, place: TcpAddress) -> str:
        """Listen at this address too, and return it with the actual port. `AddressInUse`, or `UsageError` if that is
        impossible."""
        check_open(place, keyed=self._gate is not None)
        self.socket.setsockopt(zmq.IPV6, int(place.host.startswith("[")))
        if self._gate is not None:
            self._gate.guard(self.socket)
        try:
            self.socket.bind(str(place))
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(f"address {place} is in use by another server; stop it or take another") from error
            raise UsageError(f"address {place} cannot be listened at: {error.strerror}") from error
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def recv_nowait(self) -> tuple[bytes | KeyedPeer, bytes] | None:
        """The peer and the next frame, or None. A message of several parts, which no client of this library sends,
        becomes an empty frame, which is no valid message."""
        try:
            first = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        body, parts = first, 1
        part = first
        while part.more:
            part, parts = self.socket.recv(zmq.NOBLOCK, copy=False), parts + 1
            body = part if parts == 2 else body
        peer = first.bytes if self._gate is None else _named(first.bytes, body)
        self._last = peer, body
        return peer, body.bytes if parts == 2 else b""

    def send(self, peer: bytes | KeyedPeer, frame: bytes) -> SendResult:
        """Queue a frame for `peer`. Does not block."""
        try:
            self.socket.send(peer.route if isinstance(peer, KeyedPeer) else peer, zmq.SNDMORE | zmq.NOBLOCK)
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return SendResult.UNREAD
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendResult.GONE
            raise
        return SendResult.ON_ITS_WAY

    def close(self, farewell_s: float = 0.0) -> None:
        """Stop listening. Queued frames get up to `farewell_s` seconds to leave."""
        self._context.destroy(linger=int(farewell_s * 1000))


def check_open(place: TcpAddress, *, keyed: bool) -> None:
    """Raise `UsageError` if other machines can reach this address and the server has no keys."""
    if keyed or is_loopback(place.host):
        return
    raise UsageError(
        f"address {place} can be reached from other machines, and this server has no keys: any program that reaches "
        "it could read and change everything. Make keys (transferqueue keys new NAME --role ROLE) and serve with "
        "--keys, or listen at 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this host name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _doubt(place: TcpAddress, keys: ClientKeys | None) -> str:
    start = f"is a server running there? Start one: transferqueue serve --address {place}"
    if keys is None:
        return (
            f"{start}. A server with keys does not answer clients without: connect with a join token (transferqueue "
            "keys token)"
        )
    return f"{start} --keys. A running server does not answer a key that it does not know, or that was revoked"


def _named(route: bytes, frame: zmq.Frame) -> bytes | KeyedPeer:
    try:
        return KeyedPeer(route, str(frame.get(KEY_PROPERTY)))
    except zmq.ZMQError:
        return route


def _open(kind: int, bytes_max: int = MESSAGE_BYTES_MAX) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zeromq_context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, FRAMES_QUEUED_MAX)
    socket.setsockopt(zmq.RCVHWM, FRAMES_QUEUED_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return context, socket


def _has_come(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received. If not, the next one makes the socket's descriptor readable."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
