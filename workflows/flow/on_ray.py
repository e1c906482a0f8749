"""A flow whose jobs are Ray actors, anywhere in the cluster, against a deployment at one address.

Rules, in addition to those of `flow`:

1. Actors share only the queue. Their events reach the supervisor as they are sent, in order for each actor.
2. A flow ends when all jobs have ended with success. A job whose process or node dies is started again in another
   actor; its rows have gone to other workers by then, and the event `RESTART` says why. A job that fails by itself is
   started again too, unless it reports that a restart is useless, or failed the same way twice in a row. After
   `restarts_max` restarts without work in between the flow fails with `StageFailed`.
3. Times of events are on the supervisor's monotonic clock, as exact as the machines' clocks agree.
4. When the flow ends, for any reason, its actors are killed. Their sessions end with them.
5. `RayFlow.add` and `remove` change the jobs while `run` runs, as those of `flow.Flow` do; a request is taken up within
   `LOOK_S`. After the deadline of a removal its actor is killed. SIGTERM to the process of an actor is Ray's affair: it
   ends, and rule 2 starts the job again where there is room.
6. Jobs that work only together (`StageJob.together`) die and start together, as in `flow`.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Self

import msgspec

from transferqueue.errors import DeadlineExceeded, PeerError, TransferQueueError
from transferqueue.lazy import naming_extra
from transferqueue.workflows.flow.draining import (
    ADDED,
    DRAIN_S,
    REMOVED,
    DrainRequest,
    Removal,
    Removed,
    check_addition,
    check_removal,
)
from transferqueue.workflows.flow.events import RESTART, Failure, Figures, Receiver, Sender
from transferqueue.workflows.flow.flow import RESTARTS_MAX, Observe, StageFailed, is_whole, started_with
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.flow.processes.stage_process import EXIT_FINAL, StageJob, run_job

_PIECE_BYTES: Final = 1 << 16


class _Ended(msgspec.Struct, frozen=True):
    """How a job ended. code: 0, or as of `stage_process`; text: the reason. is_exception: the job raised it, and it is
    not that a peer was not reachable."""

    code: int = 0
    text: str = ""
    is_exception: bool = False


LOOK_S: Final = 0.5
"""Longest time until a request to add or remove is taken up: a wait for Ray's objects cannot be ended from outside."""


def run_on_ray(
    address: str,
    jobs: Sequence[StageJob],
    *,
    observe: Observe,
    restarts_max: int = RESTARTS_MAX,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run jobs as Ray actors until all have ended with success. Blocks. Ray must be initialised (``ray.init``).

    Args:
        address: of the queue.
        jobs: the processes.
        observe: is called for each event, with the label of its job, in this thread.
        restarts_max: restarts of a job without work in between; default 2.
        options: arguments of the ``options`` of a Ray actor (``num_gpus``, ``resources``, ``scheduling_strategy``, …),
            by the name of a job or the label of one of its processes; default None.
        environment: variables of the actors' processes; default None.

    Raises:
        StageFailed: a stage cannot work.
    """
    terms: dict[str, Any] = {"restarts_max": restarts_max, "options": options, "environment": environment}
    with RayFlow(address, jobs, observe=observe, **terms) as flow:
        flow.run()


class RayFlow:
    """Runs jobs as `run_on_ray` does, and lets jobs come and go meanwhile.

    A context manager: leaving it kills all actors. Events are received only in `run`: call it soon after entering.
    `add` and `remove` may be called from any thread, also from `observe`.

    Args:
        address: of the queue.
        jobs: the processes.
        observe: is called for each event, with the label of its job, in the thread of `run`.
        restarts_max: restarts of a job without work in between; default 2.
        options: as of `run_on_ray`; default None.
        environment: variables of the actors' processes; default None.
        prepare: is called with a name of `StageJob.together` before the jobs of that name start, first or again, when
            none of them lives; default: does nothing.
    """

    def __init__(
        self,
        address: str,
        jobs: Sequence[StageJob],
        *,
        observe: Observe,
        restarts_max: int = RESTARTS_MAX,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[str], None] = lambda together: None,
    ) -> None:
        with naming_extra("run_on_ray"):
            import ray

        self._ray, self._address, self._jobs = ray, address, jobs
        self._environment, self._prepare = dict(environment or {}), prepare
        self._observe, self._restarts_max, self._options = observe, restarts_max, options or {}
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()
        self._labels = {job.label: job for job in jobs}
        self._asked: deque[StageJob | Removal] = deque()
        self._runs = False

    def __enter__(self) -> Self:
        self._runs = True
        try:
            for together in dict.fromkeys(job.together for job in self._jobs if job.together):
                self._prepare(together)
            for job in self._jobs:
                self._start(job)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def pids(self) -> dict[str, int]:
        """Of no process: they are on other machines, whose process ids mean nothing here."""
        return {}

    def add(self, job: StageJob) -> None:
        """Start one more job. Returns at once. Raises as `Flow.add` does.

        Args:
            job: the job.
        """
        with self._lock:
            check_addition(job, self._labels, runs=self._runs)
            self._labels[job.label] = job
            self._asked.append(job)

    def remove(self, label: str, *, deadline_s: float = DRAIN_S) -> Future[Removed]:
        """Ask a job to drain. Returns at once. Raises as `Flow.remove` does.

        Args:
            label: of the job, such as ``"rollout-0"``.
            deadline_s: seconds until it is killed; default 60.

        Returns:
            A future that ends when the job has.
        """
        removal = Removal(label, deadline_s)
        with self._lock:
            check_removal(label, deadline_s, self._labels, runs=self._runs)
            self._asked.append(removal)
        return removal.ended

    def run(self) -> None:
        """Wait until every job has ended with success.

        Raises:
            StageFailed: a stage cannot work.
        """
        while not self._is_over():
            self._do_what_was_asked()
            streams = {running.stream: running for running in self._running.values()}
            ready, _ = (
                self._ray.wait([*streams], num_returns=1, timeout=LOOK_S, fetch_local=False) if streams else ([], [])
            )
            for stream in ready:
                self._hear(streams[stream])
            self._kill_late_drains()

    def close(self) -> None:
        """Kill every actor. A second call does nothing."""
        with self._lock:
            self._runs = False
        for running in self._running.values():
            running.kill()
            if running.removal:
                running.removal.end("killed")
        self._running = {}

    def _is_over(self) -> bool:
        with self._lock:
            self._runs = bool(self._running or self._asked)
            return not self._runs

    def _start(self, job: StageJob) -> None:
        options = {**self._options.get(job.name, {}), **self._options.get(job.label, {})}
        if self._environment:
            own = options.get("runtime_env", {})
            options["runtime_env"] = {**own, "env_vars": self._environment | own.get("env_vars", {})}
        self._running[job.label] = _Running(self._ray, job, self._address, options, self._restarts_max)

    def _start_again(self, dead: _Running) -> None:
        """Start a job again, and with it those that work only together with it (`flow.started_with`)."""
        others = started_with(dead.job, self._jobs, self._running)
        for job in others:
            if job.label in self._running:
                self._running[job.label].kill_and_wait()
        if is_whole(dead.job, others, self._jobs):
            self._prepare(dead.job.together)
        dead.start()
        for job in others:
            with self._lock:
                self._labels.setdefault(job.label, job)
            if job.label in self._running:
                self._running[job.label].start()
            else:
                self._start(job)

    def _do_what_was_asked(self) -> None:
        while self._asked:
            asked = self._asked.popleft()
            if isinstance(asked, StageJob):
                self._start(asked)
                self._report(asked.label, ADDED, {"label": asked.label})
            elif asked.label not in self._running:  # it ended in between
                asked.end("drained")
            else:
                self._running[asked.label].drain(asked)

    def _hear(self, running: _Running) -> None:
        heard = running.hear(self._observe)
        if heard is _Heard.DIED:
            self._report(running.job.label, RESTART, running.restart())
            self._start_again(running)
        if heard is not _Heard.ENDED:
            return
        label = running.job.label
        with self._lock:
            del self._running[label]
            del self._labels[label]
        running.kill()  # it has ended; this frees its process
        if running.removal:
            self._report(label, REMOVED, msgspec.to_builtins(running.removal.end(running.how)))

    def _kill_late_drains(self) -> None:
        for running in self._running.values():
            if running.removal and running.removal.deadline <= time.monotonic():
                running.kill()

    def _report(self, label: str, kind: str, values: dict[str, Any]) -> None:
        self._observe(label, Figures(kind=kind, at=time.monotonic(), values=values))


class _Heard(enum.Enum):
    """A report of a job: an event, its end, or its death, after which it has a try left."""

    EVENT = 0
    ENDED = 1
    DIED = 2


class _Running:
    """One job, and the Ray actor that runs it."""

    def __init__(self, ray: Any, job: StageJob, address: str, options: dict[str, Any], restarts: int) -> None:
        self._ray, self._address, self._options = ray, address, options
        self.job = job
        self._restarts_max = self._restarts = restarts
        self._ends: list[str] = []
        self.removal: Removal | None = None
        self.how = "drained"
        self.start()

    def start(self) -> None:
        """Start an actor for the job; an earlier one is dead."""
        self._receiver = Receiver()
        self._failure: Failure | None = None
        two = {"max_concurrency": 2}  # `drain` is called while `serve` runs
        self._actor = (
            self._ray.remote(StageActor).options(**{"num_cpus": 1, "max_restarts": 0, **self._options, **two}).remote()
        )
        self.stream = self._actor.serve.options(num_returns="streaming", name=self.job.label).remote(
            msgspec.json.encode(self.job).decode(), self._address, _clock()
        )

    def drain(self, removal: Removal) -> None:
        """Ask the actor to drain."""
        if self.removal is not None:
            self.removal.ended_too(removal)
            return
        self.removal = removal
        self._actor.drain.remote()

    def kill(self) -> None:
        """Kill the actor. A second call does nothing."""
        self._ray.kill(self._actor, no_restart=True)

    def kill_and_wait(self) -> None:
        """Kill the actor, and return when it is dead."""
        self.kill()
        with suppress(self._ray.exceptions.RayError):
            while True:
                self._ray.get(self._actor.drain.remote())

    def hear(self, observe: Observe) -> _Heard:
        """Receive its next event. Ended: with success, or since it was removed."""
        try:
            item = self._ray.get(next(self.stream))
        except StopIteration:
            return self._ended(_Ended(1, "it ended without a word"))
        except self._ray.exceptions.RayError as error:
            return self._ended(_Ended(1, f"its process or its node died: {error}"))
        if isinstance(item, str):
            return self._ended(msgspec.json.decode(item, type=_Ended))
        for event in self._receiver.feed(item):
            observe(event.stage or self.job.label, event)
            self._failure = event if isinstance(event, Failure) else self._failure
        return _Heard.EVENT

    def _ended(self, how: _Ended) -> _Heard:
        if self.removal is not None:
            self.how = "drained" if how.code == 0 else "killed"
            return _Heard.ENDED
        if how.code == 0:
            return _Heard.ENDED
        if self._receiver.progressed:
            self._restarts, self._ends = self._restarts_max, []
        is_same = how.is_exception and self._ends[-1:] == [how.text]
        self._ends.append(how.text)
        if how.code == EXIT_FINAL or self._restarts <= 0 or is_same:
            last_words = self._failure.text if self._failure else how.text
            ends = "; then: ".join(dict.fromkeys(self._ends))  # a later failure may follow from the first
            raise StageFailed(
                f'stage "{self.job.label}" failed on Ray, and no try is left: {ends}; its log is in Ray\'s',
                stage=self.job.label,
                last_words=last_words,
            )
        self._restarts -= 1
        return _Heard.DIED

    def restart(self) -> dict[str, Any]:
        """The values of the event `RESTART` about its last death."""
        following = (
            f"it is started again, restart {self._restarts_max - self._restarts} of {self._restarts_max} without work "
            "in between; its log is in Ray's"
        )
        return {"label": self.job.label, "text": f"{self.job.label} ended: {self._ends[-1]}", "next": following}


def _clock() -> float:
    """Return the time of day at which this machine's monotonic clock was 0."""
    return time.time() - time.monotonic()


class StageActor:
    """The Ray actor of one job. Two of its methods run at once."""

    def __init__(self) -> None:
        self._drain = DrainRequest()

    def drain(self) -> None:
        """Ask the job to end with the rows that it has."""
        self._drain.request()

    def serve(self, job_json: str, address: str, clock: float) -> Iterator[bytes | str]:
        """Run a `StageJob` (as JSON). Yield its events as bytes for `Receiver`, then a JSON text that says how it
        ended.

        clock: `_clock` of the supervisor's machine.
        """
        read_end, write_end = os.pipe()
        ended: list[_Ended] = []
        job, emit = msgspec.json.decode(job_json, type=StageJob), Sender(write_end, _clock() - clock)
        thread = threading.Thread(target=_do, args=(job, address, emit, self._drain, ended), name="job", daemon=True)
        thread.start()
        try:
            while piece := os.read(read_end, _PIECE_BYTES):
                yield piece
        finally:
            os.close(read_end)
        thread.join()
        yield msgspec.json.encode(ended[0]).decode()


def _do(job: StageJob, address: str, emit: Sender, drain: DrainRequest, ended: list[_Ended]) -> None:
    how = _Ended(1, "it was ended; see its log")
    try:
        if job.place:
            os.chdir(job.place)
        run_job(job, address, emit, drain)
        how = _Ended()
    except FileNotFoundError as error:
        how = _Ended(EXIT_FINAL, f"{error}: folder and files of the run must lie where every node sees them")
    except (StageFailedInProcess, DeadlineExceeded) as error:
        how = _Ended(EXIT_FINAL, f"{type(error).__name__}: {error}")
    except TransferQueueError as error:
        how = _Ended(1, f"{type(error).__name__}: {error}", not isinstance(error, PeerError))
    except Exception as error:
        how = _Ended(1, f"{type(error).__name__}: {error}", True)
        raise
    finally:
        ended.append(how)
        emit.close()
