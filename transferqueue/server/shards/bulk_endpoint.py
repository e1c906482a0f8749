"""The bulk endpoint of a shard: reads and writes of sessions that cannot map its memory.

`ShardTransfers` decides and does no I/O. Messages enter through the `PeerReceiver` of their peer and `receive`; answers
leave through `outbox`. `advance` adds one frame for each transfer, so that transfers take turns. `BulkEndpoint` is the
thread around it. It runs beside the coordinator's thread, and shares only the `Backing` and the `TicketIssuer` with it.
`transport.bulk` defines the protocol. In addition:

- A peer (a connection) has one transfer; a new one replaces it. A session has at most `BULK_TRANSFERS_MAX`; the one
  silent for longest makes way for a new one.
- Bytes of a write go straight from the connection into the extent. So when a write begins, an earlier write to the same
  bytes ends, and its bytes that still arrive are dropped.
- For a stalled reader the endpoint holds one window of frames, or one frame where the connection reports that it is
  clogged. The transfer ends after `BULK_STALL_S`, with its session, or when its connection breaks.
- A transfer that cannot be carried out is answered with `TransferFailed` and ends. Nothing else changes.
- A carrier (`server.shards.carrier`) may move the bytes instead: of reads and writes by ranges of memory. While its
  clients read, the endpoint calls it every `PROGRESS_MS`. Its writes move in steps, between the frames of others. After
  a step that moved bytes the endpoint polls for `EAGER_S` without sleep, then every `PROGRESS_MS`.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq

from transferqueue.errors import (
    Corruption,
    Disconnected,
    Impossible,
    InternalError,
    ProtocolError,
    TransferQueueError,
    Unreachable,
    UsageError,
)
from transferqueue.limits import BULK_TRANSFERS_MAX, DEFECT_PAUSE_S, FAREWELL_S, KIB, MIB
from transferqueue.server.shards.block_checks import BlockChecks
from transferqueue.server.shards.carrier import ShardCarrier
from transferqueue.server.shards.frame_digests import FrameDigests
from transferqueue.server.shards.shard_transfer import (
    ExtentTransfer,
    KnownSums,
    ReadTransfer,
    SteppedWrite,
    WriteTransfer,
)
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.memory.backing import Backing
from transferqueue.storage.memory.buffer_pool import BufferPool
from transferqueue.transport import TcpAddress, Wakeup, parse_address
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.listener import BulkServer
from transferqueue.transport.system.threads import STOP_S, keep_for_good, still_runs

if TYPE_CHECKING:
    from transferqueue.transport.bulk.tls import ServerCertificate

_log: Final = logging.getLogger("transferqueue.server")
_EVERYWHERE: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104  (only if the operator asked for it)
_DROPPED_BYTES: Final = 64 * KIB
PROGRESS_MS: Final = 1
"""While a carrier moves bytes, it is called this often."""
EAGER_S: Final = 0.0005
"""Most reads of 4 MiB end within this time."""
GATHERED_KEPT_BYTES: Final = 16 * MIB
"""Free buffers for gathered frames, of two windows: fresh pages cost as much as the gather itself."""
TURN_BYTES: Final = 4 * MIB
"""A lone transfer sends this much before the endpoint looks for messages: a look costs a tenth of a 1 MiB frame."""
TURN_S: Final = 0.003
"""A longer turn sends no further frame: a frame of short rows takes ten times as long as others, and a look is cheap in
comparison."""
_TRIES: Final = 16
"""The number of ports that are tried for one that is free on every host."""


class PeerReceiver:
    """Takes the messages of one peer, and passes them to the transfers."""

    __slots__ = ("_exchange", "_peer")

    def __init__(self, exchange: ShardTransfers, peer: bytes) -> None:
        self._exchange, self._peer = exchange, peer

    def expect(self, head: bytes, nbytes: int) -> None:
        """A message begins. `Corruption` if its head is damaged."""
        self._exchange.expect(self._peer, head, nbytes)

    def fill(self, read: b.Reader) -> int:
        """Take the next bytes of the message; returns how many."""
        return self._exchange.fill(self._peer, read)


class CarriedBytes(NamedTuple):
    """What an endpoint carried. The bytes are by carrier: "stream", "one_sided"."""

    transfers: int
    sent: Mapping[str, int]
    received: Mapping[str, int]


class ShardTransfers:
    """All transfers of one backing. Used by one thread. `outbox`: messages to send, with their peers. `now`: set it
    before each call.

    Args:
        carrier: moves bytes of reads and writes that name ranges; None: such transfers are refused.
    """

    def __init__(
        self,
        backing: Backing,
        tickets: TicketIssuer,
        carrier: ShardCarrier | None = None,
    ) -> None:
        self.sent_bytes: Final = {"stream": 0, "one_sided": 0}
        """Bytes of reads, by carrier. Only grow."""
        self.received_bytes: Final = {"stream": 0, "one_sided": 0}
        """Bytes of writes, by carrier. Only grow."""
        self._carrier = carrier
        self.outbox: deque[tuple[bytes, b.Message]] = deque()
        self._backing = backing
        self._tickets = tickets
        self.now = 0.0
        self._transfers: dict[bytes, ReadTransfer | ExtentTransfer] = {}
        self._arriving: dict[bytes, tuple[b.ToShard, int, bytes]] = {}  # with size and checksum of its content
        self._sums = KnownSums(FrameDigests(), BlockChecks())
        self._room = BufferPool(GATHERED_KEPT_BYTES).take
        self._drop_buffer = memoryview(bytearray(_DROPPED_BYTES))
        self._checked_at = tickets.revoked

    def __len__(self) -> int:
        return len(self._transfers)

    def desk(self, peer: bytes) -> PeerReceiver:
        """The receiver for messages of `peer`. After each message, call `receive`."""
        return PeerReceiver(self, peer)

    def expect(self, peer: bytes, head: bytes, nbytes: int) -> None:
        """A message of `peer` begins. A refused message still arrives, and its bytes are dropped."""
        self._arriving.pop(peer, None)
        try:
            message = b.to_shard(head)
        except ProtocolError as error:  # its checksum matches, so the start of the next message is known
            self._refuse(peer, 0, error)
            return
        with self._told(peer, message.transfer):
            self._expect(peer, message, nbytes)
            self._arriving[peer] = message, nbytes, b.content_digest(head)

    def fill(self, peer: bytes, read: b.Reader) -> int:
        """Take the next bytes of the message, into its extent or the drop buffer."""
        transfer, arriving = self._transfers.get(peer), self._arriving.get(peer)
        if arriving is not None and isinstance(transfer, WriteTransfer) and transfer.number == arriving[0].transfer:
            try:
                return transfer.fill(read)
            except Disconnected as error:
                self._refuse(peer, transfer.number, error)
        return read(self._drop_buffer)

    def receive(self, peer: bytes) -> None:
        """The message of `peer` is complete, and its checksum matches."""
        arriving = self._arriving.pop(peer, None)
        if arriving is None:
            return
        message, nbytes, digest = arriving
        with self._told(peer, message.transfer):
            self._carry_out(peer, message, nbytes, digest)

    def spoiled(self, peer: bytes, error: Corruption) -> None:
        """A message of `peer` is damaged."""
        self._arriving.pop(peer, None)
        self._refuse(peer, 0, error)

    def advance(self, clogged: Container[bytes] = ()) -> None:
        """Send one more frame for each read whose window is open and whose connection is not clogged. A read with
        comparisons left waits."""
        self._for_reads(self._send_frame, clogged)

    def _send_frame(self, peer: bytes, read: ReadTransfer) -> None:
        message = read.frame()
        if message is None:
            return
        if read.window.sent == read.window.taken + 1:
            read.taken_at = self.now
        self.sent_bytes["stream"] += sum(map(len, message[1]))
        self.sent_bytes["one_sided"] += read.named_bytes
        self.outbox.append((peer, message))

    @property
    def needs_progress(self) -> bool:
        """Whether a client now reads by the carrier."""
        under_way = self._transfers.values()
        return any(isinstance(transfer, ReadTransfer) and transfer.needs_progress for transfer in under_way)

    def counts(self) -> CarriedBytes:
        """The counts of this moment, as values that do not change."""
        return CarriedBytes(len(self._transfers), dict(self.sent_bytes), dict(self.received_bytes))

    @property
    def moved_at(self) -> float | None:
        """When a write by the carrier last moved bytes; None: no write has any to move."""
        writes = [transfer for transfer in self._transfers.values() if isinstance(transfer, SteppedWrite)]
        return max((transfer.moved_at for transfer in writes if transfer.is_busy), default=None)

    def pull(self) -> None:
        """Do one step of each write by the carrier."""
        for peer, transfer in list(self._transfers.items()):
            if isinstance(transfer, SteppedWrite):
                with self._told(peer, transfer.number):
                    self._pull(peer, transfer)

    def _pull(self, peer: bytes, write: SteppedWrite) -> None:
        self.received_bytes["one_sided"] += write.step(self.now)
        if (answer := write.acknowledge()) is not None:
            self.outbox.append((peer, b.message(answer)))
        if write.done:
            self._end(peer)

    def prepare(self) -> None:
        """Gather and hash the next frame of each read, even for a clogged connection: the kernel sends an earlier frame
        meanwhile."""
        self._for_reads(_prepare, ())

    def _for_reads(self, work: Callable[[bytes, ReadTransfer], object], clogged: Container[bytes]) -> None:
        for peer, transfer in list(self._transfers.items()):
            if isinstance(transfer, ReadTransfer) and transfer.ready and peer not in clogged:
                with self._told(peer, transfer.number):
                    work(peer, transfer)

    def busy(self, clogged: Container[bytes] = ()) -> bool:
        """Whether `advance` has something to do."""
        return any(
            isinstance(transfer, ReadTransfer) and transfer.ready and peer not in clogged
            for peer, transfer in self._transfers.items()
        )

    def tick(self, now: float) -> None:
        """End transfers that have stalled, or whose session ended."""
        for peer, transfer in list(self._transfers.items()):
            if now >= transfer.deadline:
                self._refuse(peer, transfer.number, Disconnected(transfer.overdue))
        if self._tickets.revoked != self._checked_at:
            self._checked_at = self._tickets.revoked
            for known in self._sums:
                known.keep_only(self._tickets.admits)
            if self._carrier is not None:
                self._carrier.keep_only(self._tickets.serves)
            self._end_revoked()

    def next_deadline(self) -> float | None:
        """When to call `tick` next; None: nothing is due."""
        return min((transfer.deadline for transfer in self._transfers.values()), default=None)

    def heard(self, peer: bytes) -> None:
        """Bytes of `peer` have moved, so its transfer has not stalled."""
        if (transfer := self._transfers.get(peer)) is not None:
            transfer.heard_at = self.now

    def lost(self, peer: bytes) -> None:
        """The connection of `peer` is gone."""
        self._end(peer)
        self._arriving.pop(peer, None)

    def knows(self, peer: bytes) -> bool:
        """Whether `peer` has a transfer with tickets, and so has shown a valid one."""
        transfer = self._transfers.get(peer)
        return transfer is not None and transfer.has_shown_tickets

    def stop(self) -> None:
        """Tell every peer with a transfer that the shard stops."""
        for peer, transfer in list(self._transfers.items()):
            self._refuse(peer, transfer.number, Disconnected("the server was stopped"))

    def _expect(self, peer: bytes, message: b.ToShard, nbytes: int) -> None:
        match message:
            case b.WriteExtent():
                writing = WriteTransfer(message, self._backing, self._tickets, self._sums.digests, self.now)
                self._begin(peer, writing)
                writing.expect(0, nbytes)
            case b.WriteFrame():
                transfer = self._transfer_of(peer, message)
                if isinstance(transfer, WriteTransfer):
                    transfer.expect(message.number, nbytes)
            case _:
                if nbytes:
                    raise ProtocolError(
                        f"a bulk {type(message).__struct_config__.tag} has no content, but this one has {nbytes} bytes"
                    )

    def _carry_out(self, peer: bytes, message: b.ToShard, nbytes: int, digest: bytes) -> None:
        match message:
            case b.ReadColumns():
                self._begin(peer, self._read(message))
            case b.WriteRanges():
                self._begin(peer, self._write(message))
            case b.WriteRangesFrame():
                self._name(self._transfer_of(peer, message), message)
            case b.FlowAck():
                self._frames_taken(peer, self._transfer_of(peer, message), message.frames)
            case _:
                transfer = self._transfers.get(peer)
                if isinstance(transfer, WriteTransfer) and transfer.number == message.transfer:
                    self._frame_written(peer, transfer, nbytes, digest)

    def _read(self, message: b.ReadColumns) -> ReadTransfer:
        if not isinstance(message, b.ReadRanges):
            return ReadTransfer(message, self._backing, self._tickets, self._sums, self.now, self._room)
        carrier = self._needed_carrier("names no ranges of its memory")
        return carrier.read(message, self._backing, self._tickets, self._sums, self.now, self._room)

    def _write(self, message: b.WriteRanges) -> SteppedWrite:
        carrier = self._needed_carrier("reads no memory of its clients")
        return carrier.write(message, self._backing, self._tickets, self._sums.digests, self.now)

    def _needed_carrier(self, so: str) -> ShardCarrier:
        if self._carrier is None:
            raise Impossible(
                f"this shard moves columns only over its stream, and it {so}; start it with the client's carrier "
                "(--bytes), or use the stream"
            )
        return self._carrier

    def _name(self, transfer: ReadTransfer | ExtentTransfer, message: b.WriteRangesFrame) -> None:
        if not isinstance(transfer, SteppedWrite):
            raise ProtocolError(f"bulk transfer {message.transfer} is no write of ranges, and takes no further ones")
        transfer.name(message.number, message.ranges)

    def _begin(self, peer: bytes, transfer: ReadTransfer | ExtentTransfer) -> None:
        self._end(peer)
        if isinstance(transfer, ExtentTransfer):
            for other_peer, other in list(self._transfers.items()):
                if isinstance(other, ExtentTransfer) and other.overlaps(transfer):
                    self._end(other_peer)
        peers = [other_peer for other_peer, other in self._transfers.items() if other.session == transfer.session]
        if len(peers) >= BULK_TRANSFERS_MAX:
            self._end(min(peers, key=lambda other_peer: self._transfers[other_peer].heard_at))
        self._transfers[peer] = transfer

    def _end(self, peer: bytes) -> None:
        """Forget the transfer of `peer`, if it has one. Other threads see it until it has ended."""
        if (transfer := self._transfers.get(peer)) is not None:
            try:
                transfer.end()
            finally:
                del self._transfers[peer]

    def _transfer_of(self, peer: bytes, message: b.ToShard) -> ReadTransfer | ExtentTransfer:
        transfer = self._transfers.get(peer)
        if transfer is None or transfer.number != message.transfer:
            raise Unreachable(f"bulk transfer {message.transfer} is not under way on this connection; begin it again")
        transfer.heard_at = self.now
        return transfer

    def _frame_written(self, peer: bytes, writing: WriteTransfer, nbytes: int, digest: bytes) -> None:
        answer = writing.frame_complete(nbytes, digest)
        self.received_bytes["stream"] += nbytes
        if answer is not None:
            self.outbox.append((peer, b.message(answer)))
        if writing.done:
            self._end(peer)

    def _frames_taken(self, peer: bytes, transfer: ReadTransfer | ExtentTransfer, frames: int) -> None:
        if isinstance(transfer, ExtentTransfer):
            self.outbox.append((peer, b.message(transfer.progress())))
            return
        if frames > transfer.window.taken:
            transfer.taken_at = self.now
        transfer.took(frames)
        if transfer.done:
            self._end(peer)

    def _end_revoked(self) -> None:
        for peer, transfer in list(self._transfers.items()):
            try:
                transfer.check()
            except Disconnected as error:
                if transfer.needs_memory or not self._tickets.serves(transfer.session):
                    self._refuse(peer, transfer.number, error)

    @contextmanager
    def _told(self, peer: bytes, number: int) -> Iterator[None]:
        """Send the peer what goes wrong here, and end its transfer of this number. A defect is logged as well."""
        try:
            yield
        except TransferQueueError as error:
            self._refuse(peer, number, error)
        except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the peer)
            _log.exception("a bulk transfer failed")
            self._refuse(peer, number, InternalError(f"the bulk transfer failed: {error!r}; please report it"))

    def _refuse(self, peer: bytes, number: int, error: TransferQueueError) -> None:
        """Answer with an error, and end the transfer. `number`: of the transfer; 0: the connection is damaged, so any
        transfer on it ends."""
        transfer = self._transfers.get(peer)
        if transfer is not None and number in (0, transfer.number):
            self._end(peer)
        self.outbox.append((peer, b.message(b.TransferFailed(number, type(error).__name__, str(error)))))


def _prepare(_: bytes, read: ReadTransfer) -> None:
    read.prepare()


class BulkEndpoint:
    """The bulk endpoint of a backing. Listens once `listen` returns, answers from `start` to `stop`. It closes its
    `carrier` (see `ShardTransfers`). certificate: see `BulkServer`."""

    def __init__(
        self,
        backing: Backing,
        tickets: TicketIssuer,
        certificate: ServerCertificate | None = None,
        carrier: ShardCarrier | None = None,
    ) -> None:
        self._port: Final = BulkServer(certificate)
        self._carrier: Final = carrier
        self._exchange = ShardTransfers(backing, tickets, carrier)
        """Used by the endpoint's thread alone, which publishes `_counts` for others."""
        self._counts = self._exchange.counts()
        self._wakeup = Wakeup()
        tickets.on_close = self._wakeup.set
        self._stopping = self._stands_still = False
        self._thread = threading.Thread(target=self._run, name="transferqueue bulk", daemon=True)

    def listen(self, addresses: Iterable[str], port: int = 0) -> int:
        """Listen on the hosts of all tcp `addresses` (at least one), all at one port (0: a free one); returns the
        port."""
        hosts = list(dict.fromkeys(_host(address) for address in addresses))
        hosts = [host for host in hosts if host in _EVERYWHERE][:1] or hosts
        return self._port.listen_at_all(hosts, port, _TRIES)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes of reads by carrier: "stream", "one_sided"."""
        return dict(self._counts.sent)

    @property
    def received_bytes(self) -> dict[str, int]:
        """Bytes of writes by carrier: "stream", "one_sided"."""
        return dict(self._counts.received)

    @property
    def transfers(self) -> int:
        """The number of running transfers."""
        return self._counts.transfers

    def start(self) -> None:
        """Start the thread that answers."""
        self._thread.start()

    def stop(self) -> None:
        """Tell all peers, and close. Blocks until that is done. Call it once, also if the thread was never started. If
        the thread does not end, its resources stay open until the process ends."""
        self._stopping = True
        self._wakeup.set()
        if where := still_runs(self._thread):
            _log.error("the bulk endpoint did not end within %g s; its thread is at %s", STOP_S, where)
            keep_for_good(self)
            return
        self._port.close(FAREWELL_S)
        if self._carrier is not None:
            self._carrier.close()
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
        if (moved_at := self._exchange.moved_at) is not None:
            return 0 if time.monotonic() - moved_at < EAGER_S else PROGRESS_MS
        if self._exchange.needs_progress:
            return PROGRESS_MS
        deadlines = [at for at in (self._exchange.next_deadline(), self._port.next_deadline()) if at is not None]
        return max(0, math.ceil((min(deadlines) - time.monotonic()) * 1000)) if deadlines else None

    def _turn(self, now: float) -> None:
        """One turn. If a part of it fails unexpectedly, the others go on, and the next turn comes after a pause."""
        self._exchange.now = now
        is_whole = True
        for part in (self._exchange.tick, self._serve_readers, self._receive, self._advance):
            try:
                part(now)
            except Exception:  # noqa: BLE001  (logged with its cause)
                _log.exception("a turn of the bulk endpoint failed (%s); it goes on", part.__name__.strip("_"))
                is_whole = False
        self._counts = self._exchange.counts()
        if not is_whole:
            waiting = select.poll()
            waiting.register(self._wakeup, select.POLLIN)
            waiting.poll(math.ceil(DEFECT_PAUSE_S * 1000))

    def _serve_readers(self, now: float) -> None:
        if self._carrier is not None and self._exchange.needs_progress:
            try:
                self._carrier.progress()
            except Unreachable as error:  # its readers miss their deadlines, and use the stream
                if not self._stands_still:
                    _log.warning("reads by the carrier stand still: %s", error)
                self._stands_still = True

    def _receive(self, now: float) -> None:
        self._port.tick(self._exchange, now)
        for peer in self._port.arrivals(self._exchange, now):
            self._exchange.receive(peer)
            self._send()

    def _advance(self, now: float) -> None:
        self._exchange.pull()
        sent = self._exchange.sent_bytes
        enough = sent["stream"] + (TURN_BYTES if len(self._exchange) == 1 else 1)
        while True:
            self._exchange.advance(self._port.clogged)
            has_sent = bool(self._exchange.outbox)
            self._send()
            if not has_sent or sent["stream"] >= enough or time.monotonic() - now >= TURN_S:
                break
        self._exchange.prepare()
        self._send()

    def _send(self) -> None:
        self._counts = self._exchange.counts()
        while self._exchange.outbox:
            peer, message = self._exchange.outbox.popleft()
            if not self._port.send(peer, message):
                self._exchange.lost(peer)


def _host(address: str) -> str:
    parsed = parse_address(address)
    if not isinstance(parsed, TcpAddress):
        raise UsageError(f"address {address!r} is not tcp, so no bulk endpoint can listen there")
    return parsed.host
