"""The screen of `inspect TABLE ROW`: the life of one row."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from transferqueue.cli.screens.layout import GridColumn, flow, grid
from transferqueue.observe import units
from transferqueue.wire.answers.row import RowField, RowLife, RowTask

_STYLES: Final = {
    "pending": "yellow",
    "held": "yellow",
    "ready": "green",
    "leased": "cyan",
    "done": "",
    "dropped": "red",
}
_UNSET: Final = -1


def row_lines(life: RowLife, width: int) -> list[Text]:
    """Lines of the whole screen; an ended row has neither fields nor tasks."""
    parts = [
        _head(life, width),
        _fields(life, width) if life.fields else [],
        _tasks(life, width) if life.tasks else [],
        _events(life, width),
    ]
    return [line for part in parts if part for line in (*part, Text())][:-1]


def _head(life: RowLife, width: int) -> list[Text]:
    fate = Text(life.state, style=_STYLES.get(life.state, "green"))
    pieces = [
        Text(f"row {life.row} of {life.table}", style="bold"),
        fate.append(f" ({life.reason})" if life.reason else ""),
    ]
    if life.age_s is not None:
        by = f" by {life.name_of(life.put_by)}" if life.put_by else ""
        pieces.append(Text(f"put {units.span(life.age_s)} ago{by}"))
    facts = _facts(life)
    return [*flow(pieces, width, indent=2), *(flow([Text("  "), *facts], width, indent=2) if facts else [])]


def _facts(life: RowLife) -> list[Text]:
    """The facts that have a value."""
    words = [f"key {life.key}"] if life.key else []
    if life.group_id != _UNSET:
        member = (
            f"member {life.ordinal} of {life.group_size}" if life.ordinal != _UNSET else f"one of {life.group_size}"
        )
        words.append(f"group {life.group_id}, {member}")
    if life.policy_version != _UNSET:
        newest = f" to {life.policy_version_max}" if life.policy_version_max > life.policy_version else ""
        words.append(f"policy version {life.policy_version}{newest}")
    words += [units.plural(life.tokens, "token")] if life.tokens > 0 else []
    words += [f"priority {life.priority:g}"] if life.priority else []
    words += [f"{name}={value}" for name, value in life.tags.items()]
    return [Text(word) for word in words]


def _fields(life: RowLife, width: int) -> list[Text]:
    names, fields = list(life.fields), list(life.fields.values())
    columns = [
        GridColumn(heading="field", cells=[Text(name) for name in names], left=True),
        GridColumn(heading="", cells=[_mark(field) for field in fields], left=True),
        GridColumn(heading="value", cells=[_value(field) for field in fields], left=True),
    ]
    return grid(columns, len(names), width)


def _mark(field: RowField) -> Text:
    return Text("✓", style="green") if field.set else Text("·", style="yellow")


def _value(field: RowField) -> Text:
    if not field.set:
        return Text("missing", style="yellow")
    if field.inline:
        return Text(str(field.value))
    size = f", {units.size(field.bytes)}" if field.bytes is not None else ""
    return Text(f"block {field.block}{size}, slot {field.slot}", style="dim")


def _tasks(life: RowLife, width: int) -> list[Text]:
    names, tasks = list(life.tasks), list(life.tasks.values())
    columns = [
        GridColumn(heading="task", cells=[Text(name) for name in names], left=True),
        GridColumn(
            heading="state", cells=[Text(task.state, style=_STYLES.get(task.state, "")) for task in tasks], left=True
        ),
        GridColumn(heading="attempts", cells=[_attempts(task) for task in tasks]),
        GridColumn(heading="", cells=[Text(_standing(life, task)) for task in tasks], left=True),
    ]
    return grid(columns, len(names), width)


def _attempts(task: RowTask) -> Text:
    return Text(str(task.attempts), style="red" if task.attempts else "bright_black")


def _standing(life: RowLife, task: RowTask) -> str:
    if task.lease is not None:
        left = f", {units.span(task.left_s)} left" if task.left_s is not None else ""
        return f"by {life.name_of(task.session)}{left}"
    if task.state == "pending" and task.lacks:
        return f"lacks {', '.join(task.lacks)}"
    return "its group is not whole" if task.state == "held" else ""


def _events(life: RowLife, width: int) -> list[Text]:
    events = life.events
    if not events:
        return [Text("its life is forgotten", style="dim")]
    columns = [
        GridColumn(heading="when", cells=[Text(f"{units.span(event.ago_s)} ago", style="dim") for event in events]),
        GridColumn(heading="what", cells=[Text(event.what) for event in events], left=True),
        GridColumn(heading="task", cells=[Text(event.task) for event in events], left=True),
        GridColumn(heading="by", cells=[Text(life.name_of(event.session)) for event in events], rank=1, left=True),
        GridColumn(heading="", cells=[Text(event.detail) for event in events], rank=2, left=True),
    ]
    lines = grid(columns, len(events), width)
    return lines if life.events_complete else [Text("earlier events are forgotten", style="dim"), *lines]
