"""`transferqueue replay`: compute a step of a run again, and say what differs first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferqueue.cli.options import json_option

EXAMPLES = (
    ("transferqueue replay runs/grpo-20260101-120000 --step 120", "equal, or the first stage and row that differ"),
    ("transferqueue replay runs/grpo-20260101-120000 --step 120 --json", "for a machine"),
)
DIFFERS = 1
"""The exit code of a step that does not come out equal."""


def replay(
    run: Annotated[Path, typer.Argument(show_default=False, help="The folder of a job's run.")],
    step: Annotated[int, typer.Option(min=1, show_default=False, help="The step to compute again.")],
    json: Annotated[bool, json_option("Print the outcome as JSON.")] = False,
) -> None:
    """Compute a step of a run again, from the checkpoint before it and the recorded rows.

    Rewards, advantages, loss, gradient and weights are compared bit for bit with those of the run, stage by stage, also
    those of the steps between the checkpoint and this one. The first stage that differs is named, and its row. Exit
    code 1 if one does.
    """
    from transferqueue.cli.screens.terminal import say, show_json
    from transferqueue.workflows.job.run.replay import replay as replay_step

    outcome = replay_step(run, step, tell=lambda text: say(text, err=True))
    if json:
        show_json(outcome)
    else:
        say(outcome.text)
    if outcome.differs is not None:
        raise typer.Exit(DIFFERS)
