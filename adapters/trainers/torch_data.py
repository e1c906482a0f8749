"""A task's batches for torch: an ``IterableDataset`` whose workers lease, and a loader whose position can be saved and
restored.

- A batch is acked with its *step* when it is yielded: its rows stay in the table and are done once the model of that
  step is saved (`QueueLoader.checkpointed`). Batches that workers fetched ahead are not lost when a job dies.
- Steps are numbered in the order in which a loader yields batches, with any number of workers: worker w of n has the
  steps that equal w modulo n, counted from the first. At the end of a table, where one worker finds rows and another
  none, numbers are skipped.
- A loader starts from the saved model: rows of later steps become ready again (`Table.rollback`). With several
  ranks, rank 0 does this while all ranks of a process group wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import transferqueue as tq
from transferqueue.errors import UsageError

T = TypeVar("T")


class Step(NamedTuple, Generic[T]):
    """A batch and the number of its step."""

    number: int
    batch: T


def tensors(batch: tq.Batch) -> dict[str, Any]:
    """Return columns by name: dense ones as tensors, ragged ones as jagged nested tensors, others as lists.

    Args:
        batch: a leased batch.
    """
    return {name: _tensor(batch[name]) for name in batch.fields}


def _tensor(column: Any) -> Any:
    if column.field.dense:
        return column.torch()
    return column.nested() if column.field.ragged else column.list()


def tensordict(batch: tq.Batch) -> Any:
    """Return the batch as a ``tensordict.TensorDict`` of batch size ``[rows]``."""
    return batch.tensordict()


class QueueDataset(IterableDataset[Step[T]]):
    """Yields batches of a task, as steps, until the table is sealed and drained.

    It is for ``DataLoader(…, batch_size=None)``.

    Each batch is acked with its step when it is yielded. ``state_dict`` and ``load_state_dict`` let
    ``StatefulDataLoader`` restore the dataset; the job itself must then call `Table.rollback` to get the rows again.

    Args:
        address: of the queue; each iterating process connects by itself.
        table: name of the table.
        task: name of the task.
        form: converts a leased batch, in the process that leased it; an importable function if workers are spawned.
            Default `tensors`.
        start: number of the first step; default 0.
        **lease: arguments of `Table.lease`, such as ``rows=64``. With ``device=`` the tensors are on that device, and a
            loader must not have workers.
    """

    def __init__(
        self,
        address: str,
        table: str,
        task: str,
        *,
        form: Callable[[tq.Batch], T] = tensors,  # type: ignore[assignment]
        start: int = 0,
        **lease: Any,
    ) -> None:
        self.address, self.table, self.task, self.start = address, table, task, start
        self.lease = lease
        self._form = form
        self._last: int | None = None

    def __iter__(self) -> Iterator[Step[T]]:
        """Lease, convert, ack and yield one batch after the other. Raises as `Table.lease`."""
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        number = self.start + index if self._last is None else self._last + count
        with tq.connect(self.address, label=f"{self.task} loader") as queue:
            for batch in queue.table(self.table).leases(self.task, **self.lease):
                formed = self._form(batch)
                batch.ack(step=number)
                self._last = number
                yield Step(number, formed)
                del formed
                number += count

    def state_dict(self) -> dict[str, Any]:
        """The last step that this process yielded; None before the first."""
        return {"step": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a state.

        Args:
            state: from `state_dict`.
        """
        self._last = state["step"]


class QueueLoader(Generic[T]):
    """An iterable over a `QueueDataset` with a state, in place of ``DataLoader`` or ``StatefulDataLoader``.

    Workers are spawned unless ``multiprocessing_context`` says otherwise.

    Args:
        dataset: the dataset.
        num_workers: processes that lease and convert batches beside the training; default 0: this process.
        **options: of ``DataLoader``, such as ``prefetch_factor`` or ``pin_memory``.

    Raises:
        UsageError: workers for a dataset with ``device=``.

    Example:
        >>> loader = QueueLoader(QueueDataset(queue.address, "t", "train", rows=64), num_workers=2)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     train(batch)
        ...     if time_to_save():
        ...         save(model, loader.state_dict())
        ...         loader.checkpointed()
    """

    def __init__(self, dataset: QueueDataset[T], *, num_workers: int = 0, **options: Any) -> None:
        if num_workers and dataset.lease.get("device") is not None:
            raise UsageError(
                f"device={dataset.lease['device']!r} with num_workers={num_workers}: a worker's device memory does not "
                "reach this process; take num_workers=0, which copies ahead anyway, or copy here, with Tensor.to"
            )
        if num_workers:
            options.setdefault("multiprocessing_context", "spawn")
        self._dataset = dataset
        self._loader: DataLoader[Step[T]] = DataLoader(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            **options,
        )
        self._step: int | None = None
        self._iterating = False

    def __iter__(self) -> Iterator[T]:
        """Yield batches, starting after the state. Raises `UsageError` while another iteration of this loader runs."""
        if self._iterating:
            raise UsageError("this loader is being iterated already; end that first, or make another loader")
        self._iterating = True
        try:
            self._dataset.start = self._begin()
            self._dataset.load_state_dict({"step": None})
            for step in self._loader:
                self._step = step.number
                yield step.batch
                del step
        finally:
            self._iterating = False

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader. Save it with the model as it is after the last batch that was yielded."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position: the next iteration yields again the batches that came after it.

        Args:
            state: from `state_dict`.

        Raises:
            UsageError: the loader is being iterated, or this is no state of a loader.
        """
        if self._iterating:
            raise UsageError("a loader's state cannot change while it is being iterated; load it before")
        if not isinstance(state.get("step", ""), int | None):
            raise UsageError(f"{dict(state)} is no state of a loader; give what state_dict returned")
        self._step = state["step"]

    def checkpointed(self) -> int:
        """Mark the model as saved after the last batch: the rows of that batch and of those before it are done.

        With several ranks, call it on one rank, after all have reached that step.

        Returns:
            The number of rows.
        """
        if self._step is None:
            return 0
        with tq.connect(self._dataset.address, label=f"{self._dataset.task} loader") as queue:
            return queue.table(self._dataset.table).checkpointed(self._step, task=self._dataset.task)

    def _begin(self) -> int:
        """Roll back the rows of steps after the state; return the number of the first step."""
        with tq.connect(self._dataset.address, label=f"{self._dataset.task} loader") as queue:
            table = queue.table(self._dataset.table)
            if self._step is None:
                saved = table.stats().tasks[self._dataset.task].checkpoint
                self._step = saved if saved >= 0 else None
            last = -1 if self._step is None else self._step
            if self._dataset.lease.get("rank", 0) == 0:
                table.rollback(last, task=self._dataset.task)
        if dist.is_initialized():
            dist.barrier()
        return last + 1


def _as_it_is(step: Any) -> Any:
    return step
