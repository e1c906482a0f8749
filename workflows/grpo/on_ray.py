"""The main job on a Ray cluster: its server an actor, a shard on every other node, each stage a task somewhere.

A node may go, but for that of the server: the shard on it is lost, and its stages are started elsewhere. Rows that the
shard held are generated again, or their groups end as dropped (``lost``, ``incomplete``) and others take their place, so that
as many rows are trained as the settings say, each once. With ``replicas=2`` none is lost.
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
from transferqueue.workflows.flow.stage_process import StageJob
from transferqueue.workflows.grpo.job import JobSettings, jobs
from transferqueue.workflows.grpo.run import RunOutcome, run_job

ANYWHERE: Final = {"num_cpus": 0.1, "scheduling_strategy": "SPREAD"}
"""A little of a core each: so the job fits on any cluster, and Ray deals its stages out over the nodes."""


def run_demo_on_ray(
    settings: JobSettings,
    *,
    directory: Path,
    observe: Observe = lambda label, event: None,
    started: Callable[[tq.Deployment, Sequence[str]], None] = lambda service, labels: None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunOutcome:
    """Run the job on the Ray cluster of this process (`ray.init`), or on one of this machine, and return its outcome.

    Blocks until the run has ended; nothing of it is left on the cluster then. Files go to ``directory``, here. ``observe``
    is called for every event, ``started`` with the service and the labels of the stages before these start. options: as of
    `run_on_ray`; what they do not say is `ANYWHERE`. Lost groups are replaced, whatever the settings say.
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
