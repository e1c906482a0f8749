"""Jobs on a weight channel: versions are whole, none is invented, none is older than a version published before. It is
the clock of a table.

In one of them two ranks publish each version together, in slices of one tensor. In another one a version comes in parts
that nobody counts, and those who pull take each part as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tests.simulator.job import BODY, SimJob, Steps, let_go, look, persistently, view, write
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import AlreadyExists
from transferqueue.schema import Field
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

VERSIONS: Final = 10
FIRST_STAMP: Final = 1_000_000
HALF: Final = 4
"""Rows of each slice, of 16 bytes."""
CHANNEL: Final = "policy"


class WeightChannelJob(SimJob):
    """One process publishes, two pull. on_published: called with each version that was certainly published."""

    table = CHANNEL

    def __init__(self, keep: int, on_published: Callable[[int], None]) -> None:
        self._keep: Final = keep
        self._on_published = on_published
        self._newest = -1

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        return {"publisher": self._publish, "replica 0": self._pull, "replica 1": self._pull}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`."""
        channel = state.channels[CHANNEL]
        if channel.latest != VERSIONS - 1 or len(channel.versions) > self._keep:
            raise PromiseBroken(
                f"channel at version {channel.latest} keeps {len(channel.versions)}, above {self._keep}"
            )

    def _publish(self, process: Process) -> Steps:
        while self._newest < VERSIONS - 1:
            yield from persistently(process, partial(self._publish_once, process))

    def _publish_once(self, process: Process) -> Steps:
        """Publish the next version. `AlreadyExists` means that an earlier try succeeded and its reply was lost."""
        version = self._newest + 1
        block = yield from write(process, [FIRST_STAMP + version])
        try:
            yield m.Publish(CHANNEL, version, [BODY], [block], self._keep, wait_s=3.0)
        except AlreadyExists:
            pass
        finally:
            if process.alive:
                process.send_unawaited(m.ReturnGrant(block.extent))
        self._newest = version
        self._on_published(version)
        yield process.world.random.uniform(0.1, 1.5)

    def _pull(self, process: Process) -> Steps:
        have = -1
        while have < VERSIONS - 1:
            have = yield from persistently(process, partial(self._pull_once, process, have))

    def _pull_once(self, process: Process, have: int) -> Steps:
        newest = self._newest
        weights = yield m.Pull(CHANNEL, above=have, wait_s=2.0)
        if not max(have + 1, newest) <= weights.version <= self._newest + 1:
            raise PromiseBroken(f"version {weights.version} was pulled above {have}, when {newest} was published")
        view(process, weights.blocks)
        try:
            for pause in (process.world.random.uniform(0.01, 1.0), 0.0):
                self._look(process, weights)
                yield pause
            yield m.ReportApplied(CHANNEL, weights.version)
        finally:
            let_go(process, weights.blocks)
        return weights.version

    def _look(self, process: Process, weights: m.WeightsReply) -> None:
        for block in weights.blocks:
            stamp = look(process, block, 0, f"version {weights.version}")
            if stamp != FIRST_STAMP + weights.version:
                raise PromiseBroken(f"version {weights.version} holds the bytes of {stamp - FIRST_STAMP}")


class ShardedWeightsJob(WeightChannelJob):
    """Two ranks publish each version in two parts, two processes pull."""

    def __init__(self, keep: int, on_published: Callable[[int], None]) -> None:
        super().__init__(keep, on_published)
        self._begun: tuple[int, int] | None = None
        """Version and number that rank 0 has sent to rank 1."""
        self._second_has: tuple[int, int] | None = None

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        return {**super().roles(), "second rank": self._publish_second}

    def _publish_once(self, process: Process) -> Steps:
        version = self._newest + 1
        try:
            begun = yield m.BeginVersion(CHANNEL, version, 2, process.world.random.uniform(0.5, 6.0))
            self._begun = version, begun.pending
            yield from self._part(process, version, begun.pending, 0)
        except AlreadyExists:
            pass  # an earlier try succeeded, and its reply was lost
        self._newest = version
        self._on_published(version)
        yield process.world.random.uniform(0.1, 1.0)

    def _publish_second(self, process: Process) -> Steps:
        while self._newest < VERSIONS - 1:
            yield from persistently(process, partial(self._second_once, process))

    def _second_once(self, process: Process) -> Steps:
        begun = self._begun
        if begun is None or begun == self._second_has:
            yield 0.05
            return
        with suppress(AlreadyExists):  # it came, and its reply was lost
            yield from self._part(process, *begun, 1)
        self._second_has = begun

    def _part(self, process: Process, version: int, pending: int, part: int) -> Steps:
        """Write and publish one half of the tensor."""
        block = msgspec.structs.replace((yield from write(process, [FIRST_STAMP + version])), fields=[f"half.{part}"])
        field = Field(f"half.{part}", "int64", (HALF, 2))
        half = m.TensorSlice(field.name, "whole", HALF * part, 2 * HALF)
        terms: dict[str, Any] = {"ranges": [half], "pending": pending, "part": part}
        try:
            yield m.Publish(CHANNEL, version, [field], [block], self._keep, wait_s=3.0, **terms)
        finally:
            if process.alive:
                process.send_unawaited(m.ReturnGrant(block.extent))

    def _look(self, process: Process, weights: m.WeightsReply) -> None:
        super()._look(process, weights)
        halves = sorted(one.first for one in m.slices_of(weights.ranges))
        if halves != [0, HALF] or len(weights.blocks) != len(halves):
            raise PromiseBroken(f"version {weights.version} has the slices {halves} in {len(weights.blocks)} blocks")


class ForwardedWeightsJob(WeightChannelJob):
    """One process publishes each version in parts that nobody counts, two pull the parts as they come, and then the
    version."""

    def _publish_once(self, process: Process) -> Steps:
        version = self._newest + 1
        try:
            begun = yield m.BeginVersion(CHANNEL, version, 0, process.world.random.uniform(0.5, 6.0))
            for part in (1, 2, 0):
                yield from self._part(process, version, begun.pending, part)
        except AlreadyExists:
            pass  # an earlier try succeeded, and its reply was lost
        self._newest = version
        self._on_published(version)
        yield process.world.random.uniform(0.1, 1.0)

    def _part(self, process: Process, version: int, pending: int, part: int) -> Steps:
        field = msgspec.structs.replace(BODY, name=f"tensor.{part}")
        block = msgspec.structs.replace((yield from write(process, [FIRST_STAMP + version])), fields=[field.name])
        try:
            yield m.Publish(CHANNEL, version, [field], [block], self._keep, wait_s=3.0, pending=pending, part=part)
        finally:
            if process.alive:
                process.send_unawaited(m.ReturnGrant(block.extent))

    def _pull_once(self, process: Process, have: int) -> Steps:
        newest, replies = self._newest, list[m.WeightsReply]()
        weights = m.WeightsReply(-1, [], [])
        try:
            while not replies or weights.pending:
                weights = yield m.Pull(
                    CHANNEL, above=have, wait_s=2.0, parts=True, pending=weights.pending, have=weights.have
                )
                replies.append(weights)
                if not max(have + 1, newest) <= weights.version <= self._newest + 1:
                    raise PromiseBroken(f"version {weights.version} came above {have}, when {newest} was published")
                view(process, weights.blocks)
            for pause in (process.world.random.uniform(0.01, 1.0), 0.0):
                self._look_at_all(process, replies)
                yield pause
            yield m.ReportApplied(CHANNEL, weights.version)
        finally:
            for reply in replies:
                let_go(process, reply.blocks)
        return weights.version

    def _look_at_all(self, process: Process, replies: list[m.WeightsReply]) -> None:
        """Each part has the bytes of its version and came once, and the whole has all of them."""
        *parts, whole = replies
        for reply in replies:
            self._look(process, reply)
        names = [field.name for reply in parts for field in reply.fields if reply.pending == parts[-1].pending]
        if len(names) != len(set(names)) or len(whole.fields) != 3:
            raise PromiseBroken(f"parts {names} came, and version {whole.version} has {len(whole.fields)} tensors")
