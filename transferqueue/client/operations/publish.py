"""Publish weights: what a publication writes, and what it keeps of the newest version.

Rules:

- A tensor is a block of its own, and its checksum is that of its block: xxh3-64 of the bytes, whose padding is zeros. Two
  tensors are the same if their names, dtypes, shapes and checksums are.
- A tensor that is the same as in the newest version is kept, not written.
- Memory is used again by extents, not by blocks. So of an extent in which less than half would be kept, nothing is: its
  tensors are written again, and a version never holds more than twice its bytes. An extent into which more may be written
  counts as kept. What lost: an extent a tensor, which asks the server once for each; and a bound by the number of
  versions since the last whole one, which says nothing about memory.
- Tensors of an adapter are named ``adapter/tensor``, those of the base ``_tensor`` (names of a state dict may begin with a
  digit, names of fields may not). A publication of the base is whole: what it does not name is not in the version, adapters
  included. One of an adapter replaces that adapter and keeps everything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.commit import finish_commit, placed, retry_on_other_shard, write
from transferqueue.client.session.deadline import Deadline
from transferqueue.client.session.run import BlockingWork, Operation, request_reply
from transferqueue.errors import NotFound, SchemaError, ShardLost, UsageError
from transferqueue.limits import check_name
from transferqueue.schema import Field
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.prepare import prepare
from transferqueue.storage.memory.checksum import UNCHECKED
from transferqueue.wire import messages as m

BASE: Final = "_"
"""Names of fields of the base begin with it; those of adapters never do."""


class NewTensor(BlockWriter):
    """A tensor that is written into a block of its own."""

    __slots__ = ()

    def __init__(self, name: str, tensor: Any) -> None:
        super().__init__([prepare(name, tensor[None])])

    @property
    def field(self) -> Field:
        """Definition of the tensor's field."""
        return self.fields[0]

    def write(self, out: Any) -> None:
        """As `BlockWriter.write`; then the checksum is known."""
        super().write(out)
        self.take_checksum(out)


class ReusedTensor(NewTensor):
    """A copy of a block of another channel, byte for byte, with its checksum. If the bytes were damaged on the way or in this
    process, whoever pulls them from here refuses them."""

    __slots__ = ("memory",)

    def __init__(self, fields: list[Field], block: m.BlockLocation, memory: NDArray[np.uint8]) -> None:
        self.columns, self.spans, self.slots = [], [], None
        self.rows = self.stored_rows = block.rows
        self.fields, self.counts, self.nbytes = fields, list(block.counts), block.nbytes
        self.memory, self.sum = memory, block.checksum

    def write(self, out: Any) -> None:
        """As `BlockWriter.write`."""
        np.frombuffer(out, np.uint8)[:] = self.memory
        self.take_checksum(out)


def is_unchanged(field: Field, block: m.BlockLocation, other: Field, nbytes: int, total: int) -> bool:
    """Whether the tensor in `block` is one of field `other` with this checksum."""
    return block.checksum == total != UNCHECKED and block.nbytes == nbytes and field == other and len(block.fields) == 1


def publish_weights(
    client: ClientSession,
    channel: str,
    keep: int,
    version: int,
    tensors: Mapping[str, Any],
    adapter: str | None,
    timeout_s: float,
) -> Operation[None]:
    """Publish one version, in one commit."""
    deadline = yield from checks.within(timeout_s)
    number = checks.whole("version", version)
    yield from _publish(client, channel, keep, number, tensor_drafts(tensors, _prefix(adapter)), adapter, deadline)


def mirror_version(
    client: ClientSession, channel: str, keep: int, version: int, copies: Sequence[ReusedTensor], timeout_s: float
) -> Operation[None]:
    """Publish base and adapters of another channel as the same version here."""
    deadline = yield from checks.within(timeout_s)
    yield from _publish(client, channel, keep, version, copies, None, deadline)


def _publish(
    client: ClientSession,
    channel: str,
    keep: int,
    number: int,
    block_writers: Sequence[NewTensor],
    adapter: str | None,
    deadline: Deadline,
) -> Operation[None]:
    yield from retry_on_other_shard(
        client, lambda: _commit(client, channel, keep, number, block_writers, adapter, deadline)
    )


def _commit(
    client: ClientSession,
    channel: str,
    keep: int,
    number: int,
    block_writers: Sequence[NewTensor],
    adapter: str | None,
    deadline: Deadline,
) -> Operation[m.DoneReply]:
    basis = yield from request_reply(m.GetLatestVersion(channel=channel), m.LatestVersion)
    beside = [] if adapter is None else _beside(channel, adapter, basis)
    unchanged = yield from _unchanged(block_writers, basis)
    kept = {name: block.block for name, block in _worth_keeping(unchanged, basis.extents).items()}
    written = [draft for draft in block_writers if draft.field.name not in kept]
    blocks = [*beside, *kept.values()]
    region = (yield from write(client, written, deadline, "weights")) if written else None
    request = m.Publish(
        channel=channel,
        version=number,
        fields=[field for draft in written for field in draft.fields],
        blocks=placed(region, written) if region else [],
        keep=keep,
        wait_s=deadline.left(),
        base=basis.version if blocks else -1,
        kept=blocks,
    )
    return (yield from finish_commit(region, request_reply(request, m.DoneReply)))


def tensor_drafts(tensors: Mapping[str, Any], prefix: str) -> list[NewTensor]:
    """Check the tensors. Each becomes a block, with a field named with `prefix`."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise UsageError(f"weights are {type(tensors).__name__} of no tensors; give a mapping of names to tensors")
    block_writers: list[NewTensor] = []
    for name, tensor in tensors.items():
        check_name("tensor", f"{BASE}{name}")
        if not hasattr(tensor, "shape"):
            raise SchemaError(f'tensor "{name}" is {type(tensor).__name__}; weights are torch tensors or numpy arrays')
        block_writers.append(NewTensor(check_name("tensor", f"{prefix}{name}"), tensor))
    return block_writers


def _prefix(adapter: str | None) -> str:
    if adapter is None:
        return BASE
    if check_name("adapter", adapter).startswith(BASE) or "/" in adapter:
        raise UsageError(f'adapter "{adapter}" begins with _ or has a /; name it with letters, digits, . and -')
    return f"{adapter}/"


def _beside(channel: str, adapter: str, basis: m.LatestVersion) -> list[int]:
    """Blocks of everything but the adapter. `NotFound` if nothing is published for it to build on, `ShardLost` if that is lost."""
    if basis.lost:
        raise ShardLost(
            f'adapter "{adapter}" has no base: version {basis.version} of channel "{channel}" is gone ({basis.lost}); '
            "publish the base and its adapters again"
        )
    if not any(name.startswith(BASE) for block in basis.blocks for name in block.fields):
        raise NotFound(
            f'adapter "{adapter}" has no base: nothing is published on channel "{channel}"; publish the base first'
        )
    return [block.block for block in basis.blocks if not block.fields[0].startswith(f"{adapter}/")]


def _unchanged(block_writers: Iterable[NewTensor], basis: m.LatestVersion) -> Operation[dict[str, m.BlockLocation]]:
    """Find tensors that are the same in the newest version, with their blocks there. Reads only those whose field and size match."""
    fields = {field.name: field for field in basis.fields}
    newest = {block.fields[0]: block for block in basis.blocks if len(block.fields) == 1 and block.checksum}
    likely = [draft for draft in block_writers if _alike(draft, newest.get(draft.field.name), fields)]
    unseen = [draft for draft in likely if draft.sum == UNCHECKED]
    yield BlockingWork(sum(draft.nbytes for draft in unseen), lambda: _sum(unseen))
    return {
        draft.field.name: newest[draft.field.name]
        for draft in likely
        if is_unchanged(fields[draft.field.name], newest[draft.field.name], draft.field, draft.nbytes, draft.sum)
    }


def _alike(draft: NewTensor, block: m.BlockLocation | None, fields: Mapping[str, Field]) -> bool:
    return block is not None and block.nbytes == draft.nbytes and fields[draft.field.name] == draft.field


def _sum(block_writers: Sequence[NewTensor]) -> None:
    """Compute checksums, in one buffer of the size of the largest."""
    room = np.empty(max((draft.nbytes for draft in block_writers), default=0), np.uint8)
    for draft in block_writers:
        draft.write(room[: draft.nbytes])


def _worth_keeping(unchanged: Mapping[str, m.BlockLocation], extents: Mapping[int, int]) -> dict[str, m.BlockLocation]:
    """The unchanged tensors in extents of which at least half is kept."""
    kept_bytes: Counter[int] = Counter()
    for block in unchanged.values():
        kept_bytes[block.extent] += block.nbytes
    return {name: block for name, block in unchanged.items() if 2 * kept_bytes[block.extent] >= extents[block.extent]}
