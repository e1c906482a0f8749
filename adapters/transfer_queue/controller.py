"""The drop-in's controller: records which samples each task has consumed. It owns the server.

Bytes, keys, tags and readiness are in the tables, which clients read and write directly. The controller keeps
consumption: by partition and task, the samples that calls of ``get_meta`` have returned (consumed when returned, as
documented), and the samplers' memories.

Readiness comes by leases, without scans: for each requested set of fields, the partition's table gets a task that needs
them, and the controller leases the rows that became ready. A blocking call waits in such a lease, so it ends when rows
arrive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

import transferqueue as tq
from transferqueue.adapters.transfer_queue.metadata import NOT_READY, READY, BatchMeta
from transferqueue.adapters.transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from transferqueue.adapters.transfer_queue.samples.columns import schema_of_field
from transferqueue.adapters.transfer_queue.samples.index_set import IndexSet, WaitingSamples
from transferqueue.adapters.transfer_queue.samples.partitions import Partitions, described, indexes_of, put_at_once
from transferqueue.adapters.transfer_queue.samples.ready_samples import AT_ONCE, ReadySamples
from transferqueue.adapters.transfer_queue.samples.sample_shapes import SampleShapes, Shape
from transferqueue.adapters.transfer_queue.samples.tags import given_tags, partition_of, table_of, text_of, value_of
from transferqueue.errors import NotFound, UsageError
from transferqueue.limits import ROWS_PER_REQUEST_MAX, TASKS_MAX
from transferqueue.server.process.embedded import running

WAIT_S: Final = 60.0
"""How long a fetch waits for its samples when the controller does not poll."""
FIELD_SETS_MAX: Final = TASKS_MAX - 1
"""Sets of fields that a partition is asked for: each is a task of its table, which has one more."""
CLEAR_S: Final = 5.0
"""How long a deletion waits for a question that has just leased some of its samples, and is about to add them."""
_MORE: Final = 8
"""If a sampler finds no batch among the first samples, it is offered so many times as many."""
_OF_A_VIEW: Final = frozenset({SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler})
"""Samplers that take a `WaitingSamples` as it is, and read only parts of it. Any other gets a list of all."""


@dataclass
class PartitionSnapshot:
    """A partition at one moment, for inspection. `production_status` is ``[index + 1, fields]``."""

    partition_id: str
    global_indexes: set[int]
    keys_mapping: dict[str, int]
    custom_meta: dict[int, dict[str, Any]]
    field_name_mapping: dict[str, int]
    production_status: torch.Tensor
    consumption_status: dict[str, set[int]]


class Partition:
    """One partition: its table, and the samples that each task has consumed."""

    def __init__(
        self,
        queue: tq.Queue,
        partition_id: str,
        rows_max: int,
        guard: threading.Condition,
        times_ready: Callable[[str, str], object | None] | None = None,
    ) -> None:
        self.partition_id = partition_id
        self._guard, self._times_ready = guard, times_ready
        self._partitions = Partitions(queue, rows_max)
        self.table = self._partitions.find(partition_id) or self._partitions.make(partition_id)[0]
        self.consumed: dict[str, IndexSet] = {}
        self._ready: dict[tuple[str, ...], ReadySamples] = {}
        self.is_over = False
        """Whether it was cleared: its table is gone, or is that of the next partition of this name."""

    def end(self) -> None:
        """The partition is cleared: pending questions find no samples. Called under the guard."""
        self.is_over = True
        with contextlib.ExitStack() as ending:  # each, though another one may fail to tell the server
            for ready in self._ready.values():
                ending.callback(ready.end)

    def ready(self, fields: Iterable[str]) -> ReadySamples:
        """Return the ready samples of a set of fields, as far as they are known. `NotFound` if the partition was
        cleared."""
        names = tuple(sorted(fields))
        ready = self._ready.get(names)
        if ready is None:
            with self._guard:
                if self.is_over:
                    raise NotFound(f"partition {self.partition_id!r} was cleared; its samples are gone")
                if names not in self._ready:
                    if len(self._ready) >= FIELD_SETS_MAX:
                        raise UsageError(
                            f"get_meta for {list(names)}: partition {self.partition_id!r} was asked for "
                            f"{FIELD_SETS_MAX} other sets of fields, which is the maximum; ask for one of those, and "
                            "name the fields that are needed to get_data"
                        )
                    task = f"ready.{len(self._ready)}"
                    self._ready[names] = ReadySamples(self.table, task, names, self._guard, self._times_ready)
                ready = self._ready[names]
        return ready

    def have(self, fields: Iterable[str]) -> IndexSet:
        """Return the samples that have all of these fields now."""
        ready = self.ready(fields)
        ready.collect_all()
        return ready.rows

    def waiting(self, ready: ReadySamples, task: str) -> WaitingSamples:
        """Return the known samples of `ready` that `task` has not consumed."""
        return ready.waiting(self.consumed.get(task, _NOTHING))

    def consume(self, task: str, rows: Sequence[int]) -> None:
        """Record that `task` has consumed these samples."""
        self.consumed.setdefault(task, IndexSet()).add(indexes_of(rows))

    def restore_consumed(self, consumed: dict[str, list[int]]) -> None:
        """Record consumed samples by task; samples that do not exist are ignored."""
        with self.table.read(fields=()) as rows:
            existing = set(rows.rows.tolist())
        for task, those in consumed.items():
            self.consume(task, [row for row in those if row in existing])

    def reset(self, task: str | None) -> None:
        """Forget what `task` (None: any task) has consumed."""
        for name in list(self.consumed) if task is None else [task]:
            self.consumed.pop(name, None)

    @property
    def is_collecting(self) -> bool:
        """Whether a thread is about to add ready samples, which it may have leased already."""
        return any(ready.is_collecting for ready in self._ready.values())

    def clear(self, rows: Sequence[int]) -> None:
        """Delete samples. `UsageError`, and nothing is changed, while one of them is leased."""
        gone = indexes_of(rows)
        self.settle()
        self.table.delete(gone)
        for ready in self._ready.values():
            ready.discard(gone)
        for consumed in self.consumed.values():
            consumed.discard(gone)

    def clear_fields(self, rows: Sequence[int], fields: Sequence[str]) -> None:
        """Delete fields of samples. They are ready again, for questions that name such a field, when it is put
        again."""
        gone = indexes_of(rows)
        self.settle()
        self.table.free_columns(gone, fields, again=True)
        for names, ready in self._ready.items():
            if not set(fields).isdisjoint(names):
                ready.discard(gone)

    def settle(self) -> None:
        """End the leases by which ready samples were collected."""
        for ready in self._ready.values():
            ready.settle()

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return tags of samples by index, for samplers."""
        return self._tags_and_shapes(global_indices, ())[0]

    def describe(self, rows: Sequence[int], fields: Sequence[str], ready: IndexSet | None) -> BatchMeta:
        """Return metadata of samples. `ready`: those with all fields (None: all of them)."""
        schema = self.table.fields
        if not all(name in schema for name in fields):  # others have added some since
            self._partitions.find(self.partition_id)
            schema = self.table.fields
        named = [name for name in fields if name in schema]
        vary = [name for name in named if not (schema[name].dense or schema[name].blob)]
        has_all = np.ones(len(rows), np.bool_) if ready is None else ready.contains(indexes_of(rows))
        whole = bool(has_all.all())
        tags, shapes = self._tags_and_shapes(rows, vary if whole else ())
        if not whole and vary and has_all.any():
            _, some = self._tags_and_shapes([row for row, has in zip(rows, has_all.tolist(), strict=True) if has], vary)
            shapes = {name: _spread(each, has_all) for name, each in some.items()}
        return BatchMeta(
            global_indexes=list(rows),
            partition_ids=[self.partition_id] * len(rows),
            field_schema={name: schema_of_field(schema[name], shapes.get(name, ())) for name in named},
            production_status=np.where(has_all, READY, NOT_READY).astype(np.int8),
            custom_meta=[tags[row] for row in rows] if any(tags.values()) else None,
        )

    def _tags_and_shapes(
        self, rows: Sequence[int], fields: Sequence[str]
    ) -> tuple[dict[int, dict[str, Any]], dict[str, SampleShapes | list[Shape | None]]]:
        """Return tags by index, and by field the shape of each sample."""
        if not rows:
            return {}, {}
        once = list(dict.fromkeys(rows))  # a sampler may choose a sample several times
        with self.table.read(indexes_of(once), fields=fields) as read:
            tags = {row: given_tags(stored) if stored else stored for row, stored in zip(once, read.tags, strict=True)}
            shapes = {name: SampleShapes(np.array(read[name].shapes)) for name in fields}
        if len(once) < len(rows):
            place = {row: at for at, row in enumerate(once)}
            shapes = {name: each.of([place[row] for row in rows]) for name, each in shapes.items()}
        return tags, dict(shapes)


def _spread(shapes: Iterable[Shape | None], has: npt.NDArray[np.bool_]) -> list[Shape | None]:
    """Return shapes of samples with None for those that are not `has`."""
    each = iter(shapes)
    return [next(each) if one else None for one in has.tolist()]


_NOTHING: Final = IndexSet()


@dataclass
class Controller:
    """The state of one deployment. Every method may be called from any thread."""

    address: str
    sampler: BaseSampler = field(default_factory=SequentialSampler)
    polling_mode: bool = False
    rows_max: int = 1 << 40

    def __post_init__(self) -> None:
        self._queue = tq.connect(self.address, label="transfer_queue controller")
        server = running(self.address)  # None: it is another process's
        self._times_ready = None if server is None else server.times_ready
        self._partitions: dict[str, Partition] = {}
        self._guard = threading.Condition(threading.RLock())
        """Held for every change of partitions and consumption; notified when leased samples were added."""

    def close(self) -> None:
        """Close the connection."""
        self._queue.close()

    def list_partitions(self) -> list[str]:
        """Names of the partitions."""
        return [name for table in self._queue.tables() if (name := partition_of(table)) is not None]

    def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: str,
        task_name: str | None,
        sampling_config: dict[str, Any] | None,
    ) -> BatchMeta:
        """Choose samples of a partition (`client.TransferQueueClient.get_meta`)."""
        if mode == "insert":
            return self._insert(batch_size, partition_id)
        if mode == "force_fetch":
            return self._force(data_fields, partition_id)
        if mode != "fetch":
            raise ValueError(f"mode {mode!r} is unknown; it is one of fetch, force_fetch, insert")
        task, config = task_name or "", dict(sampling_config or {})
        deadline, needed, more = time.monotonic() + (0.0 if self.polling_mode else WAIT_S), max(batch_size, 1), False
        while True:
            partition, ready = self._heard(partition_id, data_fields, needed, more)
            with self._guard:
                if partition.is_over:
                    continue
                meta, changes = self._fetch(partition, ready, data_fields, batch_size, task, config), ready.changes
                has_more = ready.bound is not None
            if has_more and batch_size > 0 and not len(meta):
                needed, more = needed * _MORE if more else needed, True
                continue
            more = False
            left_s = deadline - time.monotonic()
            if len(meta) or batch_size <= 0 or left_s <= 0:
                break
            self._wait(partition, ready, changes, left_s)
        if not len(meta) and batch_size > 0 and not self.polling_mode:
            raise TimeoutError(
                f"no batch of {batch_size} samples with {list(data_fields)} became ready in partition {partition_id!r} "
                f"for task {task!r} within {WAIT_S:g} s"
            )
        return meta

    def _fetch(
        self,
        partition: Partition,
        ready: ReadySamples,
        fields: Sequence[str],
        batch_size: int,
        task: str,
        config: dict[str, Any],
    ) -> BatchMeta:
        waiting = partition.waiting(ready, task)
        context = {"task_name": task, "partition_id": partition.partition_id, "partition": partition, **config}
        offered: Any = waiting if type(self.sampler) in _OF_A_VIEW else list(waiting)
        chosen, consumed = self.sampler.sample(offered, batch_size, **context)
        if type(self.sampler) is SequentialSampler and len(chosen) < batch_size:
            chosen = consumed = []
        partition.consume(task, consumed)
        return partition.describe(chosen, fields, None)

    def _insert(self, samples: int, partition_id: str) -> BatchMeta:
        if not 0 < samples <= ROWS_PER_REQUEST_MAX:
            raise ValueError(f"batch_size {samples:,}: one call inserts 1 to {ROWS_PER_REQUEST_MAX:,} samples")
        with self._guard:
            partition = self._partition(partition_id)
            rows = put_at_once(partition.table, {}, priority=np.zeros(samples)).tolist()
            return partition.describe(rows, (), _NOTHING)

    def _force(self, fields: Sequence[str], partition_id: str) -> BatchMeta:
        with self._guard:
            partition = self._partition(partition_id)
            with partition.table.read(fields=()) as rows:
                every = rows.rows.tolist()
            return partition.describe(every, fields, partition.have(fields) if fields else None)

    def describe(self, rows: Sequence[int], partition_id: str) -> BatchMeta:
        """Return metadata of samples by index, with all fields that each of them has."""
        partition = self._partition(partition_id)
        with partition.table.read(indexes_of(rows)) as read:
            fields = read.fields
        return partition.describe(rows, fields, None if fields else _NOTHING)

    def wait_for(
        self, data_fields: Sequence[str], batch_size: int, partition_id: str, task_name: str, wait_s: float
    ) -> None:
        """Return when `task_name` has `batch_size` ready samples that it has not consumed, or after `wait_s`."""
        deadline, needed, more = time.monotonic() + wait_s, max(batch_size, 1), False
        while (left_s := deadline - time.monotonic()) > 0:
            partition, ready = self._heard(partition_id, data_fields, needed, more)
            with self._guard:
                if partition.is_over:
                    continue
                changes, has_more = ready.changes, ready.bound is not None
                if len(partition.waiting(ready, task_name)[: max(batch_size, 0)]) >= batch_size:
                    return
            if has_more:
                needed, more = needed * _MORE if more else needed, True
            else:
                more = False
                self._wait(partition, ready, changes, left_s)

    def _heard(
        self, partition_id: str, fields: Sequence[str], needed: int, more: bool
    ) -> tuple[Partition, ReadySamples]:
        """Return a partition and its samples that are ready now: for a sampler that takes lists all, else, with `more`
        or if some became ready, at least `needed` more than were known."""
        partition = self._partition(partition_id)
        try:
            return partition, self._ready(partition, fields, needed, more)
        except NotFound:  # its table was dropped under it
            partition = self._anew(partition)
            return partition, self._ready(partition, fields, needed, more)

    def _ready(self, partition: Partition, fields: Sequence[str], needed: int, more: bool) -> ReadySamples:
        ready = partition.ready(fields)
        if type(self.sampler) not in _OF_A_VIEW:
            ready.collect_all()
        elif more:
            ready.collect(min(needed, AT_ONCE))
        else:
            ready.refresh(min(needed, AT_ONCE))
        return ready

    def _wait(self, partition: Partition, ready: ReadySamples, changes: int, wait_s: float) -> None:
        try:
            ready.wait(changes, wait_s)
        except NotFound:
            self._anew(partition)

    def _anew(self, partition: Partition) -> Partition:
        """Return the current partition of this name; the table of `partition` is gone."""
        with self._guard:
            if self._partitions.get(partition.partition_id) is partition:
                del self._partitions[partition.partition_id]
                partition.end()
            return self._partition(partition.partition_id)

    # ------------------------------------------------------------ status

    def consumed_counts(self) -> dict[str, dict[str, int]]:
        """Return how many samples each task has consumed, by partition."""
        with self._guard:
            return {
                name: {task: len(rows) for task, rows in partition.consumed.items()}
                for name, partition in self._partitions.items()
            }

    def consumption(self, task: str, partition_id: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the indexes of a partition, and which a task has consumed; None if the partition does not exist."""
        return self._status(partition_id, lambda partition: partition.consumed.get(task, _NOTHING))

    def production(self, fields: Sequence[str], partition_id: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the indexes of a partition, and which have all of these fields; None if the partition does not
        exist."""
        return self._status(partition_id, lambda partition: partition.have(fields))

    def _status(
        self, partition_id: str, which: Callable[[Partition], IndexSet]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        with self._guard:
            if partition_id not in self.list_partitions():
                return None
            partition = self._partition(partition_id)
            with partition.table.read(fields=()) as rows:
                every = rows.rows
            has = which(partition).contains(every)
        return torch.from_numpy(every.copy()), torch.from_numpy(has.astype(np.int8))

    def reset_consumption(self, partition_id: str, task: str | None) -> bool:
        """Forget the samples that a task (None: any task) has consumed. Return whether the partition exists."""
        with self._guard:
            if partition_id not in self.list_partitions():
                return False
            self._partition(partition_id).reset(task)
            self.sampler.clear_cache(partition_id)
            return True

    def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """Return a partition as it is now; None if it does not exist."""
        with self._guard:
            if partition_id not in self.list_partitions():
                return None
            partition = self._partition(partition_id)
            with partition.table.read(fields=()) as rows:
                every, keys, tags = rows.rows.tolist(), rows.keys, [given_tags(stored) for stored in rows.tags]
            names = list(partition.table.fields)
            status = torch.zeros((max(every, default=-1) + 1, len(names)), dtype=torch.int8)
            for column, name in enumerate(names):
                status[torch.from_numpy(partition.have([name]).to_array()), column] = 1
            return PartitionSnapshot(
                partition_id=partition_id,
                global_indexes=set(every),
                keys_mapping={key: row for key, row in zip(keys, every, strict=True) if key},
                custom_meta=dict(zip(every, tags, strict=True)),
                field_name_mapping={name: column for column, name in enumerate(names)},
                production_status=status,
                consumption_status={task: set(rows) for task, rows in partition.consumed.items()},
            )

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return the consumption state as plain JSON. Raises `UsageError` for a sampler's state that the queue does not
        store."""
        with self._guard:
            return {
                "consumed": {
                    name: {task: list(rows) for task, rows in partition.consumed.items()}
                    for name, partition in self._partitions.items()
                },
                "sampler": type(self.sampler).__name__,
                "memory": text_of(
                    self.sampler.save_checkpoint(), f"save_checkpoint() of {type(self.sampler).__name__}"
                ),
            }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise `UsageError` for the state of another sampler, `Corruption` for an invalid memory. Changes nothing."""
        if state["sampler"] != type(self.sampler).__name__:
            raise UsageError(
                f"the checkpoint has the memory of a {state['sampler']}, the sampler here is a "
                f"{type(self.sampler).__name__}: start with the sampler that it was saved with"
            )
        value_of(state["memory"], "the sampler's state")

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state; entries of samples that do not exist are ignored."""
        self.check_state(state)
        with self._guard:
            existing = self.list_partitions()
            for name in existing:
                self._partition(name).reset(None)
            for name in (name for name in state["consumed"] if name in existing):
                self._partition(name).restore_consumed(state["consumed"][name])
            self.sampler.load_checkpoint(value_of(state["memory"], "the sampler's state"))

    # ------------------------------------------------------------ clearing

    def clear_samples(self, rows: Sequence[int], partition_id: str) -> None:
        """Delete samples of a partition. If another thread has just leased some of them, waits until it has added
        them."""
        deadline = time.monotonic() + CLEAR_S
        with self._guard:
            while True:
                partition = self._partition(partition_id)
                try:
                    partition.clear(rows)
                except UsageError:
                    if not partition.is_collecting or not self._guard.wait(deadline - time.monotonic()):
                        raise
                else:
                    return

    def clear_fields(self, rows: Sequence[int], fields: Sequence[str], partition_id: str) -> None:
        """Delete fields of samples of a partition."""
        if fields:
            with self._guard:
                self._partition(partition_id).clear_fields(rows, fields)

    def clear_partition(self, partition_id: str) -> None:
        """Delete a partition. Does nothing if it does not exist."""
        with self._guard:
            if (partition := self._partitions.pop(partition_id, None)) is not None:
                partition.end()
            self.sampler.clear_cache(partition_id)
            if table_of(partition_id) in self._queue.tables():
                self._queue.drop_table(table_of(partition_id))

    def renew(self, partition_id: str, fields: dict[str, str]) -> None:
        """Drop the table of a partition if it has no samples and still has these fields, by their types. Otherwise do
        nothing.

        Calls that wait for its samples continue to wait, on the table that the next put creates.
        """
        with self._guard, contextlib.suppress(UsageError):  # it has samples after all, or is gone
            table = self._queue.table(table_of(partition_id))
            if described(table) == fields:
                self._queue.drop_table(table.name, empty=True)
                if (partition := self._partitions.pop(partition_id, None)) is not None:
                    partition.end()

    def _partition(self, partition_id: str) -> Partition:
        """Return a partition, created if it is missing. Does not wait for the guard if it is known."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            with self._guard:
                partition = self._partitions.get(partition_id)
                if partition is None:
                    partition = self._partitions[partition_id] = Partition(
                        self._queue, partition_id, self.rows_max, self._guard, self._times_ready
                    )
        return partition
