"""The lines of a verdict, and of the stages of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.text import Text

from transferqueue.cli.screens.layout import flow, wrap
from transferqueue.observe import units
from transferqueue.observe.stages import TableStage, Worker
from transferqueue.observe.verdict import QueueVerdict

_GOOD: Final = frozenset({"healthy", "finished"})
_STYLES: Final = {
    "moves": "green",
    "waits": "cyan",
    "idle": "dim",
    "failing": "bold red",
    "silent": "bold bright_black",
}
_WORKERS_SHOWN: Final = 3
"""Of one stage; one less on a narrow terminal."""
_NARROW: Final = 100


def verdict_lines(verdict: QueueVerdict, width: int) -> list[Text]:
    """The verdict, its remedy, and further troubles."""
    style = "bold red" if verdict.trouble else "bold green" if verdict.state in _GOOD else "bold"
    lines = wrap(Text(verdict.text, style=style), width, indent=2)
    lines[0] = Text(f"{verdict.mark} ", style=style).append_text(lines[0][2:])
    if verdict.remedy:
        lines += wrap(Text(verdict.remedy), width, indent=2)
    for text in verdict.also:
        lines += wrap(Text(f"also: {text}", style="red"), width, indent=2)
    return lines


def stage_lines(stages: Mapping[str, Sequence[TableStage]], width: int) -> list[Text]:
    """The stages of each table on a line, in the order in which rows pass them, with their workers."""
    most = _WORKERS_SHOWN - (width < _NARROW)
    lines: list[Text] = []
    for table, of in stages.items():
        pieces = [_stage(stage, most) for stage in of if stage.task or stage.workers]
        lines += flow([Text(table, style="bold"), *pieces], width, between=" → ", indent=2)
    return lines


def _stage(stage: TableStage, most: int) -> Text:
    text = Text(f"{stage.name}: ")
    if stage.state == "missing":
        return text.append("no worker", style="bold red")
    shown = ", ".join(map(_worker, stage.workers[:most]))
    more = len(stage.workers) - most
    names = (shown + (f" and {more} more" if more > 0 else "")) or "none"
    return text.append(names, style=_STYLES[stage.state])


def _worker(worker: Worker) -> str:
    if worker.state == "silent":
        return f"{worker.name} (silent {units.span(worker.silent_s)})"
    return f"{worker.name} ({units.rows(worker.rows)})" if worker.rows else worker.name
