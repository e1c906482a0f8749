"""Write the statistics of a deployment as Prometheus text, for all endpoints. Pure: from `Stats` to bytes.

Rules:

- Nothing is kept between two scrapes. A scrape shows the server's statistics, and a restart of the server resets its
  counters.
- Names follow `transferqueue docs observing`, with ``transferqueue_`` and the place before them, and Prometheus' rules:
  base units (bytes, seconds) at the end, ``_total`` after counters, one label for each word of the place (table, task,
  channel).
- An unknown value has no sample: the age of nothing is not 0.
- The format is version 0.0.4, "Text-based format" of prometheus.io/docs/instrumenting/exposition_formats. It is a line
  a sample, so it is written here, and read back in a test by Prometheus' own library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from transferqueue.observe.answers.stats import ChannelStats, Stats, TableStats, TaskStats, TurnStats
from transferqueue.text import visible

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]
Kind = Literal["gauge", "counter", "histogram"]
Sample = tuple[Labels, float | None]
"""Labels and value. Of a histogram the labels begin with the end of its name: ``("", "_bucket")``."""


class Family(NamedTuple):
    """A metric: its name without the prefix, its type, its help, and a sample for each set of labels."""

    name: str
    kind: Kind
    help: str
    samples: Iterable[Sample]
    prefix: str = "transferqueue"


def exposition(stats: Stats, more: Iterable[Family] = ()) -> bytes:
    """`stats` in the Prometheus text format, UTF-8. more: families that an adapter adds, under a prefix of its own."""
    families = (*_server(stats), *_tables(stats), *_tasks(stats), *_channels(stats), *more)
    return "".join(line for family in families for line in _lines(family)).encode()


# ---------------------------------------------------------------- what is told

_SERVER: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("capacity_bytes", "gauge", "Ceiling of the arena."),
    ("used_bytes", "gauge", "Bytes of the arena that blocks and write grants occupy."),
    ("backed_bytes", "gauge", "Bytes of the arena that have pages."),
    ("extents", "gauge", "Extents of the arena."),
    ("calls", "counter", "Requests that were carried out."),
    ("garbage", "counter", "Frames that were no message."),
    ("repeated", "counter", "Requests that came again."),
    ("leases_ended", "counter", "Leases that expired, or were of a dead session."),
    ("sessions_dropped", "counter", "Sessions that did not read their answers."),
    ("internal_errors", "counter", "Defects of the server itself."),
)
_SPILL: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("bytes", "gauge", "Bytes of rows that are on the disk."),
    ("bytes_max", "gauge", "Bytes of rows that may be there."),
    ("blocks", "gauge", "Blocks that are on the disk."),
    ("spilled_bytes", "counter", "Bytes that went to the disk."),
    ("loaded_bytes", "counter", "Bytes that came back."),
    ("spilled_blocks", "counter", "Blocks that went to the disk."),
    ("loaded_blocks", "counter", "Blocks that came back."),
    ("lost_blocks", "counter", "Blocks that the disk did not give back as they were."),
    ("load_waits_s", "counter", "Seconds that requests waited for blocks on the disk."),
)
_TABLE: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("rows_put", "counter", "Rows put."),
    ("rows_done", "counter", "Rows with which every task was done."),
    ("rows_live", "gauge", "Rows that are neither done nor dropped."),
    ("rows_resident", "gauge", "Rows that are live, or kept until deleted."),
    ("rows_limit", "gauge", "Live rows that the table may hold."),
    ("bytes", "gauge", "Bytes of live blocks."),
    ("bytes_limit", "gauge", "Bytes of live blocks that the table may hold."),
    ("columns_freed", "counter", "Values that were freed though their rows lived on."),
    ("column_bytes_freed", "counter", "Bytes of the blocks that ended thereby."),
    ("groups", "gauge", "Groups with a resident row."),
    ("version", "gauge", "The clock: the trainer's version."),
    ("sealed", "gauge", "Whether no more rows may enter."),
    ("max_staleness", "gauge", "Versions that a row may be behind when it is handed over."),
    ("reserved", "gauge", "Rows of reservations that were not put yet."),
    ("refills", "gauge", "Members of incomplete groups that are asked for again."),
    ("outstanding", "gauge", "Rows reserved, or live and not yet done by the pacing task."),
    ("outstanding_limit", "gauge", "Rows that may be outstanding."),
    ("rows_one_copy", "gauge", "Rows of which one copy is left, though the table keeps more."),
)
_TASK: Final = ("pending", "held", "retrying", "ready", "leased", "kept")
_TASK_TOTALS: Final = (
    ("given", "Rows handed over; one given twice counts twice."),
    ("done", "Rows the task was done with."),
    ("failed", "Rows that came back from a lease that failed."),
    ("worker_deaths", "Rows that came back since their worker died or was too late."),
    ("dropped", "Rows that were dropped before the task was done with them."),
)


def _spill(stats: Stats) -> Iterator[Family]:
    """What is on the disk, if there is one."""
    if (spill := stats.server.spill) is None:
        return
    for name, kind, text in _SPILL:
        metric = f"spill_{name.removesuffix('_s')}{'_seconds' if name.endswith('_s') else ''}"
        yield _one(metric, kind, text, getattr(spill, name))
    yield _one("spill_paused", "gauge", "Whether blocks cannot go to the disk now.", bool(spill.paused))


def _server(stats: Stats) -> Iterator[Family]:
    yield _one("epoch", "gauge", "This life of the coordinator.", stats.epoch)
    yield _one("uptime_seconds", "gauge", "Age of the server's process.", stats.server.uptime_s)
    yield _one("sessions", "gauge", "Sessions that are open.", stats.sessions)
    waiting = Counter(waiter.request for waiter in stats.waiting)
    yield Family(
        "waiting",
        "gauge",
        "Requests that wait at the server.",
        [((("request", request),), count) for request, count in sorted(waiting.items())],
    )
    for name, kind, text in _SERVER:
        yield _one(f"server_{name}", kind, text, getattr(stats.server, name))
    yield from _spill(stats)
    turns = stats.server.turns
    yield Family(
        "server_turn_seconds",
        "histogram",
        "Turns of the server's loop, in which nobody else is served, by what they were.",
        [sample for kind, turn in turns.items() for sample in _histogram((("kind", kind),), turn)],
    )
    yield Family(
        "server_turn_longest_seconds",
        "gauge",
        "The longest turn since the server began.",
        [((("kind", kind), ("of", turn.longest_of)), turn.longest_s) for kind, turn in turns.items()],
    )
    yield Family(
        "server_turns_late",
        "counter",
        "Turns of more than 20 ms of processor time, by what they were for.",
        [((("kind", kind), ("of", of)), count) for kind, turn in turns.items() for of, count in turn.late.items()],
    )


def _histogram(labels: Labels, turns: TurnStats) -> Iterator[Sample]:
    counts = list(accumulate(turns.counts))
    for bound, count in zip([*map(repr, turns.bounds_s), "+Inf"], counts, strict=True):
        yield (("", "_bucket"), *labels, ("le", bound)), count
    yield (("", "_sum"), *labels), turns.sum_s
    yield (("", "_count"), *labels), counts[-1]


def _tables(stats: Stats) -> Iterator[Family]:
    tables: list[tuple[Labels, TableStats]] = [((("table", name),), table) for name, table in stats.tables.items()]
    for name, kind, text in _TABLE:
        yield Family(f"table_{name}", kind, text, [(labels, getattr(table, name)) for labels, table in tables])
    yield Family(
        "table_oldest_row_age_seconds",
        "gauge",
        "Age of the oldest resident row.",
        [(labels, table.age_s) for labels, table in tables],
    )
    yield Family(
        "table_rows_dropped",
        "counter",
        "Rows that ended as dropped.",
        [((*labels, ("reason", reason)), rows) for labels, table in tables for reason, rows in table.dropped.items()],
    )
    yield from _staleness(tables)


def _staleness(tables: list[tuple[Labels, TableStats]]) -> Iterator[Family]:
    for name, text in (
        ("staleness", "Rows handed to the pacing task, by versions behind the clock."),
        ("staleness_in_flight", "The same rows, by the versions between their first token and their put."),
        ("staleness_in_queue", "The same rows, by the versions between their put and the hand-over."),
    ):
        yield Family(
            f"table_{name}_rows",
            "counter",
            text,
            [
                ((*labels, ("versions", lag)), rows)
                for labels, table in tables
                for lag, rows in getattr(table, name).items()
            ],
        )


def _tasks(stats: Stats) -> Iterator[Family]:
    tasks: list[tuple[Labels, TaskStats]] = [
        ((("table", name), ("task", task)), state)
        for name, table in stats.tables.items()
        for task, state in table.tasks.items()
    ]
    yield Family(
        "task_rows",
        "gauge",
        "Rows of a task by where they stand.",
        [((*labels, ("state", state)), getattr(task, state)) for labels, task in tasks for state in _TASK],
    )
    for name, text in _TASK_TOTALS:
        yield Family(f"task_rows_{name}", "counter", text, [(labels, getattr(task, name)) for labels, task in tasks])
    for name, field, text in (
        ("task_leases", "leases", "Leases that are open."),
        ("task_oldest_lease_age_seconds", "oldest_lease_s", "Age of the oldest open lease."),
        ("task_queue_age_seconds", "age_s", "Since the row that is next in line was put."),
        (
            "task_unattended_seconds",
            "unattended_s",
            "Since rows are ready and nobody holds or asks for any; no sample: somebody does.",
        ),
        (
            "task_stranded",
            "stranded",
            "Whether the table is sealed and no row that the task still has can get what it lacks.",
        ),
    ):
        yield Family(name, "gauge", text, [(labels, getattr(task, field)) for labels, task in tasks])


def _channels(stats: Stats) -> Iterator[Family]:
    channels: list[tuple[Labels, ChannelStats]] = [
        ((("channel", name),), channel) for name, channel in stats.channels.items()
    ]
    yield Family(
        "channel_version", "gauge", "Newest version.", [(labels, channel.newest) for labels, channel in channels]
    )
    yield Family(
        "channel_bytes",
        "gauge",
        "Bytes of the versions kept.",
        [(labels, channel.bytes) for labels, channel in channels],
    )
    yield Family(
        "channel_age_seconds",
        "gauge",
        "Since the newest version was published.",
        [(labels, channel.age_s) for labels, channel in channels],
    )
    yield Family(
        "channel_applied_version_min",
        "gauge",
        "Oldest version that a session generates with.",
        [(labels, min(channel.applied.values(), default=None)) for labels, channel in channels],
    )
    yield Family(
        "channel_publish_lag_seconds_max",
        "gauge",
        "Longest time from a publication to a session that generates with it.",
        [(labels, _lag(channel)) for labels, channel in channels],
    )


def _lag(channel: ChannelStats) -> float | None:
    return max((lag for lag in channel.publish_lag_s.values() if lag is not None), default=None)


def _one(name: str, kind: Kind, text: str, value: float) -> Family:
    return Family(name, kind, text, [((), value)])


# ---------------------------------------------------------------- how it is written


def _lines(family: Family) -> Iterator[str]:
    name = f"{family.prefix}_{family.name}" + ("_total" if family.kind == "counter" else "")
    yield f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
    for labels, value in family.samples:
        if value is not None:
            suffix, labels = (labels[0][1], labels[1:]) if labels and not labels[0][0] else ("", labels)
            yield f"{name}{suffix}{_braces(labels)} {float(value)!r}\n"


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    return visible(value).replace("\\", r"\\").replace('"', r"\"")
