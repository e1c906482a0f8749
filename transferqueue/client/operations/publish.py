"""Publish weights: the tensors that a publication writes, and those of the newest version that it keeps.

- A tensor is a block of its own, and its checksum is that of its block: xxh3-64 of the bytes, whose padding is zeros.
  Two tensors are the same if their names, dtypes, shapes and checksums are.
- A tensor that is the same as in the newest version is kept, not written.
- Memory is used again by extents, not by blocks. So of an extent in which less than half would be kept, nothing is: its
  tensors are written again, and a version never holds more than twice its bytes. An extent into which more may be
  written counts as kept. What lost: an extent a tensor, which asks the server once for each; and a bound by the number
  of versions since the last whole one, which says nothing about memory.
- Tensors of an adapter are named ``adapter/tensor``, those of the base ``_tensor`` (names of a state dict may begin
  with a digit, names of fields may not). A publication of the base is whole: tensors that it does not name are not in
  the version, adapters included. One of an adapter replaces that adapter and keeps everything else.
- A slice of a tensor is written, compared and kept as a tensor of its own, named ``_tensor/rows-FIRST-of-ROWS``.
- Several sessions may publish a version in parts: one begins it and publishes part 0, which waits for the others. If
  that fails, the version is given up.
- A relay begins a version of which it does not know the number of parts, and publishes all of them itself: part 0 is
  the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.commit import CERTAIN, finish_commit, retry_on_other_shard
from transferqueue.client.operations.written_blocks import WrittenBlocks, write
from transferqueue.client.session.calls import Deadline, seconds
from transferqueue.client.session.operation_runner import BlockingWork, Operation, request_reply
from transferqueue.errors import NotFound, SchemaError, ShardLost, TransferQueueError, UsageError
from transferqueue.errors.text import SHOWN_CHARS, shortened, shown
from transferqueue.limits import VERSION_PARTS_MAX, check_name
from transferqueue.schema import Field
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.prepare import Prepared, prepare
from transferqueue.storage.memory.checksum import UNCHECKED
from transferqueue.wire import messages as m

BASE: Final = "_"
"""Names of fields of the base begin with it; those of adapters never do."""


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
    """Part `part` of the version that was begun as number `pending`; both 0: the version is not in parts.

    `is_new`: no tensor of the part is in the newest version, so none is compared with it.
    """

    pending: int = 0
    part: int = 0
    is_new: bool = False


WHOLE: Final = PartTerms()


def _column(name: str, tensor: Any) -> Prepared:
    """The tensor as a column of one row. `SchemaError` if it is none; its class may refuse in its own way, as of nested
    or freed ones."""
    subject = f'tensor "{name.removeprefix(BASE)}"'
    try:
        prepared = prepare(name, tensor[None])
    except SchemaError as error:
        raise SchemaError(str(error).replace(f'field "{name}"', subject, 1)) from error
    except (TransferQueueError, MemoryError):
        raise
    except Exception as error:
        reason = shortened(" ".join(str(error).split()), SHOWN_CHARS)
        raise SchemaError(
            f"{subject} cannot be read as one array: {reason}; give an array or a dense tensor"
        ) from error
    if prepared.field.dtype in ("str", "bytes", "value"):
        raise SchemaError(f"{subject} has no numbers, but {tensor.dtype}; weights are tensors or arrays of numbers")
    return prepared


class NewTensor(BlockWriter):
    """A tensor, or the slice `of` one, that is written into a block of its own."""

    __slots__ = ("of",)

    def __init__(self, name: str, tensor: Any, of: m.TensorSlice | None = None) -> None:
        super().__init__([_column(name, tensor)])
        self.of = of

    @property
    def field(self) -> Field:
        """Definition of the tensor's field."""
        return self.fields[0]

    def write(self, out: Any) -> None:
        """As `BlockWriter.write`; then the checksum is known."""
        super().write(out)
        self.take_checksum(out)


class ReusedTensor(NewTensor):
    """A copy of a block of another channel, byte for byte, with its checksum. If the bytes were damaged on the way or
    in this process, a client that pulls them from here refuses them."""

    __slots__ = ("memory",)

    def __init__(
        self, fields: list[Field], block: m.BlockLocation, memory: NDArray[np.uint8], of: m.TensorSlice | None
    ) -> None:
        self.of = of
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
    publication = _publish(client, channel, keep, number, writers, adapter, deadline, terms)
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


def mirror_version(
    client: ClientSession,
    channel: str,
    keep: int,
    version: int,
    copies: Sequence[ReusedTensor],
    timeout_s: float | None,
    terms: PartTerms = WHOLE,
) -> Operation[None]:
    """Publish base and adapters of another channel as the same version here, or a part of one."""
    deadline = yield from checks.within(timeout_s)
    yield from _publish(client, channel, keep, version, copies, None, deadline, terms)


def _publish(
    client: ClientSession,
    channel: str,
    keep: int,
    number: int,
    block_writers: Sequence[NewTensor],
    adapter: str | None,
    deadline: Deadline,
    terms: PartTerms,
) -> Operation[int]:
    written: list[int] = [0]

    def attempt() -> Operation[m.DoneReply]:
        return _commit(client, channel, keep, number, block_writers, adapter, deadline, terms, written)

    yield from retry_on_other_shard(client, attempt)
    return written[0]


def _commit(
    client: ClientSession,
    channel: str,
    keep: int,
    number: int,
    block_writers: Sequence[NewTensor],
    adapter: str | None,
    deadline: Deadline,
    terms: PartTerms,
    nbytes: list[int],
) -> Operation[m.DoneReply]:
    base, blocks, kept = -1, list[int](), set[str]()
    if not terms.is_new:
        base, blocks, kept = yield from _of_newest(channel, block_writers, adapter)
    written = [writer for writer in block_writers if writer.field.name not in kept]
    nbytes[0] = sum(writer.nbytes for writer in written)
    region = WrittenBlocks(((yield from write(client, written, deadline, "weights")), written)) if written else None
    request = m.Publish(
        channel=channel,
        version=number,
        fields=[field for writer in written for field in writer.fields],
        blocks=region.blocks() if region else [],
        keep=keep,
        wait_s=deadline.left(),
        base=base if blocks else -1,
        kept=blocks,
        slices=[writer.of for writer in written if writer.of is not None],
        pending=terms.pending,
        part=terms.part,
    )
    return (yield from finish_commit(region, request, m.DoneReply))


def _of_newest(
    channel: str, block_writers: Sequence[NewTensor], adapter: str | None
) -> Operation[tuple[int, list[int], set[str]]]:
    """The newest version, the blocks of it that the next takes over, and the tensors that therefore need not be
    written."""
    basis = yield from request_reply(m.GetLatestVersion(channel=channel), m.LatestVersion)
    beside = [] if adapter is None else _beside(channel, adapter, basis)
    unchanged = yield from _unchanged(block_writers, basis)
    kept = {name: block.block for name, block in _worth_keeping(unchanged, basis.extents).items()}
    return basis.version, [*beside, *kept.values()], set(kept)


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


def _unchanged(block_writers: Iterable[NewTensor], basis: m.LatestVersion) -> Operation[dict[str, m.BlockLocation]]:
    """Find tensors that are the same in the newest version, with their blocks there. Reads only those whose field and
    size match."""
    fields = {field.name: field for field in basis.fields}
    newest = {block.fields[0]: block for block in basis.blocks if len(block.fields) == 1 and block.checksum}
    likely = [writer for writer in block_writers if _alike(writer, newest.get(writer.field.name), fields)]
    unseen = [writer for writer in likely if writer.sum == UNCHECKED]
    yield BlockingWork(sum(writer.nbytes for writer in unseen), lambda: _sum(unseen))
    return {
        writer.field.name: newest[writer.field.name]
        for writer in likely
        if is_unchanged(fields[writer.field.name], newest[writer.field.name], writer.field, writer.nbytes, writer.sum)
    }


def _alike(writer: NewTensor, block: m.BlockLocation | None, fields: Mapping[str, Field]) -> bool:
    return block is not None and block.nbytes == writer.nbytes and fields[writer.field.name] == writer.field


def _sum(block_writers: Sequence[NewTensor]) -> None:
    """Compute checksums, in one buffer of the size of the largest."""
    room = np.empty(max((writer.nbytes for writer in block_writers), default=0), np.uint8)
    for writer in block_writers:
        writer.write(room[: writer.nbytes])


def _worth_keeping(unchanged: Mapping[str, m.BlockLocation], extents: Mapping[int, int]) -> dict[str, m.BlockLocation]:
    """The unchanged tensors in extents of which at least half is kept."""
    kept_bytes: Counter[int] = Counter()
    for block in unchanged.values():
        kept_bytes[block.extent] += block.nbytes
    return {name: block for name, block in unchanged.items() if 2 * kept_bytes[block.extent] >= extents[block.extent]}
