"""TRL's ``GRPOTrainer`` with rollouts from the queue: other processes serve the table's tasks (generation, optionally
rewards).

    rollouts = QueueRollouts(queue, table="rollouts", ahead=1)
    trainer = Trainer(..., rollout_func=rollouts, callbacks=[rollouts])

1. A request of the trainer puts its prompts, unless they are there already, and leases the rows when they are complete.
   Weights are published after every step, with the trainer's step as version, and generators follow the channel. A
   trainer that goes on from a checkpoint publishes above the versions of the one before it.
2. With ``ahead=n`` the prompts of the trainer's next n requests are put too, in the order of its own sampler, so they
   are generated while the trainer computes. Prompts that the trainer then does not ask for are dropped
   ("not_requested").
3. The table's pacing bounds how far: prompts are put ahead only while a reservation is granted at once, and a row over
   ``max_staleness`` is generated again (`rollout_pacing`).
4. Rows are done when the steps on them are over. If the trainer dies, its rows are released; the next trainer on the
   table drops them ("restarted") and asks anew.
5. TRL's loss takes the rows of a request for the current policy's own, unless generation is vLLM's. Rows that were
   generated ahead are not: put `BehaviourRatio` before ``GRPOTrainer``, and the ratio is to the policy that drew the
   tokens.

       class Trainer(BehaviourRatio, GRPOTrainer): pass
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import TrainerCallback

import transferqueue as tq
from transferqueue.adapters.weights import ModuleWeights
from transferqueue.errors import DeadlineExceeded, InternalError, NotFound, UsageError

_GROUP_BITS: Final = 52
"""Group ids start at a random number, so that those of an earlier trainer do not come again; they stay exact as
float64."""
_HELD_S_MAX: Final = 6 * 3600.0
"""Longest time that a trainer holds rows, some steps."""
_log: Final = logging.getLogger("transferqueue.adapters.trl")

REWARDS: Final = "queue_rewards"
"""Column name under which TRL's reward functions get the rewards of the table (`queued_reward` returns them)."""


def rollout_tasks(*others: tq.Task, needs: Iterable[str] = ()) -> list[tq.Task]:
    """Return the tasks of a table for `QueueRollouts`: ``rollout``, the others, and ``train``.

    The last one takes whole groups, and may hold them for 6 hours.

    Args:
        *others: further tasks, such as one that gives ``rewards``.
        needs: further fields that a row must have before it is trained, such as ``rewards``; default: none.
    """
    generated = ("response_ids", "rollout_logprobs")
    return [
        tq.Task("rollout", needs=("prompt_ids",), gives=(*generated, "finish_reason")),
        *others,
        tq.Task("train", needs=("prompt_ids", *generated, *needs), groups=tq.Complete(), time_limit_s=_HELD_S_MAX),
    ]


def queued_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return the column ``rewards`` of the table: a reward function for TRL.

    Args:
        completions: not used.
        **columns: as TRL gives them.
    """
    return [float(value) for value in columns[REWARDS]]


def rollout_pacing(
    rows: int, *, ahead: int = 1, max_staleness: int | None = None, channel: str = "policy"
) -> tq.Pacing:
    """Return the pacing of a table for `QueueRollouts`: at most `ahead` requests beyond the current one.

    Args:
        rows: of one request.
        ahead: requests; default 1.
        max_staleness: steps that a row may be behind; rows over it are generated again. Default None: `ahead`, for
            requests of one step each.
        channel: weight channel; default ``"policy"``.
    """
    return tq.Pacing(
        "train",
        batch_rows=rows,
        depth=ahead,
        max_staleness=ahead if max_staleness is None else max_staleness,
        on_stale=tq.Requeue("rollout"),
        channel=channel,
    )


class BehaviourRatio:
    """A base class to name before ``GRPOTrainer``.

    The loss is clipped around the policy that drew the tokens, whenever it drew them.
    """

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *given: Any, **options: Any) -> Any:
        """Compute TRL's loss with the log-probs that came with the rows as those of the old policy.

        Args:
            model: as of TRL.
            inputs: as of TRL.
            *given: as of TRL.
            **options: as of TRL.
        """
        drawn = inputs.get("sampling_per_token_logps")
        if drawn is not None:
            inputs = {**inputs, "old_per_token_logps": drawn}
        return super().compute_loss(model, inputs, *given, **options)  # type: ignore[misc]


@dataclass(frozen=True)
class _Request:
    """Prompts that were put: one for each completion, and the rows that they are."""

    prompts: list[Any]
    rows: NDArray[np.int64]
    first: int
    groups: int

    @property
    def where(self) -> tuple[tq.Compare, tq.Compare]:
        """Only these rows."""
        return tq.Compare("ordinal", ">=", self.first), tq.Compare("ordinal", "<", self.first + len(self.rows))


class QueueRollouts(TrainerCallback):  # type: ignore[misc]
    """TRL's ``rollout_func``, and the trainer callback that publishes weights and ends leases.

    It supports one trainer process.

    Args:
        queue: the queue.
        table: name of a table with the tasks of `rollout_tasks`, which is this trainer's alone.
        channel: weight channel; default ``"policy"``.
        ahead: requests that are put before the trainer asks for them; default 0.
        timeout_s: longest wait in seconds for the rows of a request; default 600.
        lease_s: longest time in seconds that the steps on one request's rows take; default 600.

    Raises:
        UsageError: a pacing that drops stale rows, which a request would wait for; at the first request, an `ahead`
            that a staleness bound excludes.
    """

    def __init__(
        self,
        queue: tq.Queue,
        *,
        table: str,
        channel: str = "policy",
        ahead: int = 0,
        timeout_s: float = 600.0,
        lease_s: float = 600.0,
    ) -> None:
        if ahead < 0:
            raise UsageError(f"ahead={ahead}: give the number of requests to put before they are asked for, 0 or more")
        self._table = queue.table(table)
        pacing = self._table.pacing
        if pacing is not None and pacing.max_staleness is not None and isinstance(pacing.on_stale, tq.DropStale):
            raise UsageError(
                f'table "{table}" drops stale rows, and the trainer waits for all rows of its request; '
                'set on_stale=Requeue("rollout"), as rollout_pacing does'
            )
        self._channel = queue.weights(channel)
        self._queue, self._channel_name = queue, channel
        self._newest = -1
        """Newest version of the channel."""
        self._timeout_s, self._lease_s, self._ahead_max = timeout_s, lease_s, ahead
        self._groups, self._rows = secrets.randbits(_GROUP_BITS), 0
        self._training: tq.Batch | None = None
        self._upcoming: _Upcoming | None = None
        self._ahead: deque[_Request] = deque()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the completions of prompts, in their order. Blocks until they are complete.

        Args:
            prompts: one for each completion.
            trainer: TRL's trainer.

        Raises:
            DeadlineExceeded: they were not complete within the time limit.
        """
        self._ended()
        training = trainer.model.training
        request = self._requested(prompts, trainer) if training else self._put(prompts, trainer, 1)
        if training:
            self._run_ahead(trainer)
        batch = self._table.lease(
            "train", groups=request.groups, where=request.where, timeout_s=self._timeout_s, lease_s=self._lease_s
        )
        self._training = batch
        return _rollouts(batch, request)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Drop the rows of an earlier trainer and publish the initial weights.

        Args:
            args: as of transformers.
            state: as of transformers.
            control: as of transformers.
            **given: as of transformers.
        """
        self._drop((), "restarted")
        published = self._queue.stats().channels.get(self._channel_name)
        self._newest = -1 if published is None else published.newest
        self._publish(given["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Publish the weights after the step.

        Args:
            args: as of transformers.
            state: as of transformers.
            control: as of transformers.
            **given: as of transformers.
        """
        self._publish(given["model"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the last lease, and drop the rows that were put ahead.

        Args:
            args: as of transformers.
            state: as of transformers.
            control: as of transformers.
            **given: as of transformers.
        """
        self._ended()
        self._drop_ahead()

    def _requested(self, prompts: list[Any], trainer: Any) -> _Request:
        """Return the request for these prompts: the next of those put ahead, or a new one."""
        if self._ahead and self._ahead[0].prompts == prompts:
            return self._ahead.popleft()
        self._drop_ahead()
        if self._ahead_max and self._upcoming is None:
            self._check_bound(trainer)
            self._upcoming = _Upcoming(trainer)
        if self._upcoming is not None and not self._upcoming.seek(prompts):
            _log.warning("the trainer's prompts are not those of its sampler; they are generated when it asks for them")
            self._upcoming, self._ahead_max = None, 0
        return self._put(prompts, trainer, trainer.num_generations)

    def _run_ahead(self, trainer: Any) -> None:
        """Put the next requests that the trainer will make, as far as it may be done without a wait."""
        while self._upcoming is not None and len(self._ahead) < min(self._ahead_max, _requests_left(trainer)):
            prompts = self._upcoming.peek()
            try:
                with self._table.reserve(len(prompts), timeout_s=0) as room:
                    self._ahead.append(self._put(prompts, trainer, trainer.num_generations, room))
            except DeadlineExceeded:
                return  # as far ahead as it may be; the next request tries again
            self._upcoming.advance()

    def _put(self, prompts: list[Any], trainer: Any, size: int, room: tq.Reservation | None = None) -> _Request:
        groups, first = len(prompts) // size, self._rows
        ids = [np.asarray(encoded(trainer.processing_class, prompt), np.int32) for prompt in prompts[::size]]
        rows = self._table.put(
            prompt_ids=tq.Repeat(ids, size),
            group_id=np.repeat(np.arange(groups) + self._groups, size),
            group_size=size,
            ordinal=first + np.arange(len(prompts)),
            reservation=room,
        )
        self._groups += groups
        self._rows += len(prompts)
        return _Request(prompts, rows, first, groups)

    def _check_bound(self, trainer: Any) -> None:
        bound = None if self._table.pacing is None else self._table.pacing.max_staleness
        steps = self._ahead_max * _steps_of_request(trainer)
        if bound is not None and steps > bound:
            raise UsageError(
                f"ahead={self._ahead_max} requests of {_steps_of_request(trainer):g} steps each makes rows {steps:g} "
                f"versions old, and max_staleness is {bound}: every row would be generated twice; lower ahead or raise "
                "max_staleness"
            )

    def _drop_ahead(self) -> None:
        for request in self._ahead:
            self._drop(request.where, "not_requested")
        self._ahead.clear()

    def _drop(self, where: tuple[tq.Compare, ...], reason: str) -> None:
        while True:
            with self._table.read(where=where, fields=[]) as read:
                rows = read.rows
            try:
                if len(rows):
                    self._table.drop(rows, reason)
                return
            except NotFound:
                continue  # one ended meanwhile: fewer are left

    def _publish(self, model: Any, step: int) -> None:
        self._newest = max(self._newest + 1, step)
        self._channel.publish(self._newest, dict(ModuleWeights(getattr(model, "module", model))))

    def _ended(self) -> None:
        """Ack the rows of the last request: the steps on them are over."""
        batch, self._training = self._training, None
        if batch is not None:
            batch.ack()


class _Upcoming:
    """Prompts of the requests that a trainer will make: those of its sampler, from a copy of the sampler, epoch after
    epoch."""

    def __init__(self, trainer: Any) -> None:
        self._dataset = trainer.train_dataset
        if not hasattr(self._dataset, "__getitem__"):
            raise UsageError("a streamed dataset cannot be read ahead: give a dataset with a length, or ahead=0")
        sampler = trainer._get_train_sampler(self._dataset)
        self._rows = trainer.args.generation_batch_size
        self._indices_of_request = self._rows * _repeats(trainer)
        self._requests_of_epoch = len(sampler) // self._indices_of_request
        self._indices = itertools.chain.from_iterable(itertools.repeat(sampler))
        self._prompts: list[Any] | None = None

    def peek(self) -> list[Any]:
        """Return the prompts of the next request, one for each completion."""
        if self._prompts is None:
            indices = list(itertools.islice(self._indices, self._indices_of_request))[: self._rows]
            self._prompts = [self._dataset[index]["prompt"] for index in indices]
        return self._prompts

    def advance(self) -> None:
        """Go on to the next request."""
        self._prompts = None

    def seek(self, prompts: list[Any]) -> bool:
        """Go on to what follows the request for ``prompts``; False if it is not among those of the next epoch."""
        for _ in range(self._requests_of_epoch):
            is_it = self.peek() == prompts
            self.advance()
            if is_it:
                return True
        return False


def _repeats(trainer: Any) -> int:
    """Return how many micro-batches the rows of one request are used for."""
    repeats: int = trainer.num_iterations * trainer.args.steps_per_generation
    return repeats


def _steps_of_request(trainer: Any) -> float:
    return _repeats(trainer) / float(trainer.args.gradient_accumulation_steps)


def _requests_left(trainer: Any) -> int:
    """Return how many requests come after the one that is made now."""
    steps: int = trainer.state.max_steps - trainer.state.global_step
    return max(0, math.ceil(steps / _steps_of_request(trainer)) - 1)


def encoded(tokenizer: Any, prompt: Any) -> Sequence[int]:
    """Return the token ids of a text, or of messages by the tokenizer's chat template."""
    if isinstance(prompt, str):
        token_ids: Sequence[int] = tokenizer(prompt)["input_ids"]
        return token_ids
    ids: Sequence[int] = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    return ids


def _rollouts(batch: tq.Batch, request: _Request) -> dict[str, Any]:
    order = np.argsort(batch.ordinal, kind="stable")
    if not np.array_equal(batch.rows[order], request.rows):
        raise InternalError(
            f"{len(batch)} rows came for {len(request.rows)} prompts: the table is not this trainer's alone"
        )
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
