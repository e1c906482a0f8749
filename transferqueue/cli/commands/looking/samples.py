"""`transferqueue samples`: responses of a run as text, beside their rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from transferqueue.cli.options import json_option

if TYPE_CHECKING:
    from rich.text import Text

    from transferqueue.workflows.job.run.samples import SampleRow

_VALUE_CHARS_MAX: Final = 200
"""Of a column of the data; --json has it whole."""
EXAMPLES = (
    ("transferqueue samples runs/grpo-20260101-120000", "the newest responses, while it runs too"),
    ("transferqueue samples runs/grpo-20260101-120000 --step 40 --worst", "those of a step with the lowest rewards"),
    ("transferqueue samples runs/grpo-20260101-120000 --rows 1000 --json", "for a machine"),
)


def samples(
    run: Annotated[Path, typer.Argument(show_default=False, help="The folder of a job's run.")],
    step: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="The step that trained them. Default: the newest rows."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="The most responses.")] = 4,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest rewards first.")] = False,
    json: Annotated[bool, json_option("Print them as JSON.")] = False,
) -> None:
    """Show responses of a run as text: prompt, response, reward and its terms.

    They are read from the run's samples (`log.samples`), or from all of its rows if it records them (`queue.record`),
    and of a run that goes on, from its queue. Below a response are the columns of the data, such as the right answer.
    Without --worst or --best, each is to another prompt.
    """
    from transferqueue.cli.screens.terminal import console, show, show_json
    from transferqueue.errors import UsageError
    from transferqueue.workflows.job.run.samples import samples as samples_of

    if worst and best:
        raise UsageError("--worst with --best: give one of them")
    found = samples_of(run, step=step, rows=rows, order="worst" if worst else "best" if best else "spread")
    if json:
        show_json(found)
    else:
        show((line for sample in found for line in sample_lines(sample)), console())


def sample_lines(sample: SampleRow) -> Iterator[Text]:
    """Yield the lines of a response for people, and an empty one."""
    from rich.text import Text

    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    terms = "".join(f", {name} {score:g}" for name, score in sample.terms.items() if len(sample.terms) > 1)
    place = f"step {sample.step}" if sample.step is not None else "not final yet"
    place += "" if sample.row is None else f", row {sample.row}"
    fate = f", dropped: {sample.reason}" if sample.fate == "dropped" else ""
    ended = f", {sample.finish_reason}" if sample.finish_reason else ""
    head = f"{reward}{terms}  {place}, version {sample.version}, {sample.tokens} tokens{ended}{fate}"
    yield Text(head, style="bold")
    yield Text(_shown(sample.prompt), style="dim")
    yield Text(sample.response)
    if data := [f"{name}: {_cut(value)}" for name, value in sample.data.items() if value not in (None, sample.prompt)]:
        yield Text("; ".join(data), style="dim")
    yield Text()


def _cut(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _VALUE_CHARS_MAX else text[:_VALUE_CHARS_MAX] + "…"


def _shown(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
