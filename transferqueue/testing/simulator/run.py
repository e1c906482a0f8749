"""One seed: chaos, then heal, then everything must drain."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Final

from transferqueue.errors import TransferQueueError
from transferqueue.server.node import Node
from transferqueue.testing.simulator.machine import Broken, Server
from transferqueue.testing.simulator.process import Process, Role
from transferqueue.testing.simulator.roles import Books, closer, consumer, create, producer
from transferqueue.testing.simulator.world import Rates, World

CHAOS_S: Final = 12.0
DRAIN_S: Final = 45.0
"""Less than a lease request waits: who is not woken is late."""
GROUPS: Final = 14


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a seed. broken: the promise that was; "" if none. rows: put, as the server says."""

    seed: int
    broken: str
    faults: Counter[str]
    rows: int


def replay_command(seed: int) -> str:
    """The one command that shows a seed again."""
    return f"python -m transferqueue.testing.simulate --seed {seed}"


def simulate(seed: int, rates: Rates | None = None) -> Result:
    """Run one seed. A function of `seed` and `rates` alone; takes about 0.1 s."""
    run = _Run(seed, rates)
    broken = ""
    try:
        run.whole()
    except Broken as error:
        broken = str(error)
    except (TransferQueueError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
        broken = f"a state machine failed: {error!r}"
    return Result(seed, broken, run.world.faults, run.rows_put)


class _Run:
    def __init__(self, seed: int, rates: Rates | None) -> None:
        self.world = World(seed, rates)
        chance = self.world.random
        self.books = Books(chance.choice((2, 3, 4)), chance.choice((1, 2, 3)), chance.choice((2, 3, 6)))
        self.limit = chance.choice((8, 12, 20)) * self.books.size
        self.server = Server(self.world, chance.choice((6, 10, 16)) * 4096, self._lives)
        self.server.arena.in_sight = self._in_sight
        self.server.deliver, self.server.checked = self._deliver, self._check
        self.server.on_up = self._reconnect
        self.left = [GROUPS]
        self.rows_put = 0
        self.numbers = 0
        roles = [partial(producer, books=self.books, left=self.left)] * 2
        roles += [partial(consumer, books=self.books, task="score")] * 2
        roles += [partial(consumer, books=self.books, task="train")] * 2
        self.workers = [
            Process(self.world, self.server, f"worker {at}", self._opened(role)) for at, role in enumerate(roles)
        ]
        self.closer = Process(self.world, self.server, "closer", partial(closer, books=self.books))

    def _opened(self, role: partial[Role]) -> partial[Role]:
        def open_first(process: Process) -> Role:
            yield create(self.books, self.limit)
            yield from role(process)

        return partial(open_first)

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, self.closer]

    def _lives(self, number: int) -> bool:
        return any(one.number == number and one.alive for one in self.processes)

    def _in_sight(self) -> list[tuple[int, int, str]]:
        return [(at, size, one.name) for one in self.processes for at, size in one.sights.values()]

    def _deliver(self, peer: bytes, frame: bytes) -> None:
        for one in self.processes:
            if one.alive and one.way.peer == peer:
                one.hear(frame)

    def _reconnect(self) -> None:
        for one in self.processes:
            if one.alive:
                one.way.broken = True
                self.world.after(self.world.random.uniform(0.0, 0.1), one.find_way)

    def _start(self, one: Process) -> None:
        if not one.alive and not one.done:
            self.numbers += 1
            one.start(self.numbers)

    # ------------------------------------------------------------ the course of a run

    def whole(self) -> None:
        self.server.start()
        for one in self.workers:
            self._start(one)
        until = CHAOS_S
        while self.world.now < until:
            self._strike(0.1)
            self._run_until(self.world.now + 0.1)
        self.world.healed = True
        if self.server.node is None:
            self.server._restart()
        self._drain(self.world.now + DRAIN_S)
        self._judge()

    def _run_until(self, when: float) -> None:
        while self.world.step(when):
            pass
        for one in self.workers:
            if not one.alive and not one.done:
                self._start(one)

    def _strike(self, seconds: float) -> None:
        world, rates = self.world, self.world.rates
        if world.strikes(rates.server_per_s * seconds, "server crashed"):
            self.server.kill()
        for one in [one for one in self.workers if one.alive]:
            if world.strikes(rates.crash_per_s * seconds, "client crashed"):
                one.kill()
            elif world.strikes(rates.pause_per_s * seconds, "client paused"):
                pause = world.random.choice((0.3, 1.0, 4.0))
                world.faults["client resumed late"] += pause > 2.5
                one.pause(pause)
            elif world.strikes(rates.partition_per_s * seconds, "partition begun"):
                one.way.hold(world.now + world.random.uniform(0.2, 3.0))
                if world.random.random() < 0.5:
                    world.after(0.5, one.find_way)
            elif world.strikes(rates.jump_per_s * seconds, "clock jump"):
                one.jump(world.random.choice((0.5, 5.0, 50.0)))

    def _drain(self, until: float) -> None:
        while self.world.now < until and not all(one.done for one in self.workers):
            self._run_until(self.world.now + 0.25)
            if all(one.done for one in self.workers[:2]) and not self.closer.done:
                self._start(self.closer)
        if waiting := [one.name for one in self.workers if not one.done]:
            raise Broken(f"stuck: {', '.join(waiting)} did not end within {DRAIN_S:g} s after all faults ended")

    # ------------------------------------------------------------ what must hold

    def _check(self, node: Node) -> None:
        if node.counters.internal_errors:
            raise Broken("the server had an internal error")
        for table in node.ledger.state.tables.values():
            dropped = sum(table.rows_dropped.values())
            if table.rows_put != table.rows_live + table.rows_done + dropped:
                raise Broken(
                    f"{table.rows_put} rows put are not {table.rows_live} live, {table.rows_done} done, {dropped} dropped"
                )
            if table.pacing is not None and table.outstanding > table.pacing.rows_ahead_max:
                raise Broken(f"{table.outstanding} rows are ahead of training, above {table.pacing.rows_ahead_max}")
            left = [one.left for one in table.flow.reservations.values()]
            if table.flow.reserved != sum(left) or table.flow.reserved < 0:
                raise Broken(f"{table.flow.reserved} rows are reserved, by reservations of {sum(left)}")
            if table.rows.pages.resident + table.flow.reserved > table.limits.rows:
                raise Broken(
                    f"{table.rows.pages.resident} rows there and {table.flow.reserved} reserved, above {table.limits.rows}"
                )
        extents = sum(one.nbytes for one in node.ledger.state.core.blocks.extents.values())
        if node.memory.used != extents:
            raise Broken(f"{node.memory.used} bytes are lent, by extents of {extents}")

    def _judge(self) -> None:
        ledger, books = self.server.ledger, self.books
        if ledger is None:
            raise Broken("no server runs")
        table = ledger.state.tables["t"]
        self.rows_put = table.rows_put
        dropped = sum(table.rows_dropped.values())
        if table.rows_live:
            raise Broken(f"{table.rows_live} rows are without a fate after the end")
        if not books.put <= table.rows_put <= books.maybe_put:
            raise Broken(
                f"{table.rows_put} rows were put; producers were told of {books.put}, and sent {books.maybe_put}"
            )
        sure = sum(("score", row) in books.acked for task, row in books.acked if task == "train")
        might = sum(task == "train" for task, _ in books.maybe_acked)
        if not sure <= table.rows_done <= might or not set(table.rows_dropped) <= {
            "stale",
            "group_incomplete",
            "attempts",
        }:
            raise Broken(
                f"{table.rows_done} rows are done; {sure} to {might} were acked; {dropped} dropped: {table.rows_dropped}"
            )
