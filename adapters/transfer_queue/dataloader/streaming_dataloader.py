"""A torch ``DataLoader`` over `StreamingDataset`, which makes the batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from transferqueue.adapters.transfer_queue.dataloader.streaming_dataset import Item, StreamingDataset


def _as_it_is(item: Item) -> Item:
    return item


class StreamingDataLoader(DataLoader[Item]):
    """Yields micro-batches as ``(TensorDict, BatchMeta)``. Arguments are those of ``DataLoader``, without those about
    batches."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[..., Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        self.tq_dataset = dataset
        super().__init__(
            dataset=dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,  # type: ignore[arg-type]  # an item is a micro-batch
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context or ("spawn" if num_workers else None),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    def reset(self) -> None:
        """Start again."""
        self.tq_dataset.reset()

    def step(self, partition_id: str) -> None:
        """Continue with another partition."""
        self.tq_dataset.step(partition_id)

    def get_buffer(self) -> list[list[Item]]:
        """Return the batches fetched so far."""
        return self.tq_dataset.buffer
