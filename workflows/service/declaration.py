"""The declaration of a job for `init_engines`: plain values, so that a client without our types can send it as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec

import transferqueue as tq
from transferqueue.errors import UsageError
from transferqueue.limits import (
    FIELDS_MAX,
    LEASE_S_DEFAULT,
    NAME_CHARS_MAX,
    TASKS_MAX,
)

NAME: Final = "experience"
"""Default name of the table and of its weight channel."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Names = Annotated[list[Name], msgspec.Meta(max_length=FIELDS_MAX)]

_STALE: Final[dict[str, Callable[[], tq.OnStale]]] = {"drop": tq.DropStale, "keep": tq.KeepStale, "wait": tq.HoldClock}
_INCOMPLETE: Final[dict[str, Callable[[], tq.DropGroup | tq.Refill | tq.DeliverPartial]]] = {
    "drop": tq.DropGroup,
    "refill": tq.Refill,
    "release": tq.DeliverPartial,
}
_ORDERS: Final[dict[str, Callable[[], tq.Selector]]] = {
    "fifo": tq.Fifo,
    "oldest_version_first": tq.OldestVersionFirst,
    "freshest": tq.Freshest,
    "longest_first": tq.LongestFirst,
    "priority": tq.Priority,
}


class ColumnSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A declared column. Undeclared columns get their type from the first values put.

    Args:
        name: of the column.
        dtype: such as "float32" or "str".
        shape: of one row's value, with null where rows differ; default ``[]``: a scalar.
    """

    name: Name
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[list[int | None], msgspec.Meta(max_length=8)] = []


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stage takes whole groups only.

    Args:
        incomplete: what happens to a group that lost a row, or is not whole in time: ``"drop"`` (default), ``"refill"``
            or ``"release"`` (`DeliverPartial`).
        min_size: the fewest rows that ``"release"`` leases; default null: the group's size.
        deadline_s: seconds from the first ready row until the group counts as incomplete; default null: no deadline.
    """

    incomplete: Literal["drop", "refill", "release"] = "drop"
    min_size: int | None = None
    deadline_s: float | None = None


class RetrySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When rows of a failed lease are leased again.

    Args:
        first_s: seconds after the first failure; default 1.0.
        factor: the factor from one wait to the next; default 2.0.
        max_s: the longest wait in seconds; default 60.0.
        attempts: failures after which a row is dropped; default null: never.
    """

    first_s: float = 1.0
    factor: float = 2.0
    max_s: float = 60.0
    attempts: int | None = None

    def policy(self) -> tq.Retry:
        """Return it as a policy of the queue."""
        return tq.Retry(first_s=self.first_s, factor=self.factor, max_s=self.max_s, attempts=self.attempts)


class EngineStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage: the fields that its engines need and give.

    A row is ready when all its `needs` are set, and goes to the stage once.

    Args:
        name: of the stage.
        needs: fields that a row must have.
        gives: fields that the stage writes; default: none.
        order: ``"fifo"`` (default), ``"oldest_version_first"``, ``"freshest"``, ``"longest_first"`` or ``"priority"``.
        groups: take whole groups only; default null: single rows.
        lease_s: seconds until a silent worker loses its rows; default 60.
        retry: when rows of a failed lease are leased again; default ``RetrySpec()``.
    """

    name: Name
    needs: Names
    gives: Names = []
    order: Literal["fifo", "oldest_version_first", "freshest", "longest_first", "priority"] = "fifo"
    groups: GroupSpec | None = None
    lease_s: float = LEASE_S_DEFAULT
    retry: RetrySpec = RetrySpec()

    def task(self) -> tq.Task:
        """Return it as a task of the queue."""
        return tq.Task(
            self.name,
            needs=self.needs,
            gives=self.gives,
            selector=_ORDERS[self.order](),
            groups=None if self.groups is None else _groups(self.groups),
            lease_s=self.lease_s,
            retry=self.retry.policy(),
        )


class PacingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far prompts may run ahead of a stage, usually the trainer.

    Args:
        stage: name of the stage.
        batch_rows: rows of one of its steps.
        depth: batches that may be outstanding beyond the current one; default 1.
        max_staleness: versions that a row may be behind; default null: no bound.
        on_stale: a row that is too old is dropped (``"drop"``, default), kept (``"keep"``), holds the clock
            (``"wait"``), or goes back (``"requeue"``).
        requeue_to: the stage that rows go back to, with ``"requeue"``; default "".
    """

    stage: Name
    batch_rows: int
    depth: int = 1
    max_staleness: int | None = None
    on_stale: Literal["drop", "keep", "wait", "requeue"] = "drop"
    requeue_to: str = ""

    def pacing(self, channel: str) -> tq.Pacing:
        """Return it as a pacing of the queue.

        Args:
            channel: the weight channel that is the clock.

        Raises:
            UsageError: `requeue_to` without ``"requeue"``, or the other way round.
        """
        return tq.Pacing(
            self.stage,
            batch_rows=self.batch_rows,
            depth=self.depth,
            max_staleness=self.max_staleness,
            on_stale=self._on_stale(),
            channel=channel,
        )

    def _on_stale(self) -> tq.OnStale:
        if (self.on_stale == "requeue") != bool(self.requeue_to):
            raise UsageError(
                f'pace of stage "{self.stage}": on_stale={self.on_stale!r} with requeue_to={self.requeue_to!r}; '
                "on_stale=requeue names the stage that rows go back to, and nothing else does"
            )
        return tq.Requeue(self.requeue_to) if self.requeue_to else _STALE[self.on_stale]()


class Engines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job: its stages, and how far it may run ahead. Declaring the same job again changes nothing.

    Args:
        stages: of the job, 1 to 64.
        table: name of the table and of its weight channel; default ``"experience"``.
        columns: declared columns; default: none.
        pace: how far prompts may run ahead; default null: as far as there is room.
        rows_max: the most live rows, at which prompts wait; default 65536.
        bytes_max: the most bytes; default null: only the arena bounds them.
        keep_rows: rows stay readable after the last stage, until they are deleted; default False.
    """

    stages: Annotated[list[EngineStage], msgspec.Meta(min_length=1, max_length=TASKS_MAX)]
    table: Name = NAME
    columns: Annotated[list[ColumnSpec], msgspec.Meta(max_length=FIELDS_MAX)] = []
    pace: PacingSpec | None = None
    rows_max: int = 1 << 16
    bytes_max: int | None = None
    keep_rows: bool = False

    def terms(self) -> dict[str, Any]:
        """Return the arguments of `Queue.create_table`.

        Raises:
            UsageError: an invalid declaration.
        """
        return {
            "fields": [tq.Field(column.name, column.dtype, tuple(column.shape)) for column in self.columns],
            "extra_fields": True,  # AsyncFlow's callers add columns as they go
            "tasks": [stage.task() for stage in self.stages],
            "limits": tq.Limits(rows=self.rows_max, bytes=self.bytes_max),
            "pacing": None if self.pace is None else self.pace.pacing(self.table),
            "retention": tq.Manual() if self.keep_rows else tq.Acked(),
            "exist_ok": True,
        }


def _groups(groups: GroupSpec) -> tq.Complete:
    incomplete = _INCOMPLETE[groups.incomplete]()
    return tq.Complete(min_size=groups.min_size, deadline_s=groups.deadline_s, incomplete=incomplete)
