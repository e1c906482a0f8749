"""Carries the bulk protocol with keys: ZeroMQ over TCP, encrypted (CURVE).

DEALER at the client, ROUTER at the shard. Messages arrive whole in ZeroMQ's memory and are copied to their destination.
Encryption is the main cost (docs/decisions/remote-bytes.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import zmq

from transferqueue.errors import AddressInUse, Corruption, Unreachable, UsageError
from transferqueue.limits import (
    BULK_HEAD_BYTES_MAX,
    BULK_TRANSFERS_MAX,
    FRAME_BYTES,
    FRAMES_DRAINED_MAX,
    KIB,
)
from transferqueue.transport.bulk.listener import ReceiverFactory
from transferqueue.transport.bulk.protocol import (
    PIECES_MAX,
    WINDOW_FRAMES_MAX,
    Message,
    MessageReceiver,
    Piece,
    deliver,
)
from transferqueue.transport.control.zeromq import HANDSHAKE_MS, PING_MS, RECONNECT_MS, RECONNECT_MS_MAX
from transferqueue.transport.security.keys import ClientKeys, secure
from transferqueue.transport.security.zap import KeySet, ZapHandler
from transferqueue.transport.system.descriptors import zeromq_context
from transferqueue.transport.system.wakeup import Wakeup

_SHARED_BYTES: Final = 64 * KIB
"""Smaller pieces are copied into ZeroMQ: that costs less than sharing them."""
_FRAMES_QUEUED: Final = 2 * BULK_TRANSFERS_MAX * WINDOW_FRAMES_MAX
"""Messages that ZeroMQ queues for one peer. A peer that obeys its windows never reaches this."""

Received = tuple[memoryview, list[memoryview]]
"""Head and pieces of a message that arrived."""


class ZmqBulkClient:
    """The client's end of one connection. `epoch`: of its server's run. Used by one thread at a time."""

    def __init__(self, host: str, port: int, epoch: int, keys: ClientKeys | None = None) -> None:
        self._context, self._socket = _open(zmq.DEALER, FRAME_BYTES + 64 * KIB)
        secure(self._socket, keys)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        self._socket.setsockopt(zmq.IPV6, int(host.startswith("[")))
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._socket.connect(f"tcp://{host}:{port}")
        self.epoch: Final = epoch
        self.transfers = 0
        """The number of transfers that it has carried."""
        self.moved = 0
        """Messages received."""

    quiet: Final = True

    def open(self, timeout_s: float) -> bool:
        """Does nothing: ZeroMQ connects by itself, now or later."""
        return True

    def send(self, message: Message) -> None:
        """Queue a message; messages leave in order, as soon as there is a connection. Does not block.

        `Unreachable` if the connection is lost for good, for example after bytes that were no frames: open another.
        """
        try:
            _send(self._socket, message)
        except zmq.Again:
            raise Unreachable("the bulk connection was lost, or its peer does not read; open another one") from None

    ask = send

    def receive(self, receiver: MessageReceiver, timeout_s: float) -> bool:
        """Receive one message. False if none arrives within `timeout_s`, or after `interrupt`. `Corruption` if a
        checksum fails."""
        message = _receive(self._socket) or self._wait(timeout_s)
        if message is None:
            return False
        self.moved += 1
        deliver(bytes(message[0]), message[1], receiver)
        return True

    def _wait(self, timeout_s: float) -> Received | None:
        self._poller.poll(math.ceil(timeout_s * 1000))
        self._wakeup.clear()
        return _receive(self._socket)

    def interrupt(self) -> None:
        """Make a waiting `receive`, or the next one, return. From any thread, at any time."""
        self._wakeup.set()

    def close(self) -> None:
        """Close the connection; unsent messages are lost."""
        self._context.destroy(linger=0)
        self._wakeup.close()


class ZmqBulkServer:
    """The shard's end of all connections. Not thread-safe. `clogged` is always empty, since ZeroMQ queues unsent
    messages."""

    clogged: Final[frozenset[bytes]] = frozenset()

    def __init__(self, keyring: KeySet | None = None) -> None:
        self._context, self._socket = _open(zmq.ROUTER, BULK_HEAD_BYTES_MAX)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate = None if keyring is None else ZapHandler(self._context, keyring)
        if self._gate is not None:
            self._gate.guard(self._socket)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll for reading."""
        return [self._socket] if self._gate is None else [self._socket, self._gate.socket]

    def tick(self, desks: ReceiverFactory, now: float) -> None:
        """Accept or refuse new connections, if there are keys."""
        if self._gate is not None:
            self._gate.decide()

    def next_deadline(self) -> None:
        """None: ZeroMQ has timers of its own."""

    def listen_at_all(self, hosts: Sequence[str], port: int, tries: int) -> int:
        """Listen at one port of all hosts (0: a port that is free on all), and return it. `AddressInUse`, or
        `UsageError`."""
        self._socket.setsockopt(zmq.IPV6, int(any(host.startswith("[") for host in hosts)))
        for _ in range(1 if port else tries - 1):
            with suppress(AddressInUse):
                return self._bind_all(hosts, port)
        return self._bind_all(hosts, port)

    def _bind_all(self, hosts: Sequence[str], port: int) -> int:
        bound: list[str] = []
        try:
            for host in hosts:
                port = self._bind(host, port)
                bound.append(f"tcp://{host}:{port}")
        except AddressInUse:
            for endpoint in bound:
                self._socket.unbind(endpoint)
            raise
        return port

    def _bind(self, host: str, port: int) -> int:
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(f"bulk port {port} of {host} is in use; take another, or 0 for any") from error
            raise UsageError(f"bulk port {port} of {host} cannot be listened at: {error.strerror}") from error
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def arrivals(self, desks: ReceiverFactory, now: float) -> Iterator[bytes]:
        """Receive all messages that have arrived. Yields the peer of each whose checksums match."""
        for _ in range(FRAMES_DRAINED_MAX):
            message = _receive(self._socket)
            if message is None:
                return
            peer, parts = bytes(message[0]), message[1]
            try:
                deliver(bytes(parts[0]) if parts else b"", parts[1:], desks.desk(peer))
            except Corruption as error:
                desks.spoiled(peer, error)
            else:
                yield peer

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue a message. Does not block. False if the peer is gone, or does not read."""
        try:
            self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            _send(self._socket, message)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self, farewell_s: float = 0.0) -> None:
        """Stop listening. Queued messages get up to `farewell_s` seconds to leave."""
        self._context.destroy(linger=int(farewell_s * 1000))


def _open(kind: int, largest: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zeromq_context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _FRAMES_QUEUED)
    socket.setsockopt(zmq.RCVHWM, _FRAMES_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, largest)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return context, socket


def _send(socket: zmq.Socket[bytes], message: Message) -> None:
    head, pieces = message
    parts: Sequence[Piece] = (head, *pieces)
    for at, part in enumerate(parts):
        more = zmq.SNDMORE if at + 1 < len(parts) else 0
        socket.send(part, more | zmq.NOBLOCK, copy=memoryview(part).nbytes < _SHARED_BYTES)


def _receive(socket: zmq.Socket[bytes]) -> Received | None:
    """The next message; None if there is none. Pieces beyond `PIECES_MAX` are dropped: the checksum will fail."""
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    parts = [socket.recv(zmq.NOBLOCK, copy=False).buffer]
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK, copy=False).buffer
        if len(parts) < PIECES_MAX + 2:  # plus a head and, at the shard, the ROUTER id
            parts.append(part)
    return parts[0], parts[1:]
