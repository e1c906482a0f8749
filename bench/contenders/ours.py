"""This project's queue: a server in its own process, producer and consumer its clients over ipc.

`put` is `table.put` of the user's tensors; `get` is `table.lease` (`table.read` of row ids where rows are picked at
random) and one torch tensor, jagged tensor or list a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch  # noqa: F401 — both sides hold torch tensors: its import is not part of the first put

import transferqueue as tq
from bench.contenders.tensors import flat_bytes, tensor
from bench.server import Server
from bench.workloads import Bytes, Counts, Flat, Workload

TASK = "train"


class OurEndpoint:
    ordered = True

    def __init__(self, address: str) -> None:
        self.queue = tq.connect(address)

    def begin(self, workload: Workload) -> None:
        self.workload = workload
        task = tq.Task(TASK, needs=workload.names)
        self.table = self.queue.create_table(workload.name, tasks=[task], exist_ok=True)

    def prepare(self, columns: Mapping[str, Flat]) -> dict[str, Any]:
        return {name: self._column(flat) for name, flat in columns.items()}

    def _column(self, flat: Flat) -> Any:
        column = tensor(flat)
        return tq.Repeat(column, flat.repeats) if flat.repeats > 1 else column

    def put(self, prepared: dict[str, Any]) -> list[int]:
        return self.table.put(**prepared)

    def get(self, ticket: Any, rows: list[int] | None) -> Any:
        workload = self.workload
        batch = self.table.lease(TASK, rows=workload.rows, fields=workload.wanted, timeout_s=60)
        if rows is None:
            return batch, {name: self._ready(batch[name]) for name in workload.wanted}
        read = self.table.read(batch.rows[rows], fields=workload.wanted)
        return batch, {name: self._ready(read[name]) for name in workload.wanted}

    def _ready(self, column: tq.Column) -> Any:
        kind = self.workload.kind
        if kind == "text":
            return column.list()
        if kind == "image":
            return list(column)
        return column.nested() if kind == "ragged" else column.torch()

    def flat(self, got: Any, name: str) -> tuple[Bytes, Counts]:
        return flat_bytes(got[1][name])

    def finish(self, ticket: Any, got: Any) -> None:
        batch, columns = got
        batch.ack()
        columns.clear()

    def close(self) -> None:
        self.queue.close()


class OurQueue:
    name = "transferqueue"
    waits = True

    def start(self) -> str:
        self.server = Server()
        return self.server.address

    def join(self, address: str) -> OurEndpoint:
        return OurEndpoint(address)

    def stop(self) -> None:
        self.server.stop()

    def unsupported(self, workload: Workload) -> str:
        return ""


def make(name: str) -> OurQueue:
    return OurQueue()
