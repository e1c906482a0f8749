"""The plan of faults (kind, target, time), drawn from one seed before anything runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final, NamedTuple

from transferqueue.errors import UsageError
from transferqueue.server.durability_level import Level

FAULTS_PER_S: Final = 3.0
LEASE_S: Final = 2.0
"""Lease duration of every task: short, so that a worker can be frozen for longer."""
WITHIN_S: Final = (0.05, 0.8)
BEYOND_S: Final = (2.3, 3.2)
SERVER_GAP_S: Final = 1.5
"""Least time between two faults of the server: each must show its effect, and the supervisor must not give up."""

PRODUCERS: Final = ("producer-0", "producer-1")
CONSUMERS: Final = ("reward-0", "reward-1", "reward-2")
TRAINER: Final = "trainer-0"
FLOODERS: Final = ("flooder-0",)
DRAINERS: Final = ("drainer-0", "drainer-1")
REMOTE: Final = ("producer-9", "flooder-9", "reward-9", "drainer-9")
"""Roles that reach the server by TCP through the proxy: two put, small rows and large, one acks with a column, one
reads large rows."""
SERVER: Final = "server"
PROXY: Final = "proxy"

_KINDS: Final = {"kill": 13, "freeze": 6, "freeze_beyond": 2.5, "server": 3.2, "fill": 0.8}
_SERVER_KINDS: Final = {"kill": 6, "freeze": 2, "disk_full": 2, "restart": 1}
_SPILL_KINDS: Final = {**_KINDS, "fill": 6}
_SPILL_SERVER_KINDS: Final = {"freeze": 2, "disk_full": 3}
"""Rows on a disk end with their server, so that is not killed."""
FILL_S: Final = (0.8, 2.0)
SPILL_FILL_S: Final = (1.5, 4.0)
"""For so long no process leases rows of the flood."""
DISK_FULL_S: Final = (0.3, 3.0)
"""For so long the disk of a server that spills is full. One with a journal dies of that, and has a new disk in its next
life."""
_CUTS: Final = {"delay": 1.0, "stall": 1.0, "reset": 1.5, "flip": 1.0}
_CUT_WEIGHT: Final = 4.0


class ChaosSettings(NamedTuple):
    """Settings of one run.

    Attributes:
        seconds: Duration of the faults.
        tcp: Whether there are remote workers behind a proxy.
        spill: Whether the server has little memory and a disk for cold blocks, and no durability."""

    seconds: float
    seed: int
    durability: Level = Level.PROCESS
    tcp: bool = False
    spill: bool = False

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        tcp = " --tcp" if self.tcp else ""
        level = "--spill" if self.spill else f"--durability {self.durability.value}"
        return f"python -m tests.chaos --seconds {self.seconds:g} --seed {self.seed} {level}{tcp}"


def settings(seconds: float, seed: int, durability: str | None, tcp: bool, spill: bool = False) -> ChaosSettings:
    """Check the options of the command; `UsageError` for values that no run can have."""
    if not 1 <= seconds <= 86_400:
        raise UsageError(f"seconds={seconds:g} of chaos cannot be run; give 1 to 86400")
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"seed={seed} is out of range; give 0 to {(1 << 32) - 1}")
    if spill and durability is not None:
        raise UsageError(
            f"durability {durability!r} and spill do not go together: a server that outlives crashes does not spill; "
            "give one of them"
        )
    if spill:
        return ChaosSettings(seconds, seed, Level.MEMORY, tcp, spill)
    durability = durability or Level.PROCESS.value
    if durability not in [level for level in Level if level.survives_crash]:
        raise UsageError(
            f"durability {durability!r} cannot be judged by chaos: the server is killed, and only process and disk "
            "outlive that; give one of them"
        )
    return ChaosSettings(seconds, seed, Level(durability), tcp)


class Fault(NamedTuple):
    """One fault. at: seconds after the start. for_s: how long it lasts, 0 for an instant."""

    at: float
    kind: str
    target: str
    for_s: float = 0.0


def roles(run: ChaosSettings) -> tuple[str, ...]:
    """The roles of a run whose processes may be killed."""
    return (*PRODUCERS, *CONSUMERS, TRAINER, *FLOODERS, *DRAINERS, *(REMOTE if run.tcp else ()))


def plan(run: ChaosSettings) -> list[Fault]:
    """The faults of a run, by time."""
    chance = random.Random(run.seed)
    faults: list[Fault] = []
    server_at = at = 0.0
    while (at := at + chance.expovariate(FAULTS_PER_S)) < run.seconds:
        fault = _draw(chance, run, at)
        if fault.target == SERVER:
            if at < server_at:
                continue
            server_at = at + fault.for_s + SERVER_GAP_S
        faults.append(fault)
    return faults


def _draw(chance: random.Random, run: ChaosSettings, at: float) -> Fault:
    kinds = _SPILL_KINDS if run.spill else _KINDS
    kind = _choose(chance, {**kinds, "cut": _CUT_WEIGHT} if run.tcp else kinds)
    if kind == "server":
        kind = _choose(chance, _SPILL_SERVER_KINDS if run.spill else _SERVER_KINDS)
        if kind == "disk_full" and run.spill:
            return Fault(at, kind, SERVER, chance.uniform(*DISK_FULL_S))
        return Fault(at, kind, SERVER, chance.uniform(*WITHIN_S) if kind == "freeze" else 0.0)
    if kind == "cut":
        kind = _choose(chance, _CUTS)
        return Fault(at, kind, PROXY, chance.uniform(*WITHIN_S) if kind in ("delay", "stall") else 0.0)
    if kind == "fill":
        return Fault(at, kind, "drainer", chance.uniform(*(SPILL_FILL_S if run.spill else FILL_S)))
    target = chance.choice(roles(run))
    if kind == "kill":
        return Fault(at, kind, target)
    return Fault(at, kind, target, chance.uniform(*(BEYOND_S if kind == "freeze_beyond" else WITHIN_S)))


def _choose(chance: random.Random, weights: Mapping[str, float]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]
