"""`transferqueue train`: run a job of a TOML file, and show its progress."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from transferqueue.cli.options import folder_to_write
from transferqueue.cli.running import ended_like_ctrl_c, last_words_shown, run_watched
from transferqueue.cli.screens.terminal import console, say, show_json
from transferqueue.cli.screens.train import show_outcome

if TYPE_CHECKING:
    from transferqueue.workflows.job.run.folder import RunFolder
    from transferqueue.workflows.job.settings.job import Job

EXAMPLES = (
    (
        "transferqueue train grpo.toml --dry-run",
        "check it, and show two prompts as tokens, each reward on a dummy row, processes, bytes",
    ),
    ("transferqueue train grpo.toml", "run it; results go to a new folder in runs/"),
    (
        "transferqueue train grpo.toml --set trainer.lr=2e-6 --set pacing.mode=sync",
        "with other values; tables merge, arrays are replaced",
    ),
    ("transferqueue train grpo.toml --set engine.0.count=2", "with two processes of the first engine"),
    ("transferqueue train grpo.toml --plan plan.toml", "as the planner chose, with predicted beside measured"),
    ("transferqueue train grpo.toml --resume", "go on with its latest unfinished run"),
    ("transferqueue train --resume --out runs/grpo-20260101-120000", "go on with the run in a folder"),
    ("transferqueue train --resume --out runs/grpo-20260101-120000 --set steps=200", "and further: a finished one too"),
    ("transferqueue train --discard --out runs/grpo-20260101-120000", "give it up: its shared memory is freed"),
)
VALUES: Final = "Values"
BEFORE_AND_AFTER: Final = "Before and after"
OUTPUT: Final = "Output"

JobArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[JOB.toml]", help="The job file. May be left out with --resume --out DIR.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Change a value of the file, such as trainer.lr=2e-6; TOML, or a bare word. Repeatable.",
        rich_help_panel=VALUES,
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="PLAN.toml",
        show_default=False,
        help="Run as `transferqueue plan --out` chose; --set changes a value again. The summary shows the prediction.",
        rich_help_panel=VALUES,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check the job and show what it would do; start nothing.",
        rich_help_panel=BEFORE_AND_AFTER,
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with a run that was ended or killed, from its last checkpoint; with --set steps=N also with a "
        "finished one.",
        rich_help_panel=BEFORE_AND_AFTER,
    ),
]
DiscardOption = Annotated[
    bool,
    typer.Option(
        "--discard",
        help="Give up a run that was ended or killed: free its shared memory; checkpoints and logs stay.",
        rich_help_panel=BEFORE_AND_AFTER,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the run. Default: a new one in runs/.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
PageOption = Annotated[
    bool | None,
    typer.Option(
        "--page/--no-page",
        help="Serve a page that shows the queue live. Default: at a terminal, if the extra web is installed.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
SiteOption = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME",
        show_default=False,
        help="Run only the engines of this site, for a job that runs at another one, at queue.address.",
        rich_help_panel=VALUES,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the summary (or the dry run) as one JSON document; progress goes to stderr.",
        rich_help_panel=OUTPUT,
    ),
]


def train(
    job: JobArgument = None,
    changes: SetOption = None,
    plan: PlanOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    discard: DiscardOption = False,
    out: OutOption = None,
    page: PageOption = None,
    site: SiteOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model by a job file.

    Prompts, rollout, rewards, scores and trainer are processes around one queue. The folder of the run gets the
    resolved job, steps.jsonl, evaluations and all rows while it runs (transferqueue samples), and at the end
    summary.json, learning.png and timeline.json (open it at https://ui.perfetto.dev). Ctrl-C ends every process;
    --resume goes on, and --discard gives up the run.
    """
    if site is not None:
        _run_site(job, changes or [], out, site, others=dry_run or resume or discard or plan is not None)
        return
    if discard:
        _discard(job, changes or [], out, others=dry_run or resume or plan is not None)
        return
    from transferqueue.errors import UsageError
    from transferqueue.workflows.job.settings.plan_file import read_plan

    if plan and resume:
        raise UsageError("--plan with --resume: a run goes on with the plan that it has; leave one of them out")
    planned = None if plan is None else read_plan(plan)
    changes = [*(planned.sets() if planned else []), *(changes or [])]
    if dry_run:
        _show_dry_run(job, changes, as_json=as_json)
        return
    settings, folder, code = _chosen(job, changes, resume=resume, out=out)
    screen = console(stderr=as_json)
    if resume:
        screen.print(Text.assemble(("goes on", "dim"), f" {folder.goes_on(settings)}"), soft_wrap=True)
    if not settings.checkpoint.every:
        screen.print("the run will leave no checkpoint and no model: checkpoint.every is 0")
    outcome = run_watched(settings, folder, screen, code=code, page=_with_page(page, screen), plan=planned)
    if as_json:
        show_json(outcome.summary)
    else:
        show_outcome(outcome, screen)


def _chosen(
    job: Path | None, changes: list[str], *, resume: bool, out: Path | None
) -> tuple[Job, RunFolder, Path | None]:
    """Return the job, the folder of its run, and the folder whose modules rewards may name."""
    from transferqueue.errors import UsageError
    from transferqueue.workflows.job.run.folder import RunFolder, new_folder, unfinished_folder
    from transferqueue.workflows.job.settings.read import job_from_file

    if job is None and not (resume and out):
        raise UsageError(
            "train needs a job file: transferqueue train JOB.toml; only --resume --out DIR takes the one of the folder"
        )
    settings = None if job is None else job_from_file(job, set=changes)
    if not resume:
        if settings is None or job is None:
            raise UsageError("train needs a job file: transferqueue train JOB.toml")
        return settings, new_folder(settings, out), job.parent
    chosen = unfinished_folder("" if settings is None else settings.name, out, changes)
    folder = RunFolder(chosen.path.absolute())
    starts = folder.starts()
    if starts and Path(starts[-1].place).is_dir():
        os.chdir(starts[-1].place)  # the paths of the job are relative to it
    return folder.job(changes), folder, Path(starts[-1].code) if starts and starts[-1].code else None


def _discard(job: Path | None, changes: list[str], out: Path | None, *, others: bool) -> None:
    from transferqueue.errors import UsageError
    from transferqueue.workflows.job.run.discard import discard_run
    from transferqueue.workflows.job.run.folder import unfinished_folder
    from transferqueue.workflows.job.settings.read import job_from_file

    if others or (job is None and out is None):
        raise UsageError(
            "train --discard gives up a run: --discard --out DIR, or JOB.toml --discard for its latest; it takes "
            "neither --resume nor --plan nor --dry-run"
        )
    name = "" if job is None else job_from_file(job, set=changes).name
    folder = unfinished_folder(name, out)
    freed = discard_run(folder)
    say(f"discarded the run in {folder.path}: {freed / (1 << 20):,.1f} MiB freed; its checkpoints and logs stay")


def _run_site(job: Path | None, changes: list[str], out: Path | None, site: str, *, others: bool) -> None:
    from transferqueue.errors import UsageError
    from transferqueue.workflows.job.run.folder import new_folder
    from transferqueue.workflows.job.run.remote_engines import run_remote_engines
    from transferqueue.workflows.job.settings.read import job_from_file

    if others or job is None:
        raise UsageError(
            "train --site runs engines of a job: JOB.toml --site NAME, with --set and --out; it takes neither --resume "
            "nor --discard nor --plan nor --dry-run"
        )
    settings = job_from_file(job, set=changes)
    folder = folder_to_write("--out", new_folder(settings, out).path)
    with ended_like_ctrl_c(signal.SIGTERM), last_words_shown():
        run_remote_engines(settings, site, directory=folder, code=job.parent, tell=lambda line: say(line, err=True))
    say(f"site {site}: the job has ended; logs in {folder}")


def _show_dry_run(job: Path | None, changes: list[str], *, as_json: bool) -> None:
    from transferqueue.errors import UsageError
    from transferqueue.workflows.job.run.dry_run import dry_run
    from transferqueue.workflows.job.settings.read import job_from_file

    if job is None:
        raise UsageError("--dry-run needs a job file: transferqueue train JOB.toml --dry-run")
    found = dry_run(job_from_file(job, set=changes), code=job.parent)
    if as_json:
        show_json(found)
    else:
        say(found.text().rstrip())


def _with_page(page: bool | None, screen: Console) -> bool:
    from transferqueue.web.subprocesses import check_installed

    if page is None:
        return screen.is_terminal and _is_installed()
    if page:
        check_installed()
    return page


def _is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("starlette") is not None and find_spec("uvicorn") is not None
