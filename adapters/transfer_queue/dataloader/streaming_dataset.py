"""A partition as a torch ``IterableDataset``: batches as they become ready, split into micro-batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tensordict import TensorDict
from torch.utils.data import IterableDataset

from transferqueue.adapters.transfer_queue import deployment
from transferqueue.adapters.transfer_queue.client import TransferQueueClient
from transferqueue.adapters.transfer_queue.metadata import BatchMeta
from transferqueue.adapters.transfer_queue.samples.columns import rows_of_tensordict

Item = tuple[TensorDict, BatchMeta]
Fetch = Callable[..., tuple[TensorDict | None, BatchMeta]]
Process = Callable[..., list[Item]]


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Item]:
    """Split a batch into micro-batches; the last one is smaller if the size does not divide."""
    if not isinstance(td, TensorDict):
        raise TypeError(f"batch is {type(td).__name__}; give a TensorDict")
    if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise ValueError(f"micro_batch_size {micro_batch_size!r} is not a positive integer")
    if not td.batch_size:
        raise ValueError("the batch has no batch_size")
    size = td.batch_size[0]
    if micro_batch_size > size:
        raise ValueError(f"micro_batch_size {micro_batch_size} exceeds the batch of {size}")
    cuts = [range(start, min(start + micro_batch_size, size)) for start in range(0, size, micro_batch_size)]
    return [(rows_of_tensordict(td, cut), batch_meta.select_samples(cut)) for cut in cuts]


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Request batch `batch_index` and read it; the data is None if there is no batch."""
    meta = tq_client.get_meta(
        data_fields=data_fields,
        batch_size=batch_size,
        partition_id=partition_id,
        mode="fetch",
        task_name=task_name,
        sampling_config={**sampling_config, "batch_index": batch_index},
    )
    return (tq_client.get_data(meta) if len(meta) else None), meta


class StreamingDataset(IterableDataset[Item]):
    """Yields micro-batches of a partition for one data-parallel rank, as ``(TensorDict, BatchMeta)``.

    All datasets with the same `dp_rank` yield the same batches, if the sampler is rank-aware. With
    `should_check_consumption_status`, iteration ends when the task has consumed all samples of the partition; otherwise
    it never ends.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Fetch | None = None,
        process_batch_fn: Process | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("micro_batch_size", micro_batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be greater than 0, got {value}")
        if not data_fields:
            raise ValueError("data_fields is empty; name at least one field")
        if dp_rank < 0:
            raise ValueError(f"dp_rank must be greater than or equal to 0, got {dp_rank}")
        self.config = config
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.data_fields, self.partition_id = list(data_fields), partition_id
        self.task_name, self.dp_rank = task_name, dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn: Fetch = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn: Process = process_batch_fn or chunk_batch_fn
        self.buffer: list[list[Item]] = []
        self.batch_index = 0

    def __iter__(self) -> Iterator[Item]:
        client = deployment.start(None).client
        while not self._over(client):
            if self.batch_index == len(self.buffer) and not self._fetch(client):
                continue
            yield from self.buffer[self.batch_index]
            self.batch_index += 1

    def reset(self) -> None:
        """Start again: forget fetched batches."""
        self.buffer, self.batch_index = [], 0

    def step(self, partition_id: str) -> None:
        """Continue with another partition."""
        self.reset()
        self.partition_id = partition_id

    def _over(self, client: TransferQueueClient) -> bool:
        return (
            self.should_check_consumption_status
            and self.batch_index == len(self.buffer)
            and client.check_consumption_status(self.task_name, self.partition_id)
        )

    def _fetch(self, client: TransferQueueClient) -> bool:
        """Fetch one more batch. Return whether there was one; if not, this has waited for it at the server."""
        data, meta = self.fetch_batch_fn(
            client,
            self.data_fields,
            self.batch_size,
            self.partition_id,
            self.task_name,
            {"dp_rank": self.dp_rank, "task_name": self.task_name},
            self.batch_index,
        )
        if data is None or not len(meta):
            client.wait_for(self.data_fields, self.batch_size, self.partition_id, self.task_name, _PATIENCE_S)
            return False
        self.buffer.append(self.process_batch_fn(data, meta, self.micro_batch_size))
        return True


_PATIENCE_S = float(os.environ.get("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "1"))
"""Longest time between two requests for a batch that is not ready."""
