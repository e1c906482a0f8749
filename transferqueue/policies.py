"""Policies as values: selectors, group rules, rules for stale rows, predicates, pacing and tasks.

A policy is a small frozen struct that travels as data. The ledger has the code that applies it; a policy never carries
code. A policy that could never make progress is refused when it is constructed (`Impossible`, with the arithmetic).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, dataclass_transform

import msgspec

from transferqueue.errors import Impossible, UsageError
from transferqueue.lazy import renamed_names
from transferqueue.limits import (
    INTEGER_BITS,
    LEASE_S_DEFAULT,
    SECONDS_MAX,
    TAG_CHARS_MAX,
    TAGS_MAX,
    TIME_LIMIT_S_DEFAULT,
    check_name,
    check_names,
)
from transferqueue.text import shown


@dataclass_transform(frozen_default=True)
class _Policy(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all policy values: compared by value, sent as a tagged array."""


def _numbers(subject: str, **values: object) -> None:
    """Refuse values that are not numbers. None is allowed where it is the default."""
    for name, value in values.items():
        allowed = value is None and name in ("min_size", "deadline_s", "max_staleness", "time_limit_s", "attempts")
        if not allowed and not isinstance(value, int | float):
            raise UsageError(f"{subject}: {name}={shown(value)} is {type(value).__name__}; give a number")
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
            raise UsageError(
                f"{subject}: {name}={shown(value)} is no number of at most {INTEGER_BITS} bits; give a smaller one"
            )


# ---------------------------------------------------------------- selectors: which ready rows next


class Fifo(_Policy):
    """Rows in the order in which they became ready."""


class PutOrder(_Policy):
    """Rows in the order in which they were put, by row id, whichever became ready first; of a group, its last row
    counts."""


class OldestVersionFirst(_Policy):
    """Smallest policy version first, then Fifo: the row nearest its staleness bound goes first."""


class Freshest(_Policy):
    """Largest policy version first, then the most recently put."""


class LongestFirst(_Policy):
    """Most tokens first, then Fifo: stragglers start early (StreamRL, arXiv 2504.15930, section 5)."""


class Priority(_Policy):
    """Largest `priority` first, then Fifo."""


class TokenBalanced(_Policy, kw_only=True):
    """One agreed batch, chosen by `inner`, split over `world` ranks by tokens.

    `equal_counts`: every rank gets the same number of rows (or of groups); otherwise counts are free
    and only tokens are balanced. The split is longest-processing-time first: the largest share is at
    most 4/3 - 1/(3 world) of the best possible (Graham 1969) when counts are free.
    """

    inner: Fifo | OldestVersionFirst | Freshest | LongestFirst | Priority | PutOrder = Fifo()
    equal_counts: bool = True


class Plugin(_Policy):
    """A selector registered on the server by entry point ``transferqueue.selectors``, by name."""

    name: str
    options: dict[str, str | int | float | bool] = {}


Selector = Fifo | OldestVersionFirst | Freshest | LongestFirst | Priority | TokenBalanced | PutOrder | Plugin

# ---------------------------------------------------------------- groups


class Refill(_Policy):
    """Complete the group: leases of unfinished members end, and their rows become ready again. Members that were never
    put are offered to the next `reserve` as `refills` (group_id, missing)."""


class DeliverPartial(_Policy, tag="Release"):
    """Lease the members that are ready, if at least `min_size` are; drop the group otherwise. Its former name is
    `Release`."""


class DropGroup(_Policy):
    """Drop all members, with reason ``group_incomplete``."""


class Complete(_Policy, kw_only=True):
    """Lease whole groups only.

    A group is whole when all `group_size` members are ready for the task. A group is *incomplete* when
    it is not whole `deadline_s` seconds after its first member became ready (None: no deadline), or as
    soon as a member was dropped; then `incomplete` says what happens. `min_size` (None: group_size) is
    the fewest rows that `DeliverPartial` leases.
    """

    min_size: int | None = None
    deadline_s: float | None = None
    incomplete: Refill | DeliverPartial | DropGroup = DropGroup()

    def __post_init__(self) -> None:
        _numbers("complete groups", min_size=self.min_size, deadline_s=self.deadline_s)
        if self.min_size is not None and self.min_size < 1:
            raise UsageError(f"min_size={shown(self.min_size)} is not a positive number of rows")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise UsageError(f"deadline_s={shown(self.deadline_s)} is not a positive number of seconds")


# ---------------------------------------------------------------- stale rows, retention


class DropStale(_Policy):
    """A row over the bound is dropped, with reason ``stale``."""


class KeepStale(_Policy):
    """A row over the bound is never leased to this task again, but stays readable until it is deleted."""


class Requeue(_Policy):
    """A row over the bound goes back to `task`: the fields that this task and later tasks gave are cleared.

    A sealed table ends for these tasks only when the pacing task has no row left that could still come back.
    """

    task: str


class HoldClock(_Policy):
    """The version clock waits: `advance` and `publish` block, with a deadline, while they would make a live row
    stale."""


OnStale = DropStale | KeepStale | Requeue | HoldClock


class Acked(_Policy):
    """A row is freed when every task of the table is done with it."""


class Manual(_Policy):
    """A row stays, readable, until `delete`."""


class AckedColumns(Acked):
    """As `Acked`, and each column is freed earlier, with its last task: when every task that needs it is done with the
    row.

    A column that no task needs stays as long as its row. A task leases only fields that it needs or gives, or that no
    task needs, since others may be freed by then (`ColumnFreed`). Puts lay columns that end with different tasks into
    memory of their own. Scalars of up to eight bytes are in the ledger and stay. A value that is lost with a shard is
    given again only if what its task needs is not freed.
    """


class ManualColumns(Manual):
    """As `Manual`, and each column of `COLUMN_APART_BYTES` (256 KiB) or more of a put lies in memory of its own, which
    `free_columns` returns at once. Of other tables, memory returns when every column of a put is freed.
    """


Retention = Acked | Manual | AckedColumns | ManualColumns

# ---------------------------------------------------------------- predicates: which rows may be chosen


class TagIs(_Policy):
    """Rows whose tag `name` equals `value`."""

    name: str
    value: str | int | float | bool


class VersionBetween(_Policy):
    """Rows with `low <= policy_version <= high` (either may be None)."""

    low: int | None = None
    high: int | None = None

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise Impossible(
                f"VersionBetween(low={shown(low)}, high={shown(high)}): no version is both; give low <= high"
            )


class Compare(_Policy):
    """Rows whose inline scalar field (or metadata ``tokens``, ``priority``, ``ordinal``) compares with `value` by
    `op`."""

    field: str
    op: Literal["<", "<=", "==", "!=", ">=", ">"]
    value: int | float | bool


Predicate = TagIs | VersionBetween | Compare

# ---------------------------------------------------------------- tasks and pacing


class Retry(_Policy, kw_only=True):
    """When a row whose lease failed (an exception in ``with batch``, ``release(failed=True)``) is leased again.

    The n-th failure of a row makes it wait ``min(first_s * factor ** (n - 1), max_s)`` seconds. A lease that ends
    because its worker died or went silent is no failure: its rows are leased again at once. While all leases of a task
    fail, the task is paused, and one lease at a time is tried; such failures do not count.

    Args:
        first_s: seconds after the first failure; 0: no wait.
        factor: the factor from one wait to the next, at least 1.
        max_s: the longest wait, in seconds.
        attempts: a row is dropped with reason ``attempts`` after so many failures (None: never).

    Example:
        >>> [Retry().wait_s(failures) for failures in (1, 2, 3, 20)]
        [1.0, 2.0, 4.0, 60.0]
    """

    first_s: float = 1.0
    factor: float = 2.0
    max_s: float = 60.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        _numbers("retry", first_s=self.first_s, factor=self.factor, max_s=self.max_s, attempts=self.attempts)
        if not 0 <= self.first_s <= SECONDS_MAX:
            raise UsageError(
                f"retry: first_s={shown(self.first_s)} is not a number of seconds from 0 on; 0 means at once"
            )
        if not 1 <= self.factor <= SECONDS_MAX:
            raise UsageError(f"retry: factor={shown(self.factor)} is below 1 or too large; 1 makes all waits equal")
        if not self.first_s <= self.max_s <= SECONDS_MAX:
            raise UsageError(
                f"retry: max_s={shown(self.max_s)} is below first_s={shown(self.first_s)}, or too long; give the "
                "longest wait"
            )
        if self.attempts is not None and (isinstance(self.attempts, bool) or self.attempts < 1):
            raise UsageError(
                f"retry: attempts={shown(self.attempts)} is not a positive number of failures; None means that no row "
                "is dropped for failing"
            )

    def wait_s(self, failures: int) -> float:
        """Seconds that a row waits after so many failures, of which the last one was just now."""
        try:
            return min(self.first_s * self.factor ** (failures - 1), self.max_s)
        except OverflowError:
            return self.max_s


class Task(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A named consumer of a table. Every row goes to every task; inside a task each row is done once.

    needs: fields that must be complete before the task sees a row.
    gives: fields that the task writes. Each ack must carry those that another task needs, unless the row has them
    already; an ack without them is refused (drop a row that has no result). Leave out a field that another process
    writes by `Table.update` after the ack: tasks that need it wait for it in any case. `Requeue` and the loss of bytes
    return a row to the task that gives the missing field. selector: which ready rows next. groups: `Complete(...)` for
    whole groups only. lease_s: seconds until a silent worker (dead, stopped, cut off) loses its rows; the client of a
    live worker renews the lease in time. time_limit_s: seconds that a worker may hold a batch (None: half an hour, or
    lease_s if that is more). A worker that holds it longer counts as hanging, and loses the rows though its process
    lives. retry: when rows whose lease failed are leased again, and after how many failures they are dropped (never,
    unless it says so). from_: "start": the task gets every live row; "now": only rows put after the task was declared.
    """

    name: str
    needs: Sequence[str] = ()
    gives: Sequence[str] = ()
    selector: Selector = Fifo()
    groups: Complete | None = None
    lease_s: float = LEASE_S_DEFAULT
    retry: Retry = Retry()
    from_: Literal["start", "now"] = "start"
    time_limit_s: float | None = None

    @property
    def held_s_max(self) -> float:
        """`time_limit_s`, or its default if it is None: seconds."""
        return max(self.lease_s, TIME_LIMIT_S_DEFAULT) if self.time_limit_s is None else self.time_limit_s

    def __post_init__(self) -> None:
        check_name("task", self.name)
        if isinstance(self.needs, str) or isinstance(self.gives, str):
            raise UsageError(f'task "{self.name}": needs and gives are lists of field names, not one string')
        if not isinstance(self.needs, Iterable) or not isinstance(self.gives, Iterable):
            raise UsageError(
                f'task "{self.name}": needs={shown(self.needs)} and gives={shown(self.gives)} are lists of field names'
            )
        msgspec.structs.force_setattr(self, "needs", tuple(self.needs))
        msgspec.structs.force_setattr(self, "gives", tuple(self.gives))
        check_names("field", (*self.needs, *self.gives))
        _numbers(
            f'task "{self.name}"',
            lease_s=self.lease_s,
            time_limit_s=self.time_limit_s,
        )
        if not self.lease_s > 0:
            raise UsageError(f'task "{self.name}": lease_s={shown(self.lease_s)} is not a positive number of seconds')
        if self.time_limit_s is not None and not self.time_limit_s >= self.lease_s:
            raise UsageError(
                f'task "{self.name}": time_limit_s={shown(self.time_limit_s)} is below lease_s={shown(self.lease_s)}, '
                "for which rows are lent "
                "at least; give a longer limit or a shorter lease"
            )
        if not isinstance(self.retry, Retry):
            raise UsageError(f'task "{self.name}": retry={shown(self.retry)} is no policy; give tq.Retry(...)')
        if set(self.needs) & set(self.gives):
            both = ", ".join(sorted(set(self.needs) & set(self.gives)))
            raise Impossible(f'task "{self.name}" both needs and gives {both}: it would wait for itself')
        if not isinstance(self.from_, str) or self.from_ not in ("start", "now"):
            raise UsageError(f'task "{self.name}": from_={shown(self.from_)} is neither "start" nor "now"')


_DEPTH_MAX = 2**31
"""More batches than any limit of rows allows; a larger number could overflow in a product."""


class Pacing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How far production may run ahead of the pacing task (usually the trainer).

    batch_rows: rows per trainer step. depth: batches that may be outstanding beyond the current one; 0.25 allows a
    quarter of a batch more (over-sampling). max_staleness: versions that a row may be behind when `task` leases it
    (None: no bound). A row that was put without a `policy_version` has no age, and is never over the bound. on_stale:
    the rule for a row over the bound. channel: the weight channel whose versions are this table's clock (None:
    `table.advance` moves the clock).
    """

    task: str
    batch_rows: int
    depth: int | float = 1
    max_staleness: int | None = None
    on_stale: OnStale = DropStale()
    channel: str | None = None

    def __post_init__(self) -> None:
        check_name("task", self.task)
        _numbers("pacing", batch_rows=self.batch_rows, depth=self.depth, max_staleness=self.max_staleness)
        if self.batch_rows < 1:
            raise UsageError(f"batch_rows={shown(self.batch_rows)} is not a positive number of rows")
        if not 0 <= self.depth <= _DEPTH_MAX:
            raise UsageError(
                f"depth={shown(self.depth)} is not from 0 to {_DEPTH_MAX} batches; 0 means one batch at a time"
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise Impossible(
                f"max_staleness={shown(self.max_staleness)}: no row could ever be handed over; 0 is synchronous"
            )

    @property
    def rows_ahead_max(self) -> int:
        """The most rows that may be reserved, or live and not yet done by the pacing task."""
        return round((self.depth + 1) * self.batch_rows)


Tags = dict[str, str | int | float | bool]
"""The tags of one row."""


def check_tags(tags: object) -> Tags:
    """Return `tags` if they are valid tags of a row, else raise `UsageError`."""
    if not isinstance(tags, dict):
        raise UsageError(f"tags are {type(tags).__name__}; give a dict of name to str, int, float or bool")
    if len(tags) > TAGS_MAX:
        raise UsageError(f"a row has {len(tags)} tags; at most {TAGS_MAX}: use a column")
    for name, value in tags.items():
        check_name("tag", name)
        if not isinstance(value, str | int | float | bool):
            raise UsageError(f'tag "{name}" is {type(value).__name__}; tags are str, int, float or bool')
        if isinstance(value, str) and len(value) > TAG_CHARS_MAX:
            raise UsageError(f'tag "{name}" has {len(value)} characters; at most {TAG_CHARS_MAX}: use a column')
    return tags


__getattr__ = renamed_names(__name__, {"Release": "DeliverPartial"})
