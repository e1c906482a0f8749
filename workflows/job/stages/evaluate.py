"""Held-out evaluation, in a process of its own beside training.

The trainer asks for one by a row of the table "evaluation" (`request_evaluation`); this process takes the version that
the row names, or the newest if that was freed, generates responses to the held-out prompts, scores them as training
does, and reports a metric of kind "evaluation" that says which version it was. The trainer does not wait. The first
version of a run is taken as soon as it is published, and held until it has been evaluated or another is asked for, so a
run is evaluated before its first step even if the trainer is quick.

The measure (`measures`) is the mean reward; for distillation the divergence from the teacher; for sft the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Final, Self

import transferqueue as tq
from transferqueue.adapters.protocols import WeightSource
from transferqueue.adapters.weights import ChannelWeights, TensorWeights
from transferqueue.errors import DeadlineExceeded, EndOfTable, NotFound, Sealed
from transferqueue.workflows.flow.events import SWAP
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job.engines import open_engine
from transferqueue.workflows.job.graph import evaluation_engine
from transferqueue.workflows.job.names import EVALUATE, POLICY
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.stages.measures import HeldOut, held_out

EVALUATIONS: Final = "evaluation"
"""Table of requests: one row for each."""
FIGURES: Final = "evaluation"
"""Kind of the metric."""
_ROWS_MAX: Final = 4096
_FIRST_S: Final = 3600.0
_WAIT_S: Final = 30.0
"""Longest wait of one request for work; then it is asked whether the job is over."""


def requests_table(queue: tq.Queue) -> tq.Table:
    """Return the table of requests, created at first use."""
    return queue.create_table(
        EVALUATIONS,
        fields=[tq.Field("step", "int64"), tq.Field("version", "int64")],
        tasks=[tq.Task(EVALUATE, needs=["step", "version"], retry=tq.Retry(attempts=2))],
        limits=tq.Limits(rows=_ROWS_MAX),
        exist_ok=True,
    )


def request_evaluation(queue: tq.Queue, step: int, version: int) -> None:
    """Ask for the held-out figures of `version`, published after `step` steps. Returns at once.

    A request for a step that waits already does nothing, and neither does one after `end_evaluations`: a trainer that
    was started again may ask once more.
    """
    with suppress(tq.AlreadyExists, Sealed):
        requests_table(queue).put(step=[step], version=[version], key=[f"step-{step}"])


def end_evaluations(queue: tq.Queue) -> None:
    """No more requests will come: the process ends when those that are there are done. A second call does nothing."""
    with suppress(Sealed):
        requests_table(queue).seal()


def when_of(step: int, steps: int) -> str:
    """Return where in a run of `steps` steps an evaluation stands.

    >>> [when_of(step, 10) for step in (0, 5, 10)]
    ['before', 'during', 'after']
    """
    return "before" if step == 0 else "after" if step >= steps else "during"


@contextmanager
def evaluate(context: Context) -> Iterator[Callable[[], None]]:
    """Factory of the process: its function serves requests until the trainer has ended them, or the job's table is
    drained.

    Blocks for the first weights, at most an hour. Raises `DeadlineExceeded` if none come, and what opening the held-out
    data raises.
    """
    job = context.settings(Job)
    with ExitStack() as stack:
        weights = stack.enter_context(HeldWeights(context.queue))
        prompts = stack.enter_context(held_out(job, lambda: closing(open_engine(evaluation_engine(job), job))))
        yield lambda: serve_requests(context, job, prompts, weights)


def serve_requests(context: Context, job: Job, prompts: HeldOut, weights: HeldWeights) -> None:
    """Evaluate for each request, in order. Returns when no more come."""
    requests = requests_table(context.queue)
    while True:
        try:
            batch = requests.lease(EVALUATE, rows=1, timeout_s=_WAIT_S)
        except EndOfTable:
            return
        except DeadlineExceeded:
            if _is_over(context.table):
                return
            continue
        with batch:
            step, asked = int(batch["step"].numpy()[0]), int(batch["version"].numpy()[0])
            with weights.at(asked) as (source, version), context.span(SWAP, version):
                prompts.load(source, version)
            figures = {"when": when_of(step, job.steps), "step": step, "version": version, **prompts.figures()}
            context.figures(FIGURES, **figures, **({} if version == asked else {"asked_version": asked}))


def _is_over(table: tq.Table) -> bool:
    """Whether the job's table is sealed and drained: then no request comes, even if the table of requests is open."""
    stats = table.stats()
    return stats.sealed and not table.audit().rows_live


class HeldWeights:
    """Versions of the policy for evaluation; holds the first one, so that it is not replaced before it is asked for."""

    def __init__(self, queue: tq.Queue) -> None:
        self._address, self._channel = queue.address, queue.weights(POLICY)
        self._first: tq.Weights | None = None

    def __enter__(self) -> Self:
        """Wait for the first version."""
        try:
            self._first = self._channel.pull(timeout_s=_FIRST_S)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f'no weights came on channel "{POLICY}" within {_FIRST_S:g} s; the trainer publishes them before its '
                "first step"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @contextmanager
    def at(self, version: int) -> Iterator[tuple[WeightSource, int]]:
        """Yield the weights of `version`, or the newest if it was freed, and their version.

        The channel may have freed the first version, which this object still holds. An engine that reads the channel
        would not find it, so its tensors are yielded in place of a reference to the channel.
        """
        if self._first is not None and self._first.version == version:
            held = ChannelWeights(self._address, self._first)
            yield held if held.is_kept(self._channel) else TensorWeights(dict(held)), version
            self._release()
            return
        self._release()
        with self._pulled(version) as weights:
            yield ChannelWeights(self._address, weights), weights.version

    def _pulled(self, version: int) -> tq.Weights:
        try:
            return self._channel.pull(version=version, timeout_s=_WAIT_S)
        except (NotFound, DeadlineExceeded):
            return self._channel.pull(timeout_s=_FIRST_S)

    def _release(self) -> None:
        if self._first is not None:
            self._first.release()
            self._first = None
