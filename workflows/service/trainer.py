"""A training job by AsyncFlow's calls (arXiv 2507.01663, section 5): a `Trainer` starts the engines, and programs talk
to it.

    with Trainer(job, plays=["prompts", "train"]) as trainer:
        trainer.init_engines()

`init_engines` starts the job's server and a process for each of its stages but those that the caller plays: a program
that puts its own prompts plays ``prompts``, one with its own optimizer ``train``. `fit` starts all of them and waits:
it is `transferqueue train`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import transferqueue as tq
from transferqueue.errors import UsageError, listing
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import create_table, stage_jobs
from transferqueue.workflows.job.run.folder import RunFolder, new_folder
from transferqueue.workflows.job.run.machine import process_variables
from transferqueue.workflows.job.run.preflight import placement_of, preflight, shared_variables
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.recorded import recorded
from transferqueue.workflows.job.run.run import JobOutcome, run_job
from transferqueue.workflows.job.run.run_page import RunPage
from transferqueue.workflows.job.run.server import RunServer
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import checked
from transferqueue.workflows.job.settings.sizes import versions_kept
from transferqueue.workflows.service.sync import Service


class JobService(Service):
    """The calls on a job's table and weight channel."""

    def weight_sync_notify(
        self,
        version: int,
        tensors: Mapping[str, Any] | None = None,
        *,
        notice: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """Announce weights, as `Service.weight_sync_notify`. Engines load all that is published.

        Args:
            version: of the weights.
            tensors: to publish, by name; default None: none. They travel without a notice.
            notice: any JSON of at most 4096 bytes; default None.
            timeout_s: seconds to wait; default None: no limit.

        Raises:
            UsageError: tensors with a notice. Other errors are those of `Service.weight_sync_notify`.
        """
        if tensors and notice is not None:
            raise UsageError(
                "tensors with a notice: the job's engines would load the notice as a weight; give one of them"
            )
        super().weight_sync_notify(version, tensors, notice=notice, timeout_s=timeout_s)


class JobTrainer:
    """A job: `fit` runs all of it, `init_engines` all but the stages that the caller plays.

    A context manager: leaving it ends all processes.

    Args:
        job: the job.
        plays: names of processes that are not started, such as ``prompts`` and ``train``; default: none.
        folder: of the run; default None: a new one in ``runs/``.
        code: folder whose modules rewards may name; default None.

    Raises:
        UsageError: a name that the job has no process of, or a job that cannot run.
    """

    def __init__(
        self, job: Job, *, plays: Collection[str] = (), folder: RunFolder | None = None, code: Path | None = None
    ) -> None:
        self.job = checked(job)
        known = {stage.name for stage in stage_jobs(self.job)}
        if unknown := set(plays) - known:
            raise UsageError(f"the job has no process {listing(unknown)} to play; it has {listing(known)}")
        if names.TRAIN in plays and self.job.pacing.uses > 1:
            raise UsageError(
                f"pacing.uses={self.job.pacing.uses} with a caller that plays train: the job's own trainer takes the "
                "further uses; leave one of them out"
            )
        self._plays, self._folder, self._code = frozenset(plays), folder, code
        self._stack = ExitStack()
        self._flow: Flow | None = None
        self._service: JobService | None = None

    def fit(self) -> JobOutcome:
        """Run the whole job to its end, as `transferqueue train` does. Blocks.

        Raises:
            UsageError: the caller plays a stage.
            StageFailed: a stage cannot work.
        """
        if self._plays:
            raise UsageError(f"the caller plays {listing(self._plays)}: call init_engines, play, seal and wait")
        return run_job(self.job, folder=self._folder, code=self._code)

    def init_engines(self) -> JobService:
        """Start the server and the processes.

        Returns:
            The service: `put_prompts_data`, `get_experience_data` and the others.

        Raises:
            UsageError: the engines of this trainer were started before.
        """
        if self._service is not None:
            raise UsageError("the engines of this trainer were started; make another one for another run")
        placement = placement_of(self.job)
        tokenizer = preflight(self.job, code=self._code).renderer.tokenizer
        folder = self._folder or new_folder(self.job)
        self._stack.enter_context(folder.locked())
        folder.begin(self.job, self._code)
        queue = self._stack.enter_context(tq.connect(self._address(folder), label="trainer"))
        table = create_table(queue, self.job)
        self._service = JobService(queue, table, queue.weights(names.POLICY, keep=versions_kept(self.job)))
        played = [
            stage for stage in stage_jobs(placement.with_shares(self.job), folder.path) if stage.name not in self._plays
        ]
        record = self._stack.enter_context(RunRecord(folder.path, self.job))
        logs = folder.path / "logs"
        environment = shared_variables(self.job, tokenizer, self._code)
        observe = recorded(record, table, RunPage(queue))
        flow = Flow(
            queue,
            played,
            directory=logs,
            observe=observe,
            environment=environment,
            environments=process_variables(self.job, placement),
        )
        self._flow = self._stack.enter_context(flow)
        return self._service

    @property
    def service(self) -> JobService:
        """The service, once `init_engines` was called."""
        if self._service is None:
            raise UsageError("the engines were not started; call init_engines first")
        return self._service

    def wait(self) -> None:
        """Wait until all processes have done their work: seal the service first, if the caller plays ``train``."""
        if self._flow is not None:
            self._flow.run()

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _address(self, folder: RunFolder) -> str:
        if self.job.queue.address:
            return self.job.queue.address
        return self._stack.enter_context(RunServer(folder.path, self.job.queue)).address


Trainer = JobTrainer
"""Its name in AsyncFlow."""
