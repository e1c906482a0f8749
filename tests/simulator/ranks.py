"""A job of two ranks with two replicas each, on shared batches: replicas get the same rows, ranks different rows, and
no row is done twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulator.job import Feed, SimJob, Steps, inline, unpack, until_end
from tests.simulator.machine import PromiseBroken
from transferqueue.limits import Limits
from transferqueue.policies import Task, TokenBalanced
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

WORLD: Final = 2
REPLICAS: Final = 2
PEERS: Final = tuple((rank, replica) for rank in range(WORLD) for replica in range(REPLICAS))
PUTS: Final = 5
ROWS: Final = 8
Peer = tuple[int, int]


class SharedBatchJob(SimJob):
    """A job of several ranks and replicas."""

    table = "ranks"

    def __init__(self) -> None:
        task = Task("train", needs=["number"], selector=TokenBalanced(equal_counts=False), lease_s=2.5)
        self._feed = Feed(self.table, puts=PUTS, rows=ROWS, limits=Limits(rows=3 * ROWS), tasks=[task])
        self._number_of: dict[int, int] = {}
        self._share: dict[int, tuple[int, list[int]]] = {}
        """Lease -> its rank, and its rows."""
        self._acks: dict[int, set[int]] = {}
        self._maybe: dict[int, set[int]] = {}
        """Lease -> replicas whose acks were confirmed, and replicas whose acks were sent."""
        self._latest: dict[int, int] = {}
        self._done: dict[int, int] = {}

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        made: dict[str, Callable[[Process], Steps]] = {"feeder": self._feed.feed}
        return made | {f"rank {rank}.{replica}": partial(self._train, peer=(rank, replica)) for rank, replica in PEERS}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`. A row is done when all replicas acked it."""
        acked = {row for lease, by in self._maybe.items() if len(by) == REPLICAS for row in self._share[lease][1]}
        self._feed.judge(state.tables[self.table], len(acked))

    def _train(self, process: Process, peer: Peer) -> Steps:
        yield from self._feed.open()
        yield from until_end(process, partial(self._train_once, process, peer))

    def _train_once(self, process: Process, peer: Peer) -> Steps:
        rank, replica = peer
        wait_s = 60.0 if process.world.healed else 2.0
        lease = yield m.LeaseRequest(
            self.table, "train", rows=ROWS, at_least=1, wait_s=wait_s,
            rank=rank, world=WORLD, replica=replica, replicas=REPLICAS,
        )  # fmt: skip
        self._lent(lease, peer)
        yield process.world.random.uniform(0.01, 0.4)
        self._maybe.setdefault(lease.lease, set()).add(replica)
        yield m.Ack(self.table, lease.lease, lease.token)
        self._acked(lease.lease, replica)

    def _lent(self, lease: m.Leased, peer: Peer) -> None:
        rows = unpack(lease.content.rows)
        if self._share.setdefault(lease.lease, (peer[0], rows)) != (peer[0], rows):
            raise PromiseBroken(f"replicas of rank {peer[0]} were given different rows under lease {lease.lease}")
        for row, number in zip(rows, inline(lease.content, "number"), strict=True):
            if self._number_of.setdefault(row, number) != number:
                raise PromiseBroken(f"row {row} holds {number}, and held {self._number_of[row]}")
            if lease.lease > self._done.get(row, lease.lease):
                raise PromiseBroken(f"row {row} was given out again after all replicas had trained on it")
            self._latest[row] = max(lease.lease, self._latest.get(row, 0))

    def _acked(self, lease: int, replica: int) -> None:
        by = self._acks.setdefault(lease, set())
        by.add(replica)
        if len(by) < REPLICAS:
            return
        for row in self._share[lease][1]:
            if self._latest[row] > lease:
                raise PromiseBroken(f"row {row}: the acks of lease {lease} were taken after lease {self._latest[row]}")
            self._done[row] = lease
