"""The engine's side of `generate`: a process that serves it with any engine, by the stage functions of jobs.

Weights change between two requests to the engine; with slots, requests overlap, and a request that runs goes on under
the new weights. If the service bounds staleness and the engine's weights are too old for its rows, the process waits
for newer ones first, so that no generated row is thrown away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import transferqueue as tq
from transferqueue.adapters.protocols import Generator, PartialResult, Sampling
from transferqueue.adapters.stages.generation import Generate
from transferqueue.adapters.weights import WeightUpdater
from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.workflows.dispatch.channels import dispatched
from transferqueue.workflows.flow.events import Event
from transferqueue.workflows.flow.loop.preference import PreferringWork
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import STALL_S, LeaseChoice, Stage, Where, Work
from transferqueue.workflows.service.declaration import NAME
from transferqueue.workflows.service.samples import GENERATE, check_stages
from transferqueue.workflows.service.sync import Service

ROWS: Final = 8
"""Default number of prompts that an engine has at once; prompts that it has leased cannot go to another engine."""


def serve(
    queue: tq.Queue,
    engine: Generator,
    sampling: Sampling,
    *,
    name: str = NAME,
    weights: tq.Queue | None = None,
    rows: int = ROWS,
    slots: int = 0,
    where: Where = (),
    dispatch: str = "",
    stop: threading.Event | None = None,
    emit: Callable[[Event], None] = lambda event: None,
    stall_s: float = STALL_S,
) -> int:
    """Generate for a service until it is sealed and drained, or until `stop` is set.

    Failures of the engine are handled as in `run_stage`. The caller closes the engine.

    Args:
        queue: the queue of the service.
        engine: the generator.
        sampling: how its tokens are drawn.
        name: of the service; default ``"experience"``.
        weights: the queue to pull weights from, such as the one of this host; default None: `queue`.
        rows: prompts of one request to `engine`; default 8. Finished samples are committed one by one.
        slots: prompts that run at once, in requests of at most `rows`; default 0: one request at a time.
        where: samples that this process prefers, such as ``[tq.Compare("tokens", ">=", 1000)]``; it takes others while
            none of these is ready. Default: none.
        dispatch: name of this engine, unique in the service: it is measured, and takes samples as the plans of
            `LengthRequests` say (it needs slots). Default "": it is not.
        stop: ends the loop; default None.
        emit: is called with each event; default: does nothing.
        stall_s: longest wait in seconds for the service, the first weights, newer ones, and prompts; default 1e9: no
            limit.

    Returns:
        The number of samples.

    Raises:
        DeadlineExceeded: a wait took longer than `stall_s`.
        SchemaError: the service has other stages than those of `stream_engines`.
        UsageError: `dispatch` without slots.
    """
    if dispatch and not slots:
        raise UsageError(f'dispatch="{dispatch}" with slots=0: a plan says how many samples run at once; give slots')
    service = Service.join(queue, name=name, timeout_s=stall_s)
    check_stages(service.table)
    task = service.table.tasks[GENERATE]
    stage = Stage(task=task, rows=rows, at_least=1, slots=slots, stall_s=stall_s, where=tuple(where))
    with ExitStack() as stack:
        choice: Callable[[], LeaseChoice] = LeaseChoice
        if dispatch:
            engine, plans = stack.enter_context(
                dispatched(queue, service.table.name, engine, name=dispatch, slots=slots)
            )
            choice = plans.choice
        reads_channel = getattr(engine, "reads_channel", False)
        follower = WeightUpdater(
            weights or queue, service.channel.name, engine.update_weights, reads_channel=reads_channel
        )
        _follow(follower, 0, stall_s)
        work = PreferringWork(_generating(service, engine, sampling, follower, stall_s), choice)
        return run_stage(service.table, stage, work, emit=emit, stop=stop)


def _generating(
    service: Service, engine: Generator, sampling: Sampling, follower: WeightUpdater, stall_s: float
) -> Work:
    """Return the function of the stage; it may be called from several threads at once."""
    generate = Generate(engine, sampling, part_rows=1, token_versions=True)
    following = threading.Lock()

    def work(batch: tq.Batch) -> Iterator[PartialResult]:
        with following:
            follower.follow()
            _follow(follower, _oldest_allowed(service, batch), stall_s)
        yield from generate(batch)

    return work


def _follow(follower: WeightUpdater, version: int, timeout_s: float) -> None:
    """Wait until the engine has weights of `version` or newer."""
    while follower.version < version:
        if not follower.follow(timeout_s):
            raise DeadlineExceeded(
                f"weights of version {version} or later did not come within {timeout_s:g} s; the newest here are "
                f"{follower.version}: update the service, or start the site's receiver"
            )


def _oldest_allowed(service: Service, batch: tq.Batch) -> int:
    pacing = service.table.pacing
    if pacing is None or pacing.channel is None or pacing.max_staleness is None:
        return 0
    return batch.version - pacing.max_staleness
