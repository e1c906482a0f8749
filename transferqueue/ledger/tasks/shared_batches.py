"""Batches that the ranks of a data-parallel job share.

The k-th lease of a rank is its share of the k-th batch. The first rank that asks creates the batch; from then on each
share is a lease, and no other session gets its rows.

- All ranks ask for the same amount in the same terms. A request with other terms is refused.
- Each (rank, replica) claims each batch at most once, in order.
- A share that no rank claims within its lease time becomes ready again, unless its rank waits for blocks that are on a
  disk: then it has that time again. If a claimed share ends by expiry or death, that step of the job has failed, so the
  unclaimed shares of the batch become ready again too. Ranks that had not claimed it go on with the next batch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.ledger.arrays import IntArray
from transferqueue.policies import Predicate
from transferqueue.wire.messages import LeaseRequest

BatchTerms = tuple[int, int, int, int, tuple[Predicate, ...]]
"""rows, tokens, groups, at_least and where of a request."""


@dataclass(slots=True)
class SharedBatch:
    """A batch that some (rank, replica) has not claimed yet. `shares`: the lease of each rank."""

    terms: BatchTerms
    shares: list[int]
    claimed: dict[tuple[int, int], None] = field(default_factory=dict)

    def rank_of(self, lease: int) -> int | None:
        """The rank whose share the lease is; None if it is of another batch. Shares are opened one after another, so
        their numbers are too."""
        rank = lease - self.shares[0]
        return rank if 0 <= rank < len(self.shares) else None


def terms_of(request: LeaseRequest) -> BatchTerms:
    """The terms that must be equal in the requests of all ranks."""
    return (request.rows, request.tokens, request.groups, request.at_least, tuple(request.where))


@dataclass(slots=True)
class SharedBatches:
    """The batches of one task for one (world, replicas)."""

    world: int
    replicas: int
    batches: dict[int, SharedBatch] = field(default_factory=dict)
    made: int = 0
    next: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rank, replica) -> number of the batch that it claims next."""

    def waiting(self, request: LeaseRequest) -> tuple[int, SharedBatch] | None:
        """The oldest batch that this rank may still claim; `UsageError` if it was created with other terms."""
        after = self.next.get((request.rank, request.replica), 0)
        for number, batch in self.batches.items():
            if number < after or (request.rank, request.replica) in batch.claimed:
                continue
            if batch.terms != terms_of(request):
                raise UsageError(
                    f"rank {request.rank} asks for {_terms_text(terms_of(request))}, but batch {number} was agreed "
                    f"with {_terms_text(batch.terms)}; all ranks of a world must ask for the same"
                )
            return number, batch
        return None

    def make(self, request: LeaseRequest, shares: list[int]) -> tuple[int, SharedBatch]:
        """Create a batch."""
        number, batch = self.made, SharedBatch(terms_of(request), shares)
        self.batches[number] = batch
        self.made += 1
        return number, batch

    def claim(self, number: int, rank: int, replica: int) -> None:
        """Record that (rank, replica) has its share."""
        batch = self.batches[number]
        batch.claimed[rank, replica] = None
        self.next[rank, replica] = number + 1
        if len(batch.claimed) == self.world * self.replicas:
            del self.batches[number]

    def share_ended(self, lease: int) -> None:
        """Record that a share has ended, so that no replica can claim it."""
        for number, batch in list(self.batches.items()):
            if (rank := batch.rank_of(lease)) is None:
                continue
            batch.claimed.update({(rank, replica): None for replica in range(self.replicas)})
            if len(batch.claimed) == self.world * self.replicas:
                del self.batches[number]

    def break_up(self, lease: int) -> list[int]:
        """Remove the batch of a share that ended early. Returns its unclaimed shares."""
        for number, batch in list(self.batches.items()):
            if batch.rank_of(lease) is not None:
                del self.batches[number]
                claimed = {rank for rank, _ in batch.claimed}
                return [share for rank, share in enumerate(batch.shares) if rank not in claimed and share != lease]
        return []


def _terms_text(terms: tuple[object, ...]) -> str:
    names = ("rows", "tokens", "groups", "at_least", "where")
    return ", ".join(f"{name}={value}" for name, value in zip(names, terms, strict=True) if value) or "nothing"


def shares(weights: IntArray, world: int, *, equal_counts: bool) -> list[IntArray]:
    """Split units over ranks. Returns the positions of each rank's units, ascending, so that a share keeps the order of
    the batch.

    Longest processing time first: units by falling weight, each to the rank with the smallest sum so far. With free
    counts the heaviest rank then has at most 4/3 - 1/(3 world) of the best possible (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969). With equal counts, a rank that has its number of
    units gets no more; counts differ by at most one, if the units cannot be divided evenly.
    """
    room = _room(weights.size, world, equal_counts=equal_counts)
    taken: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world) if room[rank]]
    ranked = weights.tolist()
    for position in np.argsort(-weights, kind="stable").tolist():
        load, rank = loads[0]
        taken[rank].append(position)
        if len(taken[rank]) < room[rank]:
            heapq.heapreplace(loads, (load + ranked[position], rank))
        else:
            heapq.heappop(loads)
    return [np.array(sorted(positions), np.int64) for positions in taken]


def _room(units: int, world: int, *, equal_counts: bool) -> list[int]:
    """Number of units that each rank may get."""
    if not equal_counts:
        return [units] * world
    share, more = divmod(units, world)
    return [share + (rank < more) for rank in range(world)]
