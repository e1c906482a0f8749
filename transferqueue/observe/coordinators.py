"""What the coordinators of a deployment said, one by one; of most deployments there is one (docs/CLUSTER.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


class UnreachableCoordinator(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator that is out of reach, and what was heard instead of it."""

    address: str
    unreachable: str


def by_coordinator(
    address: str, answer: dict[str, Any], read: Callable[[dict[str, Any]], _T]
) -> dict[str, _T | UnreachableCoordinator]:
    """What each said, read, by its address. answer: of `Queue.stats` and its like, of the queue at `address`."""
    found: dict[str, dict[str, Any]] = answer.get("coordinators", {address: answer})
    return {
        one: UnreachableCoordinator(address=one, unreachable=said["unreachable"])
        if "unreachable" in said
        else read(said)
        for one, said in found.items()
    }
