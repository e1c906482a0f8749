"""Shared by commands that run a flow: signals end it in order, and a failed stage prints its traceback."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from transferqueue.cli.screens.terminal import console, say
from transferqueue.errors import UsageError

if TYPE_CHECKING:
    from transferqueue.workflows.job.run.folder import RunFolder
    from transferqueue.workflows.job.run.run import JobOutcome, RunningJob
    from transferqueue.workflows.job.settings.job import Job
    from transferqueue.workflows.job.settings.plan_file import PlanFile


@contextmanager
def ended_like_ctrl_c(number: signal.Signals) -> Iterator[None]:
    """Let signal ``number`` end the run as Ctrl-C does, with everything cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def last_words_shown() -> Iterator[None]:
    """Print the traceback of a stage that failed, before the one line that names it."""
    from transferqueue.workflows.flow.flow import StageFailed

    try:
        yield
    except StageFailed as error:
        if error.last_words:
            console(stderr=True).print(error.last_words, soft_wrap=True)
        raise


@contextmanager
def resumable(folder: RunFolder) -> Iterator[None]:
    """Print the command that continues a run that ended early. A refusal says itself what to change."""
    has_ended = False
    try:
        yield
        has_ended = True
    except UsageError:
        has_ended = True
        raise
    finally:
        if not has_ended and folder.starts() and not folder.finished:
            say(
                f"the run is kept; go on with: transferqueue train --resume --out {folder.path} (or free its memory: "
                "--discard instead of --resume)",
                err=True,
            )


def run_watched(
    job: Job,
    folder: RunFolder,
    screen: Console,
    *,
    code: Path | None = None,
    page: bool = False,
    plan: PlanFile | None = None,
) -> JobOutcome:
    """Run a job, and show its progress on `screen`; arguments as of `run_job`."""
    from transferqueue.cli.screens.train import watched
    from transferqueue.workflows.job.run.run import run_job

    with ended_like_ctrl_c(signal.SIGTERM), resumable(folder), watched(screen, job.steps) as watch, last_words_shown():

        def started(running: RunningJob) -> None:
            screen.print(Text.assemble(("run in", "dim"), f" {running.folder}"), soft_wrap=True)
            if running.link:
                screen.print(Text.assemble(("page", "dim"), f" {running.link}"), soft_wrap=True)
            watch.started(running.labels)

        return run_job(job, folder=folder, code=code, page=page, plan=plan, observe=watch, started=started)
