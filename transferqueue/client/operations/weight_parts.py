"""Tensors of weights as they arrive: fetched, compared with their checksums, and held while their version is not whole
yet.

1. A part of a version that is published in parts can be read as soon as it is committed
   (`ledger/requests/pending_versions`). A pull whose bytes cross a network asks for parts while it waits, fetches them,
   and compares their checksums. A pull that maps the memory fetches nothing, so it waits for the whole version.
2. The reply with the published version alone decides which tensors the version has. A tensor that came early is taken
   if its field, size and checksum are those of the version; all others are fetched then. So no caller gets a torn or
   mixed version.
3. If the version is given up, its tensors that came are held until a part of another version comes: when a relay dies,
   the next one brings the same bytes.
4. A range that has differences is made in memory of this process: of the content that the caller holds, if the
   differences lead from there, else of the whole field. Its checksum is compared, so a wrong difference is found. If
   only a part of it is pulled, only that part is made, of the sections of the differences from its first element to its
   last. Then the blocks that it is made of are compared, and the content that each difference is of is known by its
   checksum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.memory.client_transfer import ReceivedBlock
from transferqueue.client.memory.remote import RemoteMemory
from transferqueue.client.memory.shard_clients import FoundTensor
from transferqueue.client.operations.stored_ranges import StoredDelta, StoredRange, stored_ranges
from transferqueue.client.operations.tensor_parts import WHOLE, apply_delta_in_part, sections_with
from transferqueue.client.operations.weight_blocks import ReusedTensor
from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.operation_runner import BlockingWork, Operation, request_reply
from transferqueue.errors import Corruption, ShardLost, VersionGivenUp
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import FRAME_BYTES, PARTS_MAX
from transferqueue.schema import Field, Slice, sliced_field
from transferqueue.storage.columns.byte_stream import sliced_column_stream
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import verify
from transferqueue.storage.memory.delta import Moves, apply_delta
from transferqueue.wire import messages as m

Parts = Mapping[str, Slice]
"""The wanted part of each field that is not wanted whole."""
Needed = Callable[[StoredRange], Slice | None]
"""Which part of a range a pull needs; None: nothing of it, or it is here."""
Base = Callable[[str], "SharedTensor | None"]
"""The range of this field that is held, with any content; None: there is none."""
Wanted = Mapping[str, tuple[StoredRange, Slice]]
"""Ranges to fetch, by their fields, and the part of each."""

_MOVED_SHARE_MAX: Final = 1 / 16
"""With more changed elements than this, writing each of them takes longer than writing all."""


class SharedTensor:
    """One range, or a part of it, in this process's memory, which several versions may share. The last of them frees
    it.

    `is_whole` says whether all of the range is here. `part` is the part of it that `column` has. `sum` is the checksum
    of all of the range, and `block` the block with all of it, which may have an earlier content. `moved` has the
    positions of the elements that differ from the content that it was made of; None: any may.
    """

    __slots__ = ("_users", "block", "blocks", "column", "field", "is_whole", "moved", "part", "sum")
    _guard: Final = threading.Lock()

    def __init__(
        self,
        found: FoundTensor,
        field: Field,
        block: m.BlockLocation,
        part: Slice,
        content: int,
        moved: NDArray[np.int64] | None = None,
    ) -> None:
        self.column, self.blocks, self.is_whole = found
        self.field, self.block, self.part, self.sum, self.moved = field, block, part, content, moved
        self._users = 1

    @property
    def is_own(self) -> bool:
        """Whether it lies in memory of this process, so that no pin holds memory of a server for it."""
        return isinstance(self.blocks.shapes[0], ReceivedBlock)

    def share(self) -> bool:
        """Count one more version; False if the tensor was freed already."""
        with self._guard:
            self._users += self._users > 0
            return self._users > 0

    def release(self, message: str) -> None:
        """Count one version less. The last one frees the memory; `message` is the error of later reads."""
        with self._guard:
            self._users -= 1
            if self._users:
                return
        self.blocks.end(message)

    def is_of(self, stored: StoredRange, part: Slice = WHOLE) -> bool:
        """Whether it is this part of this content."""
        return self.part == part and stored.is_same(self.field, self.sum)

    def bytes_from(self, first: int) -> U8:
        """The bytes of a field of bytes from `first` on, where its part begins, and padding."""
        return self.blocks.live_memory()[0][first if self.is_whole else 0 :]

    def own_copy(self) -> U8:
        """Its bytes in new memory, one element after the other."""
        memory = self.blocks.live_memory()[0]
        if not self.is_whole or self.part.whole:
            return memory.copy()
        placement = RowPlacement.of_run(self.blocks, 0, 0, 1)
        _, pieces = sliced_column_stream([self.field], {self.field.name: self.part}, placement, FRAME_BYTES)
        return np.concatenate(list(pieces))


def fetch_tensors(
    client: ClientSession,
    blocks: Sequence[m.BlockLocation],
    fields: Mapping[str, Field],
    subject: str,
    parts: Parts = MappingProxyType({}),
) -> Operation[dict[str, SharedTensor]]:
    """Fetch the tensors in `blocks`, and compare their checksums. The pins of `blocks` return if this fails, and if the
    bytes were received.

    One bulk read takes `PARTS_MAX` blocks, so a model with more tensors takes several. The shard compares blocks that
    cross in part.
    """
    tensors: dict[str, SharedTensor] = {}
    begun = 0
    try:
        while begun < len(blocks):
            some = blocks[begun : begun + PARTS_MAX]
            begun += len(some)
            found = yield from client.shards.tensors(some, fields, parts)
            tensors |= {
                name: SharedTensor(one, fields[name], block, parts.get(name, WHOLE), block.checksum)
                for one, block in zip(found, some, strict=True)
                for name in block.fields
            }
        here = {name: tensor for name, tensor in tensors.items() if tensor.is_whole}
        yield BlockingWork(sum(tensor.block.nbytes for tensor in here.values()), lambda: _verify(here, subject))
    except BaseException:
        return_pins(client, blocks[begun:], ())
        release_all(tensors, f"{subject} did not arrive whole; pull it again")
        raise
    return tensors


def _verify(tensors: Mapping[str, SharedTensor], subject: str) -> None:
    for name, tensor in tensors.items():
        verify(tensor.blocks.live_memory()[0], tensor.block.checksum, f'tensor "{name}" of {subject}')


def copy_of(tensor: SharedTensor, of: m.TensorRange | None) -> ReusedTensor:
    """The bytes of a tensor, to be published elsewhere as they are. `of`: what it is, if not a whole tensor."""
    return ReusedTensor([tensor.field], tensor.block, tensor.blocks.live_memory()[0], of, tensor.sum)


def release_all(tensors: Mapping[str, SharedTensor], message: str) -> None:
    """Release each of the tensors."""
    for tensor in tensors.values():
        tensor.release(message)


class ArrivedTensors:
    """Tensors of one version that is not whole yet, by name. `number` is the pending version, `have` the number of its
    parts that were received, `refused` that of ranges that came out wrong."""

    def __init__(self) -> None:
        self.number = self.have = self.refused = 0
        self._version = -1
        self._tensors: dict[str, SharedTensor] = {}

    def has(self, stored: StoredRange, part: Slice) -> bool:
        """Whether this part of the range has come."""
        tensor = self._tensors.get(stored.field.name)
        return tensor is not None and tensor.is_of(stored, part)

    def take(self, name: str) -> SharedTensor:
        """Hand over a tensor that has come."""
        return self._tensors.pop(name)

    def begin(self, version: int) -> None:
        """Parts of this version follow. Those of another one are released."""
        if version != self._version:
            self.release()
        self._version = version

    def add(self, tensors: Mapping[str, SharedTensor]) -> None:
        """Hold these. Others of their names are released."""
        release_all({name: self._tensors.pop(name) for name in tensors if name in self._tensors}, "it came again")
        self._tensors |= tensors

    def release(self) -> None:
        """Release the tensors that are left."""
        release_all(self._tensors, "its version was given up, or the pull has ended")
        self._tensors = {}


def await_version(
    client: ClientSession,
    request: m.Pull,
    deadline: Deadline,
    arrived: ArrivedTensors,
    needed: Needed,
    base: Base,
) -> Operation[m.WeightsReply]:
    """Wait for the published version. Meanwhile fetch the `needed` part of its parts, if bytes cross a network."""
    crosses = isinstance(client.memory, RemoteMemory)
    while True:
        asked = msgspec.structs.replace(
            request,
            wait_s=deadline.left(),
            parts=crosses and not deadline.over,
            pending=arrived.number,
            have=arrived.have,
        )
        try:
            reply = yield from request_reply(asked, m.WeightsReply)
        except VersionGivenUp:  # wait for the next one
            arrived.number = arrived.have = 0
            continue
        if not reply.pending:
            return reply
        yield from _fetch_early(client, reply, request.channel, arrived, needed, base)
        arrived.number, arrived.have = reply.pending, reply.have


def _fetch_early(
    client: ClientSession,
    reply: m.WeightsReply,
    channel: str,
    arrived: ArrivedTensors,
    needed: Needed,
    base: Base,
) -> Operation[None]:
    arrived.begin(reply.version)
    wanted = dict[str, tuple[StoredRange, Slice]]()
    with OnFailure(return_pins, client, reply.blocks, ()):
        for name, stored in stored_ranges(reply.fields, reply.blocks, reply.ranges).items():
            part = needed(stored)
            if part is not None and not arrived.has(stored, part):
                wanted[name] = stored, part
    subject = f'version {reply.version} of channel "{channel}"'
    try:
        arrived.add((yield from fetch_ranges(client, reply, wanted, base, subject, arrived)))
    except ShardLost:
        return  # the coordinator gives the version up


# ---------------------------------------------------------------- ranges with differences


def fetch_ranges(
    client: ClientSession,
    reply: m.WeightsReply,
    wanted: Wanted,
    base: Base,
    subject: str,
    arrived: ArrivedTensors,
) -> Operation[dict[str, SharedTensor]]:
    """Fetch the wanted ranges, and make those that have differences. The pins of all blocks of the reply return that
    are not needed, or were received; all if this fails.

    `base` gives the part of a range that is held already, with any content.
    """
    bases = dict[str, SharedTensor]()
    with OnFailure(release_all, bases, "the pull that shared it failed"):
        with OnFailure(return_pins, client, reply.blocks, ()):
            steps = {name: _steps(*one, base, bases) for name, one in wanted.items()}
            deltas = [delta for some in steps.values() for delta in some]
            blocks = [stored.block for name, (stored, _) in wanted.items() if name not in bases]
            blocks += [delta.block for delta in deltas]
        return_pins(client, reply.blocks, blocks)
        fields = {stored.field.name: stored.field for stored, _ in wanted.values()}
        fields |= {delta.field.name: delta.field for delta in deltas}
        parts = {name: part for name, (_, part) in wanted.items() if not part.whole}
        starts = dict[str, int]()
        for name, some in steps.items():
            for delta in some:
                first, end = delta.bytes_of(sections_with(*wanted[name]))
                starts[delta.field.name] = first
                if (first, end) != (0, delta.field.fixed[0]):
                    parts[delta.field.name] = Slice((first, end))
        found = yield from fetch_tensors(client, blocks, fields, subject, parts)
    made = dict[str, SharedTensor]()
    work = {name: some for name, some in steps.items() if some}

    def make() -> None:
        for name, some in work.items():
            stored, part = wanted[name]
            source = bases.get(name) or found[name]
            changes = [found[delta.field.name].bytes_from(starts[delta.field.name]) for delta in some]
            made[name] = _made(stored, part, source, changes, subject, arrived)
            if name not in bases:
                made[name].moved = None

    with OnFailure(release_all, found, f"{subject} was not made; pull it again"):
        try:
            yield BlockingWork(sum(wanted[name][0].block.nbytes for name in work), make)
        finally:
            release_all(bases, "another content was made of it")
    used = {delta.field.name for delta in deltas} | (work.keys() - bases.keys())
    release_all({name: found.pop(name) for name in used}, "another content was made of it")
    return found | made


def _steps(stored: StoredRange, part: Slice, base: Base, bases: dict[str, SharedTensor]) -> list[StoredDelta]:
    """The differences to apply to what is held, which is then in `bases`, or else to the whole field."""
    whole = stored.after_whole
    held = base(stored.field.name) if stored.deltas else None
    if held is None or held.part != part or held.field != stored.field:
        return whole
    rest = stored.after(held.sum)
    if not rest or sum(delta.block.nbytes for delta in rest) > stored.block.nbytes or not held.share():
        return whole
    bases[stored.field.name] = held
    return rest


def _made(
    stored: StoredRange,
    part: Slice,
    source: SharedTensor,
    changes: Sequence[U8],
    subject: str,
    arrived: ArrivedTensors,
) -> SharedTensor:
    """The part of the version's content, made of another content and the differences after that."""
    field, memory, moves = stored.field, source.own_copy(), list[Moves]()
    try:
        for change in changes:
            if part.whole:
                moves += apply_delta(memory, change)
            else:
                apply_delta_in_part(memory, change, stored, part)
        if part.whole:
            verify(memory, stored.sum, f'tensor "{field.name}" of {subject}')
    except Corruption:
        arrived.refused += 1
        raise
    own = field if part.whole else sliced_field(field, part)
    block = ReceivedBlock(0, len(memory), 1, [field.name], [0], memory)
    blocks = MappedBlocks([block], [memory], {field.name: own})
    column = Column(own, RowPlacement.of_run(blocks, 0, 0, 1))
    moved = _moved_elements(field, moves) if part.whole else None
    return SharedTensor(FoundTensor(column, blocks, part.whole), field, stored.block, part, stored.sum, moved)


def _moved_elements(field: Field, moves: Sequence[Moves]) -> NDArray[np.int64] | None:
    """The positions of the elements that the moves change. None: so many that they are not worth naming."""
    if sum(len(each.positions) for each in moves) > _MOVED_SHARE_MAX * math.prod(field.fixed):
        return None
    elements = [each.positions * each.size // field.item_bytes for each in moves]
    return np.asarray(np.concatenate(elements), np.int64)


def return_pins(client: ClientSession, blocks: Sequence[m.BlockLocation], kept: Sequence[m.BlockLocation]) -> None:
    """Return the pins of `blocks`, but those of `kept`."""
    numbers = {block.block for block in kept}
    client.connection.unpin([block.block for block in blocks if block.block not in numbers])
