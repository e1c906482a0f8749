"""The terms of a table as `inspect` shows them: the tasks that need or give each field, and policies in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from transferqueue.limits import Limits
from transferqueue.observe.units import plural
from transferqueue.policies import (
    Acked,
    AckedColumns,
    DropStale,
    HoldClock,
    KeepStale,
    OnStale,
    Pacing,
    Recorded,
    Requeue,
    Retention,
    Task,
)
from transferqueue.schema import Field
from transferqueue.wire.answers.stats import TableStats


class FieldTerms(msgspec.Struct, frozen=True, kw_only=True):
    """One field. `inline`: its values live in the ledger, with the row."""

    name: str
    type: str
    inline: bool
    needed_by: list[str]
    given_by: list[str]


class TaskTerms(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `unknown`: needs that no field of the table satisfies yet."""

    name: str
    needs: list[str]
    gives: list[str]
    unknown: list[str]
    selector: str
    groups: str
    lease_s: float
    retry: str
    starts: str


class TableDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One table: its terms and its counts."""

    name: str
    fields: list[FieldTerms]
    tasks: list[TaskTerms]
    rows_limit: int
    bytes_limit: int | None
    pacing: str
    retention: str
    stats: TableStats


def table_terms(
    name: str,
    *,
    fields: Mapping[str, Field],
    tasks: Mapping[str, Task],
    limits: Limits,
    pacing: Pacing | None,
    retention: Retention,
    stats: TableStats,
) -> TableDescription:
    """Terms of one table, from the values of its handle."""
    return TableDescription(
        name=name,
        fields=[_field(field, tasks.values()) for field in fields.values()],
        tasks=[_task(task, fields) for task in tasks.values()],
        rows_limit=limits.rows,
        bytes_limit=limits.bytes_max,
        pacing=pacing_sentence(pacing),
        retention=_retention(retention),
        stats=stats,
    )


def policy_text(policy: object) -> str:
    """A policy as a program writes it, without defaults: ``Fifo``, ``Complete(deadline_s=30)``."""
    if not isinstance(policy, msgspec.Struct):
        return repr(policy)
    differing = [
        f"{field.name}={policy_text(value)}"
        for field in msgspec.structs.fields(policy)
        if (value := getattr(policy, field.name)) != field.default
    ]
    return type(policy).__name__ + (f"({', '.join(differing)})" if differing else "")


def pacing_sentence(pacing: Pacing | None) -> str:
    """The pacing of production in words; "" without pacing."""
    if pacing is None:
        return ""
    words = [
        f"{pacing.task} takes {pacing.batch_rows:,} rows a step, production runs at most {_batches(pacing.depth)} ahead"
    ]
    if pacing.max_staleness is not None:
        words.append(f"rows over {plural(pacing.max_staleness, 'version')} behind {_stale(pacing.on_stale)}")
    words.append(f"the clock is weight channel {pacing.channel}" if pacing.channel else "the clock is table.advance")
    return "; ".join(words)


def _batches(depth: float) -> str:
    return plural(int(depth), "batch") if depth == int(depth) else f"{depth:g} batches"


def _stale(policy: OnStale) -> str:
    match policy:
        case DropStale():
            return "are dropped"
        case KeepStale():
            return "are kept, and never handed over again"
        case Requeue(task):
            return f"go back to {task}"
        case HoldClock():
            return "hold the clock"


def _retention(policy: Retention) -> str:
    if isinstance(policy, AckedColumns):
        return "a column is freed when every task that needs it is done with the row, the row when every task is"
    if isinstance(policy, Acked):
        return "a row is freed when every task is done with it"
    if isinstance(policy, Recorded):
        return f"a row that has ended is written into a file under {policy.directory}, and then freed"
    return "a row stays, readable, until it is deleted"


def _field(field: Field, tasks: Iterable[Task]) -> FieldTerms:
    tasks = list(tasks)
    return FieldTerms(
        name=field.name,
        type=field.describe(),
        inline=field.inline,
        needed_by=[task.name for task in tasks if field.name in task.needs],
        given_by=[task.name for task in tasks if field.name in task.gives],
    )


def _task(task: Task, fields: Mapping[str, Field]) -> TaskTerms:
    return TaskTerms(
        name=task.name,
        needs=list(task.needs),
        gives=list(task.gives),
        unknown=[name for name in task.needs if name not in fields],
        selector=policy_text(task.selector),
        groups=policy_text(task.groups) if task.groups else "",
        lease_s=task.lease_s,
        retry=policy_text(task.retry),
        starts=task.from_,
    )
