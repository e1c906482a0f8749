"""Runs the main job on a Ray cluster: its server is an actor, every other node has a shard, and each stage is a task.

Any node but the server's may die: its shard is lost, and its stages start elsewhere. Rows of the lost
shard are generated again, or their groups end as dropped (``lost``, ``incomplete``) and are replaced, so that
the trainer gets as many rows as the settings say, each once. With ``replicas=2`` no row is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import transferqueue as tq
from transferqueue.workflows.flow.events import Event
from transferqueue.workflows.flow.flow import Observe
from transferqueue.workflows.flow.on_ray import run_on_ray
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.grpo.job import JobSettings, jobs
from transferqueue.workflows.grpo.run import RunOutcome, run_job

ANYWHERE: Final = {"num_cpus": 0.1, "scheduling_strategy": "SPREAD"}
"""Ray options of each stage: a fraction of a core, so that the job fits any cluster, spread over the nodes."""


def run_demo_on_ray(
    settings: JobSettings,
    *,
    directory: Path,
    observe: Observe = lambda label, event: None,
    started: Callable[[tq.Deployment, Sequence[str]], None] = lambda service, labels: None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunOutcome:
    """Run the job on the Ray cluster of this process (`ray.init`), or on a local one, and return its outcome.

    Blocks until the run has ended; nothing of it is left on the cluster then. Files go to `directory` on this machine. observe:
    called for every event. started: called with the deployment and the labels of the stages before they start. options: as of
    `run_on_ray`, over the defaults `ANYWHERE`. Lost groups are replaced, whatever the settings say.
    Raises as `run_demo` and `deploy_ray` do.
    """
    settings = replace(settings, replace_lost=True)
    chosen = options or {}
    placed = {**chosen, **{job.name: {**ANYWHERE, **chosen.get(job.name, {})} for job in jobs(settings)}}
    with (
        tq.deploy_ray(f"grpo-{secrets.token_hex(4)}", shards="per-node") as service,
        tq.connect(service.address, label="supervisor") as queue,
    ):

        def on_ray(stage_jobs: Sequence[StageJob], on_event: Callable[[str, Event], None]) -> None:
            started(service, [job.label for job in stage_jobs])
            run_on_ray(service.address, stage_jobs, observe=on_event, options=placed)

        return run_job(queue, settings, on_ray, directory=directory, observe=observe)
