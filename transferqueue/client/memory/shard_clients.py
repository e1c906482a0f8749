"""The shards of a deployment as one session uses them: where a put writes, where the columns of a reply come from.

- Blocks of mapped shards are viewed in place. From each other shard the rows of a reply arrive in one transfer, from
  all shards at the same time. A column may have blocks of several shards.
- Shards come and go. If a reply names a shard that this session has not heard of, it asks for the list of all, once;
  the server never sends the list unasked.
- A value with a content is received once: the latest `RECEIVED_BYTES_MAX` bytes of them stay here, and each reply gets
  a copy (`received_contents`). Larger values cross as other columns do, each time.
- Pins of received blocks return when they have been received; pins of mapped blocks, with the last view.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.memory.client_transfer import ReceivedBlock
from transferqueue.client.memory.grants import CommitOutcome, WriteRegion
from transferqueue.client.memory.mapped import MappedMemory, placement_of
from transferqueue.client.memory.received_contents import ReceivedContents
from transferqueue.client.memory.remote import ASK_S, RemoteMemory
from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.connection import Connection
from transferqueue.client.session.operation_runner import INLINE_WORK_BYTES, BlockingWork, Operation, request_reply
from transferqueue.errors import Corruption, DeadlineExceeded, PeerError, ShardLost, TransferQueueError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import FRAME_BYTES, PARTS_MAX
from transferqueue.schema import NO_SLICES, Field, Slice, sliced_fields
from transferqueue.storage.columns.byte_stream import sliced_column_stream
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.wire import codec
from transferqueue.wire import messages as m

OWN: Final = 0
"""The coordinator's shard."""
_MAPPED: Final = -1
"""Stands for all shards that are mapped here: their blocks are viewed together."""
T = TypeVar("T")
Rows = NDArray[np.intp] | None
"""Which rows of a reply; None: all."""
Found = tuple[Rows, MappedBlocks, RowPlacement]
FoundColumns = tuple[dict[str, Column], list[MappedBlocks]]
"""Columns, and for each part of the reply the blocks that hold their memory."""
_FIRST: Final = bytes(4)
"""The first block, and its first row, as a reply names them."""


class FoundTensor(NamedTuple):
    """A tensor, and the blocks that hold its memory. `is_whole` says whether all of it is here."""

    column: Column
    held: MappedBlocks
    is_whole: bool


Key = tuple[int, int]
"""Shard number or `_MAPPED`, and number of rows."""


class ShardClients:
    """The shards of one session. Safe from any thread.

    The remote memories, `own` included if it is remote, return no pins themselves.

    Args:
        own: the coordinator's memory.
        dial: connects to a remote shard.
        unpin: called with blocks whose pins return.
    """

    def __init__(
        self,
        own: MappedMemory | RemoteMemory,
        dial: Callable[[m.ShardEndpoint], RemoteMemory],
        unpin: Callable[[list[int]], object],
    ) -> None:
        self._own = own
        self._dial = dial
        self._unpin = unpin
        self._guard = threading.Lock()
        self._known: dict[int, m.ShardEndpoint] = {}
        self._lines: dict[int, RemoteMemory] = {}
        self._contents = ReceivedContents()

    # ------------------------------------------------------------ which there are

    def know(self, numbers: Iterable[int]) -> Operation[None]:
        """Ask for the list of shards if one of these is unknown. `ShardLost` if one is gone."""
        unknown = [number for number in numbers if number != OWN and number not in self._known]
        if unknown:
            yield from self.look()
        for number in unknown:
            self._at(number)

    def look(self) -> Operation[None]:
        """Ask which shards there are now."""
        reply = yield from request_reply(m.ListShards(), m.ShardList)
        self._update({shard.number: shard for shard in reply.shards})

    def _update(self, found: dict[int, m.ShardEndpoint]) -> None:
        with self._guard:
            gone = [number for number, at in self._known.items() if found.get(number) != at]
            closing = [line for number in gone if (line := self._lines.pop(number, None)) is not None]
            self._known = found
            if isinstance(self._own, MappedMemory):
                self._own.map({at.number: (at.path, at.capacity) for at in found.values() if at.path})
        for line in closing:
            line.close()

    def has(self, number: int) -> bool:
        """Whether the shard was in the last list."""
        return number == OWN or number in self._known

    def welcomed(self, welcome: m.Welcome) -> None:
        """Forget the list of shards: this session has reconnected, perhaps to the next server."""
        with self._guard:
            self._known = {}
            lines = list(self._lines.values())
        for memory in (self._own, *lines):
            if isinstance(memory, RemoteMemory):
                memory.welcomed(welcome)

    def close(self) -> None:
        """Close the connections to all shards, and the mapped memory."""
        self._own.close()
        with self._guard:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()

    def _at(self, number: int) -> m.ShardEndpoint:
        shard = self._known.get(number)
        if shard is None:
            raise _lost(number)
        return shard

    def _place(self, number: int) -> int:
        """The shard, or `_MAPPED` if it is mapped here."""
        is_mapped = isinstance(self._own, MappedMemory) and (number == OWN or self._at(number).path)
        return _MAPPED if is_mapped else number

    def _memory(self, number: int) -> MappedMemory | RemoteMemory:
        if number == OWN or self._place(number) == _MAPPED:
            return self._own
        with self._guard:
            if number not in self._lines:
                self._lines[number] = self._dial(self._at(number))
            return self._lines[number]

    # ------------------------------------------------------------ writing

    def write(self, region: WriteRegion, nbytes: int, fill: Callable[[memoryview], object]) -> Operation[None]:
        """Let `fill` write `nbytes` into the region. If that fails, end the region."""
        own, torn = self._own, CommitOutcome.REFUSED
        try:
            if region.shard == OWN and nbytes <= INLINE_WORK_BYTES and isinstance(own, MappedMemory):
                own.write_now(region, nbytes, fill)
                return
            yield from self.know([region.shard])
            memory = self._memory(region.shard)
            torn = memory.torn
            yield memory.write(region, nbytes, fill)
        except PeerError as error:
            region.done(CommitOutcome.TORN)
            yield from self._explain([region.shard], error)
        except BaseException:
            region.done(torn)
            raise

    def _explain(self, numbers: Iterable[int], error: PeerError) -> Operation[NoReturn]:
        """Raise `ShardLost` if a shard is gone, else `error`."""
        if not isinstance(error, ShardLost | Corruption) and any(number != OWN for number in numbers):
            yield from self.look()
            for number in numbers:
                if not self.has(number):
                    raise _lost(number) from error
        raise error

    # ------------------------------------------------------------ reading

    def columns(
        self,
        parts: Sequence[m.ReplyColumns],
        fields: Mapping[str, Field],
        rows: int,
        slices: Mapping[str, Slice] = NO_SLICES,
    ) -> Operation[FoundColumns]:
        """The columns of one reply, those in `slices` cut, and for each part the blocks that hold its memory. The pins
        return at once if this fails."""
        named = {block.block: block for part in parts for block in part.blocks}
        shards = {block.shard for block in named.values()}
        received = list(named)
        try:
            yield from self.know(shards)
            received = [at.block for at in named.values() if self._place(at.shard) != _MAPPED]
            columns_of = self._columns_by_content if any(at.content for at in named.values()) else self._columns_of
            found = yield from columns_of(parts, fields, rows, slices)
        except PeerError as error:
            yield from self._explain(shards, error)
        finally:
            if received:
                self._unpin(received)  # which empties the list
        return found

    def tensors(
        self, blocks: Sequence[m.BlockLocation], fields: Mapping[str, Field], slices: Mapping[str, Slice]
    ) -> Operation[list[FoundTensor]]:
        """The tensor in each of these blocks of one row and field, those in `slices` cut. Errors and pins as of
        `columns`.

        Of blocks that are not mapped here only the wanted part crosses. Their shards compare blocks that cross in part
        with their checksums; no other process has compared them.
        """
        shards, received = {block.shard for block in blocks}, [block.block for block in blocks]
        found: dict[int, FoundTensor] = {}
        try:
            yield from self.know(shards)
            received = [at.block for at in blocks if self._place(at.shard) != _MAPPED]
            places: dict[int, list[m.BlockLocation]] = {}
            for block in blocks:
                places.setdefault(self._place(block.shard), []).append(block)
            asked = [self._tensors_at(some, fields, slices) for some in places.values()]
            for some in (yield from run_concurrently(asked)):
                found |= some
        except PeerError as error:
            yield from self._explain(shards, error)
        finally:
            if received:
                self._unpin(received)  # which empties the list
        return [found[block.block] for block in blocks]

    def _tensors_at(
        self, blocks: Sequence[m.BlockLocation], fields: Mapping[str, Field], slices: Mapping[str, Slice]
    ) -> Operation[dict[int, FoundTensor]]:
        parts = list(map(_alone, blocks))
        memory = self._memory(blocks[0].shard)
        if isinstance(memory, MappedMemory):
            columns, held = yield from memory.columns(parts, fields, 1, slices)
            cut = set[str]()
        else:
            columns, held = yield from memory.columns(parts, fields, 1, slices, compare=True)
            cut = set(slices)
        return {
            at.block: FoundTensor(columns[at.fields[0]], kept, is_whole=at.fields[0] not in cut)
            for at, kept in zip(blocks, held, strict=True)
        }

    def _columns_of(
        self, parts: Sequence[m.ReplyColumns], fields: Mapping[str, Field], rows: int, slices: Mapping[str, Slice]
    ) -> Operation[FoundColumns]:
        shards = {block.shard for part in parts for block in part.blocks}
        if len({self._place(number) for number in shards}) < 2:
            memory = self._memory(shards.pop()) if shards else self._own
            return (yield from memory.columns(parts, fields, rows, slices))
        found = yield from self._gathered(parts, fields, rows, slices)
        return _joined(parts, found, sliced_fields(fields, slices), rows)

    def _columns_by_content(
        self, parts: Sequence[m.ReplyColumns], fields: Mapping[str, Field], rows: int, slices: Mapping[str, Slice]
    ) -> Operation[FoundColumns]:
        """Columns whose values have contents and lie elsewhere: from the values received before, else received whole
        and kept."""
        are_kept = [
            part.fields[0] not in slices
            and all(self._contents.may_keep(at) and self._place(at.shard) != _MAPPED for at in part.blocks)
            for part in parts
        ]
        others = [part for part, is_kept in zip(parts, are_kept, strict=True) if not is_kept]
        columns, held_by_others = yield from self._columns_of(others, fields, rows, slices)
        wanted = {at.block: at for part, is_kept in zip(parts, are_kept, strict=True) if is_kept for at in part.blocks}
        memory = {number: found for number, at in wanted.items() if (found := self._contents.copy_of(at)) is not None}
        missing = [at for number, at in wanted.items() if number not in memory]
        for first in range(0, len(missing), PARTS_MAX):
            some = missing[first : first + PARTS_MAX]
            _, arrived = yield from self._columns_of(list(map(_alone, some)), fields, 1, NO_SLICES)
            for at, blocks in zip(some, arrived, strict=True):
                memory[at.block] = blocks.live_memory()[0]
                self._contents.add(at, memory[at.block])
        held: list[MappedBlocks] = []
        rest = iter(held_by_others)
        for part, is_kept in zip(parts, are_kept, strict=True):
            held.append(
                MappedBlocks(part.blocks, [memory[at.block] for at in part.blocks], fields) if is_kept else next(rest)
            )
            if is_kept:
                placement = placement_of(part, held[-1], rows)
                columns |= {name: Column(fields[name], placement) for name in part.fields}
        return columns, held

    def _gathered(
        self, parts: Sequence[m.ReplyColumns], fields: Mapping[str, Field], rows: int, slices: Mapping[str, Slice]
    ) -> Operation[list[list[Found]]]:
        """The rows of each part, by the shards that hold them."""
        found: list[list[Found]] = [[] for _ in parts]
        wanted: dict[Key, list[tuple[int, Rows, m.ReplyColumns]]] = {}
        for at, part in enumerate(parts):
            for place, which, some in _split(part, rows, self._place):
                count = part.values(rows) if which is None else len(which)
                wanted.setdefault((place, count), []).append((at, which, some))
        self._view(wanted, fields, found, slices)
        keys = [key for key in wanted if key[0] != _MAPPED]
        received = yield from run_concurrently(
            [self._memory(key[0]).columns([some for _, _, some in wanted[key]], fields, key[1], slices) for key in keys]
        )
        for key, (columns, held) in zip(keys, received, strict=True):
            for (at, which, some), blocks in zip(wanted[key], held, strict=True):
                found[at].append((which, blocks, columns[some.fields[0]].placement))
        return found

    def _view(
        self,
        wanted: Mapping[Key, list[tuple[int, Rows, m.ReplyColumns]]],
        fields: Mapping[str, Field],
        found: list[list[Found]],
        slices: Mapping[str, Slice],
    ) -> None:
        here = [(count, *one) for (place, count), every in wanted.items() if place == _MAPPED for one in every]
        if not here or not isinstance(self._own, MappedMemory):
            return
        memory = self._own.pin_all({at.block: at for _, _, _, some in here for at in some.blocks}.values())
        for count, at, which, some in here:
            blocks = MappedBlocks(some.blocks, [memory[one.block] for one in some.blocks], fields)
            placement = placement_of(some, blocks, count)
            if slices.keys() & set(some.fields):
                blocks, placement = _slice_here(some.fields, placement, fields, slices)
            found[at].append((which, blocks, placement))


def _slice_here(
    names: Sequence[str], placement: RowPlacement, fields: Mapping[str, Field], slices: Mapping[str, Slice]
) -> tuple[MappedBlocks, RowPlacement]:
    """Mapped rows, cut into a block as a shard would send it, so that they can be joined with rows of other shards."""
    counts, pieces = sliced_column_stream([fields[name] for name in names], slices, placement, FRAME_BYTES)
    taken = list(pieces)
    memory = np.concatenate(taken) if taken else np.empty(0, np.uint8)
    block = ReceivedBlock(0, len(memory), placement.rows, list(names), counts, memory)
    blocks = MappedBlocks([block], [memory], sliced_fields(fields, slices))
    return blocks, RowPlacement.of_run(blocks, 0, 0, placement.rows)


PRESENCE_S: Final = 0.1
"""How long a transfer pauses for the coordinator to say whether the shard is there."""


class ShardLivenessCheck:
    """Asks the coordinator, at most every `ASK_S` of a transfer, whether a remote shard is there. So a caller learns
    that the shard was killed sooner than by its silence."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._asked_at = connection.clock()

    def over(self) -> TransferQueueError | None:
        """Why the transfer cannot go on: the session is over, or the shard is gone; None: neither."""
        if self._connection.over is not None:
            return self._connection.over
        if self._connection.clock() - self._asked_at < ASK_S:
            return None
        self._asked_at = self._connection.clock()
        try:
            reply = self._connection.call(m.ListShards(), Deadline(self._connection.clock, 0.0, PRESENCE_S))
        except DeadlineExceeded:  # a coordinator that does not answer says nothing about the shard
            return None
        if isinstance(reply, m.ShardList) and all(shard.number != self._number for shard in reply.shards):
            return _lost(self._number)
        return None


def _lost(number: int) -> ShardLost:
    return ShardLost(f"shard {number} is gone, and the bytes there with it; ask for the rows again")


def _split(part: m.ReplyColumns, rows: int, place: Callable[[int], int]) -> list[tuple[int, Rows, m.ReplyColumns]]:
    """Split a part into parts that each lie in one shard."""
    place_of_block = np.array([place(block.shard) for block in part.blocks], np.int64)
    places = np.unique(place_of_block)
    if places.size == 1:
        return [(int(places[0]), None, part)]
    rows = part.values(rows)
    block_of_row = codec.decode_constant(part.block_of_row, "<i4", rows)
    slot_of_row = codec.decode_ascending(part.slot_of_row, "<i4", rows)
    found: list[tuple[int, Rows, m.ReplyColumns]] = []
    for one in places.tolist():
        there = place_of_block == one
        which = np.flatnonzero(there[block_of_row])
        renumbered = (np.cumsum(there) - 1).astype("<i4")
        blocks = [block for block, is_there in zip(part.blocks, there.tolist(), strict=True) if is_there]
        some = m.ReplyColumns(
            part.fields, blocks, renumbered[block_of_row[which]].tobytes(), slot_of_row[which].astype("<i4").tobytes()
        )
        found.append((one, which, some))
    return found


def _alone(block: m.BlockLocation) -> m.ReplyColumns:
    """The part of a reply of one row, which is the only one of this block."""
    return m.ReplyColumns(block.fields, [block], block_of_row=_FIRST, slot_of_row=_FIRST)


def _joined(
    parts: Sequence[m.ReplyColumns], found: Sequence[Sequence[Found]], fields: Mapping[str, Field], rows: int
) -> tuple[dict[str, Column], list[MappedBlocks]]:
    columns: dict[str, Column] = {}
    held: list[MappedBlocks] = []
    for part, pieces in zip(parts, found, strict=True):
        blocks, placement = _one(pieces, fields, part.values(rows))
        held.append(blocks)
        columns |= {name: Column(fields[name], placement) for name in part.fields}
    return columns, held


def _one(pieces: Sequence[Found], fields: Mapping[str, Field], rows: int) -> tuple[MappedBlocks, RowPlacement]:
    """One placement for rows that lie in several shards."""
    if len(pieces) == 1:
        return pieces[0][1:]
    shapes = [shape for _, blocks, _ in pieces for shape in blocks.shapes]
    blocks = MappedBlocks(shapes, [memory for _, blocks, _ in pieces for memory in blocks.memory], fields)
    block_of_row, slot_of_row = np.empty(rows, np.int32), np.empty(rows, np.int32)
    before = 0
    for which, some, placement in pieces:
        block_of_row[which] = placement.block_of_row + before
        slot_of_row[which] = placement.slot_of_row
        before += len(some.shapes)
    return blocks, RowPlacement(blocks, block_of_row, slot_of_row)


def run_concurrently(operations: Sequence[Operation[T]]) -> Operation[list[T]]:
    """Run operations that yield at most one `BlockingWork` each, all works at the same time. If one fails, all end."""
    begun: list[tuple[Operation[T], BlockingWork]] = []
    results: dict[int, T] = {}
    try:
        for at, operation in enumerate(operations):
            _step(operation, None, at, begun, results)
        if begun:
            yield _at_once([work for _, work in begun])
    except BaseException:
        for operation, _ in begun:
            operation.close()
        raise
    positions = [at for at in range(len(operations)) if at not in results]
    ended: list[tuple[Operation[T], BlockingWork]] = []
    for at, (operation, _) in zip(positions, begun, strict=True):
        _step(operation, None, at, ended, results)
    return [results[at] for at in range(len(operations))]


def _step(
    operation: Operation[T], given: Any, at: int, asked: list[tuple[Operation[T], BlockingWork]], results: dict[int, T]
) -> None:
    try:
        wanted = operation.send(given)
    except StopIteration as end:
        results[at] = end.value
    else:
        if not isinstance(wanted, BlockingWork):
            raise TypeError(f"an operation asked for {type(wanted).__name__}, where only works can run together")
        asked.append((operation, wanted))


def _at_once(works: Sequence[BlockingWork]) -> BlockingWork:
    def abandon() -> None:
        for work in works:
            if work.abandon is not None:
                work.abandon()

    def run() -> None:
        if len(works) == 1:
            works[0].run()
            return
        with ThreadPoolExecutor(len(works) - 1, thread_name_prefix="transferqueue read") as pool:
            others = [pool.submit(work.run) for work in works[1:]]
            with OnFailure(abandon):
                works[0].run()
                for other in others:
                    other.result()

    def bound(deadline: Deadline) -> None:
        for work in works:
            if work.bound is not None:
                work.bound(deadline)

    return BlockingWork(sum(work.nbytes for work in works), run, abandon=abandon, bound=bound)
