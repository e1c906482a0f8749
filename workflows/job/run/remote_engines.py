"""The generating processes of a job at another site: its engines there, and a server of the site that a relay brings
the weights to.

1. The job runs at one site, with the queue, the trainer and everything else; engines with ``site = NAME`` are not
   started there. `run_remote_engines` starts those at their site, until the job's table has ended. Both sites have the
   same job file.
2. Prompts and samples cross the link as rows of the job's table. A version of the weights crosses once, however many
   engines the site has: a relay writes it into a server of the site, whole or not at all, and the engines read it from
   memory there.
3. A process that dies is started again. If the site dies, its rows go to others, or back to it when it comes again: the
   job waits for them as for any generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

import transferqueue as tq
from transferqueue.errors import UsageError, listing
from transferqueue.weights import RelayProcess
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import stage_jobs
from transferqueue.workflows.job.run.machine import process_variables
from transferqueue.workflows.job.run.preflight import check_queue, placement_of, preflight, shared_variables
from transferqueue.workflows.job.run.server import RunServer
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import checked
from transferqueue.workflows.job.settings.sizes import versions_kept

RESTARTS_MAX: Final = 5
JOB_S: Final = 3600.0
"""Longest wait for the job to begin at its own site."""
STOP_S: Final = 5.0


def run_remote_engines(
    job: Job,
    site: str,
    *,
    directory: Path,
    code: Path | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Run the engines of `site` for a job that runs elsewhere, until its table has ended. Blocks for as long as that
    takes.

    directory: for logs and the server of the site, whose memory has ``queue.memory_gib``. tell: called with a line of
    text for each version that has come. Raises `UsageError` for a site without engines or a job without
    ``queue.address``, what `preflight` raises, `DeadlineExceeded` if the job does not begin within an hour, and
    `StageFailed` when an engine cannot work.
    """
    job = checked(job)
    check_site(job, site)
    placement = placement_of(job, site=site)
    tokenizer = preflight(job, code=code).renderer.tokenizer
    check_queue(job.queue.address)
    environment = shared_variables(job, tokenizer, code)
    memory = msgspec.structs.replace(job.queue, durability="memory", address="")
    with (
        RunServer(directory, memory) as server,
        tq.connect(job.queue.address, label=f"site {site}") as queue,
        _relayed(job, server.address, tell),
    ):
        queue.table(names.TABLE, timeout_s=JOB_S)
        processes = stage_jobs(placement.with_shares(job), directory, site=site, weights=server.address)
        with Flow(
            queue,
            processes,
            directory=directory / "logs",
            observe=lambda label, event: None,
            restarts_max=RESTARTS_MAX,
            environment=environment,
            environments=process_variables(job, placement),
        ) as flow:
            flow.run()


def check_site(job: Job, site: str) -> None:
    """Raise `UsageError` unless the job has engines at `site` and a queue that the site can reach."""
    sites = sorted({engine.site for engine in job.engine} - {""})
    if site not in sites:
        raise UsageError(
            f'site "{site}" has no engine; those of the job are {listing(sites) or "none"}: give an engine site = '
            f'"{site}"'
        )
    if not job.queue.address or job.queue.address.startswith("ipc:"):
        raise UsageError(
            f'queue.address="{job.queue.address}" cannot be reached from site "{site}"; start transferqueue serve with '
            "a tcp address at the job's site, and give it"
        )


@contextmanager
def _relayed(job: Job, here: str, tell: Callable[[str], object]) -> Iterator[None]:
    """Bring the weights of the job to the server `here` until the block ends. The relay connects again after errors of
    the network."""
    relay = RelayProcess([job.queue.address], here, names.POLICY, keep=versions_kept(job), tell=tell)
    thread = threading.Thread(target=relay.run, name="weight relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        relay.stop()
        thread.join(STOP_S)
