"""TRL's asynchronous GRPO trainer with its rollouts in the queue, by TRL's ``RolloutWorkerProtocol``.

    worker = QueueRolloutWorker(queue, table="rollouts", dataset=dataset, processing_class=tokenizer, num_generations=8)
    AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=worker.weights, callbacks=[worker.rollout_buffer])

1. A thread puts prompts in the order of the data set, each as one group, as far ahead as the table's pacing lets it; a
   later trainer goes on after the last one. Other processes generate and reward. Advantages are TRL's.
2. Weights are published in a channel; a sample's `model_version` counts from this trainer's first version there.
3. Rows are done when a checkpoint has the steps on them (without checkpoints at once). TRL fetches micro-batches ahead,
   so rows are acked `AHEAD_STEPS` steps after they were taken: a crash loses none, and may have some trained again.
"""

from __future__ import annotations

import itertools
import queue as queues
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import transferqueue as tq
from transferqueue.adapters.trainers.trl import encoded
from transferqueue.errors import BatchEnded, DeadlineExceeded, EndOfTable, LeaseExpired, Sealed, UsageError

AHEAD_STEPS: Final = 2
AHEAD_MIN: Final = AHEAD_STEPS + 2
"""Steps whose rows are not acked while the trainer fetches a micro-batch, beside the current one."""


class QueueRolloutWorker:
    """TRL's rollout worker over a table, for one trainer process at a time.

    Args:
        queue: the queue.
        table: name of a table with the tasks of `rollout_tasks`, whose last one needs ``rewards``, and with a pacing
            (`rollout_pacing`), whose channel gets the weights.
        dataset: with a column ``prompt``, text or messages.
        processing_class: the tokenizer.
        num_generations: rows of a prompt, as in TRL's arguments.

    Raises:
        UsageError: the table has no pacing, or one that ends before the trainer has the rows of its next step.
    """

    def __init__(
        self, queue: tq.Queue, *, table: str, dataset: Sequence[Any], processing_class: Any, num_generations: int
    ) -> None:
        self._table = queue.table(table)
        pacing = self._table.pacing
        bounds = () if pacing is None else [at for at in (pacing.depth, pacing.max_staleness) if at is not None]
        if pacing is None or pacing.channel is None or min(bounds) < AHEAD_MIN:
            raise UsageError(
                f'table "{table}" has pacing={pacing}; rows are acked {AHEAD_STEPS} steps after they were taken, so a '
                f"trainer needs rollout_pacing(rows of a step, ahead={AHEAD_MIN}), or more"
            )
        self._dataset, self._tokenizer, self._size = dataset, processing_class, num_generations
        before = max(0, self._table.stats().version)
        self.weights: Any = _Weights(queue.weights(pacing.channel), before)
        self.rollout_buffer: Any = _Samples(self._table, before, processing_class)
        self.metrics_queue: queues.Queue[dict[str, Any]] = queues.Queue()
        self._ends = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._put_prompts, name="prompts", daemon=True)

    def start(self) -> None:
        """Begin to put prompts."""
        self._thread.start()

    def stop(self) -> None:
        """Put no more prompts, and release the groups that are not acked: the next trainer gets them."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(600.0)
        self.rollout_buffer.release()

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: `weights` has published that version.

        Args:
            model_version: of the trainer.
        """

    def check_health(self, stale_after_s: float) -> None:
        """Raise if prompts cannot be put, or if no group came for so long.

        Args:
            stale_after_s: seconds.

        Raises:
            RuntimeError: with its cause, or what the table lacks.
        """
        if self._failure is not None:
            raise RuntimeError("the thread that puts prompts failed") from self._failure
        waited = time.monotonic() - self.rollout_buffer.last_came
        if waited > stale_after_s:
            raise RuntimeError(f"no group came for {waited:.0f} s: {self.rollout_buffer.why}")

    def _put_prompts(self) -> None:
        size = self._size
        try:
            group = self._table.audit().rows_put // size  # groups are put whole
            while not self._ends.is_set():
                prompt = self._dataset[group % len(self._dataset)]["prompt"]
                ids = np.asarray(encoded(self._tokenizer, prompt), np.int32)
                rows: dict[str, Any] = {"prompt_ids": tq.Repeat([ids], size), "ordinal": np.arange(size) + group * size}
                with suppress(DeadlineExceeded), self._table.reserve(size, timeout_s=1.0) as room:
                    self._table.put(group_id=group, group_size=size, reservation=room, **rows)
                    group += 1
        except Sealed:
            return
        except BaseException as error:  # noqa: BLE001  (check_health raises it)
            self._failure = error


class _Weights:
    """TRL's ``WeightTransferProtocol`` over a channel, whose newest version is `newest`."""

    def __init__(self, channel: tq.WeightChannel, newest: int) -> None:
        self._channel, self._newest = channel, newest

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._channel.publish(self._newest + 1, dict(iterator))
        self._newest += 1

    def init_weight_transfer(self) -> None:
        pass

    pause = resume = destroy = init_weight_transfer  # generators take new weights when they can


class _Samples(TrainerCallback):  # type: ignore[misc]
    """What the trainer drains, samples of one leased group after another, and the callback that acks the groups."""

    def __init__(self, table: tq.Table, before: int, tokenizer: Any) -> None:
        self._table, self._before, self._tokenizer = table, before, tokenizer
        self._samples: deque[RolloutSample] = deque()
        self._group: tq.Batch | None = None
        self._taken: deque[list[tq.Batch]] = deque([[]])
        """Groups whose last sample was taken, by steps, the oldest first."""
        self.last_came, self.why = time.monotonic(), "none was asked for yet"

    def get(self, timeout: float) -> RolloutSample:
        if self._group is None:
            try:
                self._group = self._table.lease("train", groups=1, timeout_s=timeout, lease_s=600.0)
            except (DeadlineExceeded, EndOfTable) as error:
                self.why = str(error)
                raise queues.Empty from error
            self._samples.extend(self._of(self._group))
            self.last_came = time.monotonic()
        sample = self._samples.popleft()
        if not self._samples:
            self._taken[-1].append(self._group)
            self._group = None
        return sample

    def qsize(self) -> int:
        return len(self._samples)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._table.rollback(state.global_step or -1)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._taken.append([])
        if len(self._taken) > AHEAD_STEPS + 1:
            self._ack(self._taken.popleft(), -1 if args.save_strategy == "no" else state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._table.checkpointed(state.global_step)

    def release(self) -> None:
        for batch in [*itertools.chain.from_iterable(self._taken), *([self._group] if self._group else [])]:
            with suppress(LeaseExpired, BatchEnded):
                batch.release()

    def _ack(self, batches: list[tq.Batch], step: int) -> None:
        """Ack groups. Those whose lease is over come again."""
        while batches:
            try:
                self._table.ack(batches, step=step)
                return
            except (LeaseExpired, BatchEnded):
                batches = [batch for batch in batches if not batch.ended]

    def _of(self, batch: tq.Batch) -> Iterator[RolloutSample]:
        rewards = batch["rewards"].numpy().astype(float)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        columns = (list(batch[name]) for name in ("prompt_ids", "response_ids", "rollout_logprobs"))
        for row, (prompt, response, logprobs) in enumerate(zip(*columns, strict=True)):
            none = np.zeros(len(prompt), np.int64)
            yield RolloutSample(
                prompt=[{"role": "user", "content": self._tokenizer.decode(prompt)}],
                completion=[{"role": "assistant", "content": self._tokenizer.decode(response)}],
                input_ids=np.concatenate([prompt, response]).astype(np.int64),
                completion_mask=np.concatenate([none, np.ones(len(response), np.int64)]),
                old_log_probs=np.concatenate([none, logprobs]).astype(np.float32),
                advantage=float(advantages[row]),
                model_version=int(batch.policy_version[row]) - self._before,
                group_id=int(batch.group_id[row]),
                metrics={"reward": float(rewards[row]), "reward_std": float(rewards.std())},
            )
