"""`transferqueue demo`: make a small model and its questions, and train it by GRPO as `transferqueue train` does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from transferqueue.cli.options import folder_to_write
from transferqueue.cli.running import run_watched
from transferqueue.cli.screens.terminal import console
from transferqueue.cli.screens.train import show_outcome
from transferqueue.errors import UsageError
from transferqueue.lazy import install_line

if TYPE_CHECKING:
    from transferqueue.workflows.job.settings.job import Job

EXAMPLES = (
    ("transferqueue demo", "asynchronous, staleness at most 1, about a minute and a half"),
    ("transferqueue demo --mode sync", "the same job, on-policy: generate, train, generate, ..."),
    (
        "transferqueue demo --mode delayed",
        "generates a batch while the trainer uses the last, with weights one step old",
    ),
    (
        "transferqueue demo --engine vllm",
        "generation by vLLM, its weights updated in place (make test-engines installs it)",
    ),
    ("transferqueue demo --on ray", "the same job on a Ray cluster, its stages and its memory spread over the nodes"),
    ("transferqueue demo --log tensorboard", "log each step there too (pip install tensorboard)"),
)


def demo(
    mode: Annotated[
        Literal["sync", "delayed", "async", "colocated"],
        typer.Option(
            help="Generate and train in turn; a batch ahead with weights one step old; ahead with the newest; or in "
            "turn in one process, on one device."
        ),
    ] = "async",
    steps: Annotated[int, typer.Option(min=1, help="Trainer steps.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, problems and sampling.")] = 0,
    rollouts: Annotated[int, typer.Option(min=1, help="Generating processes.")] = 1,
    engine: Annotated[
        Literal["builtin", "transformers", "vllm"],
        typer.Option(
            help="Generating engine: a small one of plain torch, or a real one with the same model as a Llama."
        ),
    ] = "builtin",
    on: Annotated[
        Literal["processes", "ray"],
        typer.Option(
            help="Where stages run: processes of this machine, or actors of the Ray cluster that RAY_ADDRESS names "
            "(unset: of one on this machine), with a shard on each node. All nodes must see --out."
        ),
    ] = "processes",
    log: Annotated[
        Literal["tensorboard", "wandb"] | None,
        typer.Option(help="Log each step there too: event files, or a run of W&B, in the folder of the results."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. Default: a new one in runs/.", show_default=False)
    ] = None,
) -> None:
    """Train a small transformer by GRPO on sums of reasoning-gym, every stage a process of its own.

    The folder of the run gets the model and its questions (inputs/), the job file (job.toml) that `transferqueue train`
    runs too, with --set KEY=VALUE for any other setting, and at the end summary.json, learning.png and timeline.json
    (open it at https://ui.perfetto.dev). Ctrl-C ends every process; `transferqueue train --resume` goes on.
    """
    from transferqueue.workflows.job.demo import demo_job, make_inputs
    from transferqueue.workflows.job.run.folder import new_folder
    from transferqueue.workflows.job.settings.read import checked

    _check_installed()

    def job_in(inputs: Path) -> Job:
        return checked(
            demo_job(
                inputs,
                seed=seed,
                steps=steps,
                mode=mode,
                engine=engine,
                rollouts=rollouts,
                on=on,
                log=() if log is None else (log,),
            )
        )

    folder = new_folder(job_in(Path()), out)
    inputs = folder_to_write("--out", folder.path) / "inputs"
    screen = console()
    screen.print("warm-up of the model")
    make_inputs(inputs, seed=seed, real_engine=engine != "builtin")
    show_outcome(run_watched(job_in(inputs), folder, screen), screen)


def _check_installed() -> None:
    """`UsageError` before any process starts, if a library that they all need is missing."""
    if missing := [name for name in ("torch", "reasoning_gym", "safetensors") if find_spec(name) is None]:
        raise UsageError(f"the demo needs {' and '.join(missing)}, not installed here: {install_line('demo')}")
