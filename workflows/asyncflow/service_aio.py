"""The service interface of AsyncFlow for programs with an event loop; `service` has the rules."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.workflows.asyncflow.declaration import NAME, Engines
from transferqueue.workflows.asyncflow.experience import AsyncExperienceStream, ExperienceIndex, lease_terms
from transferqueue.workflows.asyncflow.service import PromptBatch, ServiceBase, announcement, check_columns, check_facts


class AsyncService(ServiceBase):
    """`AsyncFlowService` for an event loop: await its calls."""

    def __init__(self, table: tq.AsyncTable, channel: tq.AsyncWeightChannel) -> None:
        super().__init__(table)
        self._table, self._channel = table, channel

    @classmethod
    async def init_engines(cls, queue: tq.AsyncQueue, engines: Engines) -> Self:
        """As `AsyncFlowService.init_engines`."""
        return cls(await queue.create_table(engines.table, **engines.terms()), queue.weights(engines.table))

    @classmethod
    async def join(cls, queue: tq.AsyncQueue, *, name: str = NAME, timeout_s: float = 30.0) -> Self:
        """As `AsyncFlowService.join`."""
        return cls(await queue.table(name, timeout_s=timeout_s), queue.weights(name))

    @property
    def table(self) -> tq.AsyncTable:
        """The table of the job, for everything else."""
        return self._table

    async def put_prompts(
        self, columns: Mapping[str, Any], *, samples: int = 1, timeout_s: float | None = None, **facts: Any
    ) -> NDArray[np.int64]:
        """As `AsyncFlowService.put_prompts`."""
        prompts, started = PromptBatch(columns, samples, facts), time.monotonic()
        async with self._table.reserve(prompts.rows, timeout_s=timeout_s) as room:
            left_s = timeout_s and max(0.0, timeout_s - (time.monotonic() - started))
            return await self._table.put(reservation=room, timeout_s=left_s, **prompts.asked)

    async def get_experience(self, stage: str, **terms: Any) -> tq.AsyncBatch:
        """As `AsyncFlowService.get_experience`."""
        return await self._table.lease(stage, **terms)

    async def put_experience(
        self, taken: tq.AsyncBatch | Any, columns: Mapping[str, Any], *, rows: Any = None, **facts: Any
    ) -> None:
        """As `AsyncFlowService.put_experience`."""
        arguments = {**check_facts(facts), **check_columns(columns)}
        taken = taken.batch if isinstance(taken, ExperienceIndex) else taken
        if isinstance(taken, tq.AsyncBatch):
            await taken.ack(rows, **arguments)
        else:
            await self._table.update(taken, **arguments)

    async def notify_weights(
        self,
        version: int,
        tensors: Mapping[str, Any] | None = None,
        *,
        notice: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """As `AsyncFlowService.notify_weights`."""
        await self._channel.publish(version, announcement(tensors or {}, notice), timeout_s=timeout_s)

    async def get_weights(self, above: int = -1, *, timeout_s: float | None = None) -> tq.Weights:
        """As `AsyncFlowService.get_weights`."""
        return await self._channel.pull(above, timeout_s=timeout_s)

    async def put_prompts_data(
        self, prompts_data: Mapping[str, Any], *, samples: int = 1, timeout_s: float | None = None, **facts: Any
    ) -> NDArray[np.int64]:
        """As `AsyncFlowService.put_prompts_data`."""
        return await self.put_prompts(prompts_data, samples=samples, timeout_s=timeout_s, **facts)

    async def get_experience_data(
        self,
        experience_consumer_stage: str,
        experience_columns: Sequence[str] | None = None,
        experience_count: int | None = None,
        **terms: Any,
    ) -> tuple[tq.AsyncBatch, ExperienceIndex[tq.AsyncBatch]]:
        """As `AsyncFlowService.get_experience_data`."""
        wanted = lease_terms(experience_columns, experience_count, terms)
        batch = await self.get_experience(experience_consumer_stage, **wanted)
        return batch, ExperienceIndex(batch)

    async def put_experience_data(
        self,
        experience_data: Mapping[str, Any],
        index: ExperienceIndex[tq.AsyncBatch] | Any,
        *,
        rows: Any = None,
        **facts: Any,
    ) -> None:
        """As `AsyncFlowService.put_experience_data`."""
        await self.put_experience(index, experience_data, rows=rows, **facts)

    async def weight_sync_notify(
        self,
        version: int,
        tensors: Mapping[str, Any] | None = None,
        *,
        notice: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """As `AsyncFlowService.weight_sync_notify`."""
        await self.notify_weights(version, tensors, notice=notice, timeout_s=timeout_s)

    def create_stream_data_loader(
        self,
        *,
        experience_consumer_stage: str,
        experience_columns: Sequence[str] | None = None,
        experience_count: int | None = None,
        prefetch: int = 2,
        **terms: Any,
    ) -> AsyncExperienceStream:
        """As `AsyncFlowService.create_stream_data_loader`: ``async with`` and ``async for``."""
        wanted = lease_terms(experience_columns, experience_count, terms)
        return AsyncExperienceStream(self._table.loader(experience_consumer_stage, prefetch=prefetch, **wanted))

    async def status(self) -> dict[str, Any]:
        """As `AsyncFlowService.status`."""
        return await self._table.stats()

    async def seal(self) -> None:
        """As `AsyncFlowService.seal`."""
        await self._table.seal()
