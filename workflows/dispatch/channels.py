"""Plans and reports of engines between processes: versions of small weight channels, one value each.

A channel keeps the newest value, wakes its waiting readers, and outlives the process that wrote it. Each channel has
one writer at a time. Names begin with the table's, so that both are on the same coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import msgspec
import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Generator
from transferqueue.errors import DeadlineExceeded, NotFound, PeerError, UsageError
from transferqueue.policies import Compare
from transferqueue.workflows.dispatch.decode import MeteredGenerator
from transferqueue.workflows.flow.stage import LeaseChoice
from transferqueue.workflows.planner.batch_plan import EngineLane, EngineReport, Plan
from transferqueue.workflows.planner.engine_times import DecodeCurve

T = TypeVar("T")
_FOLLOW_S: Final = 3600.0
_VALUE: Final = "value"


def plan_channel(table: str) -> str:
    """Return the name of the channel of a table's plans."""
    return f"{table}/dispatch"


def report_channel(table: str, engine: str) -> str:
    """Return the name of the channel in which an engine tells of itself."""
    return f"{table}/decode/{engine}"


def publish(queue: tq.Queue, channel: str, value: object, *, keep: int = 1, version: int | None = None) -> int:
    """Publish `value` as the next version of `channel`, of which `keep` are kept, and return the version. Blocks for
    two calls; for one if it is told which `version` is next."""
    if version is None:
        known = queue.stats().channels.get(channel)
        version = 0 if known is None else known.newest + 1
    encoded = np.frombuffer(msgspec.json.encode(value), np.uint8)
    queue.weights(channel, keep=keep).publish(version, {_VALUE: encoded})
    return version


def newest(queue: tq.Queue, channel: str, form: type[T], *, above: int = -1, timeout_s: float = 0.0) -> tuple[int, T]:
    """Return the newest version above `above`, and its value. Raises `DeadlineExceeded` if there is none within
    `timeout_s`, and `UsageError` if it is no `form`.
    """
    with queue.weights(channel).pull(above=above, timeout_s=timeout_s) as pulled:
        return pulled.version, _decoded(pulled, channel, form)


def since(queue: tq.Queue, channel: str, form: type[T], version: int) -> tuple[int, list[T]]:
    """Return the newest version, and the values of all versions after `version` that are kept, the oldest first; all
    of them if the channel began anew. Raises `UsageError` as `newest` does."""
    known = queue.stats().channels.get(channel)
    if known is None or known.newest < version:
        version = -1
    values: list[T] = []
    for each in () if known is None else known.kept:
        if each > version:
            with suppress(NotFound), queue.weights(channel).pull(version=each, timeout_s=0) as pulled:
                values.append(_decoded(pulled, channel, form))
            version = each
    return version, values


def _decoded(pulled: tq.Weights, channel: str, form: type[T]) -> T:
    try:
        return msgspec.json.decode(bytes(pulled.numpy()[_VALUE]), type=form)
    except msgspec.DecodeError as error:
        raise UsageError(
            f'channel "{channel}" has no {form.__name__}: {error}; another program writes to it'
        ) from error


def live_engines(queue: tq.Queue, table: str) -> list[EngineReport]:
    """Return the engines of a table whose sessions live, by name."""
    prefix = report_channel(table, "")
    channels = queue.stats().channels
    live = sorted(name for name, stats in channels.items() if name.startswith(prefix) and stats.applied)
    return [newest(queue, channel, EngineReport)[1] for channel in live]


class PlanFollower:
    """The newest plan of a table for one engine. A thread waits at the server for the next one, until `close`."""

    def __init__(self, queue: tq.Queue, table: str, engine: str, slots: int) -> None:
        self._queue, self._channel, self._engine = queue, plan_channel(table), engine
        self._slots = slots
        self._plan = Plan()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._follow, name="plan", daemon=True)
        self._thread.start()

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        return self._plan

    def wait_for(self, condition: Callable[[LeaseChoice], bool], timeout_s: float) -> bool:
        """Wait until the newest plan gives a `choice` that satisfies `condition`; return False if none does within
        `timeout_s`.
        """
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.choice()), timeout_s)

    def choice(self) -> LeaseChoice:
        """Return which rows the engine leases first now, and how many it runs at once."""
        plan = self._plan
        lane = plan.lanes.get(self._engine, EngineLane("any", self._slots))
        if lane.lane == "any":
            return LeaseChoice(slots=lane.slots)
        return LeaseChoice((Compare("tokens", ">=" if lane.lane == "tail" else "<", plan.cut),), lane.slots)

    def close(self) -> None:
        """Take no more plans."""
        self._ended = True

    def _follow(self) -> None:
        version = -1
        while not self._ended:
            try:
                version, plan = newest(self._queue, self._channel, Plan, above=version, timeout_s=_FOLLOW_S)
            except DeadlineExceeded:
                continue
            except PeerError:
                return  # the queue is closed
            with self._changed:
                self._plan = plan
                self._changed.notify_all()


@contextmanager
def dispatched(
    queue: tq.Queue, table: str, engine: Generator, *, name: str, slots: int
) -> Iterator[tuple[MeteredGenerator, PlanFollower]]:
    """Measure `engine` and follow the plans of `table` as the engine `name`; yield the engine to call, and the
    follower.

    The engine is announced at once, without a curve, and reports as it is measured.
    """

    def report(curve: DecodeCurve) -> None:
        channel = report_channel(table, name)
        version = publish(queue, channel, EngineReport(name=name, slots=slots, curve=curve))
        queue.weights(channel).applied(version)  # the queue forgets this with the session: see `live_engines`

    metered = MeteredGenerator(engine, _one_at_a_time(report))
    report(DecodeCurve())
    follower = PlanFollower(queue, table, name, slots)
    try:
        yield metered, follower
    finally:
        follower.close()


def _one_at_a_time(report: Callable[[DecodeCurve], object]) -> Callable[[DecodeCurve], None]:
    """A report from several threads at once: one writes, the others leave it to the next report."""
    lock = threading.Lock()

    def tell(curve: DecodeCurve) -> None:
        if lock.acquire(blocking=False):
            try:
                report(curve)
            finally:
                lock.release()

    return tell
