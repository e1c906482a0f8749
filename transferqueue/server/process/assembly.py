"""A whole server put together: its files, its memory, its sockets, its node and its loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import FAREWELL_S
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE, Snapshots
from transferqueue.server.durability.state_directory import Durable
from transferqueue.server.files import ArenaHome, Home
from transferqueue.server.loop import Deaths, Descriptor, Loop
from transferqueue.server.node import Node, Place
from transferqueue.server.resume import resume
from transferqueue.server.sessions.authorization import Door
from transferqueue.server.shards.bulk_endpoint import Shard
from transferqueue.server.shards.own_memory import SHARD, Memory
from transferqueue.server.shards.tickets import Tickets
from transferqueue.storage.memory.backing import Mapped
from transferqueue.transport import IpcAddress, TcpAddress, Wakeup
from transferqueue.transport.control.inproc import Hub
from transferqueue.transport.control.unix_socket import LocalPort
from transferqueue.transport.control.zeromq import Port
from transferqueue.transport.security.keyring import Keyring
from transferqueue.wire.home_coordinator import Seat


class Server:
    """Listens from the moment it is made, answers while `run` does. Leaves no file once `run` has returned.

    place: the socket, in a private directory. foundation: its memory, or what an earlier server left, closed with it,
    also if this fails. tcp: more
    addresses to listen at; any but loopback needs a keyring, and with one every tcp address asks for keys.
    plain_bytes: with keys too, columns cross to other machines as they are; only who was given a ticket over the control
    connection gets any, but whoever can listen to the network can read them.
    snapshots: the directory under which clients name snapshots; None: `SNAPSHOTS_VARIABLE`, else "snapshots" where it runs.
    seat: which of the coordinators of its deployment it is.
    `AddressInUse` and `UsageError` as they say; then nothing is left behind.
    """

    def __init__(
        self,
        place: IpcAddress,
        foundation: ArenaHome | Durable,
        tcp: Iterable[TcpAddress] = (),
        *,
        keyring: Keyring | None = None,
        plain_bytes: bool = False,
        snapshots: Path | None = None,
        seat: Seat = Seat(),  # noqa: B008  (frozen)
    ) -> None:
        with ExitStack() as made:
            made.callback(foundation.close)
            self._foundation = foundation
            home = Home(place)
            made.callback(home.close)
            self.address = str(place)
            local = LocalPort(place)
            made.callback(local.close, FAREWELL_S)
            port, self.tcp_addresses = _network(list(tcp), keyring, made)
            wakeup = Wakeup()
            made.callback(wakeup.close)
            hub = Hub(wakeup)
            made.callback(hub.close)
            deaths = Deaths()
            made.callback(deaths.close)
            self.inproc_address = hub.address
            if isinstance(foundation, Durable):
                self.node = _resumed(foundation, home, deaths, Door(keyring), seat)
                self.loop = Loop(self.node, local, port, hub, wakeup, deaths, foundation.clock, together=True)
            else:
                self.node = _new(foundation, home, deaths, Door(keyring), seat)
                self.loop = Loop(self.node, local, port, hub, wakeup, deaths)
            if self.tcp_addresses:
                self._serve_bytes(made, None if plain_bytes else keyring)
            self._keep_snapshots(made, snapshots or Path(os.environ.get(SNAPSHOTS_VARIABLE) or "snapshots"), wakeup)
            self._files = made.pop_all()

    def _serve_bytes(self, made: ExitStack, keyring: Keyring | None) -> None:
        """The bulk endpoint, on the hosts of the tcp addresses. keyring: None: it asks for no keys."""
        shard = Shard(Mapped(self.node.memory.arena), self.node.tickets, keyring and Keyring(keyring.directory))
        made.callback(shard.stop)
        self.node.bulk_port, self.node.bulk_plain = shard.listen(self.tcp_addresses), keyring is None
        shard.start()

    def _keep_snapshots(self, made: ExitStack, root: Path, wakeup: Wakeup) -> None:
        node = self.node
        node.snapshots = Snapshots(
            root.absolute(), node.ledger, node.memory, wake=node.parking.wake, stir=wakeup.set, seat=node.seat
        )
        made.callback(node.snapshots.stop)

    def run(self, woken_by: Descriptor | None = None) -> None:
        """Serve until `stop`; then close, and remove what does not outlive it. To be called once. woken_by: see `Loop.run`."""
        with self._files:
            self.loop.run(woken_by)
            if isinstance(self._foundation, Durable):
                self._foundation.checkpoint()

    def stop(self) -> None:
        """Have `run` return soon. From any thread and from signals."""
        self.loop.stop()


def _network(places: list[TcpAddress], keyring: Keyring | None, made: ExitStack) -> tuple[Port | None, list[str]]:
    """Where other machines come to, if there is such a place, and its addresses."""
    if not places:
        return None, []
    port = Port(keyring)
    made.callback(port.close, FAREWELL_S)
    return port, [port.listen(place) for place in places]


def _new(arena: ArenaHome, home: Home, deaths: Deaths, door: Door, seat: Seat) -> Node:
    epoch = first_epoch()
    return Node(Ledger(epoch=epoch), Memory(arena.arena), _place(epoch, home), watcher=deaths, door=door, seat=seat)


def _resumed(state: Durable, home: Home, deaths: Deaths, door: Door, seat: Seat) -> Node:
    """A node that goes on from what an earlier server left."""
    kept = state.ledger.state
    seat.check_kept(kept.tables, kept.channels, f"state {state.path}")
    extents = [one.id for one in state.ledger.state.core.blocks.extents.values() if one.shard == SHARD]
    memory = Memory(state.arena.arena, state.allocator, len(extents))
    place = _place(state.ledger.epoch, home, state.clock())
    tickets = Tickets(state.secret)
    node = Node(state.ledger, memory, place, watcher=deaths, door=door, durability=state, tickets=tickets, seat=seat)
    resume(node, state)
    tickets.go_on([one.number for one in node.sessions if one.remote], extents)
    return node


def first_epoch() -> int:
    """Names the first life of a server: larger than that of any earlier one at the same place."""
    return time.time_ns() // 1_000_000


def _place(epoch: int, home: Home, started_at: float | None = None) -> Place:
    return Place(
        epoch=epoch,
        address=str(home.place),
        runtime=str(home.directory),
        version=metadata.version("asyncflow-transferqueue"),
        pid=os.getpid(),
        started_at=time.monotonic() if started_at is None else started_at,
        swept=home.sessions,
    )
