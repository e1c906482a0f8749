"""Frames between processes of one machine, over a Unix stream socket.

Over a network ZeroMQ carries frames, with encryption and its own thread at each end. On one machine those threads have
no work, and waking them took most of the time of a call (docs/decisions/calls.md). So here the client's thread and the
server's thread write and read the socket themselves.

A frame is its length (4 bytes, little-endian) and its bytes. A peer that sends an impossible length is disconnected: a
client may send `PUBLISH_BYTES_MAX`, an unauthenticated one `SMALL_FRAME_BYTES`, and a server `MESSAGE_BYTES_MAX`. The
socket file belongs to its user (0600), and needs no keys.

A peer is *unauthenticated* until the server admits it (`UnixServer.admit`). At most `unauthenticated_peers_max` of them
stay connected, each for `UNAUTHENTICATED_S`, so they cannot use up the descriptors that clients need.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from transferqueue.errors import Unreachable, UsageError
from transferqueue.limits import (
    FRAMES_QUEUED_MAX,
    NOTE_BYTES_MAX,
    PUBLISH_BYTES_MAX,
    SMALL_FRAME_BYTES,
    UNAUTHENTICATED_S,
)
from transferqueue.transport.address import IpcAddress
from transferqueue.transport.control.frame_stream import HEARD_AFTER, FrameStream, PeerClosed
from transferqueue.transport.control.polled import PolledChannel
from transferqueue.transport.control.send_result import SendResult
from transferqueue.transport.control.unauthenticated_peers import unauthenticated_peers_max
from transferqueue.transport.system.private_files import read_private

_log: Final = logging.getLogger("transferqueue.server")
REDIAL_S: Final = 0.01
"""First pause before a lost or missing server is tried again; doubles up to `REDIAL_S_MAX`."""
REDIAL_S_MAX: Final = 0.5
_EVENTS_MAX: Final = 256
"""The server reads at most this many peers in one turn. The kernel reports the others at the next."""
_WRITABLE: Final = select.EPOLLOUT
_BACKLOG: Final = 1024


class Descriptor(Protocol):
    """Anything that can be polled."""

    def fileno(self) -> int:
        """The descriptor."""


class UnixChannel(PolledChannel):
    """The client's end. See `transferqueue.transport.ClientChannel`."""

    def __init__(self, place: IpcAddress) -> None:
        super().__init__()
        self.address = str(place)
        self.connections_made, self.is_lost = 0, False
        self._path = str(place.path)
        self._stream: FrameStream | None = None
        self._sent = 0
        self._kept: deque[bytes] = deque()
        self._waits_to_write = False
        self._pause_s, self._dial_at = REDIAL_S, 0.0
        self._refused_with = 0
        self._dial()

    @property
    def doubt(self) -> str:
        """See `transferqueue.transport.ClientChannel`."""
        if self._refused_with == errno.EACCES:
            return f"this user may not open {self._path}: connect as the user that the server runs as, or over tcp"
        if self._stream is not None:
            return "a process listens there and does not answer: it may be stopped, or busy"
        with suppress(OSError, UnicodeDecodeError):
            note = IpcAddress(Path(self._path)).note_path
            return f"its server ended, and waits for its disk: {read_private(note, NOTE_BYTES_MAX).decode()}"
        if self.connections_made:
            return (
                "a server listens there, and closed the connection: it may open no more files (raise its limit: "
                "ulimit -n), or it stops"
            )
        return f"is a server running there? Start one: transferqueue serve --address {self.address}"

    def send(self, frame: bytes) -> None:
        """Write a frame, or queue it."""
        self._check_open()
        if self._stream is None:
            self._check(len(self._kept) >= FRAMES_QUEUED_MAX)
            self._kept.append(frame)
            return
        if self._stream.unsent:
            self._check(self._stream.is_full)
        self._stream.send(frame)
        if self._stream.unsent:
            self._watch_writing()
        self._sent += 1
        if self._sent % HEARD_AFTER == 0:
            self._hear()

    def send_some(self, frames: Sequence[bytes]) -> int:
        """Write small frames with one system call."""
        if len(frames) == 1 or self._closed or self._stream is None or self._stream.is_behind:
            self.send(frames[0])
            return 1
        count = self._stream.send_some(frames)
        if self._stream.unsent:
            self._watch_writing()
        if (self._sent + count) // HEARD_AFTER > self._sent // HEARD_AFTER:
            self._hear()
        self._sent += count
        return count

    def _check(self, full: bool) -> None:
        if full:
            raise Unreachable(
                f"{self.address} has taken none of the last {FRAMES_QUEUED_MAX} messages; no process reads there"
            )

    def _hear(self) -> None:
        """Read all frames that have arrived."""
        self._readable = True
        while self._readable and self._stream is not None:
            try:
                self._readable = self._stream.read(self._arrived.append)
            except PeerClosed:
                self._lose()
        if self._arrived:
            self._pause_s = REDIAL_S  # the server answers, and does not disconnect every client

    @property
    def _connection(self) -> int | None:
        return None if self._stream is None else self._stream.socket.fileno()

    @property
    def is_behind(self) -> bool:
        """See `DrivableChannel`."""
        return self._stream is None or bool(self._stream.unsent)

    def _due_s(self) -> float | None:
        return None if self._stream is not None else max(0.0, self._dial_at - time.monotonic())

    def _tend(self) -> None:
        if self._stream is None and time.monotonic() >= self._dial_at:
            self._dial()
        self._watch_writing()

    def _watch_writing(self) -> None:
        if self._stream is not None and self._stream.is_behind is not self._waits_to_write:
            self._waits_to_write = self._stream.is_behind
            self._poll.modify(self._stream.socket, select.EPOLLIN | (select.EPOLLOUT if self._waits_to_write else 0))

    def _happened(self, events: int) -> None:
        super()._happened(events)
        if events & select.EPOLLOUT and self._stream is not None:
            self._stream.flush()

    def reset(self) -> None:
        """Disconnect, and connect again at once: a caller was interrupted in the middle of a frame."""
        if self._stream is not None:
            self._lose()
            self._dial_at = time.monotonic()

    def _dial(self) -> None:
        """Connect if a server listens. Otherwise plan the next attempt, after a longer pause."""
        try:
            connected = _connected(self._path)
        except OSError as error:
            self._refused_with = error.errno or 0
            self._later()
            return
        self._stream = FrameStream(connected)
        self._attach(connected.fileno())
        self._waits_to_write = False
        self.connections_made, self.is_lost = self.connections_made + 1, False
        kept, self._kept = self._kept, deque()
        for frame in kept:
            self.send(frame)

    def _later(self) -> None:
        self._dial_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, REDIAL_S_MAX)

    def _lose(self) -> None:
        """Close a lost connection. Its unsent frames are lost. If it is interrupted at any step, `reset` completes
        it."""
        self._readable, self.is_lost = False, True
        self._later()
        lost, self._stream = self._stream, None
        if lost is None:
            return
        self._detach(lost.socket.fileno())
        lost.close()

    def close(self) -> None:
        """Disconnect; unsent frames are lost."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        super().close()


def _connected(path: str) -> socket.socket:
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connecting.connect(path)
    except OSError:
        connecting.close()
        raise
    return connecting


class UnixPeer:
    """A client's connection at the server's end. It takes the replies to its frames."""

    __slots__ = ("accepted_at", "is_gone", "stream", "waits_to_write")

    def __init__(self, stream: FrameStream, now: float) -> None:
        self.stream: Final = stream
        self.accepted_at: Final = now
        self.is_gone = self.waits_to_write = False


class UnixServer:
    """The server's end of all connections to one socket file. Not thread-safe. Its `fileno` is readable when
    `recv_nowait` has work."""

    def __init__(self, place: IpcAddress, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen. Replaces an existing socket file: the caller must hold the lock of the address. `UsageError` if that
        is impossible."""
        self._path = place.path
        self._clock = clock
        self._peers: dict[int, UnixPeer] = {}
        self.unauthenticated: Final[dict[int, UnixPeer]] = {}
        """Oldest first. While it is empty, `tick` has nothing to do."""
        self._unauthenticated_max = unauthenticated_peers_max()
        self.turned_away = 0
        """The number of unauthenticated peers that were disconnected, and of connections refused for want of a
        descriptor."""
        self._arrived: deque[tuple[UnixPeer, bytes]] = deque()
        self._others: set[int] = set()
        try:
            with ExitStack() as made:
                self._spare = _spare()
                made.callback(lambda: self._spare.close())  # noqa: PLW0108  (it may be replaced until then)
                self._epoll = made.enter_context(select.epoll())
                self._socket = made.enter_context(_listening(place.path))
                # Edge-triggered: a connection that cannot be accepted must not wake the server for ever.
                self._epoll.register(self._socket, select.EPOLLIN | select.EPOLLET)
                self._files = made.pop_all()
        except OSError as error:
            raise UsageError(f"address {place} cannot be listened at: {error.strerror}") from error

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._epoll.fileno()

    def watch(self, source: Descriptor) -> None:
        """Have `poll` return the descriptor of this source, too, when it is readable."""
        self._others.add(source.fileno())
        self._epoll.register(source, select.EPOLLIN)

    def poll(self, timeout_s: float | None) -> list[int]:
        """Wait for frames, new connections or a watched source; None: without limit. Reads once from each peer that has
        sent bytes; not while frames of an earlier call are left. Returns the watched descriptors that are readable."""
        readable = []
        left = bool(self._arrived)
        for number, events in self._epoll.poll(0 if left else timeout_s, _EVENTS_MAX):
            peer = self._peers.get(number)
            if peer is not None:
                if not left:
                    self._happened(peer, events)
            elif number in self._others:
                readable.append(number)
            else:
                self._accept()
        return readable

    def take(self) -> tuple[UnixPeer, bytes] | None:
        """The peer and the next of the frames that `poll` has read, or None."""
        return self._arrived.popleft() if self._arrived else None

    def recv_nowait(self) -> tuple[UnixPeer, bytes] | None:
        """The peer and the next frame, or None."""
        if not self._arrived:
            self.poll(0)
        return self.take()

    def patience_s(self) -> float | None:
        """Seconds until `tick` must be called; None: no peer is unauthenticated."""
        if not self.unauthenticated:
            return None
        oldest = next(iter(self.unauthenticated.values()))
        return max(0.0, oldest.accepted_at + UNAUTHENTICATED_S - self._clock())

    def tick(self) -> None:
        """Disconnect unauthenticated peers older than `UNAUTHENTICATED_S`."""
        while self.unauthenticated:
            oldest = next(iter(self.unauthenticated.values()))
            if self._clock() < oldest.accepted_at + UNAUTHENTICATED_S:
                return
            self._hang_up(oldest)

    def send(self, peer: UnixPeer, frame: bytes) -> SendResult:
        """Write a frame, or queue it. Does not block. A peer that does not read is disconnected."""
        if peer.is_gone:
            return SendResult.GONE
        stream = peer.stream
        if stream.unsent and stream.is_full:
            self._drop(peer)
            return SendResult.UNREAD
        stream.send(frame)
        if bool(stream.unsent) is not peer.waits_to_write:
            self._watch(peer)
        return SendResult.ON_ITS_WAY

    def close(self, farewell_s: float = 0.0) -> None:
        """Stop listening, and remove the socket file. Queued frames get up to `farewell_s` seconds to leave."""
        with suppress(OSError):
            self._path.unlink()
        self._accept()  # otherwise waiting connections would hang if a forked child has the socket too
        self._epoll.unregister(self._socket)
        _flush([peer.stream for peer in self._peers.values()], farewell_s)
        for peer in list(self._peers.values()):
            self._drop(peer)
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
            except OSError:  # this user's limit of watched descriptors is reached
                connected.close()
                continue
            self._take_in(connected)

    def _take_in(self, connected: socket.socket) -> None:
        """Add an unauthenticated peer, and read it at once: a peer that has sent a frame ranks above silent ones."""
        if len(self.unauthenticated) >= self._unauthenticated_max:
            self._hang_up(self._least_promising())
        peer = UnixPeer(FrameStream(connected, SMALL_FRAME_BYTES), self._clock())
        self._peers[connected.fileno()] = self.unauthenticated[connected.fileno()] = peer
        self._happened(peer, select.EPOLLIN)

    def _least_promising(self) -> UnixPeer:
        """The oldest unauthenticated peer without a received frame; if all have one, the oldest of all."""
        waiting = {id(peer) for peer, _ in self._arrived}
        peers = self.unauthenticated.values()
        return next((peer for peer in peers if id(peer) not in waiting), next(iter(peers)))

    def admit(self, peer: UnixPeer) -> None:
        """The peer has a session: it is no longer disconnected for its age."""
        if not peer.is_gone:
            peer.stream.bytes_max = PUBLISH_BYTES_MAX
            self.unauthenticated.pop(peer.stream.socket.fileno(), None)

    def _hang_up(self, peer: UnixPeer) -> None:
        self.turned_away += 1
        if self.turned_away == 1:
            _log.warning(
                "%s: the server closed a connection that did not identify itself within %g s, or made room for later "
                "ones; clients of this version greet at once, so another program connects here (this is logged once)",
                self._path,
                UNAUTHENTICATED_S,
            )
        self._drop(peer)

    def _turn_away(self) -> bool:
        """No descriptor is left: accept the next connection with the spare one and close it, so that the peer retries.
        Returns whether that was possible."""
        self._spare.close()
        self.turned_away += 1
        try:
            self._socket.accept()[0].close()
        except OSError:
            return False
        finally:
            with suppress(OSError):  # another thread took the descriptor: the next call tries again
                self._spare = _spare()
        return True

    def _happened(self, peer: UnixPeer, events: int) -> None:
        if events & _WRITABLE:
            peer.stream.flush()
            self._watch(peer)
        if events & ~_WRITABLE:
            frames: list[bytes] = []
            try:
                peer.stream.read(frames.append)
            except PeerClosed:
                self._drop(peer)
            for frame in frames:
                self._arrived.append((peer, frame))

    def _watch(self, peer: UnixPeer) -> None:
        """Poll for writing exactly while frames wait for the peer to read."""
        if peer.stream.is_behind is not peer.waits_to_write:
            peer.waits_to_write = peer.stream.is_behind
            self._epoll.modify(peer.stream.socket, select.EPOLLIN | (select.EPOLLOUT if peer.waits_to_write else 0))

    def _drop(self, peer: UnixPeer) -> None:
        peer.is_gone = True
        del self._peers[peer.stream.socket.fileno()]
        self.unauthenticated.pop(peer.stream.socket.fileno(), None)
        self._epoll.unregister(peer.stream.socket)  # needed: a forked child may have the socket open too
        peer.stream.close()


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
    """Write the queued frames while the peers read, for up to `farewell_s` seconds."""
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
