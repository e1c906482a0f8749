"""Loaders of the drop-in."""

from transferqueue.adapters.transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transferqueue.adapters.transfer_queue.dataloader.streaming_dataset import StreamingDataset

__all__ = ["StreamingDataLoader", "StreamingDataset"]
