"""TRL's ``GRPOTrainer`` with rollouts from the queue: other processes serve the table's tasks (generation, optionally rewards).

    rollouts = QueueRollouts(queue, table="rollouts")
    trainer = GRPOTrainer(..., rollout_func=rollouts, callbacks=[rollouts])

Each request of the trainer puts its prompts and leases the rows when they are complete. Weights are published after every
step, with the trainer's step as version, and generators follow the channel. Rows are done when the steps on them are
over: if the trainer dies, its rows are released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from transformers import TrainerCallback

import transferqueue as tq
from transferqueue.adapters.weights import ModuleWeights
from transferqueue.errors import InternalError

REWARDS: Final = "queue_rewards"
"""Column name under which TRL's reward functions get the rewards of the table (`queued_reward` returns them)."""


def rollout_tasks(*others: tq.Task, needs: Iterable[str] = ()) -> list[tq.Task]:
    """Return the tasks of a table for `QueueRollouts`: ``rollout``, the others, and ``train``, which takes whole groups.

    needs: further fields that a row must have before it is trained, such as ``rewards``.
    """
    generated = ("response_ids", "rollout_logprobs")
    return [
        tq.Task("rollout", needs=("prompt_ids",), gives=(*generated, "finish_reason")),
        *others,
        tq.Task("train", needs=("prompt_ids", *generated, *needs), groups=tq.Complete()),
    ]


def queued_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A reward function for TRL that returns the column ``rewards`` of the table."""
    return [float(value) for value in columns[REWARDS]]


class QueueRollouts(TrainerCallback):  # type: ignore[misc]
    """TRL's ``rollout_func``, and the trainer callback that publishes weights and ends leases.

    table: has the tasks of `rollout_tasks`. channel: weight channel. timeout_s: longest wait for the rows of a request.
    lease_s: longest time that the steps on one request's rows take. Supports one trainer process.
    """

    def __init__(
        self,
        queue: tq.Queue,
        *,
        table: str,
        channel: str = "policy",
        timeout_s: float = 600.0,
        lease_s: float = 600.0,
    ) -> None:
        self._table = queue.table(table)
        self._channel = queue.weights(channel)
        self._timeout_s, self._lease_s = timeout_s, lease_s
        self._groups = 0
        self._training: tq.Batch | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Put `prompts` (one for each completion) and return their completions in that order. Blocks until they are complete."""
        self._ended()
        size = trainer.num_generations if trainer.model.training else 1
        ids = [np.asarray(_encoded(trainer.processing_class, prompt), np.int32) for prompt in prompts]
        groups = len(prompts) // size
        self._table.put(
            prompt_ids=ids,
            group_id=np.repeat(np.arange(groups) + self._groups, size),
            group_size=size,
            ordinal=np.arange(len(prompts)),
        )
        self._groups += groups
        batch = self._table.lease("train", groups=groups, timeout_s=self._timeout_s, lease_s=self._lease_s)
        self._training = batch
        return _rollouts(batch, len(prompts))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Publish the initial weights."""
        self._publish(given["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Publish the weights after the step."""
        self._publish(given["model"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the last lease."""
        self._ended()

    def _publish(self, model: Any, version: int) -> None:
        self._channel.publish(version, dict(ModuleWeights(getattr(model, "module", model))))

    def _ended(self) -> None:
        """Ack the rows of the last request: the steps on them are over."""
        batch, self._training = self._training, None
        if batch is not None:
            batch.ack()


def _encoded(tokenizer: Any, prompt: Any) -> Sequence[int]:
    """Return the token ids of a text, or of messages by the tokenizer's chat template."""
    if isinstance(prompt, str):
        token_ids: Sequence[int] = tokenizer(prompt)["input_ids"]
        return token_ids
    ids: Sequence[int] = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    return ids


def _rollouts(batch: tq.Batch, completions: int) -> dict[str, Any]:
    order = np.argsort(batch.ordinal, kind="stable")
    if not np.array_equal(batch.ordinal[order], np.arange(completions)):
        raise InternalError(f"{len(batch)} rows came for {completions} prompts: the table is not this trainer's alone")
    columns: dict[str, Any] = {
        "prompt_ids": _lists(batch, "prompt_ids", order),
        "completion_ids": _lists(batch, "response_ids", order),
        "logprobs": _lists(batch, "rollout_logprobs", order),
    }
    if "rewards" in batch:
        columns[REWARDS] = batch["rewards"].numpy()[order].tolist()
    return columns


def _lists(batch: Mapping[str, Any] | tq.Batch, field: str, order: Any) -> list[list[Any]]:
    rows = list(batch[field])
    return [rows[at].tolist() for at in order]
