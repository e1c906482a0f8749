"""`transferqueue plan`: instances, micro-batch, depth and mode for a profiled job and a device budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from transferqueue.cli.options import file_to_write
from transferqueue.cli.screens.terminal import console, say
from transferqueue.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transferqueue.workflows.planner.job_plan import Planned
    from transferqueue.workflows.planner.profile import Profile

EXAMPLES: Final = (
    ("transferqueue plan profile.toml", "the best plans for the profile's budget"),
    (
        "transferqueue plan profile.toml --out plan.toml",
        "write the best one; then: transferqueue train JOB.toml --plan plan.toml",
    ),
    ("transferqueue plan profile.toml --objective money", "the most samples for the price of the devices"),
    ("transferqueue plan profile.toml --calibrate timeline.json", "with stage times of a recorded run"),
)
SHOWN: Final = 5
WIDTH: Final = 64
"""Characters of the predicted timeline."""


def plan(
    profile: Annotated[Path, typer.Argument(help="Stage times, lengths and budget: see `transferqueue docs plan`.")],
    calibrate: Annotated[
        Path | None, typer.Option(help="Timeline of a real run; its stage times replace those given.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the best plan's timeline here (PNG).")] = None,
    objective: Annotated[str, typer.Option(help="speed: samples a second; money: samples for the price.")] = "speed",
    out: Annotated[Path | None, typer.Option(help="Write a plan for `train --plan` here (TOML).")] = None,
    choose: Annotated[int, typer.Option(help="Which of the plans shown is written: 1 is the best.")] = 1,
) -> None:
    """Choose instances per stage, micro-batch, depth and mode.

    An analytical bound prunes; a simulation around the production ledger, selectors and pacing decides.
    """
    from transferqueue.workflows.planner import job_plan
    from transferqueue.workflows.planner import profile as profiles

    if objective not in ("speed", "money"):
        raise UsageError(f"--objective {objective!r}: give speed or money")
    for option, file in (("--picture", picture), ("--out", out)):
        if file is not None:
            file_to_write(option, file)
    job, measured = profiles.load(profile), dict[str, float]()
    if calibrate is not None:
        job, measured = profiles.calibrated(job, calibrate)
    plans = job_plan.plan(job, cast("job_plan.Objective", objective))
    _show(plans)
    for name, seconds in measured.items():
        say(f"measured: {name} {seconds:.4g} s a row")
    for assumption in job_plan.assumed(job):
        say(f"assumed: {assumption}")
    if picture is not None:
        draw(picture, plans[0])
        say(f"drew {picture}")
    if out is not None:
        _write(out, job, plans, choose)
        say(f"wrote {out}; next: transferqueue train JOB.toml --plan {out}")


def _write(path: Path, profile: Profile, plans: Sequence[Planned], choose: int) -> None:
    from transferqueue.workflows.job.settings.plan_file import plan_file

    if not 1 <= choose <= len(plans):
        raise UsageError(f"--choose {choose}: {len(plans)} plans were simulated; give 1 to {len(plans)}")
    plan_file(profile, plans[choose - 1].plan).write(path)


def _show(plans: Sequence[Planned]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("mode", "instances", "slots", "micro-batch", "devices", "price", "bound", "step", "cost", "idle"):
        table.add_column(title)
    for planned in plans[:SHOWN]:
        table.add_row(
            planned.plan.mode,
            _instances(planned),
            str(planned.plan.slots),
            str(planned.plan.micro_rows),
            str(planned.plan.devices),
            f"{planned.plan.price:.3g}",
            f"{planned.bound_s:.3g} s",
            f"{planned.step_s:.3g} s",
            f"{planned.cost:.3g}",
            " ".join(f"{name} {share:.0%}" for name, share in planned.idle.items()),
        )
    screen = console()
    screen.print(table)
    screen.print("predicted timeline of the first (full block: all its instances busy)")
    for line in one_line_each(plans[0]):
        screen.print(line)


def _instances(planned: Planned) -> str:
    """Instances by stage, with the kinds of their devices where there are several."""
    kinds = {"generate": planned.plan.generates_on, "train": planned.plan.trains_on}
    return " ".join(
        f"{name}={count}" + (f" ({kinds[name]})" if kinds.get(name) else "")
        for name, count in planned.plan.instances.items()
    )


def one_line_each(best: Planned) -> list[str]:
    """The timeline in characters: a line for each stage, darker where more of its instances are busy."""
    lines = []
    for name, count in _drawn(best).items():
        busy = [0.0] * WIDTH
        cell_s = best.simulated.total_s / WIDTH
        seen = [(span.instance, span.start, span.end) for span in best.simulated.worked if span.stage == name]
        for at in range(WIDTH):
            low, high = at * cell_s, (at + 1) * cell_s
            busy[at] = len({instance for instance, start, end in seen if start < high and end > low}) / count
        lines.append(f"{name:>12} " + "".join(" ░▒▓█"[min(4, round(share * 4))] for share in busy))
    return lines


def _drawn(best: Planned) -> dict[str, int]:
    """Instances of the simulation: the trainer is one."""
    return best.plan.instances | {"train": 1}


def draw(path: Path, best: Planned) -> None:
    """Draw the services of every instance of a plan; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4), layout="constrained")
    panel: Any = axes
    base = 0
    for number, (name, count) in enumerate(_drawn(best).items()):
        for instance in range(count):
            worked = [span for span in best.simulated.worked if (span.stage, span.instance) == (name, instance)]
            spans = [(span.start, span.end - span.start) for span in worked]
            panel.broken_barh(spans, (base + instance, 0.9), color=f"C{number}", label=None if instance else name)
        base += count
    panel.set(title=f"simulated: {best.plan.mode}, {best.step_s:.1f} s a step", xlabel="seconds", yticks=[])
    panel.legend(loc="upper right", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
