"""Checks that every stage must pass, run through a queue, and the subject that they test.

Use them as the checks of generators (`conformance.generators`), with a `StageSubject`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import transferqueue as tq
from transferqueue.adapters.protocols import StageFunction, Unsupported
from transferqueue.errors import FlowSignal
from transferqueue.testing.conformance.report import require
from transferqueue.workflows.flow import stage as flow
from transferqueue.workflows.flow.events import Event, Failure
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_stage

_TASK: Final = "stage"
_STALL_S: Final = 120.0


class StageSubject(Protocol):
    """A stage under test."""

    repeats: bool
    """Whether a row gives the same results every time, whatever other rows are in its batch."""

    def open(self) -> StageFunction:
        """Return the stage, ready to be called. It may return the same stage every time."""

    def columns(self) -> Mapping[str, Any]:
        """Return two rows or more, as `Table.put` takes them, with the fields that the stage needs. All differ."""


@contextmanager
def _filled(subject: StageSubject, stage: StageFunction) -> Iterator[tq.Table]:
    """A sealed table of the subject's rows, with the stage as its task."""
    task = tq.Task(_TASK, needs=tuple(stage.needs), gives=tuple(stage.gives))
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[task], retention=tq.Manual())
        table.put(**subject.columns())
        table.seal()
        yield table


def _serve(table: tq.Table, stage: StageFunction, rows: int) -> None:
    """Serve all rows, `rows` at a time; `RuleBroken` with the error that the stage raised."""
    events: list[Event] = []
    work = flow.Stage(task=table.tasks[_TASK], rows=rows, at_least=1, stall_s=_STALL_S, failures_max=1)
    try:
        run_stage(table, work, stage, emit=events.append)
    except (StageFailedInProcess, FlowSignal) as error:
        if isinstance(error.__cause__, Unsupported):
            raise error.__cause__ from None
        require(False, "the stage serves every row", error)
    failures = [event.text for event in events if isinstance(event, Failure)]
    require(not failures, "the stage serves every row", failures)


def _given(table: tq.Table, stage: StageFunction) -> list[dict[str, Any]]:
    """The results of each row, as plain values."""
    columns = table.read(fields=tuple(stage.gives))
    return [
        dict(zip(stage.gives, row, strict=True)) for row in zip(*(columns[n].list() for n in stage.gives), strict=True)
    ]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


# ---------------------------------------------------------------- the checks


def it_says_what_it_needs_and_gives(subject: StageSubject) -> None:
    """The stage names the fields that it needs and gives; no field is both."""
    stage = subject.open()
    for names in (stage.needs, stage.gives):
        require(not isinstance(names, str) and bool(names), "needs and gives are sequences of names", names)
        require(all(isinstance(name, str) for name in names), "needs and gives are names", names)
    require(not set(stage.needs) & set(stage.gives), "what it needs it does not give", (stage.needs, stage.gives))


def every_row_gets_every_field(subject: StageSubject) -> None:
    """Each row of a batch is given each field that the stage gives, once, and no other."""
    stage = subject.open()
    with _filled(subject, stage) as table:
        before = set(table.fields)
        rows = table.audit().rows_put
        _serve(table, stage, rows)
        require(set(table.fields) - before <= set(stage.gives), "it gives nothing else", set(table.fields) - before)
        given = _given(table, stage)
        require(len(given) == rows, "each row has each field", f"{len(given)} of {rows} rows have all")
        require(table.audit().rows_done == rows, "each row is done", table.audit())


def it_can_be_called_again(subject: StageSubject) -> None:
    """It serves one table after another, in batches of any size."""
    stage = subject.open()
    for share in (2, 1):
        with _filled(subject, stage) as table:
            rows = table.audit().rows_put
            _serve(table, stage, max(1, rows // share))
            require(table.audit().rows_done == rows, "each row is done", table.audit())


def a_row_does_not_depend_on_its_batch(subject: StageSubject) -> None:
    """A row gets the same results alone and among others."""
    if not subject.repeats:
        raise Unsupported("draws at random: the same row may get something else the next time")
    stage = subject.open()
    columns = []
    for together in (True, False):
        with _filled(subject, stage) as table:
            _serve(table, stage, table.audit().rows_put if together else 1)
            columns.append([{name: _plain(value) for name, value in row.items()} for row in _given(table, stage)])
    require(columns[0] == columns[1], "rows one by one get what they get together", columns)


STAGE_CHECKS: Final[tuple[Callable[[StageSubject], None], ...]] = (
    it_says_what_it_needs_and_gives,
    every_row_gets_every_field,
    it_can_be_called_again,
    a_row_does_not_depend_on_its_batch,
)
