"""The parts of a flow: stages and sources over one table, and the values that they use.

A *stage* is a task of a table and a function. Its process repeats: lease rows of the task, call the function with
the batch, ack the rows together with the columns that it returned. A *source* reserves
room for rows, calls its function, and puts the rows. Stages know the table, not each other.

A *factory* builds the function in the process of the stage: it is a context manager that gets a `Context` and yields
the function. Code before the yield runs once, before the first row (load a model); code after it runs once the table
has ended. A factory is named by text (``package.module:function``), so that the process that starts a stage does not
import it.

>>> from contextlib import contextmanager
>>> @contextmanager
... def lengths(context):
...     yield lambda batch: {"length": [len(ids) for ids in batch["response_ids"].list()]}
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult, Producer
from transferqueue.errors import Impossible, NotFound, UsageError
from transferqueue.limits import SECONDS_MAX
from transferqueue.workflows.flow.draining import DrainRequest
from transferqueue.workflows.flow.events import Event, Figures, TimeSpan

T = TypeVar("T")

Where = Sequence[tq.TagIs | tq.VersionBetween | tq.Compare]
"""Predicates of a lease: a row must satisfy all."""

STALL_S: Final = SECONDS_MAX
"""How long a stage waits for a row: until its table ends, with a warning each minute. With a limit, the stage then
fails its flow."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A task, and how many rows one call of its function gets.

    Exactly one of `rows`, `tokens` and `groups` is positive, as in `Table.lease`.

    Args:
        task: the task.
        rows: rows of one call; default 0.
        tokens: the most tokens of one call; default 0.
        groups: whole groups of one call; default 0.
        at_least: take fewer once this many rows, tokens or groups are ready; default 0: wait for the full number.
        slots: rows in work at once, in as many calls as that takes, each of at most `rows` or `groups` and begun as
            soon as there is room for `at_least`: an engine is kept full. The function must then be callable from
            several threads at once. Default 0: one call at a time.
        stall_s: longest wait for rows in seconds; default 1e9: no limit.
        failures_max: end the process with `StageFailedInProcess` after so many failures in a row; default None: never,
            it tries again as the task's `Retry` says.
        where: predicates of rows that the stage leases first; it leases others only while none of these is ready.
            Default: none.

    Raises:
        UsageError: not exactly one of `rows`, `tokens` and `groups`, or slots that do not fit them.
        Impossible: `at_least` is more than one call may get.
    """

    task: tq.Task
    rows: int = 0
    tokens: int = 0
    groups: int = 0
    at_least: int = 0
    slots: int = 0
    stall_s: float = STALL_S
    failures_max: int | None = None
    where: tuple[tq.TagIs | tq.VersionBetween | tq.Compare, ...] = ()

    def __post_init__(self) -> None:
        if sum(amount > 0 for amount in (self.rows, self.tokens, self.groups)) != 1:
            raise UsageError(
                f'stage "{self.task.name}": rows={self.rows}, tokens={self.tokens}, groups={self.groups}; '
                "give exactly one of them"
            )
        if not 0 <= self.at_least <= max(self.rows, self.tokens, self.groups):
            raise Impossible(f'stage "{self.task.name}": at_least={self.at_least} is more than one call may get')
        if self.slots < 0 or (self.slots and (self.tokens or self.slots < self.rows)):
            raise UsageError(
                f'stage "{self.task.name}": slots={self.slots} with rows={self.rows} and tokens={self.tokens}: slots '
                "are rows, at least those of one call; leave tokens out, or slots"
            )

    def lease(
        self, table: tq.Table, most: int | None = None, timeout_s: float | None = None, where: Where = ()
    ) -> tq.Batch:
        """Lease the rows of one call. Waits and raises as `Table.lease` does.

        Args:
            table: the table.
            most: the most rows or groups, if that is less than those of the stage; default None.
            timeout_s: seconds to wait; default None: `stall_s`.
            where: predicates that every row must satisfy; default: none.
        """
        return table.lease(
            self.task.name,
            rows=(self.rows if most is None else min(self.rows, most)) or None,
            tokens=self.tokens or None,
            groups=(self.groups if most is None else min(self.groups, most)) or None,
            at_least=self.at_least or None,
            where=where,
            timeout_s=self.stall_s if timeout_s is None else timeout_s,
            lease_s=self.task.lease_s,
        )


Work = Callable[[tq.Batch], Mapping[str, Any] | Iterable[PartialResult]]
"""The function of a stage: returns columns for all rows of the batch, or yields parts of it as they are finished."""


class LeaseChoice(NamedTuple):
    """The lease terms of a process. where: predicates beside those of its stage. slots: rows in work at once (0: the
    stage's).

    patient: wait for rows that are preferred, for `preference.LOOK_S`, before any other row is taken.
    """

    where: Where = ()
    slots: int = 0
    patient: bool = False


@runtime_checkable
class ChoosingWork(Protocol):
    """The function of a stage that also chooses its process's lease terms: called before each lease."""

    def __call__(self, batch: tq.Batch) -> Mapping[str, Any] | Iterable[PartialResult]:
        """As `Work`."""

    def choice(self) -> LeaseChoice:
        """Return what to lease now. Called from one thread; must not block."""


Produce = Producer
"""The function of a source."""


class Context:
    """The queue, the table and the settings of a stage, and methods to report events. Its factory and function get it.

    Args:
        queue: the queue.
        table: the table of the stage.
        emit: is called with each event, from one thread at a time.
        settings: plain values, for `Context.settings`; default None: none.
        instance: number of this process among those of the stage, from 0; default 0.
        directory: folder of the run; default None: it has none.
        drain: says when the process shall end with the rows that it has; default None: never.
        weights: the queue that has the channels of weights, at another site than the stage's; default None: `queue`.
        shared: what the stages of this process share; default None: the process has one stage.
    """

    def __init__(
        self,
        *,
        queue: tq.Queue,
        table: tq.Table,
        emit: Callable[[Event], None],
        settings: Mapping[str, Any] | None = None,
        instance: int = 0,
        directory: Path | None = None,
        drain: DrainRequest | None = None,
        weights: tq.Queue | None = None,
        shared: Any = None,
    ) -> None:
        self.queue = queue
        self.table = table
        self.emit = emit
        self.instance = instance
        self.directory = directory
        self.drain = drain or DrainRequest()
        self.weights = weights or queue
        self.shared = shared
        self._settings = dict(settings or {})

    def settings(self, into: type[T]) -> T:
        """Return the settings as a value of a type.

        Args:
            into: a dataclass or struct.

        Raises:
            UsageError: they do not fit.
        """
        try:
            return msgspec.convert(self._settings, into)
        except msgspec.ValidationError as error:
            raise UsageError(f"settings {self._settings} are not {into.__name__}: {error}") from error

    def figures(self, kind: str, **values: Any) -> None:
        """Report metrics of this stage, such as the loss of a step.

        Args:
            kind: of the metrics, such as ``"step"``.
            **values: numbers, text and lists of them, by name.
        """
        self.emit(Figures(kind=kind, at=time.monotonic(), values=values))

    @contextmanager
    def span(self, name: str, version: int = -1) -> Iterator[None]:
        """Report the block as a span of the timeline, beside busy and waiting time.

        Args:
            name: of the span.
            version: of the weights that it is about; default -1: of none.
        """
        start = time.monotonic()
        try:
            yield
        finally:
            self.emit(TimeSpan(name=name, start=start, end=time.monotonic(), version=version))


Factory = Callable[[Context], AbstractContextManager[Any]]


def load(named: str) -> Factory:
    """Import a factory.

    Args:
        named: ``package.module:function``.

    Raises:
        NotFound: the module has no such function.
        UsageError: another form, a module that cannot be imported, or an object that cannot be called.
    """
    module_name, _, name = named.partition(":")
    if not module_name or not name:
        raise UsageError(f"factory {named!r} is not named as package.module:function")
    try:
        loaded = getattr(importlib.import_module(module_name), name)
    except AttributeError as error:
        raise NotFound(f"factory {named!r}: module {module_name} has no {name}") from error
    except ImportError as error:
        raise UsageError(f"factory {named!r}: module {module_name} cannot be imported here: {error}") from error
    if not callable(loaded):
        raise UsageError(f"factory {named!r} is {type(loaded).__name__}; give a context manager that yields a function")
    factory: Factory = loaded
    return factory
