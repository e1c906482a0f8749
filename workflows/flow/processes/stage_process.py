"""The process of one stage: ``python -m transferqueue.workflows.flow.processes.stage_process --address … --events FD
--job JSON``.

Its standard input is its lifeline: the supervisor holds the other end. When that end closes, the
supervisor is gone or ends the flow, and the process exits at once. It needs no clean-up:
the queue detects the death of its session and gives its rows to other workers. A byte on it asks the process to drain
(`draining`).
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.errors import Corruption, DeadlineExceeded, Impossible, TransferQueueError, UsageError
from transferqueue.workflows.flow.draining import EXIT_DRAINED, DrainRequest
from transferqueue.workflows.flow.events import START, Sender, TimeSpan
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_source, run_stage
from transferqueue.workflows.flow.stage import STALL_S, Context, Stage, load

EXIT_FINAL: Final = 65
"""Exit code of a process that would fail again after a restart: the stage is broken, or its rows did not come."""


class StageJob(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one process.

    Args:
        name: of the stage or source.
        table: name of its table.
        factory: ``package.module:function``.
        stage: its task, and the rows of one call; default None: it is a source.
        settings: plain values, for the factory; default: none.
        instance: number of this process among those of the stage; default 0.
        timeout_s: seconds to wait for the server and for the table; default 30.
        loop: call the function of the factory once, without arguments; it leases rows itself until it returns. Default
            False.
        directory: folder of the run, for files of the process; default "": none.
        elastic: the process is one of several that come and go: SIGTERM by its host drains it, and it is not started
            again. Default False.
        together: processes with the same name here work only together, such as ranks: if one dies, all are started
            again. Default "": alone.
        weights: address of the server whose channels have the weights, such as that of the site; default "": the
            queue's.
        stall_s: longest wait of a source for room in seconds; default 1e9: no limit. A stage has its own.
        place: directory that relative paths are of, for a process that is started on another machine; default "": the
            process's own.
    """

    name: str
    table: str
    factory: str
    stage: Stage | None = None
    settings: dict[str, Any] = {}
    instance: int = 0
    timeout_s: float = 30.0
    loop: bool = False
    directory: str = ""
    elastic: bool = False
    together: str = ""
    weights: str = ""
    stall_s: float = STALL_S
    place: str = ""

    @property
    def label(self) -> str:
        """Name of the process, such as ``rollout-0``."""
        return f"{self.name}-{self.instance}"

    @property
    def drains(self) -> bool:
        """Whether its process can drain: it is a stage, and no source or loop, which lease rows themselves or none."""
        return self.stage is not None and not self.loop


def run_job(
    job: StageJob,
    address: str,
    emit: Sender,
    drain: DrainRequest | None = None,
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Connect, build the function that the job names, and serve it until its table ends or `drain` is requested.

    leave: called, in another thread, when the drain is requested before the process has taken a row.
    """
    started, drain = time.monotonic(), drain or DrainRequest()
    with ExitStack() as opened:
        queue = opened.enter_context(tq.connect(address, timeout_s=job.timeout_s, label=job.label))
        weights = opened.enter_context(tq.connect(job.weights, label=job.label)) if job.weights else queue
        table = queue.table(job.table, timeout_s=job.timeout_s)
        context = Context(
            queue=queue,
            table=table,
            emit=emit,
            settings=job.settings,
            instance=job.instance,
            directory=Path(job.directory) if job.directory else None,
            drain=drain,
            weights=weights,
        )
        with ExitStack() as stack:
            with drain.when_requested(leave):
                function = stack.enter_context(_opened(job, context))
            emit(TimeSpan(name=START, start=started, end=time.monotonic()))
            if job.loop:
                function()
            elif job.stage is None:
                run_source(table, function, emit=emit, stall_s=job.stall_s)
            else:
                run_stage(table, job.stage, function, emit=emit, stop=drain.requested)


@contextmanager
def _opened(job: StageJob, context: Context) -> Iterator[Any]:
    """Open the function of the job. A setting that its factory refuses, or a damaged file, is refused after a restart
    too, so it ends the flow."""
    with ExitStack() as stack:
        try:
            opened = load(job.factory)(context)
            if not hasattr(opened, "__exit__"):
                raise UsageError(
                    f"factory {job.factory!r} returned {type(opened).__name__}; it must be a context manager that "
                    "yields a function"
                )
            function = stack.enter_context(opened)
        except (UsageError, Corruption) as error:
            if type(error) not in (UsageError, Impossible, Corruption):  # NotFound: it may still be created
                raise
            raise StageFailedInProcess(_in_one_line(error)) from error
        yield function


def end_with(descriptor: int, drain: DrainRequest | None = None) -> None:
    """Exit this process as soon as the other end of the pipe `descriptor` closes; request `drain` when a byte comes."""
    drain = drain or DrainRequest()

    def watch() -> None:
        while os.read(descriptor, 1):
            drain.request()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _in_one_line(error: TransferQueueError) -> str:
    """The error as a person reads it in the output of the run, which has the last line of a dead process: errors of
    libraries, which it may quote, have several."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def main(arguments: list[str] | None = None) -> int:
    """Run one job and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m transferqueue.workflows.flow.processes.stage_process", description=__doc__
    )
    parser.add_argument("--address", required=True)
    parser.add_argument("--events", required=True, type=int, help="file descriptor for events")
    parser.add_argument("--job", required=True, help="a Job as JSON")
    options = parser.parse_args(arguments)
    job, drain = msgspec.json.decode(options.job, type=StageJob), DrainRequest()
    end_with(sys.stdin.fileno(), drain)
    if job.elastic:
        drain.request_at_sigterm()
    try:
        run_job(job, options.address, Sender(options.events), drain, lambda: os._exit(EXIT_DRAINED))
    except StageFailedInProcess as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FINAL
    except TransferQueueError as error:
        sys.stderr.write(_in_one_line(error) + "\n")
        return EXIT_FINAL if isinstance(error, DeadlineExceeded) else 1
    return EXIT_DRAINED if drain.requested.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())
