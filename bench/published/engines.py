"""One process of simulated engines. Its instances are coroutines that lease real rows and wait for the digitised
service time.

Rules:

1. A service ends at an absolute deadline, counted from the moment an instance takes the row. A process leases `AHEAD`
   rows more than it has instances, as a loader does, and acks a row while the instance serves the next.
2. Instances pull rows: of the free instances, the one with the least busy time takes the next row.
3. Times are monotonic seconds of the machine, comparable between its processes.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from typing import Any, Final

import msgspec
import numpy as np

import transferqueue as tq
from bench.published import asyncflow_trace as trace
from transferqueue.client.aio.batch import AsyncBatch
from transferqueue.client.aio.reservation import AsyncReservation
from transferqueue.client.aio.table import AsyncTable
from transferqueue.errors import EndOfTable

TABLE: Final = "replay"
TOKENS: Final = 512
"""Length of the ragged payload of a row. The other benchmarks measure what bytes cost."""
WAIT_S: Final = 600.0
AHEAD: Final = 1
GIVES: Final = {"reference": "reference", "reward": "reward", "advantage": "advantage", "train": "loss"}


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a process of engines: its stage, the server's address, seconds of the trace per second, and the
    start (monotonic s)."""

    stage: str
    address: str
    speed: float
    start: float = 0.0


class ServiceRecord(msgspec.Struct, frozen=True, array_like=True):
    """One service: the instance, when it took its row, and when the service time was over (monotonic s)."""

    instance: int
    start: float
    end: float


async def until(deadline: float) -> None:
    """Wait until `deadline`, a moment of `time.monotonic`; return at once if it has passed."""
    await asyncio.sleep(max(0.0, deadline - time.monotonic()))


async def rollouts(table: AsyncTable, spec: EngineSpec) -> list[ServiceRecord]:
    """Run all rollout instances, each through its iterations, then seal the table."""
    await until(spec.start)
    records = await asyncio.gather(*(_rollout(table, spec, at) for at in range(trace.INSTANCES["rollout"])))
    await table.seal()
    return [record for instance in records for record in instance]


async def _rollout(table: AsyncTable, spec: EngineSpec, instance: int) -> list[ServiceRecord]:
    served: list[ServiceRecord] = []
    async with asyncio.TaskGroup() as puts:
        for iteration in range(trace.ITERATIONS):
            reservation = await table.reserve(trace.ROWS_PER_ROLLOUT, timeout_s=WAIT_S)
            start = time.monotonic()
            took = trace.services("rollout")[iteration, instance] / spec.speed
            puts.create_task(_put_rows(table, spec, reservation, iteration, instance, start))
            await until(start + took)
            served.append(ServiceRecord(instance=instance, start=start, end=time.monotonic()))
            await until(start + took + trace.RESTART_S / spec.speed)
    return served


async def _put_rows(
    table: AsyncTable, spec: EngineSpec, reservation: AsyncReservation, iteration: int, instance: int, start: float
) -> None:
    """Put the rows of one request. They finish evenly over its time, and are put `LAG_S` after they finish."""
    took = trace.services("rollout")[iteration, instance]
    for at in range(trace.ROWS_PER_ROLLOUT):
        await until(start + (took * (at + 1) / trace.ROWS_PER_ROLLOUT + trace.LAG_S) / spec.speed)
        number = at * trace.INSTANCES["rollout"] + instance
        await table.put(
            reservation=reservation,
            response=[np.full(TOKENS, number, np.int32)],
            number=[iteration * trace.BATCH_ROWS + number],
            group_id=iteration,
            group_size=trace.BATCH_ROWS,
            policy_version=reservation.version,
            timeout_s=WAIT_S,
        )


async def serve(table: AsyncTable, spec: EngineSpec) -> list[ServiceRecord]:
    """Serve rows with all instances of a stage that leases, until the table ends."""
    free = [(0.0, at) for at in range(trace.INSTANCES[spec.stage])]
    idle, room = asyncio.Semaphore(len(free)), asyncio.Semaphore(len(free) + AHEAD)
    served: list[ServiceRecord] = []

    async def work(batch: AsyncBatch) -> None:
        async with idle:
            worked, instance = heapq.heappop(free)
            record = await _serve(batch, spec, instance)
            heapq.heappush(free, (worked + record.end - record.start, instance))
        served.append(record)
        results: dict[str, Any] = {GIVES[spec.stage]: [1.0]}
        await batch.ack(**results)
        room.release()

    async with asyncio.TaskGroup() as working:
        while True:
            await room.acquire()
            try:
                working.create_task(work(await table.lease(spec.stage, rows=1, timeout_s=WAIT_S)))
            except EndOfTable:
                return served


async def _serve(batch: AsyncBatch, spec: EngineSpec, instance: int) -> ServiceRecord:
    start = time.monotonic()
    await until(start + _service_s(batch, spec))
    return ServiceRecord(instance=instance, start=start, end=time.monotonic())


def _service_s(batch: AsyncBatch, spec: EngineSpec) -> float:
    iteration, at = divmod(int(batch["number"].numpy()[0]), trace.BATCH_ROWS)
    return float(trace.services(spec.stage)[iteration, at]) / spec.speed


async def run(spec: EngineSpec) -> list[ServiceRecord]:
    """Connect to the server, print a line when ready, read the start from standard input, and serve the stage of
    `spec`."""
    async with tq.aconnect(spec.address, label=spec.stage) as queue:
        table = await queue.table(TABLE)
        trace.services(spec.stage)
        _print("ready")
        start = float(await asyncio.to_thread(sys.stdin.readline))
        spec = msgspec.structs.replace(spec, start=start)
        return await (rollouts if spec.stage == "rollout" else serve)(table, spec)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Entry of the process: its one argument is an `EngineSpec`, its last line the `ServiceRecord`s, both JSON."""
    served = asyncio.run(run(msgspec.json.decode(sys.argv[1], type=EngineSpec)))
    _print(msgspec.json.encode(served).decode())


if __name__ == "__main__":
    main()
