"""Check the event logs of a run: each task did each row once, and no row is lost.

- A put that returned is in the table. A put that did not return (its process died, or got no answer) is in the table
  whole or not at all: if one of its rows was leased, all of them must be done.
- A row is *done* in a task by an ack that returned, and *perhaps done* by an ack whose process died before it
  returned. A row done twice is a duplicate effect. A row neither done nor perhaps done when the tables are drained is
  lost.
- A rollback undoes the acks of later steps, as it undoes those steps of the trainer's model. The acks left after the
  last rollback count.
- A row whose producer was frozen between its reserve and its put may be over the staleness bound when it arrives. The
  server drops it then, as the table declares. It may drop no other row, and must report exactly as many.
- The server's last audit must agree to the row: as many rows put as in the event logs, and none live.
- No spilled block may be left on the disk at the end, and none may have been lost.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from tests.chaos.log import ReadLog
from tests.chaos.roles import FLOOD, PACED, STALENESS_MAX

TASKS: Final = {"reward": (PACED, "reward"), "trainer": (PACED, "train"), "drainer": (FLOOD, "drain")}
SHOWN_MAX: Final = 5


class LoggedPut(NamedTuple):
    """One put. version: the policy version of its rows, or None. by: when it returned; None: no line confirms it."""

    numbers: range
    version: int | None
    by: float | None


def puts_of(logs: Iterable[ReadLog], table: str) -> list[LoggedPut]:
    """All puts into one table, by the event logs of their producers."""
    puts = []
    for log in logs:
        returned = {line[2]: line[1] for line in log.of("put")}
        for _, _, name, first, rows, version in log.of("put?"):
            if name == table:
                puts.append(LoggedPut(range(first, first + rows), version, returned.get(first)))
    return puts


class Clock:
    """Upper bound of the paced table's policy version at any time."""

    def __init__(self, logs: Iterable[ReadLog]) -> None:
        asked = sorted((line[1], line[2]) for log in logs for line in log.of("advance?"))
        self._times = [at for at, _ in asked]
        self._most = list(itertools.accumulate((version for _, version in asked), max))

    def at(self, when: float | None) -> int:
        """The highest version possible at `when`; None: at the end."""
        place = len(self._times) if when is None else bisect.bisect_right(self._times, when)
        return self._most[place - 1] if place else 0

    def makes_stale(self, put: LoggedPut) -> bool:
        """Whether rows of a put may have been too old when they arrived: its producer was frozen after its reserve."""
        return put.version is not None and self.at(put.by) - put.version > STALENESS_MAX


class TaskAccount:
    """The rows that the workers of one task leased and acked."""

    def __init__(self) -> None:
        self.leased: set[int] = set()
        self.verified = 0
        self.late = 0
        self.done: Counter[int] = Counter()
        self.perhaps: set[int] = set()
        self._steps: dict[int, int] = {}

    def read(self, log: ReadLog) -> None:
        """Add the event log of the next process."""
        leases: dict[int, list[int]] = {}
        asked: set[int] = set()
        for kind, _, *values in log.lines:
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
        self.perhaps.clear()  # a step whose ack did not return is undone as well


class Account:
    """The result of the check.

    Attributes:
        logs: The event logs, in the order of the processes.
        drained: Whether the run ended in order, so that no row may be left.
        violations: One line each.
    """

    def __init__(self, logs: Sequence[ReadLog], *, drained: bool) -> None:
        self._drained = drained
        self.violations: list[str] = [
            f"{log.role}, life {log.life}: {line[2]}" for log in logs for line in log.of("broken")
        ]
        self.lost = self.duplicates = 0
        self.bounds = len(self.violations)
        self.tasks = {name: TaskAccount() for _, name in TASKS.values()}
        for log in logs:
            if known := TASKS.get(log.role.partition("-")[0]):
                self.tasks[known[1]].read(log)
        self._clock = Clock(logs)
        self._audits = {name: rows for log in logs for line in log.of("audit") for name, rows in line[2].items()}
        self.spill: dict[str, Any] | None = next((line[2] for log in logs for line in log.of("spill")), None)
        if self.spill is not None and (self.spill["blocks"] or self.spill["lost_blocks"]):
            self.violations.append(
                f"all rows are done, and blocks are left on the disk, or were lost there: {self.spill}"
            )
        self.stale = 0
        self.rows = {table: self._check(puts_of(logs, table), table) for table in (PACED, FLOOD)}

    @property
    def verified(self) -> int:
        """Rows whose bytes were compared, counted once for each lease."""
        return sum(task.verified for task in self.tasks.values())

    def _check(self, puts: list[LoggedPut], table: str) -> int:
        """Check the tasks of a table; the number of rows that it must have had."""
        tasks = {name: self.tasks[name] for of, name in TASKS.values() if of == table}
        seen = set[int]().union(*(task.leased for task in tasks.values()))
        present = [put for put in puts if put.by is not None or not seen.isdisjoint(put.numbers)]
        rows = {number for put in present for number in put.numbers}
        self._report(f"table {table}: rows without a put", seen - rows)
        stale = {number for put in present if self._clock.makes_stale(put) for number in put.numbers}
        dropped = set[int]()
        for name, task in tasks.items():
            twice = {number for number, times in task.done.items() if times > 1}
            self.duplicates += len(twice)
            self._report(f"task {name}: rows done twice", twice)
            if self._drained:
                missing = rows - {number for number, times in task.done.items() if times > 0} - task.perhaps
                self.lost += len(missing - stale)
                self._report(f"task {name}: rows lost, or counted as done though no worker acked them", missing - stale)
                dropped |= missing & stale
        if self._drained:
            hidden = [put for put in puts if put not in present and self._clock.makes_stale(put)]
            self._check_audit(table, len(rows), len(dropped), sum(len(put.numbers) for put in hidden))
        return len(rows)

    def _check_audit(self, table: str, rows: int, stale: int, hidden_max: int) -> None:
        """Compare with the server's last audit. hidden_max: rows that may have arrived too old, of puts that did not
        return."""
        audit = self._audits.get(table)
        if audit is None:
            self.violations.append(f"table {table}: the server gave no last account")
            return
        hidden = audit["rows_put"] - rows
        dropped = audit["dropped"].get("stale", 0)
        self.stale += dropped
        if (
            not 0 <= hidden <= hidden_max
            or dropped != audit["rows_dropped"]
            or dropped != stale + hidden
            or audit["rows_live"]
            or not audit["balanced"]
        ):
            self.violations.append(
                f"table {table}: by the logs {rows} rows were put, {stale} of them dropped as stale, and up to "
                f"{hidden_max} more of each; the server says {audit}"
            )

    def _report(self, what: str, numbers: set[int]) -> None:
        if numbers:
            shown = ", ".join(map(str, sorted(numbers)[:SHOWN_MAX]))
            self.violations.append(f"{what}: {len(numbers)}, such as {shown}")
