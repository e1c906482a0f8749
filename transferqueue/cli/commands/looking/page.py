"""`transferqueue page`: the page of a run's folder, with a browser of its recorded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = (
    ("transferqueue page runs/grpo-20260101-120000", "browse the rows of a run, while it goes on or afterwards"),
    ("transferqueue page records/math-7 --web 8787", "of a record, at a port that an ssh -L names"),
)


def page(
    run: Annotated[
        Path, typer.Argument(show_default=False, help="The folder of a job's run, or the directory of a record.")
    ],
    web: Annotated[
        str, typer.Option("--web", metavar="[HOST:]PORT", help="Where to listen, on this machine. 0: any port.")
    ] = "0",
) -> None:
    """Show a run in a browser: its recorded rows, and its queue while it goes on.

    Prints a link, which is a password, and serves until Ctrl-C. Rows are filtered by step, reward, length, finish
    reason, fate and worker; groups are shown beside each other, tokens coloured by a column of theirs. The page reads
    the run and changes nothing. Files and row groups that are damaged are named on it; the rest is shown.
    """
    import sys

    from transferqueue.cli.screens.terminal import say
    from transferqueue.web.subprocesses import check_installed

    check_installed("pages")
    from transferqueue.web.run_page import serve_run

    def tell(link: str) -> None:
        say(f"web {link}")
        sys.stdout.flush()

    serve_run(run, web, tell)
