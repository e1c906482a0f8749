"""Follow each wait of a queue to its cause. Does no I/O.

A request waits for rows of a task. The search examines that task:

- Its rows are ready and no worker leases them, or its workers are silent with rows, or its leases fail: a cause.
- Its rows lack a column: the search goes on to the tasks that give the column.
- It has no rows: the search goes on to the producers. They may wait for room, which other tasks of the table free, or
  for rows of another table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

import msgspec

from transferqueue.observe.diagnosis import SILENT_S
from transferqueue.observe.stages import TableStage, Worker
from transferqueue.observe.units import count, plural, rows, size, span
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.stats import Stats, TableStats, Waiting

State = Literal[
    "gone", "defect", "lost", "failing", "silent", "missing", "stuck", "full", "stale", "starved",
    "waiting", "healthy", "finished", "idle",
]  # fmt: skip
ORDER: Final[tuple[State, ...]] = get_args(State)
"""The worst first."""
NAMES_SHOWN: Final = 3
TEXT_MAX: Final = 160
STALE_ENDS: Final = ("stale", "kept though stale", "requeued as stale")
_WAKE: Final = "Its process is stopped or blocked: let it go on, or kill it, and others get its rows."
_WAKE_SEVERAL: Final = (
    "Their processes are stopped or blocked: let them go on, or kill them, and others get their rows."
)
SINCE_EVER: Final = float("inf")


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a wait.

    Attributes:
        state: Kind of the cause; `ORDER` ranks them.
        text: One sentence.
        short: The same in a few words.
        table: The table, or "".
        task: The task, or "".
        remedy: The advice, or "".
        chain: The waits that lead to the cause, the first first.
        since_s: Seconds that the cause has lasted. None: as long as the wait that led to it.
    """

    state: State
    text: str
    short: str
    table: str = ""
    task: str = ""
    remedy: str = ""
    chain: tuple[str, ...] = ()
    since_s: float | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts the worst first, and of those the one that has lasted longest."""
        return ORDER.index(self.state), -(self.since_s or 0.0)


# ---------------------------------------------------------------- causes without a wait


def of_the_server(stats: Stats) -> list[Cause]:
    """Defects of the server, and rows that were lost."""
    causes = []
    if stats.server.internal_errors:
        met = plural(stats.server.internal_errors, "defect")
        causes.append(
            Cause(
                state="defect",
                text=f"the server met {met} of its own",
                short="server defect",
                remedy="Its log names each; please report it.",
                since_s=SINCE_EVER,
            )
        )
    for name, table in stats.tables.items():
        if lost := table.dropped.get("lost", 0):
            causes.append(
                Cause(
                    state="lost",
                    text=f"{name}: {rows(lost)} lost with the memory that held them",
                    short=f"{name}: {rows(lost)} lost",
                    table=name,
                    remedy="Put them again; replicas=2 keeps rows when one shard is lost.",
                    since_s=SINCE_EVER,
                )
            )
    return causes


def silent_holders(answer: DoctorAnswer, patience_s: float) -> list[Cause]:
    """All sessions that are silent and have rows, in one cause."""
    silent = [
        session
        for session in answer.sessions.values()
        if session.rows_leased + session.reserved > 0 and session.silent_s >= max(patience_s, SILENT_S)
    ]
    if not silent:
        return []
    workers = [
        Worker(name=one.name, state="silent", rows=one.rows_leased + one.reserved, silent_s=one.silent_s)
        for one in silent
    ]
    chain = tuple(f"{one.name} is process {one.pid}" for one in silent[:NAMES_SHOWN])
    return [_silent(workers, f" with {rows(sum(one.rows for one in workers))}", chain=chain)]


def _silent(workers: Sequence[Worker], what: str, table: str = "", chain: tuple[str, ...] = ()) -> Cause:
    names, silent_s = listed([worker.name for worker in workers]), min(worker.silent_s for worker in workers)
    return Cause(
        state="silent",
        text=f"{names} silent for {span(silent_s)}{what}",
        short=f"{names} silent",
        table=table,
        remedy=_WAKE if len(workers) == 1 else _WAKE_SEVERAL,
        chain=chain,
        since_s=silent_s,
    )


# ---------------------------------------------------------------- causes at the end of a wait


class Search:
    """Follows each wait, and each task with unfinished rows, to its cause. A search examines a task once."""

    def __init__(self, stats: Stats, answer: DoctorAnswer, stages: Mapping[str, Sequence[TableStage]]) -> None:
        self.stats, self.answer, self.stages = stats, answer, stages
        self.waits: dict[int, list[Waiting]] = {}
        for wait in answer.waiting:
            self.waits.setdefault(wait.session, []).append(wait)
        self.seen: set[tuple[str, str]] = set()

    def causes(self) -> list[Cause]:
        """The cause of each wait, and of each task with unfinished rows."""
        found = [self._of_wait(wait) for wait in sorted(self.answer.waiting, key=lambda wait: -wait.waited_s)]
        for table, stages in self.stages.items():
            for stage in stages:
                if stage.task and stage.open_rows:
                    self.seen = set()
                    found.append(self._task(table, stage))
        return [cause for cause in found if cause is not None]

    def _of_wait(self, wait: Waiting) -> Cause | None:
        self.seen = set()
        cause = self._after(wait)
        if cause is None or cause.state in ("missing", "failing"):
            return cause
        since_s = max(wait.waited_s, cause.since_s or 0.0)
        who, what = wait.label or "a client", wait.task or wait.request.lower()
        if cause.state != "waiting":
            chain = (f"{who} has waited {span(wait.waited_s)} for {what}", *cause.chain)
            return msgspec.structs.replace(cause, since_s=since_s, chain=chain)
        return msgspec.structs.replace(
            cause,
            text=f"{who} has waited {span(wait.waited_s)} for {what}: {cause.text}",
            since_s=wait.waited_s,
        )

    def _after(self, wait: Waiting) -> Cause | None:
        """The cause of one waiting request."""
        if wait.request == "Lease" and (stage := self._stage(wait.table, wait.task)) is not None:
            return self._task(wait.table, stage)
        if wait.request in ("Put", "Continue", "Reserve", "Grant"):
            return self._room(wait)
        text = _first_clause(wait.why) or f"{wait.request} waits"
        return Cause(state="waiting", text=text, short=f"{wait.request.lower()} waits", table=wait.table)

    def _stage(self, table: str, task: str) -> TableStage | None:
        return next((stage for stage in self.stages.get(table, ()) if stage.task == task), None)

    def _enter(self, table: str, task: str) -> bool:
        """Whether this search has not been here yet."""
        new = (table, task) not in self.seen
        self.seen.add((table, task))
        return new

    # ------------------------------------------------------------ tasks

    def _task(self, table: str, stage: TableStage) -> Cause | None:
        """The cause that stops the task. None: this search has examined it already."""
        if not self._enter(table, stage.task):
            return None
        if stage.failing:
            return _failing(table, stage)
        if stage.leased:
            return _holders(table, stage)
        if stage.ready and not any(worker.state == "waits" for worker in stage.workers):
            return self._unattended(table, stage)
        if stage.retrying:
            when = "soon" if stage.retry_s is None else f"in {span(stage.retry_s)}"
            text = f"{rows(stage.retrying)} of {stage.name} failed and are tried again {when}"
            return Cause(state="waiting", text=text, short=f"{stage.name} tries again", table=table, task=stage.task)
        if stage.lacks:
            return self._columns(table, stage)
        return self._producers(table, stage)

    def _unattended(self, table: str, stage: TableStage) -> Cause | None:
        """Rows are ready, and no session has them or asks for them."""
        if awake := [worker for worker in stage.workers if worker.state != "silent"]:
            for wait in (wait for worker in awake for wait in self.waits.get(worker.session, ())):
                return self._after(wait)
            asked = "" if stage.unattended_s is None else f", and last asked for rows {span(stage.unattended_s)} ago"
            is_connected = f"{listed([worker.name for worker in awake])} {_be(awake)} connected{asked}"
            return Cause(
                state="waiting",
                text=f"{stage.name} has {rows(stage.ready)} ready; {is_connected}",
                short=f"{stage.name} waits",
                table=table,
                task=stage.task,
                since_s=stage.unattended_s,
            )
        if stage.workers:
            return _silent(stage.workers, f"; {rows(stage.ready)} ready for {stage.name}", table)
        return _missing(table, stage)

    def _columns(self, table: str, stage: TableStage) -> Cause | None:
        """Rows lack columns: examine the tasks that give them."""
        causes = [self._column(table, stage, name, lacking) for name, lacking in stage.lacks.items()]
        return min((cause for cause in causes if cause is not None), key=lambda cause: cause.rank, default=None)

    def _column(self, table: str, stage: TableStage, name: str, lacking: int) -> Cause | None:
        givers = [other for other in self.stages[table] if name in other.gives and other.task != stage.task]
        at_work = [other for other in givers if other.open_rows]
        if not at_work:
            why = "no task gives it any more" if givers else "no task gives it"
            return Cause(
                state="stuck",
                text=f'{table}: {stage.name} lacks "{name}" of {rows(lacking)}, and {why}',
                short=f"{stage.name} lacks {name}",
                table=table,
                task=stage.task,
                remedy=f'Bring "{name}" with put() or update(), or end the rows with drop().',
                since_s=SINCE_EVER if stage.stranded else None,
            )
        causes = [_behind(self._task(table, giver), stage, f'"{name}" of {giver.name}') for giver in at_work]
        return min((cause for cause in causes if cause is not None), key=lambda cause: cause.rank, default=None)

    # ------------------------------------------------------------ producers

    def _producers(self, table: str, stage: TableStage) -> Cause | None:
        """The task has no rows, or not enough: examine the producers."""
        stats = self.stats.tables[table]
        producers = self._stage(table, "")
        if stats.sealed or producers is None or not self._enter(table, ""):
            return None
        return _behind(_stale(table, stats, self.answer) or self._of_producers(table, producers), stage, "rows")

    def _of_producers(self, table: str, producers: TableStage) -> Cause | None:
        if working := _reserving(producers):
            return _at_work(table, producers, working)
        awake = [worker for worker in producers.workers if worker.state != "silent"]
        for wait in (wait for worker in awake for wait in self.waits.get(worker.session, ())):
            return self._after(wait)
        names = listed([worker.name for worker in awake])
        if awake:
            text = f"{names} {_be(awake)} connected, and put no rows now"
            return Cause(state="waiting", text=text, short=f"{table}: no rows come", table=table)
        if producers.workers:
            return _silent(producers.workers, f"; no rows come into {table}", table)
        stats, left = self.stats.tables[table], producers.left
        last = f"; its last producer left {span(left.ago_s)} ago ({left.label}, {left.how})" if left else ""
        all_done = stats.rows_put and not stats.rows_live and not (left and left.died)
        return Cause(
            state="waiting" if all_done else "starved",
            text=f"{table}: no producer connected{last}",
            short=f"{table}: no rows come",
            table=table,
            remedy="Start a producer, or seal the table if all rows are in.",
        )

    def _room(self, wait: Waiting) -> Cause | None:
        """A producer waits for room: examine the tasks with unfinished rows."""
        tables = [wait.table] if wait.table else list(self.stages)
        causes = [
            self._task(table, stage)
            for table in tables
            for stage in self.stages.get(table, ())
            if stage.task and stage.open_rows
        ]
        ends = [cause for cause in causes if cause is not None and cause.state not in ("stuck", "starved")]
        ends += [
            _at_work(table, producers, reserving)
            for table in tables
            if (producers := self._stage(table, "")) is not None and (reserving := _reserving(producers))
        ]
        return min(ends, key=lambda cause: cause.rank, default=None) or self._full(wait)

    def _full(self, wait: Waiting) -> Cause:
        table, server = self.stats.tables.get(wait.table), self.stats.server
        if table is None:
            room = f"{size(server.used_bytes)} of {size(server.capacity_bytes)}"
            return Cause(
                state="full",
                text=f"the arena is full: {room}, and no task can go on to free some",
                short="arena full",
                remedy="Give the server a larger arena (--arena-bytes), or add a shard.",
            )
        ended_rows = table.rows_resident - table.rows_live
        why = f"{rows(ended_rows)} have ended and are kept" if ended_rows else "no task can free any"
        return Cause(
            state="full",
            text=f"{wait.table} is full: {_limit(table)}; {why}",
            short=f"{wait.table} full",
            table=wait.table,
            remedy="Call table.delete() of rows that ended and that you no longer read."
            if ended_rows
            else "Raise the table's Limits, or ask for smaller batches.",
        )


def _reserving(producers: TableStage) -> list[Worker]:
    """The producers that are not silent and have reserved rows."""
    return [worker for worker in producers.workers if worker.state != "silent" and worker.rows]


def _limit(table: TableStats) -> str:
    """The usage and the reached limit of the table."""
    if table.bytes_limit is not None and table.bytes >= table.bytes_limit:
        return f"{size(table.bytes)} of {size(table.bytes_limit)}"
    if table.outstanding_limit is not None and table.outstanding >= table.outstanding_limit:
        return f"{count(table.outstanding)} of {rows(table.outstanding_limit)} ahead of {table.pacing_task}"
    return f"{count(table.rows_resident + table.reserved)} of {rows(table.rows_limit)}"


def _behind(cause: Cause | None, stage: TableStage, what: str) -> Cause | None:
    """`cause`, with `stage` at the head of its chain."""
    if cause is None:
        return None
    return msgspec.structs.replace(cause, chain=(f"{stage.name} waits for {what}", *cause.chain))


def _failing(table: str, stage: TableStage) -> Cause:
    latest = stage.errors[0] if stage.errors else None
    what = (
        f": {latest.type} {one_line(latest.text)}, {_times(latest.count)}" if latest else ": each of its recent leases"
    )
    paused = "" if stage.paused_s is None else f"; paused, tried again in {span(stage.paused_s)}"
    where = f"{latest.worker} reported it {span(latest.last_s)} ago. " if latest and latest.worker else ""
    return Cause(
        state="failing",
        text=f"{stage.name} fails{what}{paused}",
        short=f"{stage.name} fails",
        table=table,
        task=stage.task,
        remedy=f"{where}Rows that failed are tried again once it works.",
        since_s=SINCE_EVER,
    )


def _missing(table: str, stage: TableStage) -> Cause:
    left = stage.left
    last = f"; its last worker left {span(left.ago_s)} ago ({left.label}, {left.how})" if left else ""
    advice = "start it again" if left else "start one"
    return Cause(
        state="missing",
        text=f"{table}/{stage.name}: {rows(stage.ready)} ready, no worker connected{last}; {advice}",
        short=f"{stage.name}: no worker",
        table=table,
        task=stage.task,
        chain=(f"{stage.name} has {rows(stage.ready)} ready",),
        since_s=stage.unattended_s or 0.0,
    )


def _holders(table: str, stage: TableStage) -> Cause:
    """Leases of the task are open: its workers are at work, or silent."""
    holding = [worker for worker in stage.workers if worker.rows]
    awake = [worker for worker in holding if worker.state != "silent"]
    if holding and not awake:
        return _silent(holding, f" with {rows(sum(worker.rows for worker in holding))}", table)
    return _at_work(table, stage, awake)


def _at_work(table: str, stage: TableStage, workers: Sequence[Worker]) -> Cause:
    held = sum(worker.rows for worker in workers) or stage.leased
    names = listed([worker.name for worker in workers]) or stage.name
    verb = "works" if len(workers) <= 1 else "work"
    since = "" if stage.since_s is None else f" for {span(stage.since_s)}"
    return Cause(
        state="waiting",
        text=f"{names} {verb} on {rows(held)}{since}",
        short=f"{stage.name} works",
        table=table,
        task=stage.task,
    )


def _stale(table: str, stats: TableStats, answer: DoctorAnswer) -> Cause | None:
    """All rows that ended lately were too old for the pacing task, which got none."""
    ends = answer.pipelines[table].ends if table in answer.pipelines else {}
    stale = sum(ends.get(reason, 0) for reason in STALE_ENDS)
    if not stale or ends.get("acked") or stats.pacing_task is None:
        return None
    bound = f"over {plural(stats.max_staleness, 'version')} behind" if stats.max_staleness else "of older versions"
    return Cause(
        state="stale",
        text=f"{table}: all rows come too late for {stats.pacing_task}: the last {count(stale)} were {bound}",
        short=f"{table}: all rows stale",
        table=table,
        task=stats.pacing_task,
        remedy="Have the producers use newer weights, produce less ahead, or raise max_staleness.",
    )


# ---------------------------------------------------------------- words


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b, c and 2 more``."""
    known = list(dict.fromkeys(names))
    if len(known) > NAMES_SHOWN:
        return f"{', '.join(known[:NAMES_SHOWN])} and {len(known) - NAMES_SHOWN} more"
    return " and ".join([", ".join(known[:-1]), known[-1]] if len(known) > 1 else known)


def _be(several: Sequence[object]) -> str:
    return "is" if len(several) == 1 else "are"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{count(number)} times"


def one_line(text: str) -> str:
    """Text of another process, on one line of at most `TEXT_MAX` characters."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_MAX else f"{line[:TEXT_MAX]}…"


def _first_clause(why: str) -> str:
    return one_line(why.partition(";")[0])
