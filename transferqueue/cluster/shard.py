"""A shard process: it adds memory to a deployment, its own or that of another store, and executes the coordinator's
commands.

See docs/decisions/shards.md.

- A shard is a session whose Hello offers an arena. It knows no table and no row. It polls for commands, executes them
  in order, and reports its progress with the next poll (`PollCommands`).
- It ends when the coordinator says that it is empty, when its session ends, or when it is stopped. In the last two
  cases the bytes in it are lost. When the coordinator restarts, the session is resumed, and the shard goes on.
- A second thread copies blocks that lost a copy elsewhere, as the coordinator orders (`copier`).
- Clients that map its arena send it nothing. Other clients read and write at its bulk endpoint, with tickets. If its
  bytes lie in another store (`stores`), no client maps them, and the shard ends when the store has lost bytes.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Self

from transferqueue.client.session.connection import Connection
from transferqueue.client.session.session_lock import session_lock
from transferqueue.cluster.copier import Copier, CopyMemories
from transferqueue.cluster.stores import kept_in
from transferqueue.errors import DeadlineExceeded, Disconnected, OutOfMemory, ProtocolError, UsageError
from transferqueue.limits import ARENA_BYTES_DEFAULT, TIMEOUT_S_DEFAULT, check_text
from transferqueue.server.runtime_directory import served_arena
from transferqueue.server.shards.bulk_endpoint import BulkEndpoint as Endpoint
from transferqueue.server.shards.tickets import LiveExtents, TicketIssuer
from transferqueue.storage.memory.backing import ArenaBacking, Backing
from transferqueue.storage.memory.object_store import ObjectBacking
from transferqueue.transport import TcpAddress, dial, parse_address, this_host
from transferqueue.transport.bulk.carriers import chosen_carrier
from transferqueue.transport.bulk.tls import ServerCertificate
from transferqueue.transport.control.zeromq import is_loopback
from transferqueue.transport.security.keys import ClientKeys
from transferqueue.wire import messages as m
from transferqueue.wire.versions import VERSION

_log: Final = logging.getLogger("transferqueue.shard")
ORDERS_S: Final = 10.0
"""One poll for commands waits at most this long at the coordinator, so the coordinator's figures of the shard's
transfers are no older."""


class ShardProcess:
    """A shard of the deployment at `address`. It joins when it is constructed; `run` executes the coordinator's
    commands. Close it, or use ``with``.

    Bytes are encrypted on the network, except over loopback, or where a carrier moves them. After an error nothing is
    left. Also raises the coordinator's refusal.

    Args:
        address: of the deployment.
        arena_bytes: the most bytes that it offers; None: as many as a server would.
        store: the address of another store for its bytes, see `cluster.stores.open_store`; "": shared memory.
        keys: of role shard or admin, if the address needs keys.
        host: this machine's address as other machines see it; None: the address from which this machine reaches the
            coordinator.
        carrier: of columns, see `transport.bulk.carriers.chosen_carrier`; None: the environment decides.
        timeout_s: seconds to wait for the coordinator's answer, then `Unreachable`.
    """

    def __init__(
        self,
        address: str,
        *,
        arena_bytes: int | None = None,
        store: str = "",
        host: str | None = None,
        carrier: str | None = None,
        keys: ClientKeys | None = None,
        label: str = "",
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        check_text("label", label)
        with ExitStack() as made:
            place = _host(address) if host is None else host
            chosen = chosen_carrier(carrier)
            if chosen is not None and store:
                raise UsageError(
                    f"bytes={str(chosen)!r} with store {store!r} refused: bytes in another store are no memory of this "
                    "process; add the shard with --bytes stream"
                )
            self._backing: Final = _backed(made, store, place, arena_bytes)
            secret = secrets.token_bytes(32)
            self._tickets: Final = TicketIssuer(secret, LiveExtents(), LiveExtents())
            certificate = None if chosen is not None or is_loopback(place) else ServerCertificate()
            beside = chosen.open_shard(self._backing) if chosen is not None else None
            endpoint = Endpoint(self._backing, self._tickets, certificate, beside)
            made.callback(endpoint.stop)
            self._bulk: Final = endpoint
            port = endpoint.listen([f"tcp://{place}:0"])
            endpoint.start()
            offer = m.ShardOffer(
                path=self._backing.path,
                capacity=self._backing.capacity,
                endpoint=f"tcp://{place}:{port}",
                certificate=certificate.fingerprint if certificate else "",
                secret=secret,
            )
            self._connection: Final = Connection(dial(address, keys), address)
            memories = CopyMemories(address, self._connection, self._backing)
            self._copier: Final = Copier(
                self._connection,
                memories,
                lambda: endpoint.transfers,
                one_by_one=isinstance(self._backing, ObjectBacking),
            )
            if isinstance(self._backing, ObjectBacking):
                self._backing.on_lost = self._connection.close
            self._greet(made, address, offer, label, timeout_s, memories)
            self.endpoint: Final = offer.endpoint
            """The address of its bulk endpoint."""
            self._made = made.pop_all()

    def _greet(
        self,
        made: ExitStack,
        address: str,
        offer: m.ShardOffer,
        label: str,
        timeout_s: float,
        memories: CopyMemories,
    ) -> None:
        client = secrets.token_bytes(16)
        lock = session_lock(address, client.hex())
        if lock is not None:
            made.callback(lock.release)
        hello = m.Hello(
            client=client,
            pid=os.getpid(),
            host=this_host(),
            lock=str(lock.path) if lock else "",
            version=VERSION,
            label=label,
            shard=offer,
        )
        made.callback(self._copier.join)  # after the connection is closed, and before the lock is free
        made.callback(self._connection.close)
        made.callback(self._copier.stop)
        self._connection.on_welcome(memories.greeted)
        memories.greeted(self._connection.open(hello, timeout_s))

    def run(self) -> None:
        """Execute commands until the coordinator ends the shard. `Disconnected` if the session ends before, `ShardLost`
        if the store has lost bytes."""
        self._copier.start()
        try:
            self._run()
        except Disconnected as error:
            if isinstance(self._backing, ObjectBacking) and self._backing.lost is not None:
                raise self._backing.lost from error
            raise

    def _run(self) -> None:
        epoch, done = 0, 0
        failed: list[int] = []
        while True:
            try:
                sent, received = self._bulk.sent_bytes, self._bulk.received_bytes
                carried = [(counts["stream"], counts["one_sided"]) for counts in (sent, received)]
                poll = m.PollCommands(epoch, done, failed, ORDERS_S, *carried)
                reply = self._connection.call(poll)
            except DeadlineExceeded:
                continue
            if not isinstance(reply, m.ShardCommands):
                raise ProtocolError(f"TakeOrders was answered with {type(reply).__name__}")
            epoch, done, failed = reply.epoch, reply.first + len(reply.orders) - 1, []
            for number, order in enumerate(reply.orders, reply.first):
                if isinstance(order, m.ShutDownShard):
                    return
                if not carry_out(order, self._backing, self._tickets):
                    failed.append(number)

    def close(self) -> None:
        """End the session and free the memory. From any thread; `run` then raises `Disconnected`. A second call does
        nothing."""
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def carry_out(order: m.Order, backing: Backing, tickets: TicketIssuer) -> bool:
    """Execute one command. Returns False if that failed for lack of memory."""
    match order:
        case m.AllocatePages():
            try:
                backing.ensure(order.offset, order.nbytes)
            except OutOfMemory as error:
                _log.warning("the shard cannot give its arena more pages: %s", error)
                return False
        case m.FreePages():
            backing.punch(order.offset, order.nbytes)
        case m.Revoke():
            tickets.revoke(order.extent)
            backing.forget(order.extent)
        case m.CloseTransfers():
            tickets.close(order.ended)
        case m.LiveSet():
            extents = _numbers(order.extents)
            tickets.keep_live(order.extents_to, extents, order.sessions_to, _numbers(order.sessions))
            backing.forget_others(order.extents_to, frozenset(extents))
    return True


def _backed(made: ExitStack, store: str, host: str, capacity: int | None) -> Backing:
    """The backing of the shard; `made` closes it."""
    if store:
        return made.enter_context(kept_in(store, host, capacity or ARENA_BYTES_DEFAULT))
    home = served_arena(capacity)
    made.callback(home.close)
    return ArenaBacking(home.arena)


def _numbers(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}q", data)


def serve_shard(shard: ShardProcess, on_ready: Callable[[str], object]) -> None:
    """Call `on_ready` with the address of the shard's bulk endpoint, run the shard, and close it in any case."""
    with shard:
        on_ready(shard.endpoint)
        shard.run()


def _host(address: str) -> str:
    """The address of this machine as the coordinator's machine sees it; loopback if they are the same."""
    place = parse_address(address)
    if not isinstance(place, TcpAddress):
        return "127.0.0.1"
    bare = place.host.strip("[]")
    family = socket.AF_INET6 if place.host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((bare, place.port))  # sends nothing: the kernel returns the address that it would send from
            host = str(asked.getsockname()[0])
    except OSError as error:
        raise UsageError(f"this machine has no route to {address}: {error.strerror}; give --host") from error
    return f"[{host}]" if ":" in host else host
