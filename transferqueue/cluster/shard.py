"""A shard: a process that lends memory to a deployment, its own or a store's, and does with it what the coordinator says.

The law (docs/decisions/0022):

- It is a session like any other, whose Hello brings an arena. It knows no table and no row: it takes orders, carries them out
  one after the other, and says how far it is when it asks for the next (`TakeOrders`).
- It ends when it is told that nothing is left in it, when its session ends, or when it is stopped; what others had there
  is lost in the latter cases. When the coordinator is followed by its next life, the session goes on, and so does this.
- Clients that map its arena never speak to it; all others reach its bytes at its bulk endpoint, with tickets. Of one whose bytes
  lie in a store (`stores`) nobody maps any. It ends when something turns out to be gone there.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from typing import Final, Self

from transferqueue.client.session.connection import Connection
from transferqueue.client.session.session_lock import session_lock
from transferqueue.cluster.stores.open import kept_in
from transferqueue.errors import DeadlineExceeded, Disconnected, OutOfMemory, ProtocolError, UsageError
from transferqueue.limits import ARENA_BYTES_DEFAULT, TIMEOUT_S_DEFAULT
from transferqueue.server.files import served_arena
from transferqueue.server.shards.bulk_endpoint import BulkEndpoint as Endpoint
from transferqueue.server.shards.tickets import LiveExtents, TicketIssuer
from transferqueue.storage.memory.backing import ArenaBacking, Backing
from transferqueue.storage.memory.object_store import ObjectBacking
from transferqueue.transport import TcpAddress, dial, parse_address, this_host
from transferqueue.transport.control.zeromq import is_loopback
from transferqueue.transport.security.keys import ClientKeys
from transferqueue.transport.security.zap import AcceptAll
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.shard")
ORDERS_S: Final = 60.0
"""How long the coordinator may keep the question for orders."""


class ShardProcess:
    """A shard of the deployment at `address`, from construction on; `run` carries out its orders. Close it, or use ``with``.

    arena_bytes: most that it lends; None: as a server would. store: where its bytes lie, as `stores.open_store` has it; "": in shared
    memory of its own. keys: of role shard or admin, where the address asks for them.
    host: where other machines reach this one; None: the address from which this machine reaches the coordinator. Bytes are
    encrypted on their way, except over loopback. `Unreachable` if nothing answers within `timeout_s`, or what the coordinator
    refuses it with; then nothing is left.
    """

    def __init__(
        self,
        address: str,
        *,
        arena_bytes: int | None = None,
        store: str = "",
        host: str | None = None,
        keys: ClientKeys | None = None,
        label: str = "",
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        with ExitStack() as made:
            place = _host(address) if host is None else host
            self._backing: Final = _backed(made, store, place, arena_bytes)
            secret = secrets.token_bytes(32)
            self._tickets: Final = TicketIssuer(secret, LiveExtents(), LiveExtents())
            ring = None if is_loopback(place) else AcceptAll()
            endpoint = Endpoint(self._backing, self._tickets, ring)
            made.callback(endpoint.stop)
            port = endpoint.listen([f"tcp://{place}:0"])
            endpoint.start()
            offer = m.ShardOffer(
                path=self._backing.path,
                capacity=self._backing.capacity,
                endpoint=f"tcp://{place}:{port}",
                key=ring.server.public if ring else "",
                secret=secret,
            )
            self._connection: Final = Connection(dial(address, keys), address)
            if isinstance(self._backing, ObjectBacking):
                self._backing.on_lost = self._connection.close
            self._greet(made, address, offer, label, timeout_s)
            self.endpoint: Final = offer.endpoint
            """Where its bytes are reached."""
            self._made = made.pop_all()

    def _greet(self, made: ExitStack, address: str, offer: m.ShardOffer, label: str, timeout_s: float) -> None:
        client = secrets.token_bytes(16)
        lock = session_lock(address, client.hex())
        if lock is not None:
            made.callback(lock.release)
        hello = m.Hello(
            client=client,
            pid=os.getpid(),
            host=this_host(),
            lock=str(lock.path) if lock else "",
            version=metadata.version("asyncflow-transferqueue"),
            label=label,
            shard=offer,
        )
        made.callback(self._connection.close)
        self._connection.open(hello, timeout_s)

    def run(self) -> None:
        """Carry out orders until the shard is to end. Raises `Disconnected` if the session does before, `ShardLost` if bytes turn
        out to be gone from its store."""
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
                reply = self._connection.call(m.PollCommands(epoch, done, failed, wait_s=ORDERS_S))
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
        """End the session, and give the memory back. From any thread; `run` ends with `Disconnected`. Again: nothing."""
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def carry_out(order: m.Order, backing: Backing, tickets: TicketIssuer) -> bool:
    """Do what an order says; False if it could not be done."""
    match order:
        case m.AllocatePages():
            try:
                backing.ensure(order.offset, order.nbytes)
            except OutOfMemory as error:
                _log.warning("the shard cannot grow: %s", error)
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
    """What keeps the bytes; `made` closes it."""
    if store:
        return made.enter_context(kept_in(store, host, capacity or ARENA_BYTES_DEFAULT))
    home = served_arena(capacity)
    made.callback(home.close)
    return ArenaBacking(home.arena)


def _numbers(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}q", data)


def serve_shard(shard: ShardProcess, on_ready: Callable[[str], object]) -> None:
    """`run`, told where it is reached, and close whatever happens."""
    with shard:
        on_ready(shard.endpoint)
        shard.run()


def _host(address: str) -> str:
    """Where the coordinator's machine reaches this one: loopback for one on the same machine."""
    place = parse_address(address)
    if not isinstance(place, TcpAddress):
        return "127.0.0.1"
    bare = place.host.strip("[]")
    family = socket.AF_INET6 if place.host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((bare, place.port))  # sends nothing: the kernel says which address it would send from
            found = str(asked.getsockname()[0])
    except OSError as error:
        raise UsageError(f"this machine has no way to {address}: {error.strerror}; give --host") from error
    return f"[{found}]" if ":" in found else found
