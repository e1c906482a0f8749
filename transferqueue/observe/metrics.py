"""One moment of a deployment as Prometheus text. Pure: nothing is kept between two moments, so a scrape shows what the server
says and a restart of it shows as a reset of its counters. Needs the extra `metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from transferqueue.observe.stats import Stats

_SERVER: Final = ("capacity_bytes", "used_bytes", "backed_bytes", "uptime_s")
_SERVER_TOTALS: Final = ("calls", "garbage", "repeated", "leases_ended", "sessions_dropped", "internal_errors")
_TABLE: Final = ("rows_live", "rows_resident", "rows_limit", "bytes", "version", "reserved", "outstanding")
_TABLE_TOTALS: Final = ("rows_put", "rows_done", "refills")
_TASK: Final = ("pending", "ready", "held", "leased")


class _Moment:
    """Collects one `Stats` for a registry."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from _server(self._stats)
        yield from _tables(self._stats)
        yield from _tasks(self._stats)


def exposition(stats: Stats) -> bytes:
    """`stats` in the Prometheus text format. Bytes and seconds as the names say; counters end in ``_total``."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Moment(stats))
    return generate_latest(registry)


def _server(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("transferqueue_sessions", "Connected sessions.", stats.sessions)
    yield GaugeMetricFamily("transferqueue_waiting", "Requests that wait at the server.", len(stats.waiting))
    for name in _SERVER:
        yield GaugeMetricFamily(f"transferqueue_server_{name}", f"Server: {name}.", getattr(stats.server, name))
    for name in _SERVER_TOTALS:
        yield CounterMetricFamily(f"transferqueue_server_{name}", f"Server: {name}.", getattr(stats.server, name))


def _tables(stats: Stats) -> Iterator[Metric]:
    for name in _TABLE:
        gauge = GaugeMetricFamily(f"transferqueue_table_{name}", f"Table: {name}.", labels=["table"])
        for table, state in stats.tables.items():
            gauge.add_metric([table], getattr(state, name))
        yield gauge
    for name in _TABLE_TOTALS:
        counter = CounterMetricFamily(f"transferqueue_table_{name}", f"Table: {name}.", labels=["table"])
        for table, state in stats.tables.items():
            counter.add_metric([table], getattr(state, name))
        yield counter
    yield _dropped(stats)


def _dropped(stats: Stats) -> Metric:
    counter = CounterMetricFamily("transferqueue_table_rows_dropped", "Rows dropped.", labels=["table", "reason"])
    for table, state in stats.tables.items():
        for reason, rows in state.dropped.items():
            counter.add_metric([table, reason], rows)
    return counter


def _tasks(stats: Stats) -> Iterator[Metric]:
    gauge = GaugeMetricFamily("transferqueue_task_rows", "Rows of a task by state.", labels=["table", "task", "state"])
    for table, state in stats.tables.items():
        for task, rows in state.tasks.items():
            for name in _TASK:
                gauge.add_metric([table, task, name], getattr(rows, name))
    yield gauge
