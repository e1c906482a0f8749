"""`transferqueue demo`: run the GRPO job of `transferqueue.workflows.grpo` and show its progress."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transferqueue.cli.options import folder_to_write
from transferqueue.cli.running import ended_like_ctrl_c, last_words_shown
from transferqueue.cli.screens.demo import Bar, Lines, Watch
from transferqueue.cli.screens.terminal import console
from transferqueue.errors import UsageError
from transferqueue.lazy import install_line

if TYPE_CHECKING:
    from transferqueue.workflows.flow.flow import Observe
    from transferqueue.workflows.flow.reports.loggers import Logger
    from transferqueue.workflows.grpo.job import JobSettings
    from transferqueue.workflows.grpo.run import RunOutcome

EXAMPLES = (
    ("transferqueue demo", "the default run: asynchronous, staleness at most 1, at most three minutes"),
    ("transferqueue demo --mode sync", "the same job, on-policy: generate, train, generate, ..."),
    ("transferqueue demo --mode delayed", "a batch is generated while one is trained on, with weights one step old"),
    ("transferqueue demo --max-staleness 4 --rollouts 2", "further ahead, by two generating processes"),
    (
        "transferqueue demo --engine vllm",
        "generation by vLLM, its weights updated in place (make test-engines installs it)",
    ),
    ("transferqueue demo --partial 2 --rollouts 2", "a response is generated in parts, by whoever is free"),
    (
        "transferqueue demo --mode sync --over-sample 1.25",
        "a quarter more is begun than a batch needs; the unfinished rest goes on under the next weights",
    ),
    ("transferqueue demo --on ray", "the same job on a Ray cluster, its stages and its memory spread over the nodes"),
    ("transferqueue demo --log tensorboard", "every step is logged there too (pip install tensorboard)"),
    ("transferqueue demo --kl 0.02 --steps 50", "with a reference stage and a KL term"),
)


ModeOption = Annotated[
    Literal["sync", "delayed", "async"],
    typer.Option(help="Generate and train in turn; a batch ahead with weights one step old; or ahead with the newest."),
]
MaxStalenessOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Versions a trained row may be behind. Default: 1; in mode sync 0, or what over-sampling needs. Mode delayed takes 1.",
        show_default=False,
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Trainer steps. Default: 300; 240 with spell_backward or a real engine.", show_default=False
    ),
]
DatasetOption = Annotated[
    str | None,
    typer.Option(help="Problem set of reasoning-gym: chain_sum (the default) or spell_backward.", show_default=False),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of weights, problems and sampling.")]
RolloutsOption = Annotated[int, typer.Option(min=1, help="Generating processes.")]
KlOption = Annotated[float, typer.Option(min=0.0, help="Weight of the KL term; above 0 adds a reference stage.")]
WeightMaxOption = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="Decoupled PPO: clip around the policy before the step, and cut the weights of older rows here.",
        show_default=False,
    ),
]
EngineOption = Annotated[
    Literal["builtin", "transformers", "vllm"],
    typer.Option(help="What generates: the demo's own sampler, or a real engine with the same model as a Llama."),
]
PartialOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens that one lease adds to a response; what is unfinished then goes on under newer weights. 0: no bound.",
    ),
]
OverSampleOption = Annotated[
    float,
    typer.Option(
        min=1.0,
        help="Begin so many times a batch (mode sync). When the batch is full, the unfinished rest is handed back, and goes "
        "on under the next weights.",
    ),
]
FilterZeroAdvantageOption = Annotated[
    bool,
    typer.Option(
        "--filter-zero-advantage",
        help="Drop groups with equal rewards, and generate as many others in their place.",
    ),
]
OnOption = Annotated[
    Literal["processes", "ray"],
    typer.Option(
        help="Where stages run: processes of this machine, or tasks of the Ray cluster that RAY_ADDRESS names (unset: of "
        "one on this machine), with a shard on each node."
    ),
]
LogOption = Annotated[
    Literal["tensorboard", "wandb"] | None,
    typer.Option(help="Log each step there too: event files, or a run of W&B, in the folder of the results."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder of the results. Default: a new one in runs/.", show_default=False)
]


def demo(
    mode: ModeOption = "async",
    max_staleness: MaxStalenessOption = None,
    steps: StepsOption = None,
    dataset: DatasetOption = None,
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

    Shows the held-out reward before and after, and leaves summary.json, learning.png and timeline.json (open it at
    https://ui.perfetto.dev). Ctrl-C ends every process and leaves none.
    """
    from transferqueue.workflows.flow.reports.loggers import logged
    from transferqueue.workflows.grpo.run import run_name

    _check_installed()
    settings = job_settings(
        mode,
        max_staleness,
        steps=steps,
        dataset=dataset,
        seed=seed,
        rollouts=rollouts,
        kl=kl,
        engine=engine,
        weight_max=weight_max,
        partial=partial,
        over_sample=over_sample,
        filter_zero_advantage=filter_zero_advantage,
    )
    directory = folder_to_write("--out", out or Path("runs") / run_name(settings))
    terminal = console()
    with (
        _logging(log, directory) as logger,
        ended_like_ctrl_c(signal.SIGTERM),
        _watched(terminal, settings) as watch,
        last_words_shown(),
    ):
        run = _run_on_ray if on == "ray" else _run_here
        outcome = run(settings, directory, logged(logger, watch) if logger else watch, watch)
    show(outcome, terminal)


def _check_installed() -> None:
    """`UsageError` before any process starts, if a library that they all need is missing."""
    if missing := [name for name in ("torch", "reasoning_gym") if find_spec(name) is None]:
        raise UsageError(f"the demo needs {' and '.join(missing)}, not installed here: {install_line('demo')}")


def _run_here(settings: JobSettings, directory: Path, observe: Observe, watch: Watch) -> RunOutcome:
    from transferqueue.workflows.grpo.run import run_demo

    return run_demo(settings, directory=directory, observe=observe, started=lambda flow: watch.started(flow.pids()))


def _run_on_ray(settings: JobSettings, directory: Path, observe: Observe, watch: Watch) -> RunOutcome:
    from transferqueue.workflows.grpo.on_ray import run_demo_on_ray

    return run_demo_on_ray(
        settings, directory=directory, observe=observe, started=lambda _, labels: watch.started(labels)
    )


def job_settings(
    mode: Literal["sync", "delayed", "async"],
    max_staleness: int | None,
    *,
    steps: int | None,
    dataset: str | None,
    seed: int,
    rollouts: int,
    kl: float,
    engine: Literal["builtin", "transformers", "vllm"] = "builtin",
    weight_max: float | None = None,
    partial: int = 0,
    over_sample: float = 1.0,
    filter_zero_advantage: bool = False,
) -> JobSettings:
    """Turn the options into settings. `UsageError` or `Impossible` if they contradict each other."""
    from transferqueue.errors import UsageError
    from transferqueue.workflows.grpo.job import JobSettings
    from transferqueue.workflows.grpo.learning.settings import for_engine, settings_for

    try:
        learning = settings_for(dataset or "chain_sum", seed=seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if engine != "builtin":
        learning = for_engine(learning)
    learning = replace(learning, steps=steps or learning.steps, kl_weight=kl, weight_max=weight_max)
    least = math.ceil(over_sample) - 1 if mode == "sync" else 1
    staleness = max_staleness if max_staleness is not None else least
    depth = 0 if mode == "sync" else max(1, staleness)
    return JobSettings(
        learning=learning,
        mode=mode,
        max_staleness=staleness,
        depth=depth,
        rollouts=rollouts,
        engine=engine,
        partial=partial,
        over_sample=over_sample,
        filter_zero_advantage=filter_zero_advantage,
    )


def show(outcome: RunOutcome, to: Console) -> None:
    """Print the summary as a table, why rows were dropped, and where the files are."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in outcome.summary.rows():
        table.add_row(Text(name, style="dim"), Text(value))
    to.print()
    to.print(table)
    for reason, rows in outcome.audit.dropped.items():
        to.print(Text.assemble((f"dropped ({reason}):", "dim"), f" {rows}"))
    to.print()
    for path in outcome.files:
        to.print(Text.assemble(("wrote", "dim"), f" {path}"), soft_wrap=True)


def _logging(name: str | None, directory: Path) -> AbstractContextManager[Logger | None]:
    from transferqueue.workflows.flow.reports.loggers import logger_named

    return nullcontext() if name is None else logger_named(name)(directory / name)


@contextmanager
def _watched(to: Console, settings: JobSettings) -> Iterator[Watch]:
    if not to.is_terminal:
        yield Lines(to, settings.learning.steps)
        return
    with Bar(to, settings.learning.steps) as bar:
        yield bar
