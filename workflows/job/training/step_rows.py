"""The rows of a step as its trainer took them: their order, and digests of what it read.

With the recorded rows and a checkpoint, a step can be computed again (`transferqueue.workflows.job.run.replay`). A
digest is an xxh3-64 of the bytes of values: two rows have the same one if their columns are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from transferqueue.workflows.job.training.columns import RowColumns, rows_of


class TakenRows:
    """Collects the rows of one step. parts: their ids, as they were computed with together. digests: of each row.

    >>> rows = TakenRows()
    >>> rows.add({"rewards": [np.float32(1), np.float32(-1)]}, [7, 8])
    >>> rows.add({"rewards": [np.float32(1)]}, [9])
    >>> rows.parts, rows.digests[0] == rows.digests[2] != rows.digests[1]
    ([[7, 8], [9]], True)
    """

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.digests: list[int] = []
        self._columns: dict[str, xxhash.xxh3_64] = {}

    def add(self, columns: RowColumns, ids: Sequence[int]) -> None:
        """Add rows that were computed with together."""
        self.parts.append([*ids])
        states = [xxhash.xxh3_64() for _ in range(rows_of(columns))]
        for name in sorted(columns):
            of_column = self._columns.setdefault(name, xxhash.xxh3_64())
            for state, value in zip(states, columns[name], strict=True):
                data = _framed(value)
                state.update(data)
                of_column.update(data)
        self.digests += [state.intdigest() for state in states]

    @property
    def columns(self) -> dict[str, int]:
        """A digest of each column, over all rows."""
        return {name: state.intdigest() for name, state in sorted(self._columns.items())}

    def values(self) -> dict[str, Any]:
        """Return the rows as plain values."""
        return {"parts": self.parts, "digests": self.digests, "columns": self.columns}


def computes_on() -> dict[str, Any]:
    """Return what the last bits of this process's sums depend on: its device, and the number of its threads."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {"device": device, "threads": torch.get_num_threads()}


def _framed(value: Any) -> bytes:
    """The bytes of a value with their number. A single number counts as float64, which has every float32."""
    if isinstance(value, str):
        data = value.encode()
    else:
        array = np.asarray(value)
        data = np.ascontiguousarray(array if array.ndim else array.astype(np.float64)).tobytes()
    return len(data).to_bytes(8, "little") + data
