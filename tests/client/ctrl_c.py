"""A program that is interrupted all the time: `python -m tests.client.ctrl_c MODE ADDRESS INTERRUPTS SEED`.

It puts, leases and acks rows. A timer sends it SIGINT 0 to 3 ms after each begin of a round, again and again, in the
middle of whatever it does. Then it prints what it knows of its rows, as JSON, keeps its session until its input ends,
and ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import numpy as np

import transferqueue as tq

LATEST_S: Final = 3e-3
SMALL, LARGE, LARGE_EVERY = 1 << 7, 1 << 13, 32
"""Values of a row that is copied out of the arena, and of each 32nd row, which is mapped."""
WAIT_S: Final = 1.0
"""Longer than the timer of a round: only an interrupt inside a finalizer, where Python drops it, does not end it."""
ENDS_S: Final = 5.0
"""How long a cancelled task may take. asyncio itself may lose a callback to an interrupt: such a task is dropped."""


class Account:
    """What one worker knows of its rows: which puts were begun and answered, which acks were begun and answered."""

    def __init__(self, seed: int, first: int) -> None:
        self.random = random.Random(seed)
        self.begun = count(first)
        self.put: list[int] = []
        self.acked: list[int] = []
        self.unsure: list[int] = []
        self.batch: Any = None
        self.waits = 0.1
        """Part of the turns that wait for a row that never comes, until they are interrupted."""

    def columns(self) -> tuple[int, dict[str, Any]]:
        """The number of a new row, and its columns."""
        number = next(self.begun)
        return number, {"n": [number], "x": [np.full(SMALL if number % LARGE_EVERY else LARGE, number)]}

    def numbers(self, batch: Any) -> list[int]:
        """The rows of a batch, each of which is whole."""
        numbers: list[int] = batch["n"].list()
        for number, values in zip(numbers, batch["x"].list(), strict=True):
            if not (np.asarray(values) == number).all():
                raise SystemExit(f"row {number} is torn")
        return numbers

    def begin(self, turn: Callable[[], object]) -> None:
        """Do a turn without an interrupt: it imports modules."""
        waits, self.waits = self.waits, 0.0
        while not self.acked:
            turn()
        self.waits = waits

    def turn(self, table: tq.Table, empty: tq.Table) -> None:
        """Put a row, lease one, or ack or release the leased one."""
        if self.batch is not None:
            batch, self.batch = self.batch, None
            if self.random.random() < 0.2:
                batch.release()
                return
            numbers = self.numbers(batch)
            self.unsure += numbers
            batch.ack()
            self.acked += numbers
        elif self.random.random() < 0.5:
            number, columns = self.columns()
            table.put(**columns)
            self.put.append(number)
        else:
            of = empty if self.random.random() < self.waits else table
            with suppress(tq.DeadlineExceeded):
                self.batch = of.lease("train", rows=1, timeout_s=WAIT_S)

    async def aturn(self, table: tq.AsyncTable, empty: tq.AsyncTable) -> None:
        """`turn` in an event loop."""
        if self.batch is not None:
            batch, self.batch = self.batch, None
            if self.random.random() < 0.2:
                await batch.release()
                return
            numbers = self.numbers(batch)
            self.unsure += numbers
            await batch.ack()
            self.acked += numbers
        elif self.random.random() < 0.5:
            number, columns = self.columns()
            await table.put(**columns)
            self.put.append(number)
        else:
            of = empty if self.random.random() < self.waits else table
            with suppress(tq.DeadlineExceeded):
                self.batch = await of.lease("train", rows=1, timeout_s=WAIT_S)


class Timer:
    """Sends this process one SIGINT a round."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._armed = False
        self.interrupts = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, self._ring)

    def round(self, work: Callable[[], object], settle: Callable[[], object]) -> None:
        """Do the work until it is interrupted. Before every other round `settle` has the client connect again."""
        if self._random.random() < 0.5:
            settle()
        # A `Runner` raises CancelledError if the signal comes as it begins.
        with suppress(KeyboardInterrupt, asyncio.CancelledError):
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, LATEST_S))
            while self._armed:
                work()

    def _ring(self, number: int, frame: object) -> None:
        self._armed = False
        self.interrupts += 1
        signal.raise_signal(signal.SIGINT)


def alone(queue: tq.Queue, timer: Timer, rounds: int, seed: int) -> list[Account]:
    """A lone caller, which drives its channel."""
    table, empty, account = queue.table("t"), queue.table("empty"), Account(seed, 0)
    account.begin(lambda: account.turn(table, empty))
    for _ in range(rounds):
        timer.round(lambda: account.turn(table, empty), queue.tables)
    return [account]


def crowd(queue: tq.Queue, timer: Timer, rounds: int, seed: int) -> list[Account]:
    """A caller beside two threads that share its session: the I/O thread makes most calls."""
    table, empty, over = queue.table("t"), queue.table("empty"), threading.Event()
    accounts = [Account(seed + place, place << 40) for place in range(3)]

    def work(account: Account) -> None:
        account.waits = 0.0
        while not over.wait(0.002):
            account.turn(table, empty)

    accounts[0].begin(lambda: accounts[0].turn(table, empty))
    threads = [threading.Thread(target=work, args=(account,)) for account in accounts[1:]]
    for thread in threads:
        thread.start()
    for _ in range(rounds):
        timer.round(lambda: accounts[0].turn(table, empty), queue.tables)
    over.set()
    for thread in threads:
        thread.join()
    return accounts


class InLoop:
    """The turns of an event loop, which is interrupted and runs again."""

    def __init__(self, address: str, seed: int, events: asyncio.AbstractEventLoop, run: Callable[[Any], Any]) -> None:
        self._events, self._run, self._account = events, run, Account(seed, 0)
        events.set_exception_handler(lambda *_: None)
        self._queue, self._table, self._empty = self._in_order(lambda: self._opened(address))
        self._account.begin(lambda: self._in_order(self._turn))

    async def _opened(self, address: str) -> tuple[tq.AsyncQueue, tq.AsyncTable, tq.AsyncTable]:
        queue = await tq.aconnect(address, label="interrupted")
        return queue, await queue.table("t"), await queue.table("empty")

    async def _turn(self) -> None:
        await self._account.aturn(self._table, self._empty)

    def _in_order(self, begin: Callable[[], Any]) -> Any:
        """Run to the end. A task that an interrupted run left may stop the loop when it ends."""
        while True:
            try:
                return self._run(begin())
            except RuntimeError as error:
                if "stopped before" not in str(error):
                    raise

    def _end_tasks(self) -> None:
        left = asyncio.all_tasks(self._events)
        for task in left:
            task.cancel()
        self._in_order(lambda: _ended(left))
        for task in left:
            if task.done():
                task.cancelled() or task.exception()
            else:
                task._log_destroy_pending = False  # type: ignore[attr-defined]

    def rounds(self, timer: Timer, rounds: int) -> list[Account]:
        """Be interrupted so often."""
        for _ in range(rounds):
            timer.round(lambda: self._in_order(self._turn), lambda: self._in_order(self._queue.tables))
            self._end_tasks()
        return [self._account]

    def close(self) -> None:
        """End the session."""
        self._in_order(lambda: _closed(self._queue))


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=ENDS_S)


async def _closed(queue: tq.AsyncQueue) -> None:
    await queue.close()


def in_loop(address: str, seed: int) -> InLoop:
    """A loop into which KeyboardInterrupt comes anywhere."""
    events = asyncio.new_event_loop()
    return InLoop(address, seed, events, events.run_until_complete)


def in_runner(address: str, seed: int) -> InLoop:
    """A loop of `asyncio.Runner`, as of `asyncio.run`: Ctrl-C cancels its main task."""
    runner = asyncio.Runner()
    return InLoop(address, seed, runner.get_loop(), runner.run)


MODES: Final[dict[str, Any]] = {"alone": alone, "crowd": crowd, "loop": in_loop, "cancelled": in_runner}


def main(mode: str, address: str, rounds: int, seed: int) -> None:
    """Be interrupted `rounds` times, say what became of the rows, and end with the input."""
    sys.unraisablehook = lambda _: None  # what an interrupt raises in a finalizer
    timer = Timer(seed)
    close: Callable[[], object]
    if mode in ("loop", "cancelled"):
        looping = MODES[mode](address, seed)
        accounts, close = looping.rounds(timer, rounds), looping.close
    else:
        queue = tq.connect(address, label="interrupted")
        accounts, close = MODES[mode](queue, timer, rounds, seed), queue.close
    for account in accounts:
        account.batch = None
    gc.collect()  # tracebacks and tasks in cycles still hold batches
    told = {
        name: [one for account in accounts for one in getattr(account, name)] for name in ("put", "acked", "unsure")
    }
    print(
        json.dumps(told | {"interrupts": timer.interrupts}),
        flush=True,
    )
    sys.stdin.read()
    close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
