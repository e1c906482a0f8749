"""The bulk endpoint of a shard: reads and writes of sessions that cannot map its memory.

`ShardTransfers` decides and does no I/O: messages in (each peer's `desk` takes one, then `receive`), messages out (`outbox`),
frames one at a time (`advance`), so that transfers take turns. `BulkEndpoint` is the thread around it, beside the coordinator's: they share the `Backing` and the
`TicketIssuer`, nothing else. The rules of the protocol are in `transport.bulk`; here:

- A peer (a connection) has one transfer; a new one replaces it. Of one session `BULK_TRANSFERS_MAX` are kept; the longest
  unheard of makes room.
- Bytes of a write go from the connection to where they belong. So of two writes to the same place the earlier one ends when
  the later one begins: what is left of it on its way finds no place.
- What a stalled reader holds here is its window of frames, or one frame where the connection tells that it is clogged. It is
  forgotten after `BULK_STALL_S`, when its session ends,
  or when its connection is found gone.
- Whatever cannot be carried out is answered with `Refused`, and the transfer is over; nothing else is touched.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Container, Iterable
from typing import Final

import zmq

from transferqueue.errors import (
    Corruption,
    Disconnected,
    InternalError,
    ProtocolError,
    TransferQueueError,
    Unreachable,
    UsageError,
)
from transferqueue.limits import BULK_STALL_S, BULK_TRANSFERS_MAX, FAREWELL_S, KIB
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.server.shards.transfers import ReadTransfer, WriteTransfer
from transferqueue.storage.memory.backing import Backing
from transferqueue.transport import TcpAddress, Wakeup, parse_address
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.listener import TcpBulkServer
from transferqueue.transport.bulk.zeromq import ZmqBulkServer
from transferqueue.transport.security.zap import KeySet

_log: Final = logging.getLogger("transferqueue.server")
_EVERYWHERE: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104  (asked for so by who serves)
_DROPPED_BYTES: Final = 64 * KIB
_TRIES: Final = 16
"""Ports tried for one that is free on every host."""


class PeerReceiver:
    """Takes the messages of one peer: where their bytes belong is known to the exchange."""

    __slots__ = ("_exchange", "_peer")

    def __init__(self, exchange: ShardTransfers, peer: bytes) -> None:
        self._exchange, self._peer = exchange, peer

    def expect(self, head: bytes, nbytes: int) -> None:
        """A message begins to come. `Corruption` if it cannot be believed."""
        self._exchange.expect(self._peer, head, nbytes)

    def fill(self, read: b.Reader) -> int:
        """Its next bytes come."""
        return self._exchange.fill(self._peer, read)


class ShardTransfers:
    """All transfers of one backing. Used by one thread. `outbox`: messages to send, each to a peer. now: set before each use."""

    def __init__(self, backing: Backing, tickets: TicketIssuer) -> None:
        self.outbox: deque[tuple[bytes, b.Message]] = deque()
        self._backing = backing
        self._tickets = tickets
        self.now = 0.0
        self._transfers: dict[bytes, ReadTransfer | WriteTransfer] = {}
        self._coming: dict[bytes, b.ToShard] = {}
        self._dropped = memoryview(bytearray(_DROPPED_BYTES))
        self._looked_at = tickets.revoked

    def __len__(self) -> int:
        return len(self._transfers)

    def desk(self, peer: bytes) -> PeerReceiver:
        """Where messages of `peer` are to be taken; after each, `receive`."""
        return PeerReceiver(self, peer)

    def expect(self, peer: bytes, head: bytes, nbytes: int) -> None:
        """A message begins to come from `peer`. What is refused comes all the same, and is dropped."""
        self._coming.pop(peer, None)
        try:
            told = b.to_shard(head)
        except ProtocolError as error:  # its checksum matches: so where the next message begins is known
            self._refuse(peer, 0, error)
            return
        try:
            self._expect(peer, told, nbytes)
            self._coming[peer] = told
        except TransferQueueError as error:
            self._refuse(peer, told.transfer, error)
        except Exception as error:  # noqa: BLE001  (logged with its cause, and told to the peer)
            self._fail(peer, told.transfer, error)

    def fill(self, peer: bytes, read: b.Reader) -> int:
        """The next bytes of that message: into its landing, or nowhere."""
        transfer, told = self._transfers.get(peer), self._coming.get(peer)
        if told is not None and isinstance(transfer, WriteTransfer) and transfer.number == told.transfer:
            try:
                return transfer.fill(read)
            except Disconnected as error:
                self._refuse(peer, told.transfer, error)
        return read(self._dropped)

    def receive(self, peer: bytes) -> None:
        """That message has come whole, and matches."""
        told = self._coming.pop(peer, None)
        if told is None:
            return
        try:
            self._obey(peer, told)
        except TransferQueueError as error:
            self._refuse(peer, told.transfer, error)
        except Exception as error:  # noqa: BLE001  (as above)
            self._fail(peer, told.transfer, error)

    def spoiled(self, peer: bytes, error: Corruption) -> None:
        """What came of `peer` cannot be believed."""
        self._coming.pop(peer, None)
        self._refuse(peer, 0, error)

    def advance(self, clogged: Container[bytes] = ()) -> None:
        """One frame more for each reader whose window is open, and who took what was sent before."""
        for peer, transfer in list(self._transfers.items()):
            if isinstance(transfer, ReadTransfer) and transfer.ready and peer not in clogged:
                try:
                    self.outbox.append((peer, transfer.frame()))
                except TransferQueueError as error:
                    self._refuse(peer, transfer.number, error)
                except Exception as error:  # noqa: BLE001  (as above)
                    self._fail(peer, transfer.number, error)

    def busy(self, clogged: Container[bytes] = ()) -> bool:
        """Whether `advance` has something to do."""
        return any(
            isinstance(transfer, ReadTransfer) and transfer.ready and peer not in clogged
            for peer, transfer in self._transfers.items()
        )

    def tick(self, now: float) -> None:
        """Forget transfers that have stalled, and end those whose session is over."""
        for peer, transfer in list(self._transfers.items()):
            if now - transfer.heard_at >= BULK_STALL_S:
                self._refuse(peer, transfer.number, Disconnected(f"nothing was heard of it for {BULK_STALL_S:g} s"))
        if self._tickets.revoked != self._looked_at:
            self._looked_at = self._tickets.revoked
            self._end_those_over()

    def next_deadline(self) -> float | None:
        """When `tick` must be called; None: not by itself."""
        return min((one.heard_at + BULK_STALL_S for one in self._transfers.values()), default=None)

    def heard(self, peer: bytes) -> None:
        """Bytes of `peer` have moved, if only slowly."""
        if (transfer := self._transfers.get(peer)) is not None:
            transfer.heard_at = self.now

    def lost(self, peer: bytes) -> None:
        """`peer` is gone."""
        self._transfers.pop(peer, None)
        self._coming.pop(peer, None)

    def knows(self, peer: bytes) -> bool:
        """Whether a transfer of `peer` is under way: then it has shown a ticket that is good."""
        transfer = self._transfers.get(peer)
        return transfer is not None and transfer.has_shown_tickets

    def stop(self) -> None:
        """Tell every peer that the shard stops."""
        for peer, transfer in list(self._transfers.items()):
            self._refuse(peer, transfer.number, Disconnected("the server was stopped"))

    def _expect(self, peer: bytes, told: b.ToShard, nbytes: int) -> None:
        match told:
            case b.WriteExtent():
                writing = WriteTransfer(told, self._backing, self._tickets, self.now)
                self._begin(peer, writing)
                writing.expect(0, nbytes)
            case b.WriteFrame():
                transfer = self._of(peer, told)
                if isinstance(transfer, WriteTransfer):
                    transfer.expect(told.number, nbytes)
            case _:
                if nbytes:
                    raise ProtocolError(
                        f"a bulk {type(told).__struct_config__.tag} has no content, and this one {nbytes} bytes"
                    )

    def _obey(self, peer: bytes, told: b.ToShard) -> None:
        match told:
            case b.ReadColumns():
                self._begin(peer, ReadTransfer(told, self._backing, self._tickets, self.now))
            case b.FlowAck():
                self._taken(peer, self._of(peer, told), told.frames)
            case _:
                transfer = self._transfers.get(peer)
                if isinstance(transfer, WriteTransfer) and transfer.number == told.transfer:
                    self._wrote(peer, transfer)

    def _begin(self, peer: bytes, transfer: ReadTransfer | WriteTransfer) -> None:
        self._transfers.pop(peer, None)
        if isinstance(transfer, WriteTransfer):
            for at, other in list(self._transfers.items()):
                if isinstance(other, WriteTransfer) and other.overlaps(transfer):
                    del self._transfers[at]
        others = [at for at, other in self._transfers.items() if other.session == transfer.session]
        if len(others) >= BULK_TRANSFERS_MAX:
            del self._transfers[min(others, key=lambda at: self._transfers[at].heard_at)]
        self._transfers[peer] = transfer

    def _of(self, peer: bytes, told: b.ToShard) -> ReadTransfer | WriteTransfer:
        transfer = self._transfers.get(peer)
        if transfer is None or transfer.number != told.transfer:
            raise Unreachable(f"bulk transfer {told.transfer} is not under way on this connection; begin it again")
        transfer.heard_at = self.now
        return transfer

    def _wrote(self, peer: bytes, writing: WriteTransfer) -> None:
        answer = writing.took()
        if answer is not None:
            self.outbox.append((peer, b.message(answer)))
        if writing.done:
            del self._transfers[peer]

    def _taken(self, peer: bytes, transfer: ReadTransfer | WriteTransfer, frames: int) -> None:
        if isinstance(transfer, WriteTransfer):
            self.outbox.append((peer, b.message(transfer.told())))
            return
        transfer.window.took(frames)
        if transfer.done:
            del self._transfers[peer]

    def _end_those_over(self) -> None:
        for peer, transfer in list(self._transfers.items()):
            try:
                transfer.check()
            except Disconnected as error:
                self._refuse(peer, transfer.number, error)

    def _fail(self, peer: bytes, number: int, error: Exception) -> None:
        _log.exception("a bulk transfer failed")
        self._refuse(peer, number, InternalError(f"the bulk transfer failed: {error!r}; please report it"))

    def _refuse(self, peer: bytes, number: int, error: TransferQueueError) -> None:
        """Number 0: what came cannot be believed, so neither can the rest of what is under way there."""
        transfer = self._transfers.get(peer)
        if transfer is not None and number in (0, transfer.number):
            del self._transfers[peer]
        self.outbox.append((peer, b.message(b.TransferFailed(number, type(error).__name__, str(error)))))


class BulkEndpoint:
    """The bulk endpoint of what `backing` keeps: listens once `listen` returns, answers from `start` to `stop`."""

    def __init__(self, backing: Backing, tickets: TicketIssuer, keyring: KeySet | None = None) -> None:
        self._port: Final = TcpBulkServer() if keyring is None else ZmqBulkServer(keyring)
        self._exchange = ShardTransfers(backing, tickets)
        self._wakeup = Wakeup()
        tickets.on_close = self._wakeup.set
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="transferqueue bulk", daemon=True)

    def listen(self, addresses: Iterable[str], port: int = 0) -> int:
        """Listen on the hosts of all tcp `addresses` (at least one), at one port; returns it. port: 0: any that is free."""
        hosts = list(dict.fromkeys(_host(address) for address in addresses))
        hosts = [host for host in hosts if host in _EVERYWHERE][:1] or hosts
        return self._port.listen_at_all(hosts, port, _TRIES)

    def start(self) -> None:
        """Answer from now on, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Tell all peers, and close. Returns when that is done. To be called once, also if it was never started."""
        self._stopping = True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._port.close(FAREWELL_S)
        self._wakeup.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wakeup, *self._port.sources):
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            poller.poll(self._patience_ms())
            self._wakeup.clear()
            self._turn(time.monotonic())
        self._exchange.stop()
        self._send()

    def _patience_ms(self) -> int | None:
        if self._exchange.busy(self._port.clogged):
            return 0
        deadlines = [at for at in (self._exchange.next_deadline(), self._port.next_deadline()) if at is not None]
        return max(0, math.ceil((min(deadlines) - time.monotonic()) * 1000)) if deadlines else None

    def _turn(self, now: float) -> None:
        self._exchange.now = now
        self._exchange.tick(now)
        self._port.tick(self._exchange, now)
        for peer in self._port.arrivals(self._exchange, now):
            self._exchange.receive(peer)
            self._send()
        self._exchange.advance(self._port.clogged)
        self._send()

    def _send(self) -> None:
        while self._exchange.outbox:
            peer, message = self._exchange.outbox.popleft()
            if not self._port.send(peer, message):
                self._exchange.lost(peer)


def _host(address: str) -> str:
    place = parse_address(address)
    if not isinstance(place, TcpAddress):
        raise UsageError(f"address {address!r} is none of tcp, so no bulk endpoint can listen there")
    return place.host
