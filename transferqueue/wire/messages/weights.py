"""Messages about weight channels."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transferqueue.limits import ITEMS_MAX, ROWS_PER_REQUEST_MAX
from transferqueue.wire.messages.base import Count, Counts, Fields, Message, Name, Seconds, Text
from transferqueue.wire.messages.memory import BlockLocation, WrittenBlock


class Publish(Message):
    """Version `version` of a channel: blocks of one row, a field per tensor, in one commit.

    keep: versions kept. base, kept: the version is these new blocks and `kept`, blocks of version `base` (-1: of none), whose
    fields are known. Tables whose pacing names the channel advance their clock to `version`.
    """

    channel: Name
    version: Count
    fields: Fields
    blocks: Annotated[list[WrittenBlock], Meta(max_length=ITEMS_MAX)]
    keep: Annotated[int, Meta(ge=1)] = 2
    wait_s: Seconds = 0.0
    base: Annotated[int, Meta(ge=-1)] = -1
    kept: Counts = []


class GetLatestVersion(Message, tag="Basis"):
    """What the next version of a channel may be made of: the blocks of its newest. Answer: BasisAt."""

    channel: Name


class LatestVersion(Message, tag="BasisAt"):
    """The newest version (-1: none yet) with its blocks, which are not pinned.

    extents: size in bytes of each extent they lie in, 0 while more may be written there. lost: how the newest version was
    lost, if it was: then it has no blocks, and the next is published with all its tensors.
    """

    version: int
    fields: Fields
    blocks: Annotated[list[BlockLocation], Meta(max_length=ROWS_PER_REQUEST_MAX)]
    extents: Annotated[dict[int, int], Meta(max_length=ITEMS_MAX)]
    lost: Text = ""


class Pull(Message):
    """The newest version above `above` (or exactly `version` if >= 0), waiting for it."""

    channel: Name
    above: int = -1
    version: int = -1
    wait_s: Seconds = 0.0


class WeightsReply(Message, tag="Weights"):
    """A published version; pins its blocks like `ReplyRows`."""

    version: int
    fields: Fields
    blocks: Annotated[list[BlockLocation], Meta(max_length=ROWS_PER_REQUEST_MAX)]


class ReportApplied(Message, tag="Applied"):
    """This session generates with `version` of a channel from now on."""

    channel: Name
    version: Count


class AcquireUpdateSlot(Message, tag="Turn"):
    """Let this session change its weights, once fewer than `at_once` others do; the turn expires after `length_s`."""

    channel: Name
    at_once: Annotated[int, Meta(ge=1)] = 1
    length_s: Annotated[float, Meta(gt=0, le=1e9)] = 30.0
    wait_s: Seconds = 0.0


class ReleaseUpdateSlot(Message, tag="EndTurn"):
    """The turn of this session is over; none, or one that expired: no error."""

    channel: Name
