"""The connections of the bulk protocol where nobody asks for keys: plain TCP, each byte copied by the kernel alone.

A stream is what messages are put after each other on. Content leaves from where it lies and is received where it belongs;
its checksum is taken while it is in the cache, at either end. So beyond what one raw stream does to a byte there are two
reads of it (`bench/hosts.py`, `bench/remote.py` have the ratio). Nothing here blocks but `TcpBulkClient.open` and
`TcpBulkClient.receive`, and nothing is kept of a message but its head and what has not left yet.
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
from transferqueue.limits import KIB
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.control.zeromq import RECONNECT_MS
from transferqueue.transport.system.wakeup import Wakeup

_PIECES_AT_ONCE: Final = 512
"""Half of what one system call takes."""
_HEAD_STEP_BYTES: Final = 64 * KIB
"""A head is received in such steps: what it says of its length takes no memory before it has come."""
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A peer whose machine is gone is noticed half a minute later, also if nobody has anything to say."""


class BulkStream:
    """One end of a connection: messages into and out of a socket that does not block.

    moved: bytes that have passed it so far, in and out. Errors: `Unreachable` when the connection is over.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket: Final = connection
        self.moved = 0
        self._leaving: deque[memoryview] = deque()
        self._rest()

    def _rest(self) -> None:
        """Between two messages."""
        self._head = bytearray()
        self._head_bytes = b.PRELUDE_BYTES
        self._content_left = -1  # not known yet
        self._digest = xxhash.xxh3_64()

    @property
    def pending(self) -> bool:
        """Whether something has not left yet."""
        return bool(self._leaving)

    @property
    def settled(self) -> bool:
        """Whether nothing is half sent or half received."""
        return not self._leaving and not self._head

    def send(self, message: b.Message) -> None:
        """Put a message after those before it, and let go of as much as the kernel takes now."""
        head, content = message
        self._leaving.append(memoryview(head))
        self._leaving.extend(view for piece in content if (view := memoryview(piece)).nbytes)
        self.flush()

    def flush(self) -> None:
        """Let go of as much as the kernel takes now."""
        try:
            while self._leaving:
                self._left(self.socket.sendmsg(list(islice(self._leaving, _PIECES_AT_ONCE))))
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(error) from error

    def receive(self, taker: b.MessageReceiver) -> bool:
        """Take what has come, to the end of one message at most; whether that is reached: it has come whole, and matches.

        Beyond the errors of `taker`: `Corruption`, after which nothing that comes can be believed.
        """
        try:
            while len(self._head) < self._head_bytes:
                self._read_head(taker)
            while self._content_left > 0:
                self._content_left -= taker.fill(self._read)
        except BlockingIOError:
            return False
        b.check_content(self._head, self._digest.digest())
        self._rest()
        return True

    def discard(self) -> None:
        """Drop what has come, to whichever message it belongs."""
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
        """Up to so many bytes."""
        try:
            found = self.socket.recv(nbytes)
        except BlockingIOError:
            raise
        except OSError as error:
            raise _lost(error) from error
        if not found:
            raise _lost(None)
        self.moved += len(found)
        return found

    def _read_head(self, taker: b.MessageReceiver) -> None:
        self._head += self._next(min(self._head_bytes - len(self._head), _HEAD_STEP_BYTES))
        if len(self._head) < self._head_bytes:
            return
        if self._head_bytes == b.PRELUDE_BYTES:
            self._head_bytes, _ = b.lengths(self._head)
        if len(self._head) == self._head_bytes:
            _, self._content_left = b.lengths(self._head)
            taker.expect(bytes(self._head), self._content_left)

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
    """What to raise for an error of the socket; None: its end."""
    why = error.strerror if error is not None else "its peer closed it"
    return Unreachable(f"the bulk connection was lost: {why}; bytes need another one")


class TcpBulkClient:
    """The client's end of one connection, to the shard of one life of a server. Used by one thread at a time."""

    def __init__(self, host: str, port: int, epoch: int) -> None:
        self._place = (host, port)
        self._connecting: socket.socket | None = None
        self._stream: BulkStream | None = None
        self._wakeup = Wakeup()
        self._asked = 0
        self.epoch: Final = epoch
        self.transfers = 0
        """How many it has carried."""

    def open(self, timeout_s: float) -> bool:
        """Wait for the connection, tried again while nobody listens; False after `timeout_s`, or after `interrupt`."""
        deadline = time.monotonic() + timeout_s
        while self._stream is None:
            left = deadline - time.monotonic()
            if left <= 0 or not self._connect(left):
                return False
        return True

    def _connect(self, timeout_s: float) -> bool:
        """Come nearer to a connection; False if there was no time, or it was interrupted."""
        if self._connecting is None:
            self._connecting = _dialled(*self._place)
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
            raise Unreachable("the bulk connection is not open yet; open it before messages are sent")
        return self._stream

    @property
    def moved(self) -> int:
        """Bytes that have come, and that have arrived at the peer's machine, but for what was asked."""
        if self._stream is None:
            return 0
        on_the_way = bytearray(4)
        fcntl.ioctl(self._stream.socket, termios.TIOCOUTQ, on_the_way)
        return self._stream.moved - int.from_bytes(on_the_way, sys.byteorder) - self._asked

    @property
    def quiet(self) -> bool:
        """Whether nothing has come that nobody asked for, such as its end."""
        waiting = select.poll()
        waiting.register(self._live.socket, select.POLLIN)
        return not waiting.poll(0)

    def send(self, message: b.Message) -> None:
        """Hand a message over; it leaves in order, now or during `receive`. `Unreachable`: another line is needed."""
        self._live.send(message)

    def ask(self, message: b.Message) -> None:
        """Send what has the peer say where it is; nothing, if it has not heard yet what was said before."""
        if not self._live.pending:
            self._asked += len(message[0])
            self._live.send(message)

    def receive(self, taker: b.MessageReceiver, timeout_s: float) -> bool:
        """Take one message; False if none came whole within `timeout_s`, or after `interrupt`. Errors as of `BulkStream`."""
        deadline = time.monotonic() + timeout_s
        stream = self._live
        while not stream.receive(taker):
            wanted = select.POLLIN | (select.POLLOUT if stream.pending else 0)
            if not self._wait(stream.socket, wanted, deadline - time.monotonic()):
                return False
            stream.flush()
        return True

    def interrupt(self) -> None:
        """End an `open` or a `receive` that waits, or the next one. From any thread, at any time."""
        self._wakeup.set()

    def _pause(self, seconds: float) -> bool:
        """Wait; False when interrupted before."""
        waiting = select.poll()
        waiting.register(self._wakeup, select.POLLIN)
        waiting.poll(math.ceil(seconds * 1000))
        return not self._wakeup.clear()

    def _wait(self, connection: socket.socket, wanted: int, timeout_s: float) -> bool:
        """Whether the connection is ready. False after `timeout_s`, or when interrupted, which counts as seen."""
        waiting = select.poll()
        waiting.register(connection, wanted)
        waiting.register(self._wakeup, select.POLLIN)
        found = waiting.poll(max(0, math.ceil(timeout_s * 1000)))
        return bool(found) and not self._wakeup.clear()

    def close(self) -> None:
        """Close the connection; what has not left is lost."""
        for connection in (self._connecting, None if self._stream is None else self._stream.socket):
            if connection is not None:
                connection.close()
        self._wakeup.close()


def _dialled(host: str, port: int) -> socket.socket | None:
    """A socket that is about to connect; None if it is known already that it cannot now."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        failed = connection.connect_ex((host.strip("[]"), port))
    except OSError:  # of names: who serves may be known later
        failed = errno.EHOSTUNREACH
    if failed in (0, errno.EINPROGRESS):
        return connection
    connection.close()
    return None
