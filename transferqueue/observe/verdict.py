"""The verdict on a queue: its worst trouble in one sentence. Does no I/O.

`causes` follows each wait to its cause. The worst cause is the verdict; the others follow it. A cause younger than the
reader's patience is no verdict yet, because stages that keep pace wait for moments all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from transferqueue.observe.causes import ORDER, Cause, Search, State, listed, of_the_server, one_line, silent_holders
from transferqueue.observe.diagnosis import Diagnosis, diagnose
from transferqueue.observe.stages import TableStage, all_stages
from transferqueue.observe.units import count, rows
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.stats import Stats, TableStats

TROUBLES: Final = frozenset(ORDER[: ORDER.index("waiting")])
"""The states that end only if someone acts."""
MARKS: Final[Mapping[State, str]] = {"waiting": "…", "healthy": "✓", "finished": "✓", "idle": "…"}
ALSO_MAX: Final = 4
PATIENCE_S: Final = 10.0
"""A pipeline whose stages keep pace waits for seconds at most. A person who asks has waited longer."""


class QueueVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about the whole queue.

    Attributes:
        state: Kind of the cause.
        trouble: Whether it ends only if someone acts.
        mark: ✗, … or ✓.
        text: The sentence.
        short: The sentence in a few words, for the title of a window.
        table: The table, or "".
        task: The task, or "".
        remedy: The advice, or "".
        chain: The waits that lead to the cause, the first first.
        also: Further troubles, the worst first.
    """

    state: State
    trouble: bool
    mark: str
    text: str
    short: str
    table: str = ""
    task: str = ""
    remedy: str = ""
    chain: list[str] = []
    also: list[str] = []


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a queue, its stages by table, and its waits."""

    verdict: QueueVerdict
    stages: dict[str, list[TableStage]]
    symptoms: Diagnosis


def report(stats: Stats, answer: DoctorAnswer, *, patience_s: float = PATIENCE_S) -> QueueReport:
    """Report on a queue from the answers of its server to `Observe("stats")` and `Observe("doctor")`.

    Args:
        stats: Of all tables; those that `answer` lacks are left out.
        answer: Of all tables, or of one.
        patience_s: A wait, a silence or an absence shorter than this is no trouble. Default: 10.
    """
    stages = all_stages(stats, answer)
    known = msgspec.structs.replace(stats, tables={name: stats.tables[name] for name in stages})
    return QueueReport(
        verdict=_judge(known, answer, stages, patience_s),
        stages=stages,
        symptoms=diagnose(answer),
    )


def ended(last: QueueVerdict | None, why: str) -> QueueVerdict:
    """The verdict once the server is gone.

    Args:
        last: The verdict before; a finished job stays finished.
        why: The error.
    """
    if last is not None and last.state == "finished":
        return msgspec.structs.replace(last, remedy="The server has ended; this is its last report.")
    before = [] if last is None else [f"before that: {last.text}"]
    return _said(Cause(state="gone", text="the server is gone", short="server gone", remedy=one_line(why)), before)


# ---------------------------------------------------------------- verdicts


def _judge(
    stats: Stats, answer: DoctorAnswer, stages: Mapping[str, Sequence[TableStage]], patience_s: float
) -> QueueVerdict:
    causes = [*of_the_server(stats), *silent_holders(answer, patience_s), *Search(stats, answer, stages).causes()]
    lasting = [cause for cause in _merged(causes) if (cause.since_s or 0.0) >= patience_s]
    troubles = sorted((cause for cause in lasting if cause.state in TROUBLES), key=lambda cause: cause.rank)
    if troubles:
        also = [cause.text for cause in troubles[1:]]
        return _said(troubles[0], list(dict.fromkeys(also))[:ALSO_MAX])
    waiting = [cause for cause in causes if cause.state == "missing"]
    waiting = waiting or [cause for cause in lasting if cause.state == "waiting"]
    if waiting:
        return _said(msgspec.structs.replace(min(waiting, key=lambda cause: cause.rank), state="waiting"))
    return _quiet(stats, stages)


def _said(cause: Cause, also: Sequence[str] = ()) -> QueueVerdict:
    return QueueVerdict(
        state=cause.state,
        trouble=cause.state in TROUBLES,
        mark=MARKS.get(cause.state, "✗"),
        text=cause.text,
        short=cause.short,
        table=cause.table,
        task=cause.task,
        remedy=cause.remedy,
        chain=list(cause.chain),
        also=list(also),
    )


def _quiet(stats: Stats, stages: Mapping[str, Sequence[TableStage]]) -> QueueVerdict:
    """The verdict of a queue without long waits: it works, has finished, or is idle."""
    tables = stats.tables
    busy = [name for name, of in stages.items() if not _has_ended(tables[name]) and any(map(_is_attended, of))]
    if busy:
        what = f"{busy[0]}: all stages move" if len(busy) == 1 else "all stages move"
        return _said(Cause(state="healthy", text=what, short=what, table=busy[0] if len(busy) == 1 else ""))
    done, dropped = sum(table.rows_done for table in tables.values()), sum(t.rows_dropped for t in tables.values())
    total = f"{count(done)} done, {count(dropped)} dropped"
    if any(map(_has_ended, tables.values())) and all(not table.rows_live for table in tables.values()):
        reasons = _reasons(tables.values())
        return _said(Cause(state="finished", text=f"finished: {total}{reasons}", short=f"finished: {count(done)} done"))
    if not tables:
        return _said(Cause(state="idle", text="no tables yet", short="no tables yet"))
    if live := sum(table.rows_live for table in tables.values()):
        return _said(Cause(state="idle", text=f"idle: {rows(live)} unfinished, no stage works on them", short="idle"))
    still_open = [name for name, table in tables.items() if not table.sealed]
    be = "is" if len(still_open) == 1 else "are"
    text = f"nothing to do: no unfinished rows ({total}); {listed(still_open)} {be} still open"
    return _said(Cause(state="idle", text=text, short="idle"))


def _is_attended(stage: TableStage) -> bool:
    states = {worker.state for worker in stage.workers}
    return not states.isdisjoint({"works", "waits"}) or ("idle" in states and stage.open_rows > 0)


def _has_ended(table: TableStats) -> bool:
    return table.sealed and not table.rows_live


def _reasons(tables: Iterable[TableStats]) -> str:
    reasons: dict[str, int] = {}
    for table in tables:
        for reason, number in table.dropped.items():
            reasons[reason] = reasons.get(reason, 0) + number
    named = ", ".join(f"{reason} {count(number)}" for reason, number in reasons.items() if number)
    return f" ({one_line(named)})" if named else ""


def _merged(causes: Iterable[Cause]) -> list[Cause]:
    """Each cause once. All silence is one cause, and so are all tasks of a table without a worker."""
    alike: dict[tuple[State, str, str], Cause] = {}
    known = list(causes)
    silent = [cause for cause in known if cause.state == "silent"][:1]
    others = [cause for cause in known if cause.state != "silent"]
    for cause in silent + sorted(others, key=lambda cause: (cause.rank, -len(cause.chain))):
        alike.setdefault((cause.state, cause.table, cause.short), cause)
    missing: dict[str, list[Cause]] = {}
    for cause in alike.values():
        if cause.state == "missing":
            missing.setdefault(cause.table, []).append(cause)
    several = [_all_missing(table, same) for table, same in missing.items() if len(same) > 1]
    gone = {cause.table for cause in several}
    return [*several, *(cause for cause in alike.values() if cause.state != "missing" or cause.table not in gone)]


def _all_missing(table: str, same: list[Cause]) -> Cause:
    tasks = listed([cause.task for cause in same])
    return msgspec.structs.replace(
        same[0], text=f"{table}: no worker connected for {tasks}; start them", short=f"{tasks}: no worker"
    )
