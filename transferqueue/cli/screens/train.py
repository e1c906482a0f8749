"""The progress of a training job, as a bar at a terminal or a line every ten steps; at the end, a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from transferqueue.observe.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from transferqueue.workflows.flow.events import Event
    from transferqueue.workflows.job.run.run import JobOutcome

LINE_EVERY_STEPS: Final = 10
_MEAN_STEPS: Final = 10


class Watch(Protocol):
    """Receives every event of a run."""

    def __call__(self, label: str, event: Event) -> None:
        """Show an event of process ``label``."""

    def started(self, labels: Iterable[str]) -> None:
        """Show the labels of the running processes."""


class JobFigures:
    """The latest figures of a job: reward or loss, staleness, rows a second, share of time that the trainer waits."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = "starting: models load"
        self._steps: list[tuple[float, dict[str, Any]]] = []

    def add(self, event: Event) -> bool:
        """Add an event. Returns whether a shown figure changed."""
        from transferqueue.workflows.flow.events import Figures

        if not isinstance(event, Figures) or event.kind not in ("step", *_LINES):
            return False
        if event.kind in _LINES:
            self.phase = _LINES[event.kind](event.values)
            return True
        self.step = int(event.values["step"])
        self._steps = [*self._steps, (event.at, event.values)][-_MEAN_STEPS:]
        return True

    def text(self) -> str:
        """One line: reward, loss, staleness, speed, share of time that the trainer waits."""
        if not self._steps:
            return self.phase
        shown = [f"{name} {value:.3f}" for name in ("reward", "loss") if (value := self._mean(name)) is not None]
        shown.append(f"staleness {self._steps[-1][1].get('staleness_mean', 0.0):.1f}")
        rows, tokens, idle = map(self._sum, ("rows", "tokens", "idle_s"))
        if seconds := self._seconds():
            shown += [
                f"{rows / seconds:,.1f} rows/s",
                f"{tokens / seconds:,.0f} tokens/s",
                f"idle {idle / seconds:.0%}",
            ]
        return "  ".join(shown)

    def _mean(self, name: str) -> float | None:
        values = [values[name] for _, values in self._steps if isinstance(values.get(name), int | float)]
        return sum(values) / len(values) if values else None

    def _sum(self, name: str) -> float:
        return float(sum(values.get(name, 0) for _, values in self._steps[1:]))

    def _seconds(self) -> float:
        return self._steps[-1][0] - self._steps[0][0]


def _evaluation(values: dict[str, Any]) -> str:
    from transferqueue.workflows.job.names import MEASURES

    measured = ", ".join(f"{name} {values[name]:.3f}" for name in MEASURES if isinstance(values.get(name), int | float))
    at = f"after step {values['step']}" if values.get("when") == "during" else values.get("when", "")
    if (asked := values.get("asked_version")) is not None:
        at = f"{at} (late: of version {values['version']}, not {asked})"
    return f"held-out, {at}: {measured or 'nothing measured'}, {plural(values.get('rows', 0), 'row')}"


def _warning(values: dict[str, Any]) -> str:
    return f"warning, step {values['step']}: {values['text']}"


_LINES: Final = {"evaluation": _evaluation, "warning": _warning}
"""Kinds of events that are lines of their own."""


class Lines:
    """Plain lines, for a pipe or a file."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._figures = console, steps, JobFigures()

    def started(self, labels: Iterable[str]) -> None:
        """Name the processes."""
        self._console.print(_processes(labels), soft_wrap=True)

    def __call__(self, label: str, event: Event) -> None:
        """Print a line if ``event`` is an evaluation, a warning or every tenth step."""
        if not self._figures.add(event):
            return
        if getattr(event, "kind", "") in _LINES:
            self._console.print(self._figures.phase, soft_wrap=True)
        elif self._figures.step % LINE_EVERY_STEPS == 0:
            self._console.print(f"step {self._figures.step}/{self._steps}  {self._figures.text()}", soft_wrap=True)


class Bar:
    """A live bar; evaluations and warnings stay above it as lines."""

    def __init__(self, console: Console, steps: int) -> None:
        self._figures = JobFigures()
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(self._figures.text(), total=steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, labels: Iterable[str]) -> None:
        """Name the processes, above the bar."""
        self._progress.console.print(_processes(labels), soft_wrap=True)

    def __call__(self, label: str, event: Event) -> None:
        """Show what ``event`` changed."""
        if not self._figures.add(event):
            return
        if getattr(event, "kind", "") in _LINES:
            self._progress.console.print(self._figures.phase, soft_wrap=True)
        self._progress.update(self._task, completed=self._figures.step, description=self._figures.text())


def _processes(labels: Iterable[str]) -> str:
    names = list(labels)
    return f"{plural(len(names), 'process')}: {', '.join(names)}"


@contextmanager
def watched(to: Console, steps: int) -> Iterator[Watch]:
    """Show the progress of a run of so many steps."""
    if not to.is_terminal:
        yield Lines(to, steps)
        return
    with Bar(to, steps) as bar:
        yield bar


def show_outcome(outcome: JobOutcome, to: Console) -> None:
    """Print the summary as a table, and where the files are."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in outcome.summary.rows():
        table.add_row(Text(name, style="dim"), Text(value))
    to.print()
    to.print(table)
    to.print()
    for path in outcome.files:
        to.print(Text.assemble(("wrote", "dim"), f" {path}"), soft_wrap=True)
