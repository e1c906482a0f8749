"""The thread of a shard process that carries out copy orders: it copies blocks that lost a copy in another shard.

See docs/decisions/shards.md.

- It asks for an order (`TakeCopies`), copies the blocks, and reports those that are written with its next request. An
  order that was not reported comes again, and copying it again writes the same bytes. A report is sent until it is
  answered. Once it was sent, the thread writes nothing more into its extent: the coordinator may have granted it to
  others.
- Bytes cross by the bulk protocol, which compares the checksum of every message. A block with its own checksum is
  compared with it too, and does not count as copied if it differs.
- It yields to clients. The thread has a low priority for the CPU. After each piece it pauses as long as the piece took,
  if a client's transfer is under way at this shard's endpoint. So copies take at most half of the time there.
- It holds `COPY_ORDER_BYTES` of blocks in memory, twice where they cross a network.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol

import numpy as np
import xxhash
from msgspec.structs import replace

from transferqueue.client.client import remote_memory, remote_shard_memory
from transferqueue.client.memory.remote import RemoteMemory
from transferqueue.client.session.connection import Connection
from transferqueue.client.session.operation_runner import request_reply, run_sync
from transferqueue.errors import (
    Corruption,
    DeadlineExceeded,
    Disconnected,
    ShardLost,
    TransferQueueError,
    Unreachable,
)
from transferqueue.limits import COPY_ORDER_BYTES, COPY_RETRY_S
from transferqueue.schema import Field, Slice
from transferqueue.storage import Mapping as Arena
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import ArenaBacking, Backing
from transferqueue.storage.memory.checksum import UNCHECKED, checksum
from transferqueue.transport import TcpAddress, parse_address
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.shard")
POLL_S: Final = 60.0
"""One request for an order waits at most this long."""
NICENESS: Final = 10
"""The priority of the copying thread: it runs while processes of normal priority leave the CPU free, and else gets
about a tenth of it."""
JOIN_S: Final = 10.0
"""A transfer ends within a second of its connection, so the thread has ended by then."""
OWN: Final = 0
"""The coordinator's shard."""


class CopyMemory(Protocol):
    """The memory of one shard, to copy from or to."""

    def read(self, blocks: Sequence[m.BlockLocation]) -> list[U8]:
        """The bytes of whole blocks."""

    def read_part(self, block: m.BlockLocation, first: int, end: int) -> U8:
        """Bytes [first, end) of a block."""

    def write(self, target: m.Granted, offset: int, content: U8) -> None:
        """Write at byte `offset` of the arena, inside the extent `target`."""


class MappedCopyMemory:
    """Memory that this process maps. `view`: a writable view of the arena's bytes from an offset on."""

    def __init__(self, view: Callable[[int, int], memoryview]) -> None:
        self._view = view

    def read(self, blocks: Sequence[m.BlockLocation]) -> list[U8]:
        """See `CopyMemory`."""
        return [self.read_part(at, 0, at.nbytes) for at in blocks]

    def read_part(self, block: m.BlockLocation, first: int, end: int) -> U8:
        """See `CopyMemory`."""
        return np.frombuffer(self._view(block.offset + first, end - first), np.uint8)

    def write(self, target: m.Granted, offset: int, content: U8) -> None:
        """See `CopyMemory`."""
        self._view(offset, len(content))[:] = content.data


class RemoteCopyMemory:
    """Memory behind a bulk endpoint. A block is read as one row of a dense field with all its bytes."""

    def __init__(self, memory: RemoteMemory, connection: Connection) -> None:
        self._memory, self._connection = memory, connection

    def read(self, blocks: Sequence[m.BlockLocation]) -> list[U8]:
        """See `CopyMemory`."""
        contents = iter(self._fetch([at for at in blocks if at.nbytes], {}))
        return [next(contents) if at.nbytes else np.empty(0, np.uint8) for at in blocks]

    def read_part(self, block: m.BlockLocation, first: int, end: int) -> U8:
        """See `CopyMemory`."""
        (part,) = self._fetch([block], {_field_of(block).name: Slice((first, end))})
        return part[: end - first]

    def _fetch(self, blocks: Sequence[m.BlockLocation], slices: Mapping[str, Slice]) -> list[U8]:
        if not blocks:
            return []
        fields = {field.name: field for field in map(_field_of, blocks)}
        parts = [_one_row(at) for at in blocks]
        _, held = run_sync(self._connection, self._memory.columns(parts, fields, 1, slices))
        return [memory.live_memory()[0] for memory in held]

    def write(self, target: m.Granted, offset: int, content: U8) -> None:
        """See `CopyMemory`."""
        self._memory.store(target, offset, content.data)


def _field_of(block: m.BlockLocation) -> Field:
    return Field(f"bytes-{block.nbytes}", "uint8", (block.nbytes,))


def _one_row(block: m.BlockLocation) -> m.ReplyColumns:
    names = [_field_of(block).name]
    return m.ReplyColumns(names, [replace(block, rows=1, fields=names, counts=[0])], bytes(4), bytes(4))


class CopyMemories:
    """Opens the memory of any shard of a deployment, as one shard process reaches it."""

    def __init__(
        self,
        address: str,
        connection: Connection,
        backing: Backing,
    ) -> None:
        self._address, self._connection, self._backing = address, connection, backing
        self._welcome: m.Welcome | None = None

    def greeted(self, welcome: m.Welcome) -> None:
        """The coordinator, or its next run, has answered Hello."""
        self._welcome = welcome

    @contextmanager
    def open(self, number: int, own_number: int) -> Iterator[CopyMemory]:
        """The memory of shard `number`, reached from shard `own_number`. `Unreachable`, `ShardLost` if that is
        impossible."""
        if number == own_number and isinstance(self._backing, ArenaBacking):
            memory = self._backing.memory
            yield MappedCopyMemory(lambda offset, nbytes: memory[offset : offset + nbytes].data)
            return
        place = parse_address(self._address)
        if number == OWN and not isinstance(place, TcpAddress):
            with self._arena() as arena:
                yield MappedCopyMemory(arena.writable)
            return
        remote = self._remote(number, place)
        try:
            yield RemoteCopyMemory(remote, self._connection)
        finally:
            remote.close()

    @contextmanager
    def _arena(self) -> Iterator[Arena]:
        """The coordinator's arena. This process is on its host, since it joined at a socket file."""
        welcome = self._greeting()
        arena = Arena.open(welcome.arenas[OWN], welcome.arena_bytes, lambda _: None)
        try:
            yield arena
        finally:
            arena.close()

    def _remote(self, number: int, place: object) -> RemoteMemory:
        if number == OWN and isinstance(place, TcpAddress):
            return remote_memory(place, self._greeting(), self._connection)
        for at in run_sync(self._connection, request_reply(m.ListShards(), m.ShardList)).shards:
            if at.number == number:
                return remote_shard_memory(at, self._greeting(), self._connection)
        raise ShardLost(f"shard {number} is gone with its bytes; they are copied from another one")

    def _greeting(self) -> m.Welcome:
        if self._welcome is None:
            raise Unreachable("the coordinator has not answered yet; the shard copies when it has")
        return self._welcome


class Copier:
    """Carries out the copy orders of one shard process in its own thread, from `start` to `stop`.

    Args:
        busy: returns the number of clients' transfers under way here.
        one_by_one: write each block by itself, because the backing keeps each write as an object.
        clock: seconds.
    """

    def __init__(
        self,
        connection: Connection,
        memories: CopyMemories,
        busy: Callable[[], int],
        *,
        one_by_one: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._memories = connection, memories
        self._busy, self._one_by_one, self._clock = busy, one_by_one, clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transferqueue copier", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end soon. Close the connection, and then `join`."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended, if it was started."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        with suppress(OSError):  # a system that gives threads no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        report = m.TakeCopies(wait_s=POLL_S)
        while not self._stopping.is_set():
            try:
                report = self._turn(report)
            except Disconnected:
                return
            except TransferQueueError as error:
                _log.warning("the coordinator gave no copy order: %s", error)
                self._stopping.wait(COPY_RETRY_S)

    def _turn(self, report: m.TakeCopies) -> m.TakeCopies:
        """Report the latest order, and carry out the next one. Returns its report."""
        try:
            order = run_sync(self._connection, request_reply(report, m.CopyOrder))
        except DeadlineExceeded:  # the report was accepted, and no order came for a while
            return m.TakeCopies(wait_s=POLL_S)
        written: list[int] = []
        try:
            written = self.carry_out(order)
        except Disconnected:
            raise
        except Exception:  # noqa: BLE001  (logged with its cause; its blocks are copied with another order)
            _log.exception("a copy order failed")
        if order.blocks and not written:
            self._stopping.wait(COPY_RETRY_S)
        return m.TakeCopies(order.target.extent, written, POLL_S)

    # ------------------------------------------------------------ one order

    def carry_out(self, order: m.CopyOrder) -> list[int]:
        """Copy the blocks of an order. Returns those that are written. Failures are logged, and their blocks left
        out."""
        written: list[int] = []
        sources: dict[int, list[tuple[m.BlockLocation, int]]] = {}
        for at, offset in zip(order.blocks, order.offsets, strict=True):
            sources.setdefault(at.shard, []).append((at, offset))
        for source, members in sources.items():
            try:
                with (
                    self._memories.open(source, order.shard) as reader,
                    self._memories.open(order.target.shard, order.shard) as writer,
                ):
                    written.extend(self._copied(reader, writer, order.target, members))  # keeps those before an error
            except (TransferQueueError, OSError) as error:
                if self._stopping.is_set():
                    raise Disconnected("the shard stops") from error
                _log.warning(
                    "%d blocks of shard %d were not copied to shard %d: %s",
                    len(members), source, order.target.shard, error,
                )  # fmt: skip
        return written

    def _copied(
        self, reader: CopyMemory, writer: CopyMemory, target: m.Granted, members: Sequence[tuple[m.BlockLocation, int]]
    ) -> Iterator[int]:
        """Copy blocks of one shard; yields the number of each written block."""
        for at, offset in members:
            if at.nbytes > COPY_ORDER_BYTES and self._copy_in_pieces(reader, writer, target, at, offset):
                yield at.block
        began = self._clock()
        small = [(at, offset) for at, offset in members if at.nbytes <= COPY_ORDER_BYTES]
        intact = [block for block in _read(reader, small) if _is_intact(block)] if small else []
        for offset, content in _runs(intact, joined=not self._one_by_one):
            writer.write(target, offset, content)
        self._yield_to_clients(began)
        yield from [at.block for at, _, _ in intact]

    def _copy_in_pieces(
        self, reader: CopyMemory, writer: CopyMemory, target: m.Granted, at: m.BlockLocation, offset: int
    ) -> bool:
        """Copy a large block. Returns whether its bytes are intact."""
        digest = xxhash.xxh3_64()
        for first in range(0, at.nbytes, COPY_ORDER_BYTES):
            began = self._clock()
            piece = reader.read_part(at, first, min(first + COPY_ORDER_BYTES, at.nbytes))
            digest.update(piece.data)
            writer.write(target, offset + first, piece)
            self._yield_to_clients(began)
        return _matches(at, digest.intdigest() or 1)

    def _yield_to_clients(self, began: float) -> None:
        """Pause as long as the latest piece took, if clients' transfers are under way here."""
        if self._busy():
            self._stopping.wait(self._clock() - began)
        if self._stopping.is_set():
            raise Disconnected("the shard stops")


ReadBlock = tuple[m.BlockLocation, int, U8]
"""A block, its offset in the target, and its bytes."""


def _read(reader: CopyMemory, members: Sequence[tuple[m.BlockLocation, int]]) -> list[ReadBlock]:
    """The bytes of these blocks, without unneeded blocks, for which their shard refuses any read, and without blocks
    whose bytes do not match the checksums that their shard keeps."""
    try:
        contents = reader.read([at for at, _ in members])
    except (Disconnected, Corruption) as error:
        if len(members) == 1:
            if isinstance(error, Corruption):
                _log.error("block %d in shard %d is not copied: %s", members[0][0].block, members[0][0].shard, error)
            return []
        half = len(members) // 2
        return [*_read(reader, members[:half]), *_read(reader, members[half:])]
    return [(at, offset, content[: at.nbytes]) for (at, offset), content in zip(members, contents, strict=True)]


def _is_intact(block: ReadBlock) -> bool:
    """Whether the bytes match the checksum of the block, if it has one."""
    at, _, content = block
    return _matches(at, at.checksum and checksum(content))


def _matches(at: m.BlockLocation, computed: int) -> bool:
    if at.checksum in (UNCHECKED, computed):
        return True
    _log.error("block %d in shard %d does not match its checksum; it is not copied", at.block, at.shard)
    return False


def _runs(blocks: Sequence[ReadBlock], *, joined: bool) -> Iterator[tuple[int, U8]]:
    """The bytes to write and their offsets: neighbours in one piece if `joined`."""
    run: list[U8] = []
    start = end = -1
    for _, offset, content in blocks:
        if run and (offset != end or not joined):
            yield start, _joined(run)
            run = []
        if not run:
            start = offset
        run.append(content)
        end = offset + len(content)
    if run:
        yield start, _joined(run)


def _joined(run: Sequence[U8]) -> U8:
    return run[0] if len(run) == 1 else np.concatenate(run)
