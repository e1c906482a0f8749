"""Simulated time, chance and network.

The law of the network, which is that of a socket: frames of one *way* may be late, lost with the way, repeated by
a client that sends again. On top of that single calls and answers are lost, doubled and overtaken, which the protocol
promises to bear. A notice is never overtaken by a later frame of its way nor lost without it (`Calls`, rule 5).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LATENCY_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Rates:
    """How likely each fault is, per frame or per second."""

    lost: float = 0.03
    doubled: float = 0.04
    overtaken: float = 0.05
    late: float = 0.02
    partition_per_s: float = 0.25
    crash_per_s: float = 0.12
    pause_per_s: float = 0.2
    jump_per_s: float = 0.08
    server_per_s: float = 0.06
    before_commit: float = 0.0006
    torn: float = 0.0004
    full: float = 0.0004
    after_commit: float = 0.0008
    killed_at_send: float = 0.003
    checkpoint: float = 0.002


class World:
    """The clock, what happens when, and what goes wrong. `faults` counts by kind."""

    def __init__(self, seed: int, rates: Rates | None = None) -> None:
        self.now = 0.0
        self.random: Final = random.Random(seed)
        self.rates: Final = rates or Rates()
        self.faults: Counter[str] = Counter()
        self.healed = False
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        """`act` happens at `when`, after what was asked for that time before."""
        self._count += 1
        heapq.heappush(self._agenda, (max(when, self.now), self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """`act` happens that much later."""
        self.at(self.now + seconds, act)

    def step(self, until: float) -> bool:
        """Let the next thing happen that is due by `until`; False if there is none."""
        if not self._agenda or self._agenda[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, act = heapq.heappop(self._agenda)
        act()
        return True

    def strikes(self, probability: float, kind: str) -> bool:
        """Whether a fault of this kind happens now; it is counted if so. Never once healed."""
        if self.healed or self.random.random() >= probability:
            return False
        self.faults[kind] += 1
        return True


class SimConnection:
    """One connection of a client with the server. `peer`: how the server names it."""

    def __init__(self, world: World, peer: bytes) -> None:
        self.peer: Final = peer
        self.broken = False
        self._world: Final = world
        self._held_until = 0.0
        self._floor = {True: 0.0, False: 0.0}

    def hold(self, until: float) -> None:
        """Nothing arrives before `until`, in either direction: a partition."""
        self._held_until = max(self._held_until, until)

    def carry(self, frame: bytes, arrive: Callable[[bytes], None], *, up: bool, notice: bool = False) -> None:
        """Bring a frame to the other side, unless the way breaks before. up: towards the server."""
        world = self._world
        rates = world.rates
        if not notice and world.strikes(rates.lost, "message lost"):
            return
        self._fly(frame, arrive, up=up, notice=notice)
        if world.strikes(rates.doubled, "message duplicated"):
            self._fly(frame, arrive, up=up, notice=notice)

    def _fly(self, frame: bytes, arrive: Callable[[bytes], None], *, up: bool, notice: bool) -> None:
        world = self._world
        when = max(world.now + LATENCY_S, self._held_until)
        if world.strikes(world.rates.late, "message delayed"):
            when += world.random.expovariate(1.0)
        elif world.strikes(world.rates.overtaken, "message reordered"):
            when += world.random.uniform(0.002, 0.05)
        when = max(when, self._floor[up])
        if notice:
            self._floor[up] = when

        def land() -> None:
            if not self.broken:
                arrive(frame)

        world.at(when, land)
