"""The calls of the HTTP service. Each takes a body and returns an answer (`schemas`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

import transferqueue as tq
from transferqueue.adapters.protocols import Prompt
from transferqueue.errors import LeaseExpired, UsageError
from transferqueue.limits import ROWS_PER_REQUEST_MAX
from transferqueue.web.service.columns import Values, nbytes, pack, unpack, unpack_tensors
from transferqueue.web.service.leases import HttpLease, HttpLeases
from transferqueue.web.service.schemas import (
    DoneBody,
    Experience,
    GenerateBody,
    GetExperienceData,
    GetWeights,
    JobBody,
    LeaseRemainder,
    LeaseTime,
    PromptRows,
    PutExperienceData,
    PutPromptsData,
    ReleaseExperience,
    RenewExperience,
    SampleRequest,
    Status,
    TableBody,
    TensorBody,
    UpdateBody,
    VersionBody,
    WeightsBody,
    WeightSyncNotify,
)
from transferqueue.workflows.service.aio import AsyncService
from transferqueue.workflows.service.arguments import NOTICE, check_columns, notice_of
from transferqueue.workflows.service.declaration import Engines

ANSWER_BYTES_MAX: Final = 256 << 20
"""Bound on the columns or tensors of one answer, which is made whole before the first byte is sent."""


class Actions:
    """The calls, over one connected queue."""

    def __init__(self, queue: tq.AsyncQueue) -> None:
        self._queue = queue
        self._leases = HttpLeases()

    async def init_engines(self, body: Engines) -> JobBody:
        """Declare a job: its stages, what each needs and gives, and how far prompts may run ahead. Again in the same
        words: nothing changes."""
        service = await AsyncService.init_engines(self._queue, body)
        return JobBody(table=service.name, stages=service.stages)

    async def put_prompts_data(self, body: PutPromptsData) -> PromptRows:
        """Put prompts, once there is room; all or nothing."""
        service = await self._service(body.table)
        columns = await asyncio.to_thread(unpack, body.columns)
        facts = body.facts.given()
        rows = await service.put_prompts_data(columns, samples=body.samples, timeout_s=body.timeout_s, **facts)
        return PromptRows(rows=rows.tolist())

    async def get_experience_data(self, body: GetExperienceData) -> Experience:
        """Get rows of a stage, waiting for them. They are leased: give results, or they go to others at the deadline.
        `lease` and `rows` of the answer are the index by which results return."""
        self._leases.check_room()
        service = await self._service(body.table)
        mine = {} if body.request is None else {"where": tq.Compare("request", "==", body.request)}
        batch, _ = await service.get_experience_data(
            body.experience_consumer_stage,
            body.experience_columns,
            body.experience_count,
            groups=body.groups,
            tokens=body.tokens,
            at_least=body.at_least,
            timeout_s=body.timeout_s,
            lease_s=body.lease_s,
            **mine,
            time_limit_s=0,  # who works on the rows is elsewhere, and renews them itself while it lives
        )
        async with _released_if_refused(batch):
            columns = await asyncio.to_thread(_packed, batch, body.packed)
        return Experience(
            lease=self._leases.add(batch),
            lease_s=batch.lease_s,
            version=batch.version,
            rows=batch.rows.tolist(),
            columns=columns,
            policy_version=batch.policy_version.tolist(),
            group_id=batch.group_id.tolist(),
            group_size=batch.group_size.tolist(),
            tokens=batch.tokens.tolist(),
            keys=list(batch.keys),
        )

    async def put_experience_data(self, body: PutExperienceData) -> LeaseRemainder:
        """Give results, and end their lease, in one commit. A late call is refused and changes nothing."""
        columns = body.facts.given() | dict(check_columns(await asyncio.to_thread(unpack, body.columns)))
        if body.lease is not None:
            return await self._settle(
                body.lease, body.rows, "was given back", lambda batch: batch.ack(body.rows, **columns)
            )
        if body.rows is None:
            raise UsageError("neither lease nor rows: name the lease that the rows came with, or the ids of rows")
        service = await self._service(body.table)
        await service.table.update(body.rows, **columns)
        return LeaseRemainder(rows=len(body.rows), left=0)

    async def release_experience(self, body: ReleaseExperience) -> LeaseRemainder:
        """Hand rows back to other workers, or drop them."""
        columns = check_columns(await asyncio.to_thread(unpack, body.columns))
        if body.drop is None:
            return await self._settle(
                body.lease,
                body.rows,
                "was released",
                lambda batch: batch.release(body.rows, failed=body.failed, reason=body.reason, **columns),
            )
        if columns or body.failed or body.reason:
            raise UsageError(f'drop="{body.drop}" is itself the reason, and no row comes back; give no more than rows')
        reason = body.drop
        return await self._settle(body.lease, body.rows, "was dropped", lambda batch: batch.drop(reason, body.rows))

    async def renew_experience(self, body: RenewExperience) -> LeaseTime:
        """Extend a lease."""
        lease = self._leases.find(body.lease)
        async with self._turn(lease, body.lease):
            lease_s = await lease.batch.renew(body.lease_s)
            self._leases.renewed(body.lease, lease_s)
        return LeaseTime(lease_s=lease_s)

    async def weight_sync_notify(self, body: WeightSyncNotify) -> DoneBody:
        """Announce a version of the weights, the clock of the job. Waits while rows would become too old."""
        service = await self._service(body.table)
        tensors = await asyncio.to_thread(unpack_tensors, body.tensors)
        await service.weight_sync_notify(body.version, tensors, notice=body.notice, timeout_s=body.timeout_s)
        return DoneBody()

    async def get_weights(self, body: GetWeights) -> WeightsBody:
        """Wait for a version of the weights."""
        service = await self._service(body.table)
        with await service.get_weights(body.above, timeout_s=body.timeout_s) as weights:
            arrays = {name: tensor for name, tensor in weights.numpy().items() if name != NOTICE}
            _check_size(sum(tensor.nbytes for tensor in arrays.values()) if body.tensors else 0, "tensors=false")
            tensors = await asyncio.to_thread(_tensors, arrays, body.tensors)
            return WeightsBody(version=weights.version, notice=notice_of(weights), tensors=tensors)

    async def update(self, body: UpdateBody) -> VersionBody:
        """Publish weights for all engines, and return their version. Generation continues."""
        service = await self._service(body.table)
        weights = await asyncio.to_thread(unpack_tensors, body.weights)
        return VersionBody(version=await service.update(weights, version=body.version, timeout_s=body.timeout_s))

    async def generate(self, body: GenerateBody) -> SampleRequest:
        """Request samples of prompts from a job with the stages generate and train. Finished samples are rows of
        stage train: get them by the number of the request.
        """
        wanted = sum(prompt.samples for prompt in body.prompts)
        if wanted > ROWS_PER_REQUEST_MAX:
            raise UsageError(f"a request of {wanted} samples; at most {ROWS_PER_REQUEST_MAX}: make several requests")
        service = await self._service(body.table)
        stream = await service.generate(
            [Prompt.of(prompt.ids, prompt.samples) for prompt in body.prompts],
            scores=body.scores,
            expected=body.expected,
            number=body.number,
            timeout_s=body.timeout_s,
        )
        return SampleRequest(request=stream.request, left=stream.left)

    async def seal(self, body: TableBody) -> DoneBody:
        """End the prompts: engines drain the table, then get EndOfTable."""
        service = await self._service(body.table)
        await service.seal()
        return DoneBody()

    async def status(self, body: TableBody) -> Status:
        """Return the figures of the job's table."""
        service = await self._service(body.table)
        return Status(stats=(await service.status()).plain())

    async def _service(self, name: str) -> AsyncService:
        return await AsyncService.join(self._queue, name=name, timeout_s=0.0)

    async def _settle(
        self, name: str, rows: list[int] | None, how: str, verb: Callable[[tq.AsyncBatch], Awaitable[int]]
    ) -> LeaseRemainder:
        lease = self._leases.find(name)
        async with self._turn(lease, name):
            before = len(lease.left)
            await verb(lease.batch)
            lease.left.difference_update(lease.left.copy() if rows is None else rows)
            if not lease.left:
                self._leases.end(name, how)
        return LeaseRemainder(rows=before - len(lease.left), left=len(lease.left))

    @asynccontextmanager
    async def _turn(self, lease: HttpLease, name: str) -> AsyncIterator[None]:
        """Hold the lock of a lease, which is open when the block begins."""
        async with lease.lock:
            self._leases.find(name)
            try:
                yield
            except LeaseExpired:
                self._leases.end(name, "has expired, and its rows went to others")
                raise


class Action(NamedTuple):
    """A call by its name: the body it takes, the answer it gives, whether it may wait."""

    name: str
    takes: Any
    gives: Any
    waits: bool = False

    def of(self, actions: Actions) -> Callable[[Any], Awaitable[Any]]:
        """The method that carries out the call."""
        method: Callable[[Any], Awaitable[Any]] = getattr(actions, self.name)
        return method

    @property
    def about(self) -> str:
        """The description of the call."""
        return " ".join((getattr(Actions, self.name).__doc__ or "").split())


ACTIONS: Final = (
    Action("init_engines", Engines, JobBody),
    Action("put_prompts_data", PutPromptsData, PromptRows, waits=True),
    Action("get_experience_data", GetExperienceData, Experience, waits=True),
    Action("put_experience_data", PutExperienceData, LeaseRemainder),
    Action("release_experience", ReleaseExperience, LeaseRemainder),
    Action("renew_experience", RenewExperience, LeaseTime),
    Action("weight_sync_notify", WeightSyncNotify, DoneBody, waits=True),
    Action("get_weights", GetWeights, WeightsBody, waits=True),
    Action("update", UpdateBody, VersionBody, waits=True),
    Action("generate", GenerateBody, SampleRequest, waits=True),
    Action("seal", TableBody, DoneBody),
    Action("status", TableBody, Status),
)


@asynccontextmanager
async def _released_if_refused(batch: tq.AsyncBatch) -> AsyncIterator[None]:
    """Release the batch if its rows cannot be sent."""
    async with AsyncExitStack() as undo:
        undo.push_async_callback(batch.release)
        yield
        undo.pop_all()


def _packed(batch: tq.AsyncBatch, packed: bool) -> dict[str, Values]:
    columns: dict[str, Values] = {}
    for name in batch.fields:
        columns[name] = pack(batch[name], packed=packed)
        _check_size(sum(nbytes(values) for values in columns.values()), "fewer rows, or fewer columns")
    return columns


def _tensors(tensors: Mapping[str, Any], whole: bool) -> dict[str, TensorBody]:
    return {
        name: TensorBody(dtype=str(tensor.dtype), shape=list(tensor.shape), data=tensor.tobytes() if whole else None)
        for name, tensor in tensors.items()
    }


def _check_size(size: int, remedy: str) -> None:
    if size > ANSWER_BYTES_MAX:
        raise UsageError(f"the answer would have {size} bytes and more; at most {ANSWER_BYTES_MAX}: ask for {remedy}")
