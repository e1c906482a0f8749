"""Frames between processes of one machine: a stream socket, each frame behind its length.

ZeroMQ carries them over a network, with encryption and through a thread of its own at either end. On one machine nothing is
left to do for those threads, and to wake them was most of what a call took (decision 27). So here the client's one thread and
the server's one thread write and read the socket themselves.

A frame is its length, 4 bytes, little-endian, and its bytes. A peer whose lengths cannot be is hung up on. The socket file belongs to
its user, and asks for nothing.

A connection is a *stranger* until the server has let in whoever is at its other end (`UnixServer.admit`). Of strangers there are
`strangers_max` at once, each for `STRANGER_S`: they cannot use up the descriptors that the clients of the server need.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

from transferqueue.errors import Disconnected, Unreachable, UsageError
from transferqueue.limits import FRAMES_QUEUED_MAX, KIB, MESSAGE_BYTES_MAX, STRANGER_S
from transferqueue.transport.address import IpcAddress
from transferqueue.transport.control.send_result import SendResult
from transferqueue.transport.control.strangers import strangers_max
from transferqueue.transport.system.wakeup import Wakeup

_log: Final = logging.getLogger("transferqueue.server")
REDIAL_S: Final = 0.01
"""First pause before a lost or missing server is looked for again; doubles up to `REDIAL_S_MAX`."""
REDIAL_S_MAX: Final = 0.5
HEARD_AFTER: Final = 64
"""So many frames written, a client takes in what has come meanwhile: who sends thousands of calls at once must not seem one that
does not read."""
_READ_BYTES: Final = 64 * KIB
_LENGTH: Final = 4
_BACKLOG: Final = 1024


class PeerClosed(Exception):
    """The other end is gone, or sent what cannot be."""


class FrameStream:
    """One end of a connection. Nothing blocks.

    That the other end is gone is found by reading alone, which comes to what it said last: what is written after that goes nowhere.
    """

    __slots__ = ("_begun", "_unsent", "_wanted", "socket")

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket: Final = connected
        self._unsent: deque[memoryview] = deque()
        self._begun = bytearray()
        self._wanted = 0
        """Bytes that `_begun` has to have before it can be a frame."""

    @property
    def is_full(self) -> bool:
        """Whether as many frames wait for the other end as may."""
        return len(self._unsent) >= FRAMES_QUEUED_MAX

    @property
    def is_behind(self) -> bool:
        """Whether frames wait until the other end reads."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Write a frame, or keep what the kernel does not take."""
        head = len(frame).to_bytes(_LENGTH, "little")
        sent = 0 if self._unsent else self._write([head, frame])
        if sent < _LENGTH + len(frame):
            self._unsent.append(memoryview(head + frame)[sent:])

    def flush(self) -> None:
        """Write some of what was kept, as far as the kernel takes it."""
        for _ in range(min(len(self._unsent), HEARD_AFTER)):
            first = self._unsent[0]
            sent = self._write([first])
            if sent < len(first):
                self._unsent[0] = first[sent:]
                return
            self._unsent.popleft()

    def _write(self, parts: list[bytes | memoryview]) -> int:
        try:
            return self.socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return sum(map(len, parts))

    def read(self, arrived: Callable[[bytes], object]) -> bool:
        """Hand over the frames of one read; whether there may be more to read. `PeerClosed` after the last."""
        try:
            came = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerClosed from error
        if not came:
            raise PeerClosed
        more = len(came) == _READ_BYTES
        if self._begun:
            self._begun += came
            if len(self._begun) < self._wanted:
                return more
            came = bytes(self._begun)
        at = _parse(came, arrived)
        self._begun = bytearray(came[at:])
        self._wanted = _LENGTH + int.from_bytes(came[at : at + _LENGTH], "little")
        return more

    def close(self) -> None:
        """Hang up, also if a forked child still has the socket. What the kernel took the other end can still read."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _parse(came: bytes, arrived: Callable[[bytes], object]) -> int:
    """Hand over the whole frames; where the first that is not whole begins."""
    at = 0
    while len(came) - at >= _LENGTH:
        start = at + _LENGTH
        size = int.from_bytes(came[at:start], "little")
        if size > MESSAGE_BYTES_MAX:
            raise PeerClosed
        if start + size > len(came):
            break
        at = start + size
        arrived(came[start:at])
    return at


class UnixChannel:
    """The client's end. See `transferqueue.transport.ClientChannel`."""

    def __init__(self, place: IpcAddress, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = str(place)
        self.ways, self.is_lost = 0, False
        self._path = str(place.path)
        self._clock = clock
        self._stream: FrameStream | None = None
        self._sent = 0
        self._kept: deque[bytes] = deque()
        self._arrived: deque[bytes] = deque()
        self._readable = self._closed = self._waits_to_write = False
        self._pause_s, self._dial_at = REDIAL_S, 0.0
        self._poll = select.poll()
        self._watched: Wakeup | None = None
        self._refused_with = 0
        self._dial()

    @property
    def doubt(self) -> str:
        """See `transferqueue.transport.ClientChannel`."""
        if self._refused_with == errno.EACCES:
            return f"this user may not open {self._path}: connect as the user that the server runs as, or over tcp"
        return f"is a server running there? Start one: transferqueue serve --address {self.address}"

    def send(self, frame: bytes) -> None:
        """Write a frame, or keep it until it can be written."""
        if self._closed:
            raise Disconnected(f"the channel to {self.address} is closed")
        if self._stream is None:
            self._check(len(self._kept) >= FRAMES_QUEUED_MAX)
            self._kept.append(frame)
            return
        self._check(self._stream.is_full)
        self._stream.send(frame)
        self._sent += 1
        if self._sent % HEARD_AFTER == 0:
            self._hear()

    def _check(self, full: bool) -> None:
        if full:
            raise Unreachable(
                f"{self.address} has taken none of the last {FRAMES_QUEUED_MAX} messages; nothing reads there"
            )

    def recv_nowait(self) -> bytes | None:
        """The next frame, or None."""
        if self._closed:
            raise Disconnected(f"the channel to {self.address} is closed")
        if not self._arrived and self._readable:
            self._hear()
        return self._arrived.popleft() if self._arrived else None

    def _hear(self) -> None:
        """Take in what has come."""
        self._readable = True
        while self._readable and self._stream is not None:
            try:
                self._readable = self._stream.read(self._arrived.append)
            except PeerClosed:
                self._lose()
        if self._arrived:
            self._pause_s = REDIAL_S  # it is no server that hangs up on all

    def wait(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """Sleep until a frame, the wake-up or the time."""
        self._watch(wakeup)
        for number, events in self._poll.poll(self._patience_ms(timeout_s)):
            if number == wakeup.fileno():
                wakeup.clear()
            else:
                self._happened(events)
        if self._stream is None and not self._closed and self._clock() >= self._dial_at:
            self._dial()

    def _patience_ms(self, timeout_s: float | None) -> int | None:
        if self._arrived:
            return 0
        if self._stream is None:
            left_s = max(0.0, self._dial_at - self._clock())
            timeout_s = left_s if timeout_s is None else min(left_s, timeout_s)
        return None if timeout_s is None else math.ceil(timeout_s * 1000)

    def _watch(self, wakeup: Wakeup) -> None:
        if self._watched is not wakeup:
            if self._watched is not None:
                self._poll.unregister(self._watched)
            self._poll.register(wakeup, select.POLLIN)
            self._watched = wakeup
        if self._stream is not None and self._stream.is_behind is not self._waits_to_write:
            self._waits_to_write = self._stream.is_behind
            self._poll.modify(self._stream.socket, select.POLLIN | (select.POLLOUT if self._waits_to_write else 0))

    def _happened(self, events: int) -> None:
        self._readable = self._readable or bool(events & ~select.POLLOUT)
        if events & select.POLLOUT and self._stream is not None:
            self._stream.flush()

    def _dial(self) -> None:
        """Connect, if somebody listens; else later, and later still."""
        try:
            dialled = _dialled(self._path)
        except OSError as error:
            self._refused_with = error.errno or 0
            self._later()
            return
        self._stream = FrameStream(dialled)
        self._poll.register(dialled, select.POLLIN)
        self._waits_to_write = False
        self.ways, self.is_lost = self.ways + 1, False
        kept, self._kept = self._kept, deque()
        for frame in kept:
            self.send(frame)

    def _later(self) -> None:
        self._dial_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, REDIAL_S_MAX)

    def _lose(self) -> None:
        """What was not yet written is gone with the connection."""
        if self._stream is not None:
            self._poll.unregister(self._stream.socket)
            self._stream.close()
        self._stream, self._readable, self.is_lost = None, False, True
        self._later()

    def close(self) -> None:
        """Hang up; frames not yet written are lost."""
        if self._stream is not None:
            self._stream.close()
        self._stream, self._closed = None, True
        self._arrived.clear()


def _dialled(path: str) -> socket.socket:
    dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        dialled.connect(path)
    except OSError:
        dialled.close()
        raise
    return dialled


class UnixPeer:
    """A client's connection, as the server sees it: where answers to what came over it go."""

    __slots__ = ("accepted_at", "is_gone", "stream", "waits_to_write")

    def __init__(self, stream: FrameStream, now: float) -> None:
        self.stream: Final = stream
        self.accepted_at: Final = now
        self.is_gone = self.waits_to_write = False


class UnixServer:
    """The server's end of all connections to one socket file. Used by one thread; readable when something is to be received."""

    def __init__(self, place: IpcAddress, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen. A socket file that exists is replaced: whoever calls holds the lock of the address."""
        self._path = place.path
        self._clock = clock
        self._lines: dict[int, UnixPeer] = {}
        self._strangers: dict[int, UnixPeer] = {}  # in the order in which they came
        self._strangers_max = strangers_max()
        self.turned_away = 0
        """Strangers that were hung up on, and connections for which no descriptor was left."""
        self._arrived: deque[tuple[UnixPeer, bytes]] = deque()
        try:
            with ExitStack() as made:
                self._spare = _spare()
                made.callback(lambda: self._spare.close())  # noqa: PLW0108  (it may be another one by then)
                self._epoll = made.enter_context(select.epoll())
                self._socket = made.enter_context(_listening(place.path))
                # Once for each that comes: one that cannot be let in must not wake the server for ever.
                self._epoll.register(self._socket, select.EPOLLIN | select.EPOLLET)
                self._files = made.pop_all()
        except OSError as error:
            raise UsageError(f"address {place} cannot be listened at: {error.strerror}") from error

    def fileno(self) -> int:
        """Readable when something happened."""
        return self._epoll.fileno()

    def recv_nowait(self) -> tuple[UnixPeer, bytes] | None:
        """The next frame and where it came from, or None."""
        if not self._arrived:
            for number, events in self._epoll.poll(0):
                line = self._lines.get(number)
                if line is None:
                    self._accept()
                else:
                    self._happened(line, events)
        return self._arrived.popleft() if self._arrived else None

    def patience_s(self) -> float | None:
        """How soon `tick` must be called; None: not by itself."""
        if not self._strangers:
            return None
        oldest = next(iter(self._strangers.values()))
        return max(0.0, oldest.accepted_at + STRANGER_S - self._clock())

    def tick(self) -> None:
        """Hang up on strangers that have had their time."""
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if self._clock() < oldest.accepted_at + STRANGER_S:
                return
            self._hang_up(oldest)

    def send(self, line: UnixPeer, frame: bytes) -> SendResult:
        """Write a frame without waiting, or keep it. A peer that does not read is hung up on."""
        if line.is_gone:
            return SendResult.GONE
        if line.stream.is_full:
            self._drop(line)
            return SendResult.UNREAD
        line.stream.send(frame)
        self._watch(line)
        return SendResult.ON_ITS_WAY

    def close(self, farewell_s: float = 0.0) -> None:
        """Stop listening; frames already taken get up to `farewell_s` to leave. Removes the socket file."""
        with suppress(OSError):
            self._path.unlink()
        self._accept()  # who still waits to be let in would otherwise wait for a forked child that has the socket too
        self._epoll.unregister(self._socket)
        _flush([line.stream for line in self._lines.values()], farewell_s)
        for line in list(self._lines.values()):
            self._drop(line)
        self._files.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._turn_away():
                    continue
                return
            try:
                self._epoll.register(connected, select.EPOLLIN)
            except OSError:  # the kernel watches no more for this user
                connected.close()
                continue
            self._take_in(connected)

    def _take_in(self, connected: socket.socket) -> None:
        """A stranger came. It is heard at once: what it has said already tells it from those that say nothing."""
        if len(self._strangers) >= self._strangers_max:
            self._hang_up(self._least_promising())
        line = UnixPeer(FrameStream(connected), self._clock())
        self._lines[connected.fileno()] = self._strangers[connected.fileno()] = line
        self._happened(line, select.EPOLLIN)

    def _least_promising(self) -> UnixPeer:
        """The stranger that came first of those that wait for nothing here; else the first of all."""
        waiting = {id(line) for line, _ in self._arrived}
        return next(
            (line for line in self._strangers.values() if id(line) not in waiting), next(iter(self._strangers.values()))
        )

    def admit(self, line: UnixPeer) -> None:
        """The other end has a session: it is no stranger."""
        if not line.is_gone:
            self._strangers.pop(line.stream.socket.fileno(), None)

    def _hang_up(self, line: UnixPeer) -> None:
        self.turned_away += 1
        if self.turned_away == 1:
            _log.warning(
                "%s: a connection was closed that did not say who it is within %g s, or made room for later ones; clients of this "
                "version greet at once, so another program connects here (this is logged once)",
                self._path,
                STRANGER_S,
            )
        self._drop(line)

    def _turn_away(self) -> bool:
        """No descriptor is left: let who knocks in with the spare one and hang up, so that it tries again. Whether that was possible."""
        self._spare.close()
        self.turned_away += 1
        try:
            self._socket.accept()[0].close()
        except OSError:
            return False
        finally:
            with suppress(OSError):  # somebody else was quicker with it: then another time
                self._spare = _spare()
        return True

    def _happened(self, line: UnixPeer, events: int) -> None:
        if events & select.EPOLLOUT:
            line.stream.flush()
            self._watch(line)
        if events & ~select.EPOLLOUT:
            try:
                line.stream.read(lambda frame: self._arrived.append((line, frame)))
            except PeerClosed:
                self._drop(line)

    def _watch(self, line: UnixPeer) -> None:
        """Be woken when the peer reads, while frames wait for that."""
        if line.stream.is_behind is not line.waits_to_write:
            line.waits_to_write = line.stream.is_behind
            self._epoll.modify(line.stream.socket, select.EPOLLIN | (select.EPOLLOUT if line.waits_to_write else 0))

    def _drop(self, line: UnixPeer) -> None:
        line.is_gone = True
        del self._lines[line.stream.socket.fileno()]
        self._strangers.pop(line.stream.socket.fileno(), None)
        self._epoll.unregister(line.stream.socket)  # closing alone would not do: a forked child may have it open too
        line.stream.close()


def _spare() -> BinaryIO:
    return open(os.devnull, "rb", buffering=0)


def _listening(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _flush(streams: Iterable[FrameStream], farewell_s: float) -> None:
    """Write what was kept, as soon as each other end reads, for up to `farewell_s`."""
    until, behind = time.monotonic() + farewell_s, dict[int, FrameStream]()
    polled = select.poll()  # `select.select` knows no descriptor above 1023
    for stream in streams:
        stream.flush()
        if stream.is_behind:
            behind[stream.socket.fileno()] = stream
            polled.register(stream.socket, select.POLLOUT)
    while behind and (left_s := until - time.monotonic()) > 0:
        for number, _ in polled.poll(math.ceil(left_s * 1000)):
            behind[number].flush()
            if not behind[number].is_behind:
                polled.unregister(number)
                del behind[number]
