"""`transferqueue check-history`: check recorded histories against the guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferqueue.cli.exit_codes import BROKEN
from transferqueue.cli.screens.terminal import say

EXAMPLES = (
    ("transferqueue check-history worker-*.jsonl", "the histories of all processes of one run"),
    ("transferqueue check-history run.jsonl --late 60", "also report waits that ended a minute after their deadline"),
)
SHOWN_MAX = 20


def check_history(
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
            help="Also report each wait that ended more than this after its deadline.",
        ),
    ] = None,
) -> None:
    """Check recorded calls and replies against the guarantees of the queue.

    No row is lost, done twice, torn or too old, no group is split, no limit exceeded, no wait stuck. Give the files of
    processes that ran at the same time in one call. Exits with code 1 if there is a violation.
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
