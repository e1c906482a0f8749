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
5. GPUs of the map (`transferqueue.workflows.job.devices.placement`) are the bundles of one placement group: processes
   that share a GPU have parts of one bundle, a tensor-parallel engine has a bundle of several. Ray tells each process
   which GPUs it has. Where `ray.options` gives GPUs, resources or a place to a process, they count instead of the map.
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
from transferqueue.cluster.on_ray.lookup import join_ray
from transferqueue.errors import DeadlineExceeded, UsageError, listing
from transferqueue.errors.text import counted
from transferqueue.workflows.flow.flow import Observe
from transferqueue.workflows.flow.on_ray import RayFlow
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.job.devices.placement import VISIBLE, FoundDevice, Placement
from transferqueue.workflows.job.run.machine import gpu_bytes
from transferqueue.workflows.job.run.queue_snapshots import SNAPSHOTS
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import GIB, gib

ANYWHERE: Final[Mapping[str, Any]] = {"num_cpus": 0.1, "scheduling_strategy": "SPREAD"}
"""Ray options of a process that the job says nothing of."""
ASK_S: Final = 60.0
"""Longest wait for the nodes to say the bytes of their GPUs; the first process on a node takes seconds to start."""
RESERVE_S: Final = 60.0
"""Longest wait for the GPUs of a run."""
_PLACES: Final = ("num_gpus", "resources", "scheduling_strategy", "label_selector")
"""Options that say where an actor is."""
_PARTS: Final = 10_000
"""Parts of a GPU that Ray counts."""
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
        shard_bytes=int(_shard_gib(job) * GIB),
        snapshots=path / SNAPSHOTS,
    ) as deployment:
        yield deployment.address


def _shard_gib(job: Job) -> float:
    return job.ray.shard_gib or job.queue.memory_gib


def flow_on_ray(
    job: Job,
    processes: Sequence[StageJob],
    address: str,
    *,
    environment: Mapping[str, str],
    observe: Observe,
    gpus: Mapping[str, Mapping[str, Any]] | None = None,
    **terms: Any,
) -> RayFlow:
    """Return the flow of the job's processes. environment: variables of their processes. gpus: options by
    label, of `reserved`. terms: further arguments of `RayFlow`."""
    here = str(Path.cwd())
    passed = {name: value for name, value in os.environ.items() if name in _PASSED}
    return RayFlow(
        address,
        [msgspec.structs.replace(process, place=here) for process in processes],
        observe=observe,
        options=actor_options(job, processes, gpus or {}),
        environment={**passed, **environment, "PYTHONPATH": _paths(environment)},
        **terms,
    )


def _paths(environment: Mapping[str, str]) -> str:
    """Where the processes find modules: as this one does, and in its working directory."""
    given = environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (given, str(Path.cwd()))))


def actor_options(
    job: Job, processes: Sequence[StageJob], gpus: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the options of each process's actor. gpus: those of `reserved`, by label. Raises as `check_options`
    does."""
    check_options(job, processes)
    labels = [*(process.label for process in processes), *gpus]
    return {label: {**ANYWHERE, **_said(job, label), **gpus.get(label, {})} for label in labels}


def check_options(job: Job, processes: Sequence[StageJob]) -> None:
    """Raise `UsageError` for a name in `ray.options` that is no task or process of the job."""
    known = {process.name for process in processes} | {process.label for process in processes}
    if unknown := [name for name in job.ray.options if name not in known]:
        raise UsageError(
            f"ray.options.{unknown[0]}: the job has no such task or process; it has {listing(sorted(known))}"
        )


def is_placed_by_options(job: Job, process: StageJob) -> bool:
    """Whether `ray.options` says where a process is, so that the map leaves it out."""
    return any(name in _said(job, process.label) for name in _PLACES)


def cluster_devices() -> list[FoundDevice]:
    """Return the GPUs of the cluster's nodes, which this process joins first. Each counts as many bytes as the smallest
    of them has, since Ray chooses the node of a process; 0 if a node does not say them within `ASK_S`."""
    ray = join_ray(start=True)
    nodes = [node for node in _nodes(ray) if _gpus(node)]
    least = _least_bytes(ray, nodes) if nodes else 0
    return [
        FoundDevice(name=str(place), total=least, free=least, host=node["NodeID"])
        for node in nodes
        for place in range(_gpus(node))
    ]


def node_lines(job: Job) -> list[str]:
    """Return what each node of the cluster has, and what the queue of the job takes there, for people: the server is on
    this process's node, and every other one has a shard."""
    ray = join_ray(start=True)
    here, most = ray.get_runtime_context().get_node_id(), {True: job.queue.memory_gib, False: _shard_gib(job)}
    lines = []
    for node in _nodes(ray):
        is_here, resources = node["NodeID"] == here, node["Resources"]
        memory = int(resources.get("memory", 0))
        has = f"{resources.get('CPU', 0):g} cores, {gib(memory)}"
        gpus = f", {counted(_gpus(node), 'GPU')}" if _gpus(node) else ""
        takes = int(most[is_here] * GIB)
        held = f"{'the server' if is_here else 'a shard'}, up to {gib(takes)}{', more than it has' * (takes > memory)}"
        lines.append(f"node {node['NodeManagerAddress']} {node['NodeID'][:8]} ({has}{gpus}): {held}")
    return lines


def _nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"])) if node["Alive"]]


def _gpus(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _least_bytes(ray: Any, nodes: Sequence[Mapping[str, Any]]) -> int:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(gpu_bytes)
    environment = {"env_vars": {"PYTHONPATH": _paths({})}}
    asked = [
        ask.options(
            runtime_env=environment, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    ]
    try:
        found = ray.get(asked, timeout=ASK_S)
    except ray.exceptions.RayError:  # too late, or the node lacks this package: its processes would say so
        return 0
    return min(min(sizes, default=0) for sizes in found)


@contextmanager
def reserved(placement: Placement, job: Job) -> Iterator[dict[str, dict[str, Any]]]:
    """Reserve the GPUs of a map until the block ends; yield the options of actors, by label.

    Raises `UsageError` for a tensor-parallel engine that shares a GPU, and `DeadlineExceeded` if the cluster does not
    have the GPUs free within `RESERVE_S`.
    """
    hidden = {label: {"runtime_env": {"env_vars": {VISIBLE: ""}}} for label in placement.hidden}
    groups = _groups(placement)
    if not groups:
        yield hidden
        return
    ray = join_ray(start=False)
    bundles = [
        {"GPU": len(devices), "CPU": sum(_cores(job, label) for label in labels)} for devices, labels in groups.items()
    ]
    group = ray.util.placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(RESERVE_S):
            raise DeadlineExceeded(
                f"the Ray cluster did not give {bundles} within {RESERVE_S:g} s; it has {ray.available_resources()} "
                "free: end other jobs, or give the processes fewer devices"
            )
        yield hidden | _bundle_options(group, groups)
    finally:
        ray.util.remove_placement_group(group)


def _bundle_options(group: Any, groups: Mapping[tuple[int, ...], Sequence[str]]) -> dict[str, dict[str, Any]]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        label: {
            "num_gpus": len(devices) if len(labels) == 1 else _PARTS // len(labels) / _PARTS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        }
        for place, (devices, labels) in enumerate(groups.items())
        for label in labels
    }


def _groups(placement: Placement) -> dict[tuple[int, ...], list[str]]:
    """The processes on each GPU, or on the GPUs of a tensor-parallel engine."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for process in placement.processes:
        if process.devices:
            groups.setdefault(process.devices, []).append(process.label)
    for devices in groups:
        sharing = [other for others, found in groups.items() if set(devices) & set(others) for other in found]
        if len(devices) > 1 and len(sharing) > 1:
            raise UsageError(
                f"{listing(sharing)} share GPUs {[*devices]}, and Ray gives a tensor-parallel engine whole ones: name "
                "other devices for the others"
            )
    return groups


def _cores(job: Job, label: str) -> float:
    return float(_said(job, label).get("num_cpus", ANYWHERE["num_cpus"]))


def _said(job: Job, label: str) -> dict[str, Any]:
    """What `ray.options` says of a process."""
    return {**job.ray.options.get(label.rpartition("-")[0], {}), **job.ray.options.get(label, {})}
