"""slime's data source with its buffer in the queue: ``--data-source-path
transferqueue.adapters.trainers.slime.QueueDataSource``.

slime keeps prompt groups that were begun and not finished (``--partial-rollout``) in a list of its rollout manager, and
its checkpoints do not have that list: when the job starts again, these prompts are skipped, since the place in the data
set is past them. Here they are rows of a table.

1. A group that comes back to the data source is put; `get_samples` takes groups of the table first, then prompts of the
   file, as slime's own buffer does.
2. Groups that were taken are done when slime saves (`Table.checkpointed`). After a crash slime loads its last
   checkpoint: groups taken since then come again (`Table.rollback`), and those whose prompt was read from the file
   since then are dropped, since the file gives them again.
3. Samples travel as plain values with their tensors; no pickle.
4. The data source does not learn which groups were finished. With ``train_async.py`` those that were being generated
   while slime saved are skipped after a crash, unless they came back, as by slime's own place in the file.

The table lives as long as its server: start one with ``transferqueue serve --durability process``.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, Final

from slime.rollout.data_source import RolloutDataSource
from slime.utils.types import Sample

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, UsageError

TASK: Final = "rollout"
_READ_TAG: Final = "read_after_checkpoint"
"""Tag of a row: the last checkpoint before its prompt was read from the file; -1: none, or long ago."""


class QueueDataSource(RolloutDataSource):  # type: ignore[misc]
    """slime's data source. Groups that come back to it outlive the process.

    Args:
        args: slime's arguments. The table is named after the folder of ``--save``.
        queue: of the table. Default None: that of `transferqueue.connect`, which the environment names.

    Raises:
        UsageError: ``--buffer-filter-path`` is given: it filters a list, which is not here.
    """

    def __init__(self, args: Namespace, queue: tq.Queue | None = None) -> None:
        if args.buffer_filter_path is not None:
            raise UsageError(
                f"--buffer-filter-path {args.buffer_filter_path} filters slime's own list of samples, and they are in "
                "a table; leave it out, or --data-source-path"
            )
        super().__init__(args)
        self._queue = queue or tq.connect()
        self._name = f"slime-{Path(args.save).name}" if args.save else "slime"
        self._table = self._made()
        self._saved = -1
        self._read_after: dict[int, int] = {}
        """The tag of each group that was taken, by its index."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return groups of the table, then of the file.

        Args:
            num_samples: groups.
        """
        groups = self._taken(num_samples)
        if missing := num_samples - len(groups):
            read = super().get_samples(missing)
            self._read_after |= {group[0].group_index: self._saved for group in read}
            groups += read
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Put groups that were not finished.

        Args:
            samples: groups of ``--n-samples-per-prompt`` samples.

        Raises:
            UsageError: A group has another size; nothing is put.
        """
        size = self.args.n_samples_per_prompt
        for place, group in enumerate(samples):
            if len(group) != size:
                raise UsageError(f"group {place} has {len(group)} samples; --n-samples-per-prompt is {size}")
        if samples:
            rows = [[sample.to_dict() for sample in group] for group in samples]
            read_after = [self._read_after.pop(group[0].group_index, -1) for group in samples]
            self._table.put(samples=rows, tags=[{_READ_TAG: checkpoint} for checkpoint in read_after])

    def save(self, rollout_id: int) -> None:
        """Save the place in the file, and end the groups that were taken.

        Args:
            rollout_id: of the checkpoint.
        """
        super().save(rollout_id)
        self._table.checkpointed(rollout_id)
        recent = {index: checkpoint for index, checkpoint in self._read_after.items() if checkpoint >= self._saved}
        self._saved, self._read_after = rollout_id, recent

    def load(self, rollout_id: int | None = None) -> None:
        """Go back to a checkpoint: groups taken since then come again, those read since then are dropped.

        Args:
            rollout_id: of the checkpoint; None or -1: the job begins, and its table is empty.

        Raises:
            UsageError: A later checkpoint was saved, which ended groups for good.
        """
        super().load(rollout_id)
        self._saved = -1 if rollout_id is None else rollout_id
        self._read_after = {}
        if self._saved < 0:
            self._queue.drop_table(self._name)
            self._table = self._made()
            return
        self._table.rollback(self._saved)
        waiting = self._table.read(fields=[])
        read_after = [int(tags[_READ_TAG]) for tags in waiting.tags]
        later = [row for row, each in zip(waiting.rows, read_after, strict=True) if each >= self._saved]
        if later:
            self._table.drop(later, "read_again")

    def get_buffer_length(self) -> int:
        """Return how many groups wait in the table."""
        return self._table.stats().tasks[TASK].ready

    def close(self) -> None:
        """End the connection to the queue."""
        self._queue.close()

    def _made(self) -> tq.Table:
        task = tq.Task(TASK, needs=("samples",))
        return self._queue.create_table(self._name, tasks=[task], exist_ok=True)

    def _taken(self, groups: int) -> list[list[Sample]]:
        try:
            batch = self._table.lease(TASK, rows=groups, at_least=1, timeout_s=0)
        except (DeadlineExceeded, tq.EndOfTable):
            return []
        values: list[list[dict[str, Any]]] = batch["samples"].list()
        taken = [[Sample.from_dict(sample) for sample in group] for group in values]
        checkpoints = [int(tags[_READ_TAG]) for tags in batch.tags]
        self._read_after |= {group[0].group_index: each for group, each in zip(taken, checkpoints, strict=True)}
        batch.ack(step=self._saved + 1)
        return taken
