"""The stage ``advantage``: from the rewards of a prompt's responses to the columns of the trainer's loss.

Kinds that compare responses get whole groups. With ``filter_equal`` a group whose rewards are equal is dropped, since
it teaches nothing, and the source admits another in its place (dynamic sampling; DAPO, arXiv 2503.14476, section 3.2).
Kinds that whiten get a whole batch.

With rows in the order of the data, the rows of a whitened batch are exactly those of a step of the trainer, and are
computed with in that order: in sync mode those of its next step (`StepRows`), in the modes that generate ahead those
of any step (`NumberedStepRows`). So a run with fixed seeds repeats bit for bit, also after a step was taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.errors import NotFound
from transferqueue.workflows.dispatch.channels import publish
from transferqueue.workflows.flow.loop.preference import PreferringWork
from transferqueue.workflows.flow.stage import Context, LeaseChoice, Work
from transferqueue.workflows.job.algorithms.advantages import (
    ScoredRows,
    advantage_columns_of,
    group_advantages,
)
from transferqueue.workflows.job.names import ADVANTAGE, OPEN_STATES, PASS_RATES
from transferqueue.workflows.job.settings.defaults import columns_of, filled
from transferqueue.workflows.job.settings.job import IN_TURN, Job
from transferqueue.workflows.job.settings.sizes import depth, group_rows, has_step_versions, rows_ahead
from transferqueue.workflows.job.stages.all_dropped_guard import AllDroppedGuard
from transferqueue.workflows.job.stages.step_versions import StepVersions, step_versions

ZERO_ADVANTAGE: Final = "zero_advantage"
"""Drop reason of groups with equal rewards."""


@contextmanager
def advantage(context: Context) -> Iterator[Work]:
    """Factory of the stage."""
    job = context.settings(Job)
    algorithm = filled(job.algorithm)
    guard = AllDroppedGuard(
        job,
        "the rewards of every group were equal, and the job drops such groups",
        "check the rewards, begin with a better model, or set algorithm.filter_equal=false",
    )

    step = _whole_steps(context, job) if algorithm.whiten else None
    tell_rates = PassRates(context.queue, job)

    def compare(batch: tq.Batch) -> Iterator[PartialResult]:
        if step is not None and not step.are(batch):
            yield PartialResult(at=np.arange(len(batch)), columns={}, unfinished=True)
            return
        rewards_B = batch["rewards"].numpy()
        if job.data.sampler.by:
            tell_rates(batch.group_id, rewards_B)
        taught_B = _differ(rewards_B, batch.group_id) if algorithm.filter_equal else np.ones(len(batch), bool)
        order = np.argsort(batch.ordinal, kind="stable")
        at, equal = order[taught_B[order]], order[~taught_B[order]]
        if at.size:
            rows = scored_rows(job, lambda name: list(batch[name]), batch.group_id, at.tolist(), batch.fields)
            columns = advantage_columns_of(rows, algorithm, tokens_max=job.sampling.tokens_max)
            yield PartialResult(at=at, columns=columns)
        if equal.size:
            yield PartialResult(at=equal, columns={}, drop=ZERO_ADVANTAGE)
        guard.count(kept=int(at.size), dropped=int(equal.size))

    yield compare if step is None else PreferringWork(compare, step.choice)


class PassRates:
    """Tells the source of prompts the pass rates of groups, where `data.sampler` chooses prompts.

    A group is told before it is acked or dropped: a step that is trained has told all of its groups. Each batch is a
    version of a channel, of its groups alone.
    """

    def __init__(self, queue: tq.Queue, job: Job) -> None:
        self._queue, self._pass_reward = queue, job.data.sampler.pass_reward
        self._keep = rows_ahead(job) // group_rows(job) + job.trainer.prompts_per_step  # told between two steps chosen
        self._next: int | None = None

    def __call__(self, numbers_B: npt.NDArray[np.int64], rewards_B: npt.NDArray[np.float32]) -> None:
        """Tell the pass rate of each group of a batch, by the number of its prompt."""
        numbers, group_B = np.unique(numbers_B, return_inverse=True)
        rates = np.bincount(group_B, weights=rewards_B >= self._pass_reward) / np.bincount(group_B)
        groups = list(zip(numbers.tolist(), rates.tolist(), strict=True))
        version, self._next = self._next, None  # after a failure it is looked up
        self._next = publish(self._queue, PASS_RATES, groups, keep=self._keep, version=version) + 1


def _whole_steps(context: Context, job: Job) -> StepRows | NumberedStepRows | None:
    """Return what holds the stage to the rows of one step; None where any rows of a batch are whitened."""
    if has_step_versions(job):
        return NumberedStepRows(context, job)
    is_in_turn = job.reproducible and job.pacing.mode in IN_TURN and not depth(job)
    return StepRows(context) if is_in_turn else None


class StepRows:
    """Holds the stage to the rows of the trainer's next step: the lowest ordinals that the trainer has not learned
    from.

    Until a step is taken back there are no other rows. After it, rows of later steps are generated together with its
    own, and a lease may give some of both. Then the rows go back, and the stage waits for those below the end of the
    step.
    """

    def __init__(self, context: Context) -> None:
        self._queue, self._table = context.queue, context.table
        self._below: int | None = None

    def choice(self) -> LeaseChoice:
        """Return which rows the stage waits for."""
        return _below(self._below)

    def are(self, batch: tq.Batch) -> bool:
        """Whether no row with a lower ordinal is still to come. Else `choice` waits for those that are."""
        before = self._still_to_come(batch)
        self._below = int(np.sort(np.append(batch.ordinal, before))[len(batch) - 1]) + 1 if before.size else None
        return not before.size

    def _still_to_come(self, batch: tq.Batch) -> npt.NDArray[np.int64]:
        """Ordinals before the batch's last one whose rows the stage has not finished. In sync mode rows that were
        trained are of lower versions."""
        earlier = self._table.read(where=tq.Compare("ordinal", "<", int(batch.ordinal.max())), fields=[])
        current = (earlier.policy_version < 0) | (earlier.policy_version >= int(batch.policy_version.max()))
        rows = np.setdiff1d(earlier.rows[current], batch.rows)
        waiting = rows[[self._is_open(int(row)) for row in rows]] if rows.size else rows
        return np.asarray(earlier.ordinal[np.isin(earlier.rows, waiting)], np.int64)

    def _is_open(self, row: int) -> bool:
        try:
            return self._queue.inspect(self._table.name, row).tasks[ADVANTAGE].state in OPEN_STATES
        except NotFound:
            return False  # it ended meanwhile


class NumberedStepRows:
    """Holds the stage to the rows of one step, which their prompts' numbers tell. Rows of several steps are ready at
    once where they are generated ahead. If a lease has some of two, they go back, and the stage waits for those of the
    first."""

    def __init__(self, context: Context, job: Job) -> None:
        self._queue, self._job = context.queue, job
        self._versions: StepVersions | None = None
        self._below: int | None = None

    def choice(self) -> LeaseChoice:
        """Return which rows the stage waits for."""
        return _below(self._below)

    def are(self, batch: tq.Batch) -> bool:
        """Whether the rows are of one step. `choice` then prefers those of the next, else those of the first."""
        versions = self._versions = self._versions or step_versions(self._queue, self._job)
        steps = versions.steps(batch.group_id)
        first, are_one = int(steps.min()), bool((steps == steps[0]).all())
        self._below = versions.first_prompt(first + 1 + are_one) * group_rows(self._job)
        return are_one


def _below(ordinal: int | None) -> LeaseChoice:
    if ordinal is None:
        return LeaseChoice()
    return LeaseChoice((tq.Compare("ordinal", "<", ordinal),), patient=True)


def _differ(rewards_B: npt.NDArray[np.float32], group_B: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each row whether the rewards of its group differ by more than rounding: bool ``[rows]``."""
    centred_B = group_advantages(rewards_B, group_B, std="none")
    return np.isin(group_B, group_B[centred_B != 0])


def scored_rows(
    job: Job,
    column: Callable[[str], Sequence[Any]],
    group_id: npt.NDArray[np.int64],
    at: Sequence[int],
    fields: Collection[str],
) -> ScoredRows:
    """Return the inputs of advantages. Log-probs are the proximal policy's where the job has them.

    column: returns a column of all rows by its name. group_id: of all rows. at: positions of the rows that are wanted,
    in their order. fields: names of the columns that there are.
    """
    read = columns_of(job.algorithm)["advantage"]
    policy = "prox_logprobs" if "prox_logprobs" in read else "rollout_logprobs"

    def chosen(name: str) -> list[Any]:
        values = column(name)
        return [values[row] for row in at]

    return ScoredRows(
        rewards=np.array(chosen("rewards"), np.float32),
        group_id=group_id[at],
        masks=chosen("loss_mask") if "loss_mask" in fields else _all_chosen(read, chosen),
        logprobs=chosen(policy) if policy in read else (),
        ref_logprobs=chosen("ref_logprobs") if "ref_logprobs" in read else (),
        values=chosen("values") if "values" in read else (),
    )


def _all_chosen(read: tuple[str, ...], chosen: Callable[[str], list[Any]]) -> list[npt.NDArray[np.bool_]]:
    """Return the masks of rows whose tokens are all the policy's; none where the algorithm reads no tokens."""
    tokens = next((name for name in ("response_ids", "ref_logprobs") if name in read), None)
    return [] if tokens is None else [np.ones(len(row), bool) for row in chosen(tokens)]
