"""The host's side of a relay: its newest version of a channel, and the one on its way, which it publishes part by part.

1. A version that comes in one part is published in one commit. Another one is begun, and published part by part. The
   last one is part 0, which completes it.
2. A range whose content is that of the host's newest version keeps its blocks there. If the source has differences that
   lead on from the host's content, they alone cross, and are published as they are. Else the whole range crosses, with
   the differences after it.
3. How many differences a range has on the host is the host's affair. Where they become too many, the relay makes the
   whole range from what its host has, and compares its checksum: whole ranges do not cross for that.
4. The published parts of the version on its way are known by names, fields and checksums. A source that offers the same
   version continues where another one ended. A source that offers other bytes under a name, or another version, ends
   it.
5. After any error of a publication the version is given up, so no later step depends on whether the part arrived.
6. After a difference gave another result than it promised, whole ranges cross, until a version is complete. The source
   counts it.
7. Giving a version up frees its memory. The server gives it up too if no part comes for `LENGTH_S`, and with the
   session of the relay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.publish import (
    WHOLE,
    PartTerms,
    begin_open_version,
    commit_updates,
)
from transferqueue.client.operations.range_updates import Newest, RangeUpdate, worth_keeping
from transferqueue.client.operations.stored_ranges import StoredRange, stored_ranges
from transferqueue.client.operations.tensor_parts import WHOLE as ALL
from transferqueue.client.operations.weight_blocks import ReusedTensor
from transferqueue.client.operations.weight_parts import (
    ArrivedTensors,
    SharedTensor,
    copy_of,
    fetch_ranges,
    release_all,
)
from transferqueue.client.session.operation_runner import BlockingWork, Operation, request_reply, run_sync
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.errors import Corruption
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import RELAY_PARTS_GROWTH, VERSION_PARTS_MAX
from transferqueue.schema import Field
from transferqueue.storage.memory.checksum import verify
from transferqueue.storage.memory.delta import apply_delta
from transferqueue.wire import messages as m

LENGTH_S: Final = 600.0
"""The server gives up a version without a new part for this long: as long as a relay waits for its source."""


class Sized(Protocol):
    """What comes in bytes."""

    @property
    def nbytes(self) -> int:
        """How many."""


S = TypeVar("S", bound=Sized)


class PlannedRange(msgspec.Struct):
    """A range to publish.

    Args:
        stored: as the source has it.
        blocks: of the source, to fetch.
        kept: blocks of the host's newest version that stay.
        made: whether all of it is made here, from the host's content and the blocks.
    """

    stored: StoredRange
    blocks: list[m.BlockLocation]
    kept: list[m.BlockLocation] = []
    made: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that cross."""
        return sum(block.nbytes for block in self.blocks)


class PlannedPart(msgspec.Struct):
    """A part to publish."""

    ranges: list[PlannedRange]

    @property
    def blocks(self) -> list[m.BlockLocation]:
        """The blocks to fetch."""
        return [block for one in self.ranges for block in one.blocks]


class ComingVersion:
    """A version on its way. `number`: under which it was begun; 0: it was not. `parts` and `nbytes` count what was
    published, and `published` has the field and the checksum of each range, by name."""

    def __init__(self, version: int) -> None:
        self.version: Final = version
        self.number = self.parts = self.nbytes = 0
        self.published: dict[str, tuple[Field, int]] = {}

    def has(self, stored: StoredRange) -> bool:
        """Whether the range was published."""
        mine = self.published.get(stored.field.name)
        return mine is not None and stored.is_same(*mine)

    def fits(self, version: int, offered: Mapping[str, StoredRange], *, is_whole: bool) -> bool:
        """Whether the published parts can belong to the version that a source offers."""
        same = all(self.has(offered[name]) if name in offered else not is_whole for name in self.published)
        return same and version == self.version

    def add(self, ranges: Iterable[PlannedRange]) -> None:
        """Record published ranges."""
        for one in ranges:
            self.nbytes += one.nbytes
            self.published[one.stored.field.name] = one.stored.field, one.stored.sum


class RelayPublisher:
    """The versions of a channel on this host. For one thread. It publishes at least `part_bytes` at once."""

    def __init__(self, here: WeightChannel, part_bytes: int) -> None:
        self._here, self._client, self._part_bytes = here, here._client, part_bytes
        self._coming: ComingVersion | None = None
        self._newest = Newest({}, {}, 0)
        self.version = -1
        """The newest version on this host; -1: none."""
        self.refused = 0
        """Differences that gave another result than they promised, since a version was complete."""

    @property
    def is_over(self) -> bool:
        """Whether the session with this host has ended."""
        return self._client.closed

    def look(self) -> None:
        """Learn what the newest version on this host has, to compare the next one with it."""
        request = m.GetLatestVersion(channel=self._here._name)
        newest = run_sync(self._client.connection, request_reply(request, m.LatestVersion))
        ranges = stored_ranges(newest.fields, newest.blocks, newest.ranges)
        self._newest = Newest.of(ranges, newest.extents, self._here._kept.deltas, len(ranges))
        self.version = newest.version

    # ------------------------------------------------------------ what to fetch

    def plan(self, reply: m.WeightsReply) -> list[PlannedPart]:
        """The parts to publish of the reply, in order. The last part of a whole version, which may be empty, completes
        it."""
        offered = stored_ranges(reply.fields, reply.blocks, reply.ranges)
        if self._coming is not None and not self._coming.fits(reply.version, offered, is_whole=not reply.pending):
            self.give_up()
        coming = self._coming = self._coming or ComingVersion(reply.version)
        missing = self._planned([stored for stored in offered.values() if not coming.has(stored)])
        held = [one for one in missing if not one.blocks]
        new = [PlannedPart(ranges) for ranges in self._cut(coming, [one for one in missing if one.blocks])]
        room = VERSION_PARTS_MAX - 1 - coming.parts
        if reply.pending:
            return [*([PlannedPart(held)] if held else []), *new][:room]  # the others come with the whole version
        parts = [PlannedPart(held), *new] if held else new
        before_last = max(0, min(room, len(parts) - 1)) if coming.number or len(new) > 1 else 0
        return [*parts[:before_last], _joined(parts[before_last:])]

    def _planned(self, missing: Sequence[StoredRange]) -> list[PlannedRange]:
        planned = [self._of_range(stored) for stored in missing]
        updates = [RangeUpdate(one.stored.field.name, one.kept) for one in planned]
        kept = worth_keeping(updates, self._newest)
        for one in planned:
            if one.kept and one.stored.field.name not in kept:
                one.kept, one.made = [], True
        return planned

    def _of_range(self, stored: StoredRange) -> PlannedRange:
        whole = PlannedRange(stored, [stored.block, *(delta.block for delta in stored.after_whole)])
        here = self._newest.ranges.get(stored.field.name)
        rest = None if here is None or here.field != stored.field else stored.after(here.sum)
        if here is None or rest is None or (self.refused and (rest or here.deltas)):
            return whole
        blocks = [delta.block for delta in rest]
        if sum(block.nbytes for block in blocks) > whole.nbytes:
            return whole
        if not rest:
            return PlannedRange(stored, [], here.blocks)
        kept = self._newest.kept_chain(here, [block.nbytes for block in blocks])
        if kept is None:
            return PlannedRange(stored, blocks, self._newest.kept_history(here, len(blocks)), made=True)
        return PlannedRange(stored, blocks, kept)

    def _cut(self, coming: ComingVersion, ranges: Sequence[S]) -> list[list[S]]:
        """Ranges in their order, in lists of `part_bytes` or more (except the last). Lists grow as parts arrive."""
        cut: list[list[S]] = []
        before, size = coming.nbytes, 0
        for one in ranges:
            if not cut or size >= max(self._part_bytes, before // RELAY_PARTS_GROWTH):
                cut.append([])
                before, size = before + size, 0
            cut[-1].append(one)
            size += one.nbytes
        return cut

    # ------------------------------------------------------------ publication

    def publish(
        self,
        part: PlannedPart,
        fetched: Mapping[str, SharedTensor],
        reply: m.WeightsReply,
        *,
        is_last: bool,
        timeout_s: float,
    ) -> None:
        """Publish the next part of the reply. `is_last`: it completes the version. `fetched`: what ``part.blocks``
        hold, by their fields."""
        coming = self._coming or ComingVersion(reply.version)
        with OnFailure(self.give_up):
            run_sync(self._client.connection, self._commit(coming, part, fetched, is_last=is_last, timeout_s=timeout_s))
        coming.add(part.ranges)
        if is_last:
            self._coming, self.refused = None, 0

    def _commit(
        self,
        coming: ComingVersion,
        part: PlannedPart,
        fetched: Mapping[str, SharedTensor],
        *,
        is_last: bool,
        timeout_s: float,
    ) -> Operation[None]:
        made = yield from self._made(part, fetched)
        updates = [_update(one, fetched, made) for one in part.ranges]
        terms = yield from self._terms(coming, is_last=is_last)
        deadline = yield from checks.within(timeout_s)
        channel, kept = self._here._name, self._here._kept
        yield from commit_updates(
            self._client, channel, kept, coming.version, self.version, updates, [], deadline, terms
        )

    def _made(self, part: PlannedPart, fetched: Mapping[str, SharedTensor]) -> Operation[dict[str, ReusedTensor]]:
        """The ranges that are made here, of the host's content and the differences that came."""
        wanted = {one.stored.field.name: self._newest.ranges[one.stored.field.name] for one in part.ranges if one.made}
        if not wanted:
            return {}
        reply = yield from request_reply(m.Pull(channel=self._here._name, version=self.version), m.WeightsReply)
        ranges = {name: (stored, ALL) for name, stored in wanted.items()}
        subject = f'version {self.version} of channel "{self._here._name}"'
        arrived = ArrivedTensors()
        try:
            held = yield from fetch_ranges(self._client, reply, ranges, lambda _: None, subject, arrived)
        except Corruption:
            self.refused += 1
            raise
        made = dict[str, ReusedTensor]()

        def make() -> None:
            for one in part.ranges:
                if one.made:
                    made[one.stored.field.name] = self._make(one, held[one.stored.field.name], fetched)

        try:
            yield BlockingWork(sum(stored.block.nbytes for stored in wanted.values()), make)
        finally:
            release_all(held, "it was published")
        return made

    def _make(self, one: PlannedRange, held: SharedTensor, fetched: Mapping[str, SharedTensor]) -> ReusedTensor:
        stored, memory = one.stored, held.own_copy()
        try:
            for block in one.blocks:
                apply_delta(memory, fetched[block.fields[0]].blocks.live_memory()[0])
            verify(memory, stored.sum, f'tensor "{stored.field.name}" of version {self.version}')
        except Corruption:
            self.refused += 1
            raise
        return ReusedTensor([stored.field], stored.block, memory, stored.slice, stored.sum)

    def _terms(self, coming: ComingVersion, *, is_last: bool) -> Operation[PartTerms]:
        """The number of the next part. Begins the version with the first of several."""
        if is_last and not coming.number:
            return WHOLE
        if not coming.number:
            coming.number = yield from begin_open_version(self._here._name, coming.version, LENGTH_S)
        coming.parts += not is_last
        return PartTerms(coming.number, 0 if is_last else coming.parts)

    def give_up(self) -> None:
        """End the version that is on its way, if there is one."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.number:
            self._client.connection.post(m.GiveUpVersion(channel=self._here._name, pending=coming.number))

    def close(self) -> None:
        """Give up the version on its way. A second call does nothing."""
        self.give_up()


def _update(one: PlannedRange, fetched: Mapping[str, SharedTensor], made: Mapping[str, ReusedTensor]) -> RangeUpdate:
    """What the range becomes on the host."""
    stored, name = one.stored, one.stored.field.name
    terms = {delta.field.name: delta.terms for delta in stored.deltas}
    tensors = [fetched[block.fields[0]] for block in one.blocks]
    whole: ReusedTensor | None = made.get(name)
    if name in fetched:
        whole = copy_of(fetched[name], stored.slice)
    deltas = [copy_of(tensor, terms[tensor.field.name]) for tensor in tensors if tensor.field.name in terms]
    return RangeUpdate(name, one.kept, whole, list(deltas))


def _joined(parts: Iterable[PlannedPart]) -> PlannedPart:
    """One part with the ranges of all these; it may be empty."""
    return PlannedPart([one for part in parts for one in part.ranges])
