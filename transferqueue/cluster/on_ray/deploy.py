"""A deployment on a Ray cluster: made by its owner, found by everyone else.

The law:

- A deployment is a named actor in a namespace of its own kind, so any driver and any actor of the cluster finds it, whatever
  namespace it runs in; names keep several apart.
- Whoever made it owns it: closing its `Deployment` ends the service, and so does, unless it is detached, the end of
  its driver or of the last handle on it. Everyone else is a guest: queues come and go, also by SIGKILL, and the service stays.
- It stays on one node (`nodes`), and Ray starts it again there; clients go on with the next life (decision 9).
- It is one server, or several that are used as one, each an actor of its own on a node of its own while there are some.
- Its shards are actors beside it, one for each node or as many as were asked for; they end with it (`lenders`).
- Ray carries names, ways and keys, once for each queue that is opened. No row and no call crosses it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from transferqueue.cluster.on_ray.messages import (
    NAME,
    NAMESPACE,
    SAID,
    DeploymentName,
    DeployRefused,
    DeploySpec,
    Endpoints,
    checked,
    read,
    write,
)
from transferqueue.cluster.on_ray.nodes import choose
from transferqueue.cluster.on_ray.shard_actors import check_shards, places, start_shards, stop_shards
from transferqueue.errors import AlreadyExists, NotFound, Unreachable, UsageError, from_wire
from transferqueue.limits import COORDINATORS_MAX, RESTARTS_MAX, parse_bytes
from transferqueue.transport import this_host
from transferqueue.transport.security.keys import ClientKeys, read_token
from transferqueue.wire.home_coordinator import CoordinatorIndex

DEPLOY_S: Final = 60.0
"""Ray starts a worker in a second or two; on a busy cluster it may have to wait for one."""
LEVELS: Final = ("memory", "process", "disk")


class Deployment:
    """A service on Ray. Its owner ends it with `close` or ``with``; for whom else it is, nothing happens then."""

    def __init__(
        self, named: DeploymentName, actors: Mapping[DeploymentName, Any], *, owned: bool, lenders: Sequence[Any] = ()
    ) -> None:
        self.address: Final = str(named)
        """What `connect` takes, in any process of the cluster."""
        self.owned: Final = owned
        """Whether `close` ends the service."""
        self._actors = dict(actors)
        self._lenders = list(lenders)

    def token(self, role: str = "producer", timeout_s: float = DEPLOY_S) -> str:
        """A join token for processes outside Ray; role: admin, producer, consumer or observer (SECURITY.md). A password.
        Of several coordinators the tokens of all, joined by commas."""
        return ",".join(_ways(named, actor, timeout_s, role).token for named, actor in self._actors.items())

    def close(self) -> None:
        """If this owns the service: end it, and everything of it that no `state` keeps. Again: nothing."""
        actors, self._actors = self._actors, {}
        if actors and self.owned:
            stop_shards(self._lenders)
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
    node: str | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    port: int = 0,
    max_restarts: int = RESTARTS_MAX,
    detached: bool = False,
    exist_ok: bool = False,
    timeout_s: float = DEPLOY_S,
) -> Deployment:
    """Start a server as a Ray actor; returns when it listens. `connect` finds it as ``ray://NAMESPACE/NAME``, and the one with
    default names as ``ray``.

    Joins the Ray cluster of this process, or starts one on this machine. durability: ``process`` lets everything survive the
    death of the actor, ``disk`` that of its machine, ``memory`` nothing. state: an absolute path on its node; a later
    deployment that is given it goes on from there. None: a directory of its own, which ends with it. arena_bytes, snapshots: as of
    `transferqueue serve`. node: a Ray node id; None: this process's node if it has `resources` and `labels`, else the first that
    does. The actor reserves these resources (``{"CPU": 1}``; None: nothing) and stays on its node.
    shards: further shards of memory, each an actor: so many, spread over the nodes, or ``"per-node"``: one on each node but the
    server's, which lends its own. shard_bytes: most that each of them lends. What lies in one is lost with its node (`replicas`
    of `create_table` says otherwise), and the others go on.
    coordinators: servers that are used as one, each with the tables that its name says (docs/CLUSTER.md), on as many of the nodes that will do
    as there are. Each has its `state` and `snapshots` in a directory of its own there, its arena of `arena_bytes`, and `shards` of its own.
    port: where it listens for other machines, with keys; 0: a free one, kept. max_restarts: how often Ray starts it again; -1: ever.
    detached: it outlives the `Deployment` and this driver, until that is closed or by ``ray.kill``. exist_ok: if there is one, that one, as a guest.

    `UsageError` where this cannot be, `AlreadyExists` for a name in use, `Unreachable` if it does not listen within `timeout_s`;
    then nothing was started.

    Example:
        >>> with tq.deploy_ray(durability="process") as deployment:  # doctest: +SKIP
        ...     queue = tq.connect("ray")
    """
    named = checked(DeploymentName(namespace, name))
    deploys = _specs_per_coordinator(
        _checked_deploy(named, durability, state, arena_bytes, snapshots, port, max_restarts), coordinators
    )
    check_shards(shards, durability)
    lent = parse_bytes(shard_bytes) if shard_bytes is not None else 0
    ray = _joined(start=True)
    wanted = dict(resources or {})
    there = choose(
        ray.nodes(), here=ray.get_runtime_context().get_node_id(), node=node, resources=wanted, labels=labels or {}
    )
    try:
        actors = {deploys[0].named: _start(ray, deploys[0], there[0], wanted, max_restarts, detached)}
    except ray.exceptions.ActorAlreadyExistsError:
        if not exist_ok:
            raise AlreadyExists(
                f"deployment {named} exists; join it with connect, take another name, or give exist_ok=True"
            ) from None
        found = _found(ray, named, timeout_s, "observer")
        return Deployment(named, {one: _actor(ray, one) for one in found}, owned=False)
    lenders: list[Any] = []
    try:
        for deploy, at in list(zip(deploys, cycle(there), strict=False))[1:]:
            actors[deploy.named] = _start(ray, deploy, at, wanted, max_restarts, detached)
        for one, actor in actors.items():
            _ways(one, actor, timeout_s)
        for deploy, at in zip(deploys, cycle(there), strict=False):
            lenders += start_shards(
                ray,
                deploy.named,
                places(ray.nodes(), at, shards),
                lent,
                max_restarts,
                detached=detached,
                timeout_s=timeout_s,
            )
    except BaseException:
        stop_shards(lenders)
        _end_all(actors)
        raise
    return Deployment(named, actors, owned=True, lenders=lenders)


def ways_to(named: DeploymentName, timeout_s: float, *, near: bool) -> dict[str, tuple[str, ClientKeys | None]]:
    """Where each server of this deployment listens, as seen from this process, and the keys for it; by its name.

    near: its socket, if that can be opened from here; else always tcp. `NotFound` lists the deployments there are,
    `Unreachable` if an actor does not say it in time.
    """
    found = _found(_joined(start=False), named, timeout_s)
    return {str(one): _way(ways, near=near) for one, ways in found.items()}


def _way(ways: Endpoints, *, near: bool) -> tuple[str, ClientKeys | None]:
    if near and ways.host == this_host() and os.access(ways.ipc.removeprefix("ipc://"), os.R_OK | os.W_OK):
        return ways.ipc, None
    token = read_token(ways.token)
    return token.address, token.keys


def _found(ray: Any, named: DeploymentName, timeout_s: float, role: str = "admin") -> dict[DeploymentName, Endpoints]:
    """The ways to all coordinators of a deployment, or to the one that is named alone."""
    first = _ways(named, _actor(ray, named), timeout_s, role)
    if first.seats == 1 or named.is_one_seat:
        return {named: first}
    rest = [named.of_seat(number) for number in range(2, first.seats + 1)]
    return {named.of_seat(1): first} | {one: _ways(one, _actor(ray, one), timeout_s, role) for one in rest}


def _specs_per_coordinator(deploy: DeploySpec, coordinators: int) -> list[DeploySpec]:
    """What each coordinator is told."""
    whole = isinstance(coordinators, int) and not isinstance(coordinators, bool)
    if not whole or not 1 <= coordinators <= COORDINATORS_MAX:
        raise UsageError(f"coordinators {coordinators!r} is no number of them; give 1 to {COORDINATORS_MAX}")
    if deploy.named.is_one_seat:
        raise UsageError(
            f"deployment name {deploy.named.name!r} is as that of one coordinator of several; take another"
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
        named=deploy.named.of_seat(seat.number),
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
        raise UsageError(f"durability {durability!r} is none; there are {', '.join(LEVELS)}")
    if durability == "memory" and state is not None:
        raise UsageError(
            f"state {os.fspath(state)!r} is given with durability memory, which keeps nothing; leave it out, or ask for process"
        )
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} is none; give one from 1 to 65535, or 0 for a free one")
    if max_restarts < -1:
        raise UsageError(f"max_restarts {max_restarts} is no count; give 0 or more, or -1 for no end")
    return DeploySpec(
        named,
        secrets.token_hex(8),
        durability,
        _absolute("state", state),
        parse_bytes(arena_bytes) if arena_bytes is not None else 0,
        port,
        _absolute("snapshots", snapshots),
    )


def _absolute(what: str, path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return ""
    if not Path(path).is_absolute():
        raise UsageError(
            f"{what} {os.fspath(path)!r} is relative, and its node has other directories; give the whole path"
        )
    return os.fspath(path)


def _joined(*, start: bool) -> Any:
    """Ray, this process a part of it. start: a cluster on this machine if there is none."""
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError(
            "a deployment on Ray was named, and Ray is not installed here: pip install 'asyncflow-transferqueue[ray]'"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address=None if start else "auto", configure_logging=False)
        except ConnectionError as error:
            raise Unreachable(
                f"this process belongs to no Ray cluster ({error}); call ray.init first, or start one with deploy_ray"
            ) from error
    return ray


def _start(
    ray: Any, deploy: DeploySpec, node: str, resources: dict[str, float], max_restarts: int, detached: bool
) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from transferqueue.cluster.on_ray.coordinator_actor import CoordinatorActor  # only who deploys loads a server

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


def _actor(ray: Any, named: DeploymentName) -> Any:
    try:
        return ray.get_actor(named.actor, namespace=named.namespace)
    except ValueError:
        there = [
            str(DeploymentName(one["namespace"], one["name"]))
            for one in ray.util.list_named_actors(all_namespaces=True)
        ]
        raise NotFound(
            f"deployment {named} does not exist in this Ray cluster; its named actors are {', '.join(sorted(there)) or 'none'}: "
            "make it with deploy_ray"
        ) from None


def ways_of(named: DeploymentName, role: str, timeout_s: float = DEPLOY_S) -> Endpoints:
    """The ways to the server of this deployment, for a process of its Ray cluster that takes this role. Errors as of `way_to`."""
    return _ways(named, _actor(_joined(start=False), named), timeout_s, role)


def _ways(named: DeploymentName, actor: Any, timeout_s: float, role: str = "admin") -> Endpoints:
    with _ray_errors_as_ours(named, timeout_s) as ray:
        told = read(ray.get(actor.ways.remote(role), timeout=timeout_s), SAID)
    if isinstance(told, DeployRefused):
        raise from_wire(told.error, told.text)
    return told


@contextmanager
def _ray_errors_as_ours(named: DeploymentName, timeout_s: float) -> Iterator[Any]:
    import ray

    try:
        yield ray
    except ray.exceptions.GetTimeoutError:
        raise Unreachable(
            f"deployment {named} did not answer within {timeout_s:g} s; its actor waits for its node, for resources or for a "
            "restart: ray list actors says which"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise Unreachable(f"deployment {named} is dead, and Ray starts it no more: {error}") from error


def _end_all(actors: Mapping[DeploymentName, Any]) -> None:
    for named, actor in actors.items():
        _end(named, actor)


def _end(named: DeploymentName, actor: Any) -> None:
    """Returns when Ray knows it, so that the name is free."""
    import ray

    with suppress(ray.exceptions.RayError):  # dead already, or killed below
        ray.get(actor.stop.remote(), timeout=DEPLOY_S)
    ray.kill(actor, no_restart=True)
    with _ray_errors_as_ours(named, DEPLOY_S), suppress(ray.exceptions.RayActorError):
        ray.get(actor.ways.options(max_task_retries=0).remote(), timeout=DEPLOY_S)
