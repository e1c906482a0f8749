"""The screen of `doctor --machine`: the checks of this machine, and their remedies."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from transferqueue.cli.screens.layout import wrap
from transferqueue.observe import units
from transferqueue.observe.machine.check import Section
from transferqueue.observe.machine.result import Check, worst

_MARKS: Final = {"ok": ("✓", "green"), "warn": ("!", "bold yellow"), "fail": ("✗", "bold red")}


def machine_lines(sections: list[Section], width: int) -> list[Text]:
    """Lines of the whole report. A check that is not ok is followed by its remedy."""
    names = max(len(check.subject) for section in sections for check in section.checks)
    lines: list[Text] = []
    for section in sections:
        lines += [Text(section.title, style="bold")]
        for check in section.checks:
            lines += _check(check, names, width)
        lines += [Text()]
    return [*lines, verdict([check for section in sections for check in section.checks])]


def _check(check: Check, names: int, width: int) -> list[Text]:
    mark, style = _MARKS[check.verdict]
    indent = names + 6
    finding = wrap(Text(check.found), width, indent=indent)
    first = Text("  ").append(mark, style=style).append(f" {check.subject:<{names}}  ").append_text(finding[0][indent:])
    remedy = wrap(Text(f"→ {check.remedy}", style=style), width, indent=indent) if check.remedy else []
    return [first, *finding[1:], *remedy]


def verdict(checks: list[Check]) -> Text:
    """One sentence about all checks."""
    failed = sum(check.verdict == "fail" for check in checks)
    warned = sum(check.verdict == "warn" for check in checks)
    match worst(checks):
        case "ok":
            return Text("This machine is ready for a queue.", style="green")
        case "warn":
            return Text(f"This machine can run a queue; {units.plural(warned, 'thing')} to improve.", style="yellow")
        case _:
            return Text(f"A queue will not run here: {units.plural(failed, 'thing')} to mend.", style="red")
