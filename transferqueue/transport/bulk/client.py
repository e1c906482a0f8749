"""The client's end of the bulk protocol: it connects, and waits for bytes. Only `BulkClient.open` and
`BulkClient.receive` block."""

from __future__ import annotations

import errno
import fcntl
import math
import select
import socket
import sys
import termios
import time
from typing import TYPE_CHECKING, Final

from transferqueue.errors import Unreachable
from transferqueue.transport.bulk import protocol
from transferqueue.transport.bulk.stream import BulkStream
from transferqueue.transport.control.zeromq import RECONNECT_MS
from transferqueue.transport.system.wakeup import Wakeup

if TYPE_CHECKING:
    from transferqueue.transport.bulk.tls import TlsStream


class BulkClient:
    """The client's end of one connection. Used by one thread at a time.

    Args:
        host: Of the bulk port.
        port: Its number.
        epoch: Of its server's run.
        fingerprint: Of the certificate of the process that listens there; default "": the connection is not encrypted.
    """

    def __init__(self, host: str, port: int, epoch: int, fingerprint: str = "") -> None:
        self._place, self._fingerprint = (host, port), fingerprint
        self._connecting: socket.socket | None = None
        self._greeting: TlsStream | None = None
        """A connection whose handshake goes on."""
        self._stream: BulkStream | None = None
        self._wakeup = Wakeup()
        self._asked = 0
        self.epoch: Final = epoch
        self.transfers = 0
        """The number of transfers that it has carried."""

    def open(self, timeout_s: float) -> bool:
        """Connect, and retry while no server listens. False after `timeout_s`, or after `interrupt`. `Unreachable` if
        the peer has another certificate."""
        deadline = time.monotonic() + timeout_s
        while self._stream is None:
            left = deadline - time.monotonic()
            if left <= 0 or not self._connect(left):
                return False
        return True

    def _connect(self, timeout_s: float) -> bool:
        """Advance the attempt to connect. Returns False after `timeout_s`, or after `interrupt`."""
        if self._greeting is not None:
            return self._greet(self._greeting, timeout_s)
        if self._connecting is None:
            self._connecting = _connecting(*self._place)
        if self._connecting is not None:
            if not self._wait(self._connecting, select.POLLOUT, timeout_s):
                return False
            connection, self._connecting = self._connecting, None
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return self._connected(connection)
            connection.close()
        return self._pause(min(timeout_s, RECONNECT_MS / 1000))

    def _connected(self, connection: socket.socket) -> bool:
        if not self._fingerprint:
            self._stream = BulkStream(connection)
            return True
        from transferqueue.transport.bulk.tls import TlsStream  # loads OpenSSL

        try:
            self._greeting = TlsStream.dialled(connection)
        except OSError:  # the peer is gone already
            connection.close()
        return True

    def _greet(self, greeting: TlsStream, timeout_s: float) -> bool:
        """Advance the handshake. As `_connect`."""
        try:
            wanted = greeting.handshake(self._fingerprint)
        except Unreachable:
            self._greeting = None
            greeting.socket.close()
            raise
        if wanted:
            return bool(self._wait(greeting.socket, wanted, timeout_s))
        self._stream, self._greeting = greeting, None
        return True

    @property
    def _live(self) -> BulkStream:
        if self._stream is None:
            raise Unreachable("the bulk connection is not open yet; open it before sending")
        return self._stream

    @property
    def moved(self) -> int:
        """Bytes received, plus bytes that have reached the peer's machine, except those of `ask`."""
        if self._stream is None:
            return 0
        on_the_way = bytearray(4)
        fcntl.ioctl(self._stream.socket, termios.TIOCOUTQ, on_the_way)
        return self._stream.moved - int.from_bytes(on_the_way, sys.byteorder) - self._asked

    @property
    def quiet(self) -> bool:
        """Whether nothing unexpected has arrived, including the end of the connection."""
        waiting = select.poll()
        waiting.register(self._live.socket, select.POLLIN)
        return not self._live.buffered and not waiting.poll(0)

    def send(self, message: protocol.Message) -> None:
        """Queue a message; messages leave in order, now or during `receive`. `Unreachable` if the connection is lost:
        open another one."""
        self._live.send(message)

    def ask(self, message: protocol.Message) -> None:
        """Send a message that makes the peer report its progress. Does nothing while earlier messages are unsent."""
        if not self._live.pending:
            self._asked += len(message[0])
            self._live.send(message)

    def receive(self, receiver: protocol.MessageReceiver, timeout_s: float) -> bool:
        """Receive one message. Returns False if none is complete within `timeout_s`, or after `interrupt`. Errors as in
        `BulkStream`."""
        deadline = time.monotonic() + timeout_s
        stream = self._live
        while not stream.receive(receiver):
            wanted = select.POLLIN | (select.POLLOUT if stream.pending else 0)
            is_ready = self._wait(stream.socket, wanted, deadline - time.monotonic())
            if is_ready is None:
                return False
            if not is_ready:
                return stream.receive(receiver)  # fewer bytes may have arrived than make the socket readable
            stream.flush()
        return True

    def interrupt(self) -> None:
        """Make a waiting `open` or `receive`, or the next one, return. From any thread, at any time."""
        self._wakeup.set()

    def _pause(self, seconds: float) -> bool:
        """Wait. False after `interrupt`."""
        waiting = select.poll()
        waiting.register(self._wakeup, select.POLLIN)
        waiting.poll(math.ceil(seconds * 1000))
        return not self._wakeup.clear()

    def _wait(self, connection: socket.socket, wanted: int, timeout_s: float) -> bool | None:
        """Wait until the socket is ready. False after `timeout_s`, and None after `interrupt`, which is then
        cleared."""
        waiting = select.poll()
        waiting.register(connection, wanted)
        waiting.register(self._wakeup, select.POLLIN)
        ready = waiting.poll(max(0, math.ceil(timeout_s * 1000)))
        if ready and self._wakeup.clear():
            return None
        return bool(ready)

    def close(self) -> None:
        """Close the connection; unsent bytes are lost."""
        for stream in (self._greeting, self._stream):
            if stream is not None:
                stream.socket.close()
        if self._connecting is not None:
            self._connecting.close()
        self._wakeup.close()


def _connecting(host: str, port: int) -> socket.socket | None:
    """A socket that is connecting; None if it failed already."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        failed = connection.connect_ex((host.strip("[]"), port))
    except OSError:  # a host name that does not resolve now may resolve later
        failed = errno.EHOSTUNREACH
    if failed in (0, errno.EINPROGRESS):
        return connection
    connection.close()
    return None
