"""The work of each role of a run, until its parent stops or kills its process.

Two tables share one arena. ``rollouts`` is paced: producers reserve, the reward task gives a column with its ack, the
trainer acks with steps, advances the clock, saves its model and, after its death, rolls back to the saved model.
``flood`` is not paced: its producer is faster than its consumers and fills the memory.

Lines of an event log, after kind and time::

    put?      table, first, rows, version   before a put of rows with ascending numbers
    put       first                         it returned
    lease     lease, numbers                the rows came, and their bytes were computed again
    ack?      lease                         before its ack
    ack       lease, step                   it returned
    late      lease                         it was refused: other workers have the rows
    rollback  step                          the trainer returned to that step
    advance?  version                       before the clock is advanced to it
    again     why                           a wait or a connection ended; the role tries again
    broken    what                          a violation
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import transferqueue as tq
from tests.chaos.fault_plan import LEASE_S
from tests.chaos.payload import LARGE_WORDS, SMALL_WORDS, Payload, reward_of
from tests.chaos.process_context import ProcessContext

PACED: Final = "rollouts"
FLOOD: Final = "flood"
STALENESS_MAX: Final = 8
ROWS_MAX: Final = {PACED: 4096, FLOOD: 2048}
PUT_ROWS: Final = 32
REWARD_ROWS: Final = 16
TRAIN_ROWS: Final = 128
FLOOD_ROWS: Final = 16
PACE_S: Final = 0.04
"""Pause between two puts of one producer, which bounds the load on the machine."""
FLOOD_PACE_S: Final = 0.05
WORK_S: Final = 0.03
"""How long a worker holds rows, so that many deaths are of workers with rows on lease."""
SAVE_EVERY_STEPS: Final = 4
WAIT_S: Final = 120.0
"""Far longer than any fault: a wait that ends by this deadline is reported as stuck."""
ADVANCE_S: Final = 0.05


def make_tables(queue: tq.Queue) -> None:
    """Make both tables, at policy version 0."""
    lease: dict[str, Any] = {"lease_s": LEASE_S}
    paced = queue.create_table(
        PACED,
        tasks=[
            tq.Task("reward", needs=["input_ids"], gives=["rewards"], **lease),
            tq.Task("train", needs=["input_ids", "rewards"], **lease),
        ],
        limits=tq.Limits(rows=ROWS_MAX[PACED]),
        pacing=tq.Pacing("train", batch_rows=128, depth=7, max_staleness=STALENESS_MAX, on_stale=tq.HoldClock()),
    )
    queue.create_table(
        FLOOD, tasks=[tq.Task("drain", needs=["input_ids"], **lease)], limits=tq.Limits(rows=ROWS_MAX[FLOOD])
    )
    paced.advance(0)


def produce(context: ProcessContext, queue: tq.Queue) -> None:
    """Put rows into the paced table, each put within a reservation."""
    table, payload = queue.table(PACED), Payload(context.seed, SMALL_WORDS)
    while not context.stopping:
        with table.reserve(PUT_ROWS, timeout_s=WAIT_S) as room:
            _put(context, table, payload, PUT_ROWS, room.version, reservation=room)
        context.pace(PACE_S)


def flood(context: ProcessContext, queue: tq.Queue) -> None:
    """Put large rows into the flood table without a reservation."""
    table, payload = queue.table(FLOOD), Payload(context.seed, LARGE_WORDS)
    while not context.stopping:
        _put(context, table, payload, FLOOD_ROWS)
        context.pace(FLOOD_PACE_S)


def _put(
    context: ProcessContext, table: tq.Table, payload: Payload, rows: int, version: int | None = None, **facts: Any
) -> None:
    numbers = context.numbers(rows)
    context.log.write("put?", table.name, numbers[0], rows, version)
    try:
        table.put(
            key=[str(number) for number in numbers],
            input_ids=[payload.of(number) for number in numbers],
            policy_version=version,
            timeout_s=WAIT_S,
            **facts,
        )
    except tq.OutOfMemory as error:  # the disk is full: the server refused the put, and nothing was put
        context.log.write("again", str(error))
        return
    context.log.write("put", numbers[0])


def reward(context: ProcessContext, queue: tq.Queue) -> None:
    """Ack each row with the reward that follows from its number."""
    table, payload = queue.table(PACED), Payload(context.seed, SMALL_WORDS)
    for batch in _batches(table, "reward", REWARD_ROWS):
        numbers = _verify(context, batch, payload)
        _ack(context, batch, rewards=np.array([reward_of(number) for number in numbers]))


def drain(context: ProcessContext, queue: tq.Queue) -> None:
    """Lease the rows of the flood table and ack them."""
    table, payload = queue.table(FLOOD), Payload(context.seed, LARGE_WORDS)
    for batch in _batches(table, "drain", FLOOD_ROWS):
        _verify(context, batch, payload)
        _ack(context, batch)


class SavedModel(msgspec.Struct):
    """The trainer's model on disk: its last step, and the policy version then."""

    step: int
    version: int

    @classmethod
    def load(cls, path: Path) -> SavedModel:
        """The last saved model, or one before its first step."""
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls(-1, 0)

    def save(self, path: Path) -> None:
        """Replace the saved model atomically."""
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self))
        os.replace(new, path)


def train(context: ProcessContext, queue: tq.Queue) -> None:
    """Train on rewarded rows, from the saved model on."""
    table, payload = queue.table(PACED), Payload(context.seed, SMALL_WORDS)
    path = context.directory / "model.json"
    model = SavedModel.load(path)
    table.rollback(model.step, task="train", version=model.version)
    context.log.write("rollback", model.step)
    for batch in _batches(table, "train", TRAIN_ROWS):
        numbers = _verify(context, batch, payload)
        _check_trainable(context, batch, numbers)
        if not _ack(context, batch, step=model.step + 1):
            continue
        model.step += 1
        _advance(context, table, model)
        if model.step % SAVE_EVERY_STEPS == 0:
            model.save(path)
            table.checkpointed(model.step)
    if model.step >= 0:
        model.save(path)
        table.checkpointed(model.step)


def _advance(context: ProcessContext, table: tq.Table, model: SavedModel) -> None:
    """Advance the policy version. If untrained rows hold it, or the server does not answer in time, the next step tries
    again."""
    context.log.write("advance?", model.version + 1)
    try:
        table.advance(model.version + 1, timeout_s=ADVANCE_S)
    except (tq.DeadlineExceeded, tq.Unreachable):
        return
    model.version += 1


def _check_trainable(context: ProcessContext, batch: tq.Batch, numbers: list[int]) -> None:
    behind = batch.version - int(batch.policy_version.min())
    if behind > STALENESS_MAX:
        context.log.write("broken", f"lease {batch.lease}: a row is {behind} versions old, of at most {STALENESS_MAX}")
    rewards = np.asarray(batch["rewards"].numpy()).tolist()
    if rewards != [reward_of(number) for number in numbers]:
        context.log.write(
            "broken", f"lease {batch.lease}: rewards {rewards[:4]}... are not those of rows {numbers[:4]}..."
        )


def _batches(table: tq.Table, task: str, rows: int) -> Iterator[tq.Batch]:
    while True:
        try:
            yield table.lease(task, rows=rows, at_least=1, timeout_s=WAIT_S)
        except tq.EndOfTable:
            return


def _verify(context: ProcessContext, batch: tq.Batch, payload: Payload) -> list[int]:
    numbers = [int(key) for key in batch.keys]
    values = batch["input_ids"].list()
    wrong = [
        number for number, row in zip(numbers, values, strict=True) if not payload.matches(number, np.asarray(row))
    ]
    if wrong:
        context.log.write("broken", f"lease {batch.lease}: rows {wrong[:8]} have other bytes than were put")
    context.log.write("lease", batch.lease, numbers)
    context.pace(WORK_S)
    return numbers


def _ack(context: ProcessContext, batch: tq.Batch, step: int = -1, **columns: Any) -> bool:
    context.log.write("ack?", batch.lease)
    try:
        batch.ack(step=step, **columns)
    except tq.LeaseExpired:
        context.log.write("late", batch.lease)
        return False
    context.log.write("ack", batch.lease, step)
    return True


ROLE_WORK: Final[dict[str, Callable[[ProcessContext, tq.Queue], None]]] = {
    "producer": produce,
    "flooder": flood,
    "reward": reward,
    "drainer": drain,
    "trainer": train,
}


def run_role(context: ProcessContext) -> None:
    """Run the work of a role. A remote role whose connection was lost connects again."""
    work = ROLE_WORK[context.role.partition("-")[0]]
    while True:
        try:
            with context.endpoint.connect() as queue:
                work(context, queue)
            return
        except tq.PeerError as error:
            if context.endpoint.key is None:  # on the server's own machine a connection must never be lost
                raise
            context.log.write("again", f"{type(error).__name__}: {error}")
            if context.stopping:
                return
