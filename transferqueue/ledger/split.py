"""Shares of one agreed batch: which units go to which rank.

Longest processing time first: units by falling weight, each to the rank with the least so far. With free
counts the heaviest rank then has at most 4/3 - 1/(3 world) of the best possible (R. L. Graham, "Bounds on
multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969). With equal counts a rank that has its number
of units takes no more; counts differ by one at most, where the units cannot be divided.
"""

from __future__ import annotations

import heapq

import numpy as np

from transferqueue.ledger.arrays import IntArray


def shares(weights: IntArray, world: int, *, equal_counts: bool) -> list[IntArray]:
    """Positions of the units of each rank, ascending, so that a share keeps the order of the batch."""
    room = _room(weights.size, world, equal_counts=equal_counts)
    taken: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world) if room[rank]]
    ranked = weights.tolist()
    for position in np.argsort(-weights, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        taken[rank].append(position)
        if len(taken[rank]) < room[rank]:
            heapq.heappush(loads, (load + ranked[position], rank))
    return [np.array(sorted(positions), np.int64) for positions in taken]


def _room(units: int, world: int, *, equal_counts: bool) -> list[int]:
    """How many units each rank may take."""
    if not equal_counts:
        return [units] * world
    each, more = divmod(units, world)
    return [each + (rank < more) for rank in range(world)]
