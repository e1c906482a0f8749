"""The ledger as plain dicts and loops: one table, slow and obvious. The reference of the state machine test.

It walks all rows wherever the ledger keeps an index, and recomputes what the ledger maintains. A refused request
raises `Refused` with the name of the error class, before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from transferqueue.policies import (
    Acked,
    AckedColumns,
    DeliverPartial,
    DropGroup,
    Fifo,
    Freshest,
    HoldClock,
    KeepStale,
    LongestFirst,
    OldestVersionFirst,
    Pacing,
    Priority,
    PutOrder,
    Refill,
    Requeue,
    Retention,
    RowOrder,
    Selector,
    Task,
    TokenBalanced,
)

INLINE = frozenset({"score"})


ROW_ORDERS: list[RowOrder] = [kind() for kind in get_args(RowOrder)]
"""Every built-in selector of rows, with its defaults."""


def rank(selector: Selector, rows: list[Row], order: int) -> tuple[float, float]:
    """The sort key of a row or a group by the words of the policy. `order`: its number, in order of readiness."""
    match selector:
        case Fifo():
            return 0, order
        case PutOrder():
            return max(row.id for row in rows), order
        case OldestVersionFirst():
            return min(row.version for row in rows), order
        case Freshest():
            return -min(row.version for row in rows), -max(row.id for row in rows)
        case LongestFirst():
            return -sum(row.tokens for row in rows), order
        case Priority():
            return -max(row.priority for row in rows), order
        case TokenBalanced():
            return rank(selector.inner, rows, order)
    raise NotImplementedError(f"the model has no rule for {selector}: add it to `rank`")


class Refused(Exception):
    """The request is refused; args[0] names the error class."""


@dataclass
class Row:
    id: int
    group: int = -1
    size: int = 1
    version: int = -1
    tokens: int = 0
    priority: float = 0.0
    fields: dict[str, int] = field(default_factory=dict)
    """field -> the commit that wrote it last"""
    before: dict[str, set[int]] = field(default_factory=dict)
    """field -> the commits of what its value continues"""
    fate: str = "live"
    state: dict[str, str] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    step: dict[str, int] = field(default_factory=dict)
    ordinal: int = -1
    wait: dict[str, int] = field(default_factory=dict)
    """task -> number of the wait after its last failure"""

    @property
    def unit(self) -> int:
        return self.group if self.group >= 0 else -2 - self.id


@dataclass
class Unit:
    task: str
    id: int
    state: str = "forming"
    lost: int = 0
    late: bool = False
    order: int = 0
    deadline: float | None = None


@dataclass
class Lease:
    id: int
    task: str
    rows: list[int]
    session: int
    length: float
    deadline: float | None
    open: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


@dataclass
class Waits:
    """Rows of a task that wait after a failure."""

    task: str
    until: list[tuple[float, int, list[int]]] = field(default_factory=list)
    """(when, number of the wait, rows)"""
    parked: list[tuple[float, int, list[int]]] = field(default_factory=list)
    deadline: float | None = None


@dataclass
class Circuit:
    """Whether all leases of a task fail."""

    task: str
    failures: int = 0
    first: set[int] | None = None
    apart: bool = False
    opened: float | None = None
    trials: int = 0
    trial: set[int] = field(default_factory=set)
    due: bool = False
    deadline: float | None = None


@dataclass
class Reservation:
    id: int
    session: int
    left: int
    refills: dict[int, int]


class Model:
    def __init__(self, tasks: list[Task], rows_max: int, pacing: Pacing | None, retention: Retention) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.rows_max = rows_max
        self.pacing = pacing
        self.acked = isinstance(retention, Acked)
        self.columns_end = isinstance(retention, AckedColumns)
        self.freed: set[tuple[int, str]] = set()
        """(row, field) of values that were freed and not written again."""
        self.rows: dict[int, Row] = {}
        """Resident rows."""
        self.next_row = 0
        self.present: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.units: dict[str, dict[int, Unit]] = {task.name: {} for task in tasks}
        self.changed: dict[str, dict[int, None]] = {task.name: {} for task in tasks}
        self.doomed: list[tuple[list[int], str]] = []
        self.unwanted: list[tuple[int, str]] = []
        self.counter = 0
        self.leases: dict[int, Lease] = {}
        self.next_lease = 1
        self.wait_number = 0
        self.failed: dict[int, dict[str, str]] = {}
        """Row that was dropped for failing -> its states then."""
        self.kept: set[int] = set()
        """Rows that were dropped for failing and, though rows that have ended are freed, can be taken again."""
        self.waits = {name: Waits(name) for name in self.tasks}
        self.circuits = {name: Circuit(name) for name in self.tasks}
        self.reservations: dict[int, Reservation] = {}
        self.next_reservation = 1
        self.owed: dict[int, int] = {}
        self.clock = 0
        self.now = 0.0
        self.sealed = False
        self.put_count = 0
        self.done_count = 0
        self.dropped: dict[str, int] = {}
        self.commits: dict[int, set[str]] = {}
        """commit -> its fields in blocks"""
        self.above: dict[int, set[int]] = {}
        """commit -> commits that its values continue"""
        self.commit = 0
        self.checkpoint = dict.fromkeys(self.tasks, -1)
        self.ordinals: set[int] = set()
        """Ordinals of which a row has ended."""
        self.due: list[tuple[float, int, Any]] = []

    # ------------------------------------------------------------ views of the state

    def live(self) -> list[Row]:
        return [row for row in self.rows.values() if row.fate == "live"]

    def members(self, unit: int) -> list[Row]:
        return [row for row in self.live() if row.unit == unit]

    def count(self, task: str, *states: str) -> int:
        return sum(row.state.get(task) in states for row in self.live())

    def outstanding(self) -> int:
        put = (
            self.count(self.pacing.task, "pending", "held", "retrying", "ready", "leased")
            if self.pacing
            else len(self.live())
        )
        return put + sum(one.left for one in self.reservations.values()) + sum(self.owed.values())

    def resident(self) -> int:
        return sum(row not in self.kept for row in self.rows)

    def reserved(self) -> int:
        return sum(one.left for one in self.reservations.values())

    def commits_alive(self) -> set[int]:
        """Commits with a field that some resident row reads there, and those that values of theirs continue."""
        alive = {commit for row in self.rows.values() for name, commit in row.fields.items() if name not in INLINE}
        for commit in sorted(self.above, reverse=True):
            alive |= self.above[commit] if commit in alive else set()
        return alive

    def read(self, row: Row, name: str) -> set[int]:
        """The commits that a reader of the field reads."""
        return {row.fields[name]} | row.before.get(name, set())

    def stale(self, row: Row) -> bool:
        bound = self.pacing.max_staleness if self.pacing else None
        return bound is not None and row.version >= 0 and self.clock - row.version > bound

    # ------------------------------------------------------------ time

    def at(self, when: float, subject: Any) -> None:
        subject.deadline = when
        self.due.append((when, len(self.due), subject))

    def tick(self, now: float) -> None:
        self.now = now
        while ready := sorted(one[:2] for one in self.due if one[2].deadline == one[0] and one[0] <= now):
            when, number = ready[0]
            subject = self.due[number][2]
            subject.deadline = None
            if isinstance(subject, Lease):
                self.give_up(subject)
            elif isinstance(subject, Waits):
                self.resume_due(subject)
                self.conclude()
            elif isinstance(subject, Circuit):
                self.trial_due(subject)
                self.conclude()
            else:
                subject.late = True
                self.changed[subject.task][subject.id] = None
                self.conclude()
            assert when <= now

    # ------------------------------------------------------------ failures

    def resume(self, name: str, waits: list[tuple[float, int, list[int]]]) -> None:
        """Rows are ready again that still are in these waits."""
        for _, number, rows in waits:
            mine = [row for row in rows if row in self.rows and self.rows[row].state[name] == "retrying"]
            self.make_ready(name, [row for row in mine if self.rows[row].wait[name] == number])
        self._await_first(name)

    def _await_first(self, name: str) -> None:
        waits = self.waits[name]
        first = min((when for when, _, _ in waits.until), default=None)
        if first is None:
            waits.deadline = None
        elif first != waits.deadline:
            self.at(first, waits)

    def resume_due(self, waits: Waits) -> None:
        over = sorted((one for one in waits.until if one[0] <= self.now), key=lambda one: one[:2])
        waits.until = [one for one in waits.until if one[0] > self.now]
        self.resume(waits.task, over)

    def trial_due(self, circuit: Circuit) -> None:
        name = circuit.task
        if circuit.due or not self.ready_units(name):
            parked, self.waits[name].parked = self.waits[name].parked, []
            self.resume(name, parked)
        circuit.due = True
        if self.waits[name].parked:
            self.at(self.now + self.wait_s(name, circuit.trials), circuit)

    def wait_s(self, name: str, number: int) -> float:
        retry = self.tasks[name].retry
        return min(retry.first_s * retry.factor ** (number - 1), retry.max_s)

    def lease_failed(self, lease: Lease, rows: list[int]) -> None:
        """Three failed leases in a row, two of them without a common row and with rows that never failed, pause the
        task."""
        name, circuit = lease.task, self.circuits[lease.task]
        circuit.failures += 1
        if circuit.opened is not None:
            if lease.id not in circuit.trial or circuit.deadline is not None:
                return
        else:
            if any(not self.rows[row].attempts.get(name) for row in rows):
                if circuit.first is None:
                    circuit.first = set(rows)
                elif not circuit.first & set(rows):
                    circuit.apart = True
            if circuit.failures < 3 or not circuit.apart:
                return
            circuit.opened = self.now
        circuit.trials, circuit.due = circuit.trials + 1, False
        self.at(self.now + self.wait_s(name, circuit.trials), circuit)

    def succeeded(self, name: str) -> None:
        old = self.circuits[name]
        if not old.failures:
            return
        old.deadline, self.circuits[name] = None, Circuit(name)
        if old.opened is not None:
            waits = self.waits[name]
            every = [*sorted(waits.until, key=lambda one: one[:2]), *waits.parked]
            waits.until, waits.parked = [], []
            self.resume(name, every)

    def make_ready(self, name: str, rows: list[int]) -> None:
        for number in rows:
            row = self.rows[number]
            row.state[name] = "held" if self.tasks[name].groups else "ready"
            if self.tasks[name].groups:
                self.units[name][row.unit].state = "forming"
                self.changed[name][row.unit] = None

    def postpone(self, name: str, rows: list[int]) -> None:
        """Rows whose lease failed wait, those longer that failed more often; or until others were tried, if the task is
        paused."""
        circuit, waits, by_failures = self.circuits[name], self.waits[name], {}
        for number in rows:
            row = self.rows[number]
            row.attempts[name] = row.attempts.get(name, 0) + (circuit.opened is None)
            row.state[name] = "retrying"
            by_failures.setdefault(row.attempts[name] if circuit.opened is None else 0, []).append(number)
            if self.tasks[name].groups:
                self.units[name][row.unit].state = "forming"
                self.changed[name][row.unit] = None
        for number, mine in sorted(by_failures.items()):
            self.wait_number += 1
            for row in mine:
                self.rows[row].wait[name] = self.wait_number
            if circuit.opened is None:
                waits.until.append((self.now + self.wait_s(name, number), self.wait_number, mine))
            else:
                waits.parked.append((0.0, self.wait_number, mine))
        self._await_first(name)
        attempts = self.tasks[name].retry.attempts
        spent = [row for row in rows if attempts and self.rows[row].attempts[name] >= attempts]
        if circuit.opened is None and spent:
            self.doomed.append((spent, "attempts"))

    def give_up(self, lease: Lease) -> None:
        rows = [row for row in lease.rows if row in lease.held]
        lease.held.clear()
        self.give_back(lease.task, rows, failed=False)
        self.end(lease)
        self.conclude()

    def end(self, lease: Lease) -> None:
        lease.deadline = None
        self.leases.pop(lease.id, None)
        self.circuits[lease.task].trial.discard(lease.id)

    # ------------------------------------------------------------ rows in

    def put(
        self,
        session: int,
        rows: list[Row],
        fields: set[str],
        reservation: int,
        commit: int,
        parents: list[int] | None = None,
        continued: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> list[int]:
        if self.sealed:
            raise Refused("Sealed")
        if len(rows) > self.rows_max:
            raise Refused("Impossible")
        self._check_groups(rows)
        before = self._continued(parents, continued) if parents is not None else [{} for _ in rows]
        promise = self._reservation(session, reservation, len(rows)) if reservation else None
        if promise is None and self.resident() + self.reserved() + len(rows) > self.rows_max:
            raise Refused("Full")
        for row, row.before in zip(rows, before, strict=True):
            self.above.setdefault(commit, set()).update(*row.before.values())
            row.id = self.next_row
            self.next_row += 1
            self.rows[row.id] = row
            row.fields = dict.fromkeys(fields, commit)
            row.state = dict.fromkeys(self.tasks, "pending")
            if row.group >= 0:
                self.sizes[row.group] = row.size
                self.present[row.group] = self.present.get(row.group, 0) + 1
        self.put_count += len(rows)
        for name, task in self.tasks.items():
            self._arrive(name, task, rows)
        self.judge_stale([row.id for row in rows])
        if promise is not None:
            self._use(promise, len(rows), rows)
        self._limit_refills()
        self.conclude()
        return [row.id for row in rows]

    def _continued(self, parents: list[int], fields: set[str]) -> list[dict[str, set[int]]]:
        """Of each new row, what its values continue."""
        known = [self.rows.get(row) for row in parents if row != -1]
        if not known:
            raise Refused("UsageError")
        if None in known:
            raise Refused("NotFound")
        for name in sorted(fields):
            lacking = [row for row in known if row is not None and name not in row.fields]
            if lacking:
                raise Refused("ColumnFreed" if any((row.id, name) in self.freed for row in lacking) else "NotFound")
        return [{name: self.read(self.rows[row], name) for name in fields} if row != -1 else {} for row in parents]

    def _arrive(self, name: str, task: Task, rows: list[Row]) -> None:
        for row in rows:
            unit = self.units[name].get(row.unit)
            if task.groups and unit is not None and unit.state == "over":
                row.state[name] = "absent"
                self.unwanted.append((row.id, name))
        self.complete(name, [row for row in rows if row.state[name] == "pending"])

    def _check_groups(self, rows: list[Row]) -> None:
        most = self.rows_max
        if self.pacing and self.tasks[self.pacing.task].groups:
            most = min(most, self.pacing.rows_ahead_max)
        for group in sorted({row.group for row in rows if row.group >= 0}):
            mine = [row for row in rows if row.group == group]
            if any(row.size != self.sizes.get(group, mine[0].size) for row in mine):
                raise Refused("UsageError")
            if self.present.get(group, 0) + len(mine) > mine[0].size:
                raise Refused("UsageError")
            if mine[0].size > most:
                raise Refused("Impossible")

    def complete(self, name: str, rows: list[Row]) -> None:
        """Pending rows that have all the task needs become ready, or wait for their group."""
        task = self.tasks[name]
        for row in [row for row in rows if set(task.needs) <= set(row.fields)]:
            if task.groups is None:
                self.counter += 1
                row.order[name] = self.counter
                row.state[name] = "ready"
                continue
            unit = self.units[name].setdefault(row.unit, Unit(name, row.unit))
            row.state[name] = "held"
            self.await_rest(unit)
            self.changed[name][row.unit] = None

    def await_rest(self, unit: Unit) -> None:
        rule = self.tasks[unit.task].groups
        ready = [row for row in self.members(unit.id) if row.state[unit.task] in ("held", "ready")]
        waits = unit.state == "forming" and unit.deadline is None and not unit.late
        if waits and ready and rule is not None and rule.deadline_s is not None:
            self.at(self.now + rule.deadline_s, unit)

    def update(self, rows: list[int], fields: set[str], overwrite: bool, version: int | None, commit: int) -> None:
        if any(row not in self.rows or self.rows[row].fate != "live" for row in rows):
            raise Refused("NotFound")
        if not overwrite and any(fields & set(self.rows[row].fields) for row in rows):
            raise Refused("AlreadyExists")
        self.write(rows, fields, version, commit)
        self.judge_stale(rows)
        self.conclude()

    def write(self, rows: list[int], fields: set[str], version: int | None, commit: int) -> None:
        for row in rows:
            self.rows[row].fields.update(dict.fromkeys(fields, commit))
            for name in fields:
                self.rows[row].before.pop(name, None)
            self.freed -= {(row, name) for name in fields}
            if version is not None:
                self.rows[row].version = version
        for name, task in self.tasks.items():
            if set(task.needs) & fields:
                self.complete(name, [self.rows[row] for row in rows if self.rows[row].state[name] == "pending"])

    # ------------------------------------------------------------ leases

    def key(self, name: str, rows: list[Row]) -> tuple[float, float]:
        order = self.units[name][rows[0].unit].order if self.tasks[name].groups else rows[0].order[name]
        return rank(self.tasks[name].selector, rows, order)

    def ready_units(self, name: str, low: int | None = None) -> list[list[Row]]:
        """Units in the order of the selector; low: only those whose every row is of that version or later."""
        if self.tasks[name].groups:
            queued = [unit for unit in self.units[name].values() if unit.state == "queued"]
            units = [[row for row in self.members(unit.id) if row.state[name] == "ready"] for unit in queued]
        else:
            units = [[row] for row in self.live() if row.state[name] == "ready"]
        if low is not None:
            units = [unit for unit in units if all(row.version >= low for row in unit)]
        return sorted(units, key=lambda rows: self.key(name, rows))

    def lease(self, session: int, name: str, *, rows: int, groups: int, at_least: int, low: int | None) -> Lease:
        task = self.tasks[name]
        if groups and not task.groups:
            raise Refused("UsageError")
        if at_least > (rows or groups):
            raise Refused("UsageError")
        if task.groups and rows and max(self.sizes.values(), default=1) > rows:
            raise Refused("Impossible")
        smallest = min((row.size for row in self.live()), default=1)
        if task.groups and self.sizes and groups * smallest > self.rows_max and not self.sealed and not at_least:
            raise Refused("Impossible")
        units = self.ready_units(name, low)
        drained = not self.count(name, "pending", "held")
        final = self.sealed and (drained or self.stranded(name))
        taken: list[list[Row]] = []
        cost = 0
        for unit in units:
            more = 1 if groups else len(unit)
            if cost + more > (rows or groups):
                break
            taken.append(unit)
            cost += more
        spare = (rows or groups) - cost
        full = len(taken) < len(units) or spare == 0
        if task.groups and rows:
            full = full or spare < smallest
        circuit = self.circuits[name]
        held = circuit.opened is not None and (not circuit.due or bool(circuit.trial))
        if held or not taken or not (final or full or (at_least and cost >= at_least)):
            ended = self.sealed and final and not self.count(name, "leased", "retrying") and not self._may_return(name)
            over = "EndOfTable" if drained else "Impossible"
            raise Refused(over if ended and not units else "DeadlineExceeded")
        chosen = [row for unit in taken for row in unit]
        for row in chosen:
            row.state[name] = "leased"
            if task.groups:
                self.units[name][row.unit].state = "out"
                self.units[name][row.unit].deadline = None
        ids = [row.id for row in chosen]
        lease = Lease(self.next_lease, name, ids, session, task.lease_s, None, set(ids), set(ids))
        self.next_lease += 1
        self.leases[lease.id] = lease
        self.at(self.now + lease.length, lease)
        if circuit.opened is not None:
            circuit.trial.add(lease.id)
            circuit.deadline = None
        return lease

    def stranded(self, name: str) -> bool:
        """Whether the task has pending rows, none of which can become ready in this sealed table."""
        pacing = self.pacing
        if pacing and pacing.max_staleness is not None and isinstance(pacing.on_stale, Requeue):
            return False
        moving = {one for one in self.tasks if self.count(one, "ready", "leased", "retrying")}
        for _ in self.tasks:
            moving |= {one for one in self.tasks if self._may_complete(one, moving)}
        return self.count(name, "pending") > 0 and not self._may_complete(name, moving)

    def _may_complete(self, name: str, moving: set[str]) -> bool:
        gone = set()
        for field_ in self.tasks[name].needs:
            givers = {one for one, task in self.tasks.items() if field_ in task.gives}
            if givers and not givers & moving:
                gone.add(field_)
        return any(row.state[name] == "pending" and gone <= set(row.fields) for row in self.live())

    def _owes(self, name: str, rows: list[int], fields: set[str]) -> bool:
        """Whether a row would be done without what the task gives, another needs, and no other giver still has it to
        give."""
        needed = {field_ for task in self.tasks.values() for field_ in task.needs}
        for field_ in needed & set(self.tasks[name].gives) - fields:
            others = [one for one, task in self.tasks.items() if one != name and field_ in task.gives]
            for row in (self.rows[number] for number in rows):
                waits = any(row.state[one] in ("pending", "held", "retrying", "ready", "leased") for one in others)
                if field_ not in row.fields and (row.id, field_) not in self.freed and not waits:
                    return True
        return False

    def _named(self, session: int, number: int, rows: list[int] | None) -> tuple[Lease, list[int], list[int]]:
        lease = self.leases.get(number)
        if lease is None or lease.session != session:
            raise Refused("LeaseExpired")
        named = [row for row in lease.rows if row in lease.open] if rows is None else rows
        if any(row not in lease.rows for row in named):
            raise Refused("UsageError")
        if any(row not in lease.open for row in named):
            raise Refused("LeaseExpired")
        held = [row for row in named if row in lease.held]
        if self.tasks[lease.task].groups and len(named) != len(lease.rows):
            left = lease.held - set(named)
            if {self.rows[row].unit for row in held} & {self.rows[row].unit for row in left}:
                raise Refused("UsageError")
        return lease, named, held

    def ack(
        self, session: int, number: int, rows: list[int] | None, fields: set[str], version: int | None, drop: str,
        commit: int, step: int = -1,
    ) -> int:  # fmt: skip
        lease, named, held = self._named(session, number, rows)
        if drop and (fields or version is not None):
            raise Refused("UsageError")
        if any((fields - set(self.tasks[lease.task].needs)) & set(self.rows[row].fields) for row in held):
            raise Refused("AlreadyExists")
        if not drop and self._owes(lease.task, held, fields):
            raise Refused("UsageError")
        if fields or version is not None:
            self.write(held, fields, version, commit)
        lease.held -= set(named)
        lease.open -= set(named)
        if held:
            self.succeeded(lease.task)
        if drop:
            self.give_back(lease.task, held, failed=False)
            self.doomed.append((held, drop))
        elif step > self.checkpoint[lease.task]:
            for row in held:
                self.rows[row].state[lease.task], self.rows[row].step[lease.task] = "stepped", step
        else:
            self.finish(lease.task, held)
        if not lease.open:
            self.end(lease)
        self.judge_stale([row for row in held if row in self.rows and self.rows[row].fate == "live"])
        self.conclude()
        return len(held)

    def ack_leases(self, session: int, numbers: list[int], step: int) -> int:
        if len(numbers) != len(set(numbers)):
            raise Refused("UsageError")
        leases = [self._named(session, number, None)[0] for number in numbers]
        if len({lease.task for lease in leases}) > 1:
            raise Refused("UsageError")
        if any(self._owes(lease.task, sorted(lease.held), set()) for lease in leases):
            raise Refused("UsageError")
        acked = []
        for lease in leases:
            held = [row for row in lease.rows if row in lease.held]
            acked += held
            lease.held, lease.open = set(), set()
            if held:
                self.succeeded(lease.task)
            if step > self.checkpoint[lease.task]:
                for row in held:
                    self.rows[row].state[lease.task], self.rows[row].step[lease.task] = "stepped", step
            else:
                self.finish(lease.task, held)
            self.end(lease)
        self.judge_stale([row for row in acked if row in self.rows and self.rows[row].fate == "live"])
        self.conclude()
        return len(acked)

    def finish(self, name: str, rows: list[int]) -> None:
        ended = []
        for number in rows:
            row = self.rows[number]
            row.state[name] = "done"
            if self.tasks[name].groups:
                unit = self.units[name][row.unit]
                unit.state, unit.deadline = "over", None
                for late in [
                    one for one in self.members(row.unit) if one.state[name] in ("pending", "held", "retrying")
                ]:
                    late.state[name] = "absent"
                    self.unwanted.append((late.id, name))
            if all(state in ("done", "absent") for state in row.state.values()):
                ended.append(number)
            else:
                self.end_columns(name, row)
        self.done_count += len(ended)
        self.leave(ended, "done")

    def end_columns(self, name: str, row: Row) -> None:
        """The task is done with the row, or never gets it: what it was the last to need is freed."""
        if not self.columns_end:
            return
        for field_ in [one for one in row.fields if one not in INLINE]:
            holders = [one for one, task in self.tasks.items() if field_ in task.needs]
            if holders and self.pacing and any(self._may_be_requeued(one) for one in holders):
                holders.append(self.pacing.task)
            if name in holders and all(row.state[one] in ("done", "absent") for one in holders):
                del row.fields[field_]
                self.freed.add((row.id, field_))

    def _may_be_requeued(self, name: str) -> bool:
        pacing = self.pacing
        if not pacing or pacing.max_staleness is None or not isinstance(pacing.on_stale, Requeue):
            return False
        return name == pacing.on_stale.task or name in self._downstream(pacing.on_stale.task)[1]

    # ------------------------------------------------------------ steps

    def _stepped(self, name: str, low: int, high: int) -> list[int]:
        rows = [row for row in self.live() if row.state[name] == "stepped" and low <= row.step[name] <= high]
        return [row.id for row in sorted(rows, key=lambda row: (row.step[name], row.id))]

    def checkpointed(self, name: str, step: int) -> int:
        rows = self._stepped(name, 0, step)
        self.checkpoint[name] = max(self.checkpoint[name], step)
        self.finish(name, rows)
        self.conclude()
        return len(rows)

    def rollback(self, name: str, step: int, version: int) -> int:
        if step < self.checkpoint[name] or version > self.clock:
            raise Refused("UsageError")
        if version >= 0:
            self.clock = version
        for lease in [one for one in self.leases.values() if one.task == name]:
            if lease.id in self.leases:
                self.give_up(lease)
        rows = self._stepped(name, step + 1, 1 << 53)
        self.give_back(name, rows, failed=False)
        self.conclude()
        return len(rows)

    def cursor(self, start: int) -> int:
        live = {row.ordinal for row in self.live()}
        while start in self.ordinals and start not in live:
            start += 1
        return start

    def release(
        self, session: int, number: int, rows: list[int] | None, failed: bool, fields: set[str], version: int | None,
        commit: int,
    ) -> int:  # fmt: skip
        lease, named, held = self._named(session, number, rows)
        progress = bool(fields) or version is not None
        if progress:
            self.write(held, fields, version, commit)
        lease.held -= set(named)
        lease.open -= set(named)
        if failed:
            self.lease_failed(lease, held)
        self.give_back(lease.task, held, failed=failed)
        if not lease.open:
            self.end(lease)
        if progress:
            self.judge_stale(held)
        self.conclude()
        return len(held)

    def give_back(self, name: str, rows: list[int], *, failed: bool) -> None:
        task = self.tasks[name]
        if failed:
            self.postpone(name, rows)
        else:
            self.make_ready(name, rows)
        gone = [row for row in rows if not set(task.needs) <= set(self.rows[row].fields)]
        if gone:
            self.doomed.append((gone, "lost"))
        if self.pacing and self.pacing.task == name:
            self.judge_stale(rows)

    def close_session(self, session: int) -> None:
        for lease in [one for one in self.leases.values() if one.session == session]:
            if lease.id in self.leases:
                self.give_up(lease)
        for one in [one for one in self.reservations.values() if one.session == session]:
            self._return(one)

    # ------------------------------------------------------------ fates

    def conclude(self) -> None:
        while True:
            late = [(self.rows[row], name) for row, name in self.unwanted if row in self.rows]
            gone = [row.id for row, _ in late if all(state in ("absent", "done") for state in row.state.values())]
            self.unwanted.clear()
            for row, name in late:
                if row.fate == "live":
                    self.end_columns(name, row)
            if gone:
                self.doomed.append((gone, "group_incomplete"))
            if self.doomed:
                rows, reason = self.doomed.pop(0)
                self.drop(rows, reason)
                continue
            unsettled = [name for name in self.tasks if self.changed[name]]
            if not unsettled:
                return
            self._settle(unsettled[0])

    def drop(self, rows: list[int], reason: str) -> None:
        rows = [row for row in rows if row in self.rows and self.rows[row].fate == "live"]
        if not rows:
            return
        if reason == "attempts":
            self.failed |= {row: dict(self.rows[row].state) for row in rows}
        for name, task in self.tasks.items():
            for number in rows:
                self._lose(name, task, self.rows[number])
        self.dropped[reason] = self.dropped.get(reason, 0) + len(rows)
        for number in rows:
            if (group := self.rows[number].group) >= 0:
                self.present[group] -= 1
        self.leave(rows, "dropped", kept=reason == "attempts")

    def _lose(self, name: str, task: Task, row: Row) -> None:
        self._take(name, row)
        before, row.state[name] = row.state[name], "gone"
        if task.groups is None or before not in ("pending", "held", "retrying", "ready", "leased", "stepped"):
            return
        unit = self.units[name].setdefault(row.unit, Unit(name, row.unit))
        unit.lost += 1
        self._unqueue(name, unit)
        self.changed[name][row.unit] = None

    def _unlease(self, name: str, row: Row) -> None:
        """Others may lease the row: the lease ends with its last one."""
        lease = self._take(name, row)
        if lease is not None and not lease.held:
            self.end(lease)

    def _take(self, name: str, row: Row) -> Lease | None:
        for lease in self.leases.values():
            if lease.task == name and row.id in lease.held:
                lease.held.discard(row.id)
                return lease
        return None

    def _unqueue(self, name: str, unit: Unit) -> None:
        if unit.state != "queued":
            return
        unit.state = "forming"
        for row in self.members(unit.id):
            if row.state[name] == "ready":
                row.state[name] = "held"

    def leave(self, rows: list[int], fate: str, *, kept: bool = False) -> None:
        for number in rows:
            self.rows[number].fate = fate
            self.ordinals.add(self.rows[number].ordinal)
        for number in rows:
            row = self.rows[number]
            if not self.members(row.unit):
                self.sizes.pop(row.group, None)
                self.present.pop(row.group, None)
                self.owed.pop(row.group, None)
                for one in self.reservations.values():
                    one.refills.pop(row.group, None)
                for name in self.tasks:
                    unit = self.units[name].pop(row.unit, None)
                    self.changed[name].pop(row.unit, None)
                    if unit is not None:
                        unit.deadline = None
        if self.acked and not kept:
            for number in rows:
                del self.rows[number]
        elif self.acked:
            self.kept |= set(rows)

    def lose(self, commits: set[int]) -> list[int]:
        """The blocks of commits are gone. No task gives a field that lies in blocks, so no value is made again."""
        lost = []
        for above in self.above.values():
            above -= commits
        for row in self.rows.values():
            gone = {name for name in row.fields if name not in INLINE and self.read(row, name) & commits}
            for name in gone:
                del row.fields[name]
            waits = (
                name
                for name, task in self.tasks.items()
                if gone & set(task.needs) and row.state[name] in ("pending", "held", "retrying", "ready")
            )
            if row.fate == "live" and any(waits):
                lost.append(row.id)
        if lost:
            self.doomed.append((lost, "lost"))
        self.conclude()
        return lost

    def user_drop(self, rows: list[int]) -> None:
        if any(row not in self.rows or self.rows[row].fate != "live" for row in rows):
            raise Refused("NotFound")
        self.drop(rows, "test")
        self.conclude()

    def delete(self, rows: list[int]) -> None:
        if any(row not in self.rows for row in rows):
            raise Refused("NotFound")
        if any("leased" in self.rows[row].state.values() for row in rows):
            raise Refused("UsageError")
        self.drop(rows, "deleted")
        self.conclude()
        for row in rows:
            self.rows.pop(row, None)
            self.failed.pop(row, None)

    def retry(self, numbers: list[int]) -> int:
        """Rows that were dropped for failing are live again for the tasks that were not done with them."""
        numbers = sorted(set(numbers))
        if any(row not in self.failed for row in numbers):
            raise Refused("NotFound")
        if self.sealed and not self.live():
            raise Refused("Sealed")
        if self.acked and self.resident() + self.reserved() + len(numbers) > self.rows_max:
            raise Refused("Full")
        rows = [self.rows[row] for row in numbers]
        for group in {row.group for row in rows if row.group >= 0}:
            mine = [row for row in rows if row.group == group]
            if any(row.size != self.sizes.get(group, mine[0].size) for row in mine):
                raise Refused("UsageError")
            if self.present.get(group, 0) + len(mine) > mine[0].size:
                raise Refused("UsageError")
        self.dropped["attempts"] -= len(rows)
        if not self.dropped["attempts"]:
            del self.dropped["attempts"]
        for row in rows:
            row.fate, row.attempts, before = "live", {}, self.failed.pop(row.id)
            self.kept.discard(row.id)
            kinds = {"stepped": "done", "done": "done", "absent": "absent", "kept": "kept"}
            row.state = {name: kinds.get(state, "pending") for name, state in before.items()}
            if row.group >= 0:
                self.sizes[row.group] = row.size
                self.present[row.group] = self.present.get(row.group, 0) + 1
        for name, task in self.tasks.items():
            self._arrive(name, task, [row for row in rows if row.state[name] == "pending"])
        self.judge_stale(numbers)
        self._limit_refills()
        self.conclude()
        return len(rows)

    def _limit_refills(self) -> None:
        for group in list(self.owed):
            if group in self.sizes:
                self._owe(group, min(self.owed[group], self.sizes[group] - self.present[group] - self._promised(group)))

    # ------------------------------------------------------------ groups

    def _settle(self, name: str) -> None:
        changed = [self.units[name][unit] for unit in self.changed[name] if unit in self.units[name]]
        self.changed[name].clear()
        whole = []
        for unit in [unit for unit in changed if unit.state == "forming"]:
            rows = self.members(unit.id)
            ready = [row for row in rows if row.state[name] in ("held", "ready")]
            if len(ready) == self.sizes.get(unit.id, 1):
                unit.lost, unit.late = 0, False
                whole.append(unit)
            elif unit.lost or unit.late or self.sealed:
                self._judge(name, unit)
        for unit in whole:
            self._enqueue(name, unit)

    def _enqueue(self, name: str, unit: Unit) -> None:
        self.counter += 1
        unit.state, unit.order, unit.deadline = "queued", unit.order or self.counter, None
        for row in self.members(unit.id):
            if row.state[name] == "held":
                row.state[name] = "ready"

    def _judge(self, name: str, unit: Unit) -> None:
        rule = self.tasks[name].groups
        assert rule is not None
        rows = self.members(unit.id)
        pending = [row.id for row in rows if row.state[name] in ("pending", "retrying")]
        ready = [row.id for row in rows if row.state[name] in ("held", "ready")]
        everybody = [row.id for row in rows]
        size, there = self.sizes.get(unit.id, 1), self.present.get(unit.id, 1)
        match rule.incomplete:
            case DropGroup():
                if unit.lost or unit.late or not pending:
                    self.doomed.append((everybody, "group_incomplete"))
            case DeliverPartial():
                to_come = 0 if unit.late or self.sealed else max(0, size - there - unit.lost)
                reach = len(ready) + (0 if unit.late else len(pending) + to_come)
                if reach < (rule.min_size or size):
                    self.doomed.append((everybody, "group_incomplete"))
                elif unit.late or not (pending or to_come):
                    self._enqueue(name, unit)
                    for number in pending:
                        self.rows[number].state[name] = "absent"
                        self.unwanted.append((number, name))
                    if pending:
                        self.doomed.append((pending, "group_incomplete"))
                self.await_rest(unit)
            case Refill():
                if not self.sealed:
                    lacking = [row for row in pending if self.rows[row].state[name] == "pending"]
                    self._refill(name, unit, lacking, size - there)
                elif not pending:
                    self.doomed.append((everybody, "group_incomplete"))

    def _refill(self, name: str, unit: Unit, pending: list[int], absent: int) -> None:
        more = absent if unit.late else unit.lost
        self._owe(unit.id, min(self.owed.get(unit.id, 0) + more, absent - self._promised(unit.id)))
        if unit.late:
            for other in self.tasks:
                if other == name:
                    continue
                taken = [row for row in pending if self.rows[row].state[other] == "leased"]
                for row in taken:
                    self._unlease(other, self.rows[row])
                self.give_back(other, taken, failed=False)
        unit.lost, unit.late = 0, False
        self.await_rest(unit)

    # ------------------------------------------------------------ staleness

    def judge_stale(self, rows: list[int]) -> None:
        if self.pacing is None or self.pacing.max_staleness is None:
            return
        pace = self.pacing.task
        waiting = ("pending", "held", "retrying", "ready")
        stale = [row for row in rows if self.stale(self.rows[row]) and self.rows[row].state[pace] in waiting]
        if not stale:
            return
        match self.pacing.on_stale:
            case KeepStale():
                self._keep(pace, stale)
            case Requeue(task=target):
                self._requeue(pace, target, stale)
            case _:
                self.doomed.append((stale, "stale"))

    def _with_groups(self, pace: str, rows: list[int]) -> list[int]:
        found: dict[int, None] = {}
        for number in rows:
            for row in self.members(self.rows[number].unit):
                if row.state[pace] in ("pending", "held", "retrying", "ready"):
                    found[row.id] = None
        return list(found)

    def _keep(self, pace: str, rows: list[int]) -> None:
        grouped = self.tasks[pace].groups is not None
        for number in self._with_groups(pace, rows) if grouped else rows:
            row = self.rows[number]
            row.state[pace] = "kept"
            if grouped:
                unit = self.units[pace].setdefault(row.unit, Unit(pace, row.unit))
                unit.state, unit.deadline = "over", None

    def _downstream(self, target: str) -> tuple[set[str], list[str]]:
        fields: set[str] = set(self.tasks[target].gives)
        after: list[str] = []
        for _ in self.tasks:
            for name, task in self.tasks.items():
                if name not in after and fields & set(task.needs):
                    after.append(name)
                    fields |= set(task.gives)
        return fields, after

    def _may_return(self, name: str) -> bool:
        pacing = self.pacing
        if (
            not pacing
            or pacing.max_staleness is None
            or not isinstance(pacing.on_stale, Requeue)
            or name == pacing.task
        ):
            return False
        target = pacing.on_stale.task
        waiting = ("pending", "held", "retrying", "ready", "leased")
        back = name == target or name in self._downstream(target)[1]
        return back and any(row.state[pacing.task] in waiting for row in self.live())

    def _requeue(self, pace: str, target: str, rows: list[int]) -> None:
        fields, after = self._downstream(target)
        if any(self.tasks[name].groups for name in (target, pace, *after)):
            rows = self._with_groups(pace, rows)
        for number in rows:
            row = self.rows[number]
            row.version = -1
            for name in fields:
                row.fields.pop(name, None)
        for name in after:
            self._recede(name, [row for row in rows if self.rows[row].state[name] not in ("absent", "kept")])
        again = [row for row in rows if self.rows[row].state[target] in ("done", "stepped")]
        self._recede(target, again)
        self.complete(target, [self.rows[row] for row in again])

    def _recede(self, name: str, rows: list[int]) -> None:
        for number in rows:
            self._unlease(name, self.rows[number])
        for number in rows:
            row = self.rows[number]
            unit = self.units[name].get(row.unit)
            if unit is not None:
                self._unqueue(name, unit)
                unit.state, unit.order = "forming", 0
            row.state[name] = "pending"

    # ------------------------------------------------------------ flow

    def advance(self, version: int) -> None:
        if version < self.clock:
            raise Refused("UsageError")
        if self.pacing and self.pacing.max_staleness is not None and isinstance(self.pacing.on_stale, HoldClock):
            waiting = ("pending", "held", "retrying", "ready")
            bound = version - self.pacing.max_staleness
            if any(0 <= row.version < bound and row.state[self.pacing.task] in waiting for row in self.live()):
                raise Refused("DeadlineExceeded")
        if version == self.clock:
            return
        self.clock = version
        stale = [row for row in self.live() if self.stale(row)]
        self.judge_stale([row.id for row in sorted(stale, key=lambda row: (row.version, row.id))])
        self.conclude()

    def reserve(self, session: int, rows: int, version: int) -> Reservation:
        version = self.clock if version < 0 else version
        if self.sealed:
            raise Refused("Sealed")
        if rows > self.rows_max:
            raise Refused("Impossible")
        new = rows - min(rows, sum(self.owed.values()))
        if self.pacing:
            self._check_pace(rows, new, version)
        if new and self.resident() + self.reserved() + rows > self.rows_max:
            raise Refused("Full")
        taken: dict[int, int] = {}
        left = rows
        for group in list(self.owed):
            count = min(left, self.owed[group])
            if count:
                taken[group] = count
                self._owe(group, self.owed[group] - count)
                left -= count
        one = Reservation(self.next_reservation, session, rows, taken)
        self.next_reservation += 1
        self.reservations[one.id] = one
        return one

    def _check_pace(self, rows: int, new: int, version: int) -> None:
        pacing = self.pacing
        assert pacing is not None
        if rows > pacing.rows_ahead_max:
            raise Refused("Impossible")
        bound = pacing.max_staleness
        if bound is not None and self.clock + (rows - 1) // pacing.batch_rows - version > bound:
            raise Refused("Impossible")
        ahead = self.outstanding() + new
        if new and ahead > pacing.rows_ahead_max:
            raise Refused("Full")
        if new and bound is not None and self.clock + (ahead - 1) // pacing.batch_rows - version > bound:
            raise Refused("Full")

    def unreserve(self, session: int, number: int, rows: int) -> None:
        one = self._reservation(session, number, rows)
        if rows == one.left or rows == 0:
            self._return(one)
        else:
            self._use(one, rows, [])

    def _reservation(self, session: int, number: int, rows: int) -> Reservation:
        one = self.reservations.get(number)
        if one is None or one.session != session:
            raise Refused("NotFound")
        if rows > one.left:
            raise Refused("UsageError")
        return one

    def _use(self, one: Reservation, count: int, rows: list[Row]) -> None:
        one.left -= count
        for row in rows:
            if one.refills.get(row.group):
                one.refills[row.group] -= 1
        if not one.left:
            self._return(one)

    def _return(self, one: Reservation) -> None:
        del self.reservations[one.id]
        for group, count in one.refills.items():
            self._owe(group, self.owed.get(group, 0) + count)

    def _promised(self, group: int) -> int:
        return sum(one.refills.get(group, 0) for one in self.reservations.values())

    def _owe(self, group: int, count: int) -> None:
        self.owed.pop(group, None) if count <= 0 else self.owed.__setitem__(group, count)

    def seal(self) -> None:
        if self.sealed:
            raise Refused("Sealed")
        self.sealed = True
        for name, task in self.tasks.items():
            if task.groups:
                self.changed[name].update(dict.fromkeys(self.units[name]))
        for group in list(self.owed):
            self.owed.pop(group)
        for one in self.reservations.values():
            one.refills.clear()
        self.conclude()
