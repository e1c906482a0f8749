"""`transferqueue replay`: compute a step of a run again, and say what differs first."""

from __future__ import annotations

import code
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.options import json_option
from transferqueue.errors import UsageError

if TYPE_CHECKING:
    from transferqueue.workflows.job.run.replay import BeforeStep

EXAMPLES = (
    ("transferqueue replay runs/grpo-20260101-120000 --step 120", "equal, or the first stage and row that differ"),
    ("transferqueue replay runs/grpo-20260101-120000 --step 120 --json", "for a machine"),
    (
        "transferqueue replay runs/grpo-20260101-120000 --until 120",
        "look at model and rows before that step, in Python",
    ),
)
DIFFERS = 1
"""The exit code of a step that does not come out equal."""


def replay(
    run: Annotated[Path, typer.Argument(show_default=False, help="The folder of a job's run.")],
    step: Annotated[int | None, typer.Option(min=1, show_default=False, help="The step to compute again.")] = None,
    until: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="As --step, but open a Python prompt before that step."),
    ] = None,
    json: Annotated[bool, json_option("Print the outcome as JSON.")] = False,
) -> None:
    """Compute a step of a run again, from the checkpoint before it and the recorded rows.

    Rewards, advantages, loss, gradient and weights are compared bit for bit with those of the run, stage by stage, also
    those of the steps between the checkpoint and this one. The first stage that differs is named, and its row. Exit
    code 1 if one does.

    With `--until` a Python prompt opens before the step, with the trainer and the rows as they were then. The end of
    its input (Ctrl-D) has the step computed by the trainer as you leave it, and compared; `exit()` ends the command,
    with code 0 and nothing compared.
    """
    number = step or until
    if number is None or (step and until):
        raise UsageError("give one of --step K, to compute step K again, and --until K, to look at the run before it")
    if until and json:
        raise UsageError("--until with --json: the prompt writes to the same output; leave one of them out")
    if until and sys.stdin is None:
        raise UsageError("--until opens a Python prompt, and the standard input is closed; use --step")
    from transferqueue.cli.screens.terminal import say, show_json
    from transferqueue.workflows.job.run.replay import replay as replay_step

    outcome = replay_step(run, number, tell=lambda text: say(text, err=True), look=_prompt if until else None)
    if json:
        show_json(outcome)
    else:
        say(outcome.text)
    if outcome.differs is not None:
        raise typer.Exit(DIFFERS)


def _prompt(before: BeforeStep) -> None:
    """Let the user look at a run in Python, until the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401  (edits the lines of the prompt)
    names = before._asdict()
    code.interact(f"{', '.join(names)}: as they were before the step", local=names, exitmsg="")
