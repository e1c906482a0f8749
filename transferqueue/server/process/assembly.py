"""Builds a whole server from its parts: files, memory, sockets, coordinator and loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from transferqueue.errors import UsageError
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.tasks.selectors import SELECTORS
from transferqueue.limits import FAREWELL_S
from transferqueue.server.coordinator import Coordinator
from transferqueue.server.memory.own_memory import SHARD, OwnShardMemory
from transferqueue.server.process.loop import Loop, ProcessExits
from transferqueue.server.process.resume import resume_sessions
from transferqueue.server.runtime_directory import ArenaDirectory, RuntimeDirectory
from transferqueue.server.sessions.authorization import Authorizer
from transferqueue.server.state import ServerIdentity
from transferqueue.storage.memory.backing import ArenaBacking
from transferqueue.transport import IpcAddress, TcpAddress, Wakeup
from transferqueue.transport.bulk.carriers import Carrier
from transferqueue.transport.control.inproc import InprocServer
from transferqueue.transport.control.unix_socket import Descriptor, UnixServer
from transferqueue.transport.control.zeromq import ZmqServer
from transferqueue.transport.security.keyring import Keyring
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.versions import VERSION

if TYPE_CHECKING:
    from transferqueue.server.durability.state_directory import StateDirectory
    from transferqueue.server.parts import ColdStore
    from transferqueue.server.row_record.part import RowRecords
    from transferqueue.server.shards.block_fetches import BlockFetches
    from transferqueue.server.shards.part import Shards
    from transferqueue.server.spill.spill_file import SpillPolicy

_SNAPSHOTS: Final = "transferqueue.server.durability"
_SHARDS: Final = "transferqueue.server.shards"
_RECORDS: Final = "transferqueue.server.row_record"
"""The parts that every server has, if they are installed."""


class ServerProcess:
    """A server: listens from the moment it is made, answers while `run` runs, and has removed its files once `run`
    returns.

    Args:
        address: of the socket file, in a private directory.
        storage: its memory, or the state of an earlier server. The server closes it, also if the constructor fails.
        tcp: more addresses to listen at. Any but loopback needs a keyring.
        keyring: every tcp address demands its keys; None: no keys.
        plain_bytes: columns travel unencrypted even with keys. Only a client with a ticket, given over the encrypted
            control connection, gets any, but a listener on the network can read them.
        carrier: may move columns instead of the stream.
        snapshots: the directory of all snapshots; None: `SNAPSHOTS_VARIABLE`, else "snapshots" in the working
            directory.
        records: the directory under which tables record rows; None: they may name any directory of this user.
        index: of this coordinator in its deployment.
        spill: cold blocks go there when the arena fills; None: they stay in memory.

    Raises:
        AddressInUse: another server has the address. No file is left.
        UsageError: an argument cannot be used; a carrier must work here, and moves neither encrypted columns nor a
            file on disk. No file is left.
    """

    def __init__(
        self,
        address: IpcAddress,
        storage: ArenaDirectory | StateDirectory,
        tcp: Iterable[TcpAddress] = (),
        *,
        keyring: Keyring | None = None,
        plain_bytes: bool = False,
        carrier: Carrier | None = None,
        snapshots: Path | None = None,
        records: Path | None = None,
        index: CoordinatorIndex = CoordinatorIndex(),  # noqa: B008  (frozen)
        spill: SpillPolicy | None = None,
    ) -> None:
        with ExitStack() as made:
            made.callback(storage.close)
            self._storage = storage
            directory = RuntimeDirectory(address)
            made.callback(directory.close)
            self.address = str(address)
            local = UnixServer(address)
            made.callback(local.close, FAREWELL_S)
            port, self.tcp_addresses = _network(list(tcp), keyring, made)
            wakeup = Wakeup()
            made.callback(wakeup.close)
            hub = InprocServer(wakeup)
            made.callback(hub.close)
            exits = ProcessExits()
            made.callback(exits.close)
            self.inproc_address = hub.address
            if isinstance(storage, ArenaDirectory):
                self.coordinator = _new(storage, directory, exits, Authorizer(keyring), index)
                clock, batch, secret = time.monotonic, False, None
            else:
                self.coordinator = _continued(storage, directory, exits, Authorizer(keyring), index)
                clock, batch, secret = storage.clock, True, storage.secret
            self.loop = Loop(self.coordinator, local, port, hub, wakeup, exits, clock, batch=batch)
            remote = None if find_spec(_SHARDS) is None else self._reach_shards(secret)
            if not isinstance(storage, ArenaDirectory):
                resume_sessions(self.coordinator, storage)
            if self.tcp_addresses and remote is not None:
                self._serve_bytes(made, remote, carrier, encrypted=keyring is not None and not plain_bytes)
            cold = None if spill is None else self._spill(made, spill, wakeup)
            if find_spec(_SNAPSHOTS) is not None:
                fetches = None if remote is None else remote.fetches
                self._keep_snapshots(made, fetches, cold, snapshots, wakeup)
            self._records = None
            if find_spec(_RECORDS) is not None:
                fetches = None if remote is None else remote.record_fetches
                self._records = self._record_rows(records, wakeup, cold, fetches)
                self._records.resume(self.loop.now)
            self._clock = clock
            self._files = made.pop_all()

    def _reach_shards(self, secret: bytes | None) -> Shards:
        from transferqueue.server.shards.part import Shards
        from transferqueue.server.shards.tickets import TicketIssuer

        coordinator = self.coordinator
        remote = Shards(
            coordinator.ledger,
            coordinator.lending,
            coordinator.sessions,
            coordinator.waiting.wake,
            TicketIssuer(secret),
        )
        coordinator.attach(remote)
        return remote

    def _serve_bytes(self, made: ExitStack, remote: Shards, carrier: Carrier | None, *, encrypted: bool) -> None:
        """Start the bulk endpoint on the hosts of the tcp addresses."""
        from transferqueue.server.shards.bulk_endpoint import BulkEndpoint

        backing = ArenaBacking(self.coordinator.memory.arena)
        if carrier is not None:
            _check_carrier(carrier, self._storage, encrypted=encrypted)
        beside = carrier.open_shard(backing) if carrier is not None else None
        certificate = None
        if encrypted:
            from transferqueue.transport.bulk.tls import ServerCertificate

            certificate = ServerCertificate()
            remote.bulk_certificate = certificate.fingerprint
        shard = BulkEndpoint(backing, remote.tickets, certificate, beside)
        made.callback(shard.stop)
        remote.bulk_sent = lambda: shard.sent_bytes
        remote.bulk_received = lambda: shard.received_bytes
        remote.bulk_port = shard.listen(self.tcp_addresses)
        shard.start()

    def _keep_snapshots(
        self,
        made: ExitStack,
        fetches: BlockFetches | None,
        cold: ColdStore | None,
        root: Path | None,
        wakeup: Wakeup,
    ) -> None:
        from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE, SnapshotJobs

        root = root or Path(os.environ.get(SNAPSHOTS_VARIABLE) or "snapshots")
        coordinator = self.coordinator
        jobs = SnapshotJobs(
            root.absolute(),
            coordinator.ledger,
            coordinator.lending,
            fetches,
            cold,
            wake=coordinator.waiting.wake,
            stir=wakeup.set,
            index=coordinator.index,
            check_table=coordinator.parts.check_table,
        )
        made.callback(jobs.stop)
        coordinator.attach(jobs)

    def _record_rows(
        self, root: Path | None, wakeup: Wakeup, cold: ColdStore | None, fetches: BlockFetches | None
    ) -> RowRecords:
        from transferqueue.server.row_record.part import RowRecords
        from transferqueue.server.row_record.writer import ThreadWriter

        coordinator = self.coordinator
        records = RowRecords(
            root,
            coordinator.ledger,
            coordinator.lending,
            ThreadWriter(coordinator.memory, wakeup.set, cold),
            short=coordinator.parts.short_tables,
            wake=coordinator.waiting.wake,
            refuse=coordinator.refuse_work,
            commit=coordinator.commit,
            cold=cold,
            fetches=fetches,
        )
        coordinator.attach(records)
        return records

    def _spill(self, made: ExitStack, policy: SpillPolicy, wakeup: Wakeup) -> ColdStore:
        from transferqueue.server.spill.spill_file import SpillFile, mapped
        from transferqueue.server.spill.spilling import Spilling

        if not isinstance(self._storage, ArenaDirectory):
            raise UsageError(
                f"spill directory {policy.directory} refused: spilled blocks end with the process, and the rows of "
                f"{self._storage.path} do not; leave --spill-dir out (at --durability disk the arena is a file on that "
                "disk, and may be larger than memory), or serve with --durability memory"
            )
        coordinator = self.coordinator
        memory = coordinator.memory
        space = SpillFile(
            policy.directory, policy.nbytes, lambda: mapped(memory.arena.path, memory.arena.capacity), wakeup.set
        )
        made.callback(space.stop)
        spilling = Spilling(coordinator.ledger, memory, space, policy.nbytes, coordinator.waiting.wake)
        coordinator.attach(spilling)
        return spilling

    def run(self, woken_by: Descriptor | None = None) -> None:
        """Serve until `stop`, then close everything and remove the files that do not outlive the server. Call it once.
        `woken_by` is as in `Loop.run`."""
        with self._files:
            self.loop.run(woken_by)
            if self._records is not None:
                self._records.finish(self.loop.now, self._clock)
            if not isinstance(self._storage, ArenaDirectory):
                self._storage.checkpoint()

    def stop(self) -> None:
        """Have `run` return soon. May be called from any thread and from a signal handler."""
        self.loop.stop()


def _check_carrier(carrier: Carrier, storage: ArenaDirectory | StateDirectory, *, encrypted: bool) -> None:
    if encrypted:
        raise UsageError(
            f"bytes={str(carrier)!r} with keys refused: a carrier does not encrypt the bytes that it moves; add "
            "--plain-bytes on a trusted network, or serve with --bytes stream"
        )
    if not isinstance(storage, ArenaDirectory) and storage.checksums:
        raise UsageError(
            f"bytes={str(carrier)!r} refused: the rows lie in {storage.path}, and devices register memory, not files "
            "of a disk; serve with --durability process, or --bytes stream"
        )


def _network(
    addresses: list[TcpAddress], keyring: Keyring | None, made: ExitStack
) -> tuple[ZmqServer | None, list[str]]:
    """The tcp port and its addresses; None without addresses."""
    if not addresses:
        return None, []
    port = ZmqServer(keyring)
    made.callback(port.close, FAREWELL_S)
    return port, [port.listen(address) for address in addresses]


def _new(
    arena: ArenaDirectory,
    directory: RuntimeDirectory,
    exits: ProcessExits,
    authorizer: Authorizer,
    index: CoordinatorIndex,
) -> Coordinator:
    epoch = first_epoch()
    return Coordinator(
        Ledger(epoch=epoch, selectors=SELECTORS.found()),
        OwnShardMemory(arena.arena),
        _identity(epoch, directory),
        watcher=exits,
        authorizer=authorizer,
        index=index,
    )


def _continued(
    state: StateDirectory,
    directory: RuntimeDirectory,
    exits: ProcessExits,
    authorizer: Authorizer,
    index: CoordinatorIndex,
) -> Coordinator:
    """A coordinator that continues from the state of an earlier server."""
    index.check_kept(state.ledger.table_names, state.ledger.channel_names, f"state {state.path}")
    memory = OwnShardMemory(state.arena.arena, state.allocator, len(state.ledger.extents_of(SHARD)))
    identity = _identity(state.ledger.epoch, directory, state.clock())
    coordinator = Coordinator(state.ledger, memory, identity, watcher=exits, authorizer=authorizer, index=index)
    coordinator.attach(state)
    coordinator.lending.own_first = state.keeps_own_copy
    return coordinator


def first_epoch() -> int:
    """The epoch of a server without a state: larger than that of any earlier server at the same address."""
    return time.time_ns() // 1_000_000


def _identity(epoch: int, directory: RuntimeDirectory, started_at: float | None = None) -> ServerIdentity:
    return ServerIdentity(
        epoch=epoch,
        address=str(directory.address),
        runtime=str(directory.directory),
        version=VERSION,
        pid=os.getpid(),
        started_at=time.monotonic() if started_at is None else started_at,
        lock_directory=directory.sessions,
    )
