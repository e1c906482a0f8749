"""The shard's end of the bulk protocol over TCP: it listens, accepts connections, and closes them.

- Each round of `arrivals` receives at most one message of each connection, so they take turns.
- A peer with unsent frames is `clogged`: the server does not read from it, and the shard prepares no frames for it. So
  neither endless requests nor a stalled reader make memory grow. Clients always read before they send more.
- A connection that stays in the middle of a message for `BULK_STALL_S` without progress is closed. There are at most
  `BULK_CONNECTIONS_MAX` connections; a new one closes the one that was silent longest.
- A peer is *unauthenticated* until it has shown a valid ticket. There are at most `unauthenticated_peers_max` of them,
  each for `BULK_STALL_S`, so they use up neither descriptors nor connections. A new one closes the oldest.
- While no descriptor is left, the server accepts new connections with a spare one and closes them. If that fails too,
  it stops accepting for `DEAF_S`: the kernel would report the same connection for ever.
- After a message whose checksum fails, the server reports the error and ignores the connection: the start of the next
  message is unknown.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from transferqueue.errors import AddressInUse, Corruption, Unreachable, UsageError
from transferqueue.limits import BULK_CONNECTIONS_MAX, BULK_STALL_S
from transferqueue.transport.bulk import protocol
from transferqueue.transport.bulk.stream import BulkStream
from transferqueue.transport.control.unauthenticated_peers import unauthenticated_peers_max

if TYPE_CHECKING:
    from transferqueue.transport.bulk.tls import ServerCertificate

_log: Final = logging.getLogger("transferqueue.server")
DEAF_S: Final = 0.2
_BACKLOG: Final = 512
_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT


class ReceiverFactory(Protocol):
    """Gives the receiver of each peer's messages, and gets events of the server's peers."""

    def desk(self, peer: bytes) -> protocol.MessageReceiver:
        """The receiver of this peer's messages."""

    def spoiled(self, peer: bytes, error: Corruption) -> None:
        """A message of this peer does not match its checksum."""

    def heard(self, peer: bytes) -> None:
        """Bytes were sent to, or received from, this peer."""

    def lost(self, peer: bytes) -> None:
        """This peer is disconnected."""

    def knows(self, peer: bytes) -> bool:
        """Whether this peer has shown a valid ticket."""


class _Peer:
    """A connection. `heard_at`: when bytes last moved. `deaf`: whether its messages are ignored."""

    __slots__ = ("accepted_at", "deaf", "heard_at", "stream", "wanted")

    def __init__(self, stream: BulkStream, now: float) -> None:
        self.stream = stream
        self.accepted_at = self.heard_at = now
        self.deaf = False
        self.wanted = _READ

    @property
    def settled(self) -> bool:
        return not self.deaf and self.stream.settled


class BulkServer:
    """All connections of a shard. Not thread-safe. certificate: connections are encrypted with it; default None: they
    are not."""

    def __init__(self, certificate: ServerCertificate | None = None) -> None:
        self._accepted: Final[Callable[[socket.socket], BulkStream]] = (
            BulkStream if certificate is None else certificate.accepted
        )
        self._ready = select.epoll()
        self._spare = _spare()
        self._listeners: dict[int, socket.socket] = {}
        self._names: dict[int, bytes] = {}
        self._peers: dict[bytes, _Peer] = {}  # the one silent longest first
        self._unsettled: dict[bytes, _Peer] = {}
        self._buffered: set[bytes] = set()
        """Peers from which bytes have arrived that no poll reports."""
        self._unauthenticated: dict[bytes, _Peer] = {}  # oldest first
        self._unauthenticated_max = unauthenticated_peers_max()
        self._deaf_until: float | None = None
        self.turned_away = 0
        """The number of unauthenticated peers that were disconnected, and of connections refused for want of a
        descriptor."""
        self._numbers = itertools.count(1)
        self.clogged: Final[set[bytes]] = set()

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def sources(self) -> Sequence[select.epoll]:
        """Sockets to poll for reading."""
        return [self._ready]

    def listen_at_all(self, hosts: Sequence[str], port: int, tries: int) -> int:
        """Listen at one port of all hosts (0: a port that is free on all), and return it. `AddressInUse`, or
        `UsageError`."""
        for _ in range(1 if port else tries - 1):
            with suppress(AddressInUse):
                return self._listen(hosts, port)
        return self._listen(hosts, port)

    def _listen(self, hosts: Sequence[str], port: int) -> int:
        listeners: list[socket.socket] = []
        try:
            for host in hosts:
                listeners.append(_listener(host, port))
                port = int(listeners[-1].getsockname()[1])
        except (AddressInUse, UsageError):
            for listener in listeners:
                listener.close()
            raise
        for listener in listeners:
            self._listeners[listener.fileno()] = listener
            self._ready.register(listener.fileno(), _READ)
        return port

    def arrivals(self, desks: ReceiverFactory, now: float) -> Iterator[bytes]:
        """Receive from each peer at most one message. Yields the peers whose message is complete."""
        buffered = list(self._buffered)
        for fd, _ in self._ready.poll(0):
            if fd in self._listeners:
                self._accept(self._listeners[fd], desks, now)
            elif (name := self._names.get(fd)) is not None and name not in buffered and self._serve(name, desks, now):
                yield name
        for name in buffered:
            if name in self._peers and self._serve(name, desks, now):
                yield name

    def send(self, name: bytes, message: protocol.Message) -> bool:
        """Queue a message. Does not block. Returns False if the peer is gone."""
        peer = self._peers.get(name)
        if peer is None:
            return False
        try:
            peer.stream.send(message)
        except Unreachable:
            self._drop(name)
            return False
        if peer.stream.pending or name in self.clogged:
            self._note(name, peer)
        return True

    def tick(self, desks: ReceiverFactory, now: float) -> None:
        """Close stalled connections and those of old unauthenticated peers, and accept again after a pause."""
        for name, peer in list(self._unsettled.items()):
            if now - peer.heard_at >= BULK_STALL_S and not peer.stream.settle_for_less():
                self._lose(name, desks)
        late = [name for name, peer in self._unauthenticated.items() if now - peer.accepted_at >= BULK_STALL_S]
        for name in late:
            self._turn_away(name, desks)
        if self._deaf_until is not None and now >= self._deaf_until:
            self._listen_again()

    def next_deadline(self) -> float | None:
        """When `tick` and `arrivals` must be called, on the clock of their `now`; None: no deadline."""
        if self._buffered:
            return 0.0
        oldest = next(iter(self._unauthenticated.values()), None)
        deadlines = [peer.heard_at + BULK_STALL_S for peer in self._unsettled.values()]
        deadlines += [] if oldest is None else [oldest.accepted_at + BULK_STALL_S]
        deadlines += [] if self._deaf_until is None else [self._deaf_until]
        return min(deadlines, default=None)

    def close(self, farewell_s: float = 0.0) -> None:
        """Stop listening. Queued messages get up to `farewell_s` seconds to leave."""
        for listener in self._listeners.values():
            listener.close()
        deadline = time.monotonic() + farewell_s
        while self.clogged and (left := deadline - time.monotonic()) > 0:
            for fd, events in self._ready.poll(left):
                if events & ~_READ and (name := self._names.get(fd)) is not None:
                    self._flush(name)
        for name in list(self._peers):
            self._drop(name)
        self._ready.close()
        if self._spare >= 0:
            os.close(self._spare)

    # ------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket, desks: ReceiverFactory, now: float) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._refuse_one(listener):
                self._be_deaf(now)
            return  # the connection is gone, or there is no descriptor for it
        if len(self._unauthenticated) >= self._unauthenticated_max:
            self._turn_away(next(iter(self._unauthenticated)), desks)
        if len(self._peers) >= BULK_CONNECTIONS_MAX:
            self._lose(next(iter(self._peers)), desks)
        try:
            stream = self._accepted(connection)
        except OSError:  # the peer is gone already
            connection.close()
            return
        name = next(self._numbers).to_bytes(8, "big")
        self._names[stream.socket.fileno()] = name
        self._peers[name] = self._unauthenticated[name] = _Peer(stream, now)
        self._ready.register(stream.socket.fileno(), _READ)

    def _refuse_one(self, listener: socket.socket) -> bool:
        """Accept a connection with the spare descriptor and close it: otherwise the kernel would report it for ever.
        Returns whether there was a spare descriptor, and no other thread took it."""
        if self._spare >= 0:
            os.close(self._spare)
        try:
            listener.accept()[0].close()
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE)
        finally:
            self._spare = _spare()
        self.turned_away += 1
        return True

    def _be_deaf(self, now: float) -> None:
        for fd in self._listeners:
            self._ready.modify(fd, 0)
        self._deaf_until = now + DEAF_S

    def _listen_again(self) -> None:
        self._deaf_until = None
        self._spare = self._spare if self._spare >= 0 else _spare()
        for fd in self._listeners:
            self._ready.modify(fd, _READ)

    def _turn_away(self, name: bytes, desks: ReceiverFactory) -> None:
        self.turned_away += 1
        if self.turned_away == 1:
            _log.warning(
                "the bulk endpoint closed a connection that showed no valid ticket within %g s, or made room for later "
                "ones; another program connects here (this is logged once)",
                BULK_STALL_S,
            )
        self._lose(name, desks)

    def _serve(self, name: bytes, desks: ReceiverFactory, now: float) -> bool:
        """Send and receive on one connection. Returns whether a message is complete."""
        peer = self._peers[name]
        before = peer.stream.moved
        whole = False
        try:
            peer.stream.flush()
            if peer.deaf:
                peer.stream.discard()
            elif not peer.stream.pending:
                whole = peer.stream.receive(desks.desk(name))
        except Corruption as error:
            peer.deaf = True
            desks.spoiled(name, error)
        except Unreachable:
            self._lose(name, desks)
            return False
        if peer.stream.moved != before:
            peer.heard_at = now
            desks.heard(name)
            self._peers[name] = self._peers.pop(name)
        self._note(name, peer)
        if whole and name in self._unauthenticated and desks.knows(name):
            del self._unauthenticated[name]
        return whole

    def _flush(self, name: bytes) -> None:
        peer = self._peers[name]
        try:
            peer.stream.flush()
        except Unreachable:
            self._drop(name)
        else:
            self._note(name, peer)

    def _note(self, name: bytes, peer: _Peer) -> None:
        """Record whether this connection is clogged or unsettled, and poll it accordingly."""
        pending = peer.stream.pending
        (self.clogged.add if pending else self.clogged.discard)(name)
        if peer.settled:
            self._unsettled.pop(name, None)
        else:
            self._unsettled[name] = peer
        (self._buffered.add if peer.stream.buffered and not pending else self._buffered.discard)(name)
        wanted = _WRITE if pending else _READ
        if wanted != peer.wanted:
            peer.wanted = wanted
            self._ready.modify(peer.stream.socket.fileno(), wanted)

    def _lose(self, name: bytes, desks: ReceiverFactory) -> None:
        self._drop(name)
        desks.lost(name)

    def _drop(self, name: bytes) -> None:
        peer = self._peers.pop(name)
        self._unsettled.pop(name, None)
        self._unauthenticated.pop(name, None)
        self.clogged.discard(name)
        self._buffered.discard(name)
        del self._names[peer.stream.socket.fileno()]
        peer.stream.socket.close()  # epoll forgets a closed socket by itself


def _spare() -> int:
    """A descriptor to give up when no other is left; -1 if none is left now."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    place = "" if host == "*" else host.strip("[]")
    try:
        listener = socket.create_server((place, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"bulk port {port} of {host} is in use; take another, or 0 for any") from error
        raise UsageError(f"bulk port {port} of {host} cannot be listened at: {error.strerror}") from error
    listener.setblocking(False)
    return listener
