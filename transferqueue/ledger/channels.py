"""Weight channels: versions of a set of tensors, each one commit.

The newest `keep` versions are kept, and any of them can be pulled at any time. What a reply names stays
pinned for its session, so a version that is no longer kept keeps its bytes until the last reader lets go.
Publication and application are different facts: `applied` says who generates with which version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transferqueue.errors import AlreadyExists, DeadlineExceeded, NotFound, SchemaError, UsageError, listing
from transferqueue.ledger.blocks import Blocks, Usage
from transferqueue.ledger.commits import check_layout
from transferqueue.ledger.effects import Wait
from transferqueue.ledger.flowing import VERSION_MAX
from transferqueue.schema import Field
from transferqueue.wire.messages import Applied, Publish, Pull, Weights


@dataclass(slots=True)
class Version:
    """One published version: its fields, the numbers of its blocks, when it came."""

    fields: list[Field]
    blocks: list[int]
    at: float


@dataclass(slots=True)
class Channel:
    """The kept versions of one channel, ascending."""

    name: str
    keep: int = 2
    latest: int = -1
    versions: dict[int, Version] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    """Session -> version it generates with."""
    usage: Usage = field(default_factory=Usage)


def check_publish(channel: Channel, blocks: Blocks, session: int, request: Publish) -> None:
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
    fields = {one.name: one for one in request.fields}
    if len(fields) != len(request.fields) or not fields:
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


def publish(channel: Channel, blocks: Blocks, request: Publish, now: float) -> None:
    """Make the version the latest, and let go of those beyond `keep`. Checked before."""
    numbers = blocks.commit(request.blocks, channel.usage, [1] * len(request.blocks))
    channel.versions[request.version] = Version(list(request.fields), numbers, now)
    channel.latest, channel.keep = request.version, request.keep
    for version in list(channel.versions)[: -channel.keep]:
        for number in channel.versions.pop(version).blocks:
            blocks.retire(number, 1)


def pull(channel: Channel, blocks: Blocks, request: Pull, session: int) -> Weights | Wait:
    """The version asked for, pinned for the session."""
    version = request.version if request.version >= 0 else channel.latest
    if request.version >= 0 and request.version <= channel.latest and version not in channel.versions:
        raise NotFound(
            f'version {version} of channel "{channel.name}" is not kept; it has {listing(channel.versions)}: pull a newer one'
        )
    kept = channel.versions.get(version)
    if kept is None or (request.version < 0 and version <= request.above):
        if request.wait_s > 0:
            return Wait((("channel", channel.name),))
        raise DeadlineExceeded(explain_pull(channel, request))
    blocks.pin(session, kept.blocks)
    return Weights(version, list(kept.fields), [blocks.blocks[number].at for number in kept.blocks])


def explain_pull(channel: Channel, request: Pull) -> str:
    """What a pull waits for."""
    wanted = f"version {request.version}" if request.version >= 0 else f"a version above {request.above}"
    has = f"its latest is {channel.latest}" if channel.versions else "nothing was published yet"
    return f'channel "{channel.name}" does not have {wanted}: {has}'


def apply_version(channel: Channel, request: Applied, session: int) -> None:
    """`session` generates with the version from now on."""
    if request.version > channel.latest:
        raise NotFound(
            f'version {request.version} of channel "{channel.name}" was never published; {explain_latest(channel)}'
        )
    channel.applied[session] = request.version


def explain_latest(channel: Channel) -> str:
    """Which version is the latest."""
    return f"its latest is {channel.latest}" if channel.latest >= 0 else "it has none"
