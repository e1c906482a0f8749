"""TransferQueue 0.1.11, the incumbent, at its best documented setting: SimpleStorage with two units, polling mode.

`put` is `client.put` of a TensorDict; `get` is `get_meta` (its request for ready samples) and `get_data`. With
`polling_mode: False` a reader that asks early stops every client of the service for five seconds, so the reader here
asks again at once when `get_meta` comes back empty, which is what polling mode is for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
import transfer_queue as incumbent
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from bench.contenders.tensors import flat_bytes, tensor
from bench.workloads import Bytes, Counts, Flat, Workload

BACKENDS = {"incumbent": "SimpleStorage", "incumbent-ray-store": "RayStore"}
TASK = "train"


class IncumbentEndpoint:
    ordered = False  # once indices of cleared partitions are used again, rows come back in another order

    def __init__(self, address: str) -> None:
        logging.disable(logging.INFO)
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
        incumbent.init()
        self.client = incumbent.get_client()
        self.puts = self.gets = 0

    def begin(self, workload: Workload) -> None:
        self.workload = workload

    def prepare(self, columns: Mapping[str, Flat]) -> TensorDict:
        values = {name: self._column(flat) for name, flat in columns.items()}
        return TensorDict(values, batch_size=self.workload.rows)

    def _column(self, flat: Flat) -> Any:
        column = tensor(flat)
        if flat.kind == "text":
            return NonTensorStack(*column)
        return column.repeat_interleave(flat.repeats, dim=0) if flat.repeats > 1 else column

    def _partition(self, number: int) -> str:
        return f"{self.workload.name}_{number}"

    def put(self, prepared: TensorDict) -> str:
        self.puts += 1
        partition = self._partition(self.puts)
        self.client.put(prepared, partition_id=partition)
        return partition

    def get(self, ticket: str | None, rows: list[int] | None) -> Any:
        self.gets += 1
        found = self.ask(ticket or self._partition(self.gets))
        if rows is not None:
            found = found.select_samples(rows)
        return found, self.client.get_data(found)

    def ask(self, partition: str) -> Any:
        """The reader's request for ready samples, repeated until they are all there."""
        wanted, rows = self.workload.wanted, self.workload.rows
        until = time.perf_counter() + 60
        while time.perf_counter() < until:
            found = self.client.get_meta(
                data_fields=wanted, batch_size=rows, partition_id=partition, mode="fetch", task_name=TASK
            )
            if found.size == rows:
                return found
        raise TimeoutError(f"{rows} rows of {partition} did not become ready in 60 s")

    def flat(self, got: Any, name: str) -> tuple[Bytes, Counts]:
        column = got[1][name]
        return flat_bytes(column.tolist() if isinstance(column, NonTensorStack) else column)

    def finish(self, ticket: str | None, got: Any) -> None:
        self.client.clear_partition(ticket or self._partition(self.gets))

    def close(self) -> None:
        """The Ray connection ends with the process."""


class Incumbent:
    waits = False

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> str:
        logging.disable(logging.INFO)
        context = ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
        incumbent.init(
            OmegaConf.create(
                {"controller": {"polling_mode": True}, "backend": {"storage_backend": BACKENDS[self.name]}},
                flags={"allow_objects": True},
            )
        )
        return context.address_info["gcs_address"]

    def join(self, address: str) -> IncumbentEndpoint:
        return IncumbentEndpoint(address)

    def stop(self) -> None:
        incumbent.close()
        ray.shutdown()

    def unsupported(self, workload: Workload) -> str:
        return "its batches are TensorDicts: no pictures of different sizes" if workload.kind == "image" else ""


def make(name: str) -> Incumbent:
    return Incumbent(name)
