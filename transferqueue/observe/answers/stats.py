"""The answer to `Observe("stats")`, typed: the dictionaries of `transferqueue docs observing` as values.

The wire carries plain dictionaries, so that an old tool can read a newer server: keys that are not known
here are passed over, and one that is missing is a `ProtocolError` that names it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from transferqueue.errors import ProtocolError

_T = TypeVar("_T")


class TaskError(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of a task that failed alike. worker: the label of the last session that reported it. first_s, last_s:
    ages."""

    type: str
    text: str
    worker: str
    count: int
    first_s: float
    last_s: float


class TaskStats(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one task by where they stand, and its counters.

    errors: the latest first. retrying, retry_s: rows that wait for their next try, and when the first of them is tried.
    paused_s: all leases of the task fail, and it is tried again after so long. worker_deaths: rows of leases ended by
    death or expiry of a worker.
    """

    pending: int
    ready: int
    held: int
    leased: int
    done: int
    dropped: int
    given: int
    failed: int
    kept: int
    leases: int
    age_s: float | None
    oldest_lease_s: float | None
    holders: list[str]
    groups_ready: int | None
    groups_forming: int | None
    stranded: bool = False
    unattended_s: float | None = None
    unattended: str = ""
    errors: list[TaskError] = []
    retrying: int = 0
    retry_s: float | None = None
    paused_s: float | None = None
    worker_deaths: int = 0


class TableStats(msgspec.Struct, frozen=True, kw_only=True):
    """One table: what it holds against what it may hold, its clock, its tasks."""

    rows_put: int
    rows_live: int
    rows_done: int
    rows_dropped: int
    dropped: dict[str, int]
    bytes: int
    rows_resident: int
    rows_limit: int
    bytes_limit: int | None
    fields: dict[str, str]
    groups: int
    version: int
    sealed: bool
    age_s: float | None
    staleness: dict[str, int]
    staleness_in_flight: dict[str, int]
    staleness_in_queue: dict[str, int]
    max_staleness: int | None
    reserved: int
    refills: int
    outstanding: int
    outstanding_limit: int | None
    pacing_task: str | None
    tasks: dict[str, TaskStats]
    columns_freed: int = 0
    column_bytes_freed: int = 0
    rows_one_copy: int = 0


class ChannelStats(msgspec.Struct, frozen=True, kw_only=True):
    """One weight channel. By session: applied: the version it generates with; applied_age_s: since when; publish_lag_s:
    how long after its publication (None: unknown); turns: who changes weights now, and for how long it may.
    """

    newest: int
    kept: list[int]
    bytes: int
    age_s: float | None
    applied: dict[str, int]
    applied_age_s: dict[str, float]
    publish_lag_s: dict[str, float | None]
    turns: dict[str, float]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """One request that waits at the server."""

    session: int
    label: str
    request: str
    table: str
    task: str
    waited_s: float
    left_s: float
    why: str


class SpillStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of rows that went to a disk: those there now, at most `bytes_max`; counts since the arena spills.
    load_waits_s: how long requests waited for their blocks, each while it was the first in line. paused: why nothing
    goes to the disk now; "": nothing hinders it."""

    bytes_max: int
    blocks: int
    bytes: int
    spilled_blocks: int
    spilled_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    lost_blocks: int
    load_waits_s: float
    paused: str


class ShardStats(msgspec.Struct, frozen=True, kw_only=True):
    """A remote shard: its number, what people call it, its arena, whether it is to leave, and what clients have read
    from it and written by carrier."""

    shard: int
    label: str
    capacity_bytes: int
    used_bytes: int
    backed_bytes: int
    drains: bool
    bulk_sent_bytes: dict[str, int] = {}
    bulk_received_bytes: dict[str, int] = {}


class TurnStats(msgspec.Struct, frozen=True, kw_only=True):
    """How long one kind of turns of the server's loop took. counts: of turns up to each of `bounds_s`, and one more for
    those above.

    longest_of: what the longest was for. busiest: the longest by processor time, of those above 20 ms by the clock (0:
    there is none). late: turns of more than 20 ms of processor time, by what they were for.
    """

    bounds_s: list[float]
    counts: list[int]
    sum_s: float
    longest_s: float
    longest_of: str
    busiest_s: float
    busiest_of: str
    late: dict[str, int]


class ServerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The process that answers, its arena, and what befell it. busy_poll_s: for how long it polls after a request
    before it sleeps."""

    address: str
    version: str
    pid: int
    uptime_s: float
    capacity_bytes: int
    used_bytes: int
    backed_bytes: int
    extents: int
    calls: int
    garbage: int
    repeated: int
    leases_ended: int
    sessions_dropped: int
    internal_errors: int
    turns: dict[str, TurnStats] = {}
    shards: list[ShardStats] = []
    busy_poll_s: float = 0.0
    spill: SpillStats | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a deployment."""

    now_s: float
    epoch: int
    sessions: int
    tables: dict[str, TableStats]
    channels: dict[str, ChannelStats]
    waiting: list[Waiting]
    server: ServerStats


def parse(what: str, value: object, into: type[_T]) -> _T:
    """`value`, which a server answered to Observe(`what`), as `into`. `ProtocolError` if it is not one."""
    try:
        return msgspec.convert(value, into)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"the server's answer to {what} cannot be read: {error}; install the same version of TransferQueue on both "
            "sides"
        ) from error


def plain(value: msgspec.Struct) -> Any:
    """`value` as dicts, lists and scalars, for JSON."""
    return msgspec.to_builtins(value)
