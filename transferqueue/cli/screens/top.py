"""The screen of `top`, from a frame: a pure function of the frame and the width."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from transferqueue.cli.screens.layout import GridColumn, age, bar, fit, flow, grid_line, heading, spread, wrap
from transferqueue.cli.screens.verdict import verdict_lines
from transferqueue.observe import units
from transferqueue.observe.frame import StatsFrame, TableRates
from transferqueue.wire.answers.stats import ServerStats, TableStats, Waiting

_BAR: Final = 24
_BAR_STALENESS: Final = 8
_LAGS_SHOWN: Final = 6
_PACES: Final = " ◂"


def top_lines(frame: StatsFrame, width: int) -> list[Text]:
    """Lines of the whole screen, none longer than `width` except by a long name."""
    verdict = [*verdict_lines(frame.verdict, width), Text()] if frame.verdict else []
    lines = [*verdict, *_head(frame, width), Text()]
    if not frame.stats.tables:
        return [*lines, Text("no tables yet", style="dim")]
    lines += _tables(frame, width)
    if frame.stats.channels:
        lines += [Text(), *_channels(frame, width)]
    return [*lines, Text(), *_waits(frame.stats.waiting, width)]


# ---------------------------------------------------------------- head


def _head(frame: StatsFrame, width: int) -> list[Text]:
    server = frame.stats.server
    left = Text(frame.address, style="bold cyan")
    right = Text(f"up {units.span(server.uptime_s)} · {units.plural(frame.stats.sessions, 'session')}", style="dim")
    arena = _arena("arena ", server.used_bytes, server.capacity_bytes)
    return [*spread(left, right, width), arena, *_spill(server), *_shards(server), *_turns(server)]


def _turns(server: ServerStats) -> list[Text]:
    """Turns of the server that took too long, and made other requests wait; empty without any."""
    requests = server.turns.get("request")
    if requests is None or not requests.late:
        return []
    of = ", ".join(f"{subject} {units.count(count)}" for subject, count in sorted(requests.late.items()))
    worst = f"the longest {units.span(requests.busiest_s)} for {requests.busiest_of}"
    return [Text(f"{units.plural(sum(requests.late.values()), 'late turn')} ({of}), {worst}", style="yellow")]


def _arena(name: str, used: int, capacity: int) -> Text:
    share = used / capacity if capacity else 0.0
    text = Text(name).append_text(bar(share, _BAR, style=_level(share)))
    return text.append(f" {units.size(used)} of {units.size(capacity)}")


def _shards(server: ServerStats) -> list[Text]:
    """All remote shards, in one line."""
    if not server.shards:
        return []
    used, capacity = (
        sum(shard.used_bytes for shard in server.shards),
        sum(shard.capacity_bytes for shard in server.shards),
    )
    drain = ", ".join(str(shard.shard) for shard in server.shards if shard.drains)
    text = _arena("shards ", used, capacity).append(f" in {units.plural(len(server.shards), 'remote shard')}")
    return [text.append(f" · {drain} drains", style="yellow") if drain else text]


def _spill(server: ServerStats) -> list[Text]:
    """The spilled blocks, if the server spills."""
    if (spill := server.spill) is None:
        return []
    text = _arena("spill ", spill.bytes, spill.bytes_max)
    text.append(f" on disk · {units.size(spill.spilled_bytes)} went there, {units.size(spill.loaded_bytes)} came back")
    return [text.append(f" · paused: {spill.paused}", style="red") if spill.paused else text]


def _level(share: float) -> str:
    return "red" if share > 0.9 else "yellow" if share > 0.7 else "green"


# ---------------------------------------------------------------- tables


def _tables(frame: StatsFrame, width: int) -> list[Text]:
    columns = fit(_columns(frame), width)
    lines, row = [heading(columns)], 0
    for name, table in frame.stats.tables.items():
        lines += [Text()] if row else []
        lines += flow(_terms(name, table, frame.rates.get(name)), width, indent=2)
        for _ in table.tasks:
            lines.append(grid_line(columns, row))
            row += 1
        lines += _fates(table, width)
    return lines


def _terms(name: str, table: TableStats, rates: TableRates | None) -> list[Text]:
    pieces = [Text(name, style="bold"), _of("rows", table.rows_live, table.rows_limit)]
    pieces.append(Text(units.size(table.bytes) + (f" of {units.size(table.bytes_limit)}" if table.bytes_limit else "")))
    if rates:
        pieces.append(Text(f"{units.rate(rates.put_s)} in/s"))
    if table.age_s is not None:
        pieces.append(Text(f"oldest {units.span(table.age_s)}"))
    if table.version >= 0:
        pieces.append(Text(f"version {table.version}"))
    if table.outstanding_limit is not None:
        pieces.append(_of("ahead", table.outstanding, table.outstanding_limit))
    if table.rows_one_copy:
        pieces.append(Text(f"{units.rows(table.rows_one_copy)} with one copy", style="bold yellow"))
    if table.sealed:
        pieces.append(Text("sealed", style="magenta"))
    return pieces


def _of(noun: str, amount: int, limit: int) -> Text:
    full = Text(f"{units.count(amount)} of {units.count(limit)} {noun}")
    if limit and amount >= limit:
        full.stylize("bold yellow")
    return full


def _columns(frame: StatsFrame) -> list[GridColumn]:
    tasks = [
        (table, name, task, rate.tasks.get(name) if (rate := frame.rates.get(table_name)) else None)
        for table_name, table in frame.stats.tables.items()
        for name, task in table.tasks.items()
    ]
    given_rates = [_rate(rates.given_s if rates else None) for *_, rates in tasks]
    done = [_rate(rates.done_s if rates else None) for *_, rates in tasks]
    return [
        GridColumn(heading="  task", cells=[_task(table, name) for table, name, *_ in tasks], left=True),
        GridColumn(heading="pending", cells=[_number(task.pending) for _, _, task, _ in tasks]),
        GridColumn(heading="held", cells=[_number(task.held) for _, _, task, _ in tasks], rank=3),
        GridColumn(heading="ready", cells=[_number(task.ready, "green") for _, _, task, _ in tasks]),
        GridColumn(heading="leased", cells=[_number(task.leased, "cyan") for _, _, task, _ in tasks]),
        GridColumn(heading="done", cells=[_number(task.done) for _, _, task, _ in tasks]),
        GridColumn(heading="dropped", cells=[_number(task.dropped, "yellow") for _, _, task, _ in tasks], rank=1),
        GridColumn(heading="failed", cells=[_number(task.failed, "red") for _, _, task, _ in tasks], rank=4),
        GridColumn(heading="given/s", cells=given_rates, rank=5),
        GridColumn(heading="done/s", cells=done),
        GridColumn(heading="oldest", cells=[age(task.age_s) for _, _, task, _ in tasks], rank=2),
    ]


def _task(table: TableStats, name: str) -> Text:
    return Text(f"  {name}").append(_PACES if name == table.pacing_task else "", style="dim")


def _number(number: int, style: str = "") -> Text:
    return Text(units.count(number), style=style if number else "bright_black")


def _rate(per_s: float | None) -> Text:
    return Text(units.rate(per_s), style="" if per_s else "bright_black")


def _fates(table: TableStats, width: int) -> list[Text]:
    """Staleness of the leased rows, and the reasons of dropped rows, if any."""
    lines: list[Text] = []
    if handed := sum(table.staleness.values()):
        lags = sorted(table.staleness.items(), key=lambda item: int(item[0]))
        pieces = [_lag(lag, rows / handed) for lag, rows in lags[:_LAGS_SHOWN]]
        lines += flow([Text("  staleness", style="dim"), *pieces], width, between="  ", indent=13)
    if table.dropped:
        pieces = [
            Text(f"{reason} {units.count(rows)}", style="yellow") for reason, rows in table.dropped.items() if rows
        ]
        lines += flow([Text("  dropped  ", style="dim"), *pieces], width, between="  ", indent=13)
    return lines


def _lag(lag: str, share: float) -> Text:
    return Text(f"{lag} ").append_text(bar(share, _BAR_STALENESS, style="blue")).append(f" {share:.0%}")


# ---------------------------------------------------------------- weights and waits


def _channels(frame: StatsFrame, width: int) -> list[Text]:
    lines: list[Text] = []
    for name, channel in frame.stats.channels.items():
        applied = [f"{version} by {count}" for version, count in _tally(channel.applied)]
        pieces = [
            Text("weights ", style="dim").append(name, style="bold not dim"),
            Text(f"version {channel.newest}"),
            Text(units.size(channel.bytes)),
            Text("applied " + (", ".join(applied) or "by no client")),
        ]
        lines += flow(pieces, width, indent=2)
    return lines


def _tally(applied: dict[str, int]) -> list[tuple[int, int]]:
    versions = list(applied.values())
    return [(version, versions.count(version)) for version in sorted(set(versions), reverse=True)]


def _waits(waiting: list[Waiting], width: int) -> list[Text]:
    if not waiting:
        return [Text("no waits", style="dim")]
    lines = [Text("waiting", style="dim")]
    for wait in waiting:
        lines += _wait(wait, width)
    return lines


def _wait(wait: Waiting, width: int) -> list[Text]:
    target = wait.table + (f"/{wait.task}" if wait.task else "")
    pieces = [
        Text("  ").append(wait.label or f"session {wait.session}", style="bold"),
        Text(f"{wait.request.lower()} {target}".rstrip()),
        Text(f"{units.span(wait.waited_s)}, {units.span(wait.left_s)} left", style="dim"),
    ]
    return [*flow(pieces, width, indent=4), *wrap(Text(wait.why), width, indent=4)]
