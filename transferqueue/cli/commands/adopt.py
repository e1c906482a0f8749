"""`transferqueue adopt`: read a job of another stack, and write the same job for this one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.options import folder_to_write
from transferqueue.cli.screens.terminal import say, show_json

if TYPE_CHECKING:
    from transferqueue.workflows.adopt.report import Adopted

EXAMPLES = (
    ("transferqueue adopt run_qwen3-8b.sh", "a script that starts verl, OpenRLHF, slime, TRL or NeMo-RL"),
    ("transferqueue adopt grpo.yaml grpo.max_num_steps=200", "a configuration, with an override"),
    ("transferqueue adopt -- trl grpo --model_name_or_path Qwen/Qwen3-0.6B …", "the words of a command"),
    ("transferqueue adopt grpo.yaml --out native", "and write native/job.toml"),
)


def adopt(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [ARGUMENT]...",
            help="A YAML file or a shell script, then overrides or options; or after -- the command itself.",
            show_default=False,
        ),
    ],
    stack: Annotated[
        str, typer.Option(help="verl, nemo-rl, trl, openrlhf or slime. Default: it is recognised.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write job.toml there, and the rewards it calls.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
) -> None:
    """Say what becomes of a job of another stack, and write it as a job file.

    Each key is kept, mapped, assumed, without effect, unknown or refused, with the reason. Nothing of the job is
    executed.
    """
    from transferqueue.errors import UsageError
    from transferqueue.workflows.adopt.report import adopt as read
    from transferqueue.workflows.adopt.report import write

    adopted = read(words, stack=stack)
    if as_json:
        show_json(adopted)
    else:
        say(adopted.text())
    if out is not None and not adopted.job:
        raise UsageError(f"{adopted.source}: job.toml is not written: {adopted.problem}")
    say(_next(adopted, out), err=as_json)
    if out is not None:
        for path in write(adopted, folder_to_write("--out", out)):
            say(f"wrote {path}", err=as_json)


def _next(adopted: Adopted, out: Path | None) -> str:
    """Return what to run: the same job here, and the stack itself on this queue."""
    if adopted.problem:
        native = f"not a job file yet: {adopted.problem}"
    elif out is None:
        native = "--out DIR writes job.toml, which the rules of a job file admit"
    else:
        native = f"transferqueue train {out / 'job.toml'} --dry-run"
    own = adopted.on_queue or ["no adapter of this package reaches its trainer"]
    lines = ["", "the same job here:", f"  {native}", "", f"{adopted.stack} itself on this queue:"]
    return "\n".join([*lines, *(f"  {line}" for line in own)])
