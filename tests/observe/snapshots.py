"""Snapshots to build frames from, with everything quiet unless a test says otherwise."""

from typing import Any

from transferqueue.wire.answers.stats import ServerStats, Stats, TableStats, TaskStats


def task(**changed: Any) -> TaskStats:
    return TaskStats(**changed)


def table(**changed: Any) -> TableStats:
    counts = dict.fromkeys(("rows_put", "rows_live", "rows_done", "rows_dropped"), 0)
    return TableStats(**{**counts, "balanced": True, "rows_limit": 4096, **changed})


def server(**changed: Any) -> ServerStats:
    place = {"address": "ipc:///run/tq/control.sock", "version": "0.1.0", "pid": 1, "uptime_s": 192.0}
    arena = {"capacity_bytes": 8 << 30, "used_bytes": 1 << 30, "backed_bytes": 1 << 30, "extents": 3}
    return ServerStats(**{**place, **arena, **changed})


def stats(**changed: Any) -> Stats:
    return Stats(**{"now_s": 100.0, "epoch": 1, "sessions": 2, "tables": {}, "server": server(), **changed})
