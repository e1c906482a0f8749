"""Where a new user makes mistakes: a queue with tables in each state, and what a mistake must not change."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

import transferqueue as tq

VALUES = {"x": [1, 2, 3, 4], "ids": [[1], [2, 3], [], [4]], "y": [0.5] * 4, "name": list("abcd")}


class Place:
    """Tables of one embedded queue, made once for all misuses."""

    def __init__(self, stack: ExitStack) -> None:
        self.queue = stack.enter_context(tq.connect("embedded", label="a new user"))
        fields = [tq.Field("x", "int64"), tq.Field("ids", "int32", (None,)), tq.Field("y", "float32"), tq.Field("name", "str")]
        fields += [tq.Field("image", "uint8", (2, 2)), tq.Field("score", "float32")]
        tasks = [tq.Task("read", needs=["x"]), tq.Task("judge", needs=["x", "ids"], gives=["score"]), tq.Task("train", needs=["score"])]
        self.rows = self.queue.create_table("rollouts", fields=fields, tasks=tasks)
        self.ids = self.rows.put(**VALUES, key=list("abcd"))
        self.loose = self.queue.create_table("loose", tasks=[tq.Task("read", needs=["x"])])
        self.loose.put(x=[1, 2])
        self.grouped = self.queue.create_table("grouped", tasks=[tq.Task("train", needs=["x"], groups=tq.Complete())])
        self.grouped.put(x=[1, 2], group_id=7, group_size=2)
        self.sealed = self.queue.create_table("sealed", tasks=[tq.Task("read", needs=["x"])])
        self.sealed.put(x=[1])
        self.sealed.seal()
        self.paced = self.queue.create_table(
            "paced", tasks=[tq.Task("train", needs=["x"])], pacing=tq.Pacing("train", batch_rows=2, depth=1, max_staleness=1)
        )
        self.small = self.queue.create_table("small", tasks=[tq.Task("read", needs=["x"])], limits=tq.Limits(rows=2))
        self.small.put(x=[1, 2])
        self.weights = self.queue.weights("policy")
        self.weights.publish(3, {"w": np.zeros(2, np.float32)})
        self.held = stack.enter_context(self.rows.lease("judge", rows=2))
        with self.rows.lease("read", rows=1, lease_s=600) as self.acked:
            self.acked.ack()
        self.loader = stack.enter_context(self.loose.loader("read", rows=1, prefetch=1))
        self.closed = tq.connect("embedded")
        self.closed_table = self.closed.create_table("closed", tasks=[tq.Task("read", needs=["x"])])
        self.closed_weights = self.closed.weights("policy")
        self.closed.close()
        self.read = self.rows.read()

    def state(self) -> dict[str, Any]:
        """What users can ask for that a refused call must leave alone: audits, terms, counts of each task, values, weights."""
        tables = {name: self.queue.table(name) for name in self.queue.tables()}
        return {
            "audit": self.queue.audit(),
            "counts": {name: _counts(table.stats()) for name, table in tables.items()},
            "values": {name: _values(table) for name, table in tables.items()},
            "versions": self.weights.pull(timeout_s=5).version,
            "held": self.held.rows.tolist(),
        }


def _counts(stats: dict[str, Any]) -> dict[str, Any]:
    kept = ("rows_put", "fields", "groups", "version", "cursor", "sealed", "reserved", "outstanding", "bytes")
    tasks = {
        name: {key: task[key] for key in ("pending", "held", "ready", "leased", "done", "dropped", "failed", "leases")}
        for name, task in stats["tasks"].items()
    }
    return {**{key: stats[key] for key in kept}, "tasks": tasks}


def _values(table: tq.Table) -> dict[str, Any]:
    with table.read() as rows:
        return {field: rows[field].list() for field in rows if field not in ("image", "score")}
