"""Versions of weights that several sessions publish together, and tensors that come in slices.

Invariants:

- A *pending version* is begun by one session, which publishes part 0. Parts 1 and above are kept until then. No reader
  has the version before it is published, and then all of it.
- A reader may ask for the parts that have come, to fetch their bytes early. It gets each part once, in the order in
  which they came, and pins its blocks like those of a version. The published version has the same blocks.
- An *open* version (``parts=0``) has as many parts as came when part 0 comes, all from the session that began it. Each
  restarts its time limit, so a relay can forward a version with an unknown number of parts at any rate.
- Each part comes once. Its blocks have one reference from the pending version, and keep it when the version is
  published.
- A channel has at most one pending version. It is abandoned after its time limit, when the session that began it is
  closed, when another version is begun, or when bytes of a part are lost. Its parts are then freed. The reason is kept
  for sessions that still name it.
- A *slice* is a field that holds some rows of a tensor, along dimension 0. The slices of a tensor have its dtype and
  its other sizes, and none overlaps another. In a published version they are all of its rows.
- A *difference* is a field that says how the content of another field changed (`TensorDelta`). A version with
  differences of a field also has the field whole, with one of the contents between which the differences lead. So each
  version can be read by itself, and a reader that has one of the contents needs only the differences after it. The
  differences before the whole field are for such readers alone: a version can do without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from transferqueue.errors import AlreadyExists, NotFound, SchemaError, UsageError, VersionGivenUp, listing
from transferqueue.ledger.arrays import repeated
from transferqueue.ledger.table_state import SharedState
from transferqueue.limits import ITEMS_MAX, VERSION_PARTS_MAX
from transferqueue.schema import Field
from transferqueue.wire.messages import (
    Publish,
    Pull,
    TensorDelta,
    TensorRange,
    TensorSlice,
    WeightsReply,
    deltas_of,
    slices_of,
)


@dataclass(slots=True)
class VersionPart:
    """Fields, numbers of blocks, and ranges that one session brings."""

    fields: list[Field]
    blocks: list[int]
    ranges: list[TensorRange]


@dataclass(slots=True, eq=False)
class PendingVersion:
    """Version `version`, begun by `session` as number `number`, of `parts` parts (0: open). `kept` has the parts that
    came, in that order, except part 0.
    """

    channel: str
    number: int
    version: int
    parts: int
    session: int
    length_s: float
    deadline: float | None = None
    kept: dict[int, VersionPart] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Parts that did not come, except part 0."""
        return [part for part in range(1, self.parts) if part not in self.kept]

    @property
    def is_coming(self) -> bool:
        """Whether it waits for parts, or for an unknown number."""
        return bool(self.missing or not self.parts)

    @property
    def subject(self) -> str:
        """Its name in messages."""
        return f'version {self.version} of channel "{self.channel}"'

    def explain(self) -> str:
        """The missing parts."""
        if not self.parts:
            return f"{self.subject} is on its way: parts that have come: {len(self.kept)}"
        return (
            f"{self.subject} lacks parts {listing(self.missing)} of {self.parts}; each is published by a session of "
            "its own"
        )

    def fields(self) -> dict[str, Field]:
        """Fields of the parts that came, by name."""
        return {new.name: new for part in self.kept.values() for new in part.fields}

    def ranges(self) -> list[TensorRange]:
        """Slices and differences of the parts that came."""
        return [tensor_range for part in self.kept.values() for tensor_range in part.ranges]

    def in_order(self, part_0: VersionPart) -> list[VersionPart]:
        """All parts, as their tensors follow each other in the version: by number, or, of an open version, as they
        came."""
        if not self.parts:
            return [*self.kept.values(), part_0]
        return [part_0, *(part for _, part in sorted(self.kept.items()))]

    def after(self, have: int) -> VersionPart:
        """All parts that came after the first `have` of them, as one."""
        parts = list(self.kept.values())[have:]
        return VersionPart(
            [new for part in parts for new in part.fields],
            [number for part in parts for number in part.blocks],
            [tensor_range for part in parts for tensor_range in part.ranges],
        )


def check_part(pending: PendingVersion | None, given_up: Mapping[int, str], session: int, request: Publish) -> None:
    """Raise unless the request may bring a part of the pending version."""
    if pending is None or pending.number != request.pending:
        if request.pending in given_up:
            raise VersionGivenUp(given_up[request.pending])
        raise NotFound(
            f'number {request.pending} is of no version of channel "{request.channel}" that was begun and is not '
            "published; begin one"
        )
    if request.version != pending.version:
        raise UsageError(f"{pending.subject} was begun as number {pending.number}; version {request.version} is not it")
    most = pending.parts or VERSION_PARTS_MAX
    if request.part >= most:
        raise UsageError(
            f"part {request.part} of {pending.subject}, which has parts 0 to {most - 1}; begin it with more"
        )
    if request.part in pending.kept:
        raise AlreadyExists(f"part {request.part} of {pending.subject} has come; each part is published once")
    if session != pending.session and not (request.part and pending.parts):
        theirs = "part 0; publish another part" if pending.parts else "all its parts"
        raise UsageError(f"{pending.subject} was begun by another session, which publishes {theirs}")


def parts_for(
    pending: PendingVersion | None,
    given_up: Mapping[int, str],
    core: SharedState,
    request: Pull,
    session: int,
) -> WeightsReply | None:
    """Parts that the session has not got of the version that it waits for, pinned for it; None: there are none now, or
    it takes none. `VersionGivenUp` if the version whose parts it has was abandoned.
    """
    if not request.parts:
        return None
    if request.pending in given_up:
        raise VersionGivenUp(given_up[request.pending])
    if pending is None or not _is_awaited(pending, request):
        return None
    new = pending.after(request.have if request.pending == pending.number else 0)
    if not new.blocks:
        return None
    core.begin()
    core.blocks.pin(session, new.blocks)
    places = [core.blocks.blocks[number].at for number in new.blocks]
    return WeightsReply(pending.version, new.fields, places, new.ranges, pending.number, len(pending.kept))


def _is_awaited(pending: PendingVersion, request: Pull) -> bool:
    return pending.version == request.version if request.version >= 0 else pending.version > request.above


def check_fields(subject: str, fields: Sequence[Field], ranges: Sequence[TensorRange]) -> None:
    """Raise unless fields are named once, each slice fits its tensor and overlaps no other, and each difference is of a
    whole field and begins with the content to which the one before it leads."""
    by_name = {new.name: new for new in fields}
    if len(by_name) != len(fields):
        names = [new.name for new in fields]
        raise SchemaError(f"{subject} needs fields, each named once; {listing(repeated(names))} came twice")
    if len(fields) > ITEMS_MAX:
        raise UsageError(
            f"{subject} has {len(fields):,} tensors and slices; at most {ITEMS_MAX:,} are allowed: give larger slices"
        )
    named = {one.field for one in ranges}
    if len(named) != len(ranges) or not named <= by_name.keys():
        raise SchemaError(
            f"{subject} has slices in the fields {listing(one.field for one in ranges)}, of {listing(by_name)}; each "
            "slice is one field, and so is each difference"
        )
    _check_deltas(subject, by_name, deltas_by_field(ranges))
    for tensor, parts in _by_tensor(ranges).items():
        if tensor in by_name:
            raise SchemaError(f'{subject} has tensor "{tensor}" whole and in slices; give it one way')
        _check_tensor(subject, tensor, parts, by_name)


def deltas_by_field(ranges: Iterable[TensorRange]) -> dict[str, list[TensorDelta]]:
    """The differences of each field, in the order of their versions."""
    found: dict[str, list[TensorDelta]] = {}
    for delta in deltas_of(ranges):
        found.setdefault(delta.of, []).append(delta)
    for deltas in found.values():
        deltas.sort(key=lambda delta: delta.version)
    return found


def _check_deltas(subject: str, fields: Mapping[str, Field], deltas: Mapping[str, Sequence[TensorDelta]]) -> None:
    """Raise unless the differences of each field follow each other."""
    named = {delta.field for chain in deltas.values() for delta in chain}
    for name, chain in deltas.items():
        if name not in fields or name in named or any(not _is_bytes(fields[delta.field]) for delta in chain):
            raise SchemaError(
                f'{subject}: {listing(delta.field for delta in chain)} would be differences of field "{name}"; that is '
                "in the version, whole, and differences are uint8 [n]"
            )
        for delta in chain:
            if sorted({0, *delta.ends}) != [0, *delta.ends] or delta.ends[-1] > fields[delta.field].fixed[0]:
                raise SchemaError(
                    f"{subject}: the sections of {delta.field} end at {listing(map(str, delta.ends))}, and it has "
                    f"{fields[delta.field].fixed[0]} bytes; each has a byte or more, and they end within it"
                )
        if any(one.after != other.before or one.version == other.version for one, other in pairwise(chain)):
            raise SchemaError(
                f'{subject}: the differences of field "{name}" after versions '
                f"{listing(delta.version for delta in chain)} do not follow each other; publish it whole"
            )


def _is_bytes(new: Field) -> bool:
    return new.dtype == "uint8" and len(new.shape) == len(new.fixed) == 1


def _check_tensor(subject: str, tensor: str, parts: Sequence[TensorSlice], fields: Mapping[str, Field]) -> None:
    """Raise unless the slices, in the order of their rows, fit one tensor."""
    first, end = fields[parts[0].field], 0
    for part in parts:
        new, rows = fields[part.field], _rows(fields[part.field])
        if not new.dense or rows < 1 or part.first + rows > part.rows:
            raise SchemaError(
                f'{subject}: a slice of tensor "{tensor}" is {new.describe()} from row {part.first} of {part.rows}; '
                "slices have 1 row or more, and end within their tensor"
            )
        if (new.dtype, new.shape[1:], part.rows) != (first.dtype, first.shape[1:], parts[0].rows):
            raise SchemaError(
                f'{subject}: slices of tensor "{tensor}" are {new.describe()} of {part.rows} rows, and '
                f"{first.describe()} of {parts[0].rows}; they have one dtype, one number of rows, and the same other "
                "sizes"
            )
        if part.first < end:
            raise SchemaError(f'{subject}: row {part.first} of tensor "{tensor}" is in two slices; each row comes once')
        end = part.first + rows


def check_whole(subject: str, fields: Mapping[str, Field], ranges: Iterable[TensorRange]) -> None:
    """Raise unless the slices among the ranges have all rows of their tensors. They were checked by `check_fields`."""
    for tensor, parts in _by_tensor(ranges).items():
        end = 0
        for part in parts:
            if part.first > end:
                break
            end += _rows(fields[part.field])
        if end < parts[0].rows:
            raise SchemaError(
                f'{subject} lacks row {end} of tensor "{tensor}", which has {parts[0].rows}; its slices begin at '
                f"{', '.join(str(part.first) for part in parts[:12])}"
            )


def _by_tensor(ranges: Iterable[TensorRange]) -> dict[str, list[TensorSlice]]:
    """Slices of each tensor, in the order of their rows."""
    slices_of_tensor: dict[str, list[TensorSlice]] = {}
    for tensor_slice in sorted(slices_of(ranges), key=lambda tensor_slice: tensor_slice.first):
        slices_of_tensor.setdefault(tensor_slice.tensor, []).append(tensor_slice)
    return slices_of_tensor


def _rows(slice_field: Field) -> int:
    return (slice_field.shape[0] or 0) if slice_field.shape else 0
