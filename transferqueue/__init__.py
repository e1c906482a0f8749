"""TransferQueue: the queue between the stages of LLM post-training.

Everything public is a name of this module, loaded when it is first used, so that importing it loads neither
torch nor pyarrow nor ZeroMQ. Start at `connect`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transferqueue.lazy import lazy_names, renamed_names

if TYPE_CHECKING:
    from transferqueue.client.aio.batch import AsyncBatch
    from transferqueue.client.aio.loader import AsyncLoader
    from transferqueue.client.aio.pipeline import AsyncPipeline
    from transferqueue.client.aio.queue import AsyncQueue
    from transferqueue.client.aio.reservation import AsyncReservation
    from transferqueue.client.aio.table import AsyncTable
    from transferqueue.client.aio.weight_channel import AsyncWeightChannel
    from transferqueue.client.operations.publish import WeightSlice
    from transferqueue.client.operations.pull import Weights
    from transferqueue.client.operations.rows import Rows
    from transferqueue.client.sync.batch import Batch
    from transferqueue.client.sync.loader import Loader
    from transferqueue.client.sync.pipeline import Pipeline
    from transferqueue.client.sync.queue import Queue
    from transferqueue.client.sync.reservation import Reservation
    from transferqueue.client.sync.table import Table
    from transferqueue.client.sync.weight_channel import WeightChannel
    from transferqueue.cluster.on_ray.deploy import Deployment, deploy_ray
    from transferqueue.connecting import aconnect, connect
    from transferqueue.errors import (
        AddressInUse,
        AlreadyExists,
        BatchEnded,
        ColumnFreed,
        Corruption,
        DeadlineExceeded,
        Disconnected,
        EndOfTable,
        FlowSignal,
        Forked,
        Full,
        Impossible,
        InternalError,
        LeaseExpired,
        NotFound,
        OutOfMemory,
        PeerError,
        PermissionDenied,
        ProtocolError,
        RowsChanged,
        RowsEnded,
        SchemaError,
        Sealed,
        TransferQueueError,
        Unreachable,
        UsageError,
        VersionGivenUp,
    )
    from transferqueue.limits import Limits
    from transferqueue.policies import (
        Acked,
        AckedColumns,
        Compare,
        Complete,
        DeliverPartial,
        DropGroup,
        DropStale,
        Fifo,
        Freshest,
        HoldClock,
        KeepStale,
        LongestFirst,
        Manual,
        ManualColumns,
        OldestVersionFirst,
        OnStale,
        Pacing,
        Plugin,
        Predicate,
        Priority,
        PutOrder,
        Recorded,
        Refill,
        Requeue,
        Retention,
        Retry,
        Selector,
        TagIs,
        Task,
        TokenBalanced,
        VersionBetween,
    )
    from transferqueue.schema import Field, Share, Slice
    from transferqueue.storage.columns.column import Column
    from transferqueue.storage.columns.joined import Tree
    from transferqueue.storage.elements.registered_values import register_value
    from transferqueue.storage.inputs.prepare import Repeat
    from transferqueue.storage.row_files.reader import RecordedRows, Run, open_run

__version__ = "0.1.0"

_MODULES: Final = {
    "client.aio.batch": "AsyncBatch",
    "client.aio.loader": "AsyncLoader",
    "client.aio.pipeline": "AsyncPipeline",
    "client.aio.queue": "AsyncQueue",
    "client.aio.reservation": "AsyncReservation",
    "client.aio.table": "AsyncTable",
    "client.aio.weight_channel": "AsyncWeightChannel",
    "client.sync.batch": "Batch",
    "client.sync.loader": "Loader",
    "client.sync.pipeline": "Pipeline",
    "client.sync.queue": "Queue",
    "client.sync.reservation": "Reservation",
    "client.operations.rows": "Rows",
    "client.sync.table": "Table",
    "client.sync.weight_channel": "WeightChannel",
    "client.operations.publish": "WeightSlice",
    "client.operations.pull": "Weights",
    "connecting": "aconnect connect",
    "cluster.on_ray.deploy": "Deployment deploy_ray",
    "errors": "AddressInUse AlreadyExists BatchEnded ColumnFreed Corruption DeadlineExceeded Disconnected EndOfTable "
    "FlowSignal Forked Full Impossible InternalError LeaseExpired NotFound OutOfMemory PeerError PermissionDenied "
    "ProtocolError RowsChanged RowsEnded SchemaError Sealed TransferQueueError Unreachable UsageError VersionGivenUp",
    "limits": "Limits",
    "policies": "Acked AckedColumns Compare Complete DeliverPartial DropGroup DropStale Fifo Freshest HoldClock "
    "KeepStale LongestFirst Manual ManualColumns OldestVersionFirst OnStale Pacing Plugin Predicate Priority PutOrder "
    "Recorded Refill Requeue Retention Retry Selector TagIs Task TokenBalanced VersionBetween",
    "schema": "Field Share Slice",
    "storage.columns.column": "Column",
    "storage.columns.joined": "Tree",
    "storage.elements.registered_values": "register_value",
    "storage.inputs.prepare": "Repeat",
    "storage.row_files.reader": "RecordedRows Run open_run",
}

__all__ = [
    "Acked",
    "AckedColumns",
    "AddressInUse",
    "AlreadyExists",
    "AsyncBatch",
    "AsyncLoader",
    "AsyncPipeline",
    "AsyncQueue",
    "AsyncReservation",
    "AsyncTable",
    "AsyncWeightChannel",
    "Batch",
    "BatchEnded",
    "Column",
    "ColumnFreed",
    "Compare",
    "Complete",
    "Corruption",
    "DeadlineExceeded",
    "DeliverPartial",
    "Deployment",
    "Disconnected",
    "DropGroup",
    "DropStale",
    "EndOfTable",
    "Field",
    "Fifo",
    "FlowSignal",
    "Forked",
    "Freshest",
    "Full",
    "HoldClock",
    "Impossible",
    "InternalError",
    "KeepStale",
    "LeaseExpired",
    "Limits",
    "Loader",
    "LongestFirst",
    "Manual",
    "ManualColumns",
    "NotFound",
    "OldestVersionFirst",
    "OnStale",
    "OutOfMemory",
    "Pacing",
    "PeerError",
    "PermissionDenied",
    "Pipeline",
    "Plugin",
    "Predicate",
    "Priority",
    "ProtocolError",
    "PutOrder",
    "Queue",
    "Recorded",
    "RecordedRows",
    "Refill",
    "Repeat",
    "Requeue",
    "Reservation",
    "Retention",
    "Retry",
    "Rows",
    "RowsChanged",
    "RowsEnded",
    "Run",
    "SchemaError",
    "Sealed",
    "Selector",
    "Share",
    "Slice",
    "Table",
    "TagIs",
    "Task",
    "TokenBalanced",
    "TransferQueueError",
    "Tree",
    "Unreachable",
    "UsageError",
    "VersionBetween",
    "VersionGivenUp",
    "WeightChannel",
    "WeightSlice",
    "Weights",
    "aconnect",
    "connect",
    "deploy_ray",
    "open_run",
    "register_value",
]


__getattr__ = renamed_names(
    "transferqueue", {"Release": "DeliverPartial"}, otherwise=lazy_names("transferqueue", _MODULES)
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
