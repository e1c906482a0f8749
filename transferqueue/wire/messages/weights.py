"""Messages about weight channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from transferqueue.limits import DELTA_SECTIONS_MAX, ITEMS_MAX, PUBLISH_BYTES_MAX, VERSION_PARTS_MAX
from transferqueue.wire.messages.base import Checksum, Count, Counts, DoneReply, Fields, Message, Name, Seconds, Text
from transferqueue.wire.messages.declarations import CHANNEL, request
from transferqueue.wire.messages.memory import BlockLocation, Unpin, WrittenBlock, unpin
from transferqueue.wire.roles import CONSUMERS, WORKERS


class TensorSlice(Message, tag="Slice"):
    """Field `field` holds rows [first, first + n) along dimension 0 of tensor `tensor`, which has `rows`. n is the
    first size of the field's shape."""

    field: Name
    tensor: Name
    first: Count
    rows: Count


class TensorDelta(Message, tag="Delta"):
    """Field `field` is how the content of field `of` differs after `version` from that before it (`uint8 [n]`, see
    `transferqueue.storage.memory.delta`).

    Field `of` lies whole in the same version, as a tensor or a slice. The differences of a field, in the order of their
    versions, lead from one content to the next, and the whole field has one of these contents. The last content is that
    of the version.

    Args:
        before: checksum of the content that it applies to, which is that of a block with the whole field.
        after: checksum of the result.
        ends: the byte at which each of its sections ends, which change successive parts of the field, of equal length.
    """

    field: Name
    of: Name
    version: Count
    before: Checksum
    after: Checksum
    ends: Annotated[list[int], Meta(min_length=1, max_length=DELTA_SECTIONS_MAX)]


TensorRange = TensorSlice | TensorDelta
"""What a field is that is no whole tensor."""


def slices_of(ranges: Iterable[TensorRange]) -> list[TensorSlice]:
    """The slices among these."""
    return [one for one in ranges if type(one) is TensorSlice]


def deltas_of(ranges: Iterable[TensorRange]) -> list[TensorDelta]:
    """The differences among these."""
    return [one for one in ranges if type(one) is TensorDelta]


TensorRanges = Annotated[list[TensorRange], Meta(max_length=ITEMS_MAX)]


@request(
    reply=DoneReply,
    roles=CONSUMERS,
    home=CHANNEL,
    verb="WeightChannel.publish",
    unanswered="if it was, the same publish again is refused, and pull(above=) sees it",
    bytes_max=PUBLISH_BYTES_MAX,
)
class Publish(Message):
    """Version `version` of a channel: blocks of one row, a field per tensor, in one commit.

    Tables whose pacing names the channel advance their clock to `version`.

    Args:
        keep: the number of versions kept.
        base: the version is these new blocks and `kept`, blocks of version `base` (-1: none), whose fields are known.
        kept: see `base`.
        ranges: new fields that are slices of a tensor, or differences. All blocks of a tensor or slice come in one
            part.
        pending: of a version in several parts, the number that `BeginVersion` gave (0: the version has one part). Parts
            1 and above are only kept. Part 0, from the session that began the version, waits for them, and publishes
            all parts in one commit.
    """

    channel: Name
    version: Count
    fields: Fields
    blocks: Annotated[list[WrittenBlock], Meta(max_length=ITEMS_MAX)]
    keep: Annotated[int, Meta(ge=1)] = 2
    wait_s: Seconds = 0.0
    base: Annotated[int, Meta(ge=-1)] = -1
    kept: Counts = []
    ranges: TensorRanges = []
    pending: Count = 0
    part: Annotated[int, Meta(ge=0, lt=VERSION_PARTS_MAX)] = 0


class VersionBegun(Message, tag="Begun"):
    """A version in several parts was begun. `pending` is its number, which each part names."""

    pending: int


def _give_up(request: BeginVersion, reply: VersionBegun, reason: str) -> list[GiveUpVersion]:
    return [GiveUpVersion(channel=request.channel, pending=reply.pending)]


@request(reply=VersionBegun, roles=CONSUMERS, home=CHANNEL, undo=_give_up, verb="WeightChannel.begin")
class BeginVersion(Message, tag="Begin"):
    """Begin version `version`, which `parts` sessions publish together. It is given up after `length_s`, with this
    session, or when another is begun.

    With `parts` 0, this session publishes all parts, any number until part 0 comes, and each part restarts `length_s`.
    """

    channel: Name
    version: Count
    parts: Annotated[int, Meta(ge=0, le=VERSION_PARTS_MAX)]
    length_s: Annotated[float, Meta(gt=0, le=1e9)]


@request(reply=DoneReply, roles=CONSUMERS, home=CHANNEL, verb="WeightChannel.publish")
class GiveUpVersion(Message, tag="GiveUp"):
    """Give up a version that this session began: its parts are forgotten. No error if it was published or given up."""

    channel: Name
    pending: Count


class LatestVersion(Message, tag="BasisAt"):
    """The newest version (-1: none yet) with its blocks, which are not pinned.

    Args:
        extents: size in bytes of each extent they lie in, 0 while more may be written there.
        lost: how the newest version was lost, if it was: then it has no blocks, and the next is published with all its
            tensors.
        ranges: of its fields.
        refused: how many times a difference of the channel gave a reader another result than it promised.
    """

    version: int
    fields: Fields
    blocks: Annotated[list[BlockLocation], Meta(max_length=ITEMS_MAX)]
    extents: Annotated[dict[int, int], Meta(max_length=ITEMS_MAX)]
    lost: Text = ""
    ranges: TensorRanges = []
    refused: Count = 0


@request(reply=LatestVersion, roles=CONSUMERS, home=CHANNEL, reads=True, verb="WeightChannel.publish")
class GetLatestVersion(Message, tag="Basis"):
    """Asks for the blocks of a channel's newest version, which the next one may reuse. Answer: BasisAt."""

    channel: Name


@request(reply=DoneReply, roles=CONSUMERS, home=CHANNEL, verb="WeightChannel.publish")
class DropDeltas(Message):
    """Drop the differences of a channel that no version needs: those before its whole fields. A server that lacks
    memory does this by itself. Answer: their number."""

    channel: Name


class WeightsReply(Message, tag="Weights"):
    """A published version; pins its blocks like `ReplyRows`.

    If `pending` is not 0, these are parts of the pending version of this number, and `have` counts its parts up to
    these.
    """

    version: int
    fields: Fields
    blocks: Annotated[list[BlockLocation], Meta(max_length=ITEMS_MAX)]
    ranges: TensorRanges = []
    pending: Count = 0
    have: Count = 0


def _unpin_weights(request: Pull, reply: WeightsReply, reason: str) -> list[Unpin]:
    return unpin(dict.fromkeys(block.block for block in reply.blocks))


@request(reply=WeightsReply, roles=WORKERS, home=CHANNEL, undo=_unpin_weights, verb="WeightChannel.pull")
class Pull(Message):
    """The newest version above `above` (or exactly `version` if >= 0), waiting for it.

    Args:
        parts: while it is not published, the reply may have parts of it that have arrived.
        pending: the pending version of which the first `have` parts were received. If it was given up, the request is
            refused with the reason.
        have: see `pending`.
        refused: how many fields got another content from their differences than these promised, at the try before.
    """

    channel: Name
    above: int = -1
    version: int = -1
    wait_s: Seconds = 0.0
    parts: bool = False
    pending: Count = 0
    have: Count = 0
    refused: Count = 0


@request(reply=DoneReply, roles=WORKERS, home=CHANNEL, verb="WeightChannel.applied")
class ReportApplied(Message, tag="Applied"):
    """This session generates with `version` of a channel from now on."""

    channel: Name
    version: Count


@request(
    reply=DoneReply,
    roles=WORKERS,
    home=CHANNEL,
    verb="WeightChannel.turn",
    unanswered="if it was granted, it ends after its length_s",
)
class AcquireUpdateSlot(Message, tag="Turn"):
    """Let this session change its weights, once fewer than `at_once` others do; the turn expires after `length_s`."""

    channel: Name
    at_once: Annotated[int, Meta(ge=1)] = 1
    length_s: Annotated[float, Meta(gt=0, le=1e9)] = 30.0
    wait_s: Seconds = 0.0


@request(reply=DoneReply, roles=WORKERS, home=CHANNEL, verb="WeightChannel.turn")
class ReleaseUpdateSlot(Message, tag="EndTurn"):
    """Ends the update slot of this session. No error without one, or if it has expired."""

    channel: Name


WeightRequests = (
    Publish
    | BeginVersion
    | GiveUpVersion
    | GetLatestVersion
    | DropDeltas
    | Pull
    | ReportApplied
    | AcquireUpdateSlot
    | ReleaseUpdateSlot
)
WeightReplies = VersionBegun | LatestVersion | WeightsReply
