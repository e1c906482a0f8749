"""What a get costs does not depend on how many fields its bytes are spread over. `bench` has the figure; this, that
nothing broke."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

import transferqueue as tq

ROWS, BYTES = 1024, 16 << 20
FACTOR = 8
"""The figure to reach is 2; this machine may be busy."""


def seconds_of_a_get(queue: tq.Queue, fields: int, turns: int = 3) -> float:
    """Lease and every column as an array, every byte read once; the median of some turns."""
    names = [f"f{number}" for number in range(fields)]
    table = queue.create_table(f"of_{fields}", tasks=[tq.Task("train", needs=names)])
    columns: dict[str, Any] = dict.fromkeys(names, np.ones((ROWS, BYTES // ROWS // fields // 4), np.float32))
    taken = []
    for _ in range(turns):
        table.put(**columns)
        began = time.perf_counter()
        with table.lease("train", rows=ROWS, timeout_s=30) as batch:
            total = sum(float(batch[name].numpy().sum(dtype=np.float64)) for name in names)
            taken.append(time.perf_counter() - began)
        assert total == BYTES // 4
    return statistics.median(taken)


def test_a_get_is_flat_in_the_number_of_fields() -> None:
    with tq.connect() as queue:
        one, many = (seconds_of_a_get(queue, fields) for fields in (1, 128))
    assert many < FACTOR * one
