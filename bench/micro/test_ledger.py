"""The ledger alone: no server, no socket, no bytes. What one request costs, and that it does not grow with the rows."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from transferqueue.ledger import Ledger
from transferqueue.limits import MIB, Limits
from transferqueue.policies import Complete, LongestFirst, Task
from transferqueue.schema import Field, layout
from transferqueue.wire import messages as m

SESSION = 1
BATCH = 512
FIELD = Field("response_ids", "int64", (None,))
SIX = [Task(f"task_{number}", needs=["response_ids"]) for number in range(6)]


class Bench:
    """A ledger with one table, and a clock that moves by a microsecond a request."""

    def __init__(self, tasks: list[Task]) -> None:
        self.ledger = Ledger()
        self.calls, self.offsets = count(1), count(0)
        self.ledger.open_session(SESSION, b"0" * 16, 0.0)
        self.ask(m.CreateTable("rollouts", fields=[FIELD], tasks=tasks, limits=Limits(rows=1 << 24)))

    def ask(self, request: Any) -> Any:
        call = next(self.calls)
        reply = self.ledger.apply(request, session=SESSION, call=call, now=call * 1e-6)
        self.ledger.forget_replies(SESSION, call)
        self.ledger.take_effects()
        return reply

    def put_request(self, rows: int, facts: m.RowFacts | None = None) -> m.PutRequest:
        """A put of `rows` rows that lie in an extent granted for it."""
        _, nbytes = layout([FIELD], rows, [rows * 16])
        number = next(self.offsets)
        granted = self.ledger.grant(SESSION, 0, number * MIB * 16, nbytes, number * 1e-6)
        placed = m.WrittenBlock(granted.extent, granted.offset, nbytes, rows, [FIELD.name], [rows * 16])
        return m.PutRequest("rollouts", rows, m.Columns(fields=[FIELD], blocks=[placed], facts=facts or m.RowFacts()))

    def put(self, rows: int, facts: m.RowFacts | None = None) -> None:
        request = self.put_request(rows, facts)
        self.ask(request)
        self.ask(m.ReturnGrant(request.columns.blocks[0].extent))

    def fill(self, rows: int) -> Bench:
        for start in range(0, rows, 4096):
            self.put(min(4096, rows - start))
        return self

    def lease(self, rows: int, task: str = "task_0") -> m.Leased:
        leased = self.ask(m.LeaseRequest("rollouts", task, rows=rows))
        assert len(leased.content.rows) == 8 * rows
        return leased

    def ack(self, leased: m.Leased) -> None:
        self.ask(m.Ack("rollouts", leased.lease, leased.token))

    def release(self, leased: m.Leased) -> None:
        self.ask(m.ReleaseRequest("rollouts", leased.lease, leased.token))


@pytest.mark.parametrize("resident", [1000, 100_000])
def test_put_512_rows_seen_by_six_tasks(benchmark: Any, resident: int) -> None:
    """Aim: under 200 µs."""
    bench = Bench(SIX).fill(resident)
    benchmark.pedantic(bench.ask, setup=lambda: ((bench.put_request(BATCH),), {}), rounds=300)


@pytest.mark.parametrize("resident", [1000, 100_000])
def test_lease_and_ack_512_rows(benchmark: Any, resident: int) -> None:
    """Aim: under 100 µs."""
    bench = Bench(SIX[:1]).fill(resident + 301 * BATCH)
    benchmark.pedantic(lambda: bench.ack(bench.lease(BATCH)), rounds=300)


@pytest.mark.parametrize("resident", [1000, 10_000, 100_000, 1_000_000])
def test_lease_and_release_64_rows(benchmark: Any, resident: int) -> None:
    """Aim: the same at all of these, within 1.5 times."""
    bench = Bench(SIX[:1]).fill(resident)
    benchmark.pedantic(lambda: bench.release(bench.lease(64)), rounds=300, warmup_rounds=10)


@pytest.mark.parametrize("resident", [1000, 100_000])
def test_lease_longest_first(benchmark: Any, resident: int) -> None:
    """An ordered selector: a heap a row, not an array a lease."""
    bench = Bench([Task("task_0", needs=["response_ids"], selector=LongestFirst())])
    rng = np.random.default_rng(0)
    for start in range(0, resident, 4096):
        rows = min(4096, resident - start)
        bench.put(rows, m.RowFacts(tokens=rng.integers(1, 4096, rows).astype("<i8").tobytes()))
    benchmark.pedantic(lambda: bench.release(bench.lease(64)), rounds=200, warmup_rounds=5)


def test_lease_and_ack_of_whole_groups(benchmark: Any) -> None:
    """Sixty-four groups of eight."""
    bench = Bench([Task("task_0", needs=["response_ids"], groups=Complete())])
    for start in range(0, 320 * BATCH, BATCH):
        group = np.repeat(np.arange(start, start + 64), 8).astype("<i8").tobytes()
        bench.put(BATCH, m.RowFacts(group_id=group, group_size=np.full(BATCH, 8, "<i4").tobytes()))

    def once() -> None:
        leased = bench.ask(m.LeaseRequest("rollouts", "task_0", groups=64))
        assert len(leased.content.rows) == 8 * BATCH
        bench.ack(leased)

    benchmark.pedantic(once, rounds=200)


def test_put_and_ack_one_row(benchmark: Any) -> None:
    """A row that comes alone and leaves alone."""
    bench = Bench(SIX[:1]).fill(10_000)

    def once() -> None:
        bench.put(1)
        bench.ack(bench.lease(1))

    benchmark.pedantic(once, rounds=500)
