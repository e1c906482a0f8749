"""Pacing under any schedule: nothing over its bound is handed over, reservations always return, a refill is exact.

Schedules are drawn: several sessions reserve, put, generate and train in any order, weights are published at any
moment, leases expire, sessions end in the middle. `test_state_machine` holds each reply against a model; here only the
promises are checked, as their user would.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledger.driver import Driver, Given, World, ids
from transferqueue.errors import Full, TransferQueueError, UsageError
from transferqueue.ledger import Blocked
from transferqueue.limits import Limits
from transferqueue.policies import Complete, DropStale, KeepStale, Pacing, Refill, Requeue, Task

BATCH = 4
LEASE_S = 10.0
SESSIONS = 3
MOVES = ["reserve", "put", "generate", "finish", "hand_back", "train", "done", "publish", "expire", "end"]


class Schedule:
    """A paced table and the sessions at it. A move that the ledger refuses changes nothing."""

    def __init__(self, depth: float, bound: int, on_stale: Any) -> None:
        self.world = World()
        self.clients = [self.world.client() for _ in range(SESSIONS)]
        self.room = round((depth + 1) * BATCH)
        self.bound = bound
        self.clock = 0
        self.promises: list[tuple[Driver, int, int]] = []
        self.generating: list[tuple[Driver, Given, int]] = []
        self.training: list[tuple[Driver, Given]] = []
        self.stamps: dict[int, int] = {}
        tasks = [
            Task("rollout", [], ["score"], lease_s=LEASE_S),
            Task("train", ["score"], lease_s=LEASE_S),
        ]
        pacing = Pacing("train", BATCH, depth, bound, on_stale)
        self.clients[0].create(tasks=tasks, limits=Limits(rows=4 * self.room), pacing=pacing)

    def move(self, name: str, who: int) -> None:
        client = self.clients[who]
        with suppress(TransferQueueError):
            getattr(self, name)(client)

    def reserve(self, client: Driver) -> None:
        promise = client.reserve(2)
        self.promises.append((client, promise.reservation, promise.rows))

    def put(self, client: Driver) -> None:
        """By whoever reserved first."""
        if self.promises:
            owner, reservation, rows = self.promises.pop(0)
            owner.put(rows, reservation=reservation)

    def generate(self, client: Driver) -> None:
        self.generating.append((client, client.lease("rollout", 3, at_least=1), self.clock))

    def finish(self, client: Driver) -> None:
        """With the weights that generation began with, however long ago."""
        if not self.generating:
            return
        owner, lease, version = self.generating.pop(0)
        columns = owner.columns(len(lease.rows), inline={"score": 1.0}, policy_version=version)
        owner.ack(lease, columns=columns)
        self.stamps |= dict.fromkeys(lease.rows, version)

    def hand_back(self, client: Driver) -> None:
        if self.generating:
            owner, lease, _ = self.generating.pop()
            owner.release(lease)

    def train(self, client: Driver) -> None:
        lease = client.lease("train", BATCH, at_least=1)
        behind = {row: self.clock - self.stamps[row] for row in lease.rows}
        assert max(behind.values()) <= self.bound, (self.clock, behind)
        self.training.append((client, lease))

    def done(self, client: Driver) -> None:
        if self.training:
            owner, lease = self.training.pop(0)
            owner.ack(lease)

    def publish(self, client: Driver) -> None:
        if not isinstance(client.advance(self.clock + 1), Blocked):
            self.clock += 1

    def expire(self, client: Driver) -> None:
        self.world.pass_time(LEASE_S + 1)

    def end(self, client: Driver) -> None:
        """The process is gone, with whatever it held; another comes in its place."""
        client.close()
        self.clients[self.clients.index(client)] = self.world.client()


moves = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, SESSIONS - 1)), min_size=20, max_size=80)
stale_rules = st.sampled_from([DropStale(), KeepStale(), Requeue("rollout")])


@given(moves=moves, depth=st.sampled_from([0, 0.5, 1, 1.75, 2]), bound=st.integers(0, 2), on_stale=stale_rules)
def test_nothing_over_its_bound_is_handed_over_and_what_was_reserved_returns(
    moves: list[tuple[str, int]], depth: float, bound: int, on_stale: Any
) -> None:
    schedule = Schedule(depth, bound, on_stale)
    for name, who in moves:
        schedule.move(name, who)
        assert schedule.world.stats().outstanding <= schedule.room
    for client in schedule.clients:
        client.close()
    last = schedule.world.client()
    if left := ids(last.read().rows):
        last.drop(left, "over")
    assert schedule.world.stats().outstanding == 0
    assert granted(last, 1) == (min(depth, bound) + 1) * BATCH


@pytest.mark.parametrize("depth", [-0.5, float("nan"), float("inf"), 1e308])
def test_a_depth_that_is_no_number_of_batches_is_refused(depth: float) -> None:
    with pytest.raises(UsageError, match="is not from 0 to 2147483648 batches; 0 means one batch at a time"):
        Pacing("train", BATCH, depth)


def granted(client: Driver, at_once: int) -> int:
    """Rows that reservations of ``at_once`` rows give until one is refused, and then single ones."""
    total = 0
    with suppress(Full):
        while True:
            total += client.reserve(at_once).rows
    return total if at_once == 1 else total + granted(client, 1)


@given(groups=st.integers(1, 6), size=st.integers(1, 4), drawn=st.data(), spread=st.integers(1, 3))
def test_a_refill_is_exact(groups: int, size: int, drawn: st.DataObject, spread: int) -> None:
    """k groups are evicted, and k are admitted: not a row fewer and not one more, however the asking is spread."""
    world = World()
    client = world.client()
    tasks = [Task("grade", [], ["score"]), Task("train", ["score"], groups=Complete(incomplete=Refill()))]
    client.create(tasks=tasks, limits=Limits(rows=64), pacing=Pacing("train", groups * size, 0))
    promise = client.reserve(groups * size)
    rows = client.put(
        groups * size,
        reservation=promise.reservation,
        group_id=[number for number in range(groups) for _ in range(size)],
        group_size=size,
    )
    client.update(rows, inline={"score": 1.0})
    evicted = drawn.draw(st.sets(st.integers(0, groups - 1), max_size=groups))
    if evicted:
        client.drop([row for row in rows if row // size in evicted], "no-advantage")
    assert granted(client, min(spread, size)) == len(evicted) * size
    whole = [row for row in rows if row // size not in evicted]
    if whole:
        assert client.lease("train", groups=groups, at_least=1).rows == whole
