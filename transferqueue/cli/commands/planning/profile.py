"""`transferqueue profile`: measure a job's engine, trainer and rewards here, and write what `transferqueue plan`
reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from transferqueue.cli.options import file_to_write
from transferqueue.cli.screens.terminal import say

EXAMPLES: Final = (
    ("transferqueue profile grpo.toml", "measure on this machine, with nothing else running; writes profile.toml"),
    ("transferqueue profile grpo.toml --devices 16 --out h100.toml", "for 16 devices like this one"),
)


def profile(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="Change a value of the file. Repeatable."),
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices to divide; each engine and each trainer takes one.")] = 2,
    trial_steps: Annotated[
        int, typer.Option(help="Steps of a trial run of the whole job, synchronous and asynchronous; 0: none.")
    ] = 12,
    out: Annotated[Path, typer.Option(help="The profile.")] = Path("profile.toml"),
) -> None:
    """Measure the costs of a job on this machine, for `transferqueue plan`.

    Measures the time of a token by concurrent rows, of a prompt, a trained row, an optimizer step, a publication and
    each reward, and response lengths. Opens the job's engine and then its model in this process, and draws from the
    job's own prompts; the job's weights do not change. Then short trial runs of the job measure how its processes slow
    each other.
    """
    from transferqueue.lazy import naming_extra

    with naming_extra("profile", "train"):
        from transferqueue.workflows.job.profiling.job import profile_job
    from transferqueue.workflows.job.settings.read import job_from_file
    from transferqueue.workflows.job.settings.write import as_toml

    settings = job_from_file(job, set=changes or [])
    file_to_write("--out", out)
    measured = profile_job(settings, code=job.parent, devices=devices, trial_steps=trial_steps, say=say)
    out.write_text(as_toml(measured), encoding="utf-8")
    generation, train = measured.generation, measured.train
    say(
        f"a token: {', '.join(f'{ms:.3g} ms at {rows}' for rows, ms in generation.token_ms)} rows; a prompt "
        f"{generation.prompt_ms:.3g} ms"
    )
    say(
        f"a trained row {1000 * train.row_s:.3g} ms, a call {1000 * train.call_s:.3g} ms, a step "
        f"{1000 * train.step_s:.3g} ms more"
    )
    say(f"published and loaded in {1000 * train.update_s:.3g} ms")
    for stage in measured.stages:
        say(f"{stage.name}: {1000 * stage.row_s:.3g} ms a row")
    for trial in measured.trials:
        mode = "asynchronous" if trial.depth else "synchronous"
        say(
            f"{mode}, together: generation {trial.generation:.2f} times, training {trial.train:.2f} times the time "
            f"alone; {1000 * trial.wait_s:.3g} ms of waits a step"
        )
    say(f"wrote {out}; next: transferqueue plan {out} --out plan.toml")
