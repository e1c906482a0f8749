"""Queue, table and batch as a program sees them: a sync and an async front over one sans-IO client.

What is where: `calls` and `connection` carry requests; `driving` runs the operations of `verbs`, `leasing`,
`commits` and `weighing`, which are generators; `ahead` fetches batches for `loader`; `queue`, `table`, `batch`, `reservation` and `aio` are the fronts.
"""

from transferqueue.client.aio import AsyncBatch, AsyncQueue, AsyncReservation, AsyncTable, AsyncWeightChannel
from transferqueue.client.batch import Batch
from transferqueue.client.loader import AsyncLoader, Loader
from transferqueue.client.queue import Queue
from transferqueue.client.reservation import Reservation
from transferqueue.client.rows import Rows
from transferqueue.client.table import Table
from transferqueue.client.weighing import WeightChannel, Weights

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
