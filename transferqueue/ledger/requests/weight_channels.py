"""Weight channels: published versions of a set of tensors, which replicas generate with which, and which may update
now.

Invariants:

- A version is composed of blocks: new ones, and blocks of a kept version, its base. Each kept version that contains a
  block has one reference to it. So the block is freed with the last of them, and never before.
- The newest `keep` versions are kept, and any of them can be pulled at any time. A reply pins its blocks for the
  session. So a version that is not kept any more keeps its bytes until the last reader unpins it.
- A version with a lost block is lost as a whole. A pull gets the newest whole version. A pull of the lost one is
  refused with the cause, and no version can use it as base: the next version is published with all its tensors.
- Publishing and applying are different facts: `applied` records which session generates with which version, since when.
- An *update slot* permits a session to change its weights. At most `at_once` sessions have one (each request states its
  own bound). A slot ends by its holder, with its session, or after its length: a dead replica never blocks the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from transferqueue.errors import (
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    SchemaError,
    ShardLost,
    UsageError,
    listing,
)
from transferqueue.ledger.deadlines import Deadlines
from transferqueue.ledger.effects import Effects, MustWait
from transferqueue.ledger.requests.flow_control import VERSION_MAX
from transferqueue.ledger.rows.blocks import BlockRegistry, OwnerBytes
from transferqueue.ledger.rows.commit import check_layout
from transferqueue.schema import Field
from transferqueue.wire.messages import (
    AcquireUpdateSlot,
    DoneReply,
    LatestVersion,
    Publish,
    Pull,
    ReportApplied,
    WeightsReply,
)


@dataclass(slots=True)
class PublishedVersion:
    """A published version: its fields, the numbers of its blocks, and when it was published."""

    fields: list[Field]
    blocks: list[int]
    at: float


@dataclass(slots=True)
class AppliedVersion:
    """A session generates with `version` since `at`. lag_s: how long after its publication; None if that time is not
    known any more.
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


def check_publish(channel: WeightChannelState, blocks: BlockRegistry, session: int, request: Publish) -> None:
    """Raise unless this version may be published."""
    if request.version > VERSION_MAX:
        raise UsageError(f"version {request.version} is above {VERSION_MAX}; versions count trainer steps")
    if request.version == channel.latest:
        raise AlreadyExists(
            f'version {request.version} of channel "{channel.name}" is published; versions are published once'
        )
    if request.version < channel.latest:
        raise UsageError(
            f'channel "{channel.name}" is at version {channel.latest}; it never goes back to {request.version}'
        )
    kept_fields = _check_kept(channel, blocks, request)
    fields = {new.name: new for new in request.fields}
    if (
        len(fields) + len(kept_fields) != len({*fields, *kept_fields})
        or len(fields) != len(request.fields)
        or not (fields or kept_fields)
    ):
        raise SchemaError(f'version {request.version} of channel "{channel.name}" needs fields, each named once')
    placed = [name for block in request.blocks for name in block.fields]
    if sorted(placed) != sorted(fields):
        raise SchemaError(
            f'version {request.version} of channel "{channel.name}" declares {listing(fields)}, but its blocks hold '
            f"{listing(placed)}; each field lies in exactly one block"
        )
    for block in request.blocks:
        if block.rows != 1 or block.slots is not None:
            raise SchemaError("a block of weights has one row and no slots: one value per tensor")
        check_layout(block, [fields[name] for name in block.fields])
    blocks.check(session, request.blocks)


def _check_kept(channel: WeightChannelState, blocks: BlockRegistry, request: Publish) -> list[str]:
    """Names of the fields that the version takes over from its base."""
    if request.base < 0 and not request.kept:
        return []
    base = channel.versions.get(request.base)
    if request.base in channel.lost:
        raise ShardLost(
            f"{explain_lost(channel, request.base)}: version {request.version} cannot keep blocks of it; publish again, all tensors"
        )
    if base is None:
        raise NotFound(
            f'version {request.base} of channel "{channel.name}", of which version {request.version} keeps blocks, is not kept; '
            f"it has {listing(channel.versions)}: publish over one of these, or all tensors"
        )
    strange = set(request.kept) - set(base.blocks)
    if strange or len(set(request.kept)) != len(request.kept):
        raise UsageError(
            f'version {request.version} of channel "{channel.name}" keeps blocks {listing(strange or request.kept)} of version '
            f"{request.base}, which has {listing(base.blocks)}; name blocks of it, each once"
        )
    return [name for number in request.kept for name in blocks.blocks[number].at.fields]


def publish(channel: WeightChannelState, blocks: BlockRegistry, request: Publish, now: float) -> None:
    """Make a version that `check_publish` accepted the latest, and remove versions beyond `keep`."""
    numbers = blocks.commit(request.blocks, channel.usage, [1] * len(request.blocks))
    blocks.refer(request.kept)
    fields = list(request.fields)
    if request.kept:
        names = {name for number in request.kept for name in blocks.blocks[number].at.fields}
        fields += [old for old in channel.versions[request.base].fields if old.name in names]
    channel.versions[request.version] = PublishedVersion(fields, [*numbers, *request.kept], now)
    channel.latest, channel.keep = request.version, request.keep
    for version in list(channel.versions)[: -channel.keep]:
        _forget(channel, blocks, version)


def _forget(channel: WeightChannelState, blocks: BlockRegistry, version: int) -> None:
    for number in channel.versions.pop(version).blocks:
        blocks.retire(number, 1)


def lose_blocks(channel: WeightChannelState, blocks: BlockRegistry, gone: frozenset[int], why: str) -> None:
    """Remove each version that has one of the lost blocks. why: as `WeightChannelState.lost`."""
    for version in [number for number, published in channel.versions.items() if not gone.isdisjoint(published.blocks)]:
        _forget(channel, blocks, version)
        channel.lost[version] = why
    channel.lost = dict(sorted(channel.lost.items())[-channel.keep :])


def basis(channel: WeightChannelState, blocks: BlockRegistry) -> LatestVersion:
    """The latest version, from which the next can take blocks. It is not pinned: if it is gone by then, `check_publish`
    refuses it.
    """
    newest = channel.versions.get(channel.latest)
    if newest is None:
        return LatestVersion(channel.latest, [], [], {}, channel.lost.get(channel.latest, ""))
    kept = [blocks.blocks[number] for number in newest.blocks]
    extents = {block.extent.id: 0 if block.extent.open else block.extent.nbytes for block in kept}
    return LatestVersion(channel.latest, list(newest.fields), [block.at for block in kept], extents)


def pull(channel: WeightChannelState, blocks: BlockRegistry, request: Pull, session: int) -> WeightsReply | MustWait:
    """The requested version, pinned for the session."""
    version = request.version if request.version >= 0 else max(channel.versions, default=-1)
    if version in channel.lost:
        raise ShardLost(f"{explain_lost(channel, version)}; pull the newest, or wait for the next")
    if request.version >= 0 and request.version <= channel.latest and version not in channel.versions:
        raise NotFound(
            f'version {version} of channel "{channel.name}" is not kept; it has {listing(channel.versions)}: pull a newer one'
        )
    published = channel.versions.get(version)
    if published is None or (request.version < 0 and version <= request.above):
        if request.wait_s > 0:
            return MustWait((("channel", channel.name),))
        raise DeadlineExceeded(explain_pull(channel, request))
    blocks.pin(session, published.blocks)
    return WeightsReply(version, list(published.fields), [blocks.blocks[number].at for number in published.blocks])


def explain_pull(channel: WeightChannelState, request: Pull) -> str:
    """What a pull waits for."""
    wanted = f"version {request.version}" if request.version >= 0 else f"a version above {request.above}"
    has = f"its latest is {channel.latest}" if channel.latest >= 0 else "nothing was published yet"
    if channel.latest in channel.lost:
        has = explain_lost(channel, channel.latest)
    return f'channel "{channel.name}" does not have {wanted}: {has}'


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
    channel: WeightChannelState, request: AcquireUpdateSlot, session: int, deadlines: Deadlines, now: float
) -> DoneReply | MustWait:
    """Give the session an update slot from now on. Asked for again, its time restarts."""
    others = len(channel.update_slots.keys() - {session})
    if others >= request.at_once:
        if request.wait_s > 0:
            return MustWait((("turn", channel.name),))
        raise DeadlineExceeded(explain_turn(channel, request))
    turn = channel.update_slots.setdefault(session, UpdateSlot(channel.name, session))
    deadlines.add(turn, now + request.length_s)
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
    """Which sessions hold the update slots. labels: their names."""
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
