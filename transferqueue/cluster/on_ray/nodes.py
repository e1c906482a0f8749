"""Chooses the node of a deployment from Ray's list of nodes. No I/O.

A deployment stays on its node, because its shared memory and its files are there. If the node dies, so does the
deployment: callers get an error, and it does not restart empty on another node.
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
    """The ids of the living nodes that have these labels and, in total, these resources: at least one id. `here` comes
    first if it fits. If `node` is given, only that node is considered.

    `nodes` are from ``ray.nodes()``. `NotFound` if `node` does not exist or is dead, `Impossible` if no node fits.
    """
    alive = {str(entry["NodeID"]): entry for entry in nodes if entry["Alive"]}
    if node is not None and node not in alive:
        raise NotFound(f"node {node!r} is not a living node of this Ray cluster; it has {listing(alive)}")
    candidates = [node] if node is not None else sorted(alive, key=lambda node_id: node_id != here)
    if fitting := [node_id for node_id in candidates if _fits(alive[node_id], resources, labels)]:
        return fitting
    raise Impossible(
        f"resources {dict(resources)} and labels {dict(labels)} are not all on {'this node' if node else 'one node'} "
        f"of this Ray cluster; there are {'; '.join(_describe(alive[node_id]) for node_id in candidates)}"
    )


def _fits(node: Mapping[str, Any], resources: Mapping[str, float], labels: Mapping[str, str]) -> bool:
    node_resources, node_labels = node["Resources"], node.get("Labels", {})
    return all(node_resources.get(name, 0) >= amount for name, amount in resources.items()) and all(
        node_labels.get(name) == value for name, value in labels.items()
    )


def _describe(node: Mapping[str, Any]) -> str:
    resources = {name: amount for name, amount in node["Resources"].items() if not name.startswith("node:")}
    labels = {name: value for name, value in node.get("Labels", {}).items() if not name.startswith("ray.io/")}
    return f"{node['NodeID'][:8]} with {resources} {labels}"
