"""A run on a Ray cluster: its server is an actor on this node, every other node has a shard, and each process is an
actor anywhere.

1. The job file is the same; model, data, reward modules and the folder of the run lie where every node sees them under
   the same path.
2. Any node but the server's may die: its actors start elsewhere, its shard is lost. Rows of the lost shard are
   generated again, or their groups end as dropped and others replace them, so that the trainer gets as many as the job
   says, each once. With ``ray.replicas = 2`` no row is lost.
3. A run that ended early keeps checkpoints and snapshots in its folder, and ``--resume`` goes on with the newest of
   both: rows of the steps between them are trained once more.
4. Each process reserves what `ray.options` says, by task or by process; a tenth of a core if it says nothing, spread
   over the nodes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.errors import UsageError, listing
from transferqueue.workflows.flow.flow import Observe
from transferqueue.workflows.flow.on_ray import RayFlow
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.job.run.queue_snapshots import SNAPSHOTS
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import GIB

ANYWHERE: Final[Mapping[str, Any]] = {"num_cpus": 0.1, "scheduling_strategy": "SPREAD"}
"""Ray options of a process that the job says nothing of."""
_PASSED: Final = ("OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables of this process that its actors get too."""


@contextmanager
def deployed(job: Job, folder: Path) -> Iterator[str]:
    """Start the server and the shards of the run in `folder`; yield the address. They end with the block.

    Raises `AlreadyExists` while the run goes on elsewhere in the cluster, and as `deploy_ray` does.
    """
    path = folder.absolute()
    name = f"{job.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    memory = int(job.queue.memory_gib * GIB)
    with tq.deploy_ray(
        name,
        durability=job.queue.durability,
        arena_bytes=memory,
        shards="per-node",
        shard_bytes=int(job.ray.shard_gib * GIB) or memory,
        snapshots=path / SNAPSHOTS,
    ) as deployment:
        yield deployment.address


def flow_on_ray(
    job: Job,
    processes: Sequence[StageJob],
    address: str,
    *,
    environment: Mapping[str, str],
    observe: Observe,
    **terms: Any,
) -> RayFlow:
    """Return the flow of the job's processes. environment: variables of their processes. terms: further arguments of
    `RayFlow`."""
    here = str(Path.cwd())
    passed = {name: value for name, value in os.environ.items() if name in _PASSED}
    paths = os.pathsep.join(filter(None, (environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", ""), here)))
    return RayFlow(
        address,
        [msgspec.structs.replace(process, place=here) for process in processes],
        observe=observe,
        options=actor_options(job, processes),
        environment={**passed, **environment, "PYTHONPATH": paths},
        **terms,
    )


def actor_options(job: Job, processes: Sequence[StageJob]) -> dict[str, dict[str, Any]]:
    """Return the options of each process's actor. Raises `UsageError` for a name in `ray.options` that is no task or
    process of the job.
    """
    known = {process.name for process in processes} | {process.label for process in processes}
    if unknown := [name for name in job.ray.options if name not in known]:
        raise UsageError(
            f"ray.options.{unknown[0]}: the job has no such task or process; it has {listing(sorted(known))}"
        )
    return {
        process.label: {**ANYWHERE, **job.ray.options.get(process.name, {}), **job.ray.options.get(process.label, {})}
        for process in processes
    }
