"""Starts and ends a deployment on a Ray cluster.

- A deployment is a named actor in its own Ray namespace, so any driver and any actor of the cluster finds it by its
  name, in any namespace.
- The process that deploys it owns it. Closing its `Deployment` ends the service; so does the end of the driver or of
  the last handle, unless the deployment is detached. Other processes only connect: the service survives their end, also
  by SIGKILL.
- It stays on one node (`nodes`), and Ray restarts it there; clients reconnect to the restarted server
  (docs/decisions/durability.md).
- It has one coordinator, or several that are used as one. Each coordinator is an actor, spread over the nodes that fit.
- Its shards are further actors, one for each node or as many as were asked for (`shard_actors`). They end with it.
- Ray carries names, endpoints and keys, once for each queue that is opened. It carries no row and no request.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from transferqueue.cluster.on_ray.lookup import (
    DEPLOY_S,
    all_endpoints,
    ask_endpoints,
    find_actor,
    join_ray,
    ray_errors_as_ours,
)
from transferqueue.cluster.on_ray.messages import NAME, NAMESPACE, DeploymentName, DeploySpec, checked, write
from transferqueue.cluster.on_ray.nodes import choose
from transferqueue.cluster.on_ray.shard_actors import check_shards, places, start_shards, stop_shards
from transferqueue.errors import AlreadyExists, UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import COORDINATORS_MAX, RESTARTS_MAX, check_path, parse_bytes
from transferqueue.server.durability_level import Level
from transferqueue.wire.home_coordinator import CoordinatorIndex

LEVELS: Final = tuple(Level)


class Deployment:
    """A handle on a deployment on Ray. Made by `deploy_ray`.

    `close`, and the end of a ``with`` block, end the deployment if this handle owns it, and do nothing otherwise.

    Example:
        >>> import transferqueue as tq
        >>> with tq.deploy_ray(durability="process") as deployment:  # doctest: +SKIP
        ...     print(deployment.address)
        ray://transferqueue/default
    """

    def __init__(
        self, named: DeploymentName, actors: Mapping[DeploymentName, Any], *, owned: bool, shards: Sequence[Any] = ()
    ) -> None:
        self.address: Final = str(named)
        """The address that `connect` takes, in any process of the cluster."""
        self.owned: Final = owned
        """Whether `close` ends the deployment."""
        self._actors = dict(actors)
        self._shards = list(shards)

    def token(self, role: str = "producer", timeout_s: float = DEPLOY_S) -> str:
        """Return a join token for processes outside Ray. Treat it as a password.

        Of several coordinators it is the tokens of all, joined by commas. Blocks until they answer.

        Args:
            role: ``"admin"``, ``"producer"``, ``"consumer"`` or ``"observer"`` (`transferqueue docs security`); default
                ``"producer"``.
            timeout_s: seconds to wait for each coordinator; default 60.

        Raises:
            Unreachable: a coordinator did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.deploy_ray(durability="process") as deployment:  # doctest: +SKIP
            ...     deployment.token("consumer")  # for connect in a process outside Ray
            'tqjoin_...'
        """
        return ",".join(ask_endpoints(named, actor, timeout_s, role).token for named, actor in self._actors.items())

    def close(self) -> None:
        """End the deployment if this handle owns it, and remove all that it keeps outside `state`.

        A second call does nothing.

        Example:
            >>> import transferqueue as tq
            >>> deployment = tq.deploy_ray()  # doctest: +SKIP
            >>> deployment.close()  # doctest: +SKIP
            >>> deployment  # doctest: +SKIP
            <Deployment ray://transferqueue/default, owned>
        """
        actors, self._actors = self._actors, {}
        if actors and self.owned:
            stop_shards(self._shards)
            _end_all(actors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Deployment {self.address}{', owned' if self.owned else ''}>"


def deploy_ray(
    name: str = NAME,
    *,
    namespace: str = NAMESPACE,
    coordinators: int = 1,
    durability: str = "process",
    state: str | os.PathLike[str] | None = None,
    arena_bytes: int | str | None = None,
    shards: int | Literal["per-node"] = 0,
    shard_bytes: int | str | None = None,
    snapshots: str | os.PathLike[str] | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    spill_bytes: int | str | None = None,
    node: str | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    port: int = 0,
    max_restarts: int = RESTARTS_MAX,
    detached: bool = False,
    exist_ok: bool = False,
    timeout_s: float = DEPLOY_S,
) -> Deployment:
    """Start a server as a Ray actor, and return when it listens.

    `connect` finds it as ``ray://NAMESPACE/NAME``, and the one with the default names as ``ray``. It joins the Ray
    cluster of this process, or starts one on this machine. After an error nothing of the new deployment is left. The
    bytes in a remote shard are lost with its node, unless the table has `replicas`; the deployment goes on.

    Args:
        name: of the deployment; default ``"default"``.
        namespace: the Ray namespace of its actors; default ``"transferqueue"``.
        coordinators: servers that share the work, 1 to 64; default 1. Each has the tables whose names hash to it
            (`transferqueue docs coordinators`), its own arena of `arena_bytes`, its own `shards`, and its own directory
            under `state` and `snapshots`. They are spread over the nodes that fit.
        durability: default ``"process"``: everything survives the death of the actor; ``"disk"``: that of its machine;
            ``"memory"``: nothing.
        state: an absolute path on the node; a later deployment with the same path continues from it. Default None: a
            directory that is removed with the deployment.
        arena_bytes: as of `transferqueue serve`; default None.
        shards: remote shards of memory, each an actor: a number, spread over the nodes, or ``"per-node"``: one on each
            node except the server's, which has its own arena. Default 0.
        shard_bytes: the most that each shard may hold, as a number or text such as ``"64GiB"``; default None.
        snapshots: an absolute path, as of `transferqueue serve`; default None.
        spill_dir: an absolute path on the server's node for cold rows when its arena fills, with durability
            ``"memory"`` (`transferqueue docs disks`); default None.
        spill_bytes: the most bytes there, as a number or text such as ``"200GiB"``; default None.
        node: a Ray node id; default None: this process's node if it has `resources` and `labels`, else the first node
            that has.
        resources: Ray resources that the actor reserves, such as ``{"CPU": 1}``; default None: nothing.
        labels: Ray labels that the node must have; default None.
        port: the tcp port for other machines, with keys; default 0: a free one, kept across restarts.
        max_restarts: how often Ray may restart the actor; default 30; -1: without limit.
        detached: the deployment outlives this driver and this `Deployment`; `close` or ``ray.kill`` ends it. Default
            False.
        exist_ok: if the name is in use, return a handle on that deployment, which does not own it; default False.
        timeout_s: seconds that each step may take; default 60.

    Returns:
        The handle that owns the deployment.

    Raises:
        AlreadyExists: the name is in use.
        Impossible: no node fits.
        Unreachable: a server does not listen in time.
        UsageError: arguments that do not fit each other.

    Example:
        >>> import transferqueue as tq
        >>> with tq.deploy_ray(durability="process") as deployment:  # doctest: +SKIP
        ...     queue = tq.connect("ray")  # in any task, actor or driver of the cluster
        ...     queue.create_table("rollouts")
        <Table 'rollouts' at ray://transferqueue/default: 0 fields, no tasks, at most 65536 rows>
    """
    named = checked(DeploymentName(namespace, name))
    deploys = _specs_per_coordinator(
        msgspec.structs.replace(
            _checked_deploy(named, durability, state, arena_bytes, snapshots, port, max_restarts),
            **_spilled(durability, spill_dir, spill_bytes),
        ),
        coordinators,
    )
    check_shards(shards, durability)
    if shard_bytes is not None and shards == 0:
        raise UsageError(f"shard_bytes {shard_bytes!r} is given without shards; give shards too, or leave it out")
    shard_arena_bytes = parse_bytes(shard_bytes) if shard_bytes is not None else 0
    ray = join_ray(start=True)
    wanted = dict(resources or {})
    candidates = choose(
        ray.nodes(), here=ray.get_runtime_context().get_node_id(), node=node, resources=wanted, labels=labels or {}
    )
    try:
        actors = {deploys[0].named: _start(ray, deploys[0], candidates[0], wanted, max_restarts, detached)}
    except ray.exceptions.ActorAlreadyExistsError:
        if not exist_ok:
            raise AlreadyExists(
                f"deployment {named} exists; join it with connect, take another name, or give exist_ok=True"
            ) from None
        endpoints = all_endpoints(ray, named, timeout_s, "observer")
        return Deployment(named, {name: find_actor(ray, name) for name in endpoints}, owned=False)
    shard_actors: list[Any] = []
    with OnFailure(_end_all, actors), OnFailure(stop_shards, shard_actors):
        for deploy, node_id in list(zip(deploys, cycle(candidates), strict=False))[1:]:
            actors[deploy.named] = _start(ray, deploy, node_id, wanted, max_restarts, detached)
        for coordinator, actor in actors.items():
            ask_endpoints(coordinator, actor, timeout_s)
        for deploy, node_id in zip(deploys, cycle(candidates), strict=False):
            shard_actors += start_shards(
                ray,
                deploy.named,
                places(ray.nodes(), node_id, shards),
                shard_arena_bytes,
                max_restarts,
                detached=detached,
                timeout_s=timeout_s,
            )
    return Deployment(named, actors, owned=True, shards=shard_actors)


def _specs_per_coordinator(deploy: DeploySpec, coordinators: int) -> list[DeploySpec]:
    """The spec of each coordinator."""
    whole = isinstance(coordinators, int) and not isinstance(coordinators, bool)
    if not whole or not 1 <= coordinators <= COORDINATORS_MAX:
        raise UsageError(f"coordinators {coordinators!r} is out of range; give 1 to {COORDINATORS_MAX}")
    if deploy.named.is_one_coordinator:
        raise UsageError(
            f"deployment name {deploy.named.name!r} is reserved for one coordinator of several; take another"
        )
    if coordinators == 1:
        return [deploy]
    if deploy.port:
        raise UsageError(
            f"port {deploy.port} is given with {coordinators} coordinators; leave it out: each finds its own"
        )
    return [
        _spec_for(deploy, CoordinatorIndex(number + 1, coordinators, deploy.named.name))
        for number in range(coordinators)
    ]


def _spec_for(deploy: DeploySpec, seat: CoordinatorIndex) -> DeploySpec:
    own = f"coordinator-{seat.number}"
    return msgspec.structs.replace(
        deploy,
        named=deploy.named.of_coordinator(seat.number),
        seat=seat,
        state=f"{deploy.state}/{own}" if deploy.state else "",
        snapshots=f"{deploy.snapshots or 'snapshots'}/{own}",
    )


def _checked_deploy(
    named: DeploymentName,
    durability: str,
    state: str | os.PathLike[str] | None,
    arena_bytes: int | str | None,
    snapshots: str | os.PathLike[str] | None,
    port: int,
    max_restarts: int,
) -> DeploySpec:
    if durability not in LEVELS:
        raise UsageError(f"durability {durability!r} is unknown; choose one of {', '.join(LEVELS)}")
    if not Level(durability).survives_crash and state is not None:
        raise UsageError(
            f"state {os.fspath(state)!r} is given with durability memory, which keeps nothing; leave it out, or ask "
            "for process"
        )
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} is out of range; give one from 1 to 65535, or 0 for a free one")
    if max_restarts < -1:
        raise UsageError(f"max_restarts {max_restarts} is out of range; give 0 or more, or -1: no limit")
    return DeploySpec(
        named,
        secrets.token_hex(8),
        durability,
        _absolute("state", state),
        parse_bytes(arena_bytes) if arena_bytes is not None else 0,
        port,
        _absolute("snapshots", snapshots),
    )


def _spilled(
    durability: str, spill_dir: str | os.PathLike[str] | None, spill_bytes: int | str | None
) -> dict[str, Any]:
    """The parameters of a spill file, after checking them."""
    if spill_dir is None and spill_bytes is None:
        return {}
    if spill_dir is None or spill_bytes is None:
        raise UsageError(
            f"spill_dir {spill_dir!r} and spill_bytes {spill_bytes!r} do not go together: one is the directory of cold "
            "rows, the other their most bytes; give both, or neither"
        )
    if Level(durability).survives_crash:
        raise UsageError(
            f"spill_dir {os.fspath(spill_dir)!r} is given with durability {durability}: spilled rows end with the "
            'process, and those of the deployment do not; give durability="memory", or leave spill_dir out'
        )
    return {"spill_dir": _absolute("spill_dir", spill_dir), "spill_bytes": parse_bytes(spill_bytes)}


def _absolute(what: str, path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return ""
    text = check_path(what, path)
    if not Path(text).is_absolute():
        raise UsageError(f"{what} {text!r} is relative, but its node has other directories; give an absolute path")
    return text


def _start(
    ray: Any, deploy: DeploySpec, node: str, resources: dict[str, float], max_restarts: int, detached: bool
) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from transferqueue.cluster.on_ray.coordinator_actor import CoordinatorActor  # only deploying loads a server

    resources = dict(resources)
    options = {
        "name": deploy.named.actor,
        "namespace": deploy.named.namespace,
        "lifetime": "detached" if detached else None,
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "max_restarts": max_restarts,
        "max_task_retries": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(CoordinatorActor).options(**options).remote(write(deploy))


def _end_all(actors: Mapping[DeploymentName, Any]) -> None:
    for named, actor in actors.items():
        _end(named, actor)


def _end(named: DeploymentName, actor: Any) -> None:
    """Stop the actor, and return when Ray has registered its end, so that the name is free."""
    import ray

    with suppress(ray.exceptions.RayError):  # the actor is dead, or is killed below
        ray.get(actor.stop.remote(), timeout=DEPLOY_S)
    ray.kill(actor, no_restart=True)
    with ray_errors_as_ours(named, DEPLOY_S), suppress(ray.exceptions.RayActorError):
        ray.get(actor.ways.options(max_task_retries=0).remote(), timeout=DEPLOY_S)
