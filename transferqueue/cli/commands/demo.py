"""`transferqueue demo`: make a small model and its questions, and train it by GRPO as `transferqueue train` does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

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
    ("transferqueue demo --max-staleness 4 --rollouts 2", "further ahead, by two generating processes"),
    (
        "transferqueue demo --engine vllm",
        "generation by vLLM, its weights updated in place (make test-engines installs it)",
    ),
    ("transferqueue demo --partial 2 --rollouts 2", "each response in parts, each part by a free process"),
    (
        "transferqueue demo --mode sync --over-sample 1.25",
        "begins a quarter more than a batch; the unfinished rest continues under the next weights",
    ),
    ("transferqueue demo --on ray", "the same job on a Ray cluster, its stages and its memory spread over the nodes"),
    ("transferqueue demo --log tensorboard", "log each step there too (pip install tensorboard)"),
    ("transferqueue demo --kl 0.02 --steps 50", "with a reference stage and a KL term"),
)
ASYNCHRONY: Final = "Asynchrony"
LEARNING: Final = "Learning"
ENGINE: Final = "Engine and cluster"
OUTPUT: Final = "Output"

ModeOption = Annotated[
    Literal["sync", "delayed", "async", "colocated"],
    typer.Option(
        help="Generate and train in turn; a batch ahead with weights one step old; ahead with the newest; or in turn "
        "in one process, on one device.",
        rich_help_panel=ASYNCHRONY,
    ),
]
MaxStalenessOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help=(
            "Versions a trained row may be behind. Default: 1; in mode sync 0, or what over-sampling needs. Mode "
            "delayed takes 1."
        ),
        show_default=False,
        rich_help_panel=ASYNCHRONY,
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Trainer steps. Default: 200.",
        show_default=False,
        rich_help_panel=LEARNING,
    ),
]
DatasetOption = Annotated[
    str,
    typer.Option(
        help="Data set of reasoning-gym: chain_sum or spell_backward.",
        rich_help_panel=LEARNING,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seed of weights, problems and sampling.",
        rich_help_panel=LEARNING,
    ),
]
RolloutsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Generating processes.",
        rich_help_panel=ASYNCHRONY,
    ),
]
KlOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Weight of the KL term; above 0 adds a reference stage.",
        rich_help_panel=LEARNING,
    ),
]
WeightMaxOption = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="Decoupled PPO: clip around the policy before the step, and cut the weights of older rows here.",
        show_default=False,
        rich_help_panel=LEARNING,
    ),
]
EngineOption = Annotated[
    Literal["builtin", "transformers", "vllm"],
    typer.Option(
        help="Generating engine: a small one of plain torch, or a real one with the same model as a Llama.",
        rich_help_panel=ENGINE,
    ),
]
PartialOption = Annotated[
    int,
    typer.Option(
        min=0,
        help=(
            "Tokens that one lease adds to a response; an unfinished response continues under newer weights. 0: no "
            "limit."
        ),
        rich_help_panel=ASYNCHRONY,
    ),
]
OverSampleOption = Annotated[
    float,
    typer.Option(
        min=1.0,
        help="Begin so many times a batch (mode sync). When the batch is full, the unfinished rest is handed back, and "
        "continues under the next weights.",
        rich_help_panel=ASYNCHRONY,
    ),
]
FilterZeroAdvantageOption = Annotated[
    bool,
    typer.Option(
        "--filter-zero-advantage",
        help="Drop groups with equal rewards, and generate as many others in their place.",
        rich_help_panel=ASYNCHRONY,
    ),
]
OnOption = Annotated[
    Literal["processes", "ray"],
    typer.Option(
        help="Where stages run: processes of this machine, or actors of the Ray cluster that RAY_ADDRESS names (unset: "
        "of one on this machine), with a shard on each node. All nodes must see --out.",
        rich_help_panel=ENGINE,
    ),
]
LogOption = Annotated[
    Literal["tensorboard", "wandb"] | None,
    typer.Option(
        help="Log each step there too: event files, or a run of W&B, in the folder of the results.",
        rich_help_panel=OUTPUT,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the results. Default: a new one in runs/.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]


def demo(
    mode: ModeOption = "async",
    max_staleness: MaxStalenessOption = None,
    steps: StepsOption = None,
    dataset: DatasetOption = "chain_sum",
    seed: SeedOption = 0,
    rollouts: RolloutsOption = 1,
    kl: KlOption = 0.0,
    weight_max: WeightMaxOption = None,
    engine: EngineOption = "builtin",
    partial: PartialOption = 0,
    over_sample: OverSampleOption = 1.0,
    filter_zero_advantage: FilterZeroAdvantageOption = False,
    on: OnOption = "processes",
    log: LogOption = None,
    out: OutOption = None,
) -> None:
    """Train a small transformer by GRPO on reasoning-gym problems, every stage a process of its own.

    The folder of the run gets the model and its questions (inputs/), the job file (job.toml) that `transferqueue train`
    runs too, and at the end summary.json, learning.png and timeline.json (open it at https://ui.perfetto.dev). Ctrl-C
    ends every process; `transferqueue train --resume` goes on.
    """
    from transferqueue.workflows.job.demo import check_task, demo_job, make_inputs
    from transferqueue.workflows.job.run.folder import new_folder
    from transferqueue.workflows.job.settings.read import checked

    _check_installed()
    check_task(dataset)

    def job_in(inputs: Path) -> Job:
        return checked(
            demo_job(
                inputs,
                task=dataset,
                seed=seed,
                steps=steps,
                mode=mode,
                max_staleness=max_staleness,
                engine=engine,
                rollouts=rollouts,
                kl=kl,
                weight_max=weight_max,
                budget=partial,
                over_sample=over_sample,
                filter_equal=filter_zero_advantage,
                on=on,
                log=() if log is None else (log,),
            )
        )

    folder = new_folder(job_in(Path()), out)
    inputs = folder_to_write("--out", folder.path) / "inputs"
    screen = console()
    screen.print("warm-up of the model")
    make_inputs(inputs, task=dataset, seed=seed, real_engine=engine != "builtin")
    show_outcome(run_watched(job_in(inputs), folder, screen), screen)


def _check_installed() -> None:
    """`UsageError` before any process starts, if a library that they all need is missing."""
    if missing := [name for name in ("torch", "reasoning_gym", "safetensors") if find_spec(name) is None]:
        raise UsageError(f"the demo needs {' and '.join(missing)}, not installed here: {install_line('demo')}")
