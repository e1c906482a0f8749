"""A drop-in for TransferQueue 0.1.11 (PyPI ``TransferQueue``, ``import transfer_queue``) on this queue.

Programs written for it run unchanged. `activate()` before their imports makes ``transfer_queue`` this package, in
this process and those it starts (Ray's workers too); ``transferqueue drop-in on`` does so for a whole environment.
The code is its own; the behaviour is the documented one. Needs torch, tensordict and omegaconf, and Ray if more than
one process takes part.
"""

from transferqueue.adapters.transfer_queue.client import TransferQueueClient
from transferqueue.adapters.transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from transferqueue.adapters.transfer_queue.errors import LockLostError, StorageKeyNotFoundError
from transferqueue.adapters.transfer_queue.interface import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_batch_update,
    async_kv_clear,
    async_kv_global_lock,
    async_kv_list,
    async_kv_local_lock,
    async_kv_put,
    async_kv_update,
    close,
    dump_data_by_key,
    get_client,
    get_metrics_endpoint,
    init,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_batch_update,
    kv_clear,
    kv_global_lock,
    kv_list,
    kv_local_lock,
    kv_put,
    kv_update,
    load_checkpoint,
    load_data_by_key,
    read_row_index,
    save_checkpoint,
)
from transferqueue.adapters.transfer_queue.metadata import BatchMeta, KVBatchMeta
from transferqueue.adapters.transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    StreamingTokenBudgetSampler,
)
from transferqueue.adapters.transfer_queue_hook import activate

__version__ = "0.1.11"
"""The version whose behaviour this package has."""

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "LockLostError",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "StreamingTokenBudgetSampler",
    "TransferQueueClient",
    "activate",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_batch_update",
    "async_kv_clear",
    "async_kv_global_lock",
    "async_kv_list",
    "async_kv_local_lock",
    "async_kv_put",
    "async_kv_update",
    "close",
    "dump_data_by_key",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_batch_update",
    "kv_clear",
    "kv_global_lock",
    "kv_list",
    "kv_local_lock",
    "kv_put",
    "kv_update",
    "load_checkpoint",
    "load_data_by_key",
    "read_row_index",
    "save_checkpoint",
]
