"""What a request costs does not depend on how many rows are there: ratios of medians, in one process. How long one
takes: `make bench-micro`."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import Driver, World, i64
from tests.ledger.model import ROW_ORDERS
from tests.scale import sizes
from transferqueue.limits import Limits
from transferqueue.policies import (
    Compare,
    Fifo,
    Selector,
    Task,
)
from transferqueue.wire import messages as m

pytestmark = pytest.mark.slow
FEW = 1000
MANY = sizes(100_000, 1_000_000)


def filled(rows: int, selector: Selector) -> Driver:
    client = World().client()
    client.create(tasks=[Task("x", ["r"], selector=selector)], limits=Limits(rows=2 * rows + 1024))
    dice = np.random.default_rng(0)
    step = min(250, rows) if rows <= FEW else 2500
    for at in range(0, rows, step):
        client.put(
            step,
            inline={"r": 1.0},
            tokens=dice.integers(1, 30000, step),
            policy_version=at // 100_000,
            priority=dice.random(step),
        )
        client.world.ledger.forget_replies(client.session, client.call)
    return client


def lease_and_release(client: Driver, **terms: Any) -> float:
    """Seconds of one lease of 64 rows; they are given back, so that the number of rows stays."""
    client.call += 1
    ledger, request = client.world.ledger, m.LeaseRequest("t", "x", rows=64, **terms)
    start = time.perf_counter()
    leased = ledger.apply(request, session=1, call=client.call, now=0.0)
    took = time.perf_counter() - start
    client.apply(m.ReleaseRequest("t", leased.lease, leased.token))
    ledger.forget_replies(1, client.call)
    return took


def assert_flat(measure: Callable[[], tuple[float, ...]], many: int) -> None:
    """The second of a pair of times is within 1.5 of the first, in medians; a busy machine gets three tries."""
    for attempt in range(3):
        pairs = [measure() for _ in range(150)]
        small, large = (median(one[side] for one in pairs[20:]) for side in (0, 1))
        if large <= 1.5 * small:
            return
        assert attempt < 2, f"{small * 1e6:.0f} us at {FEW} rows, {large * 1e6:.0f} us at {many}"


@pytest.mark.parametrize(
    "selector",
    ROW_ORDERS,
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("rows", MANY)
def test_a_lease_of_64_rows_costs_the_same_at_a_thousand_rows_and_many(selector: Selector, rows: int) -> None:
    few, many = filled(FEW, selector), filled(rows, selector)
    where = [Compare("tokens", ">", 15000)]
    for terms in ({}, {"where": where}):
        assert_flat(
            lambda terms=terms: (lease_and_release(few, **terms), lease_and_release(many, **terms)),  # type: ignore[misc]
            rows,
        )


@pytest.mark.parametrize("rows", MANY)
def test_puts_and_acks_cost_the_same_in_a_full_table(rows: int) -> None:
    clients = [filled(size, Fifo()) for size in (FEW, rows)]

    def put_lease_ack(client: Driver) -> float:
        columns = client.columns(512, inline={"r": 1.0}, tokens=5)
        ledger = client.world.ledger
        client.call += 3
        start = time.perf_counter()
        ledger.apply(m.PutRequest("t", 512, columns), session=1, call=client.call - 2, now=0.0)
        leased = ledger.apply(m.LeaseRequest("t", "x", rows=512), session=1, call=client.call - 1, now=0.0)
        ledger.apply(m.Ack("t", leased.lease, leased.token), session=1, call=client.call, now=0.0)
        took = time.perf_counter() - start
        ledger.forget_replies(1, client.call)
        return took

    assert_flat(lambda: tuple(put_lease_ack(client) for client in clients), rows)


@pytest.mark.parametrize("rows", MANY)
def test_rows_that_continue_rows_cost_the_same_beside_many(rows: int) -> None:
    def chained(size: int) -> tuple[Driver, list[int]]:
        client = World().client()
        client.create(tasks=[Task("x", ["ids"])], limits=Limits(rows=2 * size + 1024))
        last = client.put(500, ["ids"])
        for number in range(size // 500):
            columns = client.columns(500, ["ids"])
            parents = i64(last if number % 2 else [-1] * 499 + last[:1])
            first = client.apply(m.ContinueRequest("t", 500, columns, 0, 0.0, parents, ["ids"])).first
            last = list(range(first, first + 500))
        return client, last[:64]

    def continue_read_drop(client: Driver, parents: list[int]) -> float:
        columns = client.columns(64, ["ids"])
        ledger = client.world.ledger
        client.call += 3
        start = time.perf_counter()
        request = m.ContinueRequest("t", 64, columns, 0, 0.0, i64(parents), ["ids"])
        put = ledger.apply(request, session=1, call=client.call - 2, now=0.0)
        new = i64(range(put.first, put.first + 64))
        read = ledger.apply(m.ReadRequest("t", new), session=1, call=client.call - 1, now=0.0)
        ledger.apply(m.Drop("t", new, "measured"), session=1, call=client.call, now=0.0)
        took = time.perf_counter() - start
        client.unpin([at.block for part in read.content.parts for at in part.blocks])
        ledger.forget_replies(1, client.call)
        return took

    clients = [chained(size) for size in (FEW, rows)]
    assert_flat(lambda: tuple(continue_read_drop(client, parents) for client, parents in clients), rows)
