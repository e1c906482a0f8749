"""Carries the bulk protocol over TCP, without a copy outside the kernel, or, with keys, over TLS (`tls`).

A stream carries one message after another. Content is sent from its place and received at its destination. Each end
computes its checksum while the bytes are in the cache; that read is the only cost beyond a raw TCP stream
(`bench/hosts.py`, `bench/remote.py` measure the ratio). Nothing here blocks. Of a message only its head and its unsent
bytes are kept.
"""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import Final

import xxhash

from transferqueue.errors import Unreachable
from transferqueue.limits import KIB, MIB
from transferqueue.transport.bulk import protocol

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
    def buffered(self) -> bool:
        """Whether bytes that arrived are outside the kernel's buffer, so that no poll reports them."""
        return False

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
                self._left(self._write())
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

    def _write(self) -> int:
        """Send some unsent bytes; returns their number. `BlockingIOError`: the kernel takes none now."""
        return self.socket.sendmsg(list(islice(self._leaving, _PIECES_AT_ONCE)))

    def _read_bytes(self, nbytes: int) -> bytes:
        """Receive at most `nbytes` bytes; b"": the peer closed the connection. `BlockingIOError`: none are here."""
        return self.socket.recv(nbytes)

    def _read_into(self, into: memoryview) -> int:
        """`_read_bytes`, into memory; returns the number of bytes."""
        return self.socket.recv_into(into)

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
            received = self._read_bytes(nbytes)
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
            size = self._read_into(into)
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
