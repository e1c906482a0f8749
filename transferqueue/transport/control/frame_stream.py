"""One end of a Unix stream socket that carries frames: a length (4 bytes, little-endian), then as many bytes."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from transferqueue.limits import BYTES_QUEUED_MAX, FRAMES_QUEUED_MAX, KIB, MESSAGE_BYTES_MAX

HEARD_AFTER: Final = 64
"""After this many written frames a client reads: otherwise a client that sends thousands of calls at once would look
like one that does not read."""
_READ_BYTES: Final = 4 * KIB
"""The size of the first read. A larger buffer takes longer to allocate than most frames to read."""
_READ_ON_BYTES: Final = 64 * KIB
"""The size of the next reads, while reads are full."""
_JOINED_MAX: Final = 16 * KIB
"""Frames up to this size are copied behind their length; larger ones are written from two places."""
_LENGTH: Final = 4
_NO_SIGNAL: Final = socket.MSG_NOSIGNAL
_NOT_NOW: Final = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
"""The peer must read first, or the kernel has no memory for a frame now: the frame waits. After any other error the
peer is gone."""


class PeerClosed(Exception):
    """The peer is gone, or sent an impossible length."""


class FrameStream:
    """One end of a connection. Nothing blocks. It reads frames of at most `bytes_max`.

    Only `read` reports that the peer is gone, after the last frames that the peer sent. `send` to a lost peer does
    nothing.
    """

    __slots__ = ("_begun", "_room", "_wanted", "bytes_max", "socket", "unsent", "unsent_bytes")

    def __init__(self, connected: socket.socket, bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        connected.setblocking(False)
        self.socket: Final = connected
        self.bytes_max = bytes_max
        self.unsent: Final[deque[memoryview]] = deque()
        """Frames that wait until the peer reads."""
        self.unsent_bytes = 0
        self._begun = bytearray()
        self._room = _READ_BYTES
        self._wanted = 0
        """`_begun` can be a whole frame only from this many bytes on."""

    @property
    def is_full(self) -> bool:
        """Whether the queue of unsent frames is full."""
        return len(self.unsent) >= FRAMES_QUEUED_MAX or self.unsent_bytes >= BYTES_QUEUED_MAX

    @property
    def is_behind(self) -> bool:
        """Whether frames wait until the peer reads."""
        return bool(self.unsent)

    def send(self, frame: bytes) -> None:
        """Write a frame, and queue the rest that the kernel does not take."""
        size, sent = len(frame), 0
        head = size.to_bytes(_LENGTH, "little")
        if size > _JOINED_MAX:
            sent = 0 if self.unsent else self._write([head, frame])
            if sent < _LENGTH + size:
                self._queue(memoryview(head + frame)[sent:])
            return
        whole = head + frame  # cheaper than a list of parts
        if not self.unsent:
            try:
                sent = self.socket.send(whole, _NO_SIGNAL)
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    return
        if sent < _LENGTH + size:
            self._queue(memoryview(whole)[sent:])

    def _queue(self, rest: memoryview) -> None:
        self.unsent.append(rest)
        self.unsent_bytes += len(rest)

    def send_some(self, frames: Iterable[bytes]) -> int:
        """Write as many frames as are small together, and queue the rest that the kernel does not take. Returns the
        number. Only while no frame is queued."""
        parts: list[bytes] = []
        size = 0
        for frame in frames:
            size += _LENGTH + len(frame)
            if parts and size > _JOINED_MAX:
                break
            parts += (len(frame).to_bytes(_LENGTH, "little"), frame)
        whole = b"".join(parts)
        sent = self._write([whole])
        if sent < len(whole):
            self._queue(memoryview(whole)[sent:])
        return len(parts) // 2

    def flush(self) -> None:
        """Write some of the queued frames, as far as the kernel takes them."""
        for _ in range(min(len(self.unsent), HEARD_AFTER)):
            first = self.unsent[0]
            sent = self._write([first])
            self.unsent_bytes -= sent
            if sent < len(first):
                self.unsent[0] = first[sent:]
                return
            self.unsent.popleft()

    def _write(self, parts: list[bytes | memoryview]) -> int:
        try:
            return self.socket.sendmsg(parts, (), _NO_SIGNAL)
        except OSError as error:
            return 0 if error.errno in _NOT_NOW else sum(map(len, parts))

    def read(self, arrived: Callable[[bytes], object]) -> bool:
        """Read once, and pass each whole frame to `arrived`. Returns whether there may be more to read. `PeerClosed`
        after the last frame."""
        try:
            came = self.socket.recv(self._room)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerClosed from error
        if not came:
            raise PeerClosed
        more = len(came) == self._room
        self._room = _READ_ON_BYTES if more else _READ_BYTES
        if not self._begun and len(came) - _LENGTH == int.from_bytes(
            came[:_LENGTH], "little"
        ):  # mostly: one whole frame
            arrived(came[_LENGTH:])
            return more
        if self._begun:
            self._begun += came
            if len(self._begun) < self._wanted:
                return more
            came = bytes(self._begun)
        at = _parse(came, arrived, self.bytes_max)
        if at < len(came):
            self._begun = bytearray(came[at:])
            self._wanted = _LENGTH + int.from_bytes(came[at : at + _LENGTH], "little")
        elif self._begun:
            self._begun = bytearray()
        return more

    def close(self) -> None:
        """Disconnect, even if a forked child shares the socket. The peer can still read the bytes in the kernel."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _parse(came: bytes, arrived: Callable[[bytes], object], bytes_max: int) -> int:
    """Pass each whole frame to `arrived`. Returns where the first incomplete frame begins."""
    at = 0
    while len(came) - at >= _LENGTH:
        start = at + _LENGTH
        size = int.from_bytes(came[at:start], "little")
        if size > bytes_max:
            raise PeerClosed
        if start + size > len(came):
            break
        at = start + size
        arrived(came[start:at])
    return at
