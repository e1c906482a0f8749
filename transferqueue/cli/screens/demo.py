"""The progress of a demo: a bar with the latest figures at a terminal, else a line every ten steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from transferqueue.observe.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from transferqueue.workflows.flow.events import Event

LINE_EVERY_STEPS: Final = 10
_MEAN_STEPS: Final = 10


class Watch(Protocol):
    """Receives every event of a run."""

    def __call__(self, label: str, event: Event) -> None:
        """Take in an event of process ``label``."""

    def started(self, labels: Iterable[str]) -> None:
        """The processes with these labels run now."""


class Latest:
    """The latest figures of a run, as text."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = "starting; warm-up of the model"
        self._rewards: list[float] = []
        self._staleness: dict[str, int] = {}
        self._times: list[tuple[float, int]] = []

    def add(self, event: Event) -> bool:
        """Take in an event; whether it changed anything that is shown."""
        from transferqueue.workflows.flow.events import Figures

        if not isinstance(event, Figures):
            return False
        if event.kind == "evaluation":
            self._evaluated(event.values)
        elif event.kind == "step":
            self._stepped(event.at, event.values)
        return True

    def text(self) -> str:
        """One line: reward, staleness, speed."""
        if not self.step:
            return self.phase
        reward = sum(self._rewards) / len(self._rewards)
        return f"reward {reward:.3f}  staleness {self._mean_staleness():.1f}  {self._rows_per_s():,.0f} rows/s"

    def _evaluated(self, values: dict[str, Any]) -> None:
        self.phase = (
            f"held-out reward {values['when']}: {values['reward']:.3f}, greedy accuracy {values['accuracy']:.3f}"
        )

    def _stepped(self, at: float, values: dict[str, Any]) -> None:
        self.step = values["step"]
        self._rewards = [*self._rewards, values["reward"]][-_MEAN_STEPS:]
        self._times = [*self._times, (at, values["rows"])][-_MEAN_STEPS:]
        self._staleness = values["staleness"]

    def _mean_staleness(self) -> float:
        rows = sum(self._staleness.values())
        return sum(int(behind) * count for behind, count in self._staleness.items()) / max(1, rows)

    def _rows_per_s(self) -> float:
        seconds = self._times[-1][0] - self._times[0][0]
        return sum(rows for _, rows in self._times[1:]) / seconds if seconds > 0 else 0.0


class Lines:
    """Plain lines, for a pipe or a file."""

    def __init__(self, console: Console, steps: int, figures: Latest | None = None) -> None:
        self._console = console
        self._steps = steps
        self._figures = figures or Latest()

    def started(self, labels: Iterable[str]) -> None:
        """Name the processes."""
        self._console.print(_processes(labels), soft_wrap=True)

    def __call__(self, label: str, event: Event) -> None:
        """Print a line if ``event`` is an evaluation or every tenth step."""
        if not self._figures.add(event):
            return
        if getattr(event, "kind", "") == "evaluation":
            self._console.print(self._figures.phase)
        elif self._figures.step % LINE_EVERY_STEPS == 0:
            self._console.print(f"step {self._figures.step}/{self._steps}  {self._figures.text()}", soft_wrap=True)


class Bar:
    """A live bar; evaluations stay above it as lines."""

    def __init__(self, console: Console, steps: int, figures: Latest | None = None) -> None:
        self._figures = figures or Latest()
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
        if getattr(event, "kind", "") == "evaluation":
            self._progress.console.print(self._figures.phase)
        self._progress.update(self._task, completed=self._figures.step, description=self._figures.text())


def _processes(labels: Iterable[str]) -> str:
    names = list(labels)
    return f"{plural(len(names), 'process')}: {', '.join(names)}"
