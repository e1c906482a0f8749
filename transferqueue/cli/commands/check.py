"""`transferqueue check`: check recorded histories against the promises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferqueue.cli.exit_codes import BROKEN
from transferqueue.cli.screens.terminal import say

EXAMPLES = (
    ("transferqueue check worker-*.jsonl", "the histories of all processes of one run, together"),
    ("transferqueue check run.jsonl --late 60", "also: no lease ended a minute later than it might wait"),
)
SHOWN_MAX = 20


def check(
    histories: Annotated[
        list[Path],
        typer.Argument(
            metavar="HISTORY...",
            show_default=False,
            exists=True,
            dir_okay=False,
            help="Files that a HistoryRecorder wrote.",
        ),
    ],
    late: Annotated[
        float | None,
        typer.Option(
            "--late",
            metavar="SECONDS",
            min=0,
            show_default=False,
            help="Also report a wait that ended more than this after its deadline.",
        ),
    ] = None,
) -> None:
    """Check recorded calls and answers against the promises: no row lost, done twice, torn or too old, no group split,
    no bound broken, no wait stuck.

    Files of processes that ran at the same time belong in one call. Exit code 1 if a promise was broken.
    """
    from transferqueue.testing.checker.checker import Checker
    from transferqueue.testing.history.history import merge, read

    checker = Checker(late)
    for line in merge([list(read(path)) for path in histories]):
        checker.see(line)
    violations = checker.violations
    for violation in violations[:SHOWN_MAX]:
        say(str(violation))
    if len(violations) > SHOWN_MAX:
        say(f"and {len(violations) - SHOWN_MAX} more")
    say(f"{checker.operations:,} operations, {len(violations):,} violations")
    if violations:
        raise typer.Exit(BROKEN)
