"""A job whose trainer acks with its steps, saves its model now and then, and rolls back to the last save after its
death.

Whatever happens, the saved model has learned from each row once: rows of steps after the last save are given out again,
rows of those before it never.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulator.job import Feed, SimJob, Steps, inline, persistently
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import EndOfTable, FlowSignal, Unreachable
from transferqueue.limits import Limits
from transferqueue.policies import Task
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

PUTS: Final = 6
ROWS: Final = 6
SAVE_EVERY: Final = 3


class CheckpointJob(SimJob):
    """A table whose task acks with steps. saved: outlives the trainer: the step of the last save, and the rows in
    it."""

    table = "stepped"

    def __init__(self) -> None:
        task = Task("train", needs=["number"], lease_s=2.5)
        self._feed = Feed(self.table, puts=PUTS, rows=ROWS, limits=Limits(rows=4 * ROWS), tasks=[task])
        self._saved: tuple[int, frozenset[int]] = (-1, frozenset())

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        return {"prompts": self._feed.feed, "trainer": self._train}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`."""
        self._feed.judge(state.tables[self.table], len(self._saved[1]))

    def _train(self, process: Process) -> Steps:
        yield from self._feed.open()
        ended = False
        while not ended:
            step, rows = self._saved
            yield from persistently(process, partial(self._go_back, step))
            try:
                ended = yield from self._learn(process, step, set(rows))
            except Unreachable:  # the server may have counted that step or not
                yield 0.05

    def _go_back(self, step: int) -> Steps:
        yield m.Rollback(self.table, step)

    def _learn(self, process: Process, step: int, model: set[int]) -> Steps:
        """Train from this model on. True when the table has ended and all is saved, False to roll back to the last
        save."""
        while True:
            try:
                rows = yield from self._learn_once(process, step + 1, model)
            except EndOfTable:
                break
            except FlowSignal:
                yield 0.05
                continue
            step += 1
            unsaved = step, frozenset(model)
            model.update(rows)
            if step and step % SAVE_EVERY == 0:  # the save that began before this step is complete now
                yield from self._save(step - 1, unsaved[1])
            if process.world.strikes(0.02, "trainer went back"):
                return False
        yield from self._save(step, frozenset(model))
        return (yield from self._is_all(model))

    def _learn_once(self, process: Process, step: int, model: set[int]) -> Steps:
        """Learn from one lease, or from two that are acked in one commit."""
        wait_s = 60.0 if process.world.healed else 2.0
        leases = [(yield m.LeaseRequest(self.table, "train", rows=4, at_least=1, wait_s=wait_s))]
        if step % 2:
            try:
                leases.append((yield m.LeaseRequest(self.table, "train", rows=2, at_least=1)))
            except FlowSignal:
                yield 0.0  # no more rows are ready
        rows = [row for lease in leases for row in inline(lease.content, "number")]
        if again := model & set(rows):
            raise PromiseBroken(f"rows {sorted(again)} were given out again, and the model has learned from them")
        yield process.world.random.uniform(0.01, 0.3)
        yield _ack(self.table, leases, step)
        return rows

    def _save(self, step: int, rows: frozenset[int]) -> Steps:
        self._saved = step, rows
        yield m.CommitCheckpoint(self.table, step)

    def _is_all(self, model: set[int]) -> Steps:
        """Every ordinal that was put is done or dropped: the cursor is at the first ordinal that was not put."""
        first = next(number for number in range(len(model) + 1) if number not in model)
        cursor = yield m.Cursor(self.table)
        if cursor.ordinal != first:
            raise PromiseBroken(f"the cursor is at ordinal {cursor.ordinal}, and {first} is the first without a fate")
        return True


def _ack(table: str, leases: list[m.Leased], step: int) -> m.Ack | m.AckLeases:
    if len(leases) == 1:
        return m.Ack(table, leases[0].lease, leases[0].token, step=step)
    numbers = b"".join(lease.lease.to_bytes(8, "little") for lease in leases)
    return m.AckLeases(table, numbers, b"".join(lease.token.to_bytes(8, "little") for lease in leases), step)
