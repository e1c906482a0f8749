"""`transferqueue adopt`: read a job of another stack, and write the same job for this one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.options import folder_to_write
from transferqueue.cli.running import ended_like_ctrl_c
from transferqueue.cli.screens.terminal import say, show_json

if TYPE_CHECKING:
    from transferqueue.workflows.adopt.report import Adopted
    from transferqueue.workflows.adopt.trial.compare import Tried

EXAMPLES = (
    ("transferqueue adopt run_qwen3-8b.sh", "a script that starts verl, OpenRLHF, slime, TRL or NeMo-RL"),
    ("transferqueue adopt grpo.yaml grpo.max_num_steps=200", "a configuration, with an override"),
    ("transferqueue adopt -- trl grpo --model_name_or_path Qwen/Qwen3-0.6B …", "the words of a command"),
    ("transferqueue adopt grpo.yaml --out native", "and write native/job.toml"),
    (
        "transferqueue adopt grpo.yaml --out native --try -- --model_name_or_path ./tiny",
        "and compare two steps of TRL and of native/job.toml",
    ),
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
    with_trial: Annotated[
        bool,
        typer.Option(
            "--try",
            help="Also run two steps of a job of TRL or verl, by the stack itself where it is installed, and of the "
            "native job on the same rows, and compare rewards, advantages, losses, gradients and learning rates. verl "
            "runs on a CPU, on its own queue and on this one. Executes the job's code. Tries the job.toml that is in "
            "--out DIR already, with your changes.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
) -> None:
    """Say what becomes of a job of another stack, and write it as a job file.

    Each key is kept, mapped, assumed, without effect, unknown or refused, with the reason. Nothing of the job is
    executed without --try.
    """
    from msgspec.structs import replace

    from transferqueue.errors import UsageError
    from transferqueue.workflows.adopt.report import JOB, write
    from transferqueue.workflows.adopt.report import adopt as read

    adopted = read(words, stack=stack)
    _show(adopted.text(), None if with_trial else adopted, as_json=as_json)
    if out is not None and not adopted.job:
        raise UsageError(f"{adopted.source}: job.toml is not written: {adopted.problem}")
    folder = None if out is None else folder_to_write("--out", out)
    changed = folder / JOB if with_trial and folder is not None and (folder / JOB).exists() else None
    if with_trial:
        tried = _tried(adopted, words, changed)
        adopted = replace(adopted, tried=tried)
        _show("".join(f"\n{each.text()}\n" for each in tried).rstrip("\n"), adopted, as_json=as_json)
    say(_next(adopted, out), err=as_json)
    for path in write(adopted, folder) if folder is not None and changed is None else ():
        say(f"wrote {path}", err=as_json)
    if any(each.differs is not None for each in adopted.tried):
        raise typer.Exit(1)


def _show(text: str, report: Adopted | None, *, as_json: bool) -> None:
    """Print a text, or as JSON the report; None: it is not whole yet."""
    if not as_json:
        say(text)
    elif report is not None:
        show_json(report)


def _tried(adopted: Adopted, words: list[str], file: Path | None) -> list[Tried]:
    """Try the job. file: the job file to try, which is there already; None: the one of adopt."""
    from transferqueue.workflows.adopt.trial.both import try_both

    with ended_like_ctrl_c(SIGTERM):
        tell = partial(say, err=True)
        return try_both(
            words,
            stack=adopted.stack,
            written=adopted.job,
            lines=adopted.lines,
            rewards=adopted.rewards,
            problem=adopted.problem,
            file=file,
            tell=tell,
        )


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
