"""The data plane of a session that cannot map the arena: its bytes go over the bulk endpoint of the shard.

A read fetches all columns of a reply in one transfer, when the reply comes; then their blocks are unpinned, and the columns
are this process's own. A write is put together in a buffer here and crosses before its commit. Both block the calling
thread, and each has a connection of its own while it lasts (`transport.bulk` has the rules).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import numpy as np

from transferqueue.client.driving import Operation, Work
from transferqueue.client.received import Buffers
from transferqueue.client.transfers import Fetch, Rows, Store, Transfer, rows_of
from transferqueue.client.writing import Fate, Piece
from transferqueue.errors import (
    Corruption,
    DeadlineExceeded,
    Disconnected,
    Forked,
    TransferQueueError,
    Unreachable,
    UsageError,
)
from transferqueue.limits import BULK_SILENCE_S, BULK_TRANSFERS_MAX, BULK_TRIES, TIMEOUT_S_DEFAULT
from transferqueue.schema import Field
from transferqueue.storage.column import Column
from transferqueue.storage.placement import Blocks, Placement
from transferqueue.transport import Wakeup
from transferqueue.transport import bulk as b
from transferqueue.transport.bulk_sockets import BulkLine
from transferqueue.wire import messages as m

T = TypeVar("T", bound=Transfer)

ASK_S: Final = 1.0
"""After this silence the shard is asked whether it still knows of a transfer: a connection that was lost and found
(ZeroMQ does that unseen) is noticed then."""


class RemoteMemory:
    """Reads and writes of one session over connections that `dial` makes. Safe from any thread.

    unpin: told blocks whose pins return. over: why the session has ended, or None. on_close: called at the end of `close`.
    """

    def __init__(
        self,
        dial: Callable[[m.Welcome], BulkLine],
        welcome: m.Welcome,
        unpin: Callable[[list[int]], object],
        over: Callable[[], TransferQueueError | None],
        on_close: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not welcome.bulk_port:
            raise UsageError(
                "this server has no bulk endpoint, so a client that cannot map its memory has no way to the bytes; "
                "serve at a tcp address"
            )
        self.buffers: Final = Buffers()
        self._dial = dial
        self._welcome = welcome
        self._unpin = unpin
        self._over = over
        self._on_close = on_close
        self._clock = clock
        self._room = threading.BoundedSemaphore(BULK_TRANSFERS_MAX)
        self._idle: list[BulkLine] = []
        self._stop = Wakeup()
        self._closed = False
        self._pid = os.getpid()

    torn: Final = Fate.TORN
    """What a piece is whose writing failed: late frames may still arrive in it."""

    def write(self, piece: Piece, nbytes: int, fill: Callable[[memoryview], object]) -> Work:
        """Let `fill` write `nbytes`, and carry them into a piece of an extent granted to this session.

        The work ends when they are there. `Unreachable` or `Corruption` if they did not arrive in `BULK_TRIES` attempts.
        """
        given_up = threading.Event()
        return Work(nbytes, lambda: self._write(piece, nbytes, fill, given_up.is_set), abandon=given_up.set)

    def _write(
        self, piece: Piece, nbytes: int, fill: Callable[[memoryview], object], given_up: Callable[[], bool]
    ) -> None:
        staged = self.buffers.take(nbytes)
        fill(staged.data)
        session = self._welcome.session
        self._carry(lambda number: Store(number, session, piece.granted, piece.offset, staged.data), given_up)

    def columns(
        self, parts: Sequence[m.Part], fields: Mapping[str, Field], rows: int
    ) -> Operation[tuple[dict[str, Column], list[Blocks]]]:
        """Columns of the parts of one reply, received, and what holds them. The pins return in any case."""
        try:
            asked = [rows_of(part, rows) for part in parts]
            found: list[Fetch] = []
            if asked and rows:
                given_up = threading.Event()
                yield Work(
                    sum(at.nbytes for one in asked for at in one.wanted.blocks),
                    lambda: found.append(self._fetch(_shard_of(parts), fields, asked, given_up.is_set)),
                    abandon=given_up.set,
                )
        finally:
            self._unpin(list({block.block for part in parts for block in part.blocks}))
        return _columns(parts, asked, fields, found[0] if found else None)

    def welcomed(self, welcome: m.Welcome) -> None:
        """The server was found again, or one that took its place: what is under way is begun again with that one."""
        self._welcome = welcome

    def close(self) -> None:
        """End transfers under way (`Disconnected`), and close. What was received stays. Again, or in a forked child: nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        self._stop.set()
        while self._idle:
            self._idle.pop().close()
        self._on_close()

    def _fetch(
        self, shard: int, fields: Mapping[str, Field], asked: Sequence[Rows], given_up: Callable[[], bool]
    ) -> Fetch:
        session = self._welcome.session
        return self._carry(lambda number: Fetch(number, session, shard, fields, asked, self.buffers), given_up)

    def _carry(self, begin: Callable[[int], T], given_up: Callable[[], bool]) -> T:
        """One transfer, begun again over another connection when it fails on the way."""
        failed: Corruption | Unreachable | None = None
        for _ in range(BULK_TRIES):
            try:
                with self._line() as line:
                    line.transfers += 1
                    transfer = begin(line.transfers)
                    self._drive(line, transfer, given_up)
                    return transfer
            except (Corruption, Unreachable) as error:
                failed = error
        kind = Corruption if isinstance(failed, Corruption) else Unreachable
        raise kind(f"the bytes did not cross in {BULK_TRIES} attempts; at last: {failed}") from failed

    def _drive(self, line: BulkLine, transfer: Transfer, given_up: Callable[[], bool]) -> None:
        for message in transfer.opening():
            line.send(message)
        heard_at = self._clock()
        while not transfer.done:
            self._check_living(given_up)
            if self._welcome.epoch != line.epoch:
                raise Unreachable("the server was started anew while bytes were on their way")
            arrived = line.receive(self._stop, ASK_S)
            if arrived is not None:
                heard_at = self._clock()
                head, content = arrived
                for message in transfer.receive(b.to_client(head, content), content):
                    line.send(message)
            elif self._clock() - heard_at >= BULK_SILENCE_S:
                raise Unreachable(
                    f"the bulk endpoint at port {self._welcome.bulk_port} was silent for {BULK_SILENCE_S:g} s"
                )
            else:
                line.send(transfer.ask())

    def _check_living(self, given_up: Callable[[], bool]) -> None:
        if os.getpid() != self._pid:
            raise Forked("this queue was opened before os.fork; connect again in the child")
        if (over := self._over()) is not None:
            raise type(over)(*over.args)
        if self._closed:
            raise Disconnected("the queue was closed while bytes were on their way")
        if given_up():
            raise Disconnected("the caller went away while bytes were on their way")

    @contextmanager
    def _line(self) -> Iterator[BulkLine]:
        """A connection for one transfer. Kept for the next one if all went well, closed otherwise."""
        self._check_living(_never)
        if not self._room.acquire(timeout=TIMEOUT_S_DEFAULT):
            raise DeadlineExceeded(
                f"{BULK_TRANSFERS_MAX} bulk transfers of this session are under way, which is the most, and none has "
                f"ended within {TIMEOUT_S_DEFAULT:g} s; use fewer threads, or smaller batches"
            )
        try:
            line = self._take()
            try:
                yield line
            except BaseException:
                line.close()
                raise
            self._keep(line)
        finally:
            self._room.release()

    def _take(self) -> BulkLine:
        while True:
            try:
                line = self._idle.pop()
            except IndexError:
                return self._dial(self._welcome)
            if line.epoch == self._welcome.epoch:
                return line
            line.close()

    def _keep(self, line: BulkLine) -> None:
        self._idle.append(line)
        if self._closed:  # perhaps `close` has emptied the list before
            while self._idle:
                self._idle.pop().close()


def _never() -> bool:
    return False


def _shard_of(parts: Sequence[m.Part]) -> int:
    shards = {block.shard for part in parts for block in part.blocks}
    if len(shards) != 1:
        raise Unreachable(f"a reply names blocks of shards {sorted(shards)}; this client knows the endpoint of one")
    return shards.pop()


def _columns(
    parts: Sequence[m.Part], asked: Sequence[Rows], fields: Mapping[str, Field], fetch: Fetch | None
) -> tuple[dict[str, Column], list[Blocks]]:
    columns: dict[str, Column] = {}
    held: list[Blocks] = []
    for number, (part, one) in enumerate(zip(parts, asked, strict=True)):
        landed = [fetch.landed[number]] if fetch is not None else []
        blocks = Blocks(landed, [block.memory for block in landed], fields)
        placement = Placement(blocks, np.zeros(len(one.slot_of_row), np.int32), one.slot_of_row)
        held.append(blocks)
        columns |= {name: Column(fields[name], placement) for name in part.fields}
    return columns, held
