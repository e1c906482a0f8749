"""The shards of a deployment on Ray: which nodes get one, their actors started and ended.

The law: a shard is an actor with a name beside the deployment's (``NAME.shard-0``, ...), bound to its node, made after the server
listens and ended before it. Should its node die, so does it; the deployment goes on without (decision 24).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from transferqueue.cluster.on_ray.messages import SAID, DeploymentName, DeployRefused, ShardSpec, read, write
from transferqueue.errors import UsageError, from_wire
from transferqueue.limits import SESSIONS_MAX

PER_NODE: Final = "per-node"
END_S: Final = 30.0


def check_shards(shards: int | Literal["per-node"], durability: str) -> None:
    """`UsageError` for what is no number of shards, and for shards of a level that they cannot keep."""
    if shards != PER_NODE and (
        not isinstance(shards, int) or isinstance(shards, bool) or not 0 <= shards < SESSIONS_MAX
    ):
        raise UsageError(f'shards {shards!r} is no number of shards; give 0 to {SESSIONS_MAX - 1}, or "{PER_NODE}"')
    if shards and durability == "disk":
        raise UsageError(
            f"shards {shards!r} and durability disk do not go together: their memory does not survive a reboot; give durability "
            '"process", or a larger arena_bytes'
        )


def places(nodes: Iterable[Mapping[str, Any]], server: str, shards: int | Literal["per-node"]) -> list[str]:
    """The node of each shard. nodes: as ``ray.nodes()`` gives them. server: id of the node of the server, the last to get any."""
    alive = sorted((str(one["NodeID"]) for one in nodes if one["Alive"]), key=lambda one: (one == server, one))
    if isinstance(shards, str):
        return [one for one in alive if one != server]
    return [alive[at % len(alive)] for at in range(shards)]


def start_shards(
    ray: Any,
    named: DeploymentName,
    nodes: Sequence[str],
    arena_bytes: int,
    max_restarts: int,
    *,
    detached: bool,
    timeout_s: float,
) -> list[Any]:
    """An actor on each of these nodes; returns when all have joined. Otherwise none is left, and it raises what hindered one."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from transferqueue.cluster.on_ray.shard_actor import ShardActor  # only who deploys loads a server

    made: list[Any] = []
    try:
        for at, node in enumerate(nodes):
            name = f"{named.name}.shard-{at}"
            options = {
                "name": name,
                "namespace": named.namespace,
                "lifetime": "detached" if detached else None,
                "num_cpus": 0,
                "max_restarts": max_restarts,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            told = write(ShardSpec(named, arena_bytes, name))
            made.append(ray.remote(ShardActor).options(**options).remote(told))
        for said in ray.get([one.joined.remote() for one in made], timeout=timeout_s):
            _check(said)
    except BaseException:
        stop_shards(made)
        raise
    return made


def _check(said: str) -> None:
    """Raise what a shard was refused with."""
    if not said.startswith("tcp://"):
        refused = read(said, SAID)
        if isinstance(refused, DeployRefused):
            raise from_wire(refused.error, refused.text)


def stop_shards(actors: Sequence[Any]) -> None:
    """End these actors, and give their memory back."""
    if not actors:
        return
    import ray

    ended = [one.stop.remote() for one in actors]
    with suppress(ray.exceptions.RayError):  # dead already, or killed below
        ray.wait(ended, num_returns=len(ended), timeout=END_S)
    for one in actors:
        ray.kill(one, no_restart=True)
