"""The answers of the coordinators of a deployment. Most deployments have one coordinator
(`transferqueue docs cluster`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from transferqueue.observe.answers.stats import Stats
from transferqueue.observe.diagnosis import DoctorAnswer

_T = TypeVar("_T")


class UnreachableCoordinator(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator that did not answer, and the error instead of its answer."""

    address: str
    unreachable: str


def by_coordinator(
    address: str, answer: dict[str, Any], read: Callable[[dict[str, Any]], _T]
) -> dict[str, _T | UnreachableCoordinator]:
    """The answer of each coordinator, parsed by `read`, by its address. answer: of `Queue.stats` and its like, of the
    queue at `address`."""
    answers: dict[str, dict[str, Any]] = answer.get("coordinators", {address: answer})
    return {
        coordinator: UnreachableCoordinator(address=coordinator, unreachable=reply["unreachable"])
        if "unreachable" in reply
        else read(reply)
        for coordinator, reply in answers.items()
    }


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator said of one moment."""

    stats: Stats
    doctor: DoctorAnswer


def looks(
    stats: Mapping[str, Stats | UnreachableCoordinator], answers: Mapping[str, DoctorAnswer | UnreachableCoordinator]
) -> dict[str, Look | UnreachableCoordinator]:
    """Both answers of each coordinator in `answers`; or that it did not give one of them."""
    found: dict[str, Look | UnreachableCoordinator] = {}
    for address, answer in answers.items():
        counts = stats[address]
        if isinstance(answer, UnreachableCoordinator):
            found[address] = answer
        elif isinstance(counts, UnreachableCoordinator):
            found[address] = counts
        else:
            found[address] = Look(stats=counts, doctor=answer)
    return found
