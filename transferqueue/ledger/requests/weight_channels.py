"""Weight channels: published versions of a set of tensors, which replicas generate with which, and which may update
now.

Invariants:

- A version is composed of blocks: new ones, and blocks of a kept version, its base. Each kept version that contains a
  block has one reference to it. So the block is freed with the last of them, and never before.
- The newest `keep` versions are kept, and any of them can be pulled at any time. A reply pins its blocks for the
  session. So an evicted version keeps its bytes until the last reader unpins it.
- A version with a lost block is lost as a whole. A pull gets the newest whole version. A pull of the lost one is
  refused with the cause, and no version can use it as base: the next version is published with all its tensors.
- Publishing and applying are different facts: `applied` records which session generates with which version, since when.
- A version may be published by several sessions together, and a tensor in slices (see `pending_versions`).
- An *update slot* permits a session to change its weights. At most `at_once` sessions have one (each request states its
  own bound). A slot ends by its holder, with its session, or after its length: a dead replica never blocks the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from transferqueue.errors import (
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    SchemaError,
    ShardLost,
    UsageError,
    listing,
)
from transferqueue.ledger.effects import Blocked, Deadlines, Effects
from transferqueue.ledger.requests.flow_control import VERSION_MAX
from transferqueue.ledger.requests.pending_versions import (
    PendingVersion,
    VersionPart,
    check_fields,
    check_part,
    check_whole,
    deltas_by_field,
    parts_for,
)
from transferqueue.ledger.rows import check_layout
from transferqueue.ledger.rows.blocks import BlockRegistry, OwnerBytes
from transferqueue.ledger.table_state import SharedState
from transferqueue.limits import COUNT_MAX
from transferqueue.schema import Field
from transferqueue.wire.messages import (
    AcquireUpdateSlot,
    BeginVersion,
    DoneReply,
    LatestVersion,
    Publish,
    Pull,
    ReportApplied,
    TensorRange,
    VersionBegun,
    WeightsReply,
)

GIVEN_UP_KEPT: Final = 8
"""A late part names one of these, and gets the reason."""


@dataclass(slots=True)
class PublishedVersion:
    """A published version: its fields, the numbers of its blocks, when it was published, and which fields are slices or
    differences. `dropped` are the blocks of differences that it had until memory was needed."""

    fields: list[Field]
    blocks: list[int]
    at: float
    ranges: list[TensorRange] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


@dataclass(slots=True)
class AppliedVersion:
    """A session generates with `version` since `at`. `lag_s`: the time from its publication to then; None if that was
    evicted.
    """

    version: int
    at: float
    lag_s: float | None


@dataclass(slots=True, eq=False)
class UpdateSlot:
    """Permission for `session` to change its weights until `deadline`."""

    channel: str
    session: int
    deadline: float | None = None


@dataclass(slots=True)
class WeightChannelState:
    """The kept versions of one channel, ascending."""

    name: str
    keep: int = 2
    latest: int = -1
    versions: dict[int, PublishedVersion] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Lost versions and the cause, the newest `keep` of them."""
    applied: dict[int, AppliedVersion] = field(default_factory=dict)
    """Session -> the version that it generates with."""
    update_slots: dict[int, UpdateSlot] = field(default_factory=dict)
    """Session -> its update slot."""
    usage: OwnerBytes = field(default_factory=OwnerBytes)
    deltas_refused: int = 0
    """How many times a difference gave a reader another result than it promised."""
    begun: int = 0
    """Number of versions begun in parts."""
    pending: PendingVersion | None = None
    given_up: dict[int, str] = field(default_factory=dict)
    """Numbers of abandoned versions, and why: the newest `GIVEN_UP_KEPT`."""


def check_publish(channel: WeightChannelState, blocks: BlockRegistry, session: int, request: Publish) -> None:
    """Raise unless this version, or this part of one, may be published."""
    subject = f'version {request.version} of channel "{channel.name}"'
    pending = channel.pending if request.pending else None
    if request.pending:
        check_part(channel.pending, channel.given_up, session, request)
    elif request.part:
        raise UsageError(f"part {request.part} of {subject} names no pending version; begin one, and name its number")
    _check_next(channel, request.version)
    _check_kept(channel, request)
    part = _part(channel, blocks, request, [])
    _check_layouts(request, subject)
    fields = [*part.fields, *(pending.fields().values() if pending else ())]
    ranges = [*part.ranges, *(pending.ranges() if pending else ())]
    if not (fields or pending):
        raise SchemaError(f"{subject} needs fields, each named once")
    check_fields(subject, fields, ranges)
    if not request.part and not (pending and pending.missing):
        check_whole(subject, {new.name: new for new in fields}, ranges)
    _check_contents(subject, channel, blocks, request, part)
    blocks.check(session, request.blocks)


def _check_next(channel: WeightChannelState, version: int) -> None:
    """Raise unless `version` follows the latest."""
    if version > VERSION_MAX:
        raise UsageError(f"version {version} is above {VERSION_MAX}; versions count trainer steps")
    if version == channel.latest:
        raise AlreadyExists(
            f'version {version} of channel "{channel.name}" is published; versions are published once: give a higher '
            "number"
        )
    if version < channel.latest:
        raise UsageError(
            f'channel "{channel.name}" is at version {channel.latest}; it never goes back to {version}: give a higher '
            "number"
        )


def _check_layouts(request: Publish, subject: str) -> None:
    """Raise unless each new field lies in exactly one block."""
    fields = {new.name: new for new in request.fields}
    placed = [name for block in request.blocks for name in block.fields]
    if sorted(placed) != sorted(fields):
        raise SchemaError(
            f"{subject} declares {listing(fields)}, but its blocks hold "
            f"{listing(placed)}; each field lies in exactly one block"
        )
    for block in request.blocks:
        if block.rows != 1 or block.slots is not None:
            raise SchemaError("a block of weights has one row and no slots: one value per tensor")
        check_layout(block, [fields[name] for name in block.fields])


def _check_kept(channel: WeightChannelState, request: Publish) -> None:
    """Raise unless the base has the blocks that the version takes over from it."""
    if request.base < 0 and not request.kept:
        return
    base = channel.versions.get(request.base)
    if request.base in channel.lost:
        raise ShardLost(
            f"{explain_lost(channel, request.base)}: version {request.version} cannot keep blocks of it; publish "
            "again, all tensors"
        )
    if base is None:
        raise NotFound(
            f'version {request.base} of channel "{channel.name}", whose blocks version {request.version} keeps, is '
            f"not kept; it has {listing(channel.versions)}: publish over one of these, or all tensors"
        )
    strange = set(request.kept) - set(base.blocks) - set(base.dropped)
    if strange or len(set(request.kept)) != len(request.kept):
        raise UsageError(
            f'version {request.version} of channel "{channel.name}" keeps blocks {listing(strange or request.kept)} of '
            f"version {request.base}, which has {listing(base.blocks)}; name blocks of it, each once"
        )


def _kept(channel: WeightChannelState, request: Publish) -> list[int]:
    """The blocks that the version takes over from its base. Differences that were dropped meanwhile are left out."""
    if not request.kept:
        return []
    there = set(channel.versions[request.base].blocks)
    return [number for number in request.kept if number in there]


def _part(channel: WeightChannelState, blocks: BlockRegistry, request: Publish, numbers: Sequence[int]) -> VersionPart:
    """The fields of the request: new ones, whose blocks are `numbers`, and those kept of its base."""
    fields, ranges = list(request.fields), list(request.ranges)
    kept = _kept(channel, request)
    if kept:
        base = channel.versions[request.base]
        names = {name for number in kept for name in blocks.blocks[number].at.fields}
        fields += [old for old in base.fields if old.name in names]
        ranges += [old for old in base.ranges if old.field in names]
    return VersionPart(fields, [*numbers, *kept], ranges)


def _check_contents(
    subject: str, channel: WeightChannelState, blocks: BlockRegistry, request: Publish, part: VersionPart
) -> None:
    """Raise unless each field with differences is in the same part, with one of the contents that they lead through."""
    sums = {name: block.checksum for block in request.blocks for name in block.fields}
    for number in _kept(channel, request):
        at = blocks.blocks[number].at
        sums |= dict.fromkeys(at.fields, at.checksum)
    for name, chain in deltas_by_field(part.ranges).items():
        contents = {chain[0].before, *(delta.after for delta in chain)}
        if sums.get(name) not in contents:
            raise SchemaError(
                f'{subject}: the differences of field "{name}" are of other contents than its bytes in this part; '
                "publish it whole"
            )


def _commit(channel: WeightChannelState, blocks: BlockRegistry, request: Publish) -> VersionPart:
    numbers = blocks.commit(request.blocks, channel.usage, [1] * len(request.blocks))
    blocks.refer(_kept(channel, request))
    return _part(channel, blocks, request, numbers)


def publish(channel: WeightChannelState, blocks: BlockRegistry, request: Publish, now: float) -> None:
    """Make a version that `check_publish` accepted the latest, with its kept parts, and remove versions beyond
    `keep`."""
    parts = [_commit(channel, blocks, request)]
    if request.pending and channel.pending is not None:
        parts = channel.pending.in_order(parts[0])
        _end_pending(channel)
    channel.versions[request.version] = PublishedVersion(
        fields=[new for part in parts for new in part.fields],
        blocks=[number for part in parts for number in part.blocks],
        at=now,
        ranges=[tensor_range for part in parts for tensor_range in part.ranges],
    )
    channel.latest, channel.keep = request.version, request.keep
    for version in list(channel.versions)[: -channel.keep]:
        _forget(channel, blocks, version)


def _forget(channel: WeightChannelState, blocks: BlockRegistry, version: int) -> None:
    for number in channel.versions.pop(version).blocks:
        blocks.retire(number, 1)


# ---------------------------------------------------------------- versions in parts


def begin(
    channel: WeightChannelState, core: SharedState, request: BeginVersion, session: int, now: float
) -> VersionBegun:
    """Begin a version in parts. A pending one is abandoned."""
    _check_next(channel, request.version)
    core.begin()
    give_up(channel, core.blocks, f"version {request.version} was begun instead")
    channel.begun += 1
    channel.pending = PendingVersion(
        channel.name, channel.begun, request.version, request.parts, session, request.length_s
    )
    core.deadlines.add(channel.pending, now + request.length_s)
    return VersionBegun(channel.begun)


def keep_part(
    channel: WeightChannelState, blocks: BlockRegistry, request: Publish, deadlines: Deadlines, now: float
) -> None:
    """Keep part 1 or above, which `check_publish` accepted, until part 0 comes."""
    pending = channel.pending
    if pending is not None:
        pending.kept[request.part] = _commit(channel, blocks, request)
        if not pending.parts:
            deadlines.add(pending, now + pending.length_s)


def missing_parts(channel: WeightChannelState, request: Publish) -> str:
    """Which parts the version that the request would publish lacks; "" if none."""
    pending = channel.pending if request.pending else None
    return pending.explain() if pending is not None and pending.missing else ""


def give_up(channel: WeightChannelState, blocks: BlockRegistry, why: str) -> bool:
    """Give up the pending version of the channel, and free its parts. Returns whether there was one."""
    pending = channel.pending
    if pending is None:
        return False
    lacking = (
        f"without parts {listing(pending.missing)} of {pending.parts}" if pending.missing else "before part 0 had come"
    )
    channel.given_up[pending.number] = f"{pending.subject} was given up {lacking}: {why}; begin it again"
    channel.given_up = dict(sorted(channel.given_up.items())[-GIVEN_UP_KEPT:])
    _end_pending(channel)
    for part in pending.kept.values():
        for number in part.blocks:
            blocks.retire(number, 1)
    return True


def _end_pending(channel: WeightChannelState) -> None:
    if channel.pending is not None:
        channel.pending.deadline = None
        channel.pending = None


def _lose_pending(channel: WeightChannelState, blocks: BlockRegistry, gone: frozenset[int], why: str) -> None:
    pending = channel.pending
    if pending is not None and any(not gone.isdisjoint(part.blocks) for part in pending.kept.values()):
        give_up(channel, blocks, why)


# ---------------------------------------------------------------- losses and pulls


def lose_blocks(channel: WeightChannelState, blocks: BlockRegistry, gone: frozenset[int], why: str) -> None:
    """Remove each version that has one of the lost blocks. `why` is as in `WeightChannelState.lost`."""
    _lose_pending(channel, blocks, gone, why)
    for version in [number for number, published in channel.versions.items() if not gone.isdisjoint(published.blocks)]:
        _forget(channel, blocks, version)
        channel.lost[version] = why
    channel.lost = dict(sorted(channel.lost.items())[-channel.keep :])


def history(channel: WeightChannelState, blocks: BlockRegistry) -> dict[int, list[str]]:
    """The differences of each version before its whole fields, which only readers that are behind use."""
    return {number: names for number, version in channel.versions.items() if (names := _history(version, blocks))}


def _history(version: PublishedVersion, blocks: BlockRegistry) -> list[str]:
    chains = deltas_by_field(version.ranges)
    if not chains:
        return []
    names: list[str] = []
    places = (blocks.blocks[number].at for number in version.blocks)
    sums = {at.fields[0]: at.checksum for at in places if at.fields[0] in chains}
    for name, chain in chains.items():
        while chain and chain[-1].after != sums[name]:
            chain.pop()
        names += [delta.field for delta in chain]
    return names


def drop_history(channel: WeightChannelState, core: SharedState) -> int:
    """Drop the differences before whole fields. Returns the number of blocks. Readers that are behind then take whole
    fields."""
    found = history(channel, core.blocks)
    if found:
        core.begin()
    for number, names in found.items():
        _drop(channel.versions[number], core.blocks, frozenset(names))
    return sum(map(len, found.values()))


def _drop(version: PublishedVersion, blocks: BlockRegistry, names: frozenset[str]) -> None:
    dropped = [number for number in version.blocks if not names.isdisjoint(blocks.blocks[number].at.fields)]
    gone = set(dropped)
    version.dropped += dropped
    version.blocks = [number for number in version.blocks if number not in gone]
    version.fields = [old for old in version.fields if old.name not in names]
    version.ranges = [old for old in version.ranges if old.field not in names]
    for number in dropped:
        blocks.retire(number, 1)


def basis(channel: WeightChannelState, blocks: BlockRegistry) -> LatestVersion:
    """The latest version, from which the next can take blocks. It is not pinned: if it is gone by then, `check_publish`
    refuses it.
    """
    newest = channel.versions.get(channel.latest)
    if newest is None:
        return LatestVersion(channel.latest, [], [], {}, channel.lost.get(channel.latest, ""))
    kept = [blocks.blocks[number] for number in newest.blocks]
    extents = {block.extent.id: 0 if block.extent.open else block.extent.nbytes for block in kept}
    places, ranges = [block.at for block in kept], list(newest.ranges)
    return LatestVersion(
        channel.latest, list(newest.fields), places, extents, ranges=ranges, refused=channel.deltas_refused
    )


def pull(channel: WeightChannelState, core: SharedState, request: Pull, session: int) -> WeightsReply | Blocked:
    """The requested version, pinned for the session; or parts of it, if it is not published yet and the session takes
    parts."""
    version = request.version if request.version >= 0 else max(channel.versions, default=-1)
    if version in channel.lost:
        raise ShardLost(f"{explain_lost(channel, version)}; pull the newest, or wait for the next")
    if request.version >= 0 and request.version <= channel.latest and version not in channel.versions:
        raise NotFound(
            f'version {version} of channel "{channel.name}" is not kept; it has {listing(channel.versions)}: pull a '
            "newer one"
        )
    published = channel.versions.get(version)
    if published is None or (request.version < 0 and version <= request.above):
        parts = parts_for(channel.pending, channel.given_up, core, request, session)
        if parts is not None:
            return parts
        if request.wait_s > 0:
            keys = ("channel", "parts") if request.parts else ("channel",)
            return Blocked(tuple((key, channel.name) for key in keys))
        raise DeadlineExceeded(explain_pull(channel, request))
    core.begin()
    channel.deltas_refused = min(COUNT_MAX, channel.deltas_refused + request.refused)
    core.blocks.pin(session, published.blocks)
    places = [core.blocks.blocks[number].at for number in published.blocks]
    return WeightsReply(version, list(published.fields), places, list(published.ranges))


def explain_pull(channel: WeightChannelState, request: Pull) -> str:
    """The version that a pull waits for."""
    wanted = f"version {request.version}" if request.version >= 0 else f"a version above {request.above}"
    has = f"its latest is {channel.latest}" if channel.latest >= 0 else "nothing was published yet"
    if channel.latest in channel.lost:
        has = explain_lost(channel, channel.latest)
    coming = f"; {channel.pending.explain()}" if channel.pending is not None and channel.pending.is_coming else ""
    return f'channel "{channel.name}" does not have {wanted}: {has}{coming}'


def apply_version(channel: WeightChannelState, request: ReportApplied, session: int, now: float) -> None:
    """Record that `session` generates with the version from now on."""
    if request.version > channel.latest:
        raise NotFound(
            f'version {request.version} of channel "{channel.name}" was never published; {explain_latest(channel)}'
        )
    known = channel.versions.get(request.version)
    lag_s = None if known is None else now - known.at
    channel.applied[session] = AppliedVersion(request.version, now, lag_s)


def take_turn(
    channel: WeightChannelState, core: SharedState, request: AcquireUpdateSlot, session: int, now: float
) -> DoneReply | Blocked:
    """Give the session an update slot from now on. Asked for again, its time restarts."""
    others = len(channel.update_slots.keys() - {session})
    if others >= request.at_once:
        if request.wait_s > 0:
            return Blocked((("turn", channel.name),))
        raise DeadlineExceeded(explain_turn(channel, request))
    core.begin()
    turn = channel.update_slots.setdefault(session, UpdateSlot(channel.name, session))
    core.deadlines.add(turn, now + request.length_s)
    return DoneReply(1)


def end_turn(channel: WeightChannelState, session: int, effects: Effects) -> bool:
    """End the update slot of a session. Returns whether it had one."""
    turn = channel.update_slots.pop(session, None)
    if turn is None:
        return False
    turn.deadline = None
    effects.wake("turn", channel.name)
    return True


def explain_turn(
    channel: WeightChannelState, request: AcquireUpdateSlot, labels: Mapping[int, str] = MappingProxyType({})
) -> str:
    """Which sessions hold the update slots. `labels`: their names."""
    holders = listing(labels.get(number) or f"session {number}" for number in channel.update_slots)
    return (
        f'channel "{channel.name}" lets {request.at_once} update at once, and {holders} do; an '
        "update slot ends when its holder releases it, or when it expires"
    )


def explain_lost(channel: WeightChannelState, version: int) -> str:
    """Why a version was lost, and which versions exist instead."""
    whole = f"the complete versions are {listing(channel.versions)}" if channel.versions else "no version is complete"
    return f'version {version} of channel "{channel.name}" is gone ({channel.lost[version]}), and {whole}'


def explain_latest(channel: WeightChannelState) -> str:
    """Which version is the latest."""
    return f"its latest is {channel.latest}" if channel.latest >= 0 else "it has none"
