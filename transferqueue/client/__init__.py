"""Queue, table and batch as a program sees them: an API for threads and one for asyncio, over one client.

`session` carries requests over one connection. `memory` has the bytes. `operations` are generators without I/O, which
`session.run` runs. `handles` has what both APIs share; `sync` is the API for threads, `aio` the one for asyncio.
"""

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.client.aio.batch import AsyncBatch
    from transferqueue.client.aio.loader import AsyncLoader
    from transferqueue.client.aio.queue import AsyncQueue
    from transferqueue.client.aio.reservation import AsyncReservation
    from transferqueue.client.aio.table import AsyncTable
    from transferqueue.client.aio.weight_channel import AsyncWeightChannel
    from transferqueue.client.operations.pull import Weights
    from transferqueue.client.operations.rows import Rows
    from transferqueue.client.sync.batch import Batch
    from transferqueue.client.sync.loader import Loader
    from transferqueue.client.sync.queue import Queue
    from transferqueue.client.sync.reservation import Reservation
    from transferqueue.client.sync.table import Table
    from transferqueue.client.sync.weight_channel import WeightChannel

__all__ = [
    "AsyncBatch",
    "AsyncLoader",
    "AsyncQueue",
    "AsyncReservation",
    "AsyncTable",
    "AsyncWeightChannel",
    "Batch",
    "Loader",
    "Queue",
    "Reservation",
    "Rows",
    "Table",
    "WeightChannel",
    "Weights",
]

__getattr__ = lazy_names(
    __name__,
    {
        "aio.batch": "AsyncBatch",
        "aio.loader": "AsyncLoader",
        "aio.queue": "AsyncQueue",
        "aio.reservation": "AsyncReservation",
        "aio.table": "AsyncTable",
        "aio.weight_channel": "AsyncWeightChannel",
        "operations.rows": "Rows",
        "operations.pull": "Weights",
        "sync.batch": "Batch",
        "sync.loader": "Loader",
        "sync.queue": "Queue",
        "sync.reservation": "Reservation",
        "sync.table": "Table",
        "sync.weight_channel": "WeightChannel",
    },
)
