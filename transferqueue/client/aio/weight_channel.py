"""The weight channel for event loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from transferqueue.client.handles.weights import WeightChannelBase
from transferqueue.client.operations.publish import publish_weights
from transferqueue.client.operations.weights import (
    TURN_S,
    Weights,
    acquire_update_slot,
    mirror_weights,
    pull_weights,
    release_update_slot,
    report_applied,
)
from transferqueue.client.session.run import Operation, T, run_async
from transferqueue.limits import TIMEOUT_S_DEFAULT
from transferqueue.storage.elements.process_bound import Staying


class AsyncWeightChannel(Staying, WeightChannelBase):
    """`WeightChannel` for an event loop."""

    elsewhere: ClassVar[str] = (
        "pass queue.address and the name of the channel, and open it there: tq.connect(address).weights(name)"
    )

    async def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        adapter: str | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        """As `WeightChannel.publish`."""
        await self._drive(publish_weights(self._client, self._name, self._keep, version, tensors, adapter, timeout_s))

    async def mirror(self, weights: Weights, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """As `WeightChannel.mirror`."""
        await self._drive(mirror_weights(self._client, self._name, self._keep, weights, timeout_s))

    async def pull(
        self,
        above: int = -1,
        *,
        version: int | None = None,
        since: Weights | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> Weights:
        """As `WeightChannel.pull`."""
        return await self._drive(pull_weights(self._client, self._name, above, version, since, timeout_s))

    async def applied(self, version: int) -> None:
        """As `WeightChannel.applied`."""
        await self._drive(report_applied(self._name, version))

    @asynccontextmanager
    async def turn(
        self, *, at_once: int = 1, length_s: float = TURN_S, timeout_s: float = TIMEOUT_S_DEFAULT
    ) -> AsyncGenerator[None]:
        """As `WeightChannel.turn`."""
        await self._drive(acquire_update_slot(self._name, at_once, length_s, timeout_s))
        try:
            yield
        finally:
            await self._drive(release_update_slot(self._name))

    async def _drive(self, operation: Operation[T]) -> T:
        return await run_async(self._client.connection, operation)
