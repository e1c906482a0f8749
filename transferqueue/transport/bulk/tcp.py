"""Carries the bulk protocol without keys: plain TCP, without a copy outside the kernel.

A stream carries one message after another. Content is sent from its place and received at its destination. Each end
computes its checksum while the bytes are in the cache; that read is the only cost beyond a raw TCP stream
(`bench/hosts.py`, `bench/remote.py` measure the ratio). Only `TcpBulkClient.open` and `TcpBulkClient.receive` block. Of
a message only its head and its unsent bytes are kept.
"""

from __future__ import annotations

import errno
import fcntl
import math
import select
import socket
import sys
import termios
import time
from collections import deque
from itertools import islice
from typing import Final

import xxhash

from transferqueue.errors import Unreachable
from transferqueue.limits import KIB, MIB
from transferqueue.transport.bulk import protocol
from transferqueue.transport.control.zeromq import RECONNECT_MS
from transferqueue.transport.system.wakeup import Wakeup

_PIECES_AT_ONCE: Final = 512
"""Half of the pieces that one system call accepts."""
_HEAD_STEP_BYTES: Final = 64 * KIB
"""A head is received in steps of this size: a false length takes no memory before bytes arrive."""
_RECEIVE_AT_ONCE: Final = 256 * KIB
"""Content is received in steps of this size, unless less is left. A receiver that each packet wakes spends more time on
wake-ups than on bytes, and so does its sender: 20 µs each on a virtual machine with an idle core."""
_RECEIVE_AT_ONCE_LATER: Final = MIB
"""The steps of a connection that has moved `_GROWN_BYTES`: its window holds that much by then. A receiver that waits
for more than the window holds waits for timers."""
_GROWN_BYTES: Final = 4 * MIB
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A lost machine is noticed within half a minute, also on an idle connection."""


class BulkStream:
    """One end of a connection: messages over a non-blocking socket.

    `moved` counts the bytes sent and received. Methods raise `Unreachable` when the connection is lost.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket: Final = connection
        self.moved = 0
        self._wakes_at = 1
        """The socket becomes readable at this many bytes."""
        self._leaving: deque[memoryview] = deque()
        self._expect_head()

    def _expect_head(self) -> None:
        """Prepare for the next message."""
        self._head = bytearray()
        self._head_bytes = protocol.PRELUDE_BYTES
        self._content_left = -1  # unknown before the head has arrived
        self._digest = xxhash.xxh3_64()

    @property
    def pending(self) -> bool:
        """Whether bytes are unsent."""
        return bool(self._leaving)

    @property
    def settled(self) -> bool:
        """Whether no message is partly sent or partly received."""
        return not self._leaving and not self._head

    def send(self, message: protocol.Message) -> None:
        """Queue a message, and send as much as the kernel takes now."""
        head, content = message
        self._leaving.append(memoryview(head))
        for piece in content:
            if (view := memoryview(piece)).nbytes:
                self._leaving.append(view)
        self.flush()

    def flush(self) -> None:
        """Send as much as the kernel takes now."""
        try:
            while self._leaving:
                self._left(self.socket.sendmsg(list(islice(self._leaving, _PIECES_AT_ONCE))))
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(error) from error

    def receive(self, receiver: protocol.MessageReceiver) -> bool:
        """Receive at most the rest of one message. Returns whether the message is complete and matches its checksums.

        Raises the errors of `receiver`, and `Corruption`: then the connection is unusable.
        """
        try:
            while len(self._head) < self._head_bytes:
                self._read_head(receiver)
            while self._content_left > 0:
                self._content_left -= receiver.fill(self._read)
        except BlockingIOError:
            self._wake_at(self._content_left)
            return False
        self._wake_at(1)  # before the check: bytes after damaged content also wake the receiver at once
        protocol.check_content(self._head, self._digest.digest())
        self._expect_head()
        return True

    def _wake_at(self, left: int) -> None:
        """Have the socket become readable at `left` bytes, but at one byte at least and one step at most. Bytes that
        have arrived can be received at any time."""
        step = _RECEIVE_AT_ONCE if self.moved < _GROWN_BYTES else _RECEIVE_AT_ONCE_LATER
        nbytes = max(1, min(left, step))
        if nbytes != self._wakes_at:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at = nbytes

    def settle_for_less(self) -> bool:
        """Have any byte make the socket readable, until the next `receive`. Returns whether more were needed before."""
        waited = self._wakes_at > 1
        self._wake_at(1)
        return waited

    def discard(self) -> None:
        """Drop all bytes that have arrived."""
        self._wake_at(1)
        try:
            while True:
                self._next(_HEAD_STEP_BYTES)
        except BlockingIOError:
            return

    def _left(self, sent: int) -> None:
        self.moved += sent
        while sent:
            first = self._leaving[0]
            if sent < first.nbytes:
                self._leaving[0] = first[sent:]
                return
            sent -= first.nbytes
            self._leaving.popleft()

    def _next(self, nbytes: int) -> bytes:
        """Receive at most `nbytes` bytes."""
        try:
            received = self.socket.recv(nbytes)
        except BlockingIOError:
            raise
        except OSError as error:
            raise _lost(error) from error
        if not received:
            raise _lost(None)
        self.moved += len(received)
        return received

    def _read_head(self, receiver: protocol.MessageReceiver) -> None:
        self._head += self._next(min(self._head_bytes - len(self._head), _HEAD_STEP_BYTES))
        if len(self._head) < self._head_bytes:
            return
        if self._head_bytes == protocol.PRELUDE_BYTES:
            self._head_bytes, _ = protocol.lengths(self._head)
        if len(self._head) == self._head_bytes:
            _, self._content_left = protocol.lengths(self._head)
            receiver.expect(bytes(self._head), self._content_left)

    def _read(self, into: memoryview) -> int:
        into = into[: self._content_left]
        try:
            size = self.socket.recv_into(into)
        except BlockingIOError:
            raise
        except OSError as error:
            raise _lost(error) from error
        if not size:
            raise _lost(None)
        self._digest.update(into[:size])
        self.moved += size
        return size


def _lost(error: OSError | None) -> Unreachable:
    """The error to raise for an error of the socket; None: the peer closed it."""
    why = error.strerror if error is not None else "its peer closed it"
    return Unreachable(f"the bulk connection was lost: {why}; open another one")


class TcpBulkClient:
    """The client's end of one connection. `epoch`: of its server's run. Used by one thread at a time."""

    def __init__(self, host: str, port: int, epoch: int) -> None:
        self._place = (host, port)
        self._connecting: socket.socket | None = None
        self._stream: BulkStream | None = None
        self._wakeup = Wakeup()
        self._asked = 0
        self.epoch: Final = epoch
        self.transfers = 0
        """The number of transfers that it has carried."""

    def open(self, timeout_s: float) -> bool:
        """Connect, and retry while no server listens. False after `timeout_s`, or after `interrupt`."""
        deadline = time.monotonic() + timeout_s
        while self._stream is None:
            left = deadline - time.monotonic()
            if left <= 0 or not self._connect(left):
                return False
        return True

    def _connect(self, timeout_s: float) -> bool:
        """Advance the attempt to connect. Returns False after `timeout_s`, or after `interrupt`."""
        if self._connecting is None:
            self._connecting = _connecting(*self._place)
        if self._connecting is not None:
            if not self._wait(self._connecting, select.POLLOUT, timeout_s):
                return False
            if not self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._stream, self._connecting = BulkStream(self._connecting), None
                return True
            self._connecting.close()
            self._connecting = None
        return self._pause(min(timeout_s, RECONNECT_MS / 1000))

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
        return not waiting.poll(0)

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
        for connection in (self._connecting, None if self._stream is None else self._stream.socket):
            if connection is not None:
                connection.close()
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
