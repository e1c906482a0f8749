"""What a contender must do to be measured: the same five steps, so that the same clock stops the same work.

Timed: `put` (from the form a user holds to "others can get it") and `get` (from asking to arrays or tensors ready for
use). Not timed: making the user's form (`prepare`), turning what came back into bytes (`flat`), and `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from bench.workloads import Bytes, Counts, Flat, Workload

Ticket = Any
"""What the producer tells the consumer so that it finds a batch: plain data."""
Address = Any
"""What another process needs to join: plain data, or a queue that multiprocessing hands over."""


class Endpoint(Protocol):
    """One process's side of a contender."""

    ordered: bool
    """Whether rows of a batch come back in the order in which they were put."""

    def begin(self, workload: Workload) -> None:
        """Get ready for a workload (a table, a partition); before any put of it, in both processes."""

    def prepare(self, columns: Mapping[str, Flat]) -> Any:
        """The columns in the form that a user of this contender would hold."""

    def put(self, prepared: Any) -> Ticket:
        """Put the batch. Returns when the contender says that it is in."""

    def get(self, ticket: Ticket | None, rows: list[int] | None) -> Any:
        """The batch, ready for use, waiting for it if it is not there. ticket None: whatever comes next.

        rows: positions within the batch to read, at random; None: the whole batch.
        """

    def flat(self, got: Any, name: str) -> tuple[Bytes, Counts]:
        """Bytes of one delivered column and how many belong to each row."""

    def finish(self, ticket: Ticket | None, got: Any) -> None:
        """The reader is done: free the batch."""

    def close(self) -> None:
        """Leave."""


class Contender(Protocol):
    """How to start a contender and join it."""

    name: str
    waits: bool
    """Whether a reader that came first waits inside the contender (else it must ask again and again)."""

    def start(self) -> Address:
        """Start what must run (servers, actors). Returns what `join` needs in any process."""

    def join(self, address: Address) -> Endpoint:
        """Connect this process."""

    def stop(self) -> None:
        """End everything that `start` started."""

    def unsupported(self, workload: Workload) -> str:
        """Why this contender cannot carry that workload, or "" if it can."""


def counts_of(rows: list[Any]) -> Counts:
    """Bytes of each row in a list of byte strings or arrays."""
    return np.array([row.nbytes if hasattr(row, "nbytes") else len(row) for row in rows], np.int64)


def joined(rows: list[Any]) -> tuple[Bytes, Counts]:
    """Byte strings or arrays, one a row, as `flat` returns them."""
    parts = [np.frombuffer(row, np.uint8) if isinstance(row, bytes) else raw(row) for row in rows]
    return (np.concatenate(parts) if parts else np.empty(0, np.uint8)), counts_of(parts)


def raw(values: Any) -> Bytes:
    """The bytes of an array, in row-major order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
