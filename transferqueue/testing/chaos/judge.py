"""What the diaries of a run say together: was each row that was put done once by each task, and nothing lost?

The law:

- A put that returned is there. One whose process died, or was told nothing, before it returned is there whole or not at
  all: as soon as one of its rows was leased, all of them must be done.
- A row is *done* in a task by an ack that returned, *perhaps done* by one that its process did not live to see
  return. Done twice is a duplicate effect; neither done nor perhaps done, once the tables have drained, is lost.
- An ack with a step is undone by a rollback to an earlier one, as the trainer's model is: what is left after the last
  rollback counts.
- The server's own last audit must agree to the row: as many put as the diaries know of, all done, none live or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from transferqueue.testing.chaos.diary import Told
from transferqueue.testing.chaos.roles import FLOOD, PACED

TASKS: Final = {"reward": (PACED, "reward"), "trainer": (PACED, "train"), "drainer": (FLOOD, "drain")}
SHOWN_MAX: Final = 5


class Puts:
    """Rows of one table, as their producers wrote of them."""

    def __init__(self, told: Iterable[Told], table: str) -> None:
        self.sure: set[int] = set()
        self.unsure: list[range] = []
        for diary in told:
            returned = {line[2] for line in diary.of("put")}
            for _, _, name, first, rows in diary.of("put?"):
                if name != table:
                    continue
                if first in returned:
                    self.sure.update(range(first, first + rows))
                else:
                    self.unsure.append(range(first, first + rows))


class Task:
    """What the workers of one task did."""

    def __init__(self) -> None:
        self.leased: set[int] = set()
        self.verified = 0
        self.late = 0
        self.done: Counter[int] = Counter()
        self.perhaps: set[int] = set()
        self._steps: dict[int, int] = {}

    def read(self, diary: Told) -> None:
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

    def __init__(self, told: Sequence[Told], *, drained: bool) -> None:
        self._drained = drained
        self.violations: list[str] = [
            f"{diary.role}, life {diary.life}: {line[2]}" for diary in told for line in diary.of("broken")
        ]
        self.lost = self.duplicates = 0
        self.bounds = len(self.violations)
        self.tasks = {name: Task() for _, name in TASKS.values()}
        for diary in told:
            if known := TASKS.get(diary.role.partition("-")[0]):
                self.tasks[known[1]].read(diary)
        self.rows = {table: self._rows(Puts(told, table), table) for table in (PACED, FLOOD)}
        if drained:
            self._audit({name: rows for diary in told for line in diary.of("audit") for name, rows in line[2].items()})

    @property
    def verified(self) -> int:
        """Rows whose bytes were computed again, counted once for each lease."""
        return sum(task.verified for task in self.tasks.values())

    def _rows(self, puts: Puts, table: str) -> int:
        """Judge each task of a table; how many rows it must have had."""
        tasks = {name: self.tasks[name] for of, name in TASKS.values() if of == table}
        seen = set[int]().union(*(task.leased for task in tasks.values()))
        there = puts.sure | {number for batch in puts.unsure if seen & set(batch) for number in batch}
        self._tell(f"table {table}: rows that nobody put", seen - there)
        for name, task in tasks.items():
            twice = {number for number, times in task.done.items() if times > 1}
            missing = (
                set()
                if not self._drained
                else there - {number for number, times in task.done.items() if times > 0} - task.perhaps
            )
            self.duplicates += len(twice)
            self.lost += len(missing)
            self._tell(f"task {name}: rows done twice", twice)
            self._tell(f"task {name}: rows lost", missing)
        return len(there)

    def _audit(self, tables: dict[str, dict[str, Any]]) -> None:
        for name, expected in self.rows.items():
            rows = tables.get(name)
            if rows is None:
                self.violations.append(f"table {name}: the server gave no last account")
                continue
            found = tuple(rows[key] for key in ("rows_put", "rows_done", "rows_live", "rows_dropped"))
            if found != (expected, expected, 0, 0) or not rows["balanced"]:
                self.violations.append(
                    f"table {name}: {expected} rows were put by the diaries; the server says put, done, live, dropped = {found}"
                )

    def _tell(self, what: str, numbers: set[int]) -> None:
        if numbers:
            shown = ", ".join(map(str, sorted(numbers)[:SHOWN_MAX]))
            self.violations.append(f"{what}: {len(numbers)}, such as {shown}")
