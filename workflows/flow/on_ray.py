"""A flow whose jobs are Ray tasks, anywhere in the cluster, against a deployment at one address.

Rules, in addition to those of `flow`:

1. Tasks share only the queue. Their events reach the supervisor as they are sent, in order for each task.
2. A flow ends when all tasks have ended with success. A task whose process or node dies is started again, at most `restarts_max`
   times; its rows have gone to other workers by then. A task that fails by itself is started again too, unless it reports that
   a restart is useless. After the last restart the flow fails with `StageFailed`.
3. Times of events are on the supervisor's monotonic clock, as exact as the machines' clocks agree.
4. When the flow ends, for any reason, its tasks are cancelled by force. Their sessions end with them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from transferqueue.errors import DeadlineExceeded, TransferQueueError
from transferqueue.lazy import naming_extra
from transferqueue.workflows.flow.events import Failure, Receiver, Sender
from transferqueue.workflows.flow.flow import RESTARTS_MAX, Observe, StageFailed
from transferqueue.workflows.flow.runner import StageFailedInProcess
from transferqueue.workflows.flow.stage_process import EXIT_FINAL, StageJob, run_job

_PIECE_BYTES: Final = 1 << 16


class _Ended(msgspec.Struct, frozen=True):
    """How a job ended. code: 0, or as of `stage_process`; text: the reason."""

    code: int = 0
    text: str = ""


def run_on_ray(
    address: str,
    jobs: Sequence[StageJob],
    *,
    observe: Observe,
    restarts_max: int = RESTARTS_MAX,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Run `jobs` against the queue at `address` until all have ended with success; blocks. Ray must be initialised (``ray.init``).

    observe: called for each event, with the label of its job, in this thread. options: arguments of Ray's ``options``
    (``num_gpus``, ``resources``, ``scheduling_strategy``, …), by the name of a job or the label of one of its
    processes. Raises `StageFailed` (rule 2).
    """
    with naming_extra("run_on_ray"):
        import ray

    options_by_label = options or {}
    running = [
        _Running(
            ray,
            job,
            address,
            {**options_by_label.get(job.name, {}), **options_by_label.get(job.label, {})},
            restarts_max,
        )
        for job in jobs
    ]
    try:
        while running:
            ready, _ = ray.wait([one.stream for one in running], num_returns=1, fetch_local=False)
            one = next(one for one in running if one.stream is ready[0])
            if one.hear(observe):
                running.remove(one)
    finally:
        for one in running:
            ray.cancel(one.stream, force=True)


class _Running:
    """One job, and the Ray task that runs it."""

    def __init__(self, ray: Any, job: StageJob, address: str, options: dict[str, Any], restarts: int) -> None:
        self._ray = ray
        self._job = job
        self._restarts = restarts
        self._ends: list[str] = []
        self._begin: Callable[[], Any] = lambda: (
            ray.remote(serve_job)
            .options(**{"num_cpus": 1, **options, "num_returns": "streaming", "max_retries": 0, "name": job.label})
            .remote(msgspec.json.encode(job).decode(), address, _clock())
        )
        self._start()

    def _start(self) -> None:
        self._receiver = Receiver()
        self._failure: Failure | None = None
        self.stream = self._begin()

    def hear(self, observe: Observe) -> bool:
        """Receive its next event. Return whether it has ended with success."""
        try:
            item = self._ray.get(next(self.stream))
        except StopIteration:
            return self._ended(_Ended(1, "it ended without a word"))
        except self._ray.exceptions.RayError as error:
            return self._ended(_Ended(1, f"its process or its node died: {error}"))
        if isinstance(item, str):
            return self._ended(msgspec.json.decode(item, type=_Ended))
        for event in self._receiver.feed(item):
            observe(self._job.label, event)
            self._failure = event if isinstance(event, Failure) else self._failure
        return False

    def _ended(self, how: _Ended) -> bool:
        if how.code == 0:
            return True
        self._ends.append(how.text)
        if how.code == EXIT_FINAL or self._restarts <= 0:
            last_words = self._failure.text if self._failure else how.text
            ends = "; then: ".join(dict.fromkeys(self._ends))  # what came after may follow from what came first
            raise StageFailed(
                f'stage "{self._job.label}" failed on Ray, and no try is left: {ends}; its log is in Ray\'s',
                stage=self._job.label,
                last_words=last_words,
            )
        self._restarts -= 1
        self._start()
        return False


def _clock() -> float:
    """Return the time of day at which this machine's monotonic clock was 0."""
    return time.time() - time.monotonic()


def serve_job(job_json: str, address: str, clock: float) -> Iterator[bytes | str]:
    """The Ray task: run a `StageJob` (as JSON). Yield its events as bytes for `Receiver`, then a JSON text that says how it ended.

    clock: `_clock` of the supervisor's machine.
    """
    read_end, write_end = os.pipe()
    ended: list[_Ended] = []
    thread = threading.Thread(
        target=_do,
        args=(msgspec.json.decode(job_json, type=StageJob), address, Sender(write_end, _clock() - clock), ended),
        name="job",
        daemon=True,
    )
    thread.start()
    try:
        while piece := os.read(read_end, _PIECE_BYTES):
            yield piece
    finally:
        os.close(read_end)
    thread.join()
    yield msgspec.json.encode(ended[0]).decode()


def _do(job: StageJob, address: str, emit: Sender, ended: list[_Ended]) -> None:
    how = _Ended(1, "it raised what is no error of the queue; see its log")
    try:
        run_job(job, address, emit)
        how = _Ended()
    except (StageFailedInProcess, DeadlineExceeded) as error:
        how = _Ended(EXIT_FINAL, f"{type(error).__name__}: {error}")
    except TransferQueueError as error:
        how = _Ended(1, f"{type(error).__name__}: {error}")
    finally:
        ended.append(how)
        emit.close()
