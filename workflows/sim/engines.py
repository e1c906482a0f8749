"""One process of simulated engines: its instances are coroutines that lease real rows and wait out a service time.

Rules:

1. A service ends at an absolute deadline, counted from the moment an instance takes the row. A process leases `AHEAD`
   rows more than it has instances, as a loader does, and acknowledges beside the next service.
2. Instances pull: of those free, the one that has worked least takes the next row. A row waits for nobody in particular.
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
from transferqueue.client.aio.batch import AsyncBatch
from transferqueue.client.aio.reservation import AsyncReservation
from transferqueue.client.aio.table import AsyncTable
from transferqueue.errors import EndOfTable
from transferqueue.workflows.sim import asyncflow_trace as trace

TABLE: Final = "replay"
TOKENS: Final = 512
"""Length of the ragged payload of a row: what a row weighs is the benchmarks' business."""
WAIT_S: Final = 600.0
AHEAD: Final = 1
GIVES: Final = {"reference": "reference", "reward": "reward", "advantage": "advantage", "train": "loss"}


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of engines is told: its stage, the server, and published seconds per second."""

    stage: str
    address: str
    speed: float
    start: float = 0.0


class ServiceRecord(msgspec.Struct, frozen=True, array_like=True):
    """One service: the instance, when it had its row, and when it had waited out its time."""

    instance: int
    start: float
    end: float


async def until(deadline: float) -> None:
    """Wait for a moment of `time.monotonic`; a passed one is now."""
    await asyncio.sleep(max(0.0, deadline - time.monotonic()))


async def rollouts(table: AsyncTable, orders: EngineSpec) -> list[ServiceRecord]:
    """All rollout instances, each through its iterations."""
    await until(orders.start)
    found = await asyncio.gather(*(_rollout(table, orders, at) for at in range(trace.INSTANCES["rollout"])))
    await table.seal()
    return [one for instance in found for one in instance]


async def _rollout(table: AsyncTable, orders: EngineSpec, instance: int) -> list[ServiceRecord]:
    served: list[ServiceRecord] = []
    async with asyncio.TaskGroup() as later:
        for iteration in range(trace.ITERATIONS):
            reservation = await table.reserve(trace.ROWS_PER_ROLLOUT, timeout_s=WAIT_S)
            start = time.monotonic()
            took = trace.services("rollout")[iteration, instance] / orders.speed
            later.create_task(_hand_over(table, orders, reservation, iteration, instance, start))
            await until(start + took)
            served.append(ServiceRecord(instance=instance, start=start, end=time.monotonic()))
            await until(start + took + trace.RESTART_S / orders.speed)
    return served


async def _hand_over(
    table: AsyncTable, orders: EngineSpec, reservation: AsyncReservation, iteration: int, instance: int, start: float
) -> None:
    """Put each row when it is finished and seen: evenly over the time of the request, and the published lag later."""
    took = trace.services("rollout")[iteration, instance]
    for at in range(trace.ROWS_PER_ROLLOUT):
        await until(start + (took * (at + 1) / trace.ROWS_PER_ROLLOUT + trace.LAG_S) / orders.speed)
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


async def serve(table: AsyncTable, orders: EngineSpec) -> list[ServiceRecord]:
    """All instances of a pulled stage, until the table ends."""
    free = [(0.0, at) for at in range(trace.INSTANCES[orders.stage])]
    idle, room = asyncio.Semaphore(len(free)), asyncio.Semaphore(len(free) + AHEAD)
    served: list[ServiceRecord] = []

    async def work(batch: AsyncBatch) -> None:
        async with idle:
            worked, instance = heapq.heappop(free)
            one = await _serve(batch, orders, instance)
            heapq.heappush(free, (worked + one.end - one.start, instance))
        served.append(one)
        given: dict[str, Any] = {GIVES[orders.stage]: [1.0]}
        await batch.ack(**given)
        room.release()

    async with asyncio.TaskGroup() as at_work:
        while True:
            await room.acquire()
            try:
                at_work.create_task(work(await table.lease(orders.stage, rows=1, timeout_s=WAIT_S)))
            except EndOfTable:
                return served


async def _serve(batch: AsyncBatch, orders: EngineSpec, instance: int) -> ServiceRecord:
    start = time.monotonic()
    await until(start + _service_s(batch, orders))
    return ServiceRecord(instance=instance, start=start, end=time.monotonic())


def _service_s(batch: AsyncBatch, orders: EngineSpec) -> float:
    iteration, at = divmod(int(batch["number"].numpy()[0]), trace.BATCH_ROWS)
    return float(trace.services(orders.stage)[iteration, at]) / orders.speed


async def run(orders: EngineSpec) -> list[ServiceRecord]:
    """Join the server, say so on standard output, and serve ``orders``; the start comes on standard input."""
    async with tq.aconnect(orders.address, label=orders.stage) as queue:
        table = await queue.table(TABLE)
        trace.services(orders.stage)
        _say("ready")
        start = float(await asyncio.to_thread(sys.stdin.readline))
        orders = msgspec.structs.replace(orders, start=start)
        return await (rollouts if orders.stage == "rollout" else serve)(table, orders)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Entry of the process: its orders are the one argument, what it served its last line."""
    served = asyncio.run(run(msgspec.json.decode(sys.argv[1], type=EngineSpec)))
    _say(msgspec.json.encode(served).decode())


if __name__ == "__main__":
    main()
