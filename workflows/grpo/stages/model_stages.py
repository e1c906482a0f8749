"""The stages of the GRPO job that run a model: rollout, reference, train."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.errors import DeadlineExceeded, NotFound, Sealed
from transferqueue.workflows.flow.events import PUBLISH, SWAP, TimeSpan
from transferqueue.workflows.flow.loop.full_batches import ABORTED, Due, hearing, nothing_due, tell_full
from transferqueue.workflows.flow.reports.audit import audit
from transferqueue.workflows.flow.stage import STALL_S, Context, Work
from transferqueue.workflows.grpo.job import POLICY, REFERENCE, JobSettings
from transferqueue.workflows.grpo.learning.evaluate import Evaluation, evaluate
from transferqueue.workflows.grpo.learning.learner import GrpoLearner, TrainBatch
from transferqueue.workflows.grpo.learning.problems import problem_set
from transferqueue.workflows.grpo.learning.settings import LearningSettings
from transferqueue.workflows.grpo.learning.warmup import warm_up
from transferqueue.workflows.grpo.model.llama import from_llama, is_llama, to_llama
from transferqueue.workflows.grpo.model.partial_responses import (
    NOTHING,
    PartialResponses,
    places,
    same_length,
    same_prompt,
)
from transferqueue.workflows.grpo.model.prompt_packing import response_logprobs
from transferqueue.workflows.grpo.model.sampling import Response, SamplingRequest
from transferqueue.workflows.grpo.model.transformer import Transformer

UPDATE_S: Final = 300.0
"""Longest time that one replica changes its weights. After it the next one has its turn."""
_PART_ROWS: Final = 32
"""Responses are yielded in parts of this many, so that the reward stage works while the rest is generated."""
SURPLUS: Final = "surplus"
"""Drop reason of rows that the run did not need."""
_EVALUATION_SEED: Final = 1_000_003
"""Seed of the held-out evaluation: the same before and after, for all runs."""


class Policy:
    """A model that gets its weights from a channel."""

    def __init__(self, settings: LearningSettings, channel: tq.WeightChannel) -> None:
        self.model = Transformer(settings.model_shape())
        self.version = -1
        self._channel = channel

    def refresh(self, timeout_s: float = 0.0) -> bool:
        """Load the newest version if it is newer; wait at most `timeout_s` for one. Return whether it loaded one."""
        try:
            weights = self._channel.pull(above=self.version, timeout_s=timeout_s)
        except DeadlineExceeded:
            if timeout_s:
                raise
            return False
        self._take(weights)
        return True

    def refresh_in_turn(self, timeout_s: float) -> bool:
        """Call `refresh` while no other replica changes weights; give up after `timeout_s`. Return whether it loaded a version."""
        try:
            with self._channel.turn(length_s=UPDATE_S, timeout_s=timeout_s):
                return self.refresh()
        except DeadlineExceeded:
            if timeout_s:
                raise
            return False

    def advance(self, version: int) -> bool:
        """Load exactly `version`, or the newest if it is no longer kept; nothing if this version is as new. Return whether it loaded."""
        if version <= self.version:
            return False
        try:
            weights = self._channel.pull(version=version, timeout_s=STALL_S)
        except NotFound:
            return self.refresh()
        self._take(weights)
        return True

    def _take(self, weights: tq.Weights) -> None:
        load_weights(self.model, weights)
        self.version = weights.version
        weights.release()
        self._channel.applied(self.version)


def load_weights(model: Transformer, weights: tq.Weights) -> None:
    """Copy published weights into `model`, whether they have its names or Llama's."""
    tensors = {name: torch.as_tensor(value) for name, value in weights.items()}
    model.load_state_dict(from_llama(tensors, model.shape) if is_llama(tensors) else tensors)


def published(settings: JobSettings, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the policy's weights under the names that the job's engine expects."""
    return weights if settings.engine == "builtin" else to_llama(weights, settings.learning.model_shape())


def tokens_max(settings: LearningSettings) -> int:
    """Return the length limit of a response: the longest right answer and its end token."""
    return problem_set(settings.dataset).answer_chars_max + 1


# ---------------------------------------------------------------- rollout


class Rollout:
    """Generates a response for each row, all rows of a batch with one version of the weights.

    Responses that exceed the budget are released unfinished and continued in a later lease; so are those that are unfinished
    when newer weights are due. A response whose tokens are too old to be trained starts again.
    """

    def __init__(self, job: JobSettings, policy: Policy, context: Context, due: Due = nothing_due) -> None:
        settings = job.learning
        self._job = job
        self._settings = settings
        self._policy = policy
        self._context = context
        self._due = due
        self._generator = torch.Generator().manual_seed((settings.seed << 8) + context.instance + 1)
        self._tokens_max = tokens_max(settings)

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield rows in parts as they are finished. Begun responses go first, so that they do not become too old."""
        self._swap(batch)
        prompts = list(batch["prompt_ids"])
        begun = self._begun(batch)
        fresh = np.flatnonzero([not len(partial.ids) for partial in begun])
        for rows_PS in (*same_length(begun), *same_prompt(batch.group_id, fresh)):
            read = [np.concatenate([prompts[row], begun[row].ids]) for row in rows_PS[:, 0]]
            yield from self._generate(read, rows_PS, begun)

    def _begun(self, batch: tq.Batch) -> list[PartialResponses]:
        """Return each row's response so far; `NOTHING` if it would be too old to be trained."""
        if not self._job.in_parts:
            return [NOTHING] * len(batch)
        oldest = batch.version - self._job.max_staleness
        partials = [PartialResponses(*columns) for columns in zip(*(batch[name] for name in BEGUN), strict=True)]
        return [partial if partial.versions.min(initial=oldest) >= oldest else NOTHING for partial in partials]

    def _swap(self, batch: tq.Batch) -> None:
        """Load the weights that the mode demands, and report how long generation stood still for them."""
        start = time.monotonic()
        if self._swapped(batch):
            self._context.emit(TimeSpan(name=SWAP, start=start, end=time.monotonic(), version=self._policy.version))

    def _swapped(self, batch: tq.Batch) -> bool:
        """Replicas change weights one after another. A replica that must wait for its turn generates on, while its rows stay within the bound."""
        if self._overdue():
            while self._overdue():
                self._policy.refresh(timeout_s=STALL_S)
            return True
        if self._job.mode == "delayed":
            return self._policy.advance(delayed_version(batch, self._job))
        behind = batch.version - self._policy.version
        if self._job.rollouts == 1:
            return self._policy.refresh()
        if behind <= 0:
            return False
        return self._policy.refresh_in_turn(0.0 if behind < self._job.max_staleness else STALL_S)

    def _overdue(self) -> bool:
        """Whether a full batch makes newer weights than these: nothing more is generated with these."""
        return self._due() > self._policy.version

    def _generate(
        self, prompts: Sequence[npt.NDArray[np.int32]], rows_PS: npt.NDArray[np.intp], begun: Sequence[PartialResponses]
    ) -> Iterator[PartialResult]:
        """Generate responses to `prompts`; all rows of `rows_PS` have the same number of begun tokens."""
        if self._overdue():
            at = rows_PS.ravel()
            yield self._hand_back(at, [begun[row] for row in at.tolist()])
            return
        left = self._tokens_max - len(begun[rows_PS[0, 0]].ids)
        generation = SamplingRequest(
            self._policy.model,
            prompts,
            samples=rows_PS.shape[1],
            tokens_max=left,
            temperature=self._settings.temperature,
            generator=self._generator,
        )
        finished: list[Response] = []
        for _ in range(min(left, self._job.partial or left)):
            if self._overdue():
                break
            finished += generation.step()
            if len(finished) >= _PART_ROWS:
                yield self._part(finished, rows_PS, begun)
                finished = []
        if finished:
            yield self._part(finished, rows_PS, begun)
        if not generation.done:
            unfinished = generation.unfinished()
            yield self._hand_back(*self._with(unfinished, rows_PS, begun))

    def _with(
        self, responses: Sequence[Response], rows_PS: npt.NDArray[np.intp], begun: Sequence[PartialResponses]
    ) -> tuple[npt.NDArray[np.intp], list[PartialResponses]]:
        """Return the positions of the responses, and each response joined to the tokens begun before it."""
        at = places(responses, rows_PS)
        return at, [
            begun[row].and_then(response, self._policy.version) for row, response in zip(at, responses, strict=True)
        ]

    def _part(
        self, finished: Sequence[Response], rows_PS: npt.NDArray[np.intp], begun: Sequence[PartialResponses]
    ) -> PartialResult:
        at, partials = self._with(finished, rows_PS, begun)
        columns = {
            "response_ids": [partial.ids for partial in partials],
            "rollout_logprobs": [partial.logprobs for partial in partials],
            "finish_reason": [response.finish_reason for response in finished],
        }
        if self._job.in_parts:
            columns["token_versions"] = [partial.versions for partial in partials]
        return PartialResult(
            at=at,
            columns=columns,
            facts={
                "policy_version": np.array([partial.versions.min() for partial in partials], dtype=np.int64),
                "policy_version_max": self._policy.version,
                "tokens": np.array([len(partial.ids) for partial in partials], dtype=np.int64),
            },
        )

    def _hand_back(self, at: npt.NDArray[np.intp], partials: Sequence[PartialResponses]) -> PartialResult:
        """Return a part that releases unfinished rows with their tokens; report it if a full batch is the reason."""
        if self._overdue():
            self._context.figures(ABORTED, rows=len(partials), tokens=sum(len(partial.ids) for partial in partials))
        return PartialResult(
            at=at, columns=dict(zip(BEGUN, map(list, zip(*partials, strict=True)), strict=True)), unfinished=True
        )


def delayed_version(batch: tq.Batch, settings: JobSettings) -> int:
    """Return the version for a batch in delayed mode: rows of step k + 1 are generated with the version before the one that step k makes.

    Rows that were requeued belong to an earlier step. The clock at their lease decides for them, or they would become stale again.
    """
    step = int(batch.group_id.max()) // settings.learning.prompts_per_step
    return max(0, step - 1, batch.version - 1)


@contextmanager
def rollout(context: Context) -> Iterator[Work]:
    """Factory of ``rollout``: waits for the first weights, then generates, with the newest weights at each batch."""
    torch.set_num_threads(1)
    job = context.settings(JobSettings)
    policy = Policy(job.learning, context.queue.weights(POLICY))
    policy.refresh(timeout_s=STALL_S)
    with hearing(context.queue) if job.surplus_groups else nullcontext(nothing_due) as due:
        yield Rollout(job, policy, context, due)


# ---------------------------------------------------------------- reference


@contextmanager
def reference(context: Context) -> Iterator[Work]:
    """Factory of ``reference``: log-probs of the responses under the initial policy."""
    torch.set_num_threads(1)
    settings = context.settings(JobSettings).learning
    policy = Policy(settings, context.queue.weights(REFERENCE, keep=1))
    policy.refresh(timeout_s=STALL_S)

    def judge(batch: tq.Batch) -> Mapping[str, Any]:
        prompts, responses = list(batch["prompt_ids"]), list(batch["response_ids"])
        return {"ref_logprobs": response_logprobs(policy.model, prompts, responses, temperature=settings.temperature)}

    yield judge


# ---------------------------------------------------------------- train


class Train:
    """Takes a step on each batch and publishes the weights before the batch is acked.

    The ack makes room for new rows, which are then generated with the new weights: depth 0 is therefore synchronous.
    """

    def __init__(self, settings: JobSettings, context: Context, learner: GrpoLearner, *, version: int) -> None:
        self._settings = settings
        self._context = context
        self._learner = learner
        self._channel = context.queue.weights(POLICY)
        self.version = version

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Step, publish and report; after the ack, seal the table if this was the last batch."""
        if self._settings.surplus_groups:
            tell_full(self._context.queue, self.version + 1, batch.rows)
        metrics = self._learner.step(self._train_batch(batch))
        self.version += 1
        with self._context.span(PUBLISH, self.version):
            self._channel.publish(self.version, published(self._settings, self._learner.weights()))
        self._report(batch, metrics)
        yield PartialResult(columns={})
        self.seal_if_done()

    def seal_if_done(self) -> None:
        """Seal the table when all rows are done. Before that, a stale row may have to be generated again.

        The rows decide and not the version: a trainer that died between publishing and acking trains a batch twice.
        """
        if self.version < self._settings.learning.steps:
            return
        audited = audit(self._context.table)
        untrained = 0 if self._settings.replaces else audited.dropped_rows
        if audited.done + untrained < self._settings.rows_total:
            return
        with suppress(Sealed):  # an earlier life of this process did
            self._context.table.seal()
        if self._settings.replaces:
            self._drop_surplus()

    def _drop_surplus(self) -> None:
        """Drop the rows that were admitted in case more groups had to be replaced."""
        table = self._context.table
        while len(rows := table.read(fields=[])):
            try:
                table.drop(rows.rows, SURPLUS)
            except NotFound:
                continue  # one of them was dropped in between; each time there are fewer

    def _train_batch(self, batch: tq.Batch) -> TrainBatch:
        # Neighbours with one prompt are computed together.
        order = np.argsort(batch.group_id, kind="stable")
        ragged = (
            "prompt_ids",
            "response_ids",
            "rollout_logprobs",
            *(("ref_logprobs",) * self._settings.with_reference),
        )
        columns = {name: list(batch[name]) for name in ragged}
        return TrainBatch(
            **{name: [column[row] for row in order] for name, column in columns.items()},
            advantages=batch["advantages"].numpy()[order],
        )

    def _report(self, batch: tq.Batch, metrics: Mapping[str, float]) -> None:
        stale, counts = np.unique(batch.version - batch.policy_version, return_counts=True)
        self._context.figures(
            "step",
            step=self.version,
            rows=len(batch),
            reward=float(batch["rewards"].numpy().mean()),
            rows_of_several_versions=int((batch.policy_version_max > batch.policy_version).sum()),
            staleness={str(versions): int(count) for versions, count in zip(stale, counts, strict=True)},
            **metrics,
        )


class Evaluator:
    """Evaluates the model on the held-out problems and reports the result."""

    def __init__(self, settings: LearningSettings, context: Context, model: Transformer) -> None:
        self._settings = settings
        self._context = context
        self._model = model

    def __call__(self, when: str) -> Evaluation:
        """Evaluate and report metrics of kind "evaluation". when: before or after."""
        with self._context.span(f"evaluate {when}"):
            evaluation = evaluate(
                self._model,
                problem_set(self._settings.dataset),
                tokens_max=tokens_max(self._settings),
                samples=self._settings.evaluation_samples,
                seed=_EVALUATION_SEED,
            )
        self._context.figures("evaluation", when=when, reward=evaluation.reward, accuracy=evaluation.accuracy)
        return evaluation


@contextmanager
def train(context: Context) -> Iterator[Work]:
    """Factory of ``train``: warm-up, version 0, evaluation; after the last step, evaluation again.

    After a restart it continues from the newest published weights (the optimizer's moments are lost).
    """
    torch.set_num_threads(1)
    settings = context.settings(JobSettings)
    policy = Policy(settings.learning, context.queue.weights(POLICY))
    evaluator = Evaluator(settings.learning, context, policy.model)
    if not policy.refresh():
        _begin(settings, context, policy, evaluator)
    learner = _learner(settings.learning, policy.model, policy.version)
    step = Train(settings, context, learner, version=policy.version)
    step.seal_if_done()
    yield step
    evaluator("after")


def _begin(settings: JobSettings, context: Context, policy: Policy, evaluator: Evaluator) -> None:
    """Publish version 0 last: a process that sees it knows that everything before has happened."""
    with context.span("warm-up"):
        weights: dict[str, Tensor] = warm_up(settings.learning)
    policy.model.load_state_dict(weights)
    policy.version = 0
    evaluator("before")
    if settings.with_reference:
        context.queue.weights(REFERENCE, keep=1).publish(0, weights)
    context.queue.weights(POLICY).publish(0, published(settings, weights))


def _learner(learning: LearningSettings, model: Transformer, first_step: int) -> GrpoLearner:
    return GrpoLearner(
        model,
        algorithm=learning.algorithm(),
        temperature=learning.temperature,
        learning_rate=learning.learning_rate,
        final_share=learning.final_share,
        steps=learning.steps,
        gradient_norm_max=learning.gradient_norm_max,
        first_step=first_step,
    )
