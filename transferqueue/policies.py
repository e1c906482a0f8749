"""Policies as values: selectors, group rules, rules for stale rows, predicates, pacing and tasks.

A policy is a small frozen struct that travels as data. The ledger has the code that applies it; a policy never carries
code. A policy that could never make progress is refused when it is constructed (`Impossible`, with the arithmetic).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, dataclass_transform

import msgspec

from transferqueue.errors import Impossible, UsageError
from transferqueue.errors.text import shown
from transferqueue.lazy import renamed_names
from transferqueue.limits import (
    INTEGER_BITS,
    LEASE_S_DEFAULT,
    SECONDS_MAX,
    TAG_CHARS_MAX,
    TAGS_MAX,
    TEXT_CHARS_MAX,
    TIME_LIMIT_S_DEFAULT,
    check_name,
    check_names,
    parse_bytes,
)


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
    """Select rows in the order in which they became ready for the task.

    Example:
        >>> import transferqueue as tq
        >>> tq.Task("train", needs=["x"], selector=tq.Fifo()).selector
        Fifo()
    """


class PutOrder(_Policy):
    """Select rows in the order in which they were put, by row id, whichever became ready first.

    A group counts by its row with the highest id.

    Example:
        >>> import transferqueue as tq
        >>> tq.Task("train", needs=["x"], selector=tq.PutOrder()).selector
        PutOrder()
    """


class OldestVersionFirst(_Policy):
    """Select the smallest policy version first, then as `Fifo`.

    The rows nearest to their staleness bound go first. A group counts by its oldest row.

    Example:
        >>> import transferqueue as tq
        >>> tq.Task("train", needs=["x"], selector=tq.OldestVersionFirst()).selector
        OldestVersionFirst()
    """


class Freshest(_Policy):
    """Select the largest policy version first, then the most recently put.

    Example:
        >>> import transferqueue as tq
        >>> tq.Task("train", needs=["x"], selector=tq.Freshest()).selector
        Freshest()
    """


class LongestFirst(_Policy):
    """Select the rows with the most tokens first, then as `Fifo`, so that stragglers start early.

    A group counts by the sum of its tokens. Source: StreamRL, arXiv 2504.15930, section 5.

    Example:
        >>> import transferqueue as tq
        >>> tq.Task("train", needs=["x"], selector=tq.LongestFirst()).selector
        LongestFirst()
    """


class Priority(_Policy):
    """Select the largest `priority` first, then as `Fifo`.

    A group counts by its row with the highest priority.

    Example:
        >>> import transferqueue as tq
        >>> tq.Task("train", needs=["x"], selector=tq.Priority()).selector
        Priority()
    """


RowOrder = Fifo | OldestVersionFirst | Freshest | LongestFirst | Priority | PutOrder
"""Selectors that rank each row, or group, by itself."""


class TokenBalanced(_Policy, kw_only=True):
    """Split one agreed batch over the ranks of a job, balanced by tokens.

    The batch is chosen by `inner`. Each rank gets its share by ``lease(..., rank=, world=)``. The split is longest
    processing time first: with free counts the largest share is at most 4/3 - 1/(3 world) of the best possible (Graham
    1969).

    Args:
        inner: the selector that chooses the batch; default ``Fifo()``.
        equal_counts: whether all ranks get the same number of rows, or of groups; default True. False: only the tokens
            are balanced.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     tasks = [tq.Task("train", needs=["x"], selector=tq.TokenBalanced())]
        ...     table = queue.create_table("t", tasks=tasks)
        ...     rows = table.put(x=[0, 1, 2, 3], tokens=[100, 90, 10, 20])
        ...     shares = [table.lease("train", rows=4, rank=rank, world=2) for rank in (0, 1)]
        ...     [share.tokens.tolist() for share in shares]
        [[100, 10], [90, 20]]
    """

    inner: RowOrder = Fifo()
    equal_counts: bool = True


class Plugin(_Policy):
    """Select rows by a selector that is installed where the server runs: an entry point of ``transferqueue.selectors``.

    A request that declares a task with it raises `NotFound` if the server does not have the plugin, and `UsageError` if
    the plugin cannot be imported, or refuses the options.

    Args:
        name: of the entry point.
        options: passed to the plugin when it is made; default: none.

    Example:
        >>> import transferqueue as tq
        >>> tq.Plugin("curriculum", {"from": 3})
        Plugin(name='curriculum', options={'from': 3})
    """

    name: str
    options: dict[str, str | int | float | bool] = {}


Selector = RowOrder | TokenBalanced | Plugin

# ---------------------------------------------------------------- groups


class Refill(_Policy):
    """Refill an incomplete group: its rows become ready again, and its missing members are asked for.

    Leases of its unfinished members end. Members that were never put are offered to the next `reserve`, as `refills` of
    pairs ``(group_id, missing)``.

    Example:
        >>> import transferqueue as tq
        >>> tq.Complete(deadline_s=60, incomplete=tq.Refill()).incomplete
        Refill()
    """


class DeliverPartial(_Policy, tag="Release"):
    """Lease the ready members of an incomplete group if they are at least `min_size`; otherwise drop the group.

    The task passes over members that come after it leased the group. They are done when the other tasks are done with
    them, and dropped, with reason ``group_incomplete``, if no other task takes them. Its former name is `Release`.

    Example:
        >>> import transferqueue as tq
        >>> tq.Complete(deadline_s=60, incomplete=tq.DeliverPartial()).incomplete
        DeliverPartial()
    """


class DropGroup(_Policy):
    """Drop all members of an incomplete group, with reason ``group_incomplete``.

    Example:
        >>> import transferqueue as tq
        >>> tq.Complete(deadline_s=60, incomplete=tq.DropGroup()).incomplete
        DropGroup()
    """


class Complete(_Policy, kw_only=True):
    """Lease whole groups only.

    A group is whole when all its `group_size` members are ready for the task. A group is incomplete when it is not
    whole `deadline_s` seconds after its first member became ready, or as soon as a member was dropped. Then
    `incomplete` is applied.

    Args:
        min_size: the fewest rows that `DeliverPartial` leases, at least 1; default None: the group's size.
        deadline_s: seconds from the first ready member until the group counts as incomplete; default None: no deadline.
        incomplete: the rule for incomplete groups: `Refill`, `DeliverPartial` or `DropGroup`; default ``DropGroup()``.

    Raises:
        UsageError: `min_size` below 1, or `deadline_s` not above 0.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     tasks = [tq.Task("train", needs=["x"], groups=tq.Complete())]
        ...     table = queue.create_table("t", tasks=tasks)
        ...     rows = table.put(x=[1, 2, 3], group_id=[0, 1, 1], group_size=2)  # group 0 lacks a row
        ...     with table.lease("train", groups=1) as batch:
        ...         print(batch["x"].list())
        [2, 3]
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
    """Drop a row over the staleness bound, with reason ``stale``.

    Example:
        >>> import transferqueue as tq
        >>> tq.Pacing("train", batch_rows=8, max_staleness=1, on_stale=tq.DropStale()).on_stale
        DropStale()
    """


class KeepStale(_Policy):
    """Keep a row over the staleness bound readable until it is deleted, and never lease it to the pacing task again.

    Example:
        >>> import transferqueue as tq
        >>> tq.Pacing("train", batch_rows=8, max_staleness=1, on_stale=tq.KeepStale()).on_stale
        KeepStale()
    """


class Requeue(_Policy):
    """Send a row over the staleness bound back to an earlier task, which produces it anew.

    The fields that this task and later tasks gave are cleared. A sealed table ends for these tasks only when the pacing
    task has no row left that could still come back.

    Args:
        task: name of a task of the table that gives a column of the pacing task.

    Example:
        >>> import transferqueue as tq
        >>> tq.Pacing("train", batch_rows=8, max_staleness=1, on_stale=tq.Requeue("rollout")).on_stale
        Requeue(task='rollout')
    """

    task: str


class HoldClock(_Policy):
    """Hold the version clock while its advance would make a live row stale.

    `Table.advance` and `WeightChannel.publish` wait meanwhile, up to their `timeout_s`.

    Example:
        >>> import transferqueue as tq
        >>> tq.Pacing("train", batch_rows=8, max_staleness=1, on_stale=tq.HoldClock()).on_stale
        HoldClock()
    """


OnStale = DropStale | KeepStale | Requeue | HoldClock


class Acked(_Policy):
    """Free a row when every task of the table is done with it.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], retention=tq.Acked())
        ...     rows = table.put(x=[1])
        ...     table.lease("train", rows=1).ack()
        ...     len(table.read())
        1
        0
    """


class Manual(_Policy):
    """Keep a row, readable, until `delete`.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], retention=tq.Manual())
        ...     rows = table.put(x=[1])
        ...     table.lease("train", rows=1).ack()
        ...     len(table.read())
        1
        1
    """


class AckedColumns(Acked):
    """Free rows as `Acked`, and each column earlier: when every task that needs it is done with the row.

    A column that no task needs stays as long as its row. A task leases only fields that it needs or gives, or that no
    task needs, since others may be freed by then (`ColumnFreed`). A put lays columns that end with different tasks into
    memory of their own. Scalars of up to 8 bytes are in the ledger and stay. A value that is lost with a shard is
    produced again only if the fields that its task needs are not freed.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     tasks = [tq.Task("score", needs=["image"], gives=["reward"]), tq.Task("train", needs=["reward"])]
        ...     table = queue.create_table("t", tasks=tasks, retention=tq.AckedColumns())
        ...     rows = table.put(image=[b"pixels"])
        ...     table.lease("score", rows=1).ack(reward=[1.0])
        ...     table.read(rows).fields
        1
        ('reward',)
    """


class ManualColumns(Manual):
    """Keep rows as `Manual`, and let `free_columns` return the memory of single columns.

    Each column of 256 KiB or more of a put lies in memory of its own, which `free_columns` returns at once. In other
    tables memory returns when every column of a put is freed.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", retention=tq.ManualColumns())
        ...     rows = table.put(x=[1], draft=["a"])
        ...     freed = table.free_columns(rows, ["draft"])
        ...     table.read(rows).fields
        ('x',)
    """


class Recorded(_Policy):
    """Write each row into a file when it has its fate (done, or dropped for any reason), then free it.

    The server writes whole Parquet files into `directory`, beside its other work: the columns as they are, and the
    lineage of each row. `open_run` and ``transferqueue query`` read them while the table is in use, and afterwards. A
    row that has ended stays in memory, and counts towards the limits of the table, until its file is on the disk. So a
    slow disk slows producers down. The columns of a row stay until the row ends.

    Rows that were dropped for failing too often are in the files at once, and cannot be taken again by `retry`.

    Args:
        directory: under the server's directory of records (``transferqueue serve --records``); with an embedded
            server, any directory, or one under the working directory as of `connect`.
        bytes: the most bytes of all files of the table, as a number or text such as ``"200GiB"``; the oldest files
            are removed first. Default None: no bound.
        age_s: files are removed when they are older than so many seconds; default None: never.
        required: what becomes of rows that have ended when the disk was full or could not be written to for half a
            minute. Default True: they wait, and puts and reservations of the table are refused (`Full`) until the
            disk works again. False: they are freed without a file, which `stats` counts as
            `rows_unrecorded`, and the server logs.

    Raises:
        UsageError: a value that is out of its range.

    Example:
        >>> import transferqueue as tq
        >>> tq.Recorded("math-7", bytes="200GiB").bytes_max
        214748364800
    """

    directory: str
    bytes: int | str | None = None
    age_s: float | None = None
    required: bool = True

    def __post_init__(self) -> None:
        named = isinstance(self.directory, str) and 0 < len(self.directory) <= TEXT_CHARS_MAX
        if not named or "\0" in self.directory:
            raise UsageError(
                f"recorded: directory={shown(self.directory)} is not the name of a directory under the server's "
                "directory of records"
            )
        if self.bytes is not None:
            parse_bytes(self.bytes)
        if self.age_s is not None:
            _numbers("recorded", age_s=self.age_s)
            if not 0 < self.age_s <= SECONDS_MAX:
                raise UsageError(
                    f"recorded: age_s={shown(self.age_s)} is not a positive number of seconds; None means for ever"
                )

    @property
    def bytes_max(self) -> int | None:
        """`bytes` as a number."""
        return None if self.bytes is None else parse_bytes(self.bytes)


Retention = Acked | Manual | AckedColumns | ManualColumns | Recorded

# ---------------------------------------------------------------- predicates: which rows may be chosen


class TagIs(_Policy):
    """Choose rows whose tag has this value.

    The tags 1 and True are different. A row without the tag is not chosen.

    Args:
        name: of the tag.
        value: text, a number or a bool.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t")
        ...     rows = table.put(x=[1, 2, 3], policy_version=[0, 1, 2], tags=[{"hard": True}, {"hard": False}, {}])
        ...     table.read(where=tq.TagIs("hard", True))["x"].list()
        [1]
    """

    name: str
    value: str | int | float | bool


class VersionBetween(_Policy):
    """Choose rows with ``low <= policy_version <= high``.

    Args:
        low: the smallest version; default None: no bound.
        high: the largest version; default None: no bound.

    Raises:
        Impossible: `low` is above `high`.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t")
        ...     rows = table.put(x=[1, 2, 3], policy_version=[0, 1, 2], tags=[{"hard": True}, {"hard": False}, {}])
        ...     table.read(where=tq.VersionBetween(low=1))["x"].list()
        [2, 3]
    """

    low: int | None = None
    high: int | None = None

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise Impossible(
                f"VersionBetween(low={shown(low)}, high={shown(high)}): no version is both; give low <= high"
            )


class Compare(_Policy):
    """Choose rows whose scalar field, or fact, compares with a value.

    A row that does not have the field is not chosen.

    Args:
        field: a field with one number of at most 8 bytes a row, or the fact ``tokens``, ``priority`` or ``ordinal``.
        op: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        value: the number, or bool, on the right of `op`.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t")
        ...     rows = table.put(x=[1, 2, 3], policy_version=[0, 1, 2], tags=[{"hard": True}, {"hard": False}, {}])
        ...     table.read(where=tq.Compare("x", "<", 3))["x"].list()
        [1, 2]
    """

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
        first_s: seconds after the first failure; default 1.0; 0: no wait.
        factor: the factor from one wait to the next, at least 1; default 2.0.
        max_s: the longest wait in seconds, at least `first_s`; default 60.0.
        attempts: a row is dropped with reason ``attempts`` after so many failures; default None: never.

    Raises:
        UsageError: a value that is out of its range.

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
        """Return the seconds that a row waits after its latest failure.

        Args:
            failures: the failures of the row so far, at least 1.
        """
        try:
            return min(self.first_s * self.factor ** (failures - 1), self.max_s)
        except OverflowError:
            return self.max_s


class Task(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A named consumer of a table. Every row goes to every task; inside a task each row is done once.

    An ack must carry the fields of `gives` that another task needs, unless the row has them already; an ack without
    them is refused. Drop a row that has no result. Leave a field out of `gives` if another process writes it by
    `Table.update` after the ack: tasks that need it wait for it in any case. `Requeue` and the loss of bytes return a
    row to the task that gives the missing field.

    Args:
        name: of the task, unique in its table.
        needs: fields that a row must have before the task gets it; default: none.
        gives: fields that the task writes; default: none.
        selector: which ready rows are leased next; default ``Fifo()``.
        groups: ``Complete(...)``: lease whole groups only; default None: single rows.
        lease_s: seconds until a silent worker (dead, stopped or cut off) loses its rows; default 60. One that the
            server sees end loses them at once, and one of another host after 10 s of silence at the latest. The client
            of a live worker renews the lease in time.
        retry: when rows whose lease failed are leased again, and after how many failures they are dropped; default
            ``Retry()``: never dropped.
        from_: default ``"start"``: the task gets every live row; ``"now"``: only rows that are put after it was
            declared.
        time_limit_s: seconds that a worker may hold a batch, at least `lease_s`; default None: 1800, or `lease_s` if
            that is more. A worker that holds it longer counts as hanging, and loses the rows though its process lives.

    Raises:
        UsageError: a value of the wrong type or out of its range.
        Impossible: a field is in both `needs` and `gives`.

    Example:
        >>> Task("reward", needs=["answer"], gives=["reward"]).held_s_max
        1800.0
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
                "for which rows are lent at least; give a longer limit or a shorter lease"
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
    """How far production may run ahead of the pacing task, usually the trainer.

    A row that was put without a `policy_version` has no age, and is never over the bound.

    Args:
        task: name of the pacing task.
        batch_rows: rows of one trainer step, at least 1.
        depth: batches that may be outstanding beyond the current one; default 1. 0.25 allows a quarter of a batch more
            (over-sampling); 0: one batch at a time.
        max_staleness: versions that a row may be behind when `task` leases it; default None: no bound; 0: synchronous.
        on_stale: the rule for a row over the bound: `DropStale`, `KeepStale`, `Requeue` or `HoldClock`; default
            ``DropStale()``.
        channel: the weight channel whose versions are the table's clock; default None: `Table.advance` moves the clock.

    Raises:
        UsageError: a value of the wrong type or out of its range.
        Impossible: `max_staleness` below 0.

    Example:
        >>> Pacing("train", batch_rows=8, depth=1).rows_ahead_max
        16
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
