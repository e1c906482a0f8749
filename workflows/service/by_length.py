"""Requests to a generation service by expected length: the caller's side of dispatch, for a trainer that calls
`generate`.

1. Each request is a batch: its prompts are ranked, a plan is made from the live generators' measurements and published,
   and then the request is put.
2. `learn` takes finished samples; a thread teaches the ranker and refits it, so that the trainer never waits for that.
3. Until the ranker has skill, a request keeps its order; its samples are judged all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Prompt
from transferqueue.workflows.dispatch.channels import live_engines, plan_channel, publish
from transferqueue.workflows.dispatch.dispatcher import LengthDispatcher
from transferqueue.workflows.planner.batch_plan import Plan
from transferqueue.workflows.service.samples import EXPECTED
from transferqueue.workflows.service.sync import CompletionStream, Service


class LengthRequests:
    """Puts requests of a service by expected length, for generators that `serve` with ``dispatch=``.

    A context manager; one process at a time plans for a service.

    Args:
        queue: of the service.
        service: the service.
        batch_rows: samples of a batch, for a new dispatcher.
        overlapping: the next request is put before this one's samples are all there, as with `stream_engines` of depth
            1: plans then count the time that each request adds, not how soon one alone would end. Default False.
        dispatcher: one that has learned before; default None: a new one.

    Example:
        >>> with LengthRequests(queue, service, batch_rows=64) as requests:  # doctest: +SKIP
        ...     for batch in requests.generate(prompts).batches(64):
        ...         requests.learn(batch)
        ...         batch.ack()
    """

    def __init__(
        self,
        queue: tq.Queue,
        service: Service,
        *,
        batch_rows: int,
        overlapping: bool = False,
        dispatcher: LengthDispatcher | None = None,
    ) -> None:
        self._queue, self._service = queue, service
        self._dispatcher = dispatcher or LengthDispatcher(batch_rows=batch_rows)
        self._dispatcher.overlapping = overlapping
        self._changing = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ranker")
        self._lessons: list[Future[None]] = []

    def generate(
        self, prompts: Sequence[Prompt], *, number: int | None = None, timeout_s: float | None = None
    ) -> CompletionStream:
        """Rank prompts, publish the plan, and request them as `Service.generate` does; same errors, same waits.

        Args:
            prompts: token ids, and how many samples of each.
            number: as of `Service.generate`; default None.
            timeout_s: as of `Service.generate`; default None: no limit.

        Returns:
            The stream.
        """
        expected = self._dispatcher.expect([prompt.ids for prompt in prompts]).tokens
        plan = self.plan(np.repeat(expected, [prompt.samples for prompt in prompts]))
        scores = expected.tolist() if plan.order == "longest" else None
        return self._service.generate(
            prompts, scores=scores, expected=expected.tolist(), number=number, timeout_s=timeout_s
        )

    def plan(self, expected: Any) -> Plan:
        """Plan a batch of samples for the generators that live now, and publish the plan.

        Args:
            expected: tokens of each sample, ``[rows]``.

        Returns:
            The plan.
        """
        table = self._service.table.name
        engines = live_engines(self._queue, table)
        with self._changing:
            plan = self._dispatcher.plan(expected, engines)
        publish(self._queue, plan_channel(table), plan)
        return plan

    def learn(self, batch: tq.Batch) -> None:
        """Learn from finished samples of the service, before they are acked. Returns at once.

        Raises the error of an earlier lesson, if one failed.

        Args:
            batch: a batch of `CompletionStream.batches`.
        """
        prompts = [np.array(ids) for ids in batch["prompt_ids"]]
        groups, expected = batch.group_id.tolist(), batch[EXPECTED].numpy().astype(np.int64)
        self._raise_failures()
        self._lessons.append(self._thread.submit(self._taught, prompts, groups, expected, batch.tokens.copy()))

    def figures(self) -> dict[str, Any]:
        """Return recall, skill and the last plan (`LengthDispatcher.figures`)."""
        with self._changing:
            return self._dispatcher.figures()

    def close(self) -> None:
        """End the thread after its last lesson. A second call does nothing.

        Raises the error of a lesson that failed.
        """
        self._thread.shutdown()
        self._raise_failures()

    def _taught(self, prompts: list[Any], groups: list[int], expected: Any, lengths: Any) -> None:
        with self._changing:
            self._dispatcher.learn(prompts, groups, expected, lengths)
        if self._dispatcher.refit_due:
            self._dispatcher.refit()

    def _raise_failures(self) -> None:
        ended = [lesson for lesson in self._lessons if lesson.done()]
        self._lessons = [lesson for lesson in self._lessons if not lesson.done()]
        for lesson in ended:
            lesson.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
