"""Frames between threads of one process: two bounded queues and two wake-ups for each channel.

The frames are encoded as over a socket, so there is one code path to test. A client that does not read its replies is
disconnected when `FRAMES_QUEUED_MAX` of them are queued, like a peer behind a socket.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from transferqueue.errors import Disconnected, Unreachable
from transferqueue.limits import FRAMES_QUEUED_MAX
from transferqueue.transport.address import InprocAddress
from transferqueue.transport.system.wakeup import Wakeup

_servers: Final[dict[str, InprocServer]] = {}
_numbers: Final = itertools.count(1)


class InprocChannel:
    """The client's end. See `transferqueue.transport.ClientChannel`."""

    connections_made: Final = 1
    is_lost: Final = False

    def __init__(self, server: InprocServer, peer: int) -> None:
        self._server = server
        self._peer = peer
        self._arrived: deque[bytes] = deque()
        self._ready = Wakeup()
        self._open = True

    @property
    def address(self) -> str:
        """``inproc:`` and the server's id."""
        return self._server.address

    @property
    def doubt(self) -> str:
        """See `transferqueue.transport.ClientChannel`."""
        return "the embedded server is busy, or its process was stopped"

    def send(self, frame: bytes) -> None:
        """Queue a frame for the server's thread and wake it."""
        if not self._open:
            raise Disconnected(f"the embedded server {self.address} is closed, or this channel to it")
        self._server._take(self._peer, frame)

    def send_some(self, frames: Sequence[bytes]) -> int:
        """Queue the first frame."""
        self.send(frames[0])
        return 1

    def recv_nowait(self) -> bytes | None:
        """The next frame, or None."""
        if self._arrived:
            return self._arrived.popleft()
        if not self._open:
            raise Disconnected(f"the embedded server {self.address} is closed, or this channel to it")
        return None

    def wait(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """Block until a frame, the wake-up or the timeout."""
        if self._open and not self._arrived:
            polled = select.poll()
            polled.register(self._ready.fileno(), select.POLLIN)
            polled.register(wakeup.fileno(), select.POLLIN)
            polled.poll(None if timeout_s is None else timeout_s * 1000)
        if self._open:
            self._ready.clear()
        wakeup.clear()

    def sleep(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """`wait`: only one thread uses this channel."""
        self.wait(wakeup, timeout_s)

    def look(self) -> None:
        """`wait` has done it."""

    def close(self) -> None:
        """Disconnect from the server."""
        self._server._forget(self._peer)
        self._shut()
        self._ready.close()

    def _queue(self, frame: bytes) -> bool:
        if len(self._arrived) >= FRAMES_QUEUED_MAX:
            return False
        self._arrived.append(frame)
        self._ready.set()
        return True

    def _shut(self) -> None:
        self._open = False
        self._ready.set()


class InprocServer:
    """The server's end of all in-process channels. Sets `wakeup` when a frame has arrived.

    Clients connect and send from any thread. Only the server's thread calls the other methods.
    """

    def __init__(self, wakeup: Wakeup) -> None:
        self.id = f"{os.getpid()}-{next(_numbers)}"
        self._wakeup = wakeup
        self._channels: dict[int, InprocChannel] = {}
        self._peers = itertools.count(1)
        self._arrived: deque[tuple[int, bytes | None]] = deque()
        self._changing = threading.Lock()
        _servers[self.id] = self

    @property
    def address(self) -> str:
        """The address that `dial` takes."""
        return str(InprocAddress(self.id))

    def recv_nowait(self) -> tuple[int, bytes | None] | None:
        """The peer and the next frame, or None. The frame None means that the peer has disconnected."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, peer: int, frame: bytes) -> bool:
        """Queue a frame for `peer`. Returns False if the peer is gone, or was disconnected now for not reading."""
        channel = self._channels.get(peer)
        if channel is None:
            return False
        if not channel._queue(frame):
            self._forget(peer)
            channel._shut()
            return False
        return True

    def close(self) -> None:
        """Close all channels. Their clients get `Disconnected` after the frames that were already sent."""
        _servers.pop(self.id, None)
        with self._changing:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel._shut()

    def _connect(self) -> InprocChannel:
        with self._changing:
            peer = next(self._peers)
            channel = self._channels[peer] = InprocChannel(self, peer)
        return channel

    def _take(self, peer: int, frame: bytes) -> None:
        if len(self._arrived) >= FRAMES_QUEUED_MAX:
            raise Unreachable(
                f"the embedded server {self.address} has {len(self._arrived)} unread frames and takes no more: it is "
                "overloaded or stuck"
            )
        self._arrived.append((peer, frame))
        self._wakeup.set()

    def _forget(self, peer: int) -> None:
        with self._changing:
            known = self._channels.pop(peer, None)
        if known is not None:
            self._arrived.append((peer, None))
            self._wakeup.set()


def connect(address: InprocAddress) -> InprocChannel:
    """A channel to an embedded server; `Unreachable` if none with this id runs in this process."""
    server = _servers.get(address.id)
    if server is None:
        raise Unreachable(f"no embedded server {address} runs in this process; other processes use its ipc address")
    return server._connect()


def is_open(address: InprocAddress) -> bool:
    """Whether an embedded server of this id runs in this process."""
    return address.id in _servers


def _forget_all_in_child() -> None:
    _servers.clear()


os.register_at_fork(after_in_child=_forget_all_in_child)
