"""Memory that this process cannot map: its bytes are sent and received through the shard's bulk endpoint.

A read fetches all columns of a reply in one transfer as soon as the reply comes. Then the blocks are unpinned, and the
columns are this process's own. A write is gathered in a buffer and sent before its commit. Both block the calling
thread, and each uses a connection alone (`transport.bulk` has the rules). Where a carrier is chosen
(`client.memory.carrier`), it moves the bytes; if that fails, the stream carries them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import numpy as np

from transferqueue.client.memory.carrier import MemoryCarrier
from transferqueue.client.memory.client_transfer import (
    ClientTransfer,
    FetchTransfer,
    RequestedColumns,
    RequestedRows,
    StoreTransfer,
    rows_of,
    write_head,
)
from transferqueue.client.memory.grants import CommitOutcome, WriteRegion
from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.operation_runner import BlockingWork, Operation
from transferqueue.errors import (
    Corruption,
    DeadlineExceeded,
    Disconnected,
    Forked,
    Impossible,
    InternalError,
    ProtocolError,
    TransferQueueError,
    Unreachable,
    UsageError,
)
from transferqueue.limits import BULK_SILENCE_S, BULK_TRANSFERS_MAX, BULK_TRIES, STALLED_S, TIMEOUT_S_DEFAULT
from transferqueue.schema import NO_SLICES, Field, Slice, sliced_fields
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.memory.buffer_pool import BufferPool
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.wire import messages as m

T = TypeVar("T", bound=ClientTransfer)
ASK_S: Final = 1.0
"""After this silence the shard is asked whether it still knows of a transfer."""


_CARRIER_ERRORS: Final = (Corruption, Unreachable, Impossible, ProtocolError, InternalError, UsageError)
"""After these a transfer by the carrier is tried again over the stream, whose error names any other cause."""


class RemoteMemory:
    """Reads and writes of one session over connections that `dial` makes. Safe from any thread.

    `unpin` is called with blocks whose pins return, `on_close` at the end of `close`. `over` returns why the session
    has ended, or None. `carrier` moves bytes beside the connections; None: all bytes cross over connections.
    """

    def __init__(
        self,
        dial: Callable[[m.Welcome], BulkClient],
        welcome: m.Welcome,
        unpin: Callable[[list[int]], object],
        over: Callable[[], TransferQueueError | None],
        on_close: Callable[[], object],
        carrier: MemoryCarrier | None = None,
    ) -> None:
        if not welcome.bulk_port:
            raise UsageError(
                "this server has no bulk endpoint, so a client that cannot map its memory has no way to the bytes; "
                "serve at a tcp address"
            )
        self.buffers: Final = BufferPool()
        self._dial = dial
        self._welcome = welcome
        self._unpin = unpin
        self._over = over
        self._on_close = on_close
        self.carrier: Final = carrier
        self._room = threading.BoundedSemaphore(BULK_TRANSFERS_MAX)
        self._guard = threading.RLock()  # a signal handler may close the queue
        """Of `_idle`, `_busy` and `_closed`."""
        self._idle: list[BulkClient] = []
        self._busy: set[BulkClient] = set()
        self._news = threading.Event()
        self._closed = False
        self._pid = os.getpid()

    torn: Final = CommitOutcome.TORN
    """Outcome of a region into which a transfer failed: late frames of it may still arrive there."""

    def write(self, region: WriteRegion, nbytes: int, fill: Callable[[memoryview], object]) -> BlockingWork:
        """Let `fill` write `nbytes`, and send them to the region.

        The work ends when they are there. `Unreachable` or `Corruption` if they did not arrive in `BULK_TRIES` attempts
        at one life of the server.
        """
        caller = Caller(self._interrupt)
        return BlockingWork(
            nbytes,
            lambda: self._write(region.granted, region.offset, nbytes, fill, caller),
            abandon=caller.leave,
            bound=caller.bound,
        )

    def _write(
        self, granted: m.Granted, offset: int, nbytes: int, fill: Callable[[memoryview], object], caller: Caller
    ) -> None:
        self._check_living(caller)
        carrier = self.carrier
        carried = carrier.write_buffer(nbytes) if carrier is not None else None
        staged = self.buffers.take(nbytes) if carried is None else carried
        fill(staged.data)
        if carrier is None or carried is None or not self._carried(carrier, granted, offset, carried.data, caller):
            self._store(granted, offset, staged.data, caller)

    def _carried(
        self, carrier: MemoryCarrier, granted: m.Granted, offset: int, data: memoryview, caller: Caller
    ) -> bool:
        """Have the carrier write these bytes, which are in a buffer of its own. False if that failed."""
        session = self._welcome.session
        try:
            self._carry(
                lambda number: carrier.store(
                    write_head(number, session, granted, offset, len(data)), data, self._welcome.epoch
                ),
                caller,
                tries=1,
            )
        except _CARRIER_ERRORS as error:
            carrier.write_failed(error)
            return False
        return True

    def store(self, granted: m.Granted, offset: int, data: memoryview) -> None:
        """Send `data` to byte `offset` of the arena, inside a granted extent. Blocks until it is there; errors as of
        `write`."""
        self._store(granted, offset, data, Caller(self._interrupt))

    def _store(self, granted: m.Granted, offset: int, data: memoryview, caller: Caller) -> None:
        session = self._welcome.session
        self._carry(lambda number: StoreTransfer(write_head(number, session, granted, offset, len(data)), data), caller)

    def columns(
        self,
        parts: Sequence[m.ReplyColumns],
        fields: Mapping[str, Field],
        rows: int,
        slices: Mapping[str, Slice] = NO_SLICES,
        *,
        compare: bool = False,
    ) -> Operation[tuple[dict[str, Column], list[MappedBlocks]]]:
        """Receive the columns of one reply, of those in `slices` only that part. Also returns the blocks that hold
        them.

        The pins return in any case. With `compare` the shard compares the blocks of these parts, `Corruption` if one
        does not match its checksum.
        """
        try:
            asked = [rows_of(part, rows, slices, compare=compare) for part in parts]
            found: list[FetchTransfer] = []
            if asked and rows:
                caller = Caller(self._interrupt)
                wanted = RequestedColumns(self._welcome.session, _shard_of(parts), fields, asked)
                yield BlockingWork(
                    sum(at.nbytes for one in asked for at in one.wanted.blocks),
                    lambda: found.append(self._fetch(wanted, caller)),
                    abandon=caller.leave,
                    bound=caller.bound,
                )
        finally:
            self._unpin(list({block.block for part in parts for block in part.blocks}))
        return _columns(parts, asked, sliced_fields(fields, slices), found[0] if found else None)

    def welcomed(self, welcome: m.Welcome) -> None:
        """Begin all transfers again: this session has reconnected, perhaps to the next server."""
        self._welcome = welcome
        self._interrupt()

    def close(self) -> None:
        """End all transfers with `Disconnected`, and close. Received columns stay valid. A second call, or one in a
        forked child, does nothing."""
        if os.getpid() != self._pid:
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
            idle, self._idle = self._idle, []
        self._interrupt()
        for line in idle:
            line.close()
        self._on_close()

    def _interrupt(self) -> None:
        """Wake all transfers, so that they check whether they should end."""
        self._news.set()
        with self._guard:
            busy = list(self._busy)
        for line in busy:
            line.interrupt()

    def _fetch(self, asked: RequestedColumns, caller: Caller) -> FetchTransfer:
        carrier = self.carrier
        if carrier is not None and carrier.begin_read():

            def check(elapsed_s: float) -> None:
                self._check_read(elapsed_s, caller)

            try:
                return self._carry(lambda number: carrier.fetch(number, asked, check), caller, tries=1)
            except _CARRIER_ERRORS as error:
                carrier.read_failed(error)
            finally:
                carrier.end_read()
        return self._carry(lambda number: FetchTransfer(number, asked, self.buffers), caller)

    def _check_read(self, elapsed_s: float, caller: Caller) -> None:
        """Raise if it makes no sense to wait longer for a read by the carrier that began so long ago."""
        self._check_living(caller)
        if elapsed_s >= STALLED_S:
            caller.check_time(f"a read of the shard's memory has taken {elapsed_s:.2f} s")
        if elapsed_s >= BULK_SILENCE_S:
            raise Unreachable(f"a read of the shard's memory had not ended after {BULK_SILENCE_S:g} s")

    def _carry(self, begin: Callable[[int], T], caller: Caller, tries: int = BULK_TRIES) -> T:
        """Run one transfer. If it fails on the way, run it again over another connection, `tries` times.

        When the server is started again, the count starts again too. Attempts are a while apart: a server that dies
        still accepts connections until its process is gone.
        """
        failed: Corruption | Unreachable | None = None
        life, left = self._welcome.epoch, tries
        while left:
            try:
                with self._line(caller) as line:
                    line.transfers += 1
                    transfer = begin(line.transfers)
                    self._drive(line, transfer, caller)
                    return transfer
            except (Corruption, Unreachable) as error:
                failed = error
                caller.check_time(f"at last: {error}")
                if isinstance(error, Unreachable) and left > 1 and self._welcome.epoch == life:
                    self._news.wait(caller.step_s())
                    self._news.clear()
            left = left - 1 if self._welcome.epoch == life else tries
            life = self._welcome.epoch
        kind = Corruption if isinstance(failed, Corruption) else Unreachable
        raise kind(f"the bytes did not cross in {tries} attempts; at last: {failed}") from failed

    def _drive(self, line: BulkClient, transfer: ClientTransfer, caller: Caller) -> None:
        heard = _ConnectionProgress(line)
        while not line.open(caller.step_s()):
            self._check(line, heard, caller)
        for message in transfer.opening():
            line.send(message)
        while not transfer.done:
            self._check(line, heard, caller)
            if line.receive(transfer, min(transfer.serve_s, caller.step_s())):
                for message in transfer.receive():
                    line.send(message)
            elif transfer.serve():
                line.ask(transfer.ask())

    def _check(self, line: BulkClient, heard: _ConnectionProgress, caller: Caller) -> None:
        """Raise if it makes no sense to wait longer on this connection."""
        self._check_living(caller)
        silence_s = heard.silence_s
        if silence_s >= STALLED_S:
            caller.check_time(f"nothing has moved for {silence_s:.2f} s")
        if self._welcome.epoch != line.epoch:
            raise Unreachable("the server was started anew while bytes were on their way")
        if silence_s >= BULK_SILENCE_S:
            raise Unreachable(
                f"the bulk endpoint at port {self._welcome.bulk_port} was silent for {BULK_SILENCE_S:g} s"
            )

    def _check_living(self, caller: Caller) -> None:
        if os.getpid() != self._pid:
            raise Forked("this queue was opened before os.fork; connect again in the child")
        if (over := self._over()) is not None:
            raise type(over)(*over.args)
        if self._closed:
            raise Disconnected("the queue was closed while bytes were on their way")
        if caller.gone:
            raise Disconnected("the caller went away while bytes were on their way")

    @contextmanager
    def _line(self, caller: Caller) -> Iterator[BulkClient]:
        """A connection for one transfer. Kept for the next transfer if this one succeeds, closed if it fails."""
        self._check_living(caller)
        patience_s = caller.patience_s(TIMEOUT_S_DEFAULT)
        if not self._room.acquire(timeout=patience_s):
            raise DeadlineExceeded(
                f"{BULK_TRANSFERS_MAX} bulk transfers of this session are under way, which is the most, and none has "
                f"ended within {patience_s:.3g} s; use fewer threads, or smaller batches"
            )
        try:
            line, is_whole = self._take(), False
            with self._guard:
                self._busy.add(line)
            try:
                yield line
                is_whole = True
            finally:
                self._end_transfer(line, is_whole=is_whole)
        finally:
            self._room.release()

    def _take(self) -> BulkClient:
        while True:
            with self._guard:
                line = self._idle.pop() if self._idle else None
            if line is None:
                return self._dial(self._welcome)
            if line.epoch == self._welcome.epoch and line.quiet:
                return line
            line.close()

    def _end_transfer(self, line: BulkClient, *, is_whole: bool) -> None:
        with self._guard:
            self._busy.discard(line)
            is_kept = is_whole and not self._closed
            if is_kept:
                self._idle.append(line)
        if not is_kept:
            line.close()


class _ConnectionProgress:
    """Measures how long no byte has arrived or left on a connection."""

    def __init__(self, line: BulkClient) -> None:
        self._line = line
        self._moved, self._at = line.moved, time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since a call of this property last saw bytes moved."""
        moved, now = self._line.moved, time.monotonic()
        if moved > self._moved:
            self._moved, self._at = moved, now
        return now - self._at


class Caller:
    """The caller that waits for a transfer: its deadline, and whether it went away.

    After the deadline a transfer continues while its bytes move, so that rows on their way are not thrown away.
    `interrupt` makes the transfer check both now.
    """

    def __init__(self, interrupt: Callable[[], object]) -> None:
        self.gone = False
        self._interrupt = interrupt
        self._deadline: Deadline | None = None

    def leave(self) -> None:
        """The caller went away."""
        self.gone = True
        self._interrupt()

    def bound(self, deadline: Deadline) -> None:
        """Set the caller's deadline."""
        self._deadline = deadline

    def step_s(self) -> float:
        """Seconds to wait for bytes before the deadline is checked again."""
        if self._deadline is None:
            return ASK_S
        return STALLED_S / 4 if self._deadline.over else min(ASK_S, self._deadline.left())

    def patience_s(self, most: float) -> float:
        """Seconds to wait for a free connection, at most `most`."""
        return most if self._deadline is None else min(most, self._deadline.patience())

    def check_time(self, why: str) -> None:
        """`DeadlineExceeded` if the deadline has passed."""
        if self._deadline is not None and self._deadline.over:
            raise DeadlineExceeded(
                f"the bytes did not cross within the {self._deadline.wait_s:g} s that the call was given: {why}; "
                "nothing was changed"
            )


def _shard_of(parts: Sequence[m.ReplyColumns]) -> int:
    shards = {block.shard for part in parts for block in part.blocks}
    if len(shards) != 1:
        raise Unreachable(f"a reply names blocks of shards {sorted(shards)}; this client knows the endpoint of one")
    return shards.pop()


def _columns(
    parts: Sequence[m.ReplyColumns],
    asked: Sequence[RequestedRows],
    fields: Mapping[str, Field],
    fetch: FetchTransfer | None,
) -> tuple[dict[str, Column], list[MappedBlocks]]:
    columns: dict[str, Column] = {}
    held: list[MappedBlocks] = []
    for number, (part, one) in enumerate(zip(parts, asked, strict=True)):
        landed = [fetch.landed[number]] if fetch is not None else []
        blocks = MappedBlocks(landed, [block.memory for block in landed], fields)
        if one.count and one.slot_of_row is None:
            placement = RowPlacement.of_run(blocks, 0, 0, one.count)
        else:
            slots = np.zeros(0, np.int32) if one.slot_of_row is None else one.slot_of_row
            placement = RowPlacement(blocks, np.zeros(len(slots), np.int32), slots)
        held.append(blocks)
        columns |= {name: Column(fields[name], placement) for name in part.fields}
    return columns, held
