"""The answers of the coordinators of a deployment. Most deployments have one coordinator
(`transferqueue docs coordinators`)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from transferqueue.wire.answers.coordinators import UnreachableCoordinator
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.stats import Stats


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Both answers of a coordinator, of one moment."""

    stats: Stats
    doctor: DoctorAnswer


def looks(
    stats: Mapping[str, Stats | UnreachableCoordinator], answers: Mapping[str, DoctorAnswer | UnreachableCoordinator]
) -> dict[str, Look | UnreachableCoordinator]:
    """Both answers of each coordinator in `answers`, or its failure to give one."""
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
