"""The screen of `doctor ADDRESS`: what waits, and why, table by table."""

from __future__ import annotations

from rich.text import Text

from transferqueue.cli.layout import wrap
from transferqueue.observe import quantities
from transferqueue.observe.stall import Diagnosis, Finding

_INDENT = 4


def stall_lines(diagnosis: Diagnosis, width: int) -> list[Text]:
    """Lines of the whole report."""
    if not diagnosis.tables:
        return [Text("no tables yet", style="dim")]
    lines: list[Text] = []
    for name, findings in diagnosis.tables.items():
        lines.append(Text(name, style="bold"))
        for finding in findings:
            lines += _finding(finding, width)
        if not findings:
            lines.append(Text("  ✓ ", style="green").append("nobody waits", style="default"))
        lines.append(Text())
    return [*lines, _verdict(diagnosis)]


def _finding(finding: Finding, width: int) -> list[Text]:
    lines = wrap(Text(finding.text), width, indent=_INDENT)
    mark = Text("  ✗ ", style="bold red") if finding.stalled else Text("  … ", style="cyan")
    lines[0] = mark.append_text(Text(style="default").append_text(lines[0][_INDENT:]))
    return lines


def _verdict(diagnosis: Diagnosis) -> Text:
    stalled = diagnosis.stalled
    if stalled:
        return Text(f"{quantities.plural(len(stalled), 'table')} stalled: {', '.join(stalled)}.", style="red")
    return Text("Nothing is stalled.", style="green")
