"""The screen of `doctor`: the verdict, the stages of each table, and the waits."""

from __future__ import annotations

from rich.text import Text

from transferqueue.cli.screens.layout import wrap
from transferqueue.cli.screens.verdict import stage_lines, verdict_lines
from transferqueue.observe.diagnosis import Diagnosis, Finding
from transferqueue.observe.verdict import QueueReport

_INDENT = 4


def doctor_lines(report: QueueReport, width: int) -> list[Text]:
    """Lines of the whole report."""
    parts = [
        verdict_lines(report.verdict, width),
        stage_lines(report.stages, width),
        _symptoms(report.symptoms, width),
    ]
    return [line for part in parts if part for line in (*part, Text())][:-1]


def _symptoms(diagnosis: Diagnosis, width: int) -> list[Text]:
    """The waits of tables, of weight channels, and all others."""
    parts = [
        *diagnosis.tables.items(),
        *((f"weights {name}", findings) for name, findings in diagnosis.channels.items()),
        *([("elsewhere", diagnosis.elsewhere)] if diagnosis.elsewhere else []),
    ]
    return [line for name, findings in parts for line in (Text(name, style="bold"), *_findings(findings, width))]


def _findings(findings: list[Finding], width: int) -> list[Text]:
    if not findings:
        return [Text("  nothing waits", style="dim")]
    return [line for finding in findings for line in _finding(finding, width)]


def _finding(finding: Finding, width: int) -> list[Text]:
    lines = wrap(Text(finding.text), width, indent=_INDENT)
    lines[0] = Text("  … ", style="cyan").append_text(Text(style="default").append_text(lines[0][_INDENT:]))
    return lines
