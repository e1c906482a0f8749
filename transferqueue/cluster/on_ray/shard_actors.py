"""Chooses the nodes of a deployment's shards, and starts and stops their actors.

A shard is an actor named after the deployment (``NAME.shard-0``, ...) and bound to its node. It starts after the server
listens and ends before the server does. If its node dies, the shard is lost, and the deployment goes on
(docs/decisions/shards.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from transferqueue.cluster.on_ray.messages import REPLY, DeploymentName, DeployRefused, ShardSpec, read, write
from transferqueue.errors import UsageError, from_wire
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import SHARDS_MAX
from transferqueue.server.durability_level import Level

PER_NODE: Final = "per-node"
END_S: Final = 30.0


def check_shards(shards: int | Literal["per-node"], durability: str) -> None:
    """Raise `UsageError` for an invalid number of shards, and for shards with a durability that they cannot keep."""
    if shards != PER_NODE and (not isinstance(shards, int) or isinstance(shards, bool) or not 0 <= shards < SHARDS_MAX):
        raise UsageError(f'shards {shards!r} is not a number of shards; give 0 to {SHARDS_MAX - 1}, or "{PER_NODE}"')
    if shards and Level(durability).survives_reboot:
        raise UsageError(
            f"shards {shards!r} and durability disk do not go together: their memory does not survive a reboot; give "
            'durability "process", or a larger arena_bytes'
        )


def places(nodes: Iterable[Mapping[str, Any]], server: str, shards: int | Literal["per-node"]) -> list[str]:
    """The node id of each shard. `nodes` are from ``ray.nodes()``. `server`, the id of the server's node, comes
    last."""
    alive = sorted(
        (str(node["NodeID"]) for node in nodes if node["Alive"]), key=lambda node_id: (node_id == server, node_id)
    )
    if isinstance(shards, str):
        return [node_id for node_id in alive if node_id != server]
    return [alive[number % len(alive)] for number in range(shards)]


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
    """Start a shard actor on each of these nodes, and return when all have joined. If one fails, stop all and raise its
    error."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from transferqueue.cluster.on_ray.shard_actor import (
        ShardActor,
    )  # loads the server, which only a deploying process needs

    actors: list[Any] = []
    with OnFailure(stop_shards, actors):
        for number, node in enumerate(nodes):
            name = f"{named.name}.shard-{number}"
            options = {
                "name": name,
                "namespace": named.namespace,
                "lifetime": "detached" if detached else None,
                "num_cpus": 0,
                "max_restarts": max_restarts,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            spec_text = write(ShardSpec(named, arena_bytes, name))
            actors.append(ray.remote(ShardActor).options(**options).remote(spec_text))
        for reply in ray.get([actor.joined.remote() for actor in actors], timeout=timeout_s):
            _check(reply)
    return actors


def _check(reply: str) -> None:
    """Raise the error of a shard's refusal, if it refused."""
    if not reply.startswith("tcp://"):
        refused = read(reply, REPLY)
        if isinstance(refused, DeployRefused):
            raise from_wire(refused.error, refused.text)


def stop_shards(actors: Sequence[Any]) -> None:
    """Stop these actors, which frees their memory. Waits 30 s at most, then kills them."""
    if not actors:
        return
    import ray

    stopping = [actor.stop.remote() for actor in actors]
    with suppress(ray.exceptions.RayError):  # the actor is dead, or is killed below
        ray.wait(stopping, num_returns=len(stopping), timeout=END_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)
