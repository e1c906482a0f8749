"""A simulated disk for spilled blocks: slow, sometimes full, sometimes unreadable for a while, sometimes hung. The
production `Spiller` uses it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from tests.simulator.world import World
from transferqueue.limits import LOAD_TRIES, PAGE_BYTES, SPILL_SILENT_S
from transferqueue.schema import align
from transferqueue.server.spill.spill_jobs import (
    BlocksLoaded,
    BlocksWritten,
    BlockToLoad,
    BlockToWrite,
    SpillAnswers,
    SpilledBlock,
)
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import checksum

SECONDS_MAX: Final = 0.2
"""The longest time that a job of the disk takes, unless it hangs."""
HANGS: Final = 0.03
"""Probability that a disk hangs, for each job."""
HANG_S: Final = 1.5 * SPILL_SILENT_S


class SimSpill:
    """The spilled blocks of one server, on a disk that `hangs` at times. stir: called when an answer is ready. nbytes:
    the most that they may take. It does its jobs in order, as the thread of a `SpillFile` does.

    Bytes are copied when a job ends, not when it begins: what was freed meanwhile may have been overwritten. Jobs that
    have not ended when the server ends are never done: the memory is that of another server by then.
    """

    def __init__(
        self, world: World, memory: bytearray, stir: Callable[[], object], nbytes: int, *, hangs: bool = False
    ) -> None:
        self._world, self._memory, self._stir, self._hangs = world, memory, stir, hangs
        self._nbytes: Final = nbytes
        self._chance: Final = random.Random(0)
        self._stored: dict[int, bytes] = {}
        self._answers = SpillAnswers([], [])
        self._free_at = 0.0
        self._stopped = False
        self._unreadable: dict[int, int] = {}

    def write(self, job: int, blocks: Sequence[BlockToWrite]) -> None:
        """See `SpillFile.write`."""
        self._later(lambda: self._answers.written.append(self._write(job, blocks)))

    def load(self, job: int, blocks: Sequence[BlockToLoad]) -> None:
        """See `SpillFile.load`."""
        self._later(lambda: self._answers.loaded.append(self._load(job, blocks)))

    def free(self, places: Iterable[SpilledBlock]) -> None:
        """See `SpillFile.free`."""
        kept = list(places)
        self._later(lambda: [self._stored.pop(place.block) for place in kept])

    def answers(self) -> SpillAnswers:
        """See `SpillFile.answers`."""
        ready, self._answers = self._answers, SpillAnswers([], [])
        return ready

    def read(self, place: SpilledBlock) -> U8:
        """See `SpillFile.read`."""
        return np.frombuffer(self._stored[place.block], np.uint8)

    def stop(self) -> None:
        """See `SpillFile.stop`."""
        self._stopped = True

    def _later(self, act: Callable[[], object]) -> None:
        hung = self._hangs and self._world.strikes(HANGS, "spill disk hung")
        self._free_at = max(self._free_at, self._world.now) + self._chance.uniform(0.0, SECONDS_MAX) + HANG_S * hung

        def do() -> None:
            if not self._stopped:
                act()
                self._stir()

        self._world.at(self._free_at, do)

    def _write(self, job: int, blocks: Sequence[BlockToWrite]) -> BlocksWritten:
        if self._world.strikes(self._world.rates.spill_full, "spill disk full"):
            return BlocksWritten(job, [], "No space left on device")
        taken = sum(
            align(nbytes, PAGE_BYTES) for nbytes in (*map(len, self._stored.values()), *(one.nbytes for one in blocks))
        )
        if taken > self._nbytes:
            self._world.faults["spill file full"] += 1
            return BlocksWritten(job, [], "the file of spilled blocks is full")
        places = []
        for block, offset, nbytes, _ in blocks:
            self._stored[block] = bytes(self._memory[offset : offset + nbytes])
            places.append(SpilledBlock(block, 0, nbytes, checksum(self._stored[block])))
        self._world.faults["extent spilled"] += 1
        return BlocksWritten(job, places, "")

    def _load(self, job: int, blocks: Sequence[BlockToLoad]) -> BlocksLoaded:
        answer = BlocksLoaded(job, [], {}, [])
        for place, offset in blocks:
            if self._is_unreadable(place.block):
                answer.failed[place.block] = "Input/output error"
                continue
            self._memory[offset : offset + place.nbytes] = self._stored[place.block]
            answer.loaded.append(place.block)
        return answer

    def _is_unreadable(self, block: int) -> bool:
        """Whether this try fails. The last one never does, since the rows would be lost."""
        tries = self._unreadable.get(block, 0)
        if tries == LOAD_TRIES - 1 or not self._world.strikes(
            self._world.rates.spill_unreadable, "spill disk unreadable"
        ):
            return False
        self._unreadable[block] = tries + 1
        return True
