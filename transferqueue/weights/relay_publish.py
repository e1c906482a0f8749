"""The host's side of a relay: its newest version of a channel, and the one on its way, which it publishes part by part.

1. A version that comes in one part is published in one commit. Another one is begun, and published part by part. The
   last one is part 0, which completes it.
2. The published parts of the version on its way are known by names, fields, sizes and checksums. A source that offers
   the same version continues where another one ended. A source that offers other bytes under a name, or another
   version, ends it.
3. After any error of a publication the version is given up, so no later step depends on whether the part arrived.
4. Giving a version up frees its memory. The server gives it up too if no part comes for `LENGTH_S`, and with the
   session of the relay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Final

import msgspec

from transferqueue.client.operations.publish import (
    WHOLE,
    PartTerms,
    begin_open_version,
    is_unchanged,
    mirror_version,
)
from transferqueue.client.operations.pull import Weights
from transferqueue.client.operations.weight_parts import SharedTensor, by_field, copy_of
from transferqueue.client.session.operation_runner import run_sync
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.errors import DeadlineExceeded
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import RELAY_PARTS_GROWTH, VERSION_PARTS_MAX
from transferqueue.schema import Field
from transferqueue.wire import messages as m

LENGTH_S: Final = 600.0
"""The server gives up a version without a new part for this long: as long as a relay waits for its source."""


class PlannedPart(msgspec.Struct):
    """A part to publish: blocks to fetch, and blocks of tensors that the newest version of the host has."""

    blocks: list[m.BlockLocation]
    held: list[m.BlockLocation]


class ComingVersion:
    """A version on its way. `number`: under which it was begun; 0: it was not. `parts` and `nbytes` count its published
    tensors, which are in `published` by name."""

    def __init__(self, version: int) -> None:
        self.version: Final = version
        self.number = self.parts = self.nbytes = 0
        self.published: dict[str, tuple[Field, m.BlockLocation]] = {}

    def has(self, field: Field, block: m.BlockLocation) -> bool:
        """Whether the tensor in `block` was published."""
        mine = self.published.get(field.name)
        return mine is not None and is_unchanged(*mine, field, block.nbytes, block.checksum)

    def fits(self, reply: m.WeightsReply) -> bool:
        """Whether the published parts can belong to the version of the reply."""
        fields, _ = by_field(reply)
        offered = {block.fields[0]: block for block in reply.blocks}
        same = all(
            self.has(fields[name], offered[name]) if name in offered else bool(reply.pending) for name in self.published
        )
        return same and reply.version == self.version

    def add(self, tensors: Sequence[SharedTensor]) -> None:
        """Record published tensors."""
        self.nbytes += sum(tensor.block.nbytes for tensor in tensors)
        self.published |= {
            name: (tensor.blocks.fields[name], tensor.block) for tensor in tensors for name in tensor.block.fields
        }


class RelayPublisher:
    """The versions of a channel on this host. For one thread. It publishes at least `part_bytes` at once."""

    def __init__(self, here: WeightChannel, part_bytes: int) -> None:
        self._here, self._client, self._part_bytes = here, here._client, part_bytes
        self._held: Weights | None = None
        self._coming: ComingVersion | None = None

    @property
    def version(self) -> int:
        """The newest version on this host; -1: none."""
        return -1 if self._held is None else self._held.version

    @property
    def is_over(self) -> bool:
        """Whether the session with this host has ended."""
        return self._client.closed

    def look(self) -> None:
        """Hold the newest version on this host, to compare the next one with it."""
        before = self._held
        with suppress(DeadlineExceeded):  # there is no version, or none that is newer
            self._held = self._here.pull(self.version, since=before, timeout_s=0)
            if before is not None:
                before.release()

    def plan(self, reply: m.WeightsReply) -> list[PlannedPart]:
        """The parts to publish of the reply, in order. The last part of a whole version, which may be empty, completes
        it."""
        if self._coming is not None and not self._coming.fits(reply):
            self.give_up()
        coming = self._coming = self._coming or ComingVersion(reply.version)
        fields, _ = by_field(reply)
        missing = [block for block in reply.blocks if not coming.has(fields[block.fields[0]], block)]
        held = [block for block in missing if self._has(fields[block.fields[0]], block)]
        known = {block.block for block in held}
        new = [
            PlannedPart(blocks, [])
            for blocks in self._cut(coming, [block for block in missing if block.block not in known])
        ]
        room = VERSION_PARTS_MAX - 1 - coming.parts
        if reply.pending:
            return [*([PlannedPart([], held)] if held else []), *new][:room]  # the others come with the whole version
        parts = [PlannedPart([], held), *new] if held else new
        before_last = max(0, min(room, len(parts) - 1)) if coming.number or len(new) > 1 else 0
        return [*parts[:before_last], *_joined(parts[before_last:])]

    def _has(self, field: Field, block: m.BlockLocation) -> bool:
        """Whether the newest version of the host has the tensor in `block`."""
        return self._held is not None and self._held._has(field, block)

    def _cut(self, coming: ComingVersion, blocks: Sequence[m.BlockLocation]) -> list[list[m.BlockLocation]]:
        """Blocks in their order, in lists of `part_bytes` or more (except the last). Lists grow as parts arrive."""
        cut: list[list[m.BlockLocation]] = []
        before, size = coming.nbytes, 0
        for block in blocks:
            if not cut or size >= max(self._part_bytes, before // RELAY_PARTS_GROWTH):
                cut.append([])
                before, size = before + size, 0
            cut[-1].append(block)
            size += block.nbytes
        return cut

    def publish(
        self,
        part: PlannedPart,
        fetched: Iterable[SharedTensor],
        reply: m.WeightsReply,
        *,
        is_last: bool,
        timeout_s: float,
    ) -> None:
        """Publish the next part of the reply. `is_last`: it completes the version. `fetched`: the tensors in
        ``part.blocks``."""
        coming = self._coming or ComingVersion(reply.version)
        held = self._share(part, reply)
        tensors = [*held, *fetched]
        with ExitStack() as at_end:
            for tensor in held:
                at_end.callback(tensor.release, "it was published")
            with OnFailure(self.give_up):
                terms = self._terms(coming, is_new=not held, is_last=is_last)
                self._mirror(tensors, reply, terms, timeout_s)
        coming.add(tensors)
        if is_last:
            self._coming = None

    def _share(self, part: PlannedPart, reply: m.WeightsReply) -> list[SharedTensor]:
        fields, _ = by_field(reply)
        if self._held is None:
            return []
        tensors = [self._held._shared(fields[block.fields[0]], block) for block in part.held]
        return [tensor for tensor in tensors if tensor is not None]

    def _mirror(
        self, tensors: Iterable[SharedTensor], reply: m.WeightsReply, terms: PartTerms, timeout_s: float
    ) -> None:
        _, slices = by_field(reply)
        copies = [copy_of(tensor, slices) for tensor in tensors]
        channel, keep = self._here._name, self._here._keep
        operation = mirror_version(self._client, channel, keep, reply.version, copies, timeout_s, terms)
        run_sync(self._client.connection, operation)

    def _terms(self, coming: ComingVersion, *, is_new: bool, is_last: bool) -> PartTerms:
        """The number of the next part. Begins the version with the first of several."""
        if is_last and not coming.number:
            return WHOLE
        if not coming.number:
            begin = begin_open_version(self._here._name, coming.version, LENGTH_S)
            coming.number = run_sync(self._client.connection, begin)
        coming.parts += not is_last
        return PartTerms(coming.number, 0 if is_last else coming.parts, is_new)

    def give_up(self) -> None:
        """End the version that is on its way, if there is one."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.number:
            self._client.connection.post(m.GiveUpVersion(channel=self._here._name, pending=coming.number))

    def close(self) -> None:
        """Release the held version, and give up the one on its way. A second call does nothing."""
        self.give_up()
        if self._held is not None:
            self._held.release()
            self._held = None


def _joined(parts: Iterable[PlannedPart]) -> list[PlannedPart]:
    """One part with the blocks of all these; it may be empty."""
    every = list(parts)
    blocks = [block for part in every for block in part.blocks]
    return [PlannedPart(blocks, [block for part in every for block in part.held])]
