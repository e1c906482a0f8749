"""Requests to a generation service by expected length: the caller's side of dispatch, for a trainer that calls
`generate`.

Rules:

1. Each request is a batch: its prompts are ranked, a plan is made from what the live generators measured, the plan is
   published, and then the request is put.
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
    """Puts requests of `service` by expected length, for generators that `serve` with ``dispatch=``. A context manager;
    one process at a time plans for a service.

    queue: of the service. dispatcher: one that has learned before (None: a new one for batches of `batch_rows`
    samples). overlapping: the next request is put before this one's samples are all there, as with `stream_engines` of
    depth 1: plans then count what each request adds, not how soon one alone would end.

    Example: ``stream = requests.generate(prompts)``; then, for each batch of the stream: ``requests.learn(batch)``
    before the ack.
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
        """Rank `prompts`, publish the plan, and request them as `Service.generate` does; same errors, same waits."""
        expected = self._dispatcher.expect([prompt.ids for prompt in prompts]).tokens
        plan = self.plan(np.repeat(expected, [prompt.samples for prompt in prompts]))
        scores = expected.tolist() if plan.order == "longest" else None
        return self._service.generate(
            prompts, scores=scores, expected=expected.tolist(), number=number, timeout_s=timeout_s
        )

    def plan(self, expected: Any) -> Plan:
        """Plan a batch of samples with `expected` tokens ``[rows]`` for the generators that live now, publish the plan,
        and return it.
        """
        table = self._service.table.name
        engines = live_engines(self._queue, table)
        with self._changing:
            plan = self._dispatcher.plan(expected, engines)
        publish(self._queue, plan_channel(table), plan)
        return plan

    def learn(self, batch: tq.Batch) -> None:
        """Learn from finished samples of the service, before they are acked. Returns at once; raises the error of an
        earlier lesson, if one failed.
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
        """End the thread after its last lesson. Raises the error of a failed lesson. A second call does nothing."""
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
