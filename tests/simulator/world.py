"""Simulated time, chance and network.

The network behaves as a socket does: frames on one connection may be late, or lost with the connection, and a client
may resend them. Beyond that, single calls and replies are lost, duplicated and reordered, which the protocol must bear.
A notice is never overtaken by a later frame of its connection, nor lost while the connection lasts (`PendingCalls`,
rule 5).
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
    """Probability of each fault, per frame or per second."""

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
    spill_full: float = 0.05
    spill_unreadable: float = 0.1
    interrupted: float = 0.0
    """Of each event of the server, by `interrupts.DEFECTS` at some line of the ledger."""


class World:
    """The clock, the calls that are due, and the source of chance. `faults` counts the faults of each kind."""

    def __init__(self, seed: int, rates: Rates | None = None) -> None:
        self.now = 0.0
        self.random: Final = random.Random(seed)
        self.rates: Final = rates or Rates()
        self.faults: Counter[str] = Counter()
        self.healed = False
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call `act` at `when`, after earlier calls for the same time."""
        self._count += 1
        heapq.heappush(self._agenda, (max(when, self.now), self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` that many seconds from now."""
        self.at(self.now + seconds, act)

    def step(self, until: float) -> bool:
        """Make the next call that is due by `until`; False if there is none."""
        if not self._agenda or self._agenda[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, act = heapq.heappop(self._agenda)
        act()
        return True

    def strikes(self, probability: float, kind: str) -> bool:
        """Whether a fault of this kind happens now, which counts it. Never after all faults have ended."""
        if self.healed or self.random.random() >= probability:
            return False
        self.faults[kind] += 1
        return True


class SimConnection:
    """One connection of a client to the server. peer: the name by which the server knows it."""

    def __init__(self, world: World, peer: bytes) -> None:
        self.peer: Final = peer
        self.broken = False
        self._world: Final = world
        self._held_until = 0.0
        self._floor = {True: 0.0, False: 0.0}

    def hold(self, until: float) -> None:
        """Deliver no frame before `until`, in either direction: a partition."""
        self._held_until = max(self._held_until, until)

    def carry(self, frame: bytes, arrive: Callable[[bytes], None], *, up: bool, notice: bool = False) -> None:
        """Deliver a frame to the other side, unless the connection breaks first. up: towards the server."""
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
