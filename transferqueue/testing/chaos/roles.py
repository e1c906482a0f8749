"""What the processes of a run do until they are told to stop, or are killed.

Two tables share one arena. ``rollouts`` is paced: producers reserve, the reward task gives a column with its ack, the
trainer acks with steps, advances the clock, saves its model and, after its death, rolls back to what was saved.
``flood`` is not: its producer is ahead of its consumers and fills what memory there is.

Lines of a diary, after kind and time::

    put?      table, first, rows, version   before a put of rows with ascending numbers
    put       first                         it returned
    lease     lease, numbers                the rows came, and their bytes were computed again
    ack?      lease                         before its ack
    ack       lease, step                   it returned
    late      lease                         it was refused: others have the rows
    rollback  step                          the trainer is as it was then
    advance?  version                       before the clock is to be this
    again     why                           a wait or a connection ended; it is tried anew
    broken    what                          a promise was not kept
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import transferqueue as tq
from transferqueue.testing.chaos.fault_plan import LEASE_S
from transferqueue.testing.chaos.payload import LARGE_WORDS, SMALL_WORDS, Payload, reward_of
from transferqueue.testing.chaos.process_context import ProcessContext

PACED: Final = "rollouts"
FLOOD: Final = "flood"
STALENESS_MAX: Final = 8
ROWS_MAX: Final = {PACED: 4096, FLOOD: 2048}
PUT_ROWS: Final = 32
REWARD_ROWS: Final = 16
TRAIN_ROWS: Final = 128
FLOOD_ROWS: Final = 16
PACE_S: Final = 0.04
"""Between two puts of one producer: the machine is not to be used up, others may share it."""
FLOOD_PACE_S: Final = 0.05
WORK_S: Final = 0.03
"""What a worker does with rows takes this long, so that deaths find rows in its hands."""
STEPS_OF_SAVE: Final = 4
WAIT_S: Final = 120.0
"""Far more than any fault lasts: a wait that ends by its deadline is stuck, and is told as such."""
ADVANCE_S: Final = 0.05


def make_tables(queue: tq.Queue) -> None:
    """Both tables, at clock 0."""
    lease: dict[str, Any] = {"lease_s": LEASE_S, "attempts_max": 0}
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


def produce(post: ProcessContext, queue: tq.Queue) -> None:
    """Rows of the paced table, each put within a reservation."""
    table, payload = queue.table(PACED), Payload(post.seed, SMALL_WORDS)
    while not post.stopping:
        with table.reserve(PUT_ROWS, timeout_s=WAIT_S) as room:
            _put(post, table, payload, PUT_ROWS, room.version, reservation=room)
        post.pace(PACE_S)


def flood(post: ProcessContext, queue: tq.Queue) -> None:
    """Large rows, put whether somebody takes them or not."""
    table, payload = queue.table(FLOOD), Payload(post.seed, LARGE_WORDS)
    while not post.stopping:
        _put(post, table, payload, FLOOD_ROWS)
        post.pace(FLOOD_PACE_S)


def _put(
    post: ProcessContext, table: tq.Table, payload: Payload, rows: int, version: int | None = None, **facts: Any
) -> None:
    numbers = post.numbers(rows)
    post.diary.write("put?", table.name, numbers[0], rows, version)
    try:
        table.put(
            key=[str(number) for number in numbers],
            input_ids=[payload.of(number) for number in numbers],
            policy_version=version,
            timeout_s=WAIT_S,
            **facts,
        )
    except tq.OutOfMemory as error:  # the disk is full: refused, and nothing was put
        post.diary.write("again", str(error))
        return
    post.diary.write("put", numbers[0])


def reward(post: ProcessContext, queue: tq.Queue) -> None:
    """Give each row the reward that its number says."""
    table, payload = queue.table(PACED), Payload(post.seed, SMALL_WORDS)
    for batch in _batches(table, "reward", REWARD_ROWS):
        numbers = _verify(post, batch, payload)
        _ack(post, batch, rewards=np.array([reward_of(one) for one in numbers]))


def drain(post: ProcessContext, queue: tq.Queue) -> None:
    """Take the rows of the flood."""
    table, payload = queue.table(FLOOD), Payload(post.seed, LARGE_WORDS)
    for batch in _batches(table, "drain", FLOOD_ROWS):
        _verify(post, batch, payload)
        _ack(post, batch)


class Saved(msgspec.Struct):
    """What a model knows on disk: its last step, and the clock then."""

    step: int
    version: int

    @classmethod
    def load(cls, path: Path) -> Saved:
        """The last one saved; one that has learned nothing, if there is none."""
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls(-1, 0)

    def save(self, path: Path) -> None:
        """This model takes the place of the last one, whole."""
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self))
        os.replace(new, path)


def train(post: ProcessContext, queue: tq.Queue) -> None:
    """Steps on rewarded rows, from the last model that was saved on."""
    table, payload = queue.table(PACED), Payload(post.seed, SMALL_WORDS)
    path = post.directory / "model.json"
    model = Saved.load(path)
    table.rollback(model.step, task="train", version=model.version)
    post.diary.write("rollback", model.step)
    for batch in _batches(table, "train", TRAIN_ROWS):
        numbers = _verify(post, batch, payload)
        _check_trainable(post, batch, numbers)
        if not _ack(post, batch, step=model.step + 1):
            continue
        model.step += 1
        _advance(post, table, model)
        if model.step % STEPS_OF_SAVE == 0:
            model.save(path)
            table.checkpointed(model.step)
    if model.step >= 0:
        model.save(path)
        table.checkpointed(model.step)


def _advance(post: ProcessContext, table: tq.Table, model: Saved) -> None:
    """The clock goes on unless rows that are still to be trained hold it, or nobody answers in time: then the next step asks again."""
    post.diary.write("advance?", model.version + 1)
    try:
        table.advance(model.version + 1, timeout_s=ADVANCE_S)
    except (tq.DeadlineExceeded, tq.Unreachable):
        return
    model.version += 1


def _check_trainable(post: ProcessContext, batch: tq.Batch, numbers: list[int]) -> None:
    behind = batch.version - int(batch.policy_version.min())
    if behind > STALENESS_MAX:
        post.diary.write("broken", f"lease {batch.lease}: a row is {behind} versions old, of at most {STALENESS_MAX}")
    given = np.asarray(batch["rewards"].numpy()).tolist()
    if given != [reward_of(number) for number in numbers]:
        post.diary.write(
            "broken", f"lease {batch.lease}: rewards {given[:4]}... are not those of rows {numbers[:4]}..."
        )


def _batches(table: tq.Table, task: str, rows: int) -> Iterator[tq.Batch]:
    while True:
        try:
            yield table.lease(task, rows=rows, at_least=1, timeout_s=WAIT_S)
        except tq.EndOfTable:
            return


def _verify(post: ProcessContext, batch: tq.Batch, payload: Payload) -> list[int]:
    numbers = [int(key) for key in batch.keys]
    found = batch["input_ids"].list()
    wrong = [number for number, row in zip(numbers, found, strict=True) if not payload.matches(number, np.asarray(row))]
    if wrong:
        post.diary.write("broken", f"lease {batch.lease}: rows {wrong[:8]} have other bytes than were put")
    post.diary.write("lease", batch.lease, numbers)
    post.pace(WORK_S)
    return numbers


def _ack(post: ProcessContext, batch: tq.Batch, step: int = -1, **columns: Any) -> bool:
    post.diary.write("ack?", batch.lease)
    try:
        batch.ack(step=step, **columns)
    except tq.LeaseExpired:
        post.diary.write("late", batch.lease)
        return False
    post.diary.write("ack", batch.lease, step)
    return True


WORK: Final[dict[str, Callable[[ProcessContext, tq.Queue], None]]] = {
    "producer": produce,
    "flooder": flood,
    "reward": reward,
    "drainer": drain,
    "trainer": train,
}


def live(post: ProcessContext) -> None:
    """The whole life of a role, connected anew if it is a remote one whose connection was given up."""
    work = WORK[post.role.partition("-")[0]]
    while True:
        try:
            with post.way.connect() as queue:
                work(post, queue)
            return
        except tq.PeerError as error:
            if post.way.key is None:  # on the server's own machine nothing excuses that
                raise
            post.diary.write("again", f"{type(error).__name__}: {error}")
            if post.stopping:
                return
