"""What the diaries of a run say together: was each row that was put done once by each task, and nothing lost?

The law:

- A put that returned is there. One whose process died, or was told nothing, before it returned is there whole or not at
  all: as soon as one of its rows was leased, all of them must be done.
- A row is *done* in a task by an ack that returned, *perhaps done* by one that its process did not live to see
  return. Done twice is a duplicate effect; neither done nor perhaps done, once the tables have drained, is lost.
- An ack with a step is undone by a rollback to an earlier one, as the trainer's model is: what is left after the last
  rollback counts.
- A row whose producer was frozen between its reserve and its put may be over the staleness bound when it comes. It is then
  dropped, as the table declares; no other row may be, and not one more or less than the server says.
- The server's own last audit must agree to the row: as many put as the diaries know of, none live.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from transferqueue.testing.chaos.log import ReadLog
from transferqueue.testing.chaos.roles import FLOOD, PACED, STALENESS_MAX

TASKS: Final = {"reward": (PACED, "reward"), "trainer": (PACED, "train"), "drainer": (FLOOD, "drain")}
SHOWN_MAX: Final = 5


class LoggedPut(NamedTuple):
    """One put. version: the policy version of its rows, None for none. by: when it had returned; None: it is not known to have."""

    numbers: range
    version: int | None
    by: float | None


def puts_of(told: Iterable[ReadLog], table: str) -> list[LoggedPut]:
    """All puts of one table, as their producers wrote of them."""
    found = []
    for diary in told:
        returned = {line[2]: line[1] for line in diary.of("put")}
        for _, _, name, first, rows, version in diary.of("put?"):
            if name == table:
                found.append(LoggedPut(range(first, first + rows), version, returned.get(first)))
    return found


class Clock:
    """How far the clock of the paced table may have been at a time."""

    def __init__(self, told: Iterable[ReadLog]) -> None:
        asked = sorted((line[1], line[2]) for diary in told for line in diary.of("advance?"))
        self._times = [at for at, _ in asked]
        self._most = list(itertools.accumulate((version for _, version in asked), max))

    def at(self, when: float | None) -> int:
        """The highest version it can have been by then; None: by the end."""
        place = len(self._times) if when is None else bisect.bisect_right(self._times, when)
        return self._most[place - 1] if place else 0

    def makes_stale(self, put: LoggedPut) -> bool:
        """Whether rows of a put may have been too old when they came: its producer was frozen after its reserve."""
        return put.version is not None and self.at(put.by) - put.version > STALENESS_MAX


class TaskAccount:
    """What the workers of one task did."""

    def __init__(self) -> None:
        self.leased: set[int] = set()
        self.verified = 0
        self.late = 0
        self.done: Counter[int] = Counter()
        self.perhaps: set[int] = set()
        self._steps: dict[int, int] = {}

    def read(self, diary: ReadLog) -> None:
        """Go on with the next life."""
        leases: dict[int, list[int]] = {}
        asked: set[int] = set()
        for kind, _, *values in diary.lines:
            if kind == "lease":
                leases[values[0]] = values[1]
                self.leased.update(values[1])
                self.verified += len(values[1])
            elif kind == "ack?":
                asked.add(values[0])
            elif kind == "late":
                asked.discard(values[0])
                self.late += 1
            elif kind == "ack":
                asked.discard(values[0])
                self._acked(leases[values[0]], values[1])
            elif kind == "rollback":
                self._rolled_back(values[0])
        for lease in asked:
            self.perhaps.update(leases[lease])

    def _acked(self, numbers: list[int], step: int) -> None:
        self.done.update(numbers)
        if step >= 0:
            self._steps.update(dict.fromkeys(numbers, step))

    def _rolled_back(self, step: int) -> None:
        undone = [number for number, of in self._steps.items() if of > step]
        self.done.subtract(undone)
        for number in undone:
            del self._steps[number]
        self.perhaps.clear()  # what the step that was under way did is undone as well


class Account:
    """The verdict on a run. told: its diaries, in the order of the lives. drained: it ended in order, so nothing may be left.

    violations: each in one line; none is what is hoped.
    """

    def __init__(self, told: Sequence[ReadLog], *, drained: bool) -> None:
        self._drained = drained
        self.violations: list[str] = [
            f"{diary.role}, life {diary.life}: {line[2]}" for diary in told for line in diary.of("broken")
        ]
        self.lost = self.duplicates = 0
        self.bounds = len(self.violations)
        self.tasks = {name: TaskAccount() for _, name in TASKS.values()}
        for diary in told:
            if known := TASKS.get(diary.role.partition("-")[0]):
                self.tasks[known[1]].read(diary)
        self._clock = Clock(told)
        self._audits = {name: rows for diary in told for line in diary.of("audit") for name, rows in line[2].items()}
        self.stale = 0
        self.rows = {table: self._judge(puts_of(told, table), table) for table in (PACED, FLOOD)}

    @property
    def verified(self) -> int:
        """Rows whose bytes were computed again, counted once for each lease."""
        return sum(task.verified for task in self.tasks.values())

    def _judge(self, puts: list[LoggedPut], table: str) -> int:
        """Judge the tasks of a table; how many rows it must have had."""
        tasks = {name: self.tasks[name] for of, name in TASKS.values() if of == table}
        seen = set[int]().union(*(task.leased for task in tasks.values()))
        there = [put for put in puts if put.by is not None or not seen.isdisjoint(put.numbers)]
        rows = {number for put in there for number in put.numbers}
        self._tell(f"table {table}: rows that nobody put", seen - rows)
        stale = {number for put in there if self._clock.makes_stale(put) for number in put.numbers}
        dropped = set[int]()
        for name, task in tasks.items():
            twice = {number for number, times in task.done.items() if times > 1}
            self.duplicates += len(twice)
            self._tell(f"task {name}: rows done twice", twice)
            if self._drained:
                missing = rows - {number for number, times in task.done.items() if times > 0} - task.perhaps
                self.lost += len(missing - stale)
                self._tell(f"task {name}: rows lost", missing - stale)
                dropped |= missing & stale
        if self._drained:
            hidden = [put for put in puts if put not in there and self._clock.makes_stale(put)]
            self._audit(table, len(rows), len(dropped), sum(len(put.numbers) for put in hidden))
        return len(rows)

    def _audit(self, table: str, rows: int, stale: int, hidden_max: int) -> None:
        """Compare with the server's last account. hidden_max: rows that may have come, too old, without anybody's knowing."""
        found = self._audits.get(table)
        if found is None:
            self.violations.append(f"table {table}: the server gave no last account")
            return
        hidden = found["rows_put"] - rows
        dropped = found["dropped"].get("stale", 0)
        self.stale += dropped
        if (
            not 0 <= hidden <= hidden_max
            or dropped != found["rows_dropped"]
            or dropped != stale + hidden
            or found["rows_live"]
            or not found["balanced"]
        ):
            self.violations.append(
                f"table {table}: by the diaries {rows} rows were put, {stale} of them dropped as stale, and up to "
                f"{hidden_max} more of each; the server says {found}"
            )

    def _tell(self, what: str, numbers: set[int]) -> None:
        if numbers:
            shown = ", ".join(map(str, sorted(numbers)[:SHOWN_MAX]))
            self.violations.append(f"{what}: {len(numbers)}, such as {shown}")
