"""Queue, table and batch as a program sees them: an API for threads and one for asyncio, over one client.

`session` carries requests over one connection. `memory` has the bytes. `operations` are generators without I/O, which `session.run` runs.
`handles` has what both APIs share; `sync` is the API for threads, `aio` the one for asyncio.
"""

from transferqueue.client.aio.queue import AsyncBatch, AsyncQueue, AsyncReservation, AsyncTable, AsyncWeightChannel
from transferqueue.client.handles.weights import WeightChannel, Weights
from transferqueue.client.operations.rows import Rows
from transferqueue.client.sync.batch import Batch
from transferqueue.client.sync.loader import AsyncLoader, Loader
from transferqueue.client.sync.queue import Queue
from transferqueue.client.sync.reservation import Reservation
from transferqueue.client.sync.table import Table

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
