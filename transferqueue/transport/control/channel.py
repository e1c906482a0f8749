"""The client's side of a connection: `ClientChannel`, and `dial`, which opens one."""

from __future__ import annotations

import errno
import select
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from transferqueue.errors import UsageError
from transferqueue.transport.address import InprocAddress, IpcAddress, TcpAddress, parse_address
from transferqueue.transport.control import inproc, unix_socket, zeromq
from transferqueue.transport.security.keys import ClientKeys
from transferqueue.transport.system.descriptors import check_descriptors
from transferqueue.transport.system.file_lock import is_locked
from transferqueue.transport.system.wakeup import Wakeup


@runtime_checkable
class DrivableChannel(Protocol):
    """A channel whose socket a caller may wait on itself, instead of the thread in `sleep`."""

    def begin_driving(self) -> bool:
        """Stop events from waking the thread in `sleep`. Returns False if there is work other than to wait for a
        frame."""

    def end_driving(self) -> None:
        """Have events wake the thread in `sleep`, or the event loop, again. May be called twice."""

    def have_loop_read(self, frames: select.epoll | None) -> None:
        """Let an event loop watch `frames`: frames make it readable, and no longer wake the thread in `sleep`. None:
        they wake the thread. Does nothing if `frames` is unchanged."""

    @property
    def is_behind(self) -> bool:
        """Whether frames wait to be written, or there is no connection."""

    def leave_to_loop(self) -> bool:
        """Have the reading event loop wake for the frames left in `peek`, until it calls `hear`. Returns False if no
        loop reads."""

    def hear(self) -> None:
        """Read the arrived frames, for `peek`."""

    def wait_for_frame(self, timeout_s: float | None) -> bool:
        """Block until a frame may have come. `peek` then returns it, or None if less than a frame arrived.

        Returns False on any other event, or after the timeout.
        """

    def peek(self) -> bytes | None:
        """The frame that `recv_nowait` would return."""

    def reset(self) -> None:
        """Disconnect and connect again: frames on their way are lost."""


class ClientChannel(Protocol):
    """Frames to and from one server. Used by one thread at a time. Only `wait` blocks."""

    @property
    def address(self) -> str:
        """The address of the server."""

    @property
    def doubt(self) -> str:
        """For error messages: the likely cause if the server does not answer, and the remedy."""

    @property
    def connections_made(self) -> int:
        """The number of connections made, as far as this end knows. Frames sent over an earlier one may be lost."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost and not made again, as far as this end knows."""

    def send(self, frame: bytes) -> None:
        """Queue a frame; frames leave in order. Does not block. While no server listens, frames are queued, and the
        channel retries the connection. `Unreachable` if `FRAMES_QUEUED_MAX` frames are queued, `Disconnected` if this
        channel or its embedded server is closed. After an error the frame is not queued."""

    def send_some(self, frames: Sequence[bytes]) -> int:
        """`send` some of these frames (at least one), together if that is cheaper. Returns the number."""

    def recv_nowait(self) -> bytes | None:
        """The next frame; None if none has arrived. `Disconnected` if no frame can arrive any more."""

    def wait(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """Block until a frame can be received, `wakeup` is set, or `timeout_s` is over (None: no limit). May return
        early.

        Clears `wakeup` before it returns, so check the wake-up's cause afterwards.
        """

    def sleep(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """The part of `wait` that blocks. Another thread may use the channel meanwhile."""

    def look(self) -> None:
        """The part of `wait` that does not block: process the event, and clear the wake-up."""

    def close(self) -> None:
        """Close the channel at once; unsent frames are lost. A second call does nothing."""


def dial(address: str, keys: ClientKeys | None = None) -> ClientChannel:
    """A channel to the server at `address`. Does not block: an ipc or tcp server may start later.

    Args:
        address: ``ipc://``, ``tcp://`` or ``inproc:``.
        keys: for tcp, the server's public key and this client's pair; None: connect without encryption.

    Raises:
        UsageError: the address is invalid, or this process may open too few files.
        Unreachable: the embedded server does not run in this process.
    """
    place = parse_address(address)
    if keys is not None and not isinstance(place, TcpAddress):
        raise UsageError(f"address {address!r} asks for no key: only tcp does; leave the key out")
    check_descriptors(f"a connection to {address}")
    if isinstance(place, InprocAddress):
        return inproc.connect(place)
    if isinstance(place, TcpAddress) and (place.port == 0 or place.host == "*"):
        raise UsageError(f"address {address!r} is only for listening; to connect, name the host and its port")
    return unix_socket.UnixChannel(place) if isinstance(place, IpcAddress) else zeromq.ZmqChannel(place, keys)


def is_served(address: str) -> bool | None:
    """Whether a server runs at `address`, by its file lock. Does not block. None if unknown: for tcp, and while this
    process may open no more files."""
    place = parse_address(address)
    if isinstance(place, InprocAddress):
        return inproc.is_open(place)
    try:
        return is_locked(place.lock_path) if isinstance(place, IpcAddress) else None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return None
        raise
