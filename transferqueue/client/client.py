"""A session with one coordinator, shared by all handles of its queue, and how it is opened.

A handle (queue, table, batch, reservation, weights) holds a `ClientSession`; when the last handle is collected, or
the interpreter exits, the connection is closed.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Final, Literal, Protocol, get_args

import msgspec

from transferqueue.client.memory.carrier import MemoryCarrier, SessionCarrier
from transferqueue.client.memory.grants import WriteGrants
from transferqueue.client.memory.mapped import MappedMemory
from transferqueue.client.memory.published_contents import PublishedContents
from transferqueue.client.memory.remote import RemoteMemory
from transferqueue.client.memory.shard_clients import ShardClients, ShardLivenessCheck
from transferqueue.client.memory.verify import Verifier
from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.connection import Connection
from transferqueue.client.session.session_lock import SessionLock, session_lock
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import Unreachable, UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.errors.text import shown
from transferqueue.transport import TcpAddress, dial, parse_address, this_host
from transferqueue.transport.bulk.carriers import chosen_carrier
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.transport.security.keys import ClientKeys
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.versions import VERSION

Data = Literal["auto", "remote"]
"""``auto``: map memory where possible; ``remote``: send all bytes over the network (for tests and measurements)."""


class OwnedServer(Protocol):
    """A server that ends with its client."""

    @property
    def address(self) -> str:
        """Where other processes reach it."""

    @property
    def inproc_address(self) -> str:
        """Where this process reaches it."""

    def stop(self) -> None:
        """End it. A second call does nothing."""


class ClientSession:
    """One session, shared by its handles: its connection, memory, write grants, and known tables.

    Args:
        address: where other processes connect.
        connection: to the coordinator.
        memory: of the coordinator's own shard.
        server: embedded server that ends with this session; None: there is none.
        dial: connects to a remote shard that is not mapped; default None: there are none.
        arena_bytes: size of the coordinator's own arena.
        seat: the number of this coordinator among those of its deployment.
        checksums: whether the server wants the checksum of each block; default False.
    """

    def __init__(
        self,
        address: str,
        connection: Connection,
        memory: MappedMemory | RemoteMemory,
        server: OwnedServer | None,
        *,
        dial: Callable[[m.ShardEndpoint], RemoteMemory] | None = None,
        arena_bytes: int,
        seat: CoordinatorIndex = CoordinatorIndex(),  # noqa: B008  (frozen)
        checksums: bool = False,
    ) -> None:
        self.address: Final = address
        self.connection: Final = connection
        self.clock: Final = connection.clock
        self.seat: Final = seat
        self.checksums: Final = checksums
        """Whether the server wants the checksum of each block."""
        self.memory: Final = memory
        self.shards: Final = ShardClients(memory, dial or _no_way, connection.unpin)
        self.grants: Final = WriteGrants(connection.post, arena_bytes)
        self.tables: Final[dict[str, TableInfo]] = {}
        self.published: Final[dict[str, PublishedContents]] = {}
        """What this session published last, by weight channel."""
        self.verifier: Verifier | None = None
        self.embedded_at: float | None = None
        """When the server was embedded though no caller asked for that: no other server was named or found."""
        connection.on_welcome(self.shards.welcomed)
        self._end: Final = weakref.finalize(self, _close, os.getpid(), connection, self.shards, server)

    def verify(self) -> None:
        """From now on compare blocks with their checksums before a caller gets them. `UsageError` if they have none, or
        cross a network."""
        if not self.checksums:
            raise UsageError(
                f"verify=True compares blocks with their checksums, and those of the server at {self.address} have "
                "none: it does not keep rows on a disk; connect without it, or serve with --durability disk"
            )
        if not isinstance(self.memory, MappedMemory):
            raise UsageError(
                "verify=True compares blocks in mapped memory, and this client cannot map that of "
                f"{self.address}; connect without it: bytes that cross a network are compared on the way"
            )
        self.verifier = Verifier()

    def table_info(self, terms: m.TableTerms) -> TableInfo:
        """The cached description of a table, updated with the terms that just came."""
        table = self.tables.setdefault(terms.name, TableInfo(terms))
        table.update_from(terms)
        return table

    @property
    def closed(self) -> bool:
        """Whether the session is over: it was closed, or lost for good."""
        return not self._end.alive or self.connection.over is not None

    def close(self) -> None:
        """Say goodbye to the server, end all waits, stop the thread. A second call, or one in a forked child, does
        nothing."""
        self.published.clear()
        self._end()


def open_client(
    address: str,
    timeout_s: float,
    label: str,
    server: OwnedServer | None = None,
    keys: ClientKeys | None = None,
    data: Data = "auto",
    known_as: str = "",
    asked_s: float | None = None,
) -> ClientSession:
    """Open a session with the server at `address`, waiting up to `timeout_s` for its answer.

    Args:
        address: of the server.
        timeout_s: seconds to wait.
        label: name of this client.
        server: embedded server that the session owns; default None.
        keys: to show there; default None: none.
        data: ``"remote"``: send bytes over the network even if the memory could be mapped; default ``"auto"``.
        known_as: the address that others connect to, such as a name that leads to `address`; default "": `address`.
        asked_s: as of `Connection.open`; default None.
    """
    _check_data(address, data)
    deadline = Deadline(time.monotonic, timeout_s)
    client = secrets.token_bytes(16)
    lock = session_lock(address, client.hex())
    try:
        hello = m.Hello(
            client=client,
            pid=os.getpid(),
            host=this_host(),
            lock=str(lock.path) if lock else "",
            version=VERSION,
            label=label,
            remote=data == "remote",
        )
        connection = Connection(dial(address, keys), address)
        welcome = connection.open(hello, timeout_s, asked_s)
    except BaseException:
        if lock:
            lock.give_up()
        raise
    with OnFailure(connection.close):
        chosen = chosen_carrier()
        carrier: SessionCarrier | None = chosen.open_client() if chosen is not None else None
        memory = _memory(address, hello, welcome, connection, lock, deadline, carrier)
    return ClientSession(
        server.address if server else known_as or address,
        connection,
        memory,
        server,
        dial=lambda at: remote_shard_memory(at, welcome, connection, carrier),
        arena_bytes=welcome.arena_bytes,
        seat=welcome.seat,
        checksums=welcome.checksums,
    )


def _check_data(address: str, data: Data) -> None:
    if data not in get_args(Data):
        raise UsageError(f"data={shown(data)} is none of {', '.join(get_args(Data))}")
    if data == "remote" and not isinstance(parse_address(address), TcpAddress):
        raise UsageError(f'data="remote" needs a tcp address; the memory of {address} is always mapped: leave data out')


def _memory(
    address: str,
    hello: m.Hello,
    welcome: m.Welcome,
    connection: Connection,
    lock: SessionLock | None,
    deadline: Deadline,
    carrier: SessionCarrier | None,
) -> MappedMemory | RemoteMemory:
    """The server's memory: mapped if this process can open its files, else through its bulk endpoint."""
    place = parse_address(address)
    if not isinstance(place, TcpAddress) or (all(map(_can_map, welcome.arenas.values())) and welcome.arenas):
        return MappedMemory(welcome.arenas, welcome.arena_bytes, connection.unpin, lock)
    if welcome.arenas:  # the server sees this process, but this process not its files
        welcome = connection.greet_again(msgspec.structs.replace(hello, remote=True), deadline)
    return remote_memory(place, welcome, connection, lock.release if lock else lambda: None, carrier)


def remote_memory(
    place: TcpAddress,
    welcome: m.Welcome,
    connection: Connection,
    on_close: Callable[[], object] = lambda: None,
    carrier: SessionCarrier | None = None,
) -> RemoteMemory:
    """The coordinator's own memory, over the bulk endpoint of its host.

    Args:
        place: the coordinator's address.
        welcome: its greeting.
        connection: of the session.
        on_close: as of `RemoteMemory`.
        carrier: moves the bytes instead of the stream; default None.
    """
    return RemoteMemory(
        lambda welcome: BulkClient(place.host, welcome.bulk_port, welcome.epoch, welcome.bulk_certificate),
        welcome,
        unpin=_unpinned_by_shards,
        over=lambda: connection.over,
        on_close=on_close,
        carrier=_carrier_to(carrier, encrypted=bool(welcome.bulk_certificate)),
    )


def remote_shard_memory(
    at: m.ShardEndpoint,
    welcome: m.Welcome,
    connection: Connection,
    carrier: SessionCarrier | None = None,
) -> RemoteMemory:
    """The memory of a remote shard."""
    place = parse_address(at.endpoint)
    if not isinstance(place, TcpAddress):
        raise Unreachable(f"shard {at.number} says that it is reached at {at.endpoint!r}, which is no tcp address")
    return RemoteMemory(
        lambda welcome: BulkClient(place.host, place.port, welcome.epoch, at.certificate),
        msgspec.structs.replace(welcome, bulk_port=place.port),
        unpin=_unpinned_by_shards,
        over=ShardLivenessCheck(connection, at.number).over,
        on_close=lambda: None,
        carrier=_carrier_to(carrier, encrypted=bool(at.certificate)),
    )


def _unpinned_by_shards(_: list[int]) -> None:
    """Do nothing: `ShardClients` returns the pins of received blocks."""


def _carrier_to(carrier: SessionCarrier | None, *, encrypted: bool) -> MemoryCarrier | None:
    """The carrier to one more shard. None: its columns cross over streams, as they must where they are encrypted."""
    return None if carrier is None or encrypted else carrier.memory()


def _can_map(path: str) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _no_way(at: m.ShardEndpoint) -> RemoteMemory:
    raise Unreachable(f"shard {at.number} is not one that this client can reach")


def _close(pid: int, connection: Connection, shards: ShardClients, server: OwnedServer | None) -> None:
    if os.getpid() != pid:  # a forked child: all of this is its parent's
        return
    shards.close()  # first, so that the lock is free, if no view is left, when the server hears the goodbye
    connection.close()
    if server is not None:
        server.stop()
