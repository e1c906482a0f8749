"""The process ``train`` of mode ``colocated``: the trainer, and in a thread beside it the stage that generates.

The stage has a session with the queue and a label of its own, and leases, acks and reports as in a process of its own;
what the two share is the device (`transferqueue.workflows.job.stages.device_turns`). They live and die together: a
failure of either ends the process, which is started again as a whole.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import msgspec

import transferqueue as tq
from transferqueue.adapters.protocols import GENERATE_S
from transferqueue.errors import DeadlineExceeded, Disconnected, TransferQueueError
from transferqueue.workflows.flow.events import START, Event, TimeSpan
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Context, load
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import FACTORIES, generating_task, stages
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.stages.device_turns import DeviceTurns
from transferqueue.workflows.job.training import process

_FAILED_END_S: Final = 10.0
"""Time that the stage gets to end when the trainer has failed."""


@contextmanager
def train(context: Context) -> Iterator[Callable[[], None]]:
    """Factory of ``train``: yields the loop that trains the policy while this process also generates."""
    job = context.settings(Job)
    context.shared = DeviceTurns()
    with GeneratingThread(context, job, context.shared) as generation:
        # First the engine: vLLM measures the memory that is free while it starts, and two threads must not import
        # transformers at the same time.
        context.shared.to_trainer()
        with process.train(context) as loop:

            def run() -> None:
                loop()
                generation.wait()

            yield run


class GeneratingThread:
    """The generating stage of a job in a thread. A context manager; leaving it ends the thread."""

    def __init__(self, context: Context, job: Job, turns: DeviceTurns) -> None:
        self._trainer, self._job, self._turns = context, job, turns
        self._label = f"{generating_task(job)}-{context.instance}"
        self._stop, self._failure = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, name=self._label, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._turns.failed(error or Disconnected("the trainer has ended"))
        self._thread.join(_FAILED_END_S)

    def wait(self) -> None:
        """Wait until the stage has ended with its table. Raises its error."""
        self._thread.join(GENERATE_S)
        if self._failure:
            raise self._failure[0]
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._label} did not end within {GENERATE_S:g} s of the end of the table")

    def _run(self) -> None:
        try:
            with tq.connect(self._trainer.queue.address, label=self._label) as queue:
                self._serve(queue)
        except BaseException as failure:  # noqa: BLE001  (raised in the trainer's thread)
            self._failed(failure)

    def _serve(self, queue: tq.Queue) -> None:
        began, task = time.monotonic(), generating_task(self._job)
        context = Context(
            queue=queue,
            table=queue.table(names.TABLE),
            emit=self._emit,
            settings=msgspec.json.decode(msgspec.json.encode(self._job)),
            instance=self._trainer.instance,
            directory=self._trainer.directory,
            shared=self._turns,
        )
        stage = next(stage for stage in stages(self._job) if stage.task.name == task)
        with load(FACTORIES[task])(context) as work:
            context.emit(TimeSpan(name=START, start=began, end=time.monotonic()))
            run_stage(context.table, stage, work, emit=context.emit, stop=self._stop)

    def _emit(self, event: Event) -> None:
        self._trainer.emit(msgspec.structs.replace(event, stage=self._label))

    def _failed(self, failure: BaseException) -> None:
        """Let the trainer's waits end with the error."""
        if self._stop.is_set():
            return
        sys.stderr.write("".join(traceback.format_exception(failure)))
        why = failure if isinstance(failure, TransferQueueError) else None
        why = why or Disconnected(f"{self._label} failed: {type(failure).__name__}: {failure}")
        self._failure.append(why)
        self._turns.failed(why)
        self._trainer.queue.end_waits(why)
