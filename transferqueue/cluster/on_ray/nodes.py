"""Which node of a Ray cluster a deployment gets. Pure: from Ray's own list of its nodes.

A deployment stays on the node it was given: what it keeps, in shared memory and on disk, is there. Should the node die, so
does the deployment, and whoever asks for it is told; it does not come up empty somewhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transferqueue.errors import Impossible, NotFound, listing


def choose(
    nodes: Iterable[Mapping[str, Any]],
    *,
    here: str,
    node: str | None = None,
    resources: Mapping[str, float],
    labels: Mapping[str, str],
) -> list[str]:
    """The ids of living nodes that have these resources (in all) and labels, at least one: of `node` alone if named, else of `here`
    first, if it will do, and of all others that will.

    nodes: as ``ray.nodes()`` gives them. `NotFound` for a named node that is none or is dead, `Impossible` where none will do.
    """
    alive = {str(one["NodeID"]): one for one in nodes if one["Alive"]}
    if node is not None and node not in alive:
        raise NotFound(f"node {node!r} is not a living node of this Ray cluster; it has {listing(alive)}")
    wanted = [node] if node is not None else sorted(alive, key=lambda one: one != here)
    if found := [one for one in wanted if _will_do(alive[one], resources, labels)]:
        return found
    raise Impossible(
        f"resources {dict(resources)} and labels {dict(labels)} are not all on {'this node' if node else 'one node'} of this Ray "
        f"cluster; there are {'; '.join(_told(alive[one]) for one in wanted)}"
    )


def _will_do(node: Mapping[str, Any], resources: Mapping[str, float], labels: Mapping[str, str]) -> bool:
    has, called = node["Resources"], node.get("Labels", {})
    return all(has.get(name, 0) >= amount for name, amount in resources.items()) and all(
        called.get(name) == value for name, value in labels.items()
    )


def _told(node: Mapping[str, Any]) -> str:
    resources = {name: amount for name, amount in node["Resources"].items() if not name.startswith("node:")}
    labels = {name: value for name, value in node.get("Labels", {}).items() if not name.startswith("ray.io/")}
    return f"{node['NodeID'][:8]} with {resources} {labels}"
