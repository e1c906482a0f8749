"""OpenRLHF's two queues between rollouts and trainer in a table: ``--train.async_queue_path
transferqueue.adapters.trainers.openrlhf.RolloutQueues`` (examples/stacks/openrlhf.patch adds this option).

With ``--train.async_enable`` OpenRLHF hands batches from its generator to its trainer by a queue of Ray, and places in
that queue back by another. Both end with the job. Here a batch is a row of a table.

1. A place is a reservation: ``--train.async_queue_size`` batches wait or are generated, and no more.
2. A batch that the trainer takes is done when OpenRLHF has saved the step that trained it (`Table.checkpointed`). A job
   that loads that checkpoint trains the batches since then again as they were, and its generator goes on behind the
   newest of them. Without checkpoints a batch is done when it is taken.
3. Samples travel as plain values with their tensors; no pickle.

The table lives as long as its server: start one with ``transferqueue serve --durability process``.
"""

from __future__ import annotations

from argparse import Namespace
from functools import cache
from math import isinf
from pathlib import Path
from typing import Any, Final

from openrlhf.trainer.ppo_utils.experience import Experience

import transferqueue as tq

TASK: Final = "train"

tq.register_value(Experience)


class RolloutQueues:
    """The pair of queues, and the place from which a job goes on.

    Args:
        args: OpenRLHF's arguments. The table is named after the folder of ``--ckpt.path``.
        queue: of the table. Default None: that of `transferqueue.connect`, which the environment names.
    """

    def __init__(self, args: Namespace, queue: tq.Queue | None = None) -> None:
        self._queue = queue or tq.connect()
        self._name = f"openrlhf-{Path(args.ckpt.path).name}"
        self._pacing = tq.Pacing(TASK, batch_rows=1, depth=args.train.async_queue_size - 1)
        self._table = self._made()
        save_steps = 0 if args.ckpt.save_steps < 0 or isinf(args.ckpt.save_steps) else int(args.ckpt.save_steps)
        self.rollouts = _Rollouts(self._queue.address, self._name)
        self.slots = _Slots(self._queue.address, self._name, save_steps)

    def resume(self, states: dict[str, Any]) -> dict[str, Any]:
        """Go back to a checkpoint, and return the place from which the generator goes on.

        Args:
            states: of the checkpoint. One of step 0: the job begins, and its table is empty.

        Returns:
            These states, with the place in the data behind the newest batch that waits.

        Raises:
            UsageError: a later checkpoint was saved, which ended batches for good.
        """
        step = states["global_step"]
        if not step:
            self._queue.drop_table(self._name)
            self._table = self._made()
            return states
        self._table.rollback(step, version=step)
        waiting = self._table.read(fields=["rest"])
        rest = waiting["rest"].list()
        if others := [row for row, each in zip(waiting.rows, rest, strict=True) if not _is_batch(each)]:
            self._table.drop(others, "of_an_earlier_run")
        places = [each[0] for each in rest if _is_batch(each)]
        place = {**states, **places[-1]} if places else states
        if place["data_loader_state_dict"].get("_iterator_finished"):  # its loader would begin the same episode again
            return {**place, "episode": place["episode"] + 1, "data_loader_state_dict": {}}
        return place

    def _made(self) -> tq.Table:
        tasks = [tq.Task(TASK, needs=("samples", "rest"))]
        fields = [tq.Field("samples", "value"), tq.Field("rest", "value")]
        return self._queue.create_table(self._name, tasks=tasks, fields=fields, pacing=self._pacing, exist_ok=True)


def _is_batch(rest: Any) -> bool:
    """Whether a row is a batch, and not figures of an evaluation or the end."""
    return isinstance(rest[0], dict)


class _Ends:
    """What a process has of the table: the generator a place, the trainer a batch that it has just taken."""

    def __init__(self, address: str, name: str) -> None:
        self.table = tq.connect(address).table(name)
        self.place: tq.Reservation | None = None
        self.taken: tq.Batch | None = None


_ends: Final = cache(_Ends)
"""One of each table in a process: its two queues arrive there one by one."""


class _Rollouts:
    """OpenRLHF's ``rollout_queue``: batches, figures of evaluations, and the end. It is called as Ray's queue is."""

    def __init__(self, address: str, name: str) -> None:
        self._of = address, name

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put what the generator made, in the place that it has."""
        ends = _ends(*self._of)
        samples, rest = (item[0], item[1:]) if isinstance(item[0], list) else (None, item)
        ends.table.put(samples=[samples], rest=[rest], reservation=ends.place)
        ends.place = None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the oldest payload."""
        ends = _ends(*self._of)
        ends.taken = ends.table.lease(TASK, rows=1, timeout_s=timeout if block else 0)
        ((samples,), (rest,)) = ends.taken["samples"].list(), ends.taken["rest"].list()
        return (samples, *rest) if _is_batch(rest) else rest


class _Slots:
    """OpenRLHF's ``rollout_slots``: places of the queue, each with the trainer's newest step. save_steps: between
    checkpoints; 0: there are none.
    """

    def __init__(self, address: str, name: str, save_steps: int) -> None:
        self._of, self._save_steps = (address, name), save_steps

    def get(self, block: bool = True, timeout: float | None = None) -> int:
        """Take a place, and return the trainer's newest step."""
        ends = _ends(*self._of)
        ends.place = ends.table.reserve(1, timeout_s=timeout if block else 0)
        return max(0, ends.table.stats().version)

    def put(self, item: int, block: bool = True, timeout: float | None = None) -> None:
        """Give a place back: the generator's, in which it made no batch, or that of the batch that the trainer took.
        item: the trainer's newest step, whose checkpoint is saved if it has one."""
        ends = _ends(*self._of)
        if ends.place is not None:
            ends.place.release()
            ends.place = None
            return
        if self._save_steps and item and item % self._save_steps == 0:
            ends.table.checkpointed(item)
        ends.table.advance(item)
        if ends.taken is not None:
            ends.taken.ack(step=item + 1 if self._save_steps else -1)
            ends.taken = None
