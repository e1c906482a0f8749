"""NeMo-RL's data plane on the queue: a `DataPlaneClient` as ``nemo_rl.data_plane.interfaces`` defines it.

A partition is a table that keeps its rows until they are cleared; a sample is a row found by its key. A consumer task
is a task of that table. Its first claim declares it with the fields that it needs, and it also sees rows put before. A
claim is a lease that is acked at once, since the interface only knows that a sample was claimed. The claim waits at the
server until there is a batch, and no sample is claimed twice for one task.

`activate` puts this client where NeMo-RL's factory takes its own from. Without `activate`, NeMo-RL's own adapter runs
unchanged on the drop-in for ``transfer_queue`` (`transferqueue.adapters.transfer_queue_hook`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Final

import torch
from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneConfig, KVBatchMeta
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples.partitions import Partitions
from transferqueue.adapters.transfer_queue.samples.tags import given_tags, name_of
from transferqueue.errors import AlreadyExists, DeadlineExceeded, Impossible, NotFound, UsageError
from transferqueue.storage.elements.dtypes import imported_module
from transferqueue.wire.answers.stats import TaskStats

PLACE: Final = "nemo_rl.data_plane.adapters.transfer_queue"
"""The module from which NeMo-RL's factory takes ``TQDataPlaneClient``."""
SAMPLES_MAX: Final = 1 << 20
LENGTH_TAG: Final = "input_lengths"
"""The tag that becomes ``sequence_lengths``."""


class NemoRlMissing(NotFound, KeyError):
    """A partition, task, sample or field does not exist. A ``KeyError``, as NeMo-RL's callers expect."""

    __str__ = Exception.__str__


class QueueDataPlaneClient(DataPlaneClient):  # type: ignore[misc]
    """NeMo-RL's data plane on a queue. Every method may be called from any thread.

    Args:
        queue: the queue, which `close` ends.
        samples_max: the most samples of one partition; default 1048576.
        owned: ends a resource that `close` ends besides the queue; default None.
    """

    def __init__(
        self, queue: tq.Queue, *, samples_max: int = SAMPLES_MAX, owned: Callable[[], object] | None = None
    ) -> None:
        self._queue, self._samples_max = queue, samples_max
        self._partitions = Partitions(queue, samples_max)
        self._ending = ExitStack()
        if owned is not None:
            self._ending.callback(owned)
        self._ending.callback(queue.close)

    # ------------------------------------------------------------ by task

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Declare a partition and its consumers. A second call adds consumers; samples and claims stay.

        Args:
            partition_id: name of the partition.
            fields: ignored; puts create fields.
            num_samples: the most samples that it will have.
            consumer_tasks: names of the consumers.
            grpo_group_size: ignored.
            enums: ignored; text is stored as text.

        Raises:
            Impossible: more samples than a partition may have.
        """
        del fields, grpo_group_size, enums
        if num_samples > self._samples_max:
            raise Impossible(
                f"partition {partition_id!r} of {num_samples} samples would never be full: storage_capacity is "
                f"{self._samples_max}; raise it"
            )
        table, _ = self._partitions.make(partition_id)
        for task in consumer_tasks:
            table.add_task(tq.Task(_declared(task), needs=("never.",)))

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Claim samples for a task that have the required fields. A sample is claimed once for a task.

        Args:
            partition_id: name of the partition.
            task_name: name of the task.
            required_fields: fields that a sample must have.
            batch_size: the number of samples.
            dp_rank: ignored.
            blocking: wait at the server for `batch_size` samples; default True. False: claim those that are ready, at
                most that many.
            timeout_s: seconds to wait; default 60.

        Returns:
            Ids, tags and lengths of the samples.

        Raises:
            DeadlineExceeded: too few samples in time (a ``TimeoutError``, whose text names the missing samples). None
                was claimed.
            NemoRlMissing: a partition or task that was not registered.
            UsageError: other fields than in the task's earlier claims, or a `batch_size` below 1.
        """
        del dp_rank
        if batch_size < 1:
            raise UsageError(
                f"task {task_name!r} claims {batch_size} samples of partition {partition_id!r}; claim at least 1"
            )
        table = self._partition(partition_id)
        task = self._claiming(table, partition_id, task_name, required_fields)
        wait_s, least = (max(0.0, timeout_s), batch_size) if blocking else (0.0, 1)
        try:
            with table.lease(task, rows=batch_size, at_least=least, timeout_s=wait_s, fields=()) as batch:
                keys, tags = list(batch.keys), [given_tags(stored) for stored in batch.tags]
        except DeadlineExceeded:
            if blocking:
                raise
            keys, tags = [], []
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=keys,
            fields=list(required_fields),
            sequence_lengths=_lengths(tags),
            tags=tags,
        )

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        """Read fields of samples that were claimed or put.

        Args:
            meta: the samples.
            select_fields: the fields; default None: those in `meta`.

        Raises:
            UsageError: neither names fields.
            NemoRlMissing: a sample is missing, or does not have a field.
        """
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise UsageError(
                f"get_data of partition {meta.partition_id!r} names no fields, and neither does its metadata; give "
                "select_fields: all fields are never fetched silently"
            )
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Return whether there are samples, and each task has claimed all of them.

        Args:
            partition_id: name of the partition.
            task_names: the tasks.

        Raises:
            NemoRlMissing: the partition was not registered.
        """
        table = self._partition(partition_id)
        stats = table.stats()
        claims = [stats.tasks.get(_claims(task)) for task in task_names]
        return stats.rows_resident > 0 and all(claim is not None and not _before(claim) for claim in claims)

    # ------------------------------------------------------------ by key

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Write fields and merge tags of samples in one commit. New samples and a new partition are created.

        Args:
            sample_ids: keys of the samples.
            partition_id: name of the partition.
            fields: tensors of any layout, and non-tensor leaves of plain values (never pickled); default None. A
                device's tensors are copied directly from it.
            tags: one dict for each sample; default None.

        Raises:
            Full: too many samples.
            SchemaError: values that do not fit the field.
            UsageError: another number of fields or tags than of samples.
        """
        _check_put(sample_ids, partition_id, fields, tags)
        if sample_ids:
            self._partitions.put_keyed(partition_id, sample_ids, fields, tags)
        names = None if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=list(sample_ids),
            fields=names,
            tags=None if tags is None else [dict(sample_tags) for sample_tags in tags],
        )

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """Read fields of samples, claimed or not.

        Tensors are dense if all of these samples have one shape, else nested. Columns that lie together in memory are
        not copied.

        Args:
            sample_ids: keys of the samples.
            partition_id: name of the partition.
            select_fields: the fields.

        Raises:
            NemoRlMissing: a sample is missing, or not all of them have a field.
        """
        if not sample_ids:
            return TensorDict({}, batch_size=(0,))
        try:
            samples = self._partitions.get(partition_id, sample_ids, select_fields)
        except NotFound as error:
            raise NemoRlMissing(str(error)) from error
        missing = [name for name in select_fields if name not in samples.keys()]  # noqa: SIM118
        if missing:
            raise NemoRlMissing(f"fields {missing} of partition {partition_id!r} were not produced yet; put them first")
        return TensorDict({name: _uniform(samples.get(name)) for name in select_fields}, batch_size=(len(sample_ids),))

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Delete samples. Samples that do not exist are ignored.

        Args:
            sample_ids: keys of the samples; None: all samples of the partition.
            partition_id: name of the partition.
        """
        table = self._partitions.find(partition_id)
        rows: list[int] = []
        if table is not None and sample_ids is None:
            with table.read(fields=()) as samples:
                rows = samples.rows.tolist()
        elif table is not None and sample_ids:
            rows = [row for row in table.find(list(dict.fromkeys(sample_ids))).tolist() if row >= 0]
        if table is not None and rows:
            table.delete(rows)
        elif sample_ids is None:
            warnings.warn(f"partition {partition_id!r} has no samples to clear", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Detach. The process that started the service also ends it. A second call does nothing."""
        self._ending.close()

    def _partition(self, partition_id: str) -> tq.Table:
        table = self._partitions.find(partition_id)
        if table is None:
            raise NemoRlMissing(f"partition {partition_id!r} is not there; register_partition makes it")
        return table

    def _claiming(self, table: tq.Table, partition_id: str, task: str, fields: Sequence[str]) -> str:
        """Return the name of the task that claims samples with `fields` for `task`; its first claim declares it."""
        tasks, needs = table.tasks, tuple(sorted(set(fields)))
        if _declared(task) not in tasks:
            raise NemoRlMissing(
                f"task {task!r} is not registered as a consumer of partition {partition_id!r}; register_partition"
            )
        if _claims(task) not in tasks:
            with contextlib.suppress(AlreadyExists):  # another process was quicker, perhaps with other fields
                table.add_task(tq.Task(_claims(task), needs=needs))  # who claims may die, a sample not
            tasks = self._partition(partition_id).tasks
        claims = tasks[_claims(task)]
        if claims.needs != needs:
            raise UsageError(
                f"task {task!r} of partition {partition_id!r} claims by other fields than {list(needs)}: its claims "
                f"are counted by the fields of its first one, {list(claims.needs)}; register another task for "
                "these"
            )
        return claims.name


# ------------------------------------------------------------ how NeMo-RL comes by one


def build(cfg: DataPlaneConfig, *, bootstrap: bool = True) -> QueueDataPlaneClient:
    """Create the client for a configuration, as NeMo-RL's factory calls it.

    ``controller_address`` is the address or join token of a running server. Without it, and with Ray, the driver
    deploys a server on Ray, which ends with the client, and workers look it up; without Ray the driver embeds one.
    ``storage_capacity`` bounds the samples of a partition. Options of other implementations, such as ``backend``, are
    ignored.

    Args:
        cfg: the configuration.
        bootstrap: this is the driver; default True.

    Raises:
        UsageError: a worker without an address and without Ray.
    """
    samples_max = int(cfg["storage_capacity"])
    address = cfg.get("controller_address")
    if address:
        return QueueDataPlaneClient(tq.connect(address), samples_max=samples_max)
    if _on_ray():
        owned = tq.deploy_ray(exist_ok=True).close if bootstrap else None
        return QueueDataPlaneClient(tq.connect("ray"), samples_max=samples_max, owned=owned)
    if not bootstrap:
        raise UsageError(
            "a worker's data plane has neither controller_address nor Ray to find the driver's by; set "
            "data_plane.controller_address to the address of a `transferqueue serve`"
        )
    return QueueDataPlaneClient(tq.connect(), samples_max=samples_max)


def activate() -> None:
    """Make NeMo-RL's factory build `QueueDataPlaneClient` for ``impl: transfer_queue`` in this process.

    For Ray's workers: ``ray job submit --runtime-env-json='{"worker_process_setup_hook":
    "transferqueue.adapters.trainers.nemo_rl.activate"}'``.
    """
    module = ModuleType(PLACE, "Given by transferqueue.adapters.trainers.nemo_rl.activate.")
    module.TQDataPlaneClient = build  # type: ignore[attr-defined]
    sys.modules[PLACE] = module


def _on_ray() -> bool:
    ray = imported_module("ray")
    return ray is not None and bool(ray.is_initialized())


# ------------------------------------------------------------ parts


def _declared(task: str) -> str:
    """Name of the task that marks a consumer as registered; it never gets rows."""
    return f"declared.{name_of(task)}"


def _claims(task: str) -> str:
    """Name of the task by which a consumer claims."""
    return f"claims.{name_of(task)}"


def _before(task: TaskStats) -> int:
    """Number of samples that a task has not claimed."""
    return task.pending + task.held + task.ready + task.leased + task.stepped + task.kept


def _lengths(tags: Sequence[Mapping[str, Any]]) -> list[int] | None:
    if not any(LENGTH_TAG in sample_tags for sample_tags in tags):
        return None
    return [int(sample_tags.get(LENGTH_TAG, 0)) for sample_tags in tags]


def _check_put(
    sample_ids: Sequence[str], partition_id: str, fields: TensorDict | None, tags: Sequence[Mapping[str, Any]] | None
) -> None:
    for what, size in (
        ("fields", None if fields is None else (fields.batch_size or (0,))[0]),
        ("tags", None if tags is None else len(tags)),
    ):
        if size is not None and size != len(sample_ids):
            raise UsageError(
                f"{what} of {size} samples for {len(sample_ids)} sample_ids of partition {partition_id!r}; give one "
                "for each"
            )


def _uniform(value: Any) -> Any:
    """Return a nested tensor whose rows have one shape as a dense one; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_nested:
        return value
    if value.layout != torch.jagged:
        rows = value.unbind()
        return torch.stack(rows) if len({row.shape for row in rows}) == 1 else value
    jagged: Any = value
    lengths = jagged.offsets().diff()
    if not bool((lengths == lengths[0]).all()):
        return value
    values = jagged.values()
    return values.reshape(len(lengths), int(lengths[0]), *values.shape[1:])
