"""The screen of `doctor ADDRESS`: what waits, and why, table by table."""

from __future__ import annotations

from rich.text import Text

from transferqueue.cli.screens.layout import wrap
from transferqueue.observe.diagnosis import Diagnosis, Finding

_INDENT = 4


def stall_lines(diagnosis: Diagnosis, width: int) -> list[Text]:
    """Lines of the whole report."""
    if not diagnosis.tables and not diagnosis.channels and not diagnosis.elsewhere:
        return [Text("no tables yet", style="dim")]
    lines: list[Text] = []
    for name, findings in diagnosis.tables.items():
        lines += [Text(name, style="bold"), *_findings(findings, width), Text()]
    for name, findings in diagnosis.channels.items():
        lines += [Text(f"weights {name}", style="bold"), *_findings(findings, width), Text()]
    if diagnosis.elsewhere:
        lines += [Text("elsewhere", style="bold"), *_findings(diagnosis.elsewhere, width), Text()]
    return [*lines, _verdict(diagnosis)]


def _findings(findings: list[Finding], width: int) -> list[Text]:
    if not findings:
        return [Text("  ✓ ", style="green").append("nothing waits", style="default")]
    return [line for finding in findings for line in _finding(finding, width)]


def _finding(finding: Finding, width: int) -> list[Text]:
    lines = wrap(Text(finding.text), width, indent=_INDENT)
    mark = Text("  ✗ ", style="bold red") if finding.stalled else Text("  … ", style="cyan")
    lines[0] = mark.append_text(Text(style="default").append_text(lines[0][_INDENT:]))
    return lines


def _verdict(diagnosis: Diagnosis) -> Text:
    stalled = diagnosis.stalled
    if stalled:
        return Text(f"Stalled: {', '.join(stalled)}.", style="red")
    return Text("Nothing is stalled.", style="green")
