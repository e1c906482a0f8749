"""Measure the recovery after each death of a process, by the times in the event logs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

from tests.chaos.fault_plan import CONSUMERS, DRAINERS, REMOTE, Fault
from tests.chaos.log import ReadLog

DEATHS: Final = ("kill", "restart", "disk_full")
"""Faults after which the supervisor starts another serving process."""

SHARED: Final = {"reward": CONSUMERS, "drainer": DRAINERS}
CALM_S: Final = 1.0


class Times(NamedTuple):
    """Seconds, ascending."""

    samples: list[float]

    def at(self, share: float) -> float:
        """The quantile of the samples at this share; 0 without samples."""
        return self.samples[min(len(self.samples) - 1, int(share * len(self.samples)))] if self.samples else 0.0


def of_server(faults: Sequence[Fault], logs: Sequence[ReadLog]) -> Times:
    """The times from a SIGKILL of the server to the end of the first call that began later and was answered.

    A death during the recovery from an earlier one starts the measurement anew.
    """
    calls = sorted((line[2], line[1]) for log in logs for line in log.of("call"))
    begun = [began for began, _ in calls]
    deaths = [(at, kind) for at, kind, target, _ in faults if target == "server" and kind in DEATHS]
    times_s = []
    for number, (at, kind) in enumerate(deaths):
        place = bisect.bisect_left(begun, at)
        if kind != "kill" or place == len(calls):
            continue
        ended = calls[place][1]
        if number + 1 == len(deaths) or ended < deaths[number + 1][0]:
            times_s.append(ended - at)
    return Times(sorted(times_s))


def of_leases(faults: Sequence[Fault], logs: Sequence[ReadLog], *, remote: bool) -> Times:
    """The times from a SIGKILL of a worker that held rows to the first lease of one of these rows by another worker.

    Only tasks with several workers count: the rows of the only trainer wait for its successor. remote: measure workers
    that reach the server over TCP, whose death the server knows from their silence or the end of their lease; else
    workers whose socket the kernel closes. Deaths while no server ran, or while every other worker had a fault, do
    not count: no process could requeue or lease the rows.
    """
    away = [at for at, _, target, _ in faults if target == "server"]
    times_s = []
    for at, kind, role, _ in faults:
        if kind != "kill" or role.partition("-")[0] not in SHARED or (role in REMOTE) != remote:
            continue
        ended = _leased_again(at, role, logs) if _is_measurable(at, role, faults) else None
        if ended is not None and not any(at - 1.0 < gone < ended for gone in away):
            times_s.append(ended - at)
    return Times(sorted(times_s))


def _is_measurable(at: float, role: str, faults: Sequence[Fault]) -> bool:
    """Whether another worker of the task was neither frozen nor new within `CALM_S` of this death."""
    task = role.partition("-")[0]
    hurt = {
        fault.target
        for fault in faults
        if fault.target.startswith(task) and fault.at - CALM_S < at + CALM_S and at - CALM_S < fault.at + fault.for_s
    }
    return task not in hurt and any(other not in hurt for other in SHARED[task] if other != role)


def _leased_again(at: float, role: str, logs: Sequence[ReadLog]) -> float | None:
    task = role.partition("-")[0]
    lives = [log for log in logs if log.role == role and log.lines and log.lines[0][1] <= at]
    if not lives:
        return None
    dead = lives[-1]
    held = {line[2]: set(line[3]) for line in dead.of("lease")}
    for kind in ("ack", "late"):
        for line in dead.of(kind):
            held.pop(line[2], None)
    rows = set[int]().union(*held.values())
    again = [
        line[1]
        for log in logs
        if log is not dead and log.role.partition("-")[0] == task
        for line in log.of("lease")
        if rows.intersection(line[3])
    ]
    if any(when <= at for when in again):  # it was frozen, and its rows were leased to others before it was killed
        return None
    return min(again, default=None)
