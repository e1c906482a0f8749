"""What a client sees of a server: a channel of frames."""

from __future__ import annotations

from typing import Protocol

from transferqueue.errors import UsageError
from transferqueue.transport.address import InprocAddress, IpcAddress, TcpAddress, parse_address
from transferqueue.transport.control import inproc, zeromq
from transferqueue.transport.control import unix_socket as local
from transferqueue.transport.security.keys import ClientKeys
from transferqueue.transport.system.file_lock import is_locked
from transferqueue.transport.system.wakeup import Wakeup


class ClientChannel(Protocol):
    """Frames to and from one server. Used by one thread at a time; nothing here blocks but `wait`."""

    @property
    def address(self) -> str:
        """Where the server listens."""

    @property
    def doubt(self) -> str:
        """What may be the cause when nothing answers, and what to do: a clause for an error message."""

    @property
    def ways(self) -> int:
        """How many times a connection was made, as far as was seen here. What was sent by an earlier one may be lost."""

    @property
    def is_lost(self) -> bool:
        """Whether there was a connection and is none now, as far as was seen here."""

    def send(self, frame: bytes) -> None:
        """Hand a frame over; it leaves in order. While nothing listens, frames are kept for the connection
        that is tried again and again. `Unreachable` if `FRAMES_QUEUED_MAX` of them were kept already, and
        `Disconnected` if this channel or its embedded server is closed: the frame was not taken."""

    def recv_nowait(self) -> bytes | None:
        """The next frame, or None: nothing has arrived. `Disconnected` if no frame can ever arrive."""

    def wait(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """Sleep until a frame can be received, `wakeup` is set, or `timeout_s` is over (None: never).

        `wakeup` is cleared before this returns, so look at what it announces afterwards. May return early.
        """

    def close(self) -> None:
        """Give everything back at once; frames not yet sent are lost. Closing twice is allowed."""


def dial(address: str, keys: ClientKeys | None = None) -> ClientChannel:
    """A channel to the server at `address`: ``ipc://``, ``tcp://`` or ``inproc:``.

    keys: for tcp, whom to trust there and who this client is; None: anybody, and nobody. Does not wait: an ipc or tcp server may start later. `UsageError` for an address that is none,
    `Unreachable` for an embedded server that does not run in this process.
    """
    place = parse_address(address)
    if keys is not None and not isinstance(place, TcpAddress):
        raise UsageError(f"address {address!r} asks for no key: only tcp does; leave the key out")
    if isinstance(place, InprocAddress):
        return inproc.connect(place)
    if isinstance(place, TcpAddress) and (place.port == 0 or place.host == "*"):
        raise UsageError(f"address {address!r} is one to listen at; to connect, name the host and its port")
    return local.UnixChannel(place) if isinstance(place, IpcAddress) else zeromq.ZmqChannel(place, keys)


def is_served(address: str) -> bool | None:
    """Whether a server lives at `address`, told by the kernel at once; None where it cannot tell (tcp)."""
    place = parse_address(address)
    if isinstance(place, InprocAddress):
        return inproc.is_open(place)
    return is_locked(place.lock_path) if isinstance(place, IpcAddress) else None
