"""Write the statistics of a deployment as Prometheus text, for all endpoints. Does no I/O.

- A scrape has no memory of the one before. It shows the server's statistics, and a restart of the server resets its
  counters.
- Names, types and help texts are those of the figures (`transferqueue.wire.answers.answer`), with ``transferqueue_``
  and the place before the name, by Prometheus' conventions: base units (bytes, seconds) at the end, ``_total`` after
  counters, one label for each word of the place (table, task, channel).
- An unknown value has no sample: the age of nothing is not 0.
- The format is version 0.0.4, "Text-based format" of prometheus.io/docs/instrumenting/exposition_formats. It has a line
  a
  sample, so this module writes it itself; a test reads it with Prometheus' own library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from transferqueue.errors.text import visible
from transferqueue.wire.answers.answer import Answer, Figure, figures
from transferqueue.wire.answers.stats import ChannelStats, ServerStats, Stats, TableStats, TaskStats, TurnStats

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
    """`stats` in the Prometheus text format, UTF-8. more: families of an adapter, under its own prefix."""
    families = (*_server(stats), *_tables(stats), *_tasks(stats), *_channels(stats), *more)
    return "".join(line for family in families for line in _lines(family)).encode()


# ---------------------------------------------------------------- families


def _same(*figures: str) -> dict[str, str]:
    """Figures whose metrics keep their names, with base units."""
    return {name: f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name for name in figures}


_SERVER: Final = _same(
    "capacity_bytes", "used_bytes", "backed_bytes", "extents", "calls", "garbage", "repeated", "leases_ended",
    "sessions_dropped", "internal_errors",
)  # fmt: skip
_SPILL: Final = _same(
    "bytes", "bytes_max", "blocks", "spilled_bytes", "loaded_bytes", "spilled_blocks", "loaded_blocks", "lost_blocks",
    "load_waits_s",
)  # fmt: skip
_TABLE: Final = {
    **_same(
        "rows_put", "rows_done", "rows_live", "rows_resident", "rows_limit", "bytes", "bytes_limit", "columns_freed",
        "column_bytes_freed", "groups", "version", "sealed", "max_staleness", "reserved", "refills", "outstanding",
        "outstanding_limit", "rows_one_copy",
    ),
    "age_s": "oldest_row_age_seconds",
}  # fmt: skip
_STATES: Final = ("pending", "held", "retrying", "ready", "leased", "kept")
_TASK: Final = {
    **{name: f"rows_{name}" for name in ("given", "done", "failed", "worker_deaths", "dropped")},
    **_same("leases", "unattended_s", "stranded"),
    "oldest_lease_s": "oldest_lease_age_seconds",
    "age_s": "queue_age_seconds",
}
_CHANNEL: Final = {"newest": "version", **_same("bytes"), "age_s": "age_seconds"}
"""Figures that have a metric, and its name after the place. Its type and its help are those of the figure."""


def _families(place: str, answers: Sequence[tuple[Labels, Answer]], metrics: Mapping[str, str]) -> Iterator[Family]:
    """A metric for each of these figures of answers of one kind."""
    for name, metric in metrics.items() if answers else ():
        figure = figures(type(answers[0][1]))[name]
        samples = [(labels, getattr(answer, name)) for labels, answer in answers]
        yield Family(f"{place}_{metric}", "counter" if figure.grows else "gauge", figure.meaning, samples)


def _by_key(metric: str, answers: Sequence[tuple[Labels, TableStats]], name: str, label: str) -> Family:
    """A counter with a sample for each key of a figure that is a dict."""
    samples = [
        ((*labels, (label, key)), rows) for labels, answer in answers for key, rows in getattr(answer, name).items()
    ]
    return Family(metric, "counter", figures(TableStats)[name].meaning, samples)


def _server(stats: Stats) -> Iterator[Family]:
    about, server = figures(Stats), stats.server
    yield _one("epoch", about["epoch"], stats.epoch)
    yield _one("uptime_seconds", figures(ServerStats)["uptime_s"], server.uptime_s)
    yield _one("sessions", about["sessions"], stats.sessions)
    waiting = Counter(waiter.request for waiter in stats.waiting)
    yield Family(
        "waiting",
        "gauge",
        about["waiting"].meaning,
        [((("request", request),), count) for request, count in sorted(waiting.items())],
    )
    yield from _families("server", [((), server)], _SERVER)
    if server.spill is not None:
        yield from _families("spill", [((), server.spill)], _SPILL)
        paused = [((), bool(server.spill.paused))]
        yield Family("spill_paused", "gauge", "Whether blocks cannot go to the disk now.", paused)
    yield from _turns(server.turns)


def _turns(turns: Mapping[str, TurnStats]) -> Iterator[Family]:
    about = figures(TurnStats)
    yield Family(
        "server_turn_seconds",
        "histogram",
        figures(ServerStats)["turns"].meaning,
        [sample for kind, turn in turns.items() for sample in _histogram((("kind", kind),), turn)],
    )
    yield Family(
        "server_turn_longest_seconds",
        "gauge",
        about["longest_s"].meaning,
        [((("kind", kind), ("of", turn.longest_of)), turn.longest_s) for kind, turn in turns.items()],
    )
    yield Family(
        "server_turns_late",
        "counter",
        about["late"].meaning,
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
    yield from _families("table", tables, _TABLE)
    yield _by_key("table_rows_dropped", tables, "dropped", "reason")
    for name in ("staleness", "staleness_in_flight", "staleness_in_queue"):
        yield _by_key(f"table_{name}_rows", tables, name, "versions")


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
        [((*labels, ("state", state)), getattr(task, state)) for labels, task in tasks for state in _STATES],
    )
    yield from _families("task", tasks, _TASK)


def _channels(stats: Stats) -> Iterator[Family]:
    channels: list[tuple[Labels, ChannelStats]] = [
        ((("channel", name),), channel) for name, channel in stats.channels.items()
    ]
    yield from _families("channel", channels, _CHANNEL)
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


def _one(metric: str, figure: Figure, value: float) -> Family:
    return Family(metric, "gauge", figure.meaning, [((), value)])


# ---------------------------------------------------------------- text


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
