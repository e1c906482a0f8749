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
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE, SnapshotJobs
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.files import ArenaDirectory, RuntimeDirectory
from transferqueue.server.identity import ServerIdentity
from transferqueue.server.loop import Descriptor, Loop, ProcessExits
from transferqueue.server.node import Coordinator
from transferqueue.server.resume import resume_sessions
from transferqueue.server.sessions.authorization import Authorizer
from transferqueue.server.shards.bulk_endpoint import BulkEndpoint
from transferqueue.server.shards.own_memory import SHARD, OwnShardMemory
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.memory.backing import ArenaBacking
from transferqueue.transport import IpcAddress, TcpAddress, Wakeup
from transferqueue.transport.control.inproc import InprocServer
from transferqueue.transport.control.unix_socket import UnixServer
from transferqueue.transport.control.zeromq import ZmqServer
from transferqueue.transport.security.keyring import Keyring
from transferqueue.wire.home_coordinator import CoordinatorIndex


class ServerProcess:
    """Listens from the moment it is made, answers while `run` does. Leaves no file once `run` has returned.

    place: the socket, in a private directory. foundation: its memory, or what an earlier server left, closed with it,
    also if this fails. tcp: more
    addresses to listen at; any but loopback needs a keyring, and with one every tcp address asks for keys.
    plain_bytes: with keys too, columns cross to other machines as they are; only who was given a ticket over the control
    connection gets any, but whoever can listen to the network can read them.
    snapshots: the directory under which clients name snapshots; None: `SNAPSHOTS_VARIABLE`, else "snapshots" where it runs.
    index: which of the coordinators of its deployment it is.
    `AddressInUse` and `UsageError` as they say; then nothing is left behind.
    """

    def __init__(
        self,
        place: IpcAddress,
        foundation: ArenaDirectory | StateDirectory,
        tcp: Iterable[TcpAddress] = (),
        *,
        keyring: Keyring | None = None,
        plain_bytes: bool = False,
        snapshots: Path | None = None,
        index: CoordinatorIndex = CoordinatorIndex(),  # noqa: B008  (frozen)
    ) -> None:
        with ExitStack() as made:
            made.callback(foundation.close)
            self._foundation = foundation
            home = RuntimeDirectory(place)
            made.callback(home.close)
            self.address = str(place)
            local = UnixServer(place)
            made.callback(local.close, FAREWELL_S)
            port, self.tcp_addresses = _network(list(tcp), keyring, made)
            wakeup = Wakeup()
            made.callback(wakeup.close)
            hub = InprocServer(wakeup)
            made.callback(hub.close)
            deaths = ProcessExits()
            made.callback(deaths.close)
            self.inproc_address = hub.address
            if isinstance(foundation, StateDirectory):
                self.node = _resumed(foundation, home, deaths, Authorizer(keyring), index)
                self.loop = Loop(self.node, local, port, hub, wakeup, deaths, foundation.clock, together=True)
            else:
                self.node = _new(foundation, home, deaths, Authorizer(keyring), index)
                self.loop = Loop(self.node, local, port, hub, wakeup, deaths)
            if self.tcp_addresses:
                self._serve_bytes(made, None if plain_bytes else keyring)
            self._keep_snapshots(made, snapshots or Path(os.environ.get(SNAPSHOTS_VARIABLE) or "snapshots"), wakeup)
            self._files = made.pop_all()

    def _serve_bytes(self, made: ExitStack, keyring: Keyring | None) -> None:
        """The bulk endpoint, on the hosts of the tcp addresses. keyring: None: it asks for no keys."""
        shard = BulkEndpoint(
            ArenaBacking(self.node.memory.arena), self.node.tickets, keyring and Keyring(keyring.directory)
        )
        made.callback(shard.stop)
        self.node.bulk_port, self.node.bulk_plain = shard.listen(self.tcp_addresses), keyring is None
        shard.start()

    def _keep_snapshots(self, made: ExitStack, root: Path, wakeup: Wakeup) -> None:
        node = self.node
        node.snapshots = SnapshotJobs(
            root.absolute(), node.ledger, node.memory, wake=node.waiting.wake, stir=wakeup.set, index=node.index
        )
        made.callback(node.snapshots.stop)

    def run(self, woken_by: Descriptor | None = None) -> None:
        """Serve until `stop`; then close, and remove what does not outlive it. To be called once. woken_by: see `Loop.run`."""
        with self._files:
            self.loop.run(woken_by)
            if isinstance(self._foundation, StateDirectory):
                self._foundation.checkpoint()

    def stop(self) -> None:
        """Have `run` return soon. From any thread and from signals."""
        self.loop.stop()


def _network(places: list[TcpAddress], keyring: Keyring | None, made: ExitStack) -> tuple[ZmqServer | None, list[str]]:
    """Where other machines come to, if there is such a place, and its addresses."""
    if not places:
        return None, []
    port = ZmqServer(keyring)
    made.callback(port.close, FAREWELL_S)
    return port, [port.listen(place) for place in places]


def _new(
    arena: ArenaDirectory, home: RuntimeDirectory, deaths: ProcessExits, authorizer: Authorizer, index: CoordinatorIndex
) -> Coordinator:
    epoch = first_epoch()
    return Coordinator(
        Ledger(epoch=epoch),
        OwnShardMemory(arena.arena),
        _place(epoch, home),
        watcher=deaths,
        authorizer=authorizer,
        index=index,
    )


def _resumed(
    state: StateDirectory, home: RuntimeDirectory, deaths: ProcessExits, authorizer: Authorizer, index: CoordinatorIndex
) -> Coordinator:
    """A node that goes on from what an earlier server left."""
    index.check_kept(state.ledger.table_names, state.ledger.channel_names, f"state {state.path}")
    extents = [extent.id for extent in state.ledger.extents_of(SHARD)]
    memory = OwnShardMemory(state.arena.arena, state.allocator, len(extents))
    place = _place(state.ledger.epoch, home, state.clock())
    tickets = TicketIssuer(state.secret)
    node = Coordinator(
        state.ledger,
        memory,
        place,
        watcher=deaths,
        authorizer=authorizer,
        durability=state,
        tickets=tickets,
        index=index,
    )
    resume_sessions(node, state)
    tickets.go_on([one.number for one in node.sessions if one.remote], extents)
    return node


def first_epoch() -> int:
    """Names the first life of a server: larger than that of any earlier one at the same place."""
    return time.time_ns() // 1_000_000


def _place(epoch: int, home: RuntimeDirectory, started_at: float | None = None) -> ServerIdentity:
    return ServerIdentity(
        epoch=epoch,
        address=str(home.place),
        runtime=str(home.directory),
        version=metadata.version("asyncflow-transferqueue"),
        pid=os.getpid(),
        started_at=time.monotonic() if started_at is None else started_at,
        lock_directory=home.sessions,
    )
