"""A weight channel, used from event loops: versioned publication of model weights to whoever generates with them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from transferqueue.client.handles.weights import AsyncWeightChannelBase
from transferqueue.client.operations.publish import begin_version, publish_weights
from transferqueue.client.operations.tensor_parts import Only
from transferqueue.client.operations.weights import (
    BEGUN_S,
    TURN_S,
    Weights,
    acquire_update_slot,
    mirror_weights,
    pull_weights,
    release_update_slot,
    report_applied,
)
from transferqueue.client.session.run import Operation, T, run_async


class AsyncWeightChannel(AsyncWeightChannelBase):
    """Versioned publication of weights. Made by `AsyncQueue.weights`; any process may publish or pull."""

    async def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        adapter: str | None = None,
        pending: int = 0,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Publish all `tensors` (torch or numpy, by name) as `version`, in one commit; versions ascend. Returns the
        bytes written.

        Written once, into shared memory, from whatever device they are on; tensors that are as in the newest version
        are not written: their bytes are part of both. adapter: `tensors` are those of this adapter (such as a LoRA's),
        and the version is the newest with that adapter replaced or added; `NotFound` without a base. Tables whose
        pacing names this channel advance their clock. The oldest versions beyond `keep` end; who still views one keeps
        it. Waits up to `timeout_s` for memory (None: no limit). A tensor may be a `WeightSlice`, if all its rows are in
        the version.

        pending, part: publish one part of a version that `begin` began. Parts 1 and above return when they are written.
        Part 0, of the session that began the version, waits up to `timeout_s` for the others, and all become visible in
        one commit. If it raises, the version is given up. `VersionGivenUp` if it was before.
        """
        operation = publish_weights(
            self._client, self._name, self._keep, version, tensors, adapter, timeout_s, pending, part
        )
        return await self._run(operation)

    async def begin(self, version: int, *, parts: int, length_s: float = BEGUN_S) -> int:
        """Begin `version`, which `parts` sessions publish together, such as the ranks of a sharded trainer. Returns its
        number, which each of them passes to `publish` as ``pending``.

        No reader has the version before all have come. The version is given up, its parts are freed, and later ones are
        refused with `VersionGivenUp`: after `length_s` seconds, when this session ends, or when another version of the
        channel is begun.
        """
        return await self._run(begin_version(self._name, version, parts, length_s))

    async def mirror(self, weights: Weights, *, timeout_s: float | None = None) -> None:
        """Publish weights that were pulled from another channel, such as another deployment's, as the version they are
        there: base and adapters, in one commit, as they arrived (views that were changed in place since do not match
        their checksums, and are refused by whoever pulls them). Otherwise as `publish`; what is unchanged here is
        neither read nor written.
        """
        await self._run(mirror_weights(self._client, self._name, self._keep, weights, timeout_s))

    async def pull(
        self,
        above: int = -1,
        *,
        version: int | None = None,
        since: Weights | None = None,
        only: Only | None = None,
        timeout_s: float | None = None,
    ) -> Weights:
        """The newest version above `above` (or exactly `version`), waiting up to `timeout_s` for it (None: no limit).

        since: weights that are held, not released, whose unchanged tensors are shared, not fetched; `Weights.changed`
        says which are new. Of a tensor that is pulled in part, the same part must be held. Checksums of what is new are
        compared: `Corruption` if they do not match twice. only: names of tensors, or a mapping from names to the part
        of each: a `Slice` of ranges or shares along any of its dimensions, a range of rows along dimension 0, or None
        for all of it. The weights have these alone. Where bytes cross a network, no others do; the server compares the
        checksums of what crosses in part. `NotFound` for tensors or rows that the version does not have, `SchemaError`
        for a `Slice` that does not fit its tensor.

        Where bytes cross a network and a version is published in parts, such as by a relay, parts that have come are
        fetched and their checksums compared while the call waits for the rest. It returns the whole version, or raises;
        if the version is given up, it waits for the next.
        """
        return await self._run(pull_weights(self._client, self._name, above, version, since, timeout_s, only))

    async def applied(self, version: int) -> None:
        """This process generates with `version` from now on; that is a fact of its own, recorded beside publication."""
        await self._run(report_applied(self._name, version))

    @asynccontextmanager
    async def turn(
        self, *, at_once: int = 1, length_s: float = TURN_S, timeout_s: float | None = None
    ) -> AsyncGenerator[None]:
        """Change weights while at most `at_once` sessions do: generation as a whole never stops. Waits up to
        `timeout_s`.

        The turn ends with the block, with this session, or after `length_s`: who is dead or slow does not block the
        others.
        """
        await self._run(acquire_update_slot(self._name, at_once, length_s, timeout_s))
        try:
            yield
        finally:
            await self._run(release_update_slot(self._name))

    async def _run(self, operation: Operation[T]) -> T:
        return await run_async(self._client.connection, operation)
