"""Run one seed: inject faults, end them all, then everything must drain."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tests.simulator.backlog import FEWER_FAULTS, BacklogJob, LargeBlocksJob
from tests.simulator.bounds import bounded
from tests.simulator.columns import ColumnEndsJob
from tests.simulator.continued import ContinuedJob
from tests.simulator.copied import ReplicatedShardsJob
from tests.simulator.crowd import CrowdJob
from tests.simulator.interned import INTERNED_PAGES, InternedJob
from tests.simulator.job import SimJob
from tests.simulator.kept import ManualRetentionJob
from tests.simulator.machine import PromiseBroken, SimServer, own_extents
from tests.simulator.process import Process
from tests.simulator.ranks import SharedBatchJob
from tests.simulator.roles import Rollouts
from tests.simulator.stepped import CheckpointJob
from tests.simulator.weights import CHANNEL, ForwardedWeightsJob, ShardedWeightsJob, WeightChannelJob
from tests.simulator.world import Rates, World
from transferqueue.errors import TransferQueueError
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import PAGE_BYTES, SIZE_BYTES_MAX
from transferqueue.policies import Refill
from transferqueue.server.coordinator import Coordinator

CHAOS_S: Final = 9.0
DRAIN_S: Final = 45.0
"""Shorter than the wait of a lease request, so that a waiter that is not woken is reported as stuck."""
SHARDED: Final = 0.12
"""Share of the seeds with remote shards. They run no other job, because the rows of other jobs must not be lost with a
shard."""


CROWDED: Final = {"t": "score", "interned": "learn", "copied": "use"}
"""Tables that a `CrowdJob` may lease rows of, each with the task."""
COLUMNS_EVERY: Final = 5
"""One of so many seeds without a weight channel has a `ColumnEndsJob`. Chosen by the seed alone, so other seeds run as
before."""


@dataclass(frozen=True, slots=True)
class WorldKind:
    """What a world has, whatever its seed says (see `SimRun`). crowded: a `CrowdJob`, too. backlog: the job that fills
    memory and disk, instead of those that the seed chooses. continues: a `ContinuedJob` beside `Rollouts`."""

    rates: Rates | None = None
    spills: bool = False
    interns: bool = False
    continues: bool = False
    crowded: bool = False
    backlog: type[BacklogJob] | None = None


_KINDS: Final = {
    "mixed": WorldKind(),
    "disk": WorldKind(spills=True),
    "backlog": WorldKind(FEWER_FAULTS, spills=True, backlog=BacklogJob),
    "full-disk": WorldKind(FEWER_FAULTS, spills=True, backlog=LargeBlocksJob),
    "interrupted": WorldKind(Rates(interrupted=0.03)),
    "interned": WorldKind(interns=True),
    "interned-disk": WorldKind(interns=True, spills=True),
    "continued": WorldKind(continues=True),
    "continued-disk": WorldKind(continues=True, spills=True),
}
KINDS: Final = _KINDS | {f"crowded-{name}": replace(kind, crowded=True) for name, kind in _KINDS.items()}
"""The kinds of worlds by name."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a seed. broken: the promise that was broken, "" if none. rows: rows put, by the server's count."""

    seed: int
    broken: str
    faults: Counter[str]
    rows: int


def replay_command(seed: int, kind: str = "mixed") -> str:
    """The command that repeats a seed of this kind of world."""
    return f"python -m tests.simulator --seed {seed}" + f" --kind {kind}" * (kind != "mixed")


def simulate(seed: int, kind: str = "mixed") -> Result:
    """Run one seed. A function of `seed` and `kind` (of `KINDS`) alone; takes about 0.1 s."""
    run = SimRun(seed, KINDS[kind])
    broken = ""
    try:
        run.whole()
    except PromiseBroken as error:
        broken = str(error)
    except (TransferQueueError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
        broken = f"a state machine failed: {error!r}"
    return Result(seed, broken, run.world.faults, run.rows_put)


def rows_ahead_max(table: TableState) -> float:
    """Bound on the rows that may be ahead of training. A group is refilled even after other rows took the places of its
    members, so at worst each row ahead is the last of its group."""
    if table.pacing is None:
        return math.inf
    rule = table.tasks[table.pacing.task].task.groups
    refilled = rule is not None and isinstance(rule.incomplete, Refill)
    return table.pacing.rows_ahead_max * (table.groups.largest if refilled else 1)


class SimRun:
    """The deployment of one seed: the server, the clients, and their jobs.

    A kind may say what the seed decides otherwise. spills: the server has a disk for cold blocks, and keeps nothing
    through a crash. interns: it has an `InternedJob` beside `Rollouts`.
    """

    def __init__(self, seed: int, kind: WorldKind = KINDS["mixed"]) -> None:
        self.seed, self.kind, self.world = seed, kind, World(seed, kind.rates)
        chance = self.world.random
        self.durable = chance.random() < 0.85
        self.roomy = chance.random() < 0.5
        pages = chance.choice((24, 32) if self.roomy else (6, 10, 16))
        pages += INTERNED_PAGES * (kind.interns and not kind.spills)
        self.spills = kind.spills or (not self.durable and seed % 2 == 1)
        self.durable = self.durable and not kind.spills
        disk_bytes = pages * PAGE_BYTES // 2 if kind.crowded and not kind.interns else SIZE_BYTES_MAX
        if kind.backlog is not None:
            disk_bytes = kind.backlog.disk_bytes
        self.server = SimServer(
            self.world,
            pages * PAGE_BYTES if kind.backlog is None else kind.backlog.arena_bytes,
            self._lives,
            durable=self.durable,
            spills=self.spills,
            disk_bytes=disk_bytes,
            disk_hangs=kind.spills,
        )
        self.server.arena.in_sight = self._in_sight
        self.server.deliver, self.server.checked = self._deliver, self._check
        self.server.on_down, self.server.on_up = self._server_ended, self._reconnect
        self.numbers = self.rows_put = 0
        self._checked: Coordinator | None = None
        self._events_until: Callable[[float], None]
        self._make_jobs()

    def _make_jobs(self) -> None:
        """Choose the jobs of the deployment and make their workers: `Rollouts` and one other job, or remote shards
        alone."""
        chance = self.world.random
        if self.kind.interns:
            self.jobs: list[SimJob] = [Rollouts(chance, roomy=self.roomy), InternedJob()]
        elif self.kind.continues:
            self.jobs = [Rollouts(chance, roomy=self.roomy), ContinuedJob(chance)]
        elif self.kind.backlog is not None:
            self.jobs = [self.kind.backlog(chance)]
        elif chance.random() < SHARDED:
            self.jobs = [ReplicatedShardsJob(chance)]
        else:
            self._choose_jobs(chance)
        if self.kind.crowded:
            table = self.jobs[-1].table if self.jobs[-1].table in CROWDED else self.jobs[0].table
            self.jobs.append(CrowdJob(table, CROWDED[table], memory=self.spills or table != "copied"))
        self.workers = [
            Process(self.world, self.server, name, role, partial(job.offer, name))
            for job in self.jobs
            for name, role in job.roles().items()
        ]

    def _choose_jobs(self, chance: random.Random) -> None:
        rollouts = Rollouts(chance, roomy=self.roomy)
        beside: list[SimJob] = [SharedBatchJob(), CheckpointJob(), ManualRetentionJob()]
        self.jobs = [rollouts, chance.choice(beside)]
        if self.roomy and chance.random() < 0.5:
            rollouts.account.channel = CHANNEL
            kind = chance.choice((WeightChannelJob, ShardedWeightsJob, ForwardedWeightsJob))
            self.jobs[1] = kind(chance.randint(1, 3), rollouts.account.advanced)
        elif self.seed % COLUMNS_EVERY == 2:
            self.jobs[1] = ColumnEndsJob()

    def _server_ended(self) -> None:
        """The server ended. At level ``memory`` its state is lost too, so all clients end and new jobs begin."""
        if not self.durable:
            for process in self.workers:
                if process.alive:
                    process.kill()
            self._make_jobs()

    def _lives(self, number: int) -> bool:
        return any(process.number == number and process.alive for process in self.workers)

    def _in_sight(self) -> list[tuple[int, int, str]]:
        return [(at, size, process.name) for process in self.workers for at, size in process.sights.values()]

    def _deliver(self, peer: bytes, frame: bytes) -> None:
        for process in self.workers:
            if process.alive and process.connection.peer == peer:
                process.hear(frame)

    def _reconnect(self) -> None:
        for process in self.workers:
            if process.alive:
                process.connection.broken = True
                self.world.after(self.world.random.uniform(0.0, 0.1), process.reconnect)

    def _start(self, process: Process) -> None:
        if not process.alive and not process.done:
            self.numbers += 1
            process.start(self.numbers)

    # ------------------------------------------------------------ the course of a run

    def whole(self) -> None:
        """Run the seed to its end; `PromiseBroken` at the first broken promise. `bounded` says what is not bounded
        outside the main thread."""
        with bounded(self.world) as self._events_until:
            self._run()

    def _run(self) -> None:
        self.server.start()
        for process in self.workers:
            self._start(process)
        until = CHAOS_S
        while self.world.now < until:
            self._strike(0.1)
            self._run_until(self.world.now + 0.1)
        self.world.healed = True
        if self.server.node is None:
            self.server._restart()
        self._drain(self.world.now + DRAIN_S)
        self._check_end()

    def _run_until(self, when: float) -> None:
        self._events_until(when)
        for process in self.workers:
            if not process.alive and not process.done:
                self._start(process)

    def _strike(self, seconds: float) -> None:
        world, rates = self.world, self.world.rates
        if world.strikes(rates.server_per_s * seconds, "server crashed"):
            self.server.kill()
        for process in [process for process in self.workers if process.alive]:
            if world.strikes(rates.crash_per_s * seconds, "client crashed"):
                process.kill()
            elif world.strikes(rates.pause_per_s * seconds, "client paused"):
                pause = world.random.choice((0.3, 1.0, 4.0))
                world.faults["client resumed late"] += pause > 2.5
                process.pause(pause)
            elif world.strikes(rates.partition_per_s * seconds, "partition begun"):
                process.connection.hold(world.now + world.random.uniform(0.2, 3.0))
                if world.random.random() < 0.5:
                    world.after(0.5, process.reconnect)
            elif world.strikes(rates.jump_per_s * seconds, "clock jump"):
                process.jump(world.random.choice((0.5, 5.0, 50.0)))

    def _drain(self, until: float) -> None:
        while self.world.now < until and not all(process.done for process in self.workers):
            self._run_until(self.world.now + 0.25)
        if waiting := [process.name for process in self.workers if not process.done]:
            raise PromiseBroken(f"stuck: {', '.join(waiting)} did not end within {DRAIN_S:g} s after all faults ended")

    # ------------------------------------------------------------ what must hold

    def _check(self, node: Coordinator) -> None:
        if node.counters.internal_errors and not self.world.rates.interrupted:
            raise PromiseBroken("the server had an internal error")
        for table in node.ledger.state.tables.values():
            dropped = sum(table.rows_dropped.values())
            if table.rows_put != table.rows_live + table.rows_done + dropped:
                raise PromiseBroken(
                    f"{table.rows_put} rows put are not {table.rows_live} live, {table.rows_done} done, {dropped} "
                    "dropped"
                )
            if table.outstanding > (most := rows_ahead_max(table)):
                raise PromiseBroken(f"{table.outstanding} rows are ahead of training, above {most}")
            left = [reservation.left for reservation in table.flow.reservations.values()]
            if table.flow.reserved != sum(left) or table.flow.reserved < 0:
                raise PromiseBroken(f"{table.flow.reserved} rows are reserved, by reservations of {sum(left)}")
            if table.rows_resident + table.flow.reserved > table.limits.rows:
                raise PromiseBroken(
                    f"{table.rows_resident} rows there and {table.flow.reserved} reserved, above {table.limits.rows}"
                )
            if table.limits.bytes_max is not None and table.usage.bytes > table.limits.bytes_max:
                raise PromiseBroken(f"{table.usage.bytes} bytes are in a table, above {table.limits.bytes_max}")
        for job in self.jobs:
            job.check_books(node.ledger.state, whole=node is not self._checked)
        self._checked = node
        extents = sum(extent.nbytes for extent in own_extents(node.ledger))
        if node.memory.used != extents:
            raise PromiseBroken(f"{node.memory.used} bytes are lent, by extents of {extents}")

    def _check_end(self) -> None:
        ledger = self.server.ledger
        if ledger is None:
            raise PromiseBroken("no server runs")
        self.rows_put = sum(table.rows_put for table in ledger.state.tables.values())
        for job in self.jobs:
            job.judge(ledger.state)
