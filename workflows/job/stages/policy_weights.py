"""The weights of a generating process: which version a row is generated with, and when the engine takes a new one.

1. Nothing is generated before the first version is there.
2. *Follow in flight* (async): a thread loads each version as it is published, while tokens are drawn. *Follow between
   requests* is the same, but requests that run are finished first and new ones wait.
3. *Exact* (sync, delayed): a row is generated with one version from its first token to its last. In sync mode it is the
   clock at its lease. In delayed mode rows of step k + 1 get the version before the one that step k makes (the delayed
   parameter update of AsyncFlow, arXiv 2507.01663, section 4). The engine changes weights when no row of an older
   version is left in it. Once a batch is full, nothing more begins in sync mode with weights older than those that the
   batch makes (`oversampling`). In the order of the data the delayed and the async mode decide by the row's step alone
   (`step_versions`), and the engine goes back to an older version for a row that is generated once more.
4. *Handed* (colocated): as exact in sync mode; the trainer of this process hands each version over (`device_turns`).
5. A row never begins with weights that would make it stale: it waits for newer ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

import transferqueue as tq
from transferqueue.adapters.protocols import GENERATE_S, Generator, Pause, Unsupported, WeightSource
from transferqueue.adapters.weights import WeightUpdater
from transferqueue.errors import DeadlineExceeded, NotFound, PeerError, UsageError
from transferqueue.workflows.flow.events import SWAP, WEIGHTS
from transferqueue.workflows.flow.loop.full_batches import Due, nothing_due
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job.graph import engine_of
from transferqueue.workflows.job.names import POLICY, PREFILLED
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import has_step_versions, staleness_when_new
from transferqueue.workflows.job.stages.device_turns import DeviceTurns
from transferqueue.workflows.job.stages.step_versions import in_turns, pull_exactly, step_versions

FIRST_S: Final = 3600.0
"""Longest wait for the first weights, which the trainer publishes when its model is loaded."""
NEWER_S: Final = 3600.0
"""Longest wait of a row for weights that are new enough for it, in which the trainer finishes a step."""
_FOLLOW_S: Final = 3600.0
_MAY_BE_FIXED: Final = ("openai", "factory")
"""Kinds of engines that may refuse weights; the job then trains on rows of a fixed policy."""


class PolicyWeights(Protocol):
    """When rows of a batch may be generated."""

    def turns(self, batch: tq.Batch) -> list[tuple[int, list[int]]]:
        """Return (version, positions) in the order in which the rows are to be generated. `at` interprets the
        version."""

    def at(self, version: int) -> AbstractContextManager[None]:
        """Wait until rows of that turn may be generated; the block is their generation. From several threads at
        once."""


@contextmanager
def policy_weights(context: Context, engine: Generator, job: Job, due: Due = nothing_due) -> Iterator[PolicyWeights]:
    """Load the first version into `engine` and yield the weights that the job's mode asks for. An endpoint, or
    an engine of a factory, that takes no weights keeps its own. due: of a job that over-samples.

    Blocks for the first version, at most `FIRST_S`. Raises `DeadlineExceeded` if none comes, and `UsageError` if
    another engine refuses it.
    """
    if isinstance(context.shared, DeviceTurns):
        with context.shared.hosting(context, engine, engine_of(job, context.instance).kind):
            yield HandedWeights(context.shared)
        return
    reads_channel = getattr(engine, "reads_channel", False)
    updater = WeightUpdater(context.weights, POLICY, _updating(context, engine, SWAP), reads_channel=reads_channel)
    try:
        if not updater.follow(FIRST_S):
            raise DeadlineExceeded(
                f'no weights came on channel "{POLICY}" within {FIRST_S:g} s; the trainer publishes them before its '
                "first step"
            )
    except Unsupported as refused:
        _check_fixed(job, context.instance, refused)
        yield FixedWeights()
        return
    if job.pacing.mode != "async" or has_step_versions(job):
        yield ExactWeights(context, job, updater, due)
        return
    with followed_weights(context, engine, job, updater) as weights:
        yield weights


def _check_fixed(job: Job, instance: int, refused: Unsupported) -> None:
    """`UsageError` if an engine that refused weights is of a kind that takes them."""
    kind = engine_of(job, instance).kind
    if kind not in _MAY_BE_FIXED:
        raise UsageError(
            f'engine.kind="{kind}" of generating process {instance} did not take the weights of channel "{POLICY}": '
            f"{refused}; for a server give the directory of model.path on its machine as engine.options.checkpoint"
        ) from refused


def _updating(context: Context, engine: Generator, span: str) -> Callable[[WeightSource, int], None]:
    def update(source: WeightSource, version: int) -> None:
        before = getattr(engine, "prefilled_again", 0)
        with context.span(span, version):
            engine.update_weights(source, version)
        if again := getattr(engine, "prefilled_again", 0) - before:
            context.figures(PREFILLED, tokens=again)

    return update


class FixedWeights:
    """Of an engine that takes no weights (an endpoint)."""

    def turns(self, batch: tq.Batch) -> list[tuple[int, list[int]]]:
        """All rows at once."""
        return [(-1, [*range(len(batch))])]

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """At any time."""
        yield


# ---------------------------------------------------------------- exact versions


class VersionGate:
    """Lets rows of one version into an engine at a time. load: makes a version, or a newer one, the engine's, and
    returns it; called while nothing runs. exact: a newer version will not do; then rows of older ones go first."""

    def __init__(self, load: Callable[[int], int], version: int, *, exact: bool = False) -> None:
        self._load, self._version, self._inside = load, version, 0
        self._exact, self._waiting = exact, list[int]()
        self._changed = threading.Condition()

    @contextmanager
    def at(self, version: int, timeout_s: float) -> Iterator[None]:
        """Enter with `version` or a newer one, once no row of an older version is inside. Raises `DeadlineExceeded`
        after `timeout_s`."""
        with self._changed:
            self._waiting.append(version)
            try:
                self._enter(version, timeout_s)
            finally:
                self._waiting.remove(version)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _enter(self, version: int, timeout_s: float) -> None:
        if not self._changed.wait_for(lambda: self._may_enter(version), timeout_s):
            raise DeadlineExceeded(
                f"rows of version {version} waited {timeout_s:g} s for rows of version {self._version}, and "
                f"{self._inside} of its requests still run"
            )
        if not self._is_at(version):
            self._version = self._load(version)
        self._inside += 1

    def _may_enter(self, version: int) -> bool:
        is_next = not self._exact or version == min(self._waiting)
        return is_next and (self._is_at(version) or not self._inside)

    def _is_at(self, version: int) -> bool:
        return self._version == version if self._exact else self._version >= version


class ExactWeights:
    """Rule 3: rows of a step have one version."""

    def __init__(self, context: Context, job: Job, updater: WeightUpdater, due: Due = nothing_due) -> None:
        self._due = due
        self._channel = context.weights.weights(POLICY)
        self._at_home = context.queue.weights(POLICY)
        self._updater = updater
        self._job = job
        self._by_step = step_versions(context.queue, job) if has_step_versions(job) else None
        self._gate = VersionGate(self._load, updater.version, exact=self._by_step is not None)
        self._newest = updater.version
        self._one: list[str] | None = None
        """A tensor, by which a wait for a version pulls no others; None: none is known yet."""

    def turns(self, batch: tq.Batch) -> list[tuple[int, list[int]]]:
        """Older versions first."""
        return [*in_turns([self._version_of(int(group), batch.version) for group in batch.group_id])]

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """When the engine has that version; changes its weights if no other request uses it."""
        if self._by_step is not None:
            self._wait_for(version)
        with self._gate.at(version, NEWER_S):
            yield

    def _wait_for(self, version: int) -> None:
        """Wait until a version is published, before the gate: rows of older versions go on meanwhile."""
        if version > self._newest:
            with self._channel.pull(above=version - 1, only=self._one, timeout_s=NEWER_S) as weights:
                self._newest, self._one = max(self._newest, weights.version), [next(iter(weights))]

    def _version_of(self, group: int, clock: int) -> int:
        """The version for a row of a group; one that is published. A requeued row belongs to an earlier step: the clock
        decides, or it would become stale again. Where its step alone decides, no row becomes stale.
        """
        if self._by_step is not None:
            return self._by_step.of(group)
        if self._job.pacing.mode == "sync":
            return max(clock, self._due())
        step = group // self._job.trainer.prompts_per_step
        return min(max(step - 1, clock - 1, 0), clock)

    def _load(self, version: int) -> int:
        self._updater.apply(self._pulled(version))
        return self._updater.version

    def _pulled(self, version: int) -> tq.Weights:
        try:
            return self._updater.pull(version=version, timeout_s=NEWER_S)
        except NotFound:
            if self._by_step is not None:
                return pull_exactly(self._at_home, version, NEWER_S)  # a relay may pass over a version
            return self._updater.pull(above=version, timeout_s=NEWER_S)  # freed


# ---------------------------------------------------------------- handed versions


class HandedWeights:
    """Rule 4: of an engine that shares its device with the trainer."""

    def __init__(self, turns: DeviceTurns) -> None:
        self._turns = turns

    def turns(self, batch: tq.Batch) -> list[tuple[int, list[int]]]:
        """All rows at once, with the version of the clock."""
        return [(batch.version, [*range(len(batch))])]

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """When the engine has that version."""
        self._turns.wait(version, NEWER_S)
        yield


# ---------------------------------------------------------------- followed versions


class FollowedWeights:
    """Rule 2: a thread keeps the engine at the newest version. Made by `followed_weights`."""

    def __init__(self, max_staleness: int, version: int) -> None:
        self._max_staleness, self._version = max_staleness, version
        self._changed = threading.Condition()
        self._failure: Exception | None = None

    def turns(self, batch: tq.Batch) -> list[tuple[int, list[int]]]:
        """All rows at once, with the oldest version that may be trained."""
        return [(batch.version - self._max_staleness, [*range(len(batch))])]

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """When the engine has that version or a newer one. Raises the error that ended the updates, if any."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._failure or self._version >= version, NEWER_S)
            if self._failure:
                raise self._failure
            if not ready:
                raise DeadlineExceeded(
                    f"weights of version {version} did not come within {NEWER_S:g} s; the engine has {self._version}"
                )
        yield

    def loaded(self, version: int) -> None:
        """The engine has this version now."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def failed(self, failure: Exception) -> None:
        """No more versions come."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()


@contextmanager
def followed_weights(
    context: Context, engine: Generator, job: Job, updater: WeightUpdater
) -> Iterator[FollowedWeights]:
    """Update weights in a thread until the block ends.

    Leaving waits for an update that has begun: a thread inside an engine's C++ code aborts the process when Python
    ends.
    """
    weights = FollowedWeights(staleness_when_new(job) or 0, updater.version)
    load = _updating(context, engine, WEIGHTS)
    ended, updating = threading.Event(), threading.Lock()

    def update(source: WeightSource, new: int) -> None:
        load(source, new)
        weights.loaded(new)

    def follow_newer() -> None:
        """Apply the newest version at a time when no request runs. The channel may free the version that was announced
        while requests end, so the version is chosen after that."""
        with updating:
            if not ended.is_set():
                with nullcontext() if job.weights.in_flight else _between_requests(engine):
                    updater.follow()

    def follow() -> None:
        try:
            while not ended.is_set():
                if updater.newer(_FOLLOW_S):
                    follow_newer()
        except PeerError:
            return  # the queue is closed
        except Exception as failure:  # noqa: BLE001  (`FollowedWeights.at` raises it)
            weights.failed(failure)

    updater.update = update
    threading.Thread(target=follow, name="weights", daemon=True).start()
    try:
        yield weights
    finally:
        ended.set()
        if updating.acquire(timeout=GENERATE_S):  # an update that hangs longer ends with the process
            updating.release()


@contextmanager
def _between_requests(engine: Generator) -> Iterator[None]:
    engine.pause(Pause.WAIT, timeout_s=GENERATE_S)
    try:
        yield
    finally:
        engine.resume()
