"""Publish weights: the tensors that a publication writes, and those of the newest version that it keeps.

- A tensor is a block of its own, and its checksum is that of its block. What becomes of each tensor is in
  `range_updates`: it is kept, published as a difference, or written whole.
- Tensors of an adapter are named ``adapter/tensor``, those of the base ``_tensor`` (names of a state dict may begin
  with a digit, names of fields may not). A publication of the base is whole: tensors that it does not name are not in
  the version, adapters included. One of an adapter replaces that adapter and keeps everything else.
- A slice of a tensor is written, compared and kept as a tensor of its own, named ``_tensor/rows-FIRST-of-ROWS``. The
  difference of a field after a version is named ``FIELD/delta-VERSION``.
- Several sessions may publish a version in parts: one begins it and publishes part 0, which waits for the others. If
  that fails, the version is given up.
- A relay begins a version of which it does not know the number of parts, and publishes all of them itself: part 0 is
  the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transferqueue.client.client import ClientSession
from transferqueue.client.memory.grants import ROWS
from transferqueue.client.memory.published_contents import PublishedContents
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.commit import CERTAIN, finish_commit, retry_on_other_shard
from transferqueue.client.operations.range_updates import (
    KeptVersions,
    Newest,
    RangeUpdate,
    plan_updates,
    take_back,
)
from transferqueue.client.operations.stored_ranges import stored_ranges
from transferqueue.client.operations.weight_blocks import BASE, NewTensor
from transferqueue.client.operations.written_blocks import BlockGroup, WrittenBlocks, write, write_apart
from transferqueue.client.session.calls import Deadline, seconds
from transferqueue.client.session.operation_runner import BlockingWork, Operation, request_reply
from transferqueue.errors import NotFound, SchemaError, ShardLost, UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.errors.text import shown
from transferqueue.limits import VERSION_PARTS_MAX, check_name
from transferqueue.wire import messages as m


@dataclass(frozen=True)
class WeightSlice:
    """Some rows of a tensor along dimension 0, for `WeightChannel.publish`: a rank's shard.

    Args:
        values: torch tensor or numpy array ``[n, ...]``, not copied here.
        first: the row of the tensor that ``values[0]`` is, from 0.
        rows: rows of the whole tensor.

    Raises:
        SchemaError: values without rows.
        UsageError: the slice does not end within the tensor.

    Example:
        >>> import numpy as np
        >>> WeightSlice(np.zeros((4, 8)), first=4, rows=8).last
        8
    """

    values: Any
    first: int
    rows: int

    def __post_init__(self) -> None:
        shape = getattr(self.values, "shape", ())
        if not shape or not shape[0]:
            raise SchemaError(
                f"a slice of {type(self.values).__name__} has no rows; give a torch tensor or a numpy array [n, ...]"
            )
        checks.whole("first", self.first)
        checks.whole("rows", self.rows)
        if self.last > self.rows:
            raise UsageError(
                f"rows {self.first} to {self.last} of a tensor of {self.rows}: slices end within their tensor"
            )

    @property
    def last(self) -> int:
        """The row of the tensor that follows the last one of the slice."""
        return self.first + int(self.values.shape[0])


@dataclass(frozen=True)
class PartTerms:
    """Part `part` of the version that was begun as number `pending`; both 0: the version is not in parts."""

    pending: int = 0
    part: int = 0


WHOLE: Final = PartTerms()


def publish_weights(
    client: ClientSession,
    channel: str,
    kept: KeptVersions,
    version: int,
    tensors: Mapping[str, Any],
    adapter: str | None,
    timeout_s: float | None,
    pending: int = 0,
    part: int = 0,
) -> Operation[int]:
    """Publish one version in one commit, or a part of one. Returns the bytes written."""
    deadline = yield from checks.within(timeout_s)
    number = checks.whole("version", version)
    terms = PartTerms(checks.whole("pending", pending), checks.whole("part", part, most=VERSION_PARTS_MAX - 1))
    if adapter is not None and terms != WHOLE:
        raise UsageError(
            f'adapter "{adapter}" is published in parts; publish it in one, over a base that may be in parts'
        )
    writers = tensor_writers(tensors, _prefix(adapter), terms)
    publication = _publish(client, channel, kept, number, writers, adapter, deadline, terms)
    if not terms.pending or terms.part:
        return (yield from publication)
    give_up = m.GiveUpVersion(channel=channel, pending=terms.pending)
    try:
        return (yield from publication)
    except CERTAIN:
        yield from request_reply(give_up, m.DoneReply)
        raise
    except BaseException:
        client.connection.post(give_up)
        raise


def begin_version(channel: str, version: int, parts: int, length_s: float) -> Operation[int]:
    """Begin a version in parts. Returns its number."""
    request = m.BeginVersion(
        channel=channel,
        version=checks.whole("version", version),
        parts=checks.whole("parts", parts, least=1, most=VERSION_PARTS_MAX),
        length_s=seconds("length_s", length_s),
    )
    reply = yield from request_reply(request, m.VersionBegun)
    return reply.pending


def begin_open_version(channel: str, version: int, length_s: float) -> Operation[int]:
    """Begin a version of which this session publishes all parts, as many as come. Returns its number."""
    request = m.BeginVersion(channel=channel, version=version, parts=0, length_s=length_s)
    reply = yield from request_reply(request, m.VersionBegun)
    return reply.pending


def _publish(
    client: ClientSession,
    channel: str,
    kept: KeptVersions,
    number: int,
    writers: Sequence[NewTensor],
    adapter: str | None,
    deadline: Deadline,
    terms: PartTerms,
) -> Operation[int]:
    contents = client.published.setdefault(channel, PublishedContents()) if kept.deltas else PublishedContents()
    written: list[int] = [0]

    def attempt() -> Operation[m.DoneReply]:
        newest = yield from request_reply(m.GetLatestVersion(channel=channel), m.LatestVersion)
        ranges = stored_ranges(newest.fields, newest.blocks, newest.ranges)
        beside = [] if adapter is None else _beside(channel, adapter, newest)
        basis = Newest.of(ranges, newest.extents, kept.deltas, len(writers))
        updates, distrust = list[RangeUpdate](), newest.refused > contents.refused.get(adapter, 0)
        yield BlockingWork(
            sum(writer.nbytes for writer in writers),
            lambda: updates.extend(plan_updates(contents, writers, basis, number, distrust)),
        )
        with OnFailure(take_back, contents, updates):
            commit = commit_updates(client, channel, kept, number, newest.version, updates, beside, deadline, terms)
            reply = yield from commit
        contents.refused[adapter] = newest.refused
        written[0] = sum(writer.nbytes for writer in new_blocks(updates))
        return reply

    yield from retry_on_other_shard(client, attempt)
    return written[0]


def new_blocks(updates: Iterable[RangeUpdate]) -> list[NewTensor]:
    """The blocks that updates write."""
    return [block for update in updates for block in (update.whole, *update.deltas) if block is not None]


def commit_updates(
    client: ClientSession,
    channel: str,
    kept: KeptVersions,
    number: int,
    base: int,
    updates: Sequence[RangeUpdate],
    beside: Sequence[int],
    deadline: Deadline,
    terms: PartTerms = WHOLE,
) -> Operation[m.DoneReply]:
    """Publish ranges as one version, or as a part of one, over version `base`; blocks `beside` of that one stay."""
    wholes = [update.whole for update in updates if update.whole is not None]
    deltas = [delta for update in updates for delta in update.deltas]
    groups = [BlockGroup(ROWS, list(blocks)) for blocks in (wholes, deltas) if blocks]
    region = yield from _written(client, groups, deadline)
    blocks = [*beside, *(block.block for update in updates for block in update.kept)]
    request = m.Publish(
        channel=channel,
        version=number,
        fields=[field for writer in (*wholes, *deltas) for field in writer.fields],
        blocks=region.blocks() if region else [],
        keep=kept.versions,
        wait_s=deadline.left(),
        base=base if blocks else -1,
        kept=blocks,
        ranges=[writer.of for writer in (*wholes, *deltas) if writer.of is not None],
        pending=terms.pending,
        part=terms.part,
    )
    return (yield from finish_commit(region, request, m.DoneReply))


def _written(
    client: ClientSession, groups: Sequence[BlockGroup], deadline: Deadline
) -> Operation[WrittenBlocks | None]:
    """Write each group into an extent of its own, or all into one if there is no room for two now."""
    if not groups:
        return None
    if len(groups) > 1 and (written := (yield from write_apart(client, groups, deadline, "weights", 1))) is not None:
        return written
    blocks = [block for group in groups for block in group.blocks]
    return WrittenBlocks(((yield from write(client, blocks, deadline, "weights")), blocks))


def tensor_writers(tensors: Mapping[str, Any], prefix: str, terms: PartTerms = WHOLE) -> list[NewTensor]:
    """Check the tensors. Each becomes a block, with a field named with `prefix`. A part of a version may have none."""
    if not isinstance(tensors, Mapping) or not (tensors or terms.pending):
        raise UsageError(f"weights are {type(tensors).__name__} of no tensors; give a mapping of names to tensors")
    return [_writer(name, tensor, prefix) for name, tensor in tensors.items()]


def base_field(name: object) -> str:
    """The field of a tensor of the base. `UsageError` if this is no name of a tensor; other than those of fields it may
    be empty, and begin with any letter."""
    if not isinstance(name, str):
        raise UsageError(f"tensor name {shown(name)} is {type(name).__name__}; names are strings")
    return check_name("tensor", f"{BASE}{name}")


def _writer(name: str, tensor: Any, prefix: str) -> NewTensor:
    base_field(name)
    whole = check_name("tensor", f"{prefix}{name}")
    if isinstance(tensor, WeightSlice):
        field = check_name("slice of tensor", f"{whole}/rows-{tensor.first}-of-{tensor.rows}")
        return NewTensor(field, tensor.values, m.TensorSlice(field, whole, tensor.first, tensor.rows))
    if not (hasattr(type(tensor), "shape") or hasattr(tensor, "shape")):  # a lazy parameter refuses the second
        raise SchemaError(f'tensor "{name}" is {type(tensor).__name__}; weights are torch tensors or numpy arrays')
    return NewTensor(whole, tensor)


def _prefix(adapter: str | None) -> str:
    if adapter is None:
        return BASE
    if check_name("adapter", adapter).startswith(BASE) or "/" in adapter:
        raise UsageError(f'adapter "{adapter}" begins with _ or has a /; name it with letters, digits, . and -')
    return f"{adapter}/"


def _beside(channel: str, adapter: str, basis: m.LatestVersion) -> list[int]:
    """Blocks of everything but the adapter. `NotFound` if nothing is published for it to build on, `ShardLost` if that
    is lost."""
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
