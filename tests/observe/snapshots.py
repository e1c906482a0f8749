"""Snapshots to build frames from, with everything quiet unless a test says otherwise."""

from typing import Any

from transferqueue.observe.answers.stats import ServerStats, Stats, TableStats, TaskStats


def task(**changed: Any) -> TaskStats:
    quiet = dict.fromkeys(
        ("pending", "ready", "held", "leased", "done", "dropped", "given", "failed", "kept", "leases"), 0
    )
    unknown = dict.fromkeys(("age_s", "oldest_lease_s", "groups_ready", "groups_forming"))
    return TaskStats(**{**quiet, **unknown, "holders": [], **changed})


def table(**changed: Any) -> TableStats:
    quiet = dict.fromkeys(("rows_put", "rows_live", "rows_done", "rows_dropped", "bytes", "reserved", "outstanding"), 0)
    quiet |= dict.fromkeys(("rows_resident", "groups", "refills"), 0)
    terms = {
        "rows_limit": 4096,
        "bytes_limit": None,
        "outstanding_limit": None,
        "pacing_task": None,
        "age_s": None,
        "max_staleness": None,
    }
    rest = {
        "dropped": {},
        "version": -1,
        "sealed": False,
        "staleness": {},
        "staleness_in_flight": {},
        "staleness_in_queue": {},
        "tasks": {},
        "fields": {},
    }
    return TableStats(**{**quiet, **terms, **rest, **changed})


def server(**changed: Any) -> ServerStats:
    place = {"address": "ipc:///run/tq/control.sock", "version": "0.1.0", "pid": 1, "uptime_s": 192.0}
    arena = {"capacity_bytes": 8 << 30, "used_bytes": 1 << 30, "backed_bytes": 1 << 30, "extents": 3}
    counters = ("calls", "garbage", "repeated", "leases_ended", "sessions_dropped", "internal_errors")
    return ServerStats(**{**place, **arena, **dict.fromkeys(counters, 0), **changed})


def stats(**changed: Any) -> Stats:
    quiet = {"now_s": 100.0, "epoch": 1, "sessions": 2, "tables": {}, "channels": {}, "waiting": []}
    return Stats(**{**quiet, "server": server(), **changed})
