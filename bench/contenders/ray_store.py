"""Ray's object store with a plain actor: batches are objects, the actor keeps their references in a list.

`put` is `ray.put` of numpy arrays (which Ray stores without pickling their bytes) and a call that hands the reference
to the actor; `get` asks the actor for the next reference and fetches it, without a copy where Ray can. The reader waits
in an async actor method, which is Ray's way to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray

from bench.contenders.arrays import Arrays, arrays, some_rows
from bench.workloads import Bytes, Counts, Flat, Workload

NAMESPACE = "bench"


@ray.remote(num_cpus=0)
class Mailbox:
    """References of the batches not yet taken."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def put(self, reference: list[Any]) -> None:
        await self.queue.put(reference)

    async def get(self) -> list[Any]:
        return await self.queue.get()


class RayEndpoint:
    ordered = True

    def __init__(self, address: str) -> None:
        if not ray.is_initialized():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        self.mailbox = ray.get_actor("mailbox", namespace=NAMESPACE)

    def begin(self, workload: Workload) -> None:
        self.workload = workload

    def prepare(self, columns: Mapping[str, Flat]) -> Arrays:
        return arrays(columns)

    def put(self, prepared: Arrays) -> None:
        ray.get(self.mailbox.put.remote([ray.put(prepared)]))

    def get(self, ticket: Any, rows: list[int] | None) -> Arrays:
        [reference] = ray.get(self.mailbox.get.remote(), timeout=60)
        return some_rows(ray.get(reference), self.workload.wanted, rows)

    def flat(self, got: Arrays, name: str) -> tuple[Bytes, Counts]:
        return got[name]

    def finish(self, ticket: Any, got: Arrays) -> None:
        """The last reference goes with the batch."""

    def close(self) -> None:
        ray.shutdown()


class RayStore:
    name = "ray"
    waits = True

    def start(self) -> str:
        context = ray.init(
            num_cpus=8, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False, object_store_memory=4 << 30
        )
        self.mailbox = Mailbox.options(name="mailbox", namespace=NAMESPACE).remote()
        return context.address_info["gcs_address"]

    def join(self, address: str) -> RayEndpoint:
        return RayEndpoint(address)

    def stop(self) -> None:
        ray.shutdown()

    def unsupported(self, workload: Workload) -> str:
        return ""


def make(name: str) -> RayStore:
    return RayStore()
