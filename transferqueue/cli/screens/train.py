"""The progress of a training job: the figures of the latest steps, for the bar or the lines of `transferqueue.cli.screens.demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from transferqueue.cli.screens.demo import Latest
from transferqueue.observe.units import plural

if TYPE_CHECKING:
    from transferqueue.workflows.flow.events import Event

_MEAN_STEPS: Final = 10
_MEASURES: Final = ("reward", "kl", "loss")


class JobFigures(Latest):
    """The latest figures of a job: reward or loss, staleness, rows a second, and how long the trainer waits."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "starting: models load"
        self._steps: list[tuple[float, dict[str, Any]]] = []

    def add(self, event: Event) -> bool:
        """Take in an event; whether it changed anything that is shown."""
        from transferqueue.workflows.flow.events import Figures

        if not isinstance(event, Figures) or event.kind not in ("step", "evaluation"):
            return False
        if event.kind == "evaluation":
            self.phase = _evaluation(event.values)
            return True
        self.step = int(event.values["step"])
        self._steps = [*self._steps, (event.at, event.values)][-_MEAN_STEPS:]
        return True

    def text(self) -> str:
        """One line: reward, loss, staleness, speed, share of time that the trainer waits."""
        if not self._steps:
            return self.phase
        shown = [f"{name} {value:.3f}" for name in ("reward", "loss") if (value := self._mean(name)) is not None]
        shown.append(f"staleness {self._staleness_mean():.1f}")
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

    def _staleness_mean(self) -> float:
        from transferqueue.workflows.flow.reports.loggers import mean_staleness

        return mean_staleness(self._steps[-1][1].get("staleness", {}))


def _evaluation(values: dict[str, Any]) -> str:
    measured = ", ".join(
        f"{name} {values[name]:.3f}" for name in _MEASURES if isinstance(values.get(name), int | float)
    )
    at = f"after step {values['step']}" if values.get("when") == "during" else values.get("when", "")
    return f"held-out, {at}: {measured or 'nothing measured'}, {plural(values.get('rows', 0), 'row')}"
