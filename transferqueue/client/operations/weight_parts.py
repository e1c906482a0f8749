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
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from transferqueue.client.client import ClientSession
from transferqueue.client.memory.remote import RemoteMemory
from transferqueue.client.memory.shard_clients import FoundTensor
from transferqueue.client.operations.publish import ReusedTensor, is_unchanged
from transferqueue.client.operations.tensor_parts import WHOLE
from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.operation_runner import BlockingWork, Operation, request_reply
from transferqueue.errors import ShardLost, VersionGivenUp
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import PARTS_MAX
from transferqueue.schema import Field, Slice
from transferqueue.storage.memory.checksum import verify
from transferqueue.wire import messages as m

Parts = Mapping[str, Slice]
"""The wanted part of each field that is not wanted whole."""
Needed = Callable[[Field, m.BlockLocation, m.TensorSlice | None], Slice | None]
"""Which part of a field that lies in a block a pull needs, None: nothing of it; the slice that the field is, if it is
one."""


class SharedTensor:
    """One tensor, or a part of it, in this process's memory, which several versions may share. The last of them frees
    it.

    `is_whole` says whether all of the block is here. `part` is the part of the tensor that `column` has.
    """

    __slots__ = ("_users", "block", "blocks", "column", "field", "is_whole", "part")
    _guard: Final = threading.Lock()

    def __init__(self, found: FoundTensor, field: Field, block: m.BlockLocation, part: Slice) -> None:
        self.column, self.blocks, self.is_whole = found
        self.field, self.block, self.part = field, block, part
        self._users = 1

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

    def is_in(self, field: Field, block: m.BlockLocation, part: Slice = WHOLE) -> bool:
        """Whether the part of `field` in `block` is the same."""
        return self.part == part and is_unchanged(self.field, self.block, field, block.nbytes, block.checksum)


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
                name: SharedTensor(one, fields[name], block, parts.get(name, WHOLE))
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


def copy_of(tensor: SharedTensor, slices: Mapping[str, m.TensorSlice]) -> ReusedTensor:
    """The block of a tensor, to be published elsewhere byte for byte. `slices` are by their fields."""
    names = tensor.block.fields
    fields = [tensor.blocks.fields[name] for name in names]
    return ReusedTensor(fields, tensor.block, tensor.blocks.live_memory()[0], slices.get(names[0]))


def release_all(tensors: Mapping[str, SharedTensor], message: str) -> None:
    """Release each of the tensors."""
    for tensor in tensors.values():
        tensor.release(message)


class ArrivedTensors:
    """Tensors of one version that is not whole yet, by name. `number` is the pending version, `have` the number of its
    parts that were received."""

    def __init__(self) -> None:
        self.number = self.have = 0
        self._version = -1
        self._tensors: dict[str, SharedTensor] = {}

    def has(self, field: Field, block: m.BlockLocation, part: Slice) -> bool:
        """Whether this part of the tensor in `block` has come."""
        tensor = self._tensors.get(field.name)
        return tensor is not None and tensor.is_in(field, block, part)

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
    client: ClientSession, request: m.Pull, deadline: Deadline, arrived: ArrivedTensors, needed: Needed
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
        yield from _fetch_early(client, reply, request.channel, arrived, needed)
        arrived.number, arrived.have = reply.pending, reply.have


def _fetch_early(
    client: ClientSession, reply: m.WeightsReply, channel: str, arrived: ArrivedTensors, needed: Needed
) -> Operation[None]:
    fields, slices = by_field(reply)
    arrived.begin(reply.version)
    new, parts = list[m.BlockLocation](), dict[str, Slice]()
    with OnFailure(return_pins, client, reply.blocks, ()):
        for block in reply.blocks:
            field = fields[block.fields[0]]
            part = needed(field, block, slices.get(field.name))
            if part is not None and not arrived.has(field, block, part):
                new.append(block)
                parts |= {} if part.whole else {field.name: part}
    return_pins(client, reply.blocks, new)
    subject = f'version {reply.version} of channel "{channel}"'
    try:
        arrived.add((yield from fetch_tensors(client, new, fields, subject, parts)))
    except ShardLost:
        return  # the coordinator gives the version up


def by_field(reply: m.WeightsReply) -> tuple[dict[str, Field], dict[str, m.TensorSlice]]:
    """Fields, and slices by their fields."""
    return {field.name: field for field in reply.fields}, {one.field: one for one in reply.slices}


def return_pins(client: ClientSession, blocks: Sequence[m.BlockLocation], kept: Sequence[m.BlockLocation]) -> None:
    """Return the pins of `blocks`, but those of `kept`."""
    numbers = {block.block for block in kept}
    client.connection.unpin([block.block for block in blocks if block.block not in numbers])
