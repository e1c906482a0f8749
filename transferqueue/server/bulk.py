"""The bulk endpoint of a shard: reads and writes of sessions that cannot map its arena.

`Exchange` decides and does no I/O: messages in (`receive`), messages out (`outbox`), frames one at a time (`advance`), so that
transfers take turns. `Shard` is the thread around it, beside the coordinator's: they share the arena's pages and the
`Tickets`, nothing else. The rules of the protocol are in `transport.bulk`; here:

- A peer (a connection) has one transfer; a new one replaces it. Of one session `BULK_TRANSFERS_MAX` are kept; the longest
  unheard of makes room.
- What a stalled reader holds here is its window of frames. It is forgotten after `BULK_STALL_S`, when its session ends,
  or when its connection is found gone.
- Whatever cannot be carried out is answered with `Refused`, and the transfer is over; nothing else is touched.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np
import zmq

from transferqueue.errors import Disconnected, InternalError, TransferQueueError, Unreachable, UsageError
from transferqueue.limits import BULK_STALL_S, BULK_TRANSFERS_MAX, FAREWELL_S, FRAMES_DRAINED_MAX
from transferqueue.server.tickets import Tickets
from transferqueue.server.transfers import Reading, Writing
from transferqueue.storage.dtypes import U8
from transferqueue.transport import TcpAddress, Wakeup, parse_address
from transferqueue.transport import bulk as b
from transferqueue.transport.bulk_sockets import BulkPort
from transferqueue.transport.gate import Ring

_log: Final = logging.getLogger("transferqueue.server")
_EVERYWHERE: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104  (asked for so by who serves)
_TRIES: Final = 16
"""Ports tried for one that is free on every host."""


class Exchange:
    """All transfers of one arena. Used by one thread. `outbox`: messages to send, each to a peer."""

    def __init__(self, arena: U8, tickets: Tickets) -> None:
        self.outbox: deque[tuple[bytes, b.Message]] = deque()
        self._arena = arena
        self._tickets = tickets
        self._transfers: dict[bytes, Reading | Writing] = {}
        self._looked_at = tickets.revoked

    def __len__(self) -> int:
        return len(self._transfers)

    def receive(self, peer: bytes, head: b.Piece, pieces: list[memoryview], now: float) -> None:
        """A message came from `peer`."""
        number = 0
        try:
            told = b.to_shard(head, pieces)
            number = told.transfer
            self._obey(peer, told, pieces, now)
        except TransferQueueError as error:
            self._refuse(peer, number, error)
        except Exception as error:  # noqa: BLE001  (logged with its cause, and told to the peer)
            self._fail(peer, number, error)

    def advance(self) -> None:
        """One frame more for each reader whose window is open."""
        for peer, transfer in list(self._transfers.items()):
            if isinstance(transfer, Reading) and transfer.ready:
                try:
                    self.outbox.append((peer, transfer.frame()))
                except TransferQueueError as error:
                    self._refuse(peer, transfer.number, error)
                except Exception as error:  # noqa: BLE001  (as above)
                    self._fail(peer, transfer.number, error)

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return any(isinstance(transfer, Reading) and transfer.ready for transfer in self._transfers.values())

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

    def lost(self, peer: bytes) -> None:
        """`peer` is gone."""
        self._transfers.pop(peer, None)

    def stop(self) -> None:
        """Tell every peer that the shard stops."""
        for peer, transfer in list(self._transfers.items()):
            self._refuse(peer, transfer.number, Disconnected("the server was stopped"))

    def _obey(self, peer: bytes, told: b.ToShard, content: list[memoryview], now: float) -> None:
        match told:
            case b.Read():
                self._begin(peer, Reading(told, self._arena, self._tickets, now))
            case b.Write():
                writing = Writing(told, self._arena, self._tickets, now)
                self._begin(peer, writing)
                self._write(peer, writing, 0, content)
            case b.Data():
                transfer = self._of(peer, told, now)
                if isinstance(transfer, Writing):
                    self._write(peer, transfer, told.number, content)
            case b.Taken():
                self._taken(peer, self._of(peer, told, now), told.frames)

    def _begin(self, peer: bytes, transfer: Reading | Writing) -> None:
        self._transfers.pop(peer, None)
        others = [at for at, other in self._transfers.items() if other.session == transfer.session]
        if len(others) >= BULK_TRANSFERS_MAX:
            del self._transfers[min(others, key=lambda at: self._transfers[at].heard_at)]
        self._transfers[peer] = transfer

    def _of(self, peer: bytes, told: b.ToShard, now: float) -> Reading | Writing:
        transfer = self._transfers.get(peer)
        if transfer is None or transfer.number != told.transfer:
            raise Unreachable(f"bulk transfer {told.transfer} is not under way on this connection; begin it again")
        transfer.heard_at = now
        return transfer

    def _write(self, peer: bytes, writing: Writing, number: int, content: list[memoryview]) -> None:
        answer = writing.take(number, content)
        if answer is not None:
            self.outbox.append((peer, b.message(answer)))
        if writing.done:
            del self._transfers[peer]

    def _taken(self, peer: bytes, transfer: Reading | Writing, frames: int) -> None:
        if isinstance(transfer, Writing):
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
        self.outbox.append((peer, b.message(b.Refused(number, type(error).__name__, str(error)))))


class Shard:
    """The bulk endpoint of the arena at `path`: listens once `listen` returns, answers from `start` to `stop`."""

    def __init__(self, path: str, capacity: int, tickets: Tickets, keyring: Ring | None = None) -> None:
        self._port = BulkPort(keyring)
        self._exchange = Exchange(_view(path, capacity), tickets)
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
        if self._exchange.busy:
            return 0
        deadline = self._exchange.next_deadline()
        return None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))

    def _turn(self, now: float) -> None:
        self._exchange.tick(now)
        self._port.decide()
        for _ in range(FRAMES_DRAINED_MAX):
            arrived = self._port.receive()
            if arrived is None:
                break
            peer, (head, pieces) = arrived
            self._exchange.receive(peer, head, pieces, now)
            self._send()
        self._exchange.advance()
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


def _view(path: str, capacity: int) -> U8:
    """The whole arena, as memory that is unmapped with the last piece of it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Disconnected(f"the arena {path} cannot be opened for the bulk endpoint: {error.strerror}") from error
    try:
        return np.frombuffer(mmap.mmap(fd, capacity), np.uint8)
    finally:
        os.close(fd)
